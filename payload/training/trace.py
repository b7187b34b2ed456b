"""A timeline of every rank's work: a file for Chrome's tracing or Perfetto, and NVTX ranges for
nsys.

Times are read on the CPU. A span of GPU work shows when the work was queued on the stream; nsys
shows, under the same name, when the work ran.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from types import ModuleType
from typing import Any

from payload.comm.base import Communicator, on_all_ranks
from payload.device.base import Device
from payload.errors import UsageError
from payload.nn.module import RandomState
from payload.node.host import hostname

Event = dict[str, Any]
"""Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU."""

_NOT_RECORDED = nullcontext()


class Timeline:
    """Records ``iterations`` iterations (0: disabled), beginning with the second: the first is
    untypical.

    The category of a span is the kind of work: forward, backward, dp, ...
    """

    def __init__(self, device: Device | None = None, *, iterations: int = 0) -> None:
        self.enabled = iterations > 0
        self._last = iterations + 1
        self._iteration = 0
        nvtx = device.xp.cuda.nvtx if device and device.gpu else None
        self._nvtx: ModuleType | None = nvtx if nvtx and nvtx.available else None
        # Difference between Unix time and the monotonic clock.
        self._unix_ns = time.time_ns() - time.perf_counter_ns()
        self._events: list[Event] = []
        self._on = False
        self._flights = 0
        # The draws of the micro-batches that this iteration has run so far.
        self._draws: list[RandomState] = []

    def next(self) -> None:
        """Begin the next iteration."""
        self._iteration += 1
        self._on = 1 < self._iteration <= self._last

    def span(self, name: str, category: str, **details: object) -> AbstractContextManager[None]:
        """Record the time that a ``with`` block takes."""
        return self._recorded(name, category, details) if self._on else _NOT_RECORDED

    @contextmanager
    def _recorded(self, name: str, category: str, details: Mapping[str, object]) -> Iterator[None]:
        if self._nvtx:
            self._nvtx.RangePush(f"{category} {name}")
        began = self._now_ns()
        try:
            yield
        finally:
            span = {"name": name, "cat": category, "ph": "X", "ts": began, "args": details}
            self._events.append({**span, "dur": (self._now_ns() - began) / 1e3})
            if self._nvtx:
                self._nvtx.RangePop()

    def begin_flight(self, name: str, category: str, **details: object) -> Callable[[], None]:
        """Record the start of an operation that runs in parallel. Call the returned function at its
        end.
        """
        if not self._on:
            return lambda: None
        self._flights += 1
        # The id is unique in this process.
        common = {"name": name, "cat": category, "id2": {"local": self._flights}}
        self._events.append({**common, "ph": "b", "ts": self._now_ns(), "args": details})
        return lambda: self._events.append({**common, "ph": "e", "ts": self._now_ns()})

    def number_of(self, draw: RandomState | None) -> int | None:
        """Return the index in its iteration of the micro-batch with this random seed. None: no
        ``draw``.
        """
        if draw is None:
            return None
        for number, earlier in enumerate(self._draws):
            if earlier is draw:
                return number
        if self._draws and self._draws[0].iteration != draw.iteration:
            self._draws.clear()
        self._draws.append(draw)
        return len(self._draws) - 1

    def _now_ns(self) -> int:
        return self._unix_ns + time.perf_counter_ns()

    def write(self, path: Path, comm: Communicator) -> None:
        """Write the events of all ranks to a file on rank 0. The viewer shows each rank as a
        process.

        Raises UsageError on every rank if the file cannot be written.
        """
        if not self.enabled:
            return
        ranks = comm.allgather((hostname(), self._events))
        start = min((event["ts"] for _, events in ranks for event in events), default=0)
        merged: list[Event] = []
        for rank, (host, events) in enumerate(ranks):
            name = {"name": f"rank {rank} on {host}"}
            merged.append({"ph": "M", "pid": rank, "name": "process_name", "args": name})
            merged += [
                {**event, "pid": rank, "tid": 0, "ts": (event["ts"] - start) / 1e3}
                for event in events
            ]
        text = json.dumps(
            {
                "displayTimeUnit": "ms",
                "otherData": {"start_unix_s": start / 1e9},
                "traceEvents": merged,
            }
        )
        on_all_ranks(comm, lambda: _save(path, text) if comm.rank == 0 else None)


OFF = Timeline()


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as exc:
        raise UsageError(
            f"--out: {path} cannot be written: {exc.strerror}", code="file-unwritable"
        ) from exc
