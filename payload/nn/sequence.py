"""Sequences of vectors: (B, T, C), B samples of T positions."""

from __future__ import annotations

from collections.abc import Sequence

from payload.device.base import Array
from payload.nn.form import reshaped
from payload.nn.module import LayerContext, Parameter, Tape, normal


class Positions:
    """Positional embedding: add a learned vector for each position. y overwrites x, and dx is
    dy.
    """

    def __init__(self, context: LayerContext, name: str, length: int, width: int) -> None:
        self.table = Parameter(context, f"{name}.weight", (length, width), normal(0.02))
        self.parameters = [self.table]

    def forward(self, x: Array, tape: Tape) -> Array:  # noqa: ARG002
        """Map x (B, T, C) to y of the same shape. T must not exceed ``length``."""
        x += self.table.value[: x.shape[1]]
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:  # noqa: ARG002
        self.table.zero_unset_grad()
        self.table.grad[: dy.shape[1]] += dy.sum(axis=0, dtype=self.table.grad.dtype)
        return dy


class Segments:
    """BERT's segment embedding for a single segment: add its vector to each token, in place."""

    def __init__(self, context: LayerContext, name: str, width: int) -> None:
        """Create a table of two vectors, although only the first is used, so that BERT's weights
        fit.
        """
        self.table = Parameter(context, f"{name}.weight", (2, width), normal(0.02))
        self.parameters = [self.table]

    def forward(self, x: Array, tape: Tape) -> Array:  # noqa: ARG002
        x += self.table.value[0]
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:  # noqa: ARG002
        self.table.zero_unset_grad()
        self.table.grad[0] += dy.sum(axis=(0, 1), dtype=self.table.grad.dtype)
        return dy


class ClassToken:
    """Put a learned vector before each sequence. The output at this position represents the
    sequence.
    """

    def __init__(self, context: LayerContext, name: str, width: int) -> None:
        self._device = context.device
        form = reshaped((width,), (1, 1, width))
        self.token = Parameter(context, name, (width,), normal(0.02), form=form)
        self.parameters = [self.token]

    def forward(self, x: Array, tape: Tape) -> Array:  # noqa: ARG002
        """Map x (B, T, C) to y (B, 1 + T, C)."""
        y: Array = self._device.xp.empty((x.shape[0], x.shape[1] + 1, x.shape[2]), x.dtype)
        y[:, 0] = self.token.value
        y[:, 1:] = x
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:  # noqa: ARG002
        self.token.add(dy[:, 0].sum(axis=0, dtype=self.token.grad.dtype))
        return dy[:, 1:]


class SelectPosition:
    """Select the vector at a fixed position of each sequence."""

    parameters: Sequence[Parameter] = ()

    def __init__(self, context: LayerContext, position: int) -> None:
        """Create the layer. position: 0 is the first, -1 the last."""
        self._device = context.device
        self._position = position

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, T, C) to y (B, C)."""
        tape.push(x.shape)
        return x[:, self._position]

    def backward(self, dy: Array, tape: Tape) -> Array:
        (shape,) = tape.pop()
        dx: Array = self._device.xp.zeros(shape, dy.dtype)
        dx[:, self._position] = dy
        return dx


class Patches:
    """Cut images into square patches with sides of ``size`` pixels, row by row."""

    parameters: Sequence[Parameter] = ()

    def __init__(self, size: int) -> None:
        self._size = size

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, height, width, channels) to y (B, patches, size · size · channels)."""
        tape.push(x.shape)
        count, height, width, channels = x.shape
        rows = height // self._size
        columns = width // self._size
        size = self._size
        cut = x.reshape(count, rows, size, columns, size, channels).swapaxes(2, 3)
        return cut.reshape(count, rows * columns, size * size * channels)

    def backward(self, dy: Array, tape: Tape) -> Array:
        ((count, height, width, channels),) = tape.pop()
        rows = height // self._size
        columns = width // self._size
        size = self._size
        cut = dy.reshape(count, rows, columns, size, size, channels).swapaxes(2, 3)
        return cut.reshape(count, height, width, channels)
