"""Dropout (Srivastava et al., JMLR 2014)."""

from __future__ import annotations

import math
from collections.abc import Sequence

from payload.device.base import Array, bits
from payload.nn.module import LayerContext, Parameter, Tape
from payload.nn.random import draw_kept, sample_keys


class Dropout:
    """In training, set a share ``rate`` of the numbers to 0 and scale up the rest to keep the
    expected value.

    The choice of numbers depends on seed, iteration, sample, position and the layer's name, not on
    ranks.
    """

    parameters: Sequence[Parameter] = ()

    def __init__(
        self, context: LayerContext, name: str, rate: float, *, split: bool = False
    ) -> None:
        """Create the layer. rate: in [0, 1). split: whether tensor-parallel ranks split the last
        axis.
        """
        self._device = context.device
        self._name = name
        self._rate = rate
        self._part, self._parts = (context.tp.rank, context.tp.size) if split else (0, 1)

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, ..., width) to y of the same shape. A sample must have fewer than 2³²
        numbers.
        """
        if not self._rate or not tape.training or tape.draw is None:
            tape.push(None)
            return x
        mask = self._device.xp.empty(x.shape, bool)
        index = self._index(x.shape[1:]).ravel()
        keys = sample_keys(tape.draw, self._name)
        draw_kept(self._device, keys, index, self._rate, mask.reshape(len(x), index.size))
        tape.push(mask)
        return self._scaled(x, mask)

    def backward(self, dy: Array, tape: Tape) -> Array:
        (mask,) = tape.pop()
        return dy if mask is None else self._scaled(dy, mask)

    def _index(self, shape: tuple[int, ...]) -> Array:
        """Return each number's position in its sample, which may be split over tensor-parallel
        ranks.
        """
        width = shape[-1]
        arange = self._device.xp.arange
        rows = arange(math.prod(shape[:-1]), dtype="uint32")[:, None] * (width * self._parts)
        index: Array = rows + arange(self._part * width, (self._part + 1) * width, dtype="uint32")
        return index.reshape(shape)

    def _scaled(self, x: Array, mask: Array) -> Array:
        y: Array = (bits(x) * mask).view(x.dtype)
        y *= 1 / (1 - self._rate)
        return y
