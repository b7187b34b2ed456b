"""Wrappers that time what they wrap: communicators always, layers and optimizers for a timeline.

Communication is *exposed* while the rank is inside a call of a communicator, starting, moving on or waiting:
it cannot compute then. Its *total* time is that in which any call was under way, from its start until it was
seen to be done; what is not exposed went on beside the computation. On a GPU both are told by events on the
stream that computes: a wait counts for as long as that stream stood still.
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
    """What communication took of one rank."""

    total_s: float
    exposed_s: float
    bytes_sent: int


@dataclass(slots=True)
class CommTimes:
    """What communication took since it was last asked for: intervals, which a GPU tells only later."""

    device: Device
    _comms: dict[int, Communicator] = field(default_factory=dict, init=False)  # each once
    _sent: int = field(default=0, init=False)  # before
    _total: list[tuple[Mark, Mark]] = field(default_factory=list, init=False)
    _exposed: list[tuple[Mark, Mark]] = field(default_factory=list, init=False)

    def blocked(self, start: Mark) -> None:
        """A call that began then has just ended, and all of its work with it."""
        interval = start, self.device.mark()
        self._total.append(interval)
        self._exposed.append(interval)

    def waited(self, start: Mark) -> Mark:
        """The same of a call whose work may go on; gives its end."""
        end = self.device.mark()
        self._exposed.append((start, end))
        return end

    def ran(self, start: Mark, end: Mark) -> None:
        """Work that was under way from then to then."""
        self._total.append((start, end))

    def count(self, comm: Communicator) -> None:
        """Count what it sends, or rather what sends for it: a wrapper has its own's figure."""
        while (inner := getattr(comm, "inner", None)) is not None:
            comm = inner
        self._comms[id(comm)] = comm

    def take(self) -> CommTime:
        """Give it; the next time counts from here."""
        total, exposed = (self._covered_s(intervals) for intervals in (self._total, self._exposed))
        self._total.clear()
        self._exposed.clear()
        before, self._sent = self._sent, sum(comm.bytes_sent for comm in self._comms.values())
        return CommTime(total, exposed, self._sent - before)

    def _covered_s(self, intervals: Sequence[tuple[Mark, Mark]]) -> float:
        """In which at least one of them lay."""
        if not intervals:
            return 0.0
        covered, reached = 0.0, -math.inf
        since = partial(self.device.elapsed_s, self._exposed[0][0])  # all of it began with a call
        for start, end in sorted((since(start), since(end)) for start, end in intervals):
            covered += max(0.0, end - max(start, reached))
            reached = max(reached, end)
        return covered


def _blocking(name: str, shown: str, array: int | None = None) -> Callable[..., Any]:
    """A method that times the one of the inner communicator. ``array``: which argument is moved, if any."""

    def call(timed: TimedCommunicator, *arguments: Any) -> Any:
        nbytes = 0 if array is None else arguments[array].nbytes
        start = timed.times.device.mark()
        with timed.trace.span(shown, timed.group, bytes=nbytes):
            result = getattr(timed.inner, name)(*arguments)
        timed.times.blocked(start)
        return result

    return call


def _started(name: str, shown: str, array: int) -> Callable[..., Pending]:
    """The same of a method that does not wait."""

    def call(timed: TimedCommunicator, *arguments: Any) -> Pending:
        start = timed.times.device.mark()
        nbytes = arguments[array].nbytes
        landed = timed.trace.under_way(shown, f"{timed.group} under way", bytes=nbytes)
        with timed.trace.span(f"start {shown}", timed.group):
            pending = getattr(timed.inner, name)(*arguments)
        timed.times.waited(start)
        return _Timed(pending, start, landed, timed.times, timed.trace, f"wait for {shown}", timed.group)

    return call


class TimedCommunicator(CommunicatorWrapper[Communicator]):
    """A communicator whose calls are timed, and shown on the timeline under ``group``: dp, tp, pp."""

    def __init__(self, inner: Communicator, times: CommTimes, trace: Timeline, group: str) -> None:
        super().__init__(inner)
        self.times, self.trace, self.group = times, trace, group
        times.count(inner)

    allreduce = _blocking("allreduce", "allreduce", 0)
    iallreduce = _started("iallreduce", "allreduce", 0)
    reduce_scatter = _blocking("reduce_scatter", "reduce_scatter", 0)
    ireduce_scatter = _started("ireduce_scatter", "reduce_scatter", 0)
    allgather_into = _blocking("allgather_into", "allgather", 1)
    iallgather_into = _started("iallgather_into", "allgather", 1)
    broadcast = _blocking("broadcast", "broadcast", 0)
    isend = _started("isend", "send", 0)
    recv = _blocking("recv", "recv", 0)
    sum = _blocking("sum", "sum")
    allgather = _blocking("allgather", "allgather")
    barrier = _blocking("barrier", "barrier")


@dataclass(slots=True)
class _Timed:
    """A ``Pending`` that is timed until it is seen to be done."""

    inner: Pending
    start: Mark
    landed: Callable[[], None]
    times: CommTimes
    trace: Timeline
    name: str
    group: str
    done: bool = False

    def test(self) -> bool:
        if not self.done:
            began = self.times.device.mark()
            done = self.inner.test()
            end = self.times.waited(began)
            if done:
                self._finish(end)
        return self.done

    def wait(self) -> None:
        if not self.done:
            began = self.times.device.mark()
            with self.trace.span(self.name, self.group):
                self.inner.wait()
            self._finish(self.times.waited(began))

    def _finish(self, end: Mark) -> None:
        self.done = True
        self.times.ran(self.start, end)
        self.landed()


def timed_mesh(mesh: Mesh, times: CommTimes, trace: Timeline) -> Mesh:
    """The same groups of ranks, timed."""

    def timed(group: Communicator, name: str) -> Communicator:
        return TimedCommunicator(group, times, trace, name) if group.size > 1 else group

    return Mesh(timed(mesh.world, "world"), timed(mesh.dp, "dp"), timed(mesh.tp, "tp"), timed(mesh.pp, "pp"))


class TimedUnit(Sequential):
    """A unit's layer, each of whose passes is a span."""

    def __init__(self, unit: Unit, timeline: Timeline) -> None:
        super().__init__(unit.layer)
        self._name, self._timeline = unit.name, timeline

    def forward(self, x: Array, tape: Tape) -> Array:
        with self._timeline.span(self._name, "forward", micro_batch=self._timeline.number(tape.draw)):
            return super().forward(x, tape)

    def backward(self, dy: Array, tape: Tape) -> Array:
        with self._timeline.span(self._name, "backward", micro_batch=self._timeline.number(tape.draw)):
            return super().backward(dy, tape)


class TimedOptimizer:
    """An optimizer whose steps are spans."""

    def __init__(self, inner: Optimizer, timeline: Timeline) -> None:
        self._inner, self._timeline = inner, timeline
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
    """The same units, on the timeline if that is wanted."""
    return [replace(unit, layer=TimedUnit(unit, trace)) for unit in units] if trace.wanted else units
