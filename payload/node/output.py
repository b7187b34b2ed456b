"""Passes a program's output through pipes to open files. Uses only the standard library of Python
3.8 or newer.

A program that opens /dev/stdout or /dev/stderr for writing, as `echo text > /dev/stderr` and `tee
/dev/stderr` do, opens the file of its output again. That would empty a log, and has no effect on a
pipe. If SIGKILL ends this process, the output that it has not copied is lost: a pipe has at most 64
KiB.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar

from payload.node import task

Started = TypeVar("Started")


class ProgramOutput:
    """Pipes for the standard output and the standard error of a program.

    targets: the files that get them. If both are the same file, so are the pipes: otherwise, lines
        might change their order.
    streams: the ends of the pipes for the program, until ``started``.
    """

    def __init__(self, targets: Sequence[int]) -> None:
        self._targets: dict[int, int] = {}
        streams = []
        is_one = os.path.sameopenfile(*targets)
        for target in targets[:1] if is_one else targets:
            source, stream = os.pipe()
            self._targets[source] = target
            streams.append(stream)
        self.streams = (streams[0], streams[-1])

    @property
    def sources(self) -> list[int]:
        """The other ends of the pipes."""
        return [*self._targets]

    def started(self) -> None:
        """Close the program's ends. To be called when it has them."""
        for stream in {*self.streams}:
            os.close(stream)

    def copy(self, source: int) -> None:
        """Copy the data that a source has. At its end, close it."""
        data = os.read(source, task.CHUNK)
        task.write_all(self._targets[source], data)
        if not data:
            del self._targets[source]
            os.close(source)

    def end(self, limit_s: float) -> None:
        """Copy the rest of the program's output, and close the sources.

        limit_s: for processes that it has left running, and that write without end.
        """
        deadline = time.monotonic() + limit_s
        while (ready := readable(self.sources, 0.0)) and time.monotonic() < deadline:
            for source in ready:
                self.copy(source)
        for source in self.sources:
            os.close(source)
        self._targets = {}


class OutputCopier:
    """A thread that copies a program's output until ``end`` is called."""

    def __init__(self, output: ProgramOutput) -> None:
        self._output = output
        self._ends, self._tells = os.pipe()
        self._limit_s = 0.0
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while self._ends not in (ready := readable([self._ends, *self._output.sources])):
            for source in ready:
                self._output.copy(source)
        self._output.end(self._limit_s)

    def end(self, limit_s: float) -> None:
        """Return when all that the program has written is copied. limit_s: see ``ProgramOutput.end``."""
        self._limit_s = limit_s
        os.close(self._tells)
        self._thread.join()
        os.close(self._ends)


def start_with_output(
    start: Callable[[int, int], Started], targets: Sequence[int]
) -> tuple[Started, OutputCopier]:
    """Start a program whose output a thread copies to the files ``targets``.

    start: starts it, given open files for its standard output and its standard error.
    """
    output = ProgramOutput(targets)
    try:
        started = start(*output.streams)
    finally:
        output.started()
    return started, OutputCopier(output)


def readable(files: Collection[int], wait_s: float | None = None) -> list[int]:
    """Return which of some files can be read without waiting, or are at their end. Wait for one.

    wait_s: how long to wait. None: as long as it takes.
    """
    # `select` is limited to file descriptors below 1024.
    poll = select.poll()
    for file in files:
        poll.register(file, select.POLLIN)
    return [file for file, _ in poll.poll(None if wait_s is None else wait_s * 1000)]
