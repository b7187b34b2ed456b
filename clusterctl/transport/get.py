"""Download of files from the cluster. Files that exist locally are skipped; interrupted files are
resumed.
"""

from __future__ import annotations

import base64
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import CommandError, TransferError, UsageError, printable
from clusterctl.spec.names import first_few
from clusterctl.transport.base import PYTHON_GONE, Conversation, Transport, remote_argv
from clusterctl.transport.remote_content import ALIVE_LINE, LEFT, NOT_THERE
from clusterctl.transport.remote_incoming import (
    Incoming,
    IncomingEntry,
    NoRoomError,
    TruncatedError,
    UnexpectedError,
    close_partial_files,
    find_existing,
    finish_places,
    is_unchanged,
    make_places,
    receive,
    reject_small_disk,
)
from clusterctl.transport.tree import (
    Item,
    ItemKind,
    Progress,
    ReceivedStream,
    hash_items,
    is_pattern,
)
from clusterctl.util.confine import reject_written
from clusterctl.util.disk import write_error_fix, write_error_reason

_AGAIN = "run the command again; complete files are not downloaded again"
_MAX_NAME = 255  # bytes
_MOST = 1 << 63  # bytes or nanoseconds
# Files and folders in a list. The list of a host that never ends it must not fill the memory.
MOST_ENTRIES = 10_000_000
# Bytes of a list, for each million entries that it may have.
_MOST_BYTES = 1 << 28
_MILLION = 1_000_000
_LISTABLE = frozenset({ItemKind.FOLDER, ItemKind.FILE, ItemKind.LINK})


@dataclass(frozen=True, slots=True)
class DownloadResult:
    """Result of a download. sent_bytes: bytes that had to be sent. skipped: paths of pipes, devices
    etc. folder: with the files.
    """

    files: int
    bytes: int
    sent_bytes: int
    skipped: tuple[str, ...]
    folder: Path


def fetch(
    transport: Transport,
    paths: Sequence[str],
    folder: Path,
    *,
    is_name: bool = False,
    progress: Progress = lambda *_: None,
) -> DownloadResult:
    """Download files and folders of the cluster into the local ``folder``, each under its own name.

    is_name: if only a file arrives, ``folder`` is its path instead.
    Relative ``paths`` start at the user's home on the cluster. Other files in ``folder`` stay
    unchanged. After an error, files that are already complete stay as well.

    Raises:
        UsageError: a path does not exist on the cluster, or a folder is refused.
        TransferError: a file changed, can't be read on the cluster, or can't be written on this
            machine.
        TransportError: the cluster can't be reached.
    """
    argv = remote_argv("clusterctl.transport.remote_content", *paths)
    try:
        with (
            closing(RemoteSender(transport, argv)) as sender,
            sender.listed() as download,
            writing_into(folder),
        ):
            _reject_other_names(download.entries, paths, transport.host)
            is_renamed = is_name and [entry.kind for entry in download.entries] == [ItemKind.FILE]
            if is_renamed:
                download.entries[0].local = os.fsencode(folder.name)
                folder = folder.parent
            arrived = download.bring(download.entries, folder, progress=progress)
    except CommandError as exc:
        if exc.about == PYTHON_GONE:
            raise
        if exc.rc == NOT_THERE:
            problem = f"the file or folder {printable(exc.why)} does not exist on the cluster"
            fix = (
                "correct the path: relative paths start at the job user's home; "
                "`clusterctl jobs ID` shows the folder and the files of a job"
            )
            if is_pattern(exc.why):
                fix = (
                    f"wildcards are not replaced on the cluster: name the folder instead; or {fix}"
                )
            raise UsageError(
                problem, code="not-found", about="file", where=transport.host, fix=fix
            ) from exc
        raise TransferError(
            "the files can't be read on the cluster",
            code="file-unreadable",
            about="remote",
            where=transport.host,
            why=printable((exc.why.strip().splitlines() or [exc.what])[-1]),
            fix="make the files readable, or leave them out",
            host=transport.host,
        ) from exc
    files = [entry for entry in download.entries if entry.kind == ItemKind.FILE]
    incomplete = [os.fsdecode(entry.path) for entry in files if entry.index not in arrived]
    if incomplete:
        shown = printable(first_few(incomplete))
        raise TransferError(
            f"{shown} changed during the download, or can't be read on the cluster",
            about="changed",
            fix="make sure that they are readable, and run the command again when no program writes "
            "to them",
        )
    skipped = tuple(os.fsdecode(entry.path) for entry in download.left)
    size = sum(entry.size for entry in files)
    return DownloadResult(len(files), size, download.sent, skipped, folder)


