"""Every command of README.md and docs/ is run as a reader would: page by page, on a real cluster.

The README raises it; the other pages are read before its last command, which takes it down. They are read in
`make test-all`. tests/e2e/test_ordinary_user.py types the tutorial.
The clusterctl that is typed is the one of the wheel, in an environment that holds nothing of this checkout.
How blocks say what they are stands in tests/support/manual.py.
"""

from __future__ import annotations

import os
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from _pytest.mark import ParameterSet

from tests.support.install import PLAIN_PATH, Installed, pip_settings
from tests.support.manual import ROOT, Block, blocks, follow, pages
from tests.support.remains import marked
from tests.support.residue import nothing_left

SPEC = "version: 1\nname: demo\nprovider: {type: local}\npartitions:\n  - {name: train, nodes: 2}\n"
FIRST, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
DOWN = "clusterctl down --yes"
# `down` stops at what other pages left.
EMPTY = "clusterctl ssh 'scancel --me'; clusterctl collect --all"
FOLDERS = ("ansible", "examples")


@dataclass
class Reader:
    """Someone with a home of their own who types what the manual says, in a folder for each page."""

    home: Path
    installed: Installed

    def folder(self, page: Path) -> Path:
        """Where a page is read: a spec lies there, and what the page names of a checkout."""
        place = self.home / page.stem
        if not place.exists():
            place.mkdir()
            (place / "cluster.yaml").write_text(SPEC)
            for name in FOLDERS:
                if (ROOT / name).exists() and f" {name}/" in page.read_text():
                    (place / name).symlink_to(ROOT / name)
        return place

    def has_a_cluster(self, place: Path) -> None:
        """Raise it, unless it is up."""
        if not (self.home / ".local/state/clusterctl/demo/hosts.json").exists():
            code, said, _ = self.types("clusterctl up", place)
            assert code == 0, said

    def types(self, text: str, place: Path) -> tuple[int, str, Path]:
        """The exit code of a command, all that it printed, and the folder that it leaves the reader in."""
        script = f"{text}\ncode=$?\npwd >&9\nexit $code"
        with tempfile.TemporaryFile() as said, tempfile.TemporaryFile() as where:
            done = subprocess.run(
                ["bash", "-c", f"exec 9>&{where.fileno()}\n{script}"],
                cwd=place,
                env=self._environment(),
                stdin=subprocess.DEVNULL,
                stdout=said,
                stderr=subprocess.STDOUT,
                pass_fds=[where.fileno()],
                timeout=300,
                check=False,
            )
            said.seek(0)
            where.seek(0)
            left_in = where.read().decode().strip()
            return done.returncode, said.read().decode(errors="replace"), Path(left_in) if left_in else place

    def _environment(self) -> dict[str, str]:
        ours = ("CLUSTERCTL_", "XDG_", "SLURM_")
        env = {name: value for name, value in os.environ.items() if not name.startswith(ours)}
        path = f"{self.installed.script.parent}:{PLAIN_PATH}"
        return env | dict(pip_settings()) | {"HOME": str(self.home), "PATH": path, "COLUMNS": "200"}


@pytest.fixture(scope="module")
def reader(installed: Installed) -> Iterator[Reader]:
    """Their home has a short path, as homes do."""
    with tempfile.TemporaryDirectory(prefix=marked("")) as folder:
        home = Path(folder)
        with nothing_left(home):
            one = Reader(home, installed)
            yield one
            one.types("clusterctl down --yes --discard", one.folder(FIRST))  # what a page left


def runnable() -> list[Path]:
    """The pages with commands to run, in the order in which they leave each other a cluster."""
    found = [page for page in pages() if page != TUTORIAL and any(block.runs for block in blocks(page))]
    return sorted(found, key=lambda page: (page != FIRST, page))


def named(page: Path) -> ParameterSet:
    """Other modules hold what the commands of the further pages do."""
    marks = [] if page == FIRST else [pytest.mark.sweep]
    return pytest.param(page, id=str(page.relative_to(ROOT)), marks=marks)


def to_do(page: Path) -> Iterator[Block]:
    """What a page has the reader do. The README's last command is kept until all pages are read."""
    for block in blocks(page):
        if block.file or block.runs:
            text = block.text.partition(f"$ {DOWN}\n")[0] if page == FIRST and block.runs else block.text
            yield replace(block, text=text)


@pytest.mark.parametrize("page", [named(page) for page in runnable()])
def test_page(reader: Reader, page: Path) -> None:
    place = reader.folder(page)
    if page != FIRST:
        reader.has_a_cluster(place)
    follow(to_do(page), place, reader.types)


def test_the_readme_ends(reader: Reader) -> None:
    place = reader.folder(FIRST)
    reader.has_a_cluster(place)
    reader.types(EMPTY, place)
    (down,) = (block for block in blocks(FIRST) if block.runs and DOWN in block.text)
    follow([replace(down, text=down.text[down.text.index(f"$ {DOWN}") :])], place, reader.types)


def test_a_page_that_is_wrong_would_be_seen(reader: Reader) -> None:
    """The reader notices a wrong exit code, and keeps to the folder that a command goes to."""
    place = reader.folder(FIRST)
    assert reader.types("clusterctl launch", place)[0] == 2
    assert reader.types("false\ntrue", place)[0] == 0
    assert reader.types("mkdir deeper; cd deeper", place)[2] == place / "deeper"
