"""Where a stage's parameters, gradients and masters lie on data-parallel ranks: replicated, or in parts.

ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020), of
N data-parallel ranks each owning an N-th of every group of units:

    stage 0    all ranks hold all; gradients are summed by allreduce
    stage 1    a rank updates the masters that it owns, with their optimizer state; gradients are summed by
               reduce-scatter, and new weights gathered
    stage 2    so with gradients, too: others exist only until they are summed, after each micro-batch
    stage 3    so with weights, too: others exist only around a unit's pass
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from numpy.typing import DTypeLike

from payload.comm.base import Communicator
from payload.device import Array, Cpu, Device
from payload.nn.base import Unit
from payload.nn.parameter import Parameter, Segment
from payload.parallel.gradients import Gradients, Kept, Transient
from payload.parallel.layout import Group, lay_out
from payload.parallel.options import Options
from payload.parallel.weights import Gathered, Resident, Weights


class Storage:
    """All that a stage learns. ``values`` and ``grads`` are what this rank's optimizer updates and reads."""

    values: Array  # (owned,) masters, in at least float32
    grads: Array  # (owned,)

    def __init__(
        self,
        device: Device,
        units: Sequence[Unit],
        dp: Communicator,
        options: Options,
        *,
        tied: Unit | None = None,
    ) -> None:
        """``tied``: what ``units`` share with other stages of the pipeline."""
        self.device, zero, master = device, options.zero, options.precision.master
        # On a CPU there is nothing to move: its memory is the host's.
        self.home: Device = Cpu("offloaded") if options.offload and not isinstance(device, Cpu) else device
        """Where ``values`` and ``grads`` are."""
        parts, rank = (dp.size, dp.rank) if zero else (1, 0)
        self.shared = parts > 1
        """Other data-parallel ranks hold other pieces, not the same."""
        least = options.bucket_bytes // master.itemsize
        self._layout = lay_out(units, least=least, parts=parts, rank=rank, tied=tied)
        self.segments = self._layout.segments()
        owned = self._layout.owned_size
        self.values = self.home.xp.zeros(owned, master)
        self.sums: Array = device.xp.zeros(owned, master)
        """What ``grads`` are summed in, on the device that computes: (owned,)"""
        self.grads = self.home.xp.zeros(owned, master) if self._offloaded else self.sums
        self._gradients = self._choose_gradients(dp, zero, options.overlap)
        self._weights = self._choose_weights(dp, zero, units, options.precision.compute)
        for group in self._layout.groups:
            self._fill(group, dp, options.seed)
        self.publish()

    def _choose_gradients(self, dp: Communicator, zero: int, overlap: bool) -> Gradients:
        if zero >= 2:  # noqa: PLR2004
            return Transient(self.device, self._layout, dp, self.sums)
        size = self._layout.size
        whole = self.device.xp.zeros(size, self.sums.dtype) if self.shared else self.sums
        return Kept(self._layout, dp, whole, self.sums, overlap=overlap)

    def _choose_weights(
        self, dp: Communicator, zero: int, units: Sequence[Unit], dtype: DTypeLike
    ) -> Weights:
        def zeros(size: int) -> Array:
            array: Array = self.device.xp.zeros(size, dtype)
            return array

        masters_serve = not self._offloaded and self.values.dtype == dtype
        if zero == 3:  # noqa: PLR2004
            mine = self.values if masters_serve else zeros(len(self.values))
            return Gathered(self.device, self._layout, dp, units, mine)
        whole = self.values if masters_serve and not self.shared else zeros(self._layout.size)
        return Resident(self._layout, dp, whole)

    def _fill(self, group: Group, dp: Communicator, seed: int) -> None:
        """First values, those of the first rank."""
        whole = self.device.xp.zeros(group.size, self.values.dtype)
        for parameter, view in group.views(whole):
            view[...] = self.device.asarray(parameter.first(seed))
        dp.broadcast(whole)
        mine = whole[self._layout.part(group)]
        self.values[self._layout.owned(group)] = self.device.to_host(mine) if self._offloaded else mine

    @property
    def weights(self) -> Array:
        """What this rank keeps of the weights that layers compute with; maybe ``values`` themselves."""
        return self._weights.kept

    @property
    def gradients(self) -> Sequence[Array]:
        """What this rank keeps of the gradients, on the device and offloaded."""
        return [*self._gradients.kept, *([self.grads] if self._offloaded else [])]

    @property
    def working_bytes(self) -> int:
        """Of the buffers, through which weights and gradients come and go that this rank does not keep."""
        return self._weights.working_bytes + self._gradients.working_bytes

    @property
    def parameters(self) -> list[Parameter]:
        """All that data-parallel ranks hold together, in the same order on each."""
        return [segment.parameter for group in self._layout.groups for segment in group.segments]

    @property
    def _offloaded(self) -> bool:
        return self.home is not self.device

    def begin(self) -> None:
        """A new iteration: gradients start anew."""
        self._gradients.begin()

    def gather(self, unit: Unit, *, backward: bool = False) -> None:
        """Bind the unit's parameters to their values, and for a backward pass to their gradients."""
        self._weights.gather(unit, backward=backward)
        if backward:
            self._gradients.expect(unit)

    def release(self) -> None:
        """The forward pass of the unit that was gathered last is done."""
        self._weights.release()

    def produced(self, unit: Unit, *, last: bool) -> None:
        """The unit's backward pass is done, for the iteration's last micro-batch or an earlier one."""
        self._weights.release()
        self._gradients.produced(unit, last=last)

    def reduce(self, across: Callable[[Array, Sequence[Segment]], None] = lambda *_: None) -> None:
        """Wait until ``grads`` are sums over the data-parallel ranks.

        Args:
            across: what else to do to these sums, in place on the device.
        """
        self._gradients.finish()
        across(self.sums, self.segments)
        if self._offloaded:
            self.grads[...] = self.device.to_host(self.sums)

    def publish(self) -> None:
        """The optimizer has changed ``values``: let the next passes see them."""
        if self._offloaded:  # what layers need may be half as much to move
            self._weights.publish(self.device.asarray(self.values, self._weights.kept.dtype))
        else:
            self._weights.publish(self.values)