def _reject_other_names(entries: Sequence[IncomingEntry], paths: Sequence[str], host: str) -> None:
    """Raise TransferError if the host lists a file or folder that was not requested.

    It could replace any file in the local folder. Only the host knows the names of `.` and `..`.
    """
    requested = [Path(os.path.normpath(path)).name for path in paths]
    unknown = sum(name in {"", os.pardir} for name in requested)
    listed = {entry.path.partition(b"/")[0] for entry in entries}
    others = sorted(listed - set(map(os.fsencode, requested)))
    if len(others) > unknown:
        raise TransferError(
            "nothing was downloaded: the cluster listed files that were not requested",
            code="internal",
            about="answer",
            where=host,
            why=printable(first_few([os.fsdecode(name) for name in others])),
            fix="ask the cluster's administrators which program answers there in place of python3",
            host=host,
        )


@contextmanager
def writing_into(folder: Path) -> Iterator[None]:
    """Raise TransferError if the body of the ``with`` can't write a file below the local
    ``folder``.
    """
    try:
        yield
    except OSError as exc:
        raise TransferError(
            "the copied files can't be written on this machine",
            code="file-unwritable",
            about="here",
            where=printable(os.fsdecode(exc.filename or str(folder))),
            why=write_error_reason(exc, folder),
            fix=f"{write_error_fix(exc, folder)}, then run the command again",
        ) from exc


class RemoteSender:
    """A program on a host that lists and sends files (see remote_content.py). It starts at the
    first request.

    many: keep the program running between requests, so that only the first request needs a login.
    """

    def __init__(self, transport: Transport, argv: Sequence[str], *, many: bool = False) -> None:
        self._transport = transport
        self._argv = argv
        self._many = many
        self._running = ExitStack()
        self._talk: Conversation | None = None

    def close(self) -> None:
        """End the program. The next request starts it again."""
        self._running.close()
        self._talk = None

    @contextmanager
    def listed(self, request: bytes = b"", *, most: int = MOST_ENTRIES) -> Iterator[Download]:
        """Send ``request``, unless it is b"", to the program, and yield the list that the program
        returns.

        Raises:
            TransferError: the list is invalid or longer than ``most`` lines, or the files don't
                match it.
            TransportError: the cluster can't be reached, or the program failed.
        """
        try:
            if self._talk is None:
                self._talk = self._running.enter_context(self._transport.converse(self._argv))
            if request:
                self._talk.send(request)
            yield Download(self._talk, most, more_follows=self._many)
        except BaseException as exc:
            self.close()
            if isinstance(exc, TruncatedError):
                raise TransferError(
                    "the cluster's data ended before the files were complete",
                    about="short",
                    fix=_AGAIN,
                ) from None
            if isinstance(exc, UnexpectedError):
                raise TransferError(
                    "the cluster sent data that clusterctl does not understand",
                    about="answer",
                    fix=_AGAIN,
                ) from None
            raise


class Download:
    """Files that a host offers: ``entries`` can be downloaded, ``left`` can't. ``sent``: bytes
    received.
    """

    def __init__(self, talk: Conversation, most: int, *, more_follows: bool) -> None:
        self._talk = talk
        self._more_follows = more_follows
        self._stream = ReceivedStream(talk)
        self._incoming = Incoming(self._stream)
        self.entries, self.left = parse_listing(iter(self._incoming.line, b""), most)
        self.sent = 0

    def bring(
        self,
        entries: Sequence[IncomingEntry],
        folder: Path,
        *,
        own: bool = False,
        room: str = "free disk space, or choose another folder",
        progress: Progress = lambda *_: None,
    ) -> Mapping[int, str]:
        """Download these entries into ``folder``. Return index -> sha256 of each complete file.

        own: whether only clusterctl writes to ``folder``. If so, a link or file with the name of a
            folder is removed, and every file is hashed. If not, such a link or file raises OSError,
            a local file with the listed size, time and mode is not read, and the sha256 of a file
            that was not read is "".
        room: advice to the user, for the TransferError.

        Raises:
            OSError: a file can't be written on this machine.
            TransferError: this machine's disk is too small.
            LimitError: an agent's command may not write one of them.
        """
        reject_written(folder, [os.fsdecode(entry.local) for entry in entries])
        root = os.fsencode(folder)
        make_places(root, entries, follow=False, own=own)
        files = [entry for entry in entries if entry.kind == ItemKind.FILE]
        arrived = {} if own else {entry.index: "" for entry in files if is_unchanged(entry)}
        files = [entry for entry in files if entry.index not in arrived]
        local = _local_items(files)
        hashes = hash_items(tuple(local.values()), progress=progress)
        for entry, item in local.items():
            entry.known = hashes[item.origin]
        try:
            find_existing(files)
            reject_small_disk(root, files)
            self._talk.send(b"".join(entry.request_line for entry in files) + b"\n")
            self._stream.progress = progress
            self._stream.total = sum(entry.size for entry in files)
            arrived |= self._receive(files, hashed=own)
        except NoRoomError as exc:
            where = printable(str(folder))
            details = printable(str(exc.strerror))
            raise TransferError(
                "the files do not fit on this machine's disk",
                code="disk-full",
                about="host",
                where=where,
                why=details,
                fix=room,
            ) from exc
        finally:
            close_partial_files(files)
        self._incoming.end(more_follows=self._more_follows)
        finish_places([entry for entry in entries if entry.kind != ItemKind.FILE])
        return arrived

    def _receive(
        self, files: Sequence[IncomingEntry], *, hashed: bool
    ) -> Iterator[tuple[int, str]]:
        done = 0
        for entry in files:
            self._stream.done = done + entry.have
            self._stream.came = 0
            sha256 = receive(entry, self._incoming, hashed=hashed)
            done += entry.size
            if sha256 is not None:
                yield entry.index, sha256
                if not (sha256 and sha256 == entry.known):
                    self.sent += entry.size - entry.have


