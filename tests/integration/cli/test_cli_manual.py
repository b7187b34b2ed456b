"""The installed manual."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.support.messages import codes
from tests.support.verbs import Clusterctl

ROOT = Path(__file__).parents[3]
DOCS = ROOT / "docs"
SKILL = ROOT / "skills" / "clusterctl" / "SKILL.md"


def test_manual_lists_its_pages_with_their_titles(cli: Clusterctl) -> None:
    pages = {row["page"]: row["title"] for row in cli("manual", "-o", "json").json["pages"]}
    assert pages.keys() == {
        path.relative_to(DOCS).with_suffix("").as_posix() for path in DOCS.rglob("*.md")
    }
    assert pages["json"] == (DOCS / "json.md").read_text().splitlines()[0].removeprefix("# ")


@pytest.mark.parametrize(
    "name", ["howto/attach", "attach", "../howto/attach.md#files", "attach.md"]
)
def test_manual_prints_a_page_by_its_name_its_last_part_or_a_link(
    cli: Clusterctl, name: str
) -> None:
    text = (DOCS / "howto" / "attach.md").read_text()
    assert cli("manual", name).stdout == text
    shown = cli("manual", name, "-o", "json").json
    assert (shown["page"], shown["text"]) == ("howto/attach", text)


@pytest.mark.parametrize(("name", "near"), [("confguration", "configuration"), ("zzz", "")])
def test_manual_names_the_page_nearest_to_one_it_lacks(
    cli: Clusterctl, name: str, near: str
) -> None:
    shown = cli("manual", name, "-o", "json", rc=2)
    assert codes(shown) == ["not-found/page"]
    assert near in shown.json["failures"][0]["fix"]


def test_skill_names_pages_of_the_manual(cli: Clusterctl) -> None:
    named = re.findall(r"clusterctl manual ([a-z/-]+)", SKILL.read_text())
    assert named
    for name in named:
        cli("manual", name)
