"""The windows of an image that a convolution or a pooling looks through."""

from __future__ import annotations

from types import ModuleType

from payload.device import Array


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
