"""Get files from the cluster. Files that are here by their hash are not sent; partial ones are resumed."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from clusterctl.errors import ClusterctlError, CommandError, TransferError, UsageError, printable
from clusterctl.transport.base import Conversation, Transport, remote_argv
from clusterctl.transport.remote_content import (
    NOT_THERE,
    SAME,
    UNREADABLE,
    Entry,
    Incoming,
    TruncatedError,
    UnexpectedError,
    finish_places,
    make_place,
    open_partial,
    place_below,
)
from clusterctl.transport.tree import Item, Kind, Progress, hash_items
from clusterctl.util.disk import reason

_SPARE_BYTES = 16 << 20
_MAX_NAME = 255  # bytes; Linux file systems take no longer one
OTHER = "other"


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
    try:
        with (
            transport.converse(remote_argv("clusterctl.transport.remote_content", *paths), bulk=True) as talk,
            distrusting(TransferError, fix="run it again; what has arrived is kept"),
        ):
            incoming = reading(talk)
            listing, skipped = parse_listing(iter(incoming.line, b""))
            with _writing(folder):
                transfer = _Fetch(folder, listing, progress)
                transfer.prepare()
                talk.send(transfer.request())
                transfer.receive(incoming)
                talk.finish()
                transfer.finish()
    except CommandError as exc:
        if exc.rc == NOT_THERE:
            raise UsageError(
                f"there is no {printable(exc.why)} on the cluster",
                where=transport.host,
                fix="relative paths begin at the job user's home; look there with `clusterctl ssh`",
            ) from exc
        raise TransferError(
            "the files can't be read on the cluster",
            where=transport.host,
            why=printable((exc.why.strip().splitlines() or [exc.what])[-1]),
            fix="make it readable, or name something else: `clusterctl ssh -- ls -l` shows what there is",
            host=transport.host,
        ) from exc
    if transfer.wrong:
        more = f" and {len(transfer.wrong) - 1} more" if len(transfer.wrong) > 1 else ""
        raise TransferError(
            f"{printable(transfer.wrong[0])}{more} changed while being fetched, or can't be read there",
            fix="run it again when nothing writes there; what has arrived is kept",
        )
    sizes = [entry.size for entry in transfer.wanted]
    return Fetched(len(sizes), sum(sizes), transfer.sent, skipped)


def wanted_line(key: str | int, have: int, size: int, sha256: str) -> bytes:
    """A line of the request for files; see remote_content.py."""
    return json.dumps([key, have, size, sha256]).encode() + b"\n"


def reading(talk: Conversation) -> Incoming:
    """What a conversation brings; where it ends too soon, the command's own failure comes first."""

    def receive() -> bytes:
        data = talk.receive()
        if not data:
            talk.finish()  # which may know why
        return data

    return Incoming(receive)


@contextmanager
def distrusting(error: type[ClusterctlError], *, fix: str) -> Iterator[None]:
    """Say by an ``error`` that the cluster sent too little, or what it had not announced."""
    try:
        yield
    except TruncatedError:
        raise error("the cluster sent less than it said", fix=fix) from None
    except UnexpectedError:
        raise error("the cluster sent other data than it said", fix=fix) from None


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    """Translate what goes wrong on this machine's disk."""
    try:
        yield
    except OSError as exc:
        raise TransferError(
            "the files can't be written here",
            where=printable(os.fsdecode(exc.filename or str(folder))),
            why=reason(exc, folder),
            fix="make room or rights there, then run it again: what has arrived is kept",
        ) from exc


