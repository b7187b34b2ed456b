"""Where a stage's parameters and gradients lie, and how the sums over data-parallel ranks come about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from numpy.typing import DTypeLike

from payload.comm.base import Communicator
from payload.device import Array, Device
from payload.nn.base import Unit
from payload.nn.parameter import Parameter
from payload.parallel.reducer import Reducer


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a parameter in the flat arrays: ``[start, stop)`` there begins at ``offset`` of the
    parameter's own part, flattened."""

    parameter: Parameter
    start: int
    stop: int
    offset: int = 0


class Storage(Protocol):
    """All that a stage learns. ``values`` and ``grads`` are what this rank's optimizer updates and reads."""

    values: Array  # (owned,) masters, in at least float32
    grads: Array  # (owned,)
    segments: Sequence[Segment]
    shared: bool  # other data-parallel ranks hold other pieces, not the same

    def begin(self) -> None:
        """A new iteration: gradients start anew."""

    def gather(self, unit: Unit) -> None:
        """Bind the unit's parameters to their values, which its next pass needs."""

    def release(self, unit: Unit) -> None:
        """That pass is done."""

    def produced(self, unit: Unit, *, last: bool) -> None:
        """The unit's backward pass is done, for the iteration's last micro-batch or an earlier one."""

    def reduce(self) -> None:
        """Wait until ``grads`` are sums over the data-parallel ranks."""

    def publish(self) -> None:
        """The optimizer has changed ``values``: let the next passes see them."""


class Replicated:
    """Every data-parallel rank holds everything: one flat array of each kind, in the order of units."""

    shared = False

    def __init__(
        self,
        device: Device,
        units: Sequence[Unit],
        dp: Communicator,
        reducer: Reducer,
        *,
        seed: int,
        dtype: DTypeLike = "float32",
        master_dtype: DTypeLike = "float32",
    ) -> None:
        """
        Args:
            dtype: of the parameters that layers compute with.
            master_dtype: of what the optimizer updates, and of the gradients.
        """
        xp = device.xp
        self._reducer = reducer
        self.segments: Sequence[Segment] = lay_out(units)
        size = self.segments[-1].stop if self.segments else 0
        self.values = xp.zeros(size, master_dtype)
        self.grads = xp.zeros(size, master_dtype)
        self._weights = self.values if dtype == master_dtype else xp.zeros(size, dtype)
        ends = {id(segment.parameter): segment.stop for segment in self.segments}
        starts = {id(segment.parameter): segment.start for segment in self.segments}
        seen: set[int] = set()
        for (
            unit
        ) in units:  # a parameter that units share lies with the first, whose backward pass is the last
            own = [p for p in unit.layer.parameters if id(p) not in seen]
            seen |= {id(p) for p in own}
            if own:
                reducer.add(unit.name, starts[id(own[0])], ends[id(own[-1])])
        for segment in self.segments:
            parameter, place = segment.parameter, slice(segment.start, segment.stop)
            self.values[place] = device.asarray(parameter.first(seed)).ravel()
            parameter.value = self._weights[place].reshape(parameter.shape)
            parameter.grad = self.grads[place].reshape(parameter.shape)
        dp.broadcast(self.values)
        self.publish()

    def begin(self) -> None:
        for segment in self.segments:
            segment.parameter.fresh = True
        self._reducer.begin(self.grads)

    def gather(self, unit: Unit) -> None:
        """Always there."""

    def release(self, unit: Unit) -> None:
        """They stay."""

    def produced(self, unit: Unit, *, last: bool) -> None:
        if last:
            for parameter in unit.layer.parameters:
                parameter.settle()
            self._reducer.ready(unit.name)

    def reduce(self) -> None:
        self._reducer.finish()

    def publish(self) -> None:
        if self._weights is not self.values:
            self._weights[...] = self.values


def lay_out(units: Sequence[Unit]) -> list[Segment]:
    """The parameters of all units one behind the other, each once."""
    segments: list[Segment] = []
    start, seen = 0, set()
    for unit in units:
        for parameter in unit.layer.parameters:
            if id(parameter) not in seen:
                seen.add(id(parameter))
                segments.append(Segment(parameter, start, start + parameter.size))
                start += parameter.size
    return segments
