"""The links between the pages of the project lead somewhere."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
FOLDERS = ("docs", "examples", "skills")
PAGES = sorted(
    [*ROOT.glob("*.md"), *(page for name in FOLDERS for page in (ROOT / name).rglob("*.md"))]
)
LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
CODE = re.compile(FENCE.pattern + r"|`[^`\n]*`", re.MULTILINE | re.DOTALL)


def headings(page: Path) -> set[str]:
    """The anchors of a page, as GitHub makes them of its headings."""
    titles = re.findall(r"^#+ +(.+)$", FENCE.sub("", page.read_text()), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def dead(page: Path) -> Iterator[str]:
    """The links of a page to files and headings that do not exist; the web's are not followed."""
    for link in LINK.findall(CODE.sub("", page.read_text())):
        if re.match(r"[a-z]+:", link):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        if not target.exists() or (
            anchor and target.suffix == ".md" and anchor not in headings(target)
        ):
            yield link


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_link_on_a_page_has_a_target(page: Path) -> None:
    assert list(dead(page)) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_path_of_the_project_on_a_page_exists(page: Path) -> None:
    named = re.findall(
        r"`((?:ansible|benchmarks|clusterctl|examples|scripts)/[\w./*-]+)`", page.read_text()
    )
    assert [path for path in named if not any(ROOT.glob(path))] == []


NAMED = re.compile(r"((?:`[\w.]+`(?:,| and| or)? )+)(?:of|in)\s+\[[^]]*\]\(([^)#]+\.\w+)\)")


def test_name_on_the_page_of_the_architecture_is_in_its_file() -> None:
    page = ROOT / "docs/architecture.md"
    found = NAMED.findall(page.read_text())
    assert len(found) > 15
    for names, file in found:
        for name in re.findall(r"(\w+)`", names):
            assert name in (page.parent / file).read_text(), f"{name} in {file}"


def test_broken_link_is_reported(tmp_path: Path) -> None:
    (tmp_path / "other.md").write_text("# A `title` here\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Top\n[a](other.md) [b](other.md#a-title-here) [c](#top) [d](https://example.org/x)\n"
        "[e](gone.md) [f](other.md#gone) [g](#gone)\n```\n[h](fenced.md)\n```\n"
    )
    assert list(dead(page)) == ["gone.md", "other.md#gone", "#gone"]
