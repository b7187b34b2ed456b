"""Check the types of the Python programs in README.md and docs/.

A program is a fenced block of Python with a file name. Those that import clusterctl are held to
`mypy --strict`; functions of other programs, which users run as jobs, need no annotations.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Final

from tests.support.manual import ROOT, Block, blocks, pages

# Programs of jobs use packages that are not installed here.
_OF_JOBS: Final = (
    "# mypy: allow-untyped-defs, allow-untyped-calls, "
    'disable-error-code="import-not-found, import-untyped"'
)
# That of `mypy` without arguments, which has checked the package's own modules already.
_CACHE: Final = ROOT / ".mypy_cache"


def main() -> int:
    """Print each error of a program with its page and line. Return mypy's exit code."""
    programs = [
        block
        for page in pages()
        for block in blocks(page)
        if block.language == "python" and block.file
    ]
    if not programs:
        print("README.md and docs/ have no block ```python NAME.py", file=sys.stderr)
        return 1
    with tempfile.TemporaryDirectory() as folder:
        files = {_write(Path(folder), block): block for block in programs}
        options = [
            f"--cache-dir={_CACHE}",
            f"--config-file={ROOT / 'pyproject.toml'}",
        ]
        done = subprocess.run(
            [sys.executable, "-m", "mypy", *options, *files],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
    print(_with_pages(done.stdout, files) + done.stderr, end="")
    return done.returncode


def _write(folder: Path, block: Block) -> str:
    """Write a program, whose lines have the numbers of its page. Return the file's name."""
    page = block.page.relative_to(ROOT).with_suffix("")
    name = re.sub(r"\W", "_", f"{page}_{block.line}_{block.file}") + ".py"
    first = "" if "import clusterctl" in block.text else _OF_JOBS
    (folder / name).write_text(first + "\n" * block.line + block.text)
    return name


def _with_pages(output: str, files: dict[str, Block]) -> str:
    for name, block in files.items():
        output = output.replace(f"{name}:", f"{block.page.relative_to(ROOT)}:")
    return output


if __name__ == "__main__":
    sys.exit(main())
