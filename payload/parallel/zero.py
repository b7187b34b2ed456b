"""Weights, gradients and master weights of a stage on data-parallel ranks: replicated or sharded.

ZeRO (Rajbhandari et al., "ZeRO: Memory Optimizations Toward Training Trillion Parameter Models", SC
2020). Each of N data-parallel ranks owns 1/N of every bucket of units:

    stage 0    plain data parallelism: all ranks hold everything, gradients are summed by allreduce
    stage 1    a rank updates only the master weights that it owns, with their optimizer state: gradients are
               summed by reduce-scatter, and new weights gathered
    stage 2    gradients are also sharded: a rank has all gradients only until a micro-batch's sum is done
    stage 3    weights are also sharded: a rank has all weights of a unit only during the unit's passes

Gradients are summed bucket by bucket, from the last to the first, during the backward pass, as in
PyTorch's DistributedDataParallel (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from numpy.typing import DTypeLike

from payload.comm.base import Communicator, Pending
from payload.device.base import Array, CpuDevice, Device
from payload.nn.module import Parameter, Segment, Unit
from payload.parallel.buffers import Bucket, BufferLayout, Pool, make_layout
from payload.parallel.mesh import EngineOptions


class FlatStorage:
    """All trainable parameters of a pipeline stage, in flat buffers."""

    master_weights: Array
    """(owned,) in float32 or wider: updated by this rank's optimizer."""
    grads: Array
    """(owned,): read by the optimizer."""

    def __init__(
        self,
        device: Device,
        units: Sequence[Unit],
        dp: Communicator,
        options: EngineOptions,
        *,
        tied: Unit | None = None,
    ) -> None:
        """Allocate buffers, draw initial weights. tied: unit of parameters that other stages also
        have.
        """
        self.device = device
        zero = options.zero
        master = options.precision.master
        # A CPU device is already in host memory.
        self.optimizer_device: Device = (
            CpuDevice("offloaded")
            if options.offload and not isinstance(device, CpuDevice)
            else device
        )
        """Device of ``master_weights`` and ``grads``."""
        parts, rank = (dp.size, dp.rank) if zero else (1, 0)
        self.sharded = parts > 1
        """Whether other data-parallel ranks hold other shards instead of the same data."""
        min_size = options.bucket_bytes // master.itemsize
        self._layout = make_layout(units, min_size=min_size, parts=parts, rank=rank, tied=tied)
        self.segments = self._layout.segments()
        owned = self._layout.owned_size
        self.master_weights = self.optimizer_device.xp.zeros(owned, master)
        self.grad_buffer: Array = device.xp.zeros(owned, master)
        """(owned,) on the computing device: buffer in which gradients are summed."""
        self.grads = (
            self.optimizer_device.xp.zeros(owned, master) if self._offloaded else self.grad_buffer
        )
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
        whole = (
            self.device.xp.zeros(size, self.grad_buffer.dtype) if self.sharded else self.grad_buffer
        )
        return ReplicatedGradients(self._layout, dp, whole, self.grad_buffer, overlap=overlap)

    def _choose_weights(
        self, dp: Communicator, zero: int, units: Sequence[Unit], dtype: DTypeLike
    ) -> ReplicatedWeights | ShardedWeights:
        def zeros(size: int) -> Array:
            return self.device.xp.zeros(size, dtype)

        masters_serve = not self._offloaded and self.master_weights.dtype == dtype
        if zero == 3:  # noqa: PLR2004
            owned_weights = (
                self.master_weights if masters_serve else zeros(len(self.master_weights))
            )
            return ShardedWeights(self.device, self._layout, dp, units, owned_weights)
        whole = (
            self.master_weights if masters_serve and not self.sharded else zeros(self._layout.size)
        )
        return ReplicatedWeights(self._layout, dp, whole)

    def _fill(self, bucket: Bucket, dp: Communicator, seed: int) -> None:
        """Write the initial weights of a bucket, as drawn by the first data-parallel rank."""
        whole = self.device.xp.zeros(bucket.size, self.master_weights.dtype)
        for parameter, view in bucket.views(whole):
            view[...] = self.device.asarray(parameter.initial_value(seed))
        dp.broadcast(whole)
        owned_weights = whole[self._layout.part(bucket)]
        self.master_weights[self._layout.owned(bucket)] = (
            self.device.to_host(owned_weights) if self._offloaded else owned_weights
        )

    @property
    def weights(self) -> Array:
        """The layers' weights that this rank holds permanently. May be the array
        ``master_weights``.
        """
        return self._weights.resident

    @property
    def gradients(self) -> Sequence[Array]:
        """Gradient buffers that this rank holds permanently, on the device and, if offloaded, on
        the host.
        """
        return [*self._gradients.resident, *([self.grads] if self._offloaded else [])]

    @property
    def working_bytes(self) -> int:
        """Bytes of temporary buffers for weights and gradients that this rank does not hold
        permanently.
        """
        return self._weights.working_bytes + self._gradients.working_bytes

    @property
    def parameters(self) -> list[Parameter]:
        """Parameters of which any data-parallel rank owns a piece, in the same order on each
        rank.
        """
        return [segment.parameter for bucket in self._layout.buckets for segment in bucket.segments]

    @property
    def _offloaded(self) -> bool:
        return self.optimizer_device is not self.device

    def begin(self) -> None:
        """Start an iteration: the next gradients replace the previous gradients."""
        self._gradients.begin()

    def gather(self, unit: Unit, *, backward: bool = False) -> None:
        """Set ``value`` of a unit's parameters to whole weights. backward: also set ``grad``."""
        self._weights.gather(unit, backward=backward)
        if backward:
            self._gradients.expect(unit)

    def release(self) -> None:
        """Release the weights of the unit that was gathered last, after its forward pass."""
        self._weights.release()

    def backward_done(self, unit: Unit, *, last: bool) -> None:
        """Release a unit's weights and start summing its gradients, after its backward pass.

        last: whether this was the last micro-batch of the iteration.
        """
        self._weights.release()
        self._gradients.backward_done(unit, last=last)

    def reduce(self, across: Callable[[Array, Sequence[Segment]], None] = lambda *_: None) -> None:
        """Wait until ``grads`` are sums over the data-parallel ranks.

        across: called with this rank's sums and the positions of parameters in them. It may change
            the sums.
        """
        self._gradients.finish()
        across(self.grad_buffer, self.segments)
        if self._offloaded:
            self.grads[...] = self.device.to_host(self.grad_buffer)

    def publish(self) -> None:
        """Copy the updated ``master_weights`` to the weights of the layers."""
        # Convert on the host, because the layers' dtype may be half as large to copy.
        if self._offloaded:
            self._weights.publish(
                self.device.asarray(self.master_weights, self._weights.resident.dtype)
            )
        else:
            self._weights.publish(self.master_weights)


