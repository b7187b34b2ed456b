"""Where a stage's weights, gradients and master weights lie on data-parallel ranks: replicated, or sharded.

ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC 2020), of
N data-parallel ranks each owning an N-th of every bucket of units:

    stage 0    all ranks hold all, plain data parallelism: gradients are summed by allreduce
    stage 1    a rank updates the master weights that it owns, with their optimizer state: gradients are
               summed by reduce-scatter, and new weights gathered
    stage 2    so with gradients, too: others exist only until they are summed, after each micro-batch
    stage 3    so with weights, too: others exist only around a unit's pass

Gradients are summed bucket by bucket, from the last to the first, while the backward pass still goes on, as
by PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from numpy.typing import DTypeLike

from payload.comm.base import Communicator, Pending
from payload.device.base import Array, Cpu, Device
from payload.nn.module import Parameter, Segment, Unit
from payload.parallel.buffers import Bucket, BufferLayout, Pool, make_layout
from payload.parallel.mesh import Options


class Storage:
    """All that a stage learns, in flat buffers."""

    master_weights: Array  # (owned,) in at least float32: what this rank's optimizer updates
    grads: Array  # (owned,): what it reads

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
        self.optimizer_device: Device = (
            Cpu("offloaded") if options.offload and not isinstance(device, Cpu) else device
        )
        """Where ``master_weights`` and ``grads`` are."""
        parts, rank = (dp.size, dp.rank) if zero else (1, 0)
        self.sharded = parts > 1
        """Other data-parallel ranks hold other shards, not the same."""
        least = options.bucket_bytes // master.itemsize
        self._layout = make_layout(units, least=least, parts=parts, rank=rank, tied=tied)
        self.segments = self._layout.segments()
        owned = self._layout.owned_size
        self.master_weights = self.optimizer_device.xp.zeros(owned, master)
        self.grad_buffer: Array = device.xp.zeros(owned, master)
        """What ``grads`` are summed in, on the device that computes: (owned,)"""
        self.grads = self.optimizer_device.xp.zeros(owned, master) if self._offloaded else self.grad_buffer
        self._gradients = self._choose_gradients(dp, zero, options.overlap)
        self._weights = self._choose_weights(dp, zero, units, options.precision.compute)
        for bucket in self._layout.buckets:
            self._fill(bucket, dp, options.seed)
        self.publish()

    def _choose_gradients(
        self, dp: Communicator, zero: int, overlap: bool
    ) -> ReplicatedGradients | ShardedGradients:
        if zero >= 2:  # noqa: PLR2004
            return ShardedGradients(self.device, self._layout, dp, self.grad_buffer)
        size = self._layout.size
        whole = self.device.xp.zeros(size, self.grad_buffer.dtype) if self.sharded else self.grad_buffer
        return ReplicatedGradients(self._layout, dp, whole, self.grad_buffer, overlap=overlap)

    def _choose_weights(
        self, dp: Communicator, zero: int, units: Sequence[Unit], dtype: DTypeLike
    ) -> ReplicatedWeights | ShardedWeights:
        def zeros(size: int) -> Array:
            return self.device.xp.zeros(size, dtype)

        masters_serve = not self._offloaded and self.master_weights.dtype == dtype
        if zero == 3:  # noqa: PLR2004
            mine = self.master_weights if masters_serve else zeros(len(self.master_weights))
            return ShardedWeights(self.device, self._layout, dp, units, mine)
        whole = self.master_weights if masters_serve and not self.sharded else zeros(self._layout.size)
        return ReplicatedWeights(self._layout, dp, whole)

    def _fill(self, bucket: Bucket, dp: Communicator, seed: int) -> None:
        """First values, those of the first rank."""
        whole = self.device.xp.zeros(bucket.size, self.master_weights.dtype)
        for parameter, view in bucket.views(whole):
            view[...] = self.device.asarray(parameter.initial_value(seed))
        dp.broadcast(whole)
        mine = whole[self._layout.part(bucket)]
        self.master_weights[self._layout.owned(bucket)] = (
            self.device.to_host(mine) if self._offloaded else mine
        )

    @property
    def weights(self) -> Array:
        """What this rank keeps of the weights that layers compute with; maybe the master weights."""
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
        return [segment.parameter for bucket in self._layout.buckets for segment in bucket.segments]

    @property
    def _offloaded(self) -> bool:
        return self.optimizer_device is not self.device

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

    def backward_done(self, unit: Unit, *, last: bool) -> None:
        """The unit's backward pass is done, for the iteration's last micro-batch or an earlier one."""
        self._weights.release()
        self._gradients.backward_done(unit, last=last)

    def reduce(self, across: Callable[[Array, Sequence[Segment]], None] = lambda *_: None) -> None:
        """Wait until ``grads`` are sums over the data-parallel ranks.

        Args:
            across: what else to do to these sums, in place on the device.
        """
        self._gradients.finish()
        across(self.grad_buffer, self.segments)
        if self._offloaded:
            self.grads[...] = self.device.to_host(self.grad_buffer)

    def publish(self) -> None:
        """The optimizer has changed ``master_weights``: let the next passes see them."""
        if self._offloaded:  # what layers need may be half as much to move
            self._weights.publish(self.device.asarray(self.master_weights, self._weights.kept.dtype))
        else:
            self._weights.publish(self.master_weights)


class ReplicatedGradients:
    """All gradients stay for the iteration, and are summed after its last micro-batch."""

    def __init__(
        self, layout: BufferLayout, dp: Communicator, whole: Array, owned_grads: Array, *, overlap: bool
    ) -> None:
        """``owned_grads`` (owned,) is ``whole`` (size,) itself where this rank owns all."""
        self._layout, self._dp, self._overlap = layout, dp, overlap
        self._whole, self._owned_grads = whole, owned_grads
        self._pending: list[Pending] = []
        self._rest: list[Bucket] = []  # complete, and not yet begun with
        for bucket in layout.buckets:
            bind_gradients(bucket, whole[bucket.start : bucket.stop])

    working_bytes = 0
    """Of the buffers for gradients that this rank has only at times, at most."""

    @property
    def kept(self) -> Sequence[Array]:
        """What this rank has of gradients all the time, with the sums."""
        return [self._owned_grads] if self._whole is self._owned_grads else [self._owned_grads, self._whole]

    def begin(self) -> None:
        """A new iteration."""
        for bucket in self._layout.buckets:
            start_anew(bucket)

    def expect(self, unit: Unit) -> None:
        """Bind the unit's parameters to their gradients, for its backward pass: they always are."""

    def backward_done(self, unit: Unit, *, last: bool) -> None:
        """That pass is done; ``last``: of this iteration's micro-batches."""
        if not last:
            return
        for pending in self._pending:
            pending.test()
        for bucket in self._layout.completes[unit.name]:
            settle(bucket)
            if self._overlap and bucket.number:
                self._pending.append(self._start(bucket))
            else:  # the first bucket is complete last, with nothing beside it: a blocking call is faster
                self._rest.append(bucket)

    def finish(self) -> None:
        """Wait until all gradients are summed."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        for bucket in self._rest:
            whole, owned_grads = self._places(bucket)
            if whole is owned_grads:
                self._dp.allreduce(whole)
            else:
                self._dp.reduce_scatter(whole, owned_grads)
        self._rest.clear()

    def _start(self, bucket: Bucket) -> Pending:
        whole, owned_grads = self._places(bucket)
        return (
            self._dp.iallreduce(whole)
            if whole is owned_grads
            else self._dp.ireduce_scatter(whole, owned_grads)
        )

    def _places(self, bucket: Bucket) -> tuple[Array, Array]:
        """A bucket's gradients, and this rank's part of their sums; the same where it owns all."""
        whole = self._whole[bucket.start : bucket.stop]
        if self._whole is self._owned_grads:
            return whole, whole
        return whole, self._owned_grads[self._layout.owned(bucket)]


@dataclass(slots=True)
class _Scatter:
    """A bucket's gradients of one micro-batch on their way to who owns them."""

    pending: Pending
    whole: Array
    part: Array  # this rank's
    owned_grads: Array  # where it belongs, or is added


