"""What exists on the cluster and here, too: what was sent there, and what was brought from there.

A file there counts only while the one here has its size and time: both make one number with its place there
(see ``digest`` of remote_copies.py). Where copies are is written beside the workspace, for kept storage
outlives that.
"""

from __future__ import annotations

import json
import os
import sys
from array import array
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass

from clusterctl.state.workspace import Workspace
from clusterctl.transport.remote_content import HEADER
from clusterctl.transport.remote_copies import digest
from clusterctl.util.disk import append_line, read_rows


@dataclass(frozen=True, slots=True)
class Copies:
    """A file or folder ``top`` of a host, or where all hosts see it (``host`` is ""), is ``directory`` here.

    Of a folder, these are the files with ``names``, or all. What was ``sent`` to the host may be on what all
    hosts see. What has the ending ``renamed`` here has its name without it there.
    """

    host: str
    top: str
    directory: str
    names: tuple[str, ...] | None = None
    sent: bool = False
    renamed: str = ""

    def numbers(self) -> Iterator[int]:
        """The ``digest`` of each file there, if it is as the one here is now."""
        hosts = {os.fsencode(self.host), *([b""] if self.sent else [])}
        for here, there in self._files():
            with suppress(OSError):
                # What was sent of a link was the file that it leads to.
                status = os.stat(here) if self.sent else os.lstat(here)  # noqa: PTH116  # names are bytes
                if not _is_same_file(there, status):
                    yield from (digest(host, there, status.st_size, status.st_mtime_ns) for host in hosts)

    def _files(self) -> Iterator[tuple[bytes, bytes]]:
        """The paths of the files here, and there."""
        root, top, ending = os.fsencode(self.directory), os.fsencode(self.top), os.fsencode(self.renamed)
        if self.names is not None:
            for name in map(os.fsencode, self.names):
                yield b"%s/%s" % (root, name), b"%s/%s" % (top, name)
            return
        if os.path.isfile(root):  # noqa: PTH113
            yield root, top
        for around, _, names in os.walk(root):
            for name in names:
                here = b"%s/%s" % (around, name)
                first, slash, rest = here[len(root) + 1 :].partition(b"/")
                while ending and first.endswith(ending):
                    first = first[: -len(ending)]
                yield here, b"%s/%s%s%s" % (top, first, slash, rest)


def _is_same_file(there: bytes, status: os.stat_result) -> bool:
    """Return whether it is the file here: this machine is a host, or has mounted what hosts see."""
    try:
        return os.path.samestat(os.stat(there), status)  # noqa: PTH116  # names are bytes
    except OSError:
        return False


def note(workspace: Workspace, copies: Iterable[Copies]) -> None:
    """Write down where copies are.

    Raises:
        MachineError: it can't be written; then `down` takes what is there for the only copy.
    """
    rows = [{key: value for key, value in asdict(one).items() if value not in (None, "")} for one in copies]
    if rows:
        append_line(workspace.copies, "\n".join(map(json.dumps, rows)))


def read_copies(workspace: Workspace) -> Iterator[Copies]:
    """What ``note`` has written, also for earlier clusters of the name."""
    for row in read_rows(workspace.copies):
        with suppress(KeyError, TypeError):  # damaged
            host, top, directory, names = row.get("host", ""), row["top"], row["directory"], row.get("names")
            texts = (host, top, directory, renamed := row.get("renamed", ""), *(names or ()))
            if all(isinstance(one, str) and "\0" not in one for one in texts):
                sent = row.get("sent") is True
                yield Copies(host, top, directory, None if names is None else tuple(names), sent, renamed)


def request_bytes(known: Iterable[int]) -> bytes:
    """The beginning of remote_copies.py's stdin."""
    numbers = array("Q", sorted(known))
    count = HEADER.pack(len(numbers))
    if sys.byteorder == "big":  # the hosts' order of bytes is the other one
        numbers.byteswap()
    return count + numbers.tobytes()
