"""tests/support/README.md lists the modules of tests/support."""

import re
from pathlib import Path

SUPPORT = Path(__file__).parents[2] / "support"
README = (SUPPORT / "README.md").read_text()


def test_readme_lists_each_module_of_the_folder_and_no_other() -> None:
    rows = [line.split("|")[1] for line in README.splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall("`([^`]+)`", row)]
    modules = [path.name for path in SUPPORT.glob("*.py")]
    folders = [f"{path.name}/" for path in SUPPORT.iterdir() if path.is_dir()]
    assert sorted(listed) == sorted(name for name in (*modules, *folders) if "__" not in name)
