"""Job logs as text: whole lines, lines labelled with their rank, a limited copy for JSON."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Final, Literal

from clusterctl.jobs.watch import LogChunk, OnOutput

# Bytes of logs in a JSON answer, where each byte may take up to six characters.
MOST_KEPT: Final = 8 << 20
_LONGEST_LINE: Final = 1 << 20


@contextmanager
def whole_lines(show: OnOutput) -> Iterator[OnOutput]:
    """Yield a function that passes whole lines to ``show``, and on exit the unfinished ones."""
    begun: dict[LogChunk, bytes] = {}

    def show_lines(chunk: LogChunk) -> None:
        log = replace(chunk, data=b"")
        whole, newline, begun[log] = (begun.get(log, b"") + chunk.data).rpartition(b"\n")
        if len(begun[log]) > _LONGEST_LINE:
            whole = whole + newline + begun.pop(log)
            newline = b"\n"
        if newline:
            show(replace(log, data=whole + newline))

    try:
        yield show_lines
    finally:
        for log in [log for log, rest in begun.items() if rest]:
            show_lines(replace(log, data=b"\n"))


@contextmanager
def labelled(show: OnOutput) -> Iterator[OnOutput]:
    """Yield a function that passes whole lines to ``show``, after their array task and rank."""

    def show_labelled(chunk: LogChunk) -> None:
        task = "" if chunk.task is None else f"{chunk.task}/"
        prefix = f"{task}{chunk.rank or 0}: ".encode()
        lines = chunk.data.removesuffix(b"\n").split(b"\n")
        show(replace(chunk, data=b"".join(prefix + line + b"\n" for line in lines)))

    with whole_lines(show_labelled) as show_whole:
        yield show_whole


@dataclass(frozen=True, slots=True)
class LogText:
    """The log of a job, an array task, or a rank (both streams). truncated: the log's start is
    missing.
    """

    stream: Literal["stdout", "stderr"]
    task: int | None
    rank: int | None
    text: str
    truncated: bool


class KeptLogs:
    """Holds at most ``most`` bytes of a job's logs: it drops the start of the longest log."""

    def __init__(self, most: int = MOST_KEPT) -> None:
        self._most = most
        self._size = 0
        self._bytes: dict[LogChunk, bytearray] = {}
        self._cut: set[LogChunk] = set()

    def keep(self, chunk: LogChunk) -> None:
        log = replace(chunk, data=b"")
        if log not in self._bytes and chunk.at:
            self._cut.add(log)
        self._bytes.setdefault(log, bytearray()).extend(chunk.data)
        self._size += len(chunk.data)
        if self._size > self._most:
            longest = max(self._bytes, key=lambda log: len(self._bytes[log]))
            del self._bytes[longest][: self._size - self._most]
            self._cut.add(longest)
            self._size = sum(map(len, self._bytes.values()))

    def texts(self) -> list[LogText]:
        return [
            LogText(log.stream, log.task, log.rank, data.decode(errors="replace"), log in self._cut)
            for log, data in self._bytes.items()
        ]
