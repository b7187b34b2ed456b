"""Get files from the cluster. Files that are here by their hash are not sent; partial ones are resumed."""

from __future__ import annotations

import base64
import fcntl
import hashlib
import json
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from clusterctl.errors import ClusterctlError, CommandError, TransferError, UsageError, printable
from clusterctl.transport.base import LONGEST_LINE, Conversation, Transport, remote_argv
from clusterctl.transport.remote_open import lies_at
from clusterctl.transport.remote_send import ALIVE, HEADER, NOT_THERE, SAME, STILL, UNREADABLE, ZEROS
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
        with transport.converse(remote_argv("clusterctl.transport.remote_send", *paths), bulk=True) as talk:
            incoming = Incoming(talk, _too_little, _other_than_said)
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
    files = [remote for remote in listing if remote.kind is Kind.FILE]
    return Fetched(len(files), sum(remote.size for remote in files), transfer.sent, skipped)


def wanted_line(key: str | int, have: int, size: int, sha256: str) -> bytes:
    """A line of the request for files; see remote_send.py."""
    return json.dumps([key, have, size, sha256]).encode() + b"\n"


def _too_little() -> TransferError:
    return TransferError("the cluster sent less than it said", fix="run it again; what has arrived is kept")


def _other_than_said() -> TransferError:
    return TransferError(
        "the cluster sent other data than it said", fix="run it again; what has arrived is kept"
    )


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
    listing: Sequence[Remote]
    progress: Progress
    wanted: list[Remote] = field(default_factory=list)
    partials: dict[int, int] = field(default_factory=dict)  # index -> an open partial file, locked
    have: dict[int, int] = field(default_factory=dict)  # index -> bytes that are here already
    hashes: Mapping[Path, str] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    sent: int = 0

    def prepare(self) -> None:
        """Make folders and links, and see what is here."""
        self.folder.mkdir(parents=True, exist_ok=True)
        for remote in self.listing:
            place = self.folder / remote.path
            if remote.kind is Kind.FOLDER:
                _make_folder(place)
            elif remote.kind is Kind.LINK:
                _make_link(place, remote.target)
            else:
                self.wanted.append(remote)
        here = [item for remote in self.wanted if (item := self._here(remote))]
        self.hashes = hash_items(here, progress=self.progress)
        needed = sum(r.space for r in self.wanted if self.folder / r.path not in self.hashes) + _SPARE_BYTES
        free = shutil.disk_usage(self.folder).free
        if needed > free:
            raise TransferError(
                f"{needed >> 20} MiB are needed, and {free >> 20} MiB are free",
                where=printable(str(self.folder)),
                fix="make room, or name another folder",
            )

    def request(self) -> bytes:
        """What the cluster is asked for."""
        lines = []
        for remote in self.wanted:
            sha256 = self.hashes.get(self.folder / remote.path, "")
            have = 0
            if not sha256 and (partial := self._partial(remote)).exists():
                self.partials[remote.index] = fd = _open_partial(partial)
                have = min(os.fstat(fd).st_size, remote.size)
            self.have[remote.index] = have
            lines.append(wanted_line(remote.index, have, remote.size, sha256))
        return b"".join([*lines, b"\n"])

    def receive(self, incoming: Incoming) -> None:
        """Take what comes, each file to its place when it is whole and right."""
        total = sum(remote.size for remote in self.wanted)
        done = 0
        for remote in self.wanted:
            have, known = self.have[remote.index], self.folder / remote.path in self.hashes
            coming = incoming.announced(remote.size - have, known=known)
            if coming == UNREADABLE:
                self.wrong.append(remote.path)
            elif coming != SAME:
                self._receive(incoming, remote, have, done, total)
            done += remote.size

    def finish(self) -> None:
        """Files that were here get their modes and times, and folders, now that all is in them."""
        for remote in reversed(self.listing):
            place = self.folder / remote.path
            if remote.kind is not Kind.LINK and remote.path not in self.wrong:
                place.chmod(remote.mode)
                os.utime(place, ns=(remote.mtime_ns, remote.mtime_ns))

    def _here(self, remote: Remote) -> Item | None:
        """The file that is in its place already, if it may be the one."""
        place = self.folder / remote.path
        with suppress(FileNotFoundError):
            item = Item.of(remote.path, place, place.lstat())
            if item is not None and item.kind is Kind.FOLDER:
                raise IsADirectoryError(21, "a folder is where a file should go", str(place))
            if item is not None and item.kind is Kind.FILE and item.size == remote.size:
                with suppress(PermissionError):  # what can't be read is fetched anew
                    place.open("rb").close()
                    return item
        return None

    def _partial(self, remote: Remote) -> Path:
        """Where the file arrives. What is there is the beginning of the very file that is there now."""
        name = hashlib.sha256(
            f"{remote.path}\0{remote.size}\0{remote.mtime_ns}".encode(errors="surrogateescape")
        )
        return (self.folder / remote.path).parent / f".clusterctl-{name.hexdigest()[:32]}.part"

    def _receive(self, incoming: Incoming, remote: Remote, have: int, done: int, total: int) -> None:
        partial = self._partial(remote)
        fd = self.partials.pop(remote.index, None)
        fd = _open_partial(partial) if fd is None else fd
        with os.fdopen(fd, "r+b", buffering=0) as file:
            sha, left = hashlib.sha256(), have
            while left and (data := file.read(min(1 << 20, left))):
                sha.update(data)
                left -= len(data)
            file.truncate(have)
            file.seek(have)
            for count in incoming.content(fd, remote.size - have, sha):
                self.sent += count
                have += count
                self.progress("fetching", done + min(have, remote.size), total)
            file.truncate(have)
            if not incoming.arrives_whole(sha):
                partial.unlink()
                self.wrong.append(remote.path)
                return
            partial.replace(self.folder / remote.path)


