"""Convolution over images with channels last: (B, height, width, channels)."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import product
from types import ModuleType

import numpy as np

from payload.device.base import Array
from payload.device.fused import Fused
from payload.nn.form import convolution
from payload.nn.module import LayerContext, Parameter, Tape, normal

_MIN_POSITIONS = 512
"""Minimum rows of a product: with fewer, BLAS spends more time packing the weights than
multiplying.
"""
_TILE = 4
"""Side of a tile of outputs in Winograd's algorithm."""
_TILES = 128
"""Tiles in a block. With fewer tiles products are slower; more tiles do not fit in the cache."""
_MIN_WINOGRAD = 32
"""Minimum number of tiles and of channels for Winograd. With fewer, transforms cost more than they
save.
"""


class Conv2d:
    """y[h, w] = Σ over i, j of x[h·stride + i - padding, w·stride + j - padding] W[-1 - i, -1 - j].

    The weights (inputs, kernel, kernel, outputs) are those of a mathematical convolution: flipped,
    compared with the correlation that most libraries compute. The backward pass at stride 1 is a
    correlation of dy with these weights and reads them in place; only the forward pass needs a
    flipped copy. Patches of the input become rows of a matrix (im2col), in blocks that fit in the
    cache, and are multiplied with the weights. On a CPU, a 3x3 convolution with stride 1 and many
    channels uses Winograd's F(4x4, 3x3) (Lavin and Gray 2015, arXiv:1509.09308). It computes tiles
    of 4x4 outputs with a quarter of the multiplications, but its rounding errors are five times as
    large: in float32, 1e-6 of the result.
    """

    def __init__(
        self,
        context: LayerContext,
        name: str,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        padding: int = 0,
        first: bool = False,
    ) -> None:
        """Create the layer. first: x is data without a gradient, so ``backward`` returns an empty
        array.
        """
        self._device = context.device
        self._inputs = inputs
        self._outputs = outputs
        self._kernel = kernel
        self._stride = stride
        self._padding = padding
        self._first = first
        shape = (inputs, kernel, kernel, outputs)
        # He et al. 2015 (arXiv:1502.01852), with the fan-out, as in the authors' residual networks.
        self.weight = Parameter(
            context,
            f"{name}.weight",
            shape,
            normal(math.sqrt(2 / (kernel * kernel * outputs))),
            form=convolution(inputs, kernel, outputs),
        )
        self.parameters = [self.weight]

    def output_size(self, size: int) -> int:
        return output_size(size, self._kernel, self._stride, self._padding)

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, H, W, inputs) to y (B, H', W', outputs)."""
        batch, height, width, _ = x.shape
        shape = (batch, self.output_size(height), self.output_size(width), self._outputs)
        if fused := self._device.fused_for(x):
            flipped = self._correlation_weight()
            tape.push(x, flipped)
            return fused.convolve(
                x, flipped, stride=self._stride, padding=self._padding, shape=shape
            )
        y: Array = self._device.xp.empty(shape, x.dtype)
        if self._suits_winograd(y):
            weight = self._tile_weights(flipped=True)
            for index, windows in self._tiles(x, _OF_WINDOW, self._padding, y.shape):
                self._write_tiles(self._device.matmul(windows, weight), y, index)
        else:
            weight = self._rows()
            for index, patches in self._patches(x, self._stride, self._padding):
                self._device.matmul(patches, weight, out=y[index].reshape(-1, self._outputs))
        tape.push(x)
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        x, *flipped = tape.pop()
        if fused := self._device.fused_for(dy):
            return self._backward_fused(fused, x, dy, flipped[0])
        if self._stride == 1 and not self._first and self._padding < self._kernel:
            return (
                self._backward_tiles(x, dy)
                if self._suits_winograd(x)
                else self._backward_dense(x, dy)
            )
        return self._backward_strided(x, dy)

    def _correlation_weight(self) -> Array:
        """Return the weights (outputs, kernel, kernel, inputs) of the equal correlation, a copy."""
        flipped = self.weight.value[:, ::-1, ::-1].transpose(3, 1, 2, 0)
        return flipped.copy(order="C")

    def _backward_fused(self, fused: Fused, x: Array, dy: Array, weight: Array) -> Array:
        dw = fused.convolve_weight_gradient(
            x, dy, stride=self._stride, padding=self._padding, shape=weight.shape
        )
        self.weight.add(dw.transpose(3, 1, 2, 0)[:, ::-1, ::-1])
        if self._first:
            return self._device.xp.zeros(0, x.dtype)
        return fused.convolve_input_gradient(
            dy, weight, stride=self._stride, padding=self._padding, shape=x.shape
        )

    def _backward_dense(self, x: Array, dy: Array) -> Array:
        """Backward pass for stride 1. The gradients of x and of the weights use the same patches of
        dy.
        """
        dx: Array = self._device.xp.empty(x.shape, x.dtype)
        weight = self.weight.value.reshape(self._inputs, -1)
        for index, patches in self._patches(dy, 1, self._kernel - 1 - self._padding):
            self._device.matmul(patches, weight.T, out=dx[index].reshape(-1, self._inputs))
            self.weight.add_product(x[index].reshape(-1, self._inputs), patches)
        return dx

    def _backward_strided(self, x: Array, dy: Array) -> Array:
        """Backward pass for any stride. Gradients of x are added up where patches overlap."""
        xp = self._device.xp
        kernel = self._kernel
        padding = self._padding
        batch, height, width, inputs = x.shape
        dw: Array = xp.zeros((kernel * kernel * inputs, self._outputs), self.weight.grad.dtype)
        padded: Array = xp.zeros(
            (0,) if self._first else (batch, height + 2 * padding, width + 2 * padding, inputs),
            x.dtype,
        )
        weight = self._rows()
        for index, patches in self._patches(x, self._stride, padding):
            dy_rows = dy[index].reshape(-1, self._outputs)
            dw += self._device.matmul(patches.T, dy_rows, dtype=dw.dtype)
            if not self._first:
                self._device.matmul(dy_rows, weight.T, out=patches)
                self._scatter(
                    patches.reshape(*dy[index].shape[:3], kernel, kernel, inputs), padded, index
                )
        self.weight.add(dw.reshape(kernel, kernel, inputs, -1)[::-1, ::-1].transpose(2, 0, 1, 3))
        return (
            padded
            if self._first
            else padded[:, padding : padding + height, padding : padding + width]
        )

    def _scatter(self, patches: Array, padded: Array, index: tuple[slice, slice]) -> None:
        # patches: (n, rows, W', kernel, kernel, inputs). padded: the padded dx. index: samples,
        # rows of dy.
        samples, rows = index
        stride = self._stride
        width = patches.shape[2]
        for i in range(self._kernel):
            top = rows.start * stride + i
            for j in range(self._kernel):
                places = padded[
                    samples,
                    top : top + (patches.shape[1] - 1) * stride + 1 : stride,
                    j : j + (width - 1) * stride + 1 : stride,
                ]
                places += patches[:, :, :, i, j]

    def _suits_winograd(self, y: Array) -> bool:
        """Return whether to use Winograd's algorithm for an output ``y``. It must fill most of the
        tiles.
        """
        batch, height, width, _ = y.shape
        tiles = math.ceil(height / _TILE) * math.ceil(width / _TILE)
        return (
            (self._kernel, self._stride, self._device.gpu) == (3, 1, None)
            and min(self._inputs, self._outputs, batch * tiles) >= _MIN_WINOGRAD
            and height * width > 0.75 * tiles * _TILE**2
            and y.dtype.itemsize >= np.dtype("float32").itemsize
        )

    def _backward_tiles(self, x: Array, dy: Array) -> Array:
        """Backward pass by Winograd's algorithm. dx and the weights' gradient use the same windows
        of dy.
        """
        dx: Array = self._device.xp.empty(x.shape, x.dtype)
        weight = self._tile_weights(flipped=False).transpose(0, 2, 1)
        to_weights = self._device.asarray(_OF_WEIGHTS.T, self.weight.grad.dtype)
        windows = self._tiles(dy, _OF_WINDOW, self._kernel - 1 - self._padding, x.shape)
        for (index, windows_dy), (_, tiles) in zip(
            windows, self._tiles(x, _OF_TILE, 0, x.shape), strict=True
        ):
            self._write_tiles(self._device.matmul(windows_dy, weight), dx, index)
            dw = self._device.matmul(tiles.transpose(0, 2, 1), windows_dy, dtype=to_weights.dtype)
            self.weight.add(self._device.matmul(to_weights, dw.transpose(1, 0, 2)))
        return dx

    def _tile_weights(self, *, flipped: bool) -> Array:
        """Return Winograd's transform (36, inputs, outputs) of the weights. flipped: reverse kernel
        axes.
        """
        value = self.weight.value.reshape(self._inputs, -1, self._outputs)
        transform = self._device.asarray(_OF_WEIGHTS[:, :: -1 if flipped else 1], value.dtype)
        return self._device.matmul(transform, value).transpose(1, 0, 2)

    def _tiles(
        self, x: Array, transform: Array, padding: int, shape: tuple[int, ...]
    ) -> Iterator[tuple[tuple[slice, slice], Array]]:
        # Yields for each block ((samples, tile rows), transformed x (36, tiles, channels)).
        # transform: the matrix for windows or for tiles of x. shape:
        # shape of the array that is cut into tiles.
        xp = self._device.xp
        size = math.isqrt(transform.shape[1])
        grid = (math.ceil(shape[1] / _TILE), math.ceil(shape[2] / _TILE))
        transform = self._device.asarray(transform, x.dtype)
        blocks = _blocks(xp, x, grid, kernel=size, stride=_TILE, padding=padding, positions=_TILES)
        for index, block in blocks:
            numbers = xp.ascontiguousarray(block.transpose(3, 4, 0, 1, 2, 5)).reshape(
                size * size, -1
            )
            yield (
                index,
                self._device.matmul(transform, numbers).reshape(len(transform), -1, x.shape[3]),
            )

    def _write_tiles(self, products: Array, y: Array, index: tuple[slice, slice]) -> None:
        # Transform back, and crop tiles at the edges of y. products: (36, tiles, channels).
        samples, rows = index
        target = y[samples, rows.start * _TILE : rows.stop * _TILE]
        back = self._device.asarray(_OF_TILE.T, y.dtype)
        tiles = self._device.matmul(back, products.reshape(len(products), -1))
        tiles = tiles.reshape(_TILE, _TILE, len(target), rows.stop - rows.start, -1, y.shape[3])
        for i, j in product(range(_TILE), range(_TILE)):
            part = target[:, i::_TILE, j::_TILE]
            part[...] = tiles[i, j, :, : part.shape[1], : part.shape[2]]

    def _rows(self) -> Array:
        flipped = self.weight.value[:, ::-1, ::-1].transpose(1, 2, 0, 3)
        return self._device.xp.ascontiguousarray(flipped).reshape(-1, self._outputs)

    def _patches(
        self, x: Array, stride: int, padding: int
    ) -> Iterator[tuple[tuple[slice, slice], Array]]:
        # Yields for each block ((samples, rows), patches (positions, kernel · kernel · channels)).
        # All blocks use the same array, which the caller may overwrite.
        kernel = self._kernel
        batch, height, width, channels = x.shape
        if not batch:
            return
        high, wide = (output_size(n, kernel, stride, padding) for n in (height, width))
        if kernel == 1 and stride == 1 and padding == 0:
            yield (slice(0, batch), slice(0, high)), x.reshape(-1, channels)
            return
        row = kernel * kernel * channels
        positions = max(self._device.block_rows(row * x.itemsize), _MIN_POSITIONS)
        buffer: Array | None = None
        blocks = _blocks(
            self._device.xp,
            x,
            (high, wide),
            kernel=kernel,
            stride=stride,
            padding=padding,
            positions=positions,
        )
        for index, block in blocks:
            # The first block is the largest.
            if buffer is None:
                buffer = self._device.xp.empty((block.size // row, row), x.dtype)
            patches = buffer[: block.size // row]
            patches.reshape(block.shape)[...] = (
                block  # (samples, rows, wide, kernel, kernel, channels)
            )
            yield index, patches


def output_size(size: int, kernel: int, stride: int, padding: int) -> int:
    """Return the height or width of the output of a convolution or pooling, given that of its
    input.
    """
    return (size + 2 * padding - kernel) // stride + 1


def _blocks(
    xp: ModuleType,
    x: Array,
    grid: tuple[int, int],
    *,
    kernel: int,
    stride: int,
    padding: int,
    positions: int,
) -> Iterator[tuple[tuple[slice, slice], Array]]:
    # Yields for each block ((samples, rows), windows (n, rows, wide, kernel, kernel, channels)).
    # Windows are views of a padded copy, which the next block may overwrite. grid: (rows of
    # windows, windows in a row).
    # positions: maximum number of windows in a block, but a block has at least a row.
    batch, height, width, channels = x.shape
    high, wide = grid
    if not batch:
        return
    rows = max(1, positions // wide)
    samples = min(max(1, rows // high), batch)
    rows = min(rows, high)
    tall = max(height + 2 * padding, (high - 1) * stride + kernel)
    broad = max(width + 2 * padding, (wide - 1) * stride + kernel)
    padded: Array = xp.zeros((samples, tall, broad, channels), x.dtype)
    inner = padded[:, padding : padding + height, padding : padding + width]
    view = windows(xp, padded, kernel, stride)[:, :, :wide]
    for first in range(0, batch, samples):
        count = min(samples, batch - first)
        inner[:count] = x[first : first + count]
        for top in range(0, high, rows):
            block = view[:count, top : min(top + rows, high)]
            yield (slice(first, first + count), slice(top, top + block.shape[1])), block


def windows(xp: ModuleType, image: Array, kernel: int, stride: int) -> Array:
    """Return overlapping windows (B, H', W', kernel, kernel, C) of an image (B, H, W, C), as a
    view.
    """
    batch, height, width, channels = image.shape
    high, wide = (output_size(n, kernel, stride, 0) for n in (height, width))
    along_batch, down, right, along_channels = image.strides
    return xp.lib.stride_tricks.as_strided(
        image,
        (batch, high, wide, kernel, kernel, channels),
        (along_batch, down * stride, right * stride, down, right, along_channels),
    )


def _winograd(tile: int, kernel: int) -> tuple[Array, Array, Array]:
    """Return Winograd's matrices: for an output tile (36, 16), the weights (36, 9), and a window
    (36, 36).

    A convolution is a product of polynomials. At each of a few points, the product's value is the
    product of the factors' values; the same holds for the leading coefficients (Toom and Cook).
    """
    # These points keep the rounding errors small.
    points = (0, math.sqrt(0.5), -math.sqrt(0.5), math.sqrt(2), -math.sqrt(2))
    size = tile + kernel - 1

    def values(count: int) -> Array:
        return np.vstack([np.vander(points, count, increasing=True), np.eye(count)[-1]])

    sides = values(tile), values(kernel), np.linalg.inv(values(size)).T
    # The Kronecker product applies the transform along columns and rows.
    of_tile, of_weights, of_window = (np.kron(side, side) for side in sides)
    return of_tile, of_weights, of_window


_OF_TILE, _OF_WEIGHTS, _OF_WINDOW = _winograd(_TILE, 3)
