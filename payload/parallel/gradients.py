"""Sums of gradients over data-parallel ranks, begun while the backward pass still goes on.

Gradients of groups of units are summed from the last to the first, as they appear, as PyTorch's
DistributedDataParallel does with its buckets (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from payload.comm.base import Communicator, Pending
from payload.device import Array, Device
from payload.nn.base import Unit
from payload.parallel.layout import Group, Layout
from payload.parallel.pool import Pool


class Gradients(Protocol):
    """How a stage's gradients become sums of what this rank owns."""

    @property
    def kept(self) -> Sequence[Array]:
        """What this rank has of them all the time, with the sums."""

    @property
    def working_bytes(self) -> int:
        """Of the buffers for what it has only at times, at most."""
        return 0

    def begin(self) -> None:
        """A new iteration."""

    def expect(self, unit: Unit) -> None:
        """Bind the unit's parameters to their gradients, for its backward pass."""

    def produced(self, unit: Unit, *, last: bool) -> None:
        """That pass is done; ``last``: of this iteration's micro-batches."""

    def finish(self) -> None:
        """Wait for all sums."""


class Kept(Gradients):
    """All gradients stay for the iteration, and are summed after its last micro-batch."""

    def __init__(self, layout: Layout, dp: Communicator, whole: Array, sums: Array, *, overlap: bool) -> None:
        """``sums`` (owned,) is ``whole`` (size,) itself where this rank owns all."""
        self._layout, self._dp, self._whole, self._sums, self._overlap = layout, dp, whole, sums, overlap
        self._pending: list[Pending] = []
        self._rest: list[Group] = []  # complete, and not yet begun with
        for group in layout.groups:
            bind_gradients(group, whole[group.start : group.stop])

    @property
    def kept(self) -> Sequence[Array]:
        return [self._sums] if self._whole is self._sums else [self._sums, self._whole]

    def begin(self) -> None:
        for group in self._layout.groups:
            start_anew(group)

    def expect(self, unit: Unit) -> None:
        """Always bound."""

    def produced(self, unit: Unit, *, last: bool) -> None:
        if not last:
            return
        for pending in self._pending:
            pending.test()
        for group in self._layout.completes[unit.name]:
            settle(group)
            if self._overlap and group.number:
                self._pending.append(self._start(group))
            else:  # the first group is complete last, with nothing beside it: a blocking call is faster
                self._rest.append(group)

    def finish(self) -> None:
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        for group in self._rest:
            whole, sums = self._places(group)
            if whole is sums:
                self._dp.allreduce(whole)
            else:
                self._dp.reduce_scatter(whole, sums)
        self._rest.clear()

    def _start(self, group: Group) -> Pending:
        whole, sums = self._places(group)
        return self._dp.iallreduce(whole) if whole is sums else self._dp.ireduce_scatter(whole, sums)

    def _places(self, group: Group) -> tuple[Array, Array]:
        """A group's gradients, and this rank's part of their sums; the same where it owns all."""
        whole = self._whole[group.start : group.stop]
        if self._whole is self._sums:
            return whole, whole
        return whole, self._sums[self._layout.owned(group)]


@dataclass(slots=True)
class _Scatter:
    """A group's gradients of one micro-batch on their way to who owns them."""

    pending: Pending
    whole: Array
    part: Array  # this rank's
    sums: Array  # where it belongs, or is added


class Transient(Gradients):
    """A group's gradients exist from its first backward pass of a micro-batch to the sum of its last one."""

    def __init__(self, device: Device, layout: Layout, dp: Communicator, sums: Array) -> None:
        """``sums``: (owned,)"""
        self._layout, self._dp, self._sums = layout, dp, sums
        self._pool = Pool(device, sums.dtype)
        self._live: dict[int, Array] = {}
        self._scatters: list[_Scatter] = []
        self._summed: set[int] = set()  # groups with gradients of an earlier micro-batch

    @property
    def kept(self) -> Sequence[Array]:
        return [self._sums]

    @property
    def working_bytes(self) -> int:
        return self._pool.nbytes

    def begin(self) -> None:
        self._summed.clear()

    def expect(self, unit: Unit) -> None:
        for scatter in self._scatters:
            scatter.pending.test()
        for group in self._layout.uses[unit.name]:
            if group.number not in self._live:
                self._wait(leave=1)  # one beside the computation is enough, and frees memory sooner
                self._live[group.number] = whole = self._pool.take(group.size)
                whole[group.segments[-1].stop - group.start :] = 0  # the padding
                bind_gradients(group, whole)
                start_anew(group)

    def produced(self, unit: Unit, *, last: bool) -> None:  # noqa: ARG002
        for group in self._layout.completes[unit.name]:
            settle(group)
            whole = self._live.pop(group.number)
            sums = self._sums[self._layout.owned(group)]
            part = self._pool.take(len(sums)) if group.number in self._summed else sums
            self._summed.add(group.number)
            self._scatters.append(_Scatter(self._dp.ireduce_scatter(whole, part), whole, part, sums))

    def finish(self) -> None:
        self._wait(leave=0)

    def _wait(self, leave: int) -> None:
        """Until no more than ``leave`` are under way."""
        while len(self._scatters) > leave:
            scatter = self._scatters.pop(0)
            scatter.pending.wait()
            self._pool.give(scatter.whole)
            if scatter.part is not scatter.sums:
                scatter.sums += scatter.part
                self._pool.give(scatter.part)


def bind_gradients(group: Group, whole: Array) -> None:
    """Let the gradients of the group's parameters look into an array of that group alone."""
    for parameter, view in group.views(whole):
        parameter.grad = view


def start_anew(group: Group) -> None:
    """What is added next replaces what is there."""
    for segment in group.segments:
        segment.parameter.fresh = True


def settle(group: Group) -> None:
    """Nothing more is added."""
    for segment in group.segments:
        segment.parameter.settle()