def _open_partial(path: Path) -> int:
    """For us alone.

    Raises:
        TransferError: another clusterctl fetches the same file to the same place.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if not lies_at(os.fsencode(path), fd):  # the other one has just given it its place
            raise BlockingIOError
    except BlockingIOError:
        os.close(fd)
        raise TransferError(
            "another clusterctl fetches the same to the same place",
            where=printable(str(path.parent)),
            fix="wait until it is done",
        ) from None
    return fd


def _make_folder(place: Path) -> None:
    """A real folder: one that a link leads to may be anywhere."""
    try:
        place.mkdir(mode=0o700)
    except FileExistsError:
        status = place.lstat()
        if not stat.S_ISDIR(status.st_mode):
            raise FileExistsError(17, "it is a folder on the cluster, and none here", str(place)) from None
        if status.st_uid == os.geteuid() and status.st_mode & stat.S_IRWXU != stat.S_IRWXU:
            place.chmod(stat.S_IMODE(status.st_mode) | stat.S_IRWXU)  # until all is in it


def _make_link(place: Path, target: str) -> None:
    if place.is_symlink():
        if os.readlink(place) == target:  # noqa: PTH115  # as it stands
            return
        place.unlink()
    place.symlink_to(target)


class Incoming:
    """Reads a conversation. An end that comes too soon is ``too_little``, unless the command failed; data
    that the other side did not announce is ``other``.
    """

    def __init__(
        self,
        talk: Conversation,
        too_little: Callable[[], ClusterctlError],
        other: Callable[[], ClusterctlError],
    ) -> None:
        self._talk = talk
        self._too_little, self._other = too_little, other
        self._buffer = memoryview(b"")

    def exactly(self, size: int) -> bytes:
        """So many bytes."""
        return b"".join(self.pieces(size))

    def pieces(self, size: int) -> Iterator[memoryview]:
        """So many bytes, as they come."""
        while size:
            self._fill()
            piece, self._buffer = self._buffer[:size], self._buffer[size:]
            size -= len(piece)
            yield piece

    def line(self) -> bytes:
        """The bytes up to the next line feed, which is dropped."""
        parts: list[bytes] = []
        while sum(map(len, parts)) <= LONGEST_LINE:
            self._fill()
            head, found, _ = bytes(self._buffer).partition(b"\n")
            parts.append(head)
            self._buffer = self._buffer[len(head) + len(found) :]
            if found:
                return b"".join(parts)
        raise self._too_little()

    def number(self) -> int:
        """The next eight bytes."""
        return int(HEADER.unpack(self.exactly(HEADER.size))[0])

    def announced(self, size: int, *, known: bool) -> int:
        """How a file begins: with ``size``, ``UNREADABLE``, or ``SAME`` if its hash was ``known`` here.

        Raises:
            ClusterctlError: ``other``, if it is something else.
        """
        while (coming := self.number()) == ALIVE:
            pass
        if coming not in {size, UNREADABLE} and not (known and coming == SAME):
            raise self._other()
        return coming

    def content(self, fd: int, size: int, sha: Any) -> Iterator[int]:
        """Write so many bytes of a file as ``send_content`` sends them, and hash them; yields how many, as
        they come. What is zeros becomes a hole: the file's size is for the caller to set.

        Raises:
            ClusterctlError: ``other``, if it is more than that.
        """
        while size:
            length = self.number()
            if abs(length) > size:
                raise self._other()
            size -= abs(length)
            for done in range(0, -length, len(ZEROS)):
                sha.update(ZEROS[: -length - done])
            if length < 0:
                os.lseek(fd, -length, os.SEEK_CUR)
                yield -length
            for piece in self.pieces(max(0, length)):
                sha.update(piece)
                _write(fd, piece)
                yield len(piece)

    def arrives_whole(self, sha: Any) -> bool:
        """Whether a file, whose content has just come, held still meanwhile and has the hash of what came.

        Raises:
            ClusterctlError: ``other``, if something else follows the content.
        """
        while (length := self.number()) == 0:  # a sign of life
            pass
        if length != len(STILL) + sha.digest_size:
            raise self._other()
        return bool(self.exactly(length) == STILL + sha.digest())

    def more(self) -> bool:
        """Whether anything is left; waits for the end if nothing is."""
        return bool(self._buffer) or self._talk.receive() != b""

    def _fill(self) -> None:
        if not self._buffer:
            self._buffer = memoryview(self._talk.receive())
        if not self._buffer:
            self._talk.finish()  # which may know why
            raise self._too_little()


def _write(fd: int, data: memoryview) -> None:
    if data == ZEROS[: len(data)]:
        os.lseek(fd, len(data), os.SEEK_CUR)  # a hole
        return
    while data:
        data = data[os.write(fd, data) :]


@dataclass(frozen=True, slots=True)
class Remote:
    """One thing on the cluster. ``index`` is its place in the cluster's list, ``size`` is in bytes.

    ``space`` is what it takes on a disk, less where it has holes.
    """

    index: int
    path: str
    kind: Kind
    mode: int
    mtime_ns: int
    size: int
    space: int
    target: str


def parse_listing(lines: Iterable[bytes]) -> tuple[tuple[Remote, ...], tuple[str, ...]]:
    """What can be fetched, folders before what is in them; and the paths of what is of no kind that travels.

    Raises:
        TransferError: it can't be so.
    """
    found: dict[str, Remote] = {}
    others: list[str] = []
    for index, line in enumerate(lines):
        try:
            kind, name, mode, mtime_ns, size, space, target = json.loads(line)
            path = os.fsdecode(inside(base64.b64decode(name)))
            if kind == OTHER:
                others.append(path)
                continue
            text = os.fsdecode(base64.b64decode(target))
            sizes = int(size), min(int(size), int(space))
            remote = Remote(index, path, Kind(kind), int(mode) & 0o777, int(mtime_ns), *sizes, text)
        except (ValueError, TypeError, RecursionError) as exc:
            raise _untrusted(line, str(exc)) from exc
        parent = path.rpartition("/")[0]
        if path in found or remote.size < 0 or (parent and _kind(found, parent) is not Kind.FOLDER):
            raise _untrusted(line, "it can't be so")
        found[path] = remote
    return tuple(found.values()), tuple(others)


def _kind(found: dict[str, Remote], path: str) -> Kind | None:
    return found[path].kind if path in found else None


def inside(path: bytes) -> bytes:
    """A path that the cluster names, as it is.

    Raises:
        ValueError: it leads out of the folder that it is relative to, or is none.
    """
    parts = path.split(b"/")
    if b"\0" in path or any(part in {b"", b".", b".."} or len(part) > _MAX_NAME for part in parts):
        raise ValueError("it is not a path inside a folder")
    return path


def _untrusted(line: bytes, why: str) -> TransferError:
    return TransferError(
        "the cluster's list of files makes no sense, and nothing of it was fetched",
        why=printable(f"{why}: {line[:200].decode(errors='replace')}"),
        fix="look there with `clusterctl ssh`; two of what you name may be called alike",
    )
