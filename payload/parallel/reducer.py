"""Sums of gradients over data-parallel ranks, begun while the backward pass still goes on."""

from __future__ import annotations

from payload.comm.base import Communicator, Pending
from payload.device import Array


class Reducer:
    """Gathers units into buckets from the last to the first, as their gradients appear, and sums full ones.

    As PyTorch's DistributedDataParallel does (Li et al., "PyTorch Distributed", VLDB 2020, section 3.2.3).
    """

    def __init__(self, dp: Communicator, *, bucket_bytes: int = 25 << 20, overlap: bool = True) -> None:
        """``overlap=False``: everything is summed at the end, in one call."""
        self._dp, self._bucket_bytes, self._overlap = dp, bucket_bytes, overlap
        self._places: dict[str, tuple[int, int]] = {}
        self._pending: list[Pending] = []

    def add(self, unit: str, start: int, stop: int) -> None:
        """Where a unit's gradients lie; units come in the order of the model."""
        self._places[unit] = start, stop

    def begin(self, grads: Array) -> None:
        """Of a new iteration, in the flat array of all gradients."""
        self._grads = grads
        self._upper = self._lower = len(grads)  # the bucket that is being filled

    def ready(self, unit: str) -> None:
        """The gradients of a unit are complete; those of all later units were before."""
        if unit not in self._places:
            return
        self._lower = self._places[unit][0]
        for pending in self._pending:
            pending.test()
        if self._overlap and (self._upper - self._lower) * self._grads.itemsize >= self._bucket_bytes:
            self._pending.append(self._dp.iallreduce(self._grads[self._lower : self._upper]))
            self._upper = self._lower

    def finish(self) -> None:
        """Until all are sums."""
        if self._upper:
            rest = self._grads[: self._upper]
            if self._pending:
                self._pending.append(self._dp.iallreduce(rest))
            else:
                self._dp.allreduce(rest)
        for pending in self._pending:
            pending.wait()
        self._pending.clear()
