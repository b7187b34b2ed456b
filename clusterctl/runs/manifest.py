"""What a job's folder holds, as the cluster says it. Nothing it says is trusted to be a sane path."""

from __future__ import annotations

import base64
import json
import os
import shlex
from collections.abc import Iterable, Mapping, Set
from contextlib import closing
from dataclasses import dataclass, field

from clusterctl.errors import CollectError, printable
from clusterctl.state.ledger import OUR_RECORDS, Skipped
from clusterctl.transport.base import Transport, lines, remote_argv
from clusterctl.transport.get import inside
from clusterctl.transport.tree import shown_size

REMOTE_PROGRAM = "clusterctl.runs.remote_files"

# Written by us into a run's folder; a job's own file or folder of that name gets another one.
RESERVED = frozenset(name.encode() for name in OUR_RECORDS)
FROM_JOB = b".from-job"
MAX_FILE = 64 << 30  # bytes: what is larger stays on the cluster unless it is asked for

_MOST_ROWS = 250_000  # the cluster itself stops at 100,000
_MOST_HOLES = 16 << 30  # bytes of a job's files, which cost no disk but the time to hash them
_MOST_SKIPPED = 1000  # that are named one by one
_LONGEST = 2048  # bytes of a path: it must fit below any folder here


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file: ``path`` in the job's folder, ``local`` in the run's; ``size`` in bytes.

    ``space`` is what it takes on a disk: of a sparse file much less.
    """

    path: bytes
    local: bytes
    size: int
    space: int

    @property
    def shown(self) -> str:
        """The path, fit for a terminal."""
        return shown_path(self.path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """``files`` by their path on the cluster, and what is left there; ``folders`` are the empty ones, here.

    ``sha256`` has the hash of each that has arrived, in hex, by its ``local`` path.
    """

    files: Mapping[bytes, RemoteFile]
    skipped: tuple[Skipped, ...]
    sha256: Mapping[bytes, str] = field(default_factory=dict)
    folders: tuple[bytes, ...] = ()

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def read_manifest(transport: Transport, folder: str, *, max_file: int = MAX_FILE) -> Manifest:
    """Ask the cluster what is in a job's folder. Files of more than ``max_file`` bytes are left there.

    Raises:
        CollectError: the answer can't be a folder's content.
        TransportError: the cluster can't be reached.
    """
    with closing(transport.stream(remote_argv(REMOTE_PROGRAM, "list", folder))) as stream:
        too_long = _untrusted(folder, "", "a line of it is too long")
        return parse_manifest(lines(stream, too_long), folder, max_file=max_file)


def parse_manifest(rows: Iterable[bytes], folder: str, *, max_file: int = MAX_FILE) -> Manifest:
    """The manifest in the program's answer.

    Raises:
        CollectError: the answer can't be a folder's content.
    """
    listed = _Listed(folder, max_file)
    for number, row in enumerate(rows):
        try:
            if number > _MOST_ROWS:
                raise ValueError("it does not end")
            listed.add(json.loads(row))
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError, AttributeError) as exc:
            raise _untrusted(folder, row.decode(errors="replace"), str(exc)) from exc
    return listed.manifest()


@dataclass(slots=True)
class _Listed:
    """What the cluster has told so far."""

    folder: str
    max_file: int
    files: dict[bytes, tuple[int, int]] = field(default_factory=dict)  # path -> size and space
    folders: set[bytes] = field(default_factory=set)
    skipped: list[Skipped] = field(default_factory=list)
    holes: int = _MOST_HOLES  # that may come yet
    unnamed: int = 0

    def add(self, row: dict[str, object]) -> None:
        """Take one line; raises ValueError, KeyError and their like if it can't be one."""
        if row == {}:  # a sign of life
            return
        path = base64.b64decode(str(row["path"]), validate=True)
        if "skip" in row:
            self.skip(path, printable(str(row["skip"])))
            return
        inside(path)
        if path in self.files or path in self.folders:
            raise ValueError("it can't be so")
        if len(path) > _LONGEST:
            self.skip(path, f"its path is longer than {_LONGEST:,} bytes")
        elif "folder" in row:
            self.folders.add(path)
        else:
            self.add_file(path, int(str(row["size"])), int(str(row["space"])))

    def add_file(self, path: bytes, size: int, space: int) -> None:
        if size < 0 or space < 0:
            raise ValueError("it can't be so")
        holes = max(0, size - space)
        too_much = ""
        if size > self.max_file:
            too_much = f"{shown_size(size)}, more than {shown_size(self.max_file)}"
        elif holes > self.holes:
            too_much = f"{shown_size(holes)} of holes, with those before more than {shown_size(_MOST_HOLES)}"
        if too_much:
            command = shlex.join(["clusterctl", "get", f"{self.folder}/{shown_path(path)}"])
            self.skip(path, f"{too_much}: `{command}`")
        else:
            self.holes -= holes
            self.files[path] = size, size - holes

    def skip(self, path: bytes, reason: str) -> None:
        """What is left there. A job may leave any number of things."""
        if len(self.skipped) < _MOST_SKIPPED:
            self.skipped.append(Skipped(path=shown_path(path), reason=reason))
        else:
            self.unnamed += 1

    def manifest(self) -> Manifest:
        """All of it, each with its place here; raises CollectError if that can't be."""
        tops = {path.partition(b"/")[0] for path in (*self.files, *self.folders)}
        files = {path: RemoteFile(path, _local(path, tops), *sizes) for path, sizes in self.files.items()}
        folders = tuple(_local(path, tops) for path in sorted(self.folders))
        _refuse_contradictions([file.local for file in files.values()], folders, self.folder)
        if self.unnamed:
            self.skipped.append(Skipped(path=".", reason=f"{self.unnamed:,} more files, which are not named"))
        return Manifest(files, tuple(self.skipped), folders=folders)


def shown_path(path: bytes) -> str:
    """A path fit for a terminal and for JSON."""
    return printable(path.decode(errors="surrogateescape"))


def _local(path: bytes, tops: Set[bytes]) -> bytes:
    """Where a file goes below the run's folder; ``tops`` are the first parts of all paths."""
    top, slash, rest = path.partition(b"/")
    if top in RESERVED:
        top += FROM_JOB
        while top in tops:  # the job has such a one of its own
            top += FROM_JOB
    return top + slash + rest


def _refuse_contradictions(files: Iterable[bytes], folders: Iterable[bytes], folder: str) -> None:
    """No two files in one place, and none that is also a folder."""
    places: set[bytes] = set()
    for place in files:
        if place in places:
            raise _untrusted(folder, "", "two files would have one name")
        places.add(place)
    for place in (*places, *folders):
        parent = place if place not in places else os.path.dirname(place)  # noqa: PTH120  # names are bytes
        while parent:
            if parent in places:
                raise _untrusted(folder, shown_path(parent), "it is both a file and a folder")
            parent = os.path.dirname(parent)  # noqa: PTH120


def _untrusted(folder: str, what: str, why: str) -> CollectError:
    return CollectError(
        "the list of the job's files makes no sense, and nothing of it was fetched",
        where=folder,
        why=printable(f"{why}: {what[:200]}"),
        fix="look at the folder with `clusterctl ssh`",
    )
