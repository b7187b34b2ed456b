"""A run's folder here: its place, which it gets whole or not at all, and the sums of what is in it."""

from __future__ import annotations

import fcntl
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from clusterctl.errors import CollectError
from clusterctl.runs.fetch import FROM_JOB, Home
from clusterctl.scheduler.base import JobState, Outcome
from clusterctl.state.ledger import RunRecord
from clusterctl.state.submissions import CLIENT_FACTS
from clusterctl.state.workspace import open_private
from clusterctl.util.assets import file_sha256

SUMS_FILE = "SHA256SUMS"
ACCOUNTING = "sacct.json"
# States of jobs of which a run is a snapshot.
GOING_ON = frozenset(state.value for state in JobState if state.outcome is Outcome.GOES_ON)

_PLAIN = {b"\\\\": b"\\", b"\\n": b"\n", b"\\r": b"\r"}  # what sha256sum escapes in a name
_ESCAPED = re.compile(rb"\\[\\nr]")


def place(out: Path, name: str, token: str) -> Path:
    """Where a run goes. What stands there already is left alone, unless it is a snapshot of this very run.

    Job numbers begin at 1 again when a cluster is raised anew under its name.
    """
    for number in count(1):
        path = out / (name if number == 1 else f"{name}-{number}")
        if not os.path.lexists(path):
            return path
        with suppress(CollectError):
            if RunRecord.load(path).token == token:
                return path
    raise AssertionError("count never ends")


@contextmanager
def working_folder(final: Path) -> Iterator[Path]:
    """The hidden folder beside the run's that holds what has arrived; one process at a time."""
    work = final.parent / f".{final.name}.incomplete"
    work.mkdir(parents=True, exist_ok=True)
    with open(work / "lock", "w", opener=open_private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CollectError(
                f"{final.name} is being collected by another clusterctl",
                code="run-being-collected",
                fix="wait until it is done",
            ) from None
        if (work / "old").is_dir() and not os.path.lexists(final):  # ended between the two renames below
            (work / "old").rename(final)
        yield work


def put_in_place(work: Path, final: Path) -> None:
    """Give the finished tree its name; what stood there goes, but for what the user laid into it."""
    tree, old = work / "tree", work / "old"
    if final.exists():
        ours = {*_sums(final), SUMS_FILE.encode()}  # a run's own files
        there = [
            os.fsencode(path.relative_to(final))
            for path in final.rglob("*")
            if path.is_symlink() or not path.is_dir()
        ]
        new = [os.fsencode(path.relative_to(tree)) for path in tree.rglob("*")]
        link(final, {*there} - ours - {*new}, tree)
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    tree.rename(final)
    shutil.rmtree(work)


def files_of(run: Path) -> Home:
    """The files that a run at home has, by its SHA256SUMS: sizes and sums."""
    found = {}
    for name, sha256 in _sums(run).items():
        path = run / os.fsdecode(name)
        if path.is_file():
            found[name] = (path.stat().st_size, sha256)
    return found


def link(run: Path, names: Iterable[bytes], tree: Path) -> None:
    """Give these files of a run at home a second place, in the tree that will take the run's."""
    for name in map(os.fsdecode, names):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).unlink(missing_ok=True)
        try:
            os.link(run / name, tree / name, follow_symlinks=False)
        except OSError:  # a file system without hard links
            shutil.copy2(run / name, tree / name, follow_symlinks=False)


def write_sums(tree: Path, known: Mapping[bytes, str]) -> None:
    """SHA256SUMS of all files below, as `sha256sum -c` reads it. What has just arrived is not read again."""
    root = os.fsencode(tree)
    found = (
        os.path.join(folder, name)[len(root) + 1 :]  # noqa: PTH118  # names are bytes
        for folder, _, names in os.walk(root)
        for name in names
    )
    lines = []
    for name in sorted(name for name in found if name != SUMS_FILE.encode()):
        sha256 = known.get(name) or file_sha256(tree / os.fsdecode(name))
        shown = escaped(name)
        mark = b"\\" if shown != name else b""
        lines.append(mark + sha256.encode() + b"  " + shown + b"\n")
    (tree / SUMS_FILE).write_bytes(b"".join(lines))


def _sums(run: Path) -> dict[bytes, str]:
    """Name -> sha256 of the files that a run's SHA256SUMS lists."""
    lines = (run / SUMS_FILE).read_bytes().splitlines() if (run / SUMS_FILE).is_file() else []
    found = {}
    for line in lines:
        sha256, _, name = line.partition(b"  ")
        if sha256.startswith(b"\\"):
            name = _ESCAPED.sub(lambda one: _PLAIN[one[0]], name)
        found[name] = sha256.removeprefix(b"\\").decode()
    return found


def escaped(name: bytes) -> bytes:
    """A file's name as `sha256sum` writes it."""
    return name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def write_kept(tree: Path, kept: Mapping[str, bytes]) -> None:
    """Write our files as they were sent; what the job's folder has under their names stays if it differs."""
    for name, content in kept.items():
        theirs = tree / f"{name}{os.fsdecode(FROM_JOB)}"
        if theirs.is_file() and theirs.stat().st_size == len(content) and theirs.read_bytes() == content:
            theirs.unlink()
        if name != CLIENT_FACTS:  # its content is in environment.json
            (tree / name).write_bytes(content)
