"""Get files from the cluster. Files that are here by their hash are not sent; partial ones are resumed."""

from __future__ import annotations

import base64
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import CommandError, TransferError, UsageError, printable
from clusterctl.transport.base import Conversation, Transport, remote_argv
from clusterctl.transport.remote_content import ALIVE_LINE, LEFT, NOT_THERE
from clusterctl.transport.remote_incoming import (
    Entry,
    Incoming,
    NoRoomError,
    TruncatedError,
    UnexpectedError,
    close_begun,
    find_begun,
    finish_places,
    make_places,
    receive,
    reject_small_disk,
)
from clusterctl.transport.tree import Item, Kind, Progress, Stream, hash_items
from clusterctl.util.disk import reason

_AGAIN = "run it again; what has arrived is kept"
_MAX_NAME = 255  # bytes; Linux file systems take no longer one
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


class Download:
    """What the cluster has listed: ``entries``, and what is ``left`` there. ``sent`` bytes had to travel."""

    def __init__(self, talk: Conversation, most: int, *, goes_on: bool) -> None:
        self._talk, self._goes_on, self._stream = talk, goes_on, Stream(talk)
        self._incoming = Incoming(self._stream)
        self.entries, self.left = parse_listing(iter(self._incoming.line, b""), most)
        self.sent = 0

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

        ``own``: nothing else writes there, so what stands in the way, such as a link in place of a folder, is
        removed, which else is an error. Else what comes is hashed only where it may have changed on its way,
        and its sha256 is "". ``room`` is what to do where the disk is too small.

        Raises:
            OSError: it can't be written here.
            TransferError: the disk is too small.
        """
        root = os.fsencode(folder)
        make_places(root, entries, follow=False, own=own)
        files = [entry for entry in entries if entry.kind == Kind.FILE]
        _hash_here(files, progress)
        try:
            find_begun(files)
            reject_small_disk(root, files)
            self._talk.send(b"".join(entry.wanted for entry in files) + b"\n")
            self._stream.progress, self._stream.total = progress, sum(entry.size for entry in files)
            arrived = dict(self._receive(files, hashed=own))
        except NoRoomError as exc:
            what, where, why = "the disk is too small", printable(str(folder)), printable(str(exc.strerror))
            raise TransferError(what, code="no-room", where=where, why=why, fix=room) from exc
        finally:
            close_begun(files)
        self._incoming.end(goes_on=self._goes_on)
        finish_places([entry for entry in entries if entry.kind != Kind.FILE])
        return arrived

    def _receive(self, files: Sequence[Entry], *, hashed: bool) -> Iterator[tuple[int, str]]:
        done = 0
        for entry in files:
            self._stream.done, self._stream.came = done + entry.have, 0
            sha256 = receive(entry, self._incoming, hashed=hashed)
            done += entry.size
            if sha256 is not None:
                yield entry.index, sha256
                self.sent += 0 if sha256 and sha256 == entry.known else entry.size - entry.have


def _hash_here(files: Sequence[Entry], progress: Progress) -> None:
    """Hash the files that are in their places already, in several threads and if they are not remembered.

    A second `get` of a large folder would be silent for minutes otherwise.
    """
    here = {}
    for entry in files:
        place = Path(os.fsdecode(entry.final))
        with suppress(OSError):
            item = None if entry.is_new or entry.payload else Item.of(place.name, place, place.lstat())
            if item and item.kind is Kind.FILE and item.size == entry.size:
                place.open("rb").close()
                here[entry] = item
    hashes = hash_items(tuple(here.values()), progress=progress)
    for entry, item in here.items():
        entry.known = hashes[item.origin]


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
            if line == ALIVE_LINE:
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
