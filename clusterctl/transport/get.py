"""Get files from the cluster. Files that are here by their hash are not sent; partial ones are resumed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.errors import CommandError, TransferError, UsageError, printable
from clusterctl.transport.base import Conversation, Transport, remote_argv
from clusterctl.transport.remote_content import (
    ALIVE_LINE,
    LEFT,
    NOT_THERE,
    SAME,
    UNREADABLE,
    Entry,
    Incoming,
    TruncatedError,
    UnexpectedError,
    finish,
    finish_places,
    make_place,
    name_it,
    open_partial,
    open_unnamed,
    place_below,
)
from clusterctl.transport.remote_open import open_own
from clusterctl.transport.tree import Item, Kind, Progress, hash_items, shown_size
from clusterctl.util.disk import reason

_AGAIN = "run it again; what has arrived is kept"
_SPARE_BYTES = 16 << 20
_MAX_NAME = 255  # bytes; Linux file systems take no longer one
_ALIVE = ALIVE_LINE.encode().rstrip()
_MOST = 1 << 63  # what can be a size, or a time in nanoseconds, is below
_MOST_BYTES = 1 << 28  # of a list that is to have an end; the cluster names 16 MiB at most


@dataclass(frozen=True, slots=True)
class Fetched:
    """What became of a transfer. ``sent_bytes`` had to travel; ``skipped`` are of no kind that travels."""

    files: int
    bytes: int
    sent_bytes: int
    skipped: tuple[str, ...]


def fetch(
    transport: Transport, paths: Sequence[str], folder: Path, *, progress: Progress = lambda *_: None
) -> Fetched:
    """Put files and folders of the cluster below ``folder``, each under its own name.

    Relative paths begin at the user's home. What lies here under other names stays.

    Raises:
        UsageError: something is not there.
        TransferError: some can't be read there or written here, or changed; what has arrived is kept.
        TransportError: the cluster can't be reached; what has arrived is kept.
    """
    argv = remote_argv("clusterctl.transport.remote_content", *paths)
    try:
        with closing(Sender(transport, argv)) as sender, sender.listed() as download, writing_into(folder):
            arrived = download.bring(download.entries, folder, progress=progress)
    except CommandError as exc:
        if exc.rc == NOT_THERE:
            what = f"there is no {printable(exc.why)} on the cluster"
            fix = "relative paths begin at the job user's home; look there with `clusterctl ssh`"
            raise UsageError(what, code="no-such-file", where=transport.host, fix=fix) from exc
        raise TransferError(
            "the files can't be read on the cluster",
            code="files-unreadable",
            where=transport.host,
            why=printable((exc.why.strip().splitlines() or [exc.what])[-1]),
            fix="make it readable, or name something else: `clusterctl ssh -- ls -l` shows what there is",
            host=transport.host,
        ) from exc
    files = [entry for entry in download.entries if entry.kind == Kind.FILE]
    wrong = [os.fsdecode(entry.path) for entry in files if entry.index not in arrived]
    if wrong:
        more = f" and {len(wrong) - 1} more" if len(wrong) > 1 else ""
        raise TransferError(
            f"{printable(wrong[0])}{more} changed while being fetched, or can't be read there",
            code="files-changed",
            fix="run it again when nothing writes there; what has arrived is kept",
        )
    skipped = tuple(os.fsdecode(entry.path) for entry in download.left)
    return Fetched(len(files), sum(entry.size for entry in files), download.sent, skipped)


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Raise TransferError if the body can't write below ``folder``."""
    try:
        yield
    except OSError as exc:
        raise TransferError(
            "the files can't be written here",
            code="files-unwritable",
            where=printable(os.fsdecode(exc.filename or str(folder))),
            why=reason(exc, folder),
            fix="make room or rights there, then run it again: what has arrived is kept",
        ) from exc


class Sender:
    """A program on a host that lists and sends files (see remote_content.py), started when it is needed.

    One that serves ``many`` requests, one after the other, saves a login and a Python for each.
    """

    def __init__(self, transport: Transport, argv: Sequence[str], *, many: bool = False) -> None:
        self._transport, self._argv, self._many = transport, argv, many
        self._running = ExitStack()
        self._talk: Conversation | None = None

    def close(self) -> None:
        """End the program; the next request starts another."""
        self._running.close()
        self._talk = None

    @contextmanager
    def listed(self, request: bytes = b"", *, most: int = sys.maxsize) -> Iterator[Download]:
        """Send it the request, if it reads one, and read the list that it makes.

        Raises:
            TransferError: the list makes no sense, or has more than ``most`` lines; or it sent what it had
                not announced.
            TransportError: the cluster can't be reached, or the program failed.
        """
        try:
            if self._talk is None:
                self._talk = self._running.enter_context(self._transport.converse(self._argv))
            if request:
                self._talk.send(request)
            yield Download(self._talk, most, goes_on=self._many)
        except BaseException as exc:
            self.close()
            if isinstance(exc, TruncatedError):
                raise TransferError(
                    "the cluster sent less than it said", code="transfer-short", fix=_AGAIN
                ) from None
            if isinstance(exc, UnexpectedError):
                raise TransferError(
                    "the cluster sent other data than it said", code="transfer-differs", fix=_AGAIN
                ) from None
            raise


