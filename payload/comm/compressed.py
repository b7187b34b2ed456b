"""Sums of gradients that send less than all of it, around any transport.

What a rank did not send it keeps, and adds to its next gradient: error feedback (Seide et al., "1-Bit
Stochastic Gradient Descent", Interspeech 2014; Karimireddy et al., "Error Feedback Fixes SignSGD", 2019).
So what is left out is late, not lost. All ranks get the same sum to the last bit, since each makes it of
the same messages in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from payload.comm.base import Pending, Through
from payload.comm.staging import address, flat
from payload.comm.steps import Steps
from payload.comm.transport import Transport
from payload.device import Array


@dataclass(frozen=True, slots=True)
class Piece:
    """One parameter's gradient in the flat array of all."""

    start: int
    shape: tuple[int, ...]


class Compressed(Through[Transport]):
    """A communicator that sums the attached gradients in a lossy way, and all else as its transport does.

    A gradient with a number that is not finite spoils one sum, as it would without compression: what is kept
    of it counts as zero.
    """

    name: ClassVar[str]

    def __init__(self, inner: Transport) -> None:
        super().__init__(inner)
        self.state: dict[str, Array] = {}
        """What must be saved with the weights, by name, and restored in place: each rank has its own."""
        self._grads: Array | None = None

    def attach(self, grads: Array, pieces: Sequence[Piece]) -> None:  # noqa: ARG002
        """Compress, from here on, sums of slices of the flat array ``grads``, which ``pieces`` lie in."""
        self._grads = flat(grads)
        self.state["residual"] = self.inner.device.xp.zeros(grads.shape, grads.dtype)

    def _exchange(self, kept: Array, array: Array, start: int) -> Steps:
        """Write into ``array`` the sum of what ranks send of ``kept``, and leave in that what was not sent.

        Both are flat, and begin at ``start`` of the gradients.
        """
        raise NotImplementedError

    def allreduce(self, array: Array) -> None:
        start = self._place(array)
        if start is None:
            self.inner.allreduce(array)
        else:
            self.inner.lane.run(self._steps(flat(array), start))

    def iallreduce(self, array: Array) -> Pending:
        start = self._place(array)
        if start is None:
            return self.inner.iallreduce(array)
        return self.inner.lane.start(self._steps(flat(array), start))

    def _place(self, array: Array) -> int | None:
        """Where in the gradients an array begins; None if it lies elsewhere."""
        grads = self._grads
        if grads is None or array.dtype != grads.dtype or not array.size:
            return None
        offset = address(array) - address(grads)
        return offset // grads.itemsize if 0 <= offset < grads.nbytes else None

    def _steps(self, array: Array, start: int) -> Steps:
        kept = self.state["residual"][start : start + array.size]
        kept += array
        for requests in self._exchange(kept, array, start):
            yield list(requests)  # what is the last step of a transport's may not be that of an exchange
        self.inner.device.xp.nan_to_num(kept, copy=False, nan=0.0, posinf=0.0, neginf=0.0)
