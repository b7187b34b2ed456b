"""Send files to the cluster. What is there by its hash is not sent; what was begun is gone on with."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from clusterctl.errors import CommandError, TransferError, TransportError
from clusterctl.terminal import printable
from clusterctl.transfer.hashes import hash_items
from clusterctl.transfer.remote.store import NO_REQUIRED
from clusterctl.transfer.tree import Item, Kind, Progress, not_readable
from clusterctl.transport.base import BULK, Conversation, Transport
from clusterctl.transport.program import remote_argv
from clusterctl.transport.remote_send import HEADER

STORE = "clusterctl/store"  # in the job user's home

_REMOTE = "clusterctl.transfer.remote"
_PIECE = 1 << 18


@dataclass(frozen=True, slots=True)
class Sent:
    """What became of a transfer. ``folder`` is where it went; ``sent_bytes`` had to travel."""

    folder: str
    files: int
    bytes: int
    sent_bytes: int


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
    hashes = _hashes(items, progress)
    answer, sent = _converse(transport, remote_argv(f"{_REMOTE}.places", folder), items, hashes, progress)
    return Sent(answer.folder, len(hashes), sum(i.size for i in items), sent)


def send_new_folder(
    transport: Transport,
    items: Sequence[Item],
    hashes: Mapping[Path, str],
    folder: str,
    *,
    ours: Mapping[str, bytes],
    required: str,
    progress: Progress = lambda *_: None,
) -> Sent:
    """Make a folder of items, by way of the store, and of ``ours``: name -> content.

    It appears whole or not at all. ``required`` is a folder without which nothing is done.

    Raises:
        CommandError: with rc ``NO_REQUIRED``, the required folder is not there.
        TransferError, TransportError, UsageError: see ``send_into``.
    """
    answer, sent = _converse(transport, _store(folder, required), items, hashes, progress, ours=ours)
    return Sent(answer.folder, len(hashes), sum(i.size for i in items), sent)


def send_to_store(
    transport: Transport, files: Sequence[Path], *, progress: Progress = lambda *_: None
) -> Mapping[Path, str]:
    """Send files into the store only; file -> its path on the cluster, read-only and named by its hash.

    What is unused for 30 days may be gone: send it again whenever it is needed, which costs next to nothing.

    Raises:
        TransferError, TransportError, UsageError: see ``send_into``.
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
    hashes = _hashes(items, progress)
    answer, _ = _converse(transport, _store(""), items, hashes, progress)
    return dict(zip(files, answer.at, strict=True))


@dataclass(frozen=True, slots=True)
class _Answer:
    folder: str
    wrong: tuple[int, ...]
    at: tuple[str, ...]


def _store(*arguments: str) -> list[str]:
    return remote_argv(f"{_REMOTE}.store", STORE, *arguments)


def _hashes(items: Sequence[Item], progress: Progress) -> Mapping[Path, str]:
    return hash_items([item for item in items if item.kind is Kind.FILE], progress=progress)


def _converse(
    transport: Transport,
    argv: Sequence[str],
    items: Sequence[Item],
    hashes: Mapping[Path, str],
    progress: Progress,
    *,
    ours: Mapping[str, bytes] = MappingProxyType({}),
) -> tuple[_Answer, int]:
    """Ask what is missing and send it; returns the last answer and the bytes that were sent."""
    try:
        with transport.converse(argv, bulk=sum(item.size for item in items) > BULK) as talk:
            answers = _answers(talk, transport.host)
            for piece in _pieces(_request(items, hashes, ours)):
                talk.send(piece)
            missing = [(items[i], have) for i, have in _next(talk, answers, "send")]
            total = sum(item.size - have for item, have in missing)
            sent = 0
            for piece in _pieces(_content(missing)):
                talk.send(piece)
                sent += len(piece)
                progress("sending", min(sent, total), total)
            last = _next(talk, answers, None)
            talk.finish()
    except CommandError as exc:
        if exc.rc == NO_REQUIRED:
            raise
        raise _not_written(transport.host, exc) from exc
    answer = _Answer(
        os.fsdecode(base64.b64decode(last["folder"])), tuple(last["wrong"]), tuple(last.get("at", ()))
    )
    if answer.wrong:
        raise _changed([items[index] for index in answer.wrong])
    return answer, total


def _request(items: Sequence[Item], hashes: Mapping[Path, str], ours: Mapping[str, bytes]) -> Iterator[bytes]:
    for item in items:
        payload = hashes[item.origin] if item.kind is Kind.FILE else _b64(os.fsencode(item.target))
        yield _line([item.kind, _b64(os.fsencode(item.path)), item.mode, item.mtime_ns, item.size, payload])
    now = time.time_ns()
    for name, content in ours.items():
        yield _line(["ours", _b64(os.fsencode(name)), 0o600, now, len(content), _b64(content)])
    yield b"\n"


def _line(row: list[str | int]) -> bytes:
    return json.dumps(row).encode() + b"\n"


def _b64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _content(missing: Sequence[tuple[Item, int]]) -> Iterator[bytes]:
    """Each file from where the cluster has it, as long as it was said to be; its hash tells what changed."""
    for item, have in missing:
        left = item.size - have
        yield HEADER.pack(left)
        try:
            with item.origin.open("rb", buffering=0) as file:
                file.seek(have)
                while left and (data := file.read(min(_PIECE, left))):
                    left -= len(data)
                    yield data
        except OSError as exc:
            raise not_readable([exc]) from exc
        while left:
            yield bytes(min(_PIECE, left))
            left -= min(_PIECE, left)


def _pieces(parts: Iterator[bytes]) -> Iterator[bytes]:
    """The same bytes in fewer, larger pieces."""
    kept = bytearray()
    for part in parts:
        kept += part
        if len(kept) >= _PIECE:
            yield bytes(kept)
            kept.clear()
    if kept:
        yield bytes(kept)


def _answers(talk: Conversation, host: str) -> Iterator[dict[str, Any]]:
    """What the other side says, a JSON object a line.

    Raises:
        TransportError: it says something else.
    """
    rest = b""
    while data := talk.receive():
        *lines, rest = (rest + data).split(b"\n")
        for line in lines:
            yield _object(line, host)


def _object(line: bytes, host: str) -> dict[str, Any]:
    try:
        answer = json.loads(line)
        if isinstance(answer, dict):
            return answer
    except (ValueError, RecursionError):
        pass
    raise TransportError(
        "the cluster answered what clusterctl does not understand",
        where=host,
        why=printable(line[:200].decode(errors="replace")),
        fix="if a startup file of the shell there writes this (~/.bashrc), let it do so for terminals only",
        host=host,
    )


def _next(talk: Conversation, answers: Iterator[dict[str, Any]], key: str | None) -> Any:
    """The next answer, or what it has under ``key``; signs of life are passed over."""
    for answer in answers:
        if "checked" not in answer:
            return answer[key] if key else answer
    talk.finish()  # says why there is no answer
    raise TransferError("the cluster ended the transfer without an answer", fix="run it again")


def _not_written(host: str, exc: CommandError) -> TransferError:
    return TransferError(
        "the files can't be written on the cluster",
        where=host,
        why=printable(exc.why.strip().splitlines()[-1] if exc.why.strip() else exc.what),
        fix="make room or rights there (`clusterctl ssh`), then run it again: what has arrived is kept",
        host=host,
    )


def _changed(items: Sequence[Item]) -> TransferError:
    more = f" and {len(items) - 1} more" if len(items) > 1 else ""
    return TransferError(
        f"{printable(items[0].path)}{more} changed while being sent",
        fix="run it again when nothing writes there; what has arrived is kept",
    )
