"""What a job's folder holds, as the cluster says it. Nothing it says is trusted to be a sane path."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.errors import CollectError
from clusterctl.records import Skipped
from clusterctl.terminal import printable
from clusterctl.transfer.listing import inside
from clusterctl.transport.base import Transport

REMOTE_PROGRAM = (Path(__file__).parent / "remote_files.py").read_text(encoding="utf-8")

# Written by us into a run's folder; a job's own file or folder of that name gets another one.
RESERVED = frozenset({b"run.json", b"sacct.json", b"environment.json", b"report.html", b"SHA256SUMS"})
FROM_JOB = b".from-job"

_TIMEOUT_S = 900.0


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """One file: ``path`` in the job's folder, ``local`` in the run's; ``size`` in bytes."""

    path: bytes
    local: bytes
    size: int

    @property
    def shown(self) -> str:
        """The path, fit for a terminal."""
        return shown_path(self.path)


@dataclass(frozen=True, slots=True)
class Manifest:
    """``files`` by their path on the cluster, and what is left there.

    ``sha256`` has the hash of each that has arrived, in hex, by its ``local`` path.
    """

    files: Mapping[bytes, RemoteFile]
    skipped: tuple[Skipped, ...]
    sha256: Mapping[bytes, str] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files.values())


def read_manifest(transport: Transport, folder: str) -> Manifest:
    """Ask the cluster what is in a job's folder.

    Raises:
        CollectError: the answer can't be a folder's content.
        TransportError: the cluster can't be reached.
    """
    result = transport.run(["python3", "-c", REMOTE_PROGRAM, "list", folder], timeout_s=_TIMEOUT_S)
    return parse_manifest(result.stdout, folder)


def parse_manifest(text: str, folder: str) -> Manifest:
    """The manifest in the program's answer.

    Raises:
        CollectError: the answer can't be a folder's content.
    """
    rows: dict[bytes, int] = {}
    skipped: list[Skipped] = []
    for line in text.splitlines():
        try:
            row = json.loads(line)
            path = base64.b64decode(row["path"], validate=True)
            if "skip" in row:
                skipped.append(Skipped(path=shown_path(path), reason=printable(str(row["skip"]))))
                continue
            inside(path)
            size = int(row["size"])
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as exc:
            raise _untrusted(folder, line, str(exc)) from exc
        if path in rows or size < 0:
            raise _untrusted(folder, line, "it can't be so")
        rows[path] = size
    tops = {path.partition(b"/")[0] for path in rows}
    files = {path: RemoteFile(path, _local(path, tops), size) for path, size in rows.items()}
    _refuse_contradictions(files, folder)
    return Manifest(files, tuple(skipped))


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


def _refuse_contradictions(files: Mapping[bytes, RemoteFile], folder: str) -> None:
    """No two files in one place, and none that is also a folder."""
    places = {file.local for file in files.values()}
    if len(places) < len(files):
        raise _untrusted(folder, "", "two files would have one name")
    for place in places:
        parent = os.path.dirname(place)  # noqa: PTH120  # names are bytes
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
