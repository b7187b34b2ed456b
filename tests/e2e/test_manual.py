"""An ordinary user types every command of docs/, page by page, and the first screen of README.md.

tests/e2e/test_ordinary_user.py types the rest of README.md. tests/support/manual.py explains the
blocks.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.person import CLUSTER, SPEC, Person
from tests.support.manual import ROOT, Block, blocks, follow, pages

pytestmark = pytest.mark.timeout(2400)  # PyTorch comes along

README = ROOT / "README.md"
TUTORIAL = ROOT / "docs" / "tutorial.md"
DOWN = "clusterctl down --yes --discard"


def runnable() -> list[Path]:
    """Return the pages with commands to run, without those that create their own cluster."""
    own = (README, TUTORIAL)
    return [
        page for page in pages() if page not in own and any(block.runs for block in blocks(page))
    ]


@pytest.fixture(scope="module")
def reader(person: Person, rights: None) -> Iterator[Person]:
    """A user who has only the wheel and the right to start the helper."""
    yield person
    for folder in (
        person.folder(CLUSTER),
        *person.home.glob("*.md"),
        *person.home.glob("*.md/my-project"),
    ):
        person.types(DOWN, folder)


@pytest.mark.parametrize("page", runnable(), ids=lambda page: str(page.relative_to(ROOT)))
def test_manual_page_commands_work_on_a_cluster(reader: Person, page: Path) -> None:
    """All pages use the same cluster, which the first page creates."""
    place = reader.folder(page.name)
    examples = "clusterctl init --examples" if " examples/" in page.read_text() else "true"
    # A page before may have changed the cluster.
    have = f"printf %s {shlex.quote(SPEC)} >cluster.yaml; {examples}; clusterctl up"
    code, output, _ = reader.types(have, place)
    assert code == 0, output
    follow((block for block in blocks(page) if block.file or block.runs), place, reader.types)


@pytest.mark.parametrize("page", [README, TUTORIAL], ids=lambda page: page.name)
def test_first_pages_for_newcomers_work_as_printed(reader: Person, page: Path) -> None:
    place = reader.folder(page.name)
    follow(first_screen() if page == README else tutorial(), place, reader.types)


def first_screen() -> list[Block]:
    """Return the commands at the beginning of README.md, and the program that they run, which the
    tutorial shows.
    """
    program = [
        block for block in blocks(TUTORIAL) if block.file in {"train_ddp.py", "requirements.txt"}
    ]
    return [
        *program,
        *(block for block in blocks(README) if block.elsewhere == "tests/e2e/test_manual.py"),
    ]


def tutorial() -> list[Block]:
    return [block for block in blocks(TUTORIAL) if block.file or block.runs]