def _local_items(files: Sequence[IncomingEntry]) -> Mapping[IncomingEntry, Item]:
    """Return the entries that exist locally with the listed size, each with its local file."""
    items = {}
    for entry in files:
        place = Path(os.fsdecode(entry.final))
        with suppress(OSError):
            item = (
                None if entry.is_new or entry.payload else Item.of(place.name, place, place.lstat())
            )
            if item and item.kind is ItemKind.FILE and item.size == entry.size:
                place.open("rb").close()
                items[entry] = item
    return items


def parse_listing(
    lines: Iterable[bytes], most: int = MOST_ENTRIES
) -> tuple[tuple[IncomingEntry, ...], tuple[IncomingEntry, ...]]:
    """Parse a list of files. Return (entries to download, each folder before its content; other
    entries).

    Raises TransferError if the list is invalid or has more than ``most`` lines.
    """
    entries: dict[bytes, IncomingEntry] = {}
    left: list[IncomingEntry] = []
    size = 0
    most_bytes = _MOST_BYTES * max(1, most // _MILLION)
    for number, line in enumerate(lines):
        try:
            size += len(line)
            if number >= most or size > most_bytes:
                raise ValueError("the list is too long")
            if line == ALIVE_LINE:
                continue
            entry = IncomingEntry(line, len(entries) + len(left))
            if entry.kind == LEFT:
                if entry.path != b".":  # the listed folder
                    _parts(entry.path)
                if not (0 <= entry.size < _MOST and 0 <= entry.space < _MOST):
                    raise ValueError("the size is out of range")
                left.append(entry)
            else:
                entries[entry.path] = _sensible(entry, entries)
        except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as exc:
            raise TransferError(
                "nothing was downloaded: the list of files is malformed or names a file twice",
                code="internal",
                about="answer",
                why=printable(f"{exc}: {line[:200].decode(errors='replace')}"),
                fix="download files of the same name with separate commands",
            ) from exc
    return tuple(entries.values()), tuple(left)


def _sensible(entry: IncomingEntry, previous: Mapping[bytes, IncomingEntry]) -> IncomingEntry:
    """Return the entry if it is valid; else raise ValueError or LookupError. previous: path ->
    entry.
    """
    parent, slash, name = entry.path.rpartition(b"/")
    _parts(name)
    if entry.kind not in _LISTABLE:
        raise ValueError("the kind is not known")
    if entry.kind == ItemKind.LINK:
        base64.b64decode(entry.payload)
    if entry.path in previous:
        raise ValueError("two entries have the same path")
    if not (
        0 <= entry.size < _MOST and 0 <= entry.space < _MOST and -_MOST <= entry.mtime_ns < _MOST
    ):
        raise ValueError("the size or time is out of range")
    if slash and previous[parent].kind != ItemKind.FOLDER:
        raise ValueError("the parent of the path is not a folder")
    entry.space = min(entry.size, entry.space)
    return entry


def _parts(path: bytes) -> list[bytes]:
    """Return the names in a relative path; raise ValueError if a name is "", "." or "..", or too
    long.
    """
    parts = path.split(b"/")
    if b"\0" in path or any(part in {b"", b".", b".."} or len(part) > _MAX_NAME for part in parts):
        raise ValueError("the path is not inside the folder, or a name is too long")
    return parts