class ReplicatedGradients:
    """Gradients in ZeRO stages 0 and 1: each rank keeps all, and sums them after the last
    micro-batch.
    """

    def __init__(
        self,
        layout: BufferLayout,
        dp: Communicator,
        whole: Array,
        owned_grads: Array,
        *,
        overlap: bool,
    ) -> None:
        """Put gradients into ``whole``. owned_grads: array for this rank's sums, which may be
        ``whole``.
        """
        self._layout = layout
        self._dp = dp
        self._overlap = overlap
        self._whole = whole
        self._owned_grads = owned_grads
        self._pending: list[Pending] = []
        # Complete buckets that are not being summed yet.
        self._unstarted: list[Bucket] = []
        for bucket in layout.buckets:
            bind_gradients(bucket, whole[bucket.start : bucket.stop])

    working_bytes = 0
    """Maximum bytes of temporary gradient buffers."""

    @property
    def resident(self) -> Sequence[Array]:
        """Buffers that this rank holds permanently: of its sums and, if different, of all
        gradients.
        """
        return (
            [self._owned_grads]
            if self._whole is self._owned_grads
            else [self._owned_grads, self._whole]
        )

    def begin(self) -> None:
        for bucket in self._layout.buckets:
            mark_grads_unset(bucket)

    def expect(self, unit: Unit) -> None:
        """Do nothing: ``grad`` of each parameter is always set."""

    def backward_done(self, unit: Unit, *, last: bool) -> None:
        """In the ``last`` micro-batch, start to sum the buckets that the unit's backward pass
        completed.
        """
        if not last:
            return
        for pending in self._pending:
            pending.test()
        for bucket in self._layout.completes[unit.name]:
            zero_unset_grads(bucket)
            if self._overlap and bucket.number:
                self._pending.append(self._start(bucket))
            # The first bucket is complete last, when nothing overlaps its sum: a blocking call is
            # faster.
            else:
                self._unstarted.append(bucket)

    def finish(self) -> None:
        """Wait until all gradients are summed."""
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
        for bucket in self._unstarted:
            whole, owned_grads = self._slices(bucket)
            if whole is owned_grads:
                self._dp.allreduce(whole)
            else:
                self._dp.reduce_scatter(whole, owned_grads)
        self._unstarted.clear()

    def _start(self, bucket: Bucket) -> Pending:
        whole, owned_grads = self._slices(bucket)
        return (
            self._dp.iallreduce(whole)
            if whole is owned_grads
            else self._dp.ireduce_scatter(whole, owned_grads)
        )

    def _slices(self, bucket: Bucket) -> tuple[Array, Array]:
        # A bucket's gradients, and the array for this rank's sums.
        whole = self._whole[bucket.start : bucket.stop]
        if self._whole is self._owned_grads:
            return whole, whole
        return whole, self._owned_grads[self._layout.owned(bucket)]


