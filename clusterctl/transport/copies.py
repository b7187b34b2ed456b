"""List of the files that exist both on the cluster and on this machine, because they were sent or
collected.

If the local file no longer has the same size and time (see ``digest`` of remote_copies.py), the
file on the cluster is no copy. `down` removes the cluster's local folder, but not this list, which
lies beside it.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass

from clusterctl.state.ledger import job_paths
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.transport.remote_content import HEADER
from clusterctl.transport.remote_copies import digest
from clusterctl.util.disk import append_line, read_rows


@dataclass(frozen=True, slots=True)
class LocalCopies:
    """A file or folder ``top`` on a host that also exists on this machine as ``directory``.

    host: "" for the shared file system. names: names of the copied files in the folder; None: all
        files.
    sent: whether clusterctl sent the files to the host. They may then be on the shared file system
        instead.
    renamed: suffix that files and folders directly in ``directory`` have, but not their originals
        in ``top``.
    files: for a collected run, the folder in ``top`` with the program's files (see ``JobEntry``).
    at_ns: when the copy was made by the host's clock, in nanoseconds. 0: unknown.
    """

    host: str
    top: str
    directory: str
    names: tuple[str, ...] | None = None
    sent: bool = False
    renamed: str = ""
    files: str = ""
    at_ns: int = 0

    def numbers(self) -> Iterator[int]:
        """Yield the ``digest`` of each file on the host, if its size and time are those of the
        local file.
        """
        hosts = {os.fsencode(self.host), *([b""] if self.sent else [])}
        for local, remote in self._files():
            with suppress(OSError):
                # If the local path is a link, its target was sent.
                status = os.stat(local) if self.sent else os.lstat(local)
                if not _is_same_file(remote, status):
                    yield from (
                        digest(host, remote, status.st_size, status.st_mtime_ns) for host in hosts
                    )

    def _files(self) -> Iterator[tuple[bytes, bytes]]:
        root = os.fsencode(self.directory)
        top = os.fsencode(self.top).rstrip(b"/")
        ending = os.fsencode(self.renamed)
        if self.names is not None:
            for name in map(os.fsencode, self.names):
                yield b"%s/%s" % (root, name), b"%s/%s" % (top, name)
            return
        if os.path.isfile(root):
            yield root, top
        for parent, _, names in os.walk(root):
            for name in names:
                local = b"%s/%s" % (parent, name)
                if self.files:
                    paths = job_paths(local[len(root) + 1 :], os.fsencode(self.files))
                    yield from ((local, b"%s/%s" % (top, path)) for path in paths)
                    continue
                head, slash, tail = local[len(root) + 1 :].partition(b"/")
                while ending and head.endswith(ending):
                    head = head[: -len(ending)]
                yield local, b"%s/%s%s%s" % (top, head, slash, tail)


def _is_same_file(remote: bytes, status: os.stat_result) -> bool:
    """Return whether ``remote`` is the local file itself: the host is this machine, or both share a
    disk.
    """
    try:
        return os.path.samestat(os.stat(remote), status)
    except OSError:
        return False


def record_copies(workspace: Workspace, copies: Iterable[LocalCopies]) -> None:
    """Append these copies to the list ``workspace.copies``.

    If this raises MachineError, `down` will treat these files on the cluster as files without a
    copy.
    """
    rows = [
        {key: value for key, value in asdict(copy).items() if value not in (None, "", 0)}
        for copy in copies
    ]
    if rows:
        append_line(workspace.copies, "\n".join(map(json.dumps, rows)))


def read_copies(workspace: Workspace) -> Iterator[LocalCopies]:
    """Yield the copies written by ``record_copies``, including copies of earlier clusters with this
    name.
    """
    for row in read_rows(workspace.copies):
        with suppress(KeyError, TypeError):  # damaged row
            host = row.get("host", "")
            top = row["top"]
            directory = row["directory"]
            names = row.get("names")
            renamed = row.get("renamed", "")
            files = row.get("files", "")
            at_ns = row.get("at_ns", 0)
            strings = (host, top, directory, renamed, files, *(names or ()))
            if type(at_ns) is int and all(
                isinstance(text, str) and "\0" not in text for text in strings
            ):
                sent = row.get("sent") is True
                listed = None if names is None else tuple(names)
                yield LocalCopies(host, top, directory, listed, sent, renamed, files, at_ns)


def clock_of(transport: Transport) -> int:
    """Return the time of a host's clock, in nanoseconds since 1970; 0 if the host has no GNU `date`.

    Raises TransportError: the host can't be reached.
    """
    text = transport.run(["date", "+%s%N"], check=False).stdout.strip()
    return int(text) if text.isdecimal() else 0


def times_of(copies: Iterable[LocalCopies]) -> dict[int, int]:
    """Return ``digest`` -> when the newest copy of the file was made, in nanoseconds by the host's
    clock; 0: unknown.
    """
    times: dict[int, int] = {}
    for copy in copies:
        for number in copy.numbers():
            known = times.get(number, copy.at_ns)
            times[number] = max(known, copy.at_ns) if known and copy.at_ns else 0
    return times


def encode_digests(times: Mapping[int, int]) -> bytes:
    """Return the bytes that the program remote_copies.py reads from stdin: a count, the digests,
    sorted, and the time of each.
    """
    numbers = array("Q", sorted(times))
    moments = array("Q", (times[number] for number in numbers))
    count = HEADER.pack(len(numbers))
    # The program on the host reads little-endian numbers.
    if sys.byteorder == "big":
        numbers.byteswap()
        moments.byteswap()
    return count + numbers.tobytes() + moments.tobytes()
