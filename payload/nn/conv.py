"""Convolution over images whose channels come last: (B, height, width, channels)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from types import ModuleType

from payload.device import Array
from payload.nn.form import convolution
from payload.nn.module import Context, Parameter, Tape, normal, zeros

_MIN_POSITIONS = 512
"""Fewer rows in a product, and BLAS spends more on packing the weights than on multiplying."""


class Conv2d:
    """y[h, w] = Σ over i, j of x[h·stride + i - padding, w·stride + j - padding] W[-1 - i, -1 - j] + b.

    The weights (inputs, kernel, kernel, outputs) are those of a convolution as mathematics has it: flipped
    against those of a correlation, as most libraries have it. So they are used as they lie in the backward
    pass of stride 1, which is a correlation of dy with them, and are copied in the forward pass alone.

    Patches of the input are laid out as rows of a matrix (im2col), a block at a time that stays in the cache,
    and multiplied with the weights.
    """

    def __init__(
        self,
        context: Context,
        name: str,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        bias: bool = False,
        first: bool = False,
    ) -> None:
        """
        Args:
            first: the input is data; nobody wants the gradient by it, and ``backward`` gives zeros (0,).
        """
        self._device = context.device
        self._inputs, self._outputs, self._kernel = inputs, outputs, kernel
        self._stride, self._padding, self._first = stride, padding, first
        shape = (inputs, kernel, kernel, outputs)
        # He et al. 2015 (arXiv:1502.01852), for the fan-out, as its authors' residual networks have it.
        self.weight = Parameter(
            context,
            f"{name}.weight",
            shape,
            normal(math.sqrt(2 / (kernel * kernel * outputs))),
            form=convolution(inputs, kernel, outputs),
        )
        self.bias = Parameter(context, f"{name}.bias", (outputs,), zeros) if bias else None
        self.parameters = [self.weight] if self.bias is None else [self.weight, self.bias]

    def output_size(self, size: int) -> int:
        """Height or width of the output for that of an input."""
        return output_size(size, self._kernel, self._stride, self._padding)

    def forward(self, x: Array, tape: Tape) -> Array:
        """(B, H, W, inputs) → (B, H', W', outputs)"""
        batch, height, width, _ = x.shape
        shape = (batch, self.output_size(height), self.output_size(width), self._outputs)
        y: Array = self._device.xp.empty(shape, x.dtype)
        weight = self._rows()
        for where, patches in self._patches(x, self._stride, self._padding):
            self._device.matmul(patches, weight, out=y[where].reshape(-1, self._outputs))
        if self.bias is not None:
            y += self.bias.value
        tape.push(x)
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        """(B, H', W', outputs) → (B, H, W, inputs)"""
        (x,) = tape.pop()
        if self.bias is not None:
            self.bias.add(dy.sum(axis=(0, 1, 2), dtype=self.bias.grad.dtype))
        if self._stride == 1 and not self._first and self._padding < self._kernel:
            return self._backward_dense(x, dy)
        return self._backward_strided(x, dy)

    def _backward_dense(self, x: Array, dy: Array) -> Array:
        """The patches of dy that each position of x went into serve both gradients."""
        dx: Array = self._device.xp.empty(x.shape, x.dtype)
        weight = self.weight.value.reshape(self._inputs, -1)
        for where, patches in self._patches(dy, 1, self._kernel - 1 - self._padding):
            self._device.matmul(patches, weight.T, out=dx[where].reshape(-1, self._inputs))
            self.weight.add_product(x[where].reshape(-1, self._inputs), patches)
        return dx

    def _backward_strided(self, x: Array, dy: Array) -> Array:
        """Gradients by patches of x, added up where patches overlap."""
        xp, kernel, padding = self._device.xp, self._kernel, self._padding
        batch, height, width, inputs = x.shape
        dw: Array = xp.zeros((kernel * kernel * inputs, self._outputs), self.weight.grad.dtype)
        padded: Array = xp.zeros(
            (0,) if self._first else (batch, height + 2 * padding, width + 2 * padding, inputs), x.dtype
        )
        weight = self._rows()
        for where, patches in self._patches(x, self._stride, padding):
            dy_rows = dy[where].reshape(-1, self._outputs)
            dw += self._device.matmul(patches.T, dy_rows, dtype=dw.dtype)
            if not self._first:
                self._device.matmul(dy_rows, weight.T, out=patches)
                self._scatter(patches.reshape(*dy[where].shape[:3], kernel, kernel, inputs), padded, where)
        self.weight.add(dw.reshape(kernel, kernel, inputs, -1)[::-1, ::-1].transpose(2, 0, 1, 3))
        return padded if self._first else padded[:, padding : padding + height, padding : padding + width]

    def _scatter(self, patches: Array, padded: Array, where: tuple[slice, slice]) -> None:
        """Add (n, rows, W', kernel, kernel, inputs) to the places of the padded input they came from."""
        samples, rows = where
        stride, width = self._stride, patches.shape[2]
        for i in range(self._kernel):
            top = rows.start * stride + i
            for j in range(self._kernel):
                places = padded[
                    samples,
                    top : top + (patches.shape[1] - 1) * stride + 1 : stride,
                    j : j + (width - 1) * stride + 1 : stride,
                ]
                places += patches[:, :, :, i, j]

    def _rows(self) -> Array:
        """The weights in the order of a patch: (kernel · kernel · inputs, outputs)"""
        flipped = self.weight.value[:, ::-1, ::-1].transpose(1, 2, 0, 3)
        rows: Array = self._device.xp.ascontiguousarray(flipped).reshape(-1, self._outputs)
        return rows

    def _patches(self, x: Array, stride: int, padding: int) -> Iterator[tuple[tuple[slice, slice], Array]]:
        """Blocks of samples and rows of the output, and the patches (positions, kernel · kernel · channels)
        that they are made of, which may be overwritten; all blocks share one array."""
        kernel, (batch, height, width, channels) = self._kernel, x.shape
        if not batch:
            return
        high, wide = (output_size(n, kernel, stride, padding) for n in (height, width))
        if kernel == 1 and stride == 1 and padding == 0:
            yield (slice(0, batch), slice(0, high)), x.reshape(-1, channels)
            return
        row = kernel * kernel * channels
        rows = max(1, max(self._device.block_rows(row * x.itemsize), _MIN_POSITIONS) // wide)
        samples = min(max(1, rows // high), batch)
        rows = min(rows, high)
        xp = self._device.xp
        padded: Array = xp.zeros((samples, height + 2 * padding, width + 2 * padding, channels), x.dtype)
        inner = padded[:, padding : padding + height, padding : padding + width]
        view = windows(xp, padded, kernel, stride)
        buffer: Array = xp.empty((samples * rows * wide, row), x.dtype)
        for first in range(0, batch, samples):
            count = min(samples, batch - first)
            inner[:count] = x[first : first + count]
            for top in range(0, high, rows):
                block = view[:count, top : top + rows]  # (count, some, wide, kernel, kernel, channels)
                patches = buffer[: block.shape[0] * block.shape[1] * wide]
                patches.reshape(block.shape)[...] = block
                yield (slice(first, first + count), slice(top, top + block.shape[1])), patches


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """How many windows fit along a side of an image."""
    return (size + 2 * padding - kernel) // stride + 1


def windows(xp: ModuleType, image: Array, kernel: int, stride: int) -> Array:
    """(B, H, W, C) → (B, H', W', kernel, kernel, C): a view, in which neighbours overlap."""
    batch, height, width, channels = image.shape
    high, wide = (output_size(n, kernel, stride, 0) for n in (height, width))
    along_batch, down, right, along_channels = image.strides
    view: Array = xp.lib.stride_tricks.as_strided(
        image,
        (batch, high, wide, kernel, kernel, channels),
        (along_batch, down * stride, right * stride, down, right, along_channels),
    )
    return view
