"""What exists on the cluster and elsewhere, too: what was sent there, and what was brought here.

A file is known by a number made of its place, size and time: see ``digest`` of remote_copies.py.
"""

from __future__ import annotations

import os
import sys
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

from clusterctl.errors import MachineError
from clusterctl.transport.remote_content import HEADER
from clusterctl.transport.remote_copies import DIGEST, digest
from clusterctl.transport.tree import Item, Kind
from clusterctl.util.disk import writing


def note_sent(note: Path, folder: str, items: Sequence[Item], *, host: str) -> None:
    """Write down that these files, which lie below a folder of this host, were sent from here.

    On a full disk nothing is: then `down` takes them for the only copies.
    """
    files = [item for item in items if item.kind is Kind.FILE]
    sent = array("Q")
    for item in files:
        place = os.fsencode(f"{folder}/{item.path}")
        # Its folder may be one that all hosts see, or the host's own.
        sent.extend(digest(at, place, item.size, item.mtime_ns) for at in (b"", os.fsencode(host)))
    private = partial(os.open, mode=0o600)
    with suppress(MachineError), writing(note), open(note, "ab", opener=private) as file:
        file.write(_little_endian(sent).tobytes())


def read_sent(note: Path) -> array[int]:
    """What ``note_sent`` has written down; a part that a full disk left at the end is ignored."""
    data = note.read_bytes() if note.exists() else b""
    sent = array("Q")
    sent.frombytes(data[: len(data) // DIGEST * DIGEST])
    return _little_endian(sent)


def files_here(folder: Path, place: str, *, host: str = "", renamed: str = "") -> Iterator[int]:
    """The files below a folder here as they would be below ``place`` on a host, or where all hosts see it.

    What has the ending ``renamed`` here has its name without it there.
    """
    root, at, ending = os.fsencode(folder), os.fsencode(host), os.fsencode(renamed)
    for around, _, names in os.walk(root):
        for name in names:
            with suppress(OSError):
                full = b"%s/%s" % (around, name)
                status = os.lstat(full)
                top, slash, rest = full[len(root) + 1 :].partition(b"/")
                while ending and top.endswith(ending):
                    top = top[: -len(ending)]
                path = b"%s/%s" % (os.fsencode(place), top + slash + rest)
                yield digest(at, path, status.st_size, status.st_mtime_ns)


def request_bytes(known: Iterable[int]) -> bytes:
    """The beginning of remote_copies.py's stdin."""
    numbers = array("Q", sorted(known))
    return HEADER.pack(len(numbers)) + _little_endian(numbers).tobytes()


def _little_endian(numbers: array[int]) -> array[int]:
    """The numbers in the hosts' order of bytes, or from it."""
    if sys.byteorder == "big":
        numbers = array("Q", numbers)
        numbers.byteswap()
    return numbers
