"""The weights that layers compute with, made of the masters that ranks own."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from payload.comm.base import Communicator, Pending
from payload.device import Array, Device
from payload.nn.base import Unit
from payload.parallel.layout import Group, Layout
from payload.parallel.pool import Pool


class Weights(Protocol):
    """How a stage's weights come and go."""

    kept: Array
    """what this rank has of them all the time; maybe the masters themselves"""

    @property
    def working_bytes(self) -> int:
        """Of the buffers for what it has only at times, at most."""
        return 0

    def gather(self, unit: Unit, *, backward: bool) -> None:
        """Bind the unit's parameters to their values."""

    def release(self) -> None:
        """The pass of the unit that was gathered last is done."""

    def publish(self, mine: Array) -> None:
        """Take new values of what this rank owns: (owned,), on the device, of any float dtype."""


class Resident(Weights):
    """All weights stay. Where ranks own parts, each casts its own and gathers the others'."""

    def __init__(self, layout: Layout, dp: Communicator, whole: Array) -> None:
        """``whole``: (size,), maybe the masters themselves."""
        self._layout, self._dp, self.kept = layout, dp, whole
        self._stale = False  # others' parts are those of before the last update
        self._pending: dict[int, Pending] = {}
        for group in layout.groups:
            bind_values(group, whole[group.start : group.stop])

    def gather(self, unit: Unit, *, backward: bool) -> None:  # noqa: ARG002
        if self._stale:  # not before it is needed: a run may end after any update, with nothing under way
            self._stale = False
            self._pending = {group.number: self._start(group) for group in self._layout.groups}
        for group in self._layout.uses[unit.name] if self._pending else ():
            if group.number in self._pending:
                self._pending.pop(group.number).wait()

    def release(self) -> None:
        """They stay."""

    def publish(self, mine: Array) -> None:
        if mine is self.kept:
            return
        for group in self._layout.groups:
            part = self.kept[group.start : group.stop][self._layout.part(group)]
            part[...] = mine[self._layout.owned(group)]
        self._stale = self._layout.parts > 1

    def _start(self, group: Group) -> Pending:
        whole = self.kept[group.start : group.stop]
        return self._dp.iallgather_into(as_bytes(whole[self._layout.part(group)]), as_bytes(whole))


class Gathered(Weights):
    """A rank keeps what it owns. A unit's weights are gathered for its passes, the next unit's meanwhile."""

    def __init__(
        self, device: Device, layout: Layout, dp: Communicator, units: Sequence[Unit], mine: Array
    ) -> None:
        """``mine``: (owned,), maybe the masters themselves."""
        self._layout, self._dp, self.kept = layout, dp, mine
        self._pool = Pool(device, mine.dtype)
        self._live: dict[int, tuple[Array, Pending]] = {}
        self._wanted: Sequence[Group] = ()  # by the unit that comes next
        names = [unit.name for unit in units]
        # Past either end the same unit comes next: its backward pass, or another micro-batch's forward pass.
        self._after = dict(zip(names, [*names[1:], *names[-1:]], strict=True))
        self._before = dict(zip(names, [*names[:1], *names[:-1]], strict=True))

    @property
    def working_bytes(self) -> int:
        return self._pool.nbytes

    def gather(self, unit: Unit, *, backward: bool) -> None:
        here = self._layout.uses[unit.name]
        self._keep(here)
        for group in here:
            self._start(group)
        self._wanted = self._layout.uses[(self._before if backward else self._after)[unit.name]]
        for group in self._wanted:
            self._start(group)
        for group in here:
            whole, pending = self._live[group.number]
            pending.wait()
            bind_values(group, whole)

    def release(self) -> None:
        self._keep(self._wanted)

    def publish(self, mine: Array) -> None:
        self._keep(())
        if mine is not self.kept:
            self.kept[...] = mine

    def _start(self, group: Group) -> None:
        if group.number not in self._live:
            whole = self._pool.take(group.size)
            part = self.kept[self._layout.owned(group)]
            self._live[group.number] = whole, self._dp.iallgather_into(as_bytes(part), as_bytes(whole))

    def _keep(self, groups: Sequence[Group]) -> None:
        kept = {group.number for group in groups}
        for number in [number for number in self._live if number not in kept]:
            whole, pending = self._live.pop(number)
            pending.wait()
            self._pool.give(whole)


def bind_values(group: Group, whole: Array) -> None:
    """Let the group's parameters look into an array of that group alone."""
    for parameter, view in group.views(whole):
        parameter.value = view


def as_bytes(array: Array) -> Array:
    """The same memory: what is moved and not added needs no dtype, of which MPI does not know all."""
    view: Array = array.view("uint8")
    return view
