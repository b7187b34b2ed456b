"""Put files on the cluster. What is there is not sent, by its hash; partial files are resumed."""

from __future__ import annotations

import base64
import json
import os
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import BinaryIO, cast

from clusterctl.errors import CommandError, TransferError, TransportError, printable
from clusterctl.transport.base import Conversation, Transport, remote_argv
from clusterctl.transport.remote_content import ALIVE_LINE, HEADER, SAME, line_of, send_file, wanted_of
from clusterctl.transport.remote_incoming import Incoming, TruncatedError, UnexpectedError
from clusterctl.transport.remote_open import HELD
from clusterctl.transport.tree import Item, Kind, Progress, Stream, hash_items, not_readable
from clusterctl.util.assets import tree_files

STORE = "clusterctl/store"  # in the job user's home
ARCHIVES = f"{STORE}/archives"
_PROGRAM = "clusterctl.transport.remote_receive"
_PIECE = 1 << 18  # bytes that are sent at once


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a transfer. ``folder`` is where it went; ``sent_bytes`` had to travel.

    ``at`` is where the store has each file, if only that was filled.
    """

    folder: str
    files: int
    bytes: int
    sent_bytes: int
    at: tuple[str, ...] = ()


def send_into(
    transport: Transport, items: Sequence[Item], folder: str, *, progress: Progress = lambda *_: None
) -> Sent:
    """Put items straight to their places below a folder of the cluster, which is made if need be.

    Relative folders begin at the user's home. What lies there under other names stays.

    Raises:
        UsageError: a file here can't be read.
        TransferError: a file changed meanwhile, or the cluster could not write one; what has arrived is kept.
        TransportError: the cluster can't be reached; what has arrived is kept.
    """
    return _converse(transport, remote_argv(_PROGRAM, "", folder), items, None, progress)


def send_new_folder(
    transport: Transport,
    items: Sequence[Item],
    hashes: Mapping[Path, str],
    folder: str,
    *,
    ours: Mapping[str, bytes],
    progress: Progress = lambda *_: None,
) -> Sent:
    """Make a folder of items, by way of the store, and of ``ours``: name -> content.

    It appears whole or not at all. Archives among the items are no part of it: the store gets each as a
    folder ``ARCHIVES/NAME``, before the new folder appears.
    """
    return _converse(transport, _receiver(folder), items, hashes, progress, ours=ours)


def begin_new_folder(transport: Transport, folder: str) -> None:
    """Start what receives a folder on the cluster, for which ``send_new_folder`` will be called soon."""
    transport.begin(_receiver(folder))


def _receiver(folder: str) -> list[str]:
    return remote_argv(_PROGRAM, STORE, folder)


def send_to_store(
    transport: Transport, files: Sequence[Path], *, progress: Progress = lambda *_: None
) -> Mapping[Path, str]:
    """Send files into the store only; file -> its path on the cluster, read-only and named by its hash.

    What is unused for 30 days may be gone: send it again whenever it is needed, which costs next to nothing.
    """
    items = []
    for number, path in enumerate(files):
        try:
            item = Item.of(str(number), path, path.stat())
        except OSError as exc:
            raise not_readable([exc]) from exc
        if item is None or item.kind is not Kind.FILE:
            raise not_readable([OSError(0, "it is no ordinary file", str(path))])
        items.append(item)
    hashes = hash_items(items, progress=progress)
    sent = _converse(transport, remote_argv(_PROGRAM, STORE, ""), items, hashes, progress)
    if len(sent.at) != len(files):
        raise _not_understood(json.dumps(sent.at).encode(), transport.host)
    return dict(zip(files, sent.at, strict=True))


@dataclass(frozen=True, slots=True)
class _Wanted:
    """A file that the cluster asks for: it has the beginning, or a file with that sha256 in its place."""

    item: Item
    have: int
    sha256: str


def _converse(
    transport: Transport,
    argv: Sequence[str],
    items: Sequence[Item],
    hashes: Mapping[Path, str] | None,
    progress: Progress,
    *,
    ours: Mapping[str, bytes] = MappingProxyType({}),
) -> Sent:
    """Ask what is missing, send it, and hear what became of it. Without ``hashes`` few files need one."""
    try:
        with transport.converse(argv) as talk:
            answers = _answers(talk)
            out = _Outgoing(talk, progress)
            for line in _request(items, hashes, ours):
                out.write(line)
            out.flush()
            wanted = _wanted(items, answers, transport.host)
            there = [one.item for one in wanted if one.sha256]
            total = _send_wanted(out, wanted, hash_items(there, progress=progress) if there else {})
            sent = _result(items, next(answers, b""), total, transport.host)
            talk.finish()
            return sent
    except CommandError as exc:
        raise _ended(transport.host, exc) from exc
    except (TruncatedError, UnexpectedError):
        raise _not_understood(b"the transfer ended without an answer", transport.host) from None


def _answers(talk: Conversation) -> Iterator[bytes]:
    """Yield the lines that the cluster says, but for its signs of life."""
    incoming = Incoming(Stream(talk))
    while True:
        if (line := incoming.line()) != ALIVE_LINE:
            yield line


def _wanted(items: Sequence[Item], answers: Iterator[bytes], host: str) -> list[_Wanted]:
    wanted = []
    for line in iter(answers.__next__, b""):
        try:
            index, have, size, sha256 = wanted_of(line)
            item = items[index]
        except (ValueError, IndexError) as exc:
            raise _not_understood(line, host) from exc
        is_sent = item.kind is Kind.FILE or (item.kind is Kind.ARCHIVE and not sha256)
        if index < 0 or not is_sent or size != item.size or not 0 <= have <= size:
            raise _not_understood(line, host)
        wanted.append(_Wanted(item, have, sha256))
    return wanted


def _request(
    items: Sequence[Item], hashes: Mapping[Path, str] | None, ours: Mapping[str, bytes]
) -> Iterator[bytes]:
    for item in items:
        known = "" if hashes is None else hashes.get(item.origin, "")
        payload = known if item.kind is Kind.FILE else os.fsencode(item.target)
        yield line_of(
            item.kind,
            os.fsencode(item.path),
            payload,
            mode=item.mode,
            mtime_ns=item.mtime_ns,
            size=item.size,
            space=item.size,
        ).encode()
    now = time.time_ns()
    for name, content in ours.items():
        size = len(content)
        line = line_of("ours", os.fsencode(name), content, mode=0o600, mtime_ns=now, size=size, space=size)
        yield line.encode()
    yield b"\n"


def _send_wanted(out: _Outgoing, wanted: Sequence[_Wanted], hashes: Mapping[Path, str]) -> int:
    """Send these files, but for those that the cluster has by their hash. Return how many bytes travel."""
    sent = [one for one in wanted if not one.sha256 or hashes[one.item.origin] != one.sha256]
    total = out.total = sum(one.item.size - one.have for one in sent)
    out.sent = done = 0
    for one in wanted:
        item = one.item
        if item.kind is Kind.ARCHIVE:
            archive = archive_of(item.origin)
            out.write(HEADER.pack(len(archive)) + archive)
            continue
        if one.sha256 and hashes[item.origin] == one.sha256:
            out.write(HEADER.pack(SAME))
            continue
        try:
            fd = os.open(item.origin, os.O_RDONLY | os.O_CLOEXEC)
            try:
                # A file that grew is not the file that was listed, though it begins with that.
                size = item.size if os.fstat(fd).st_size == item.size else sys.maxsize
                send_file(cast("BinaryIO", out), fd, one.have, size)
            finally:
                os.close(fd)
        except OSError as exc:
            raise not_readable([OSError(exc.errno, exc.strerror, str(item.origin))]) from exc
        done += item.size - one.have
        out.sent = done  # holes take no bytes
    out.flush()
    return total


def archive_of(folder: Path) -> bytes:
    """A folder under its own name as one piece: compressed JSON, path -> bytes as Latin-1, of its files."""
    files = {path.relative_to(folder.parent).as_posix(): path.read_bytes() for path in tree_files(folder)}
    return zlib.compress(json.dumps({path: data.decode("latin-1") for path, data in files.items()}).encode())


@dataclass(slots=True)
class _Outgoing:
    """A conversation as a file that is written to, in large pieces.

    ``progress`` is shown of ``total`` bytes, once these are known.
    """

    talk: Conversation
    progress: Progress
    total: int | None = None
    sent: int = 0
    _kept: bytearray = field(default_factory=bytearray)

    def write(self, data: bytes) -> None:
        self.sent += len(data)
        if len(data) >= _PIECE:
            self.flush()
            self.talk.send(data)
            return
        self._kept += data
        if len(self._kept) >= _PIECE:
            self.flush()

    def flush(self) -> None:
        self.talk.send(bytes(self._kept))
        self._kept.clear()
        if self.total is not None:
            self.progress("sending", min(self.sent, self.total), self.total)


def _result(items: Sequence[Item], line: bytes, total: int, host: str) -> Sent:
    """Return what became of the transfer by the cluster's last answer.

    Raises:
        TransferError: files did not have the hash that was announced.
    """
    try:
        answer = json.loads(line)
        folder = os.fsdecode(base64.b64decode(answer["folder"]))
        wrong, at = [items[index] for index in answer["wrong"]], tuple(map(str, answer["at"]))
    except (LookupError, TypeError, ValueError, RecursionError) as exc:
        raise _not_understood(line, host) from exc
    if wrong:
        raise _changed(wrong)
    size = sum(item.size for item in items)
    return Sent(folder, sum(item.kind is Kind.FILE for item in items), size, total, at)


def _not_understood(said: bytes, host: str) -> TransportError:
    what = "the cluster answered what clusterctl does not understand"
    why = printable(said[:200].decode(errors="replace"))
    return TransportError(what, code="answer-garbled", where=host, why=why, host=host)


def _ended(host: str, exc: CommandError) -> TransferError:
    what = "the files can't be written on the cluster"
    fix = "make room or rights there (`clusterctl ssh`), then run it again: what has arrived is kept"
    if exc.rc == HELD:
        what = "the store of files on the cluster is locked"
        fix = (
            "end the process that holds the lock, a job's perhaps: `clusterctl ssh lslocks` names it, or on "
            "another node the same, if homes are shared; or, while no other `submit` is under way, remove "
            "the file; then run it again"
        )
    why = printable((exc.why.strip().splitlines() or [exc.what])[-1])
    return TransferError(what, code="files-unwritable", where=host, why=why, fix=fix, host=host)


def _changed(items: Sequence[Item]) -> TransferError:
    more = f" and {len(items) - 1} more" if len(items) > 1 else ""
    return TransferError(
        f"{printable(items[0].path)}{more} changed while being sent",
        code="files-changed",
        fix="run it again when nothing writes there; what has arrived is kept",
    )
