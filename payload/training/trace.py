"""A timeline of what every rank does: a file for Chrome's tracing or Perfetto, and NVTX ranges for nsys.

Times are the host's. A CPU computes within its spans; a GPU's spans show when its work was put on the stream,
and nsys shows beside the same names when it ran.
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
from payload.nn.module import Draw
from payload.node.host import hostname

Event = dict[str, Any]
"""As https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU calls its fields."""

_UNSEEN = nullcontext()


class Timeline:
    """Records some iterations but not the first, which is unlike the others.

    ``category`` is what the time goes to: forward, backward, dp...
    """

    def __init__(self, device: Device | None = None, *, iterations: int = 0) -> None:
        """``iterations``: 0 where nobody looks."""
        self.wanted = iterations > 0
        self._last = iterations + 1
        self._seen = 0
        nvtx = device.xp.cuda.nvtx if device and device.gpu else None
        self._nvtx: ModuleType | None = nvtx if nvtx and nvtx.available else None
        self._unix_ns = time.time_ns() - time.perf_counter_ns()  # between the two clocks
        self._events: list[Event] = []
        self._on = False
        self._flights = 0
        self._draws: list[Draw] = []  # of this iteration's micro-batches

    def next(self) -> None:
        """Another iteration begins."""
        self._seen += 1
        self._on = 1 < self._seen <= self._last

    def span(self, name: str, category: str, **details: object) -> AbstractContextManager[None]:
        """The time that the block takes."""
        return self._recorded(name, category, details) if self._on else _UNSEEN

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

    def under_way(self, name: str, category: str, **details: object) -> Callable[[], None]:
        """From now until the result is called, beside whatever else is done."""
        if not self._on:
            return lambda: None
        self._flights += 1
        both = {"name": name, "cat": category, "id2": {"local": self._flights}}  # of this process
        self._events.append({**both, "ph": "b", "ts": self._now_ns(), "args": details})
        return lambda: self._events.append({**both, "ph": "e", "ts": self._now_ns()})

    def number(self, draw: Draw | None) -> int | None:
        """Which of the iteration's micro-batches it is, from 0; None for one of an evaluation."""
        if draw is None:
            return None
        for number, known in enumerate(self._draws):
            if known is draw:
                return number
        if self._draws and self._draws[0].iteration != draw.iteration:
            self._draws.clear()
        self._draws.append(draw)
        return len(self._draws) - 1

    def _now_ns(self) -> int:
        """Unix time in nanoseconds, on a clock that never jumps."""
        return self._unix_ns + time.perf_counter_ns()

    def write(self, path: Path, comm: Communicator) -> None:
        """Gather the events of all ranks, each as a process of its own, into one file by rank 0.

        Raises:
            UsageError: it cannot be written.
        """
        if not self.wanted:
            return
        ranks = comm.allgather((hostname(), self._events))
        start = min((event["ts"] for _, events in ranks for event in events), default=0)
        merged: list[Event] = []
        for rank, (host, events) in enumerate(ranks):
            name = {"name": f"rank {rank} on {host}"}
            merged.append({"ph": "M", "pid": rank, "name": "process_name", "args": name})
            merged += [
                {**event, "pid": rank, "tid": 0, "ts": (event["ts"] - start) / 1e3} for event in events
            ]
        text = json.dumps(
            {"displayTimeUnit": "ms", "otherData": {"start_unix_s": start / 1e9}, "traceEvents": merged}
        )
        on_all_ranks(comm, lambda: _save(path, text) if comm.rank == 0 else None)


OFF = Timeline()


def _save(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as exc:
        raise UsageError(f"--out: {path} cannot be written: {exc.strerror}", code="file-unwritable") from exc