@dataclass(slots=True)
class _Arrival:
    entry: Entry
    known: str = ""  # the hash of what is in its place, if that may be the file
    fd: int | None = None  # its partial file, open and locked; or one that is not named yet
    is_named: bool = True
    have: int = 0  # bytes that are in that

    @property
    def space(self) -> int:
        """Bytes that it still takes on the disk."""
        return 0 if self.known else max(0, self.entry.space - self.have)


class Download:
    """What the cluster has listed: ``entries``, and what is ``left`` there. ``sent`` bytes had to travel."""

    def __init__(self, talk: Conversation, most: int, *, goes_on: bool) -> None:
        self._talk, self._goes_on = talk, goes_on
        self._incoming = Incoming(self._receive_some)
        self.entries, self.left = parse_listing(iter(self._incoming.line, b""), most)
        self.sent = 0

    def _receive_some(self) -> bytes:
        data = self._talk.receive()
        if not data:
            self._talk.finish()  # where it ends too soon, the command's own failure comes first
        return data

    def bring(
        self,
        entries: Sequence[Entry],
        folder: Path,
        *,
        own: bool = False,
        room: str = "make room, or name another folder",
        progress: Progress = lambda *_: None,
    ) -> Mapping[int, str]:
        """Bring these below ``folder``; index -> sha256 of each file that is here now as it is there.

        ``own``: nothing else writes there, so files need no locks; and what stands in the way, such as a link
        in place of a folder, is removed, which else is an error. Else what comes is hashed only where it may
        have changed on its way, and its sha256 is "". ``room`` is what to do where the disk is too small.

        Raises:
            OSError: it can't be written here.
            TransferError: the disk is too small, or another one fetches the same to the same place.
        """
        folder.mkdir(parents=True, exist_ok=True)
        root = os.fsencode(folder)
        new = set() if any(folder.iterdir()) else {root}
        for entry in entries:
            # A partial file is the beginning of the very file that is there now.
            key = b"%s\0%d\0%d" % (entry.path, entry.size, entry.mtime_ns)
            place_below(root, entry, hashlib.sha256(key).hexdigest())
            make_place(entry, new, follow=False, replace=own)
        files = [entry for entry in entries if entry.kind == Kind.FILE]
        arrivals = _begun(files, progress)
        _refuse_small_disk(folder, arrivals, room)
        wanted = [[one.entry.index, one.have, one.entry.size, one.known] for one in arrivals]
        self._talk.send(json.dumps(wanted).encode() + b"\n")
        arrived = self._receive_all(arrivals, open_own if own else _open_partial, progress, hashed=own)
        self._incoming.end(goes_on=self._goes_on)
        finish_places([entry for entry in entries if entry.kind != Kind.FILE])
        return arrived

    def _receive_all(
        self,
        arrivals: Sequence[_Arrival],
        opened: Callable[[bytes], int],
        progress: Progress,
        *,
        hashed: bool,
    ) -> Mapping[int, str]:
        total = sum(arrival.entry.size for arrival in arrivals)
        done, arrived = 0, {}
        for arrival in arrivals:
            size = arrival.entry.size
            coming = self._incoming.announced(size - arrival.have, known=bool(arrival.known))
            if coming == SAME:
                arrived[arrival.entry.index] = arrival.known
                finish_places([arrival.entry])
            elif coming != UNREADABLE:
                if arrival.fd is None:
                    arrival.fd = open_unnamed(arrival.entry)
                    arrival.is_named = arrival.fd is None
                if arrival.fd is None:
                    arrival.fd = opened(arrival.entry.partial)
                came, sha = self._receive(arrival, arrival.fd, done, total, progress, hashed=hashed)
                if came:
                    arrived[arrival.entry.index] = sha.hexdigest() if hashed else ""
            done += size
        return arrived

    def _receive(
        self, arrival: _Arrival, fd: int, done: int, total: int, progress: Progress, *, hashed: bool
    ) -> tuple[bool, Any]:
        """Take a file to its place once it is whole. Whether it is what was sent; the hash of what came."""
        entry = arrival.entry

        def more(count: int) -> None:
            arrival.have += count
            self.sent += count
            progress("fetching", done + arrival.have, total)

        try:
            sha = self._incoming.rest(fd, arrival.have, entry.size, more, hashed=hashed)
            whole = self._incoming.arrives_whole(sha)
            if whole and arrival.is_named:
                os.replace(entry.partial, entry.final)  # noqa: PTH105  # paths are bytes
                finish(fd, entry)
            elif whole:
                name_it(fd, entry)
            elif arrival.is_named:
                os.unlink(entry.partial)  # noqa: PTH108
        finally:
            os.close(fd)
        return whole, sha