@dataclass(slots=True)
class _Scatter:
    """A reduce-scatter in progress: it sums a bucket's gradients, and each rank receives its own
    part.
    """

    pending: Pending
    whole: Array
    # The part of the sum that this rank keeps.
    part: Array
    # Destination of ``part``, or the array that it is added to.
    owned_grads: Array


class ShardedGradients:
    """Gradients in ZeRO stages 2 and 3: a bucket's gradients exist only until a micro-batch's sum
    is done.
    """

    def __init__(
        self, device: Device, layout: BufferLayout, dp: Communicator, owned_grads: Array
    ) -> None:
        """Create buffers for gradients. owned_grads: array for the sums that this rank owns."""
        self._layout = layout
        self._dp = dp
        self._owned_grads = owned_grads
        self._pool = Pool(device, owned_grads.dtype)
        self._live: dict[int, Array] = {}
        self._scatters: list[_Scatter] = []
        # Numbers of the buckets that hold gradients of an earlier micro-batch.
        self._summed: set[int] = set()

    @property
    def resident(self) -> Sequence[Array]:
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
                # A single sum that overlaps with the computation is enough, and frees memory
                # sooner.
                self._wait(allowed=1)
                self._live[bucket.number] = whole = self._pool.take(bucket.size)
                # Clear the padding.
                whole[bucket.segments[-1].stop - bucket.start :] = 0
                bind_gradients(bucket, whole)
                mark_grads_unset(bucket)

    def backward_done(self, unit: Unit, *, last: bool) -> None:  # noqa: ARG002
        for bucket in self._layout.completes[unit.name]:
            zero_unset_grads(bucket)
            whole = self._live.pop(bucket.number)
            owned_grads = self._owned_grads[self._layout.owned(bucket)]
            part = (
                self._pool.take(len(owned_grads)) if bucket.number in self._summed else owned_grads
            )
            self._summed.add(bucket.number)
            self._scatters.append(
                _Scatter(self._dp.ireduce_scatter(whole, part), whole, part, owned_grads)
            )

    def finish(self) -> None:
        self._wait(allowed=0)

    def _wait(self, allowed: int) -> None:
        while len(self._scatters) > allowed:
            scatter = self._scatters.pop(0)
            scatter.pending.wait()
            self._pool.put_back(scatter.whole)
            if scatter.part is not scatter.owned_grads:
                scatter.owned_grads += scatter.part
                self._pool.put_back(scatter.part)


def bind_gradients(bucket: Bucket, whole: Array) -> None:
    """Set ``grad`` of a bucket's parameters to views of ``whole``, an array with only this
    bucket.
    """
    for parameter, view in bucket.views(whole):
        parameter.grad = view


def mark_grads_unset(bucket: Bucket) -> None:
    """Make the next gradients of a bucket replace the current gradients, instead of being added."""
    for segment in bucket.segments:
        segment.parameter.grad_unset = True


def zero_unset_grads(bucket: Bucket) -> None:
    for segment in bucket.segments:
        segment.parameter.zero_unset_grad()