@dataclass(slots=True)
class _Fetch:
    """One transfer: what is wanted of ``listing``, and how far it is."""

    folder: Path
    listing: Sequence[Entry]
    progress: Progress
    partials: dict[int, int] = field(default_factory=dict)  # index -> an open partial file, locked
    have: dict[int, int] = field(default_factory=dict)  # index -> bytes that are here already
    hashes: Mapping[Path, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    sent: int = 0

    @property
    def wanted(self) -> list[Entry]:
        """The files."""
        return [entry for entry in self.listing if entry.kind == Kind.FILE]

    def prepare(self) -> None:
        """Make folders and links, and see what is here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for entry in self.listing:
            make_place(os.path.join(os.fsencode(self.folder), entry.path), entry, follow=False)  # noqa: PTH118
            # A partial file is the beginning of the very file that is there now.
            key = b"%s\0%d\0%d" % (entry.path, entry.size, entry.mtime_ns)
            place_below(os.fsencode(self.folder), entry, hashlib.sha256(key).hexdigest())
        here = [item for entry in self.wanted if (item := _here(entry))]
        self.hashes = hash_items(here, progress=self.progress)
        needed = sum(entry.space for entry in self.wanted if not self._known(entry)) + _SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise TransferError(
                f"{needed >> 20} MiB are needed, and {free >> 20} MiB are free",
                where=printable(str(self.folder)),
                fix="make room, or name another folder",
            )

    def _known(self, entry: Entry) -> str:
        """The hash of what is in the file's place, if it may be the file."""
        return self.hashes.get(Path(os.fsdecode(entry.final)), "")

    def request(self) -> bytes:
        """What the cluster is asked for."""
        lines = []
        for entry in self.wanted:
            sha256, have = self._known(entry), 0
            if not sha256 and os.path.lexists(entry.partial):
                self.partials[entry.index] = fd = self._open_partial(entry)
                have = min(os.fstat(fd).st_size, entry.size)
            self.have[entry.index] = have
            lines.append(wanted_line(entry.index, have, entry.size, sha256))
        return b"".join([*lines, b"\n"])

    def receive(self, incoming: Incoming) -> None:
        """Take what comes, each file to its place when it is whole and right."""
        total = sum(entry.size for entry in self.wanted)
        done = 0
        for entry in self.wanted:
            coming = incoming.announced(entry.size - self.have[entry.index], known=bool(self._known(entry)))
            if coming == UNREADABLE:
                self.wrong.append(os.fsdecode(entry.path))
            elif coming != SAME:
                self._receive(incoming, entry, done, total)
            done += entry.size

    def _receive(self, incoming: Incoming, entry: Entry, done: int, total: int) -> None:
        have = self.have[entry.index]
        fd = self.partials.pop(entry.index, None)
        fd = self._open_partial(entry) if fd is None else fd

        def arrived(count: int) -> None:
            nonlocal have
            have += count
            self.sent += count
            self.progress("fetching", done + have, total)

        try:
            if incoming.arrives_whole(incoming.rest(fd, have, entry.size, arrived)):
                os.replace(entry.partial, entry.final)  # noqa: PTH105  # paths are bytes
            else:
                os.unlink(entry.partial)  # noqa: PTH108
                self.wrong.append(os.fsdecode(entry.path))
        finally:
            os.close(fd)

    def _open_partial(self, entry: Entry) -> int:
        fd = open_partial(entry.partial)
        if fd is None:
            raise TransferError(
                "another clusterctl fetches the same to the same place",
                where=printable(os.fsdecode(os.path.dirname(entry.partial))),  # noqa: PTH120
                fix="wait until it is done",
            )
        return fd

    def finish(self) -> None:
        """Files that were here get their modes and times, and folders, now that all is in them."""
        right = [entry for entry in self.listing if os.fsdecode(entry.path) not in self.wrong]
        finish_places(os.fsencode(self.folder), right)


def _here(entry: Entry) -> Item | None:
    """The file that is in its place already, if it may be the one."""
    place = Path(os.fsdecode(entry.final))
    with suppress(FileNotFoundError, PermissionError):  # what can't be read is fetched anew
        item = Item.of(os.fsdecode(entry.path), place, place.lstat())
        if item is not None and item.kind is Kind.FILE and item.size == entry.size:
            place.open("rb").close()
            return item
    return None


def parse_listing(lines: Iterable[bytes]) -> tuple[tuple[Entry, ...], tuple[str, ...]]:
    """What can be fetched, folders before what is in them; and the paths of what is of no kind that travels.

    Raises:
        TransferError: it can't be so.
    """
    found: dict[bytes, Entry] = {}
    others: list[str] = []
    for index, line in enumerate(lines):
        try:
            entry = Entry(json.loads(line), index)
            parent = inside(entry.path).rpartition(b"/")[0]
            if entry.kind == OTHER:
                others.append(os.fsdecode(entry.path))
                continue
            Kind(entry.kind)
            base64.b64decode(entry.payload)
            if entry.path in found or entry.size < 0 or (parent and found[parent].kind != Kind.FOLDER):
                raise ValueError("it can't be so")
            entry.space = min(entry.size, entry.space)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as exc:
            raise TransferError(
                "the cluster's list of files makes no sense, and nothing of it was fetched",
                why=printable(f"{exc}: {line[:200].decode(errors='replace')}"),
                fix="look there with `clusterctl ssh`; two of what you name may be called alike",
            ) from exc
        found[entry.path] = entry
    return tuple(found.values()), tuple(others)


def inside(path: bytes) -> bytes:
    """A path that the cluster names, as it is.

    Raises:
        ValueError: it leads out of the folder that it is relative to, or is none.
    """
    parts = path.split(b"/")
    if b"\0" in path or any(part in {b"", b".", b".."} or len(part) > _MAX_NAME for part in parts):
        raise ValueError("it is not a path inside a folder")
    return path