def _begun(files: Sequence[Entry], progress: Progress) -> list[_Arrival]:
    """The files, with what is here of them already."""
    arrivals = []
    there = [item for entry in files if not entry.is_new and (item := _here(entry))]
    hashes = {os.fsencode(path): sha256 for path, sha256 in hash_items(there, progress=progress).items()}
    for entry in files:
        arrival = _Arrival(entry, hashes.get(entry.final, ""))
        if not entry.is_new and not arrival.known and os.path.lexists(entry.partial):
            arrival.fd = _open_partial(entry.partial)
            arrival.have = min(os.fstat(arrival.fd).st_size, entry.size)
        arrivals.append(arrival)
    return arrivals


def _refuse_small_disk(folder: Path, arrivals: Sequence[_Arrival], room: str) -> None:
    needed = sum(arrival.space for arrival in arrivals) + _SPARE_BYTES
    free = shutil.disk_usage(folder).free
    if arrivals and needed > free:
        largest = max(arrivals, key=lambda arrival: arrival.space)
        name = printable(os.fsdecode(largest.entry.path))
        what = f"{needed >> 20} MiB are needed, and {free >> 20} MiB are free"
        why = f"the largest file is {name}: {shown_size(largest.space)}"
        raise TransferError(what, code="no-room", where=printable(str(folder)), why=why, fix=room)


def _open_partial(path: bytes) -> int:
    fd = open_partial(path)
    if fd is None:
        raise TransferError(
            "another clusterctl fetches the same to the same place",
            code="transfer-under-way",
            where=printable(os.fsdecode(os.path.dirname(path))),  # noqa: PTH120
            fix="wait until it is done",
        )
    return fd


def _here(entry: Entry) -> Item | None:
    """The file that is in its place already, if it may be the one."""
    place = Path(os.fsdecode(entry.final))
    with suppress(FileNotFoundError, PermissionError):  # what can't be read is fetched anew
        item = Item.of(os.fsdecode(entry.path), place, place.lstat())
        if item is not None and item.kind is Kind.FILE and item.size == entry.size:
            place.open("rb").close()
            return item
    return None


def parse_listing(
    lines: Iterable[bytes], most: int = sys.maxsize
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """What can be fetched, folders before what is in them; and what is left on the cluster.

    Raises:
        TransferError: it can't be so, or has more than ``most`` lines.
    """
    found: dict[bytes, Entry] = {}
    left: list[Entry] = []
    size = 0
    for number, line in enumerate(lines):
        try:
            size += len(line)
            if number >= most or (most != sys.maxsize and size > _MOST_BYTES):
                raise ValueError("it does not end")
            if line == _ALIVE:
                continue
            entry = Entry(line, len(found) + len(left))
            if entry.kind == LEFT:
                if entry.path != b".":  # the folder itself
                    _parts(entry.path)
                if not (0 <= entry.size < _MOST and 0 <= entry.space < _MOST):
                    raise ValueError("nothing has such a size")
                left.append(entry)
            else:
                found[entry.path] = _sensible(entry, found)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as exc:
            raise TransferError(
                "the cluster's list of files makes no sense, and nothing of it was fetched",
                code="answer-garbled",
                why=printable(f"{exc}: {line[:200].decode(errors='replace')}"),
                fix="look there with `clusterctl ssh`; what is called alike can come one after the other",
            ) from exc
    return tuple(found.values()), tuple(left)


def _sensible(entry: Entry, before: Mapping[bytes, Entry]) -> Entry:
    """The entry, if it can be so after those before; raises ValueError or LookupError."""
    parent, slash, name = entry.path.rpartition(b"/")
    _parts(name)
    Kind(entry.kind)
    if entry.kind == Kind.LINK:
        base64.b64decode(entry.payload)
    if entry.path in before:
        raise ValueError("two are called alike")
    if not (0 <= entry.size < _MOST and 0 <= entry.space < _MOST and -_MOST <= entry.mtime_ns < _MOST):
        raise ValueError("no file has such a size or time")
    if slash and before[parent].kind != Kind.FOLDER:
        raise ValueError("it is in what is no folder")
    entry.space = min(entry.size, entry.space)
    return entry


def _parts(path: bytes) -> list[bytes]:
    """The parts of a path inside a folder; raises ValueError for any other."""
    parts = path.split(b"/")
    if b"\0" in path or any(part in {b"", b".", b".."} or len(part) > _MAX_NAME for part in parts):
        raise ValueError("it is not a path inside a folder")
    return parts
