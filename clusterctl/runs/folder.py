"""The local folder of a collected run: its name, its atomic replacement, and the checksums of its
files.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path

from clusterctl.errors import CollectError
from clusterctl.runs.fetch import CollectedFiles
from clusterctl.runs.places import Links, make_links
from clusterctl.state.ledger import CLIENT_FACTS, FROM_JOB, RUN_FILE, SUMS_FILE
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import open_private
from clusterctl.util.assets import file_sha256
from clusterctl.util.confine import reject_written

ACCOUNTING = "sacct.json"
_SUM = re.compile(rb"(\\?)([0-9a-f]{64})  (.+)")
_EMPTY = hashlib.sha256().hexdigest()

# The escape sequences of sha256sum in file names, and the characters they stand for.
_PLAIN = {b"\\\\": b"\\", b"\\n": b"\n", b"\\r": b"\r"}
_ESCAPED = re.compile(rb"\\[\\nr]")


def choose_run_folder(out: Path, name: str, token: str) -> Path:
    """Return the folder in ``out`` for a run: the folder that already holds the run, or a new
    folder.

    A recreated cluster numbers jobs from 1 again, so another run may have ``name``, but not this
    ``token``.
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
    """Create, lock and yield a hidden folder beside ``final`` for a run's files, until all are
    there.
    """
    reject_written(final)
    work = final.parent / f".{final.name}.incomplete"
    work.mkdir(parents=True, exist_ok=True)
    being_collected = CollectError(
        f"{final.name} is being collected by another clusterctl",
        code="in-use",
        about="run",
        fix="wait until that clusterctl has finished, then collect again",
    )
    with open(work / "lock", "w", opener=open_private) as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            is_current = os.path.samestat(os.fstat(lock.fileno()), (work / "lock").stat())
        except BlockingIOError:
            raise being_collected from None
        except FileNotFoundError:
            is_current = False
        if not is_current:
            # The other process has just finished, and removed the folder.
            raise being_collected
        # An earlier process ended between the two renames of `install_tree`.
        if (work / "old").is_dir() and not os.path.lexists(final):
            (work / "old").rename(final)
        yield work


def install_tree(work: Path, final: Path, links: Links) -> None:
    """Replace a run's folder ``final`` by ``work``/tree, which also gets files that the user had
    added.

    links: links to make in the tree, after all files.
    """
    tree = work / "tree"
    old = work / "old"
    if final.exists():
        run_files = {*_sums(final), SUMS_FILE.encode()}
        existing_paths = [
            os.fsencode(path.relative_to(final))
            for path in final.rglob("*")
            if path.is_symlink() or not path.is_dir()
        ]
        new = [os.fsencode(path.relative_to(tree)) for path in tree.rglob("*")]
        link(final, {*existing_paths} - run_files - {*new, *links}, tree)
        make_links(tree, links)
        shutil.rmtree(old, ignore_errors=True)
        final.rename(old)
    else:
        make_links(tree, links)
    tree.rename(final)
    shutil.rmtree(work)


def collected_files(run: Path) -> CollectedFiles:
    """Return path -> (size, sha256) for the files that the SHA256SUMS of a collected run lists."""
    files = {}
    for name, sha256 in _sums(run).items():
        path = run / os.fsdecode(name)
        if path.is_file():
            files[name] = (path.stat().st_size, sha256)
    return files


def damaged_files(run: Path) -> list[bytes]:
    """Return the files of a collected run that are missing, or differ from its SHA256SUMS, but not
    run.json.

    If the list of sums itself is missing, return it alone: then no file is known to be intact.
    """
    sums = _sums(run)
    if not sums:
        return [SUMS_FILE.encode()]
    sums.pop(RUN_FILE.encode(), None)
    return [name for name, sha256 in sums.items() if not _is_intact(run, name, sha256)]


def _is_intact(run: Path, name: bytes, sha256: str) -> bool:
    path = run / os.fsdecode(name)
    try:
        if not path.is_file() or (path.stat().st_size == 0) != (sha256 == _EMPTY):
            return False
        return file_sha256(path) == sha256
    except OSError:
        return False


def link(run: Path, names: Iterable[bytes], tree: Path) -> None:
    """Hard-link files of a collected run into ``tree``, which will replace the run's folder."""
    for name in map(os.fsdecode, names):
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).unlink(missing_ok=True)
        try:
            os.link(run / name, tree / name, follow_symlinks=False)
        except OSError:
            # The file system has no hard links.
            shutil.copy2(run / name, tree / name, follow_symlinks=False)


def write_sums(tree: Path, known_sums: Mapping[bytes, str]) -> None:
    """Write ``tree``/SHA256SUMS for `sha256sum -c`. known_sums: path -> sha256 of files not to be
    read.
    """
    root = os.fsencode(tree)
    paths = (
        os.path.join(folder, name)[len(root) + 1 :]
        for folder, _, names in os.walk(root)
        for name in names
    )
    lines = []
    for name in sorted(name for name in paths if name != SUMS_FILE.encode()):
        sha256 = known_sums.get(name) or file_sha256(tree / os.fsdecode(name))
        shown = escaped(name)
        mark = b"\\" if shown != name else b""
        lines.append(mark + sha256.encode() + b"  " + shown + b"\n")
    (tree / SUMS_FILE).write_bytes(b"".join(lines))


def _sums(run: Path) -> dict[bytes, str]:
    lines = (run / SUMS_FILE).read_bytes().splitlines() if (run / SUMS_FILE).is_file() else []
    sums = {}
    for match in filter(None, map(_SUM.fullmatch, lines)):
        is_escaped, sha256, name = match.groups()
        if is_escaped:
            name = _ESCAPED.sub(lambda part: _PLAIN[part[0]], name)
        sums[name] = sha256.decode()
    return sums


def escaped(name: bytes) -> bytes:
    """Return a file name as `sha256sum` writes it, with escaped backslashes and line breaks."""
    return name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")


def write_kept(tree: Path, kept: Mapping[str, bytes]) -> None:
    """Write clusterctl's files (name -> content) to ``tree``. Versions changed by the job are
    *.from-job.
    """
    for name, content in kept.items():
        # The program may also have a file of that name.
        for theirs in tree.glob(f"{name}{os.fsdecode(FROM_JOB)}*"):
            if (
                theirs.is_file()
                and theirs.stat().st_size == len(content)
                and theirs.read_bytes() == content
            ):
                theirs.unlink()
        # environment.json holds the content of CLIENT_FACTS.
        if name != CLIENT_FACTS:
            (tree / name).write_bytes(content)