class ShardedGradients:
    """A bucket's gradients exist from its first backward pass of a micro-batch to the sum of its last one."""

    def __init__(self, device: Device, layout: BufferLayout, dp: Communicator, owned_grads: Array) -> None:
        """``owned_grads``: (owned,)"""
        self._layout, self._dp, self._owned_grads = layout, dp, owned_grads
        self._pool = Pool(device, owned_grads.dtype)
        self._live: dict[int, Array] = {}
        self._scatters: list[_Scatter] = []
        self._summed: set[int] = set()  # buckets with gradients of an earlier micro-batch

    @property
    def kept(self) -> Sequence[Array]:
        return [self._owned_grads]

    @property
    def working_bytes(self) -> int:
        return self._pool.nbytes

    def begin(self) -> None:
        self._summed.clear()

    def expect(self, unit: Unit) -> None:
        for scatter in self._scatters:
            scatter.pending.test()
        for bucket in self._layout.uses[unit.name]:
            if bucket.number not in self._live:
                self._wait(leave=1)  # one beside the computation is enough, and frees memory sooner
                self._live[bucket.number] = whole = self._pool.take(bucket.size)
                whole[bucket.segments[-1].stop - bucket.start :] = 0  # the padding
                bind_gradients(bucket, whole)
                start_anew(bucket)

    def backward_done(self, unit: Unit, *, last: bool) -> None:  # noqa: ARG002
        for bucket in self._layout.completes[unit.name]:
            settle(bucket)
            whole = self._live.pop(bucket.number)
            owned_grads = self._owned_grads[self._layout.owned(bucket)]
            part = self._pool.take(len(owned_grads)) if bucket.number in self._summed else owned_grads
            self._summed.add(bucket.number)
            self._scatters.append(_Scatter(self._dp.ireduce_scatter(whole, part), whole, part, owned_grads))

    def finish(self) -> None:
        self._wait(leave=0)

    def _wait(self, leave: int) -> None:
        """Until no more than ``leave`` are under way."""
        while len(self._scatters) > leave:
            scatter = self._scatters.pop(0)
            scatter.pending.wait()
            self._pool.give(scatter.whole)
            if scatter.part is not scatter.owned_grads:
                scatter.owned_grads += scatter.part
                self._pool.give(scatter.part)


