"""Wrappers that time communicators and, if a timeline is recorded, layers and optimizers.

Communication is *exposed* while the rank is inside a call that starts, advances or awaits an
operation, because the rank cannot compute then. The *total* time covers every operation from its
start until the rank sees its end; the unexposed part of this time overlaps with computation. On a
GPU, both times are measured with events on the computing stream, so a wait counts for as long as
that stream is idle.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from payload.comm.base import Communicator, CommunicatorWrapper, Pending
from payload.device.base import Array, Device, Mark
from payload.nn.module import Sequential, Tape, Unit
from payload.optim.base import Optimizer
from payload.parallel.mesh import Mesh
from payload.training.trace import Timeline


@dataclass(frozen=True, slots=True)
class CommTime:
    """How long a rank communicated, and how many bytes it sent, in a period."""

    total_s: float
    exposed_s: float
    bytes_sent: int


@dataclass(slots=True)
class CommTimes:
    """Collector of a rank's communication times. It stores intervals, because a GPU reports times
    late.
    """

    device: Device
    # By Python id, so that each communicator counts once.
    _comms: dict[int, Communicator] = field(default_factory=dict, init=False)
    # Bytes sent before the current period.
    _sent: int = field(default=0, init=False)
    _total: list[tuple[Mark, Mark]] = field(default_factory=list, init=False)
    _exposed: list[tuple[Mark, Mark]] = field(default_factory=list, init=False)

    def add_blocking(self, start: Mark) -> None:
        """Count a blocking call that began at ``start`` and has just ended."""
        interval = start, self.device.mark()
        self._total.append(interval)
        self._exposed.append(interval)

    def add_exposed(self, start: Mark) -> Mark:
        """Count a call that began at ``start`` and ends now, and return its end. Its operation may
        go on.
        """
        end = self.device.mark()
        self._exposed.append((start, end))
        return end

    def add_operation(self, start: Mark, end: Mark) -> None:
        self._total.append((start, end))

    def count(self, comm: Communicator) -> None:
        """Start to count the bytes that ``comm`` sends; for a wrapper, those of the inner
        communicator.
        """
        while (inner := getattr(comm, "inner", None)) is not None:
            comm = inner
        self._comms[id(comm)] = comm

    def take(self) -> CommTime:
        """Return the times and bytes since the last call of ``take``."""
        total, exposed = (self._covered_s(intervals) for intervals in (self._total, self._exposed))
        self._total.clear()
        self._exposed.clear()
        sent_before = self._sent
        self._sent = sum(comm.bytes_sent for comm in self._comms.values())
        return CommTime(total, exposed, self._sent - sent_before)

    def _covered_s(self, intervals: Sequence[tuple[Mark, Mark]]) -> float:
        """Return the total time that the intervals cover, in seconds. Overlaps count once."""
        if not intervals:
            return 0.0
        covered = 0.0
        reached = -math.inf
        # Every interval begins with a call, so the start of the first call is the origin.
        since = partial(self.device.elapsed_s, self._exposed[0][0])
        for start, end in sorted((since(start), since(end)) for start, end in intervals):
            covered += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return covered


def _blocking(method: str, shown: str, array: int | None = None) -> Callable[..., Any]:
    """Return a method that calls and times ``method``, a blocking method of the inner communicator.

    shown: name on the timeline. array: index of the array argument, to record its size; None: no
        array.
    """

    def call(timed: TimedCommunicator, *arguments: Any) -> Any:
        nbytes = 0 if array is None else arguments[array].nbytes
        start = timed.times.device.mark()
        with timed.trace.span(shown, timed.group, bytes=nbytes):
            result = getattr(timed.inner, method)(*arguments)
        timed.times.add_blocking(start)
        return result

    return call


def _nonblocking(method: str, shown: str, array: int) -> Callable[..., Pending]:
    """Return a method that calls and times a non-blocking method. The arguments are as in
    ``_blocking``.
    """

    def call(timed: TimedCommunicator, *arguments: Any) -> Pending:
        start = timed.times.device.mark()
        nbytes = arguments[array].nbytes
        end_flight = timed.trace.begin_flight(shown, f"{timed.group} under way", bytes=nbytes)
        with timed.trace.span(f"start {shown}", timed.group):
            pending = getattr(timed.inner, method)(*arguments)
        timed.times.add_exposed(start)
        return _Timed(
            pending, start, end_flight, timed.times, timed.trace, f"wait for {shown}", timed.group
        )

    return call


class TimedCommunicator(CommunicatorWrapper[Communicator]):
    """A communicator that times its calls and shows them on the timeline. group: dp, tp or pp."""

    def __init__(self, inner: Communicator, times: CommTimes, trace: Timeline, group: str) -> None:
        super().__init__(inner)
        self.times = times
        self.trace = trace
        self.group = group
        times.count(inner)

    allreduce = _blocking("allreduce", "allreduce", 0)
    iallreduce = _nonblocking("iallreduce", "allreduce", 0)
    reduce_scatter = _blocking("reduce_scatter", "reduce_scatter", 0)
    ireduce_scatter = _nonblocking("ireduce_scatter", "reduce_scatter", 0)
    allgather_into = _blocking("allgather_into", "allgather", 1)
    iallgather_into = _nonblocking("iallgather_into", "allgather", 1)
    broadcast = _blocking("broadcast", "broadcast", 0)
    isend = _nonblocking("isend", "send", 0)
    recv = _blocking("recv", "recv", 0)
    sum = _blocking("sum", "sum")
    allgather = _blocking("allgather", "allgather")
    barrier = _blocking("barrier", "barrier")


@dataclass(slots=True)
class _Timed:
    """A ``Pending`` that records the time until its operation is done."""

    inner: Pending
    start: Mark
    end_flight: Callable[[], None]
    times: CommTimes
    trace: Timeline
    name: str
    group: str
    done: bool = False

    def test(self) -> bool:
        if not self.done:
            began = self.times.device.mark()
            done = self.inner.test()
            end = self.times.add_exposed(began)
            if done:
                self._finish(end)
        return self.done

    def wait(self) -> None:
        if not self.done:
            began = self.times.device.mark()
            with self.trace.span(self.name, self.group):
                self.inner.wait()
            self._finish(self.times.add_exposed(began))

    def _finish(self, end: Mark) -> None:
        self.done = True
        self.times.add_operation(self.start, end)
        self.end_flight()


def timed_mesh(mesh: Mesh, times: CommTimes, trace: Timeline) -> Mesh:
    """Return the mesh with its groups of more than 1 rank wrapped in ``TimedCommunicator``."""

    def timed(group: Communicator, name: str) -> Communicator:
        return TimedCommunicator(group, times, trace, name) if group.size > 1 else group

    return Mesh(
        timed(mesh.world, "world"), timed(mesh.dp, "dp"), timed(mesh.tp, "tp"), timed(mesh.pp, "pp")
    )


class TimedUnit(Sequential):
    """A wrapper of a unit's layer that records each forward and backward pass on the timeline."""

    def __init__(self, unit: Unit, timeline: Timeline) -> None:
        super().__init__(unit.layer)
        self._name = unit.name
        self._timeline = timeline

    def forward(self, x: Array, tape: Tape) -> Array:
        with self._timeline.span(
            self._name, "forward", micro_batch=self._timeline.number_of(tape.draw)
        ):
            return super().forward(x, tape)

    def backward(self, dy: Array, tape: Tape) -> Array:
        with self._timeline.span(
            self._name, "backward", micro_batch=self._timeline.number_of(tape.draw)
        ):
            return super().backward(dy, tape)


class TimedOptimizer:
    """A wrapper of an optimizer that records each step on the timeline."""

    def __init__(self, inner: Optimizer, timeline: Timeline) -> None:
        self._inner = inner
        self._timeline = timeline
        self.state = inner.state

    @property
    def updates(self) -> int:
        return self._inner.updates

    @updates.setter
    def updates(self, count: int) -> None:
        self._inner.updates = count

    def step(self, values: Array, grads: Array, *, lr: float, scale: float = 1.0) -> None:
        with self._timeline.span("step", "optimizer"):
            self._inner.step(values, grads, lr=lr, scale=scale)


def timed_units(units: Sequence[Unit], trace: Timeline) -> Sequence[Unit]:
    """Return the units, with their layers wrapped in ``TimedUnit`` if the timeline is enabled."""
    return (
        [replace(unit, layer=TimedUnit(unit, trace)) for unit in units] if trace.enabled else units
    )
