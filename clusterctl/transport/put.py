"""Put files on the cluster. What is there is not sent, by its hash; partial files are resumed."""

from __future__ import annotations

import base64
import json
import os
import time
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, BinaryIO, TypeVar, cast

from clusterctl.errors import CommandError, TransferError, TransportError, printable
from clusterctl.transport.base import Conversation, Transport, lines, remote_argv
from clusterctl.transport.remote_content import HEADER, line_of, send_content, send_rest
from clusterctl.transport.remote_open import HELD
from clusterctl.transport.tree import Item, Kind, Progress, hash_items, not_readable
from clusterctl.util.assets import tree_files

STORE = "clusterctl/store"  # in the job user's home
ARCHIVES = f"{STORE}/archives"
_PROGRAM = "clusterctl.transport.remote_receive"
_PIECE = 1 << 18  # bytes that are sent at once
_NO_HASH = 32  # bytes of zeros, in place of a hash: what was sent is not the whole file

_T = TypeVar("_T")


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
    unreadable: list[OSError] = []
    for item in items:
        if item.kind is Kind.FILE:
            try:
                os.close(os.open(item.origin, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
            except OSError as exc:
                unreadable.append(exc)
    if unreadable:
        raise not_readable(unreadable)
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
            answers = lines(iter(talk.receive, b""), _not_understood(b"a line does not end", transport.host))
            request = _Outgoing(talk, lambda _: None)
            for line in _request(items, hashes, ours):
                request.write(line)
            request.flush()
            if hashes is None:
                alike = _rows(talk, answers, transport.host, "alike", partial(_alike, items))
                talk.send(json.dumps(_different(items, alike, progress)).encode() + b"\n")
            missing = _rows(talk, answers, transport.host, "send", partial(_missing, items))
            total = sum(item.size - have for item, have in missing)
            rest = hashes is None
            _send_content(talk, missing, lambda sent: progress("sending", min(sent, total), total), rest=rest)
            folder, wrong, at = _next(talk, answers, transport.host, partial(_result, items))
            talk.finish()
    except CommandError as exc:
        raise _ended(transport.host, exc) from exc
    if wrong:
        raise _changed(wrong)
    size = sum(item.size for item in items)
    return Sent(folder, sum(item.kind is Kind.FILE for item in items), size, total, at)


def _different(items: Sequence[Item], alike: Sequence[tuple[int, str]], progress: Progress) -> list[int]:
    """Those of the files, by index, that the cluster has in the same size but with another content."""
    hashes = hash_items([items[index] for index, _ in alike], progress=progress)
    return [index for index, sha256 in alike if hashes[items[index].origin] != sha256]


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


def _send_content(
    talk: Conversation,
    missing: Sequence[tuple[Item, int]],
    told: Callable[[int], object],
    *,
    rest: bool,
) -> None:
    """Each file from where the cluster has it, as long as it was said to be; a hash tells what changed.

    ``rest``: the last piece, too.
    """
    out, done = _Outgoing(talk, told), 0
    for item, have in missing:
        if item.kind is Kind.ARCHIVE:
            archive = archive_of(item.origin)
            out.write(HEADER.pack(len(archive)) + archive)
            continue
        try:
            fd = os.open(item.origin, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as exc:
            raise not_readable([exc]) from exc
        try:
            before, to = os.fstat(fd), cast("BinaryIO", out)
            if rest and before.st_size == item.size:
                send_rest(to, fd, have, item.size, before=before)
            else:
                send_content(to, fd, have, item.size)
                if rest:
                    out.write(HEADER.pack(_NO_HASH) + bytes(_NO_HASH))
        except OSError as exc:
            raise not_readable([OSError(exc.errno, exc.strerror, str(item.origin))]) from exc
        finally:
            os.close(fd)
        done += item.size - have
        out.sent = done  # holes take no bytes
    out.flush()


def archive_of(folder: Path) -> bytes:
    """A folder under its own name as one piece: compressed JSON, path -> bytes as Latin-1, of its files."""
    files = {path.relative_to(folder.parent).as_posix(): path.read_bytes() for path in tree_files(folder)}
    return zlib.compress(json.dumps({path: data.decode("latin-1") for path, data in files.items()}).encode())


class _Outgoing:
    """A conversation as a file that is written to, in large pieces; ``told`` hears how many bytes went."""

    def __init__(self, talk: Conversation, told: Callable[[int], object]) -> None:
        self._talk, self._told = talk, told
        self._kept = bytearray()
        self.sent = 0

    def write(self, data: bytes) -> None:
        self.sent += len(data)
        if len(data) >= _PIECE:
            self.flush()
            self._talk.send(data)
            return
        self._kept += data
        if len(self._kept) >= _PIECE:
            self.flush()

    def flush(self) -> None:
        self._talk.send(bytes(self._kept))
        self._kept.clear()
        self._told(self.sent)


def _next(
    talk: Conversation, answers: Iterator[bytes], host: str, read: Callable[[Mapping[str, Any]], _T]
) -> _T:
    """What ``read`` makes of the next answer, a JSON object on a line; signs of life are passed over."""
    for line in answers:
        try:
            answer = json.loads(line)
            if "checked" not in answer:
                return read(answer)
        except (LookupError, TypeError, ValueError, RecursionError) as exc:
            raise _not_understood(line, host) from exc
    talk.finish()  # says why there is no answer
    raise TransferError(
        "the cluster ended the transfer without an answer", code="ended-without-answer", fix="run it again"
    )


def _not_understood(said: bytes, host: str) -> TransportError:
    what = "the cluster answered what clusterctl does not understand"
    why = printable(said[:200].decode(errors="replace"))
    return TransportError(what, code="answer-garbled", where=host, why=why, host=host)


def _rows(
    talk: Conversation, answers: Iterator[bytes], host: str, name: str, read: Callable[[int, Any], _T]
) -> list[_T]:
    """All rows of an answer that comes in several lines, the last of which has none."""
    found: list[_T] = []
    while rows := _next(talk, answers, host, lambda answer: [read(*row) for row in answer[name]]):
        found += rows
    return found


def _missing(items: Sequence[Item], index: int, have: int) -> tuple[Item, int]:
    """A file that the cluster lacks, and how much of it it has."""
    if not 0 <= have <= (item := _item(items, index)).size:
        raise ValueError("it has more than there is")
    return item, have


def _alike(items: Sequence[Item], index: int, sha256: str) -> tuple[int, str]:
    """A file that the cluster has in the same size, and its hash there."""
    if _item(items, index).kind is not Kind.FILE:
        raise ValueError("it is no file")
    return index, sha256


def _result(
    items: Sequence[Item], answer: Mapping[str, Any]
) -> tuple[str, tuple[Item, ...], tuple[str, ...]]:
    """The folder, the files that did not have the hash that was announced, and where the store has each."""
    wrong = tuple(_item(items, index) for index in answer["wrong"])
    return os.fsdecode(base64.b64decode(answer["folder"])), wrong, tuple(map(str, answer.get("at", ())))


def _item(items: Sequence[Item], index: int) -> Item:
    if index < 0:
        raise ValueError("an index counts from 0")
    return items[index]


def _ended(host: str, exc: CommandError) -> TransferError:
    what = "the files can't be written on the cluster"
    fix = "make room or rights there (`clusterctl ssh`), then run it again: what has arrived is kept"
    if exc.rc == HELD:
        what = "the store of files on the cluster is locked"
        fix = (
            "end the process that holds the lock, a job's perhaps (`clusterctl ssh`, `clusterctl cancel`); "
            "or, while no other `submit` is under way, remove the file; then run it again"
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