class ReplicatedWeights:
    """Weights in ZeRO stages 0 to 2: each rank has all weights, and after an update gathers them
    anew.
    """

    def __init__(self, layout: BufferLayout, dp: Communicator, whole: Array) -> None:
        """Bind the parameters' values to ``whole``, which may be the array of the master
        weights.
        """
        self._layout = layout
        self._dp = dp
        self.resident = whole
        self.working_bytes = 0
        # Whether the other ranks' parts are older than the last update.
        self._stale = False
        self._pending: dict[int, Pending] = {}
        for bucket in layout.buckets:
            bind_values(bucket, whole[bucket.start : bucket.stop])

    def gather(self, unit: Unit, *, backward: bool) -> None:  # noqa: ARG002
        """Wait until the unit's weights are up to date."""
        # Started only when needed: a run may end after any update, with no operation in progress.
        if self._stale:
            self._stale = False
            self._pending = {bucket.number: self._start(bucket) for bucket in self._layout.buckets}
        for bucket in self._layout.uses[unit.name] if self._pending else ():
            if bucket.number in self._pending:
                self._pending.pop(bucket.number).wait()

    def release(self) -> None:
        """Do nothing: the weights stay."""

    def publish(self, owned_weights: Array) -> None:
        """Set this rank's part of the weights. owned_weights: new values, on the device, in any
        dtype.
        """
        if owned_weights is self.resident:
            return
        for bucket in self._layout.buckets:
            part = self.resident[bucket.start : bucket.stop][self._layout.part(bucket)]
            part[...] = owned_weights[self._layout.owned(bucket)]
        self._stale = self._layout.parts > 1

    def _start(self, bucket: Bucket) -> Pending:
        whole = self.resident[bucket.start : bucket.stop]
        return self._dp.iallgather_into(as_bytes(whole[self._layout.part(bucket)]), as_bytes(whole))


class ShardedWeights:
    """Sharded weights, in ZeRO stage 3. While a layer group runs, ranks gather the next group's
    weights.
    """

    def __init__(
        self,
        device: Device,
        layout: BufferLayout,
        dp: Communicator,
        units: Sequence[Unit],
        owned_weights: Array,
    ) -> None:
        """Create buffers for weights. owned_weights: this rank's part; may be the master weights'
        array.
        """
        self._layout = layout
        self._dp = dp
        self.resident = owned_weights
        self._pool = Pool(device, owned_weights.dtype)
        self._live: dict[int, tuple[Array, Pending]] = {}
        # Buckets of the unit that comes next.
        self._next: Sequence[Bucket] = ()
        names = [unit.name for unit in units]
        # The last unit's forward pass is followed by its backward pass, the first unit's backward
        # pass by its forward pass of another micro-batch.
        self._unit_after = dict(zip(names, [*names[1:], *names[-1:]], strict=True))
        self._unit_before = dict(zip(names, [*names[:1], *names[:-1]], strict=True))

    @property
    def working_bytes(self) -> int:
        return self._pool.nbytes

    def gather(self, unit: Unit, *, backward: bool) -> None:
        buckets = self._layout.uses[unit.name]
        self._free_except(buckets)
        for bucket in buckets:
            self._start(bucket)
        self._next = self._layout.uses[
            (self._unit_before if backward else self._unit_after)[unit.name]
        ]
        for bucket in self._next:
            self._start(bucket)
        for bucket in buckets:
            whole, pending = self._live[bucket.number]
            pending.wait()
            bind_values(bucket, whole)

    def release(self) -> None:
        self._free_except(self._next)

    def publish(self, owned_weights: Array) -> None:
        self._free_except(())
        if owned_weights is not self.resident:
            self.resident[...] = owned_weights

    def _start(self, bucket: Bucket) -> None:
        if bucket.number not in self._live:
            whole = self._pool.take(bucket.size)
            part = self.resident[self._layout.owned(bucket)]
            self._live[bucket.number] = (
                whole,
                self._dp.iallgather_into(as_bytes(part), as_bytes(whole)),
            )

    def _free_except(self, buckets: Sequence[Bucket]) -> None:
        numbers = {bucket.number for bucket in buckets}
        for number in [number for number in self._live if number not in numbers]:
            whole, pending = self._live.pop(number)
            pending.wait()
            self._pool.put_back(whole)


def bind_values(bucket: Bucket, whole: Array) -> None:
    """Set ``value`` of a bucket's parameters to views of ``whole``, an array with only this
    bucket.
    """
    for parameter, view in bucket.views(whole):
        parameter.value = view


def as_bytes(array: Array) -> Array:
    """View an array as bytes, so that MPI can also move data of a dtype that MPI does not know."""
    return array.view("uint8")
