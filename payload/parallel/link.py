"""What passes between two neighbouring stages of a pipeline."""

from __future__ import annotations

from collections import deque

import numpy as np

from payload.comm.base import Communicator, Pending
from payload.device import Array, Device
from payload.nn.parameter import Shape

_DTYPES = ("float32", "float64", "float16", "bfloat16")
_HEADER = 8  # numbers: dtype, number of axes, sizes of up to six axes


class Link:
    """One end of it: activations pass to the later stage, and their gradients, of the same shape, back.

    A header says of what shape and dtype an activation is, but only the first time that it comes of inputs of
    some shape: both ends remember. Sends do not block: two stages can send to each other at the same time.
    """

    def __init__(self, device: Device, pp: Communicator, neighbour: int) -> None:
        self._device, self._pp, self._neighbour = device, pp, neighbour
        self._known: dict[Shape, tuple[Shape, str]] = {}
        self._sent: deque[Pending] = deque()

    def send_activation(self, y: Array, inputs: Shape) -> None:
        """To the later stage. ``inputs``: the shape of the micro-batch's inputs, which both ends know."""
        if inputs not in self._known:
            self._known[inputs] = y.shape, y.dtype.name
            header = [_DTYPES.index(y.dtype.name), y.ndim, *y.shape]
            self._send(self._device.asarray(np.array(header + [0] * (_HEADER - len(header)))))
        self._send(y)

    def receive_activation(self, inputs: Shape) -> Array:
        if inputs not in self._known:
            device_header = self._device.xp.empty(_HEADER, "int64")
            self._pp.recv(device_header, self._neighbour)
            dtype, axes, *sizes = self._device.to_host(device_header).tolist()
            self._known[inputs] = tuple(sizes[:axes]), _DTYPES[dtype]
        return self._receive(inputs)

    def send_gradient(self, dx: Array, inputs: Shape) -> None:
        """To the earlier stage: the gradient by what it sent."""
        _, dtype = self._known[inputs]
        self._send(dx.astype(dtype, copy=False))

    def receive_gradient(self, inputs: Shape) -> Array:
        return self._receive(inputs)

    def drain(self, unsent: int = 0) -> None:
        """Wait until no more than so many of the messages sent are still under way."""
        while len(self._sent) > unsent:
            self._sent.popleft().wait()

    def _send(self, array: Array) -> None:
        while self._sent and self._sent[0].test():
            self._sent.popleft()
        self._sent.append(self._pp.isend(self._device.xp.ascontiguousarray(array), self._neighbour))

    def _receive(self, inputs: Shape) -> Array:
        shape, dtype = self._known[inputs]
        array: Array = self._device.xp.empty(shape, dtype)
        self._pp.recv(array, self._neighbour)
        return array