def bind_gradients(bucket: Bucket, whole: Array) -> None:
    """Let the gradients of the bucket's parameters look into an array of that bucket alone."""
    for parameter, view in bucket.views(whole):
        parameter.grad = view


def start_anew(bucket: Bucket) -> None:
    """What is added next replaces what is there."""
    for segment in bucket.segments:
        segment.parameter.fresh = True


def settle(bucket: Bucket) -> None:
    """Nothing more is added."""
    for segment in bucket.segments:
        segment.parameter.settle()


class ReplicatedWeights:
    """All weights stay. Where ranks own parts, each casts its own and gathers the others'."""

    def __init__(self, layout: BufferLayout, dp: Communicator, whole: Array) -> None:
        """``whole``: (size,), maybe the masters themselves."""
        self._layout, self._dp, self.kept = layout, dp, whole
        self.working_bytes = 0
        self._stale = False  # others' parts are those of before the last update
        self._pending: dict[int, Pending] = {}
        for bucket in layout.buckets:
            bind_values(bucket, whole[bucket.start : bucket.stop])

    def gather(self, unit: Unit, *, backward: bool) -> None:  # noqa: ARG002
        """Bind the unit's parameters to their values."""
        if self._stale:  # not before it is needed: a run may end after any update, with nothing under way
            self._stale = False
            self._pending = {bucket.number: self._start(bucket) for bucket in self._layout.buckets}
        for bucket in self._layout.uses[unit.name] if self._pending else ():
            if bucket.number in self._pending:
                self._pending.pop(bucket.number).wait()

    def release(self) -> None:
        """The pass of the unit that was gathered last is done; its weights stay."""

    def publish(self, mine: Array) -> None:
        """Take new values of what this rank owns: (owned,), on the device, of any float dtype."""
        if mine is self.kept:
            return
        for bucket in self._layout.buckets:
            part = self.kept[bucket.start : bucket.stop][self._layout.part(bucket)]
            part[...] = mine[self._layout.owned(bucket)]
        self._stale = self._layout.parts > 1

    def _start(self, bucket: Bucket) -> Pending:
        whole = self.kept[bucket.start : bucket.stop]
        return self._dp.iallgather_into(as_bytes(whole[self._layout.part(bucket)]), as_bytes(whole))


class ShardedWeights:
    """A rank keeps what it owns. A unit's weights are gathered for its passes, the next unit's meanwhile."""

    def __init__(
        self, device: Device, layout: BufferLayout, dp: Communicator, units: Sequence[Unit], mine: Array
    ) -> None:
        """``mine``: (owned,), maybe the masters themselves."""
        self._layout, self._dp, self.kept = layout, dp, mine
        self._pool = Pool(device, mine.dtype)
        self._live: dict[int, tuple[Array, Pending]] = {}
        self._wanted: Sequence[Bucket] = ()  # by the unit that comes next
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
        for bucket in here:
            self._start(bucket)
        self._wanted = self._layout.uses[(self._before if backward else self._after)[unit.name]]
        for bucket in self._wanted:
            self._start(bucket)
        for bucket in here:
            whole, pending = self._live[bucket.number]
            pending.wait()
            bind_values(bucket, whole)

    def release(self) -> None:
        self._keep(self._wanted)

    def publish(self, mine: Array) -> None:
        self._keep(())
        if mine is not self.kept:
            self.kept[...] = mine

    def _start(self, bucket: Bucket) -> None:
        if bucket.number not in self._live:
            whole = self._pool.take(bucket.size)
            part = self.kept[self._layout.owned(bucket)]
            self._live[bucket.number] = whole, self._dp.iallgather_into(as_bytes(part), as_bytes(whole))

    def _keep(self, buckets: Sequence[Bucket]) -> None:
        kept = {bucket.number for bucket in buckets}
        for number in [number for number in self._live if number not in kept]:
            whole, pending = self._live.pop(number)
            pending.wait()
            self._pool.give(whole)


def bind_values(bucket: Bucket, whole: Array) -> None:
    """Let the bucket's parameters look into an array of that bucket alone."""
    for parameter, view in bucket.views(whole):
        parameter.value = view


def as_bytes(array: Array) -> Array:
    """The same memory: what is moved and not added needs no dtype, of which MPI does not know all."""
    return array.view("uint8")
