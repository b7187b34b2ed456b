"""docs/cli.md, docs/platforms.md and job_keywords.py are written from the code and the tests, and are
up to date.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from clusterctl.cli.main import app
from scripts import cli_reference, job_keywords, platforms
from scripts.cli_reference import verbs

ROOT = platforms.ROOT
SKILL = ROOT / "skills" / "clusterctl"


def test_generated_pages_are_up_to_date() -> None:
    assert cli_reference.PAGE.read_text() == cli_reference.reference(), "run `make reference`"
    assert platforms.PAGE.read_text() == platforms.page(), "run `make reference`"
    assert job_keywords.FILE.read_text() == job_keywords.text(), "run `make reference`"


def test_skill_is_as_agents_expect_it() -> None:
    """The rules of agentskills.io/specification: the name is the folder's, and the page is short."""
    _, head, body = (SKILL / "SKILL.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(head)
    assert fields["name"] == SKILL.name
    assert 0 < len(fields["description"]) <= 1024
    assert len(fields["compatibility"]) <= 500
    assert len(body) / 4 < 5000  # tokens


def test_readme_names_every_page_of_the_manual() -> None:
    pages = {str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")}
    assert pages - set(re.findall(r"\((docs/[^)#]+)", (ROOT / "README.md").read_text())) == {
        # For contributors.
        "docs/architecture.md",
    }


@pytest.mark.parametrize("words", ['"real", "debian-14"', '"nearly", "debian-12"'])
def test_marker_of_an_unknown_platform_or_way_is_refused(words: str, tmp_path: Path) -> None:
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "test_it.py").write_text(
        f"pytestmark = pytest.mark.platform({words})\ndef test_it(): ...\n"
    )
    with pytest.raises(ValueError, check=lambda error: words.split('"')[1] in str(error)):
        platforms.page(tmp_path)


def test_readme_first_screen_matches_the_platform_table() -> None:
    """What it calls proven ran for real in `make test`; what it says ran on stand-ins never ran for
    real.
    """
    first_screen = (platforms.ROOT / "README.md").read_text().partition("## ")[0]
    proven, _, stood_in = first_screen.partition("**Proven**")[2].partition(
        "**Tested only on stand-ins**"
    )
    rows = [
        line.strip("| ").split(" | ")
        for line in platforms.page().splitlines()
        if line.count(" | ") == 5
    ]
    real = {row[0]: row[2].strip() for row in rows}
    assert all(real[name] for name in ("Debian 12", "Debian 13"))
    assert "Debian 12 and 13" in proven
    never = {
        "Google Cloud": ("Google's API", "Terraform", "instances"),
        "Rocky Linux": (
            "Rocky Linux 9, AlmaLinux 9, RHEL 9",
            "Rocky Linux 10, AlmaLinux 10, RHEL 10",
        ),
        "Ubuntu": ("Ubuntu 24.04",),
        "NVIDIA GPUs": ("NVIDIA driver: nvidia-smi, NVML, XIDs", "CuPy, cuBLAS, NCCL on a GPU"),
        "InfiniBand": ("InfiniBand, RoCE",),
        "NFS": ("NFS, Filestore",),
        "SELinux": ("SELinux",),
    }
    for words, names in never.items():
        assert words in stood_in
        assert not any(real[name] for name in names), words


def test_page_of_verbs_explains_every_verb_and_option() -> None:
    for path, command in verbs(app):
        assert command.help, path
        for param in command.params:
            assert getattr(param, "help", ""), f"{' '.join(path)}: {param.name}"


def test_list_of_verbs_says_the_first_sentence_of_each() -> None:
    for path, command in verbs(app):
        *group, name = path
        verb = app.commands[group[0]].commands[name] if group else app.commands[name]
        assert f"{command.help} ".replace("\n", " ").startswith(f"{verb.help} "), path


def test_scope_page_names_missing_parts() -> None:
    text = (platforms.ROOT / "docs" / "scope.md").read_text()
    lines = [line.strip("| ").split(" | ") for line in text.splitlines() if line.startswith("| ")]
    rows = [row for row in lines if row[0] not in {"named", "---"}]
    assert len(rows) > 100
    assert {len(row) for row in rows} == {3}
    assert len({name for name, _, _ in rows}) == len(rows)
    assert {state for _, state, _ in rows} == {"done", "partly", "adapted", "out"}
    less = re.compile("stand-in|on a double|only rendered|never ran")
    for name, state, how in rows:
        assert how.strip(), name
        assert ("Missing: " in how) == (state == "partly"), name
        assert state != "done" or not less.search(how), name
