"""Products of 16-bit matrices: exact where their sums are, however the factors lie in memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from payload.device.base import Array, Device

pytestmark = pytest.mark.platform("stand-in", "cuda")

_HALVES = [np.float16, ml_dtypes.bfloat16]

_LAYOUTS: dict[
    str, tuple[Callable[[Any, Any], tuple[Any, Any]], tuple[int, ...], tuple[int, ...]]
] = {
    "as they are": (lambda a, b: (a, b), (5, 7), (7, 3)),
    "left transposed": (lambda a, b: (a.T, b), (7, 5), (7, 3)),
    "right transposed": (lambda a, b: (a, b.T), (5, 7), (3, 7)),
    "both": (lambda a, b: (a.T, b.T), (7, 5), (3, 7)),
    "rows of a wider matrix": (lambda a, b: (a[:, 2:9], b[1:, :3]), (5, 11), (8, 6)),
    "every other number": (lambda a, b: (a[:, ::2], b[::2]), (5, 14), (14, 3)),
    "one row": (lambda a, b: (a, b), (1, 7), (7, 3)),
    "one column": (lambda a, b: (a, b), (5, 7), (7, 1)),
    "one number": (lambda a, b: (a, b), (1, 1), (1, 1)),
    "batches": (lambda a, b: (a, b), (2, 4, 5, 7), (2, 4, 7, 3)),
    "batches transposed": (lambda a, b: (a, b.swapaxes(-1, -2)), (2, 4, 5, 7), (2, 4, 3, 7)),
    "rows of batches": (lambda a, b: (a[..., 1:4, :], b[..., 2:, :]), (2, 4, 5, 7), (2, 4, 9, 3)),
    "heads of a wider matrix": (
        lambda a, b: (a.swapaxes(1, 2), b.swapaxes(1, 2)),
        (2, 5, 4, 7),
        (2, 7, 4, 3),
    ),
    "batches of one": (lambda a, b: (a, b), (1, 4, 5, 7), (1, 4, 7, 3)),
    "one matrix for all": (lambda a, b: (a, b), (2, 5, 7), (7, 3)),
    "nothing": (lambda a, b: (a, b), (0, 7), (7, 3)),
}


def _numbers(shape: tuple[int, ...]) -> Array:
    return np.random.default_rng(len(shape)).integers(-4, 4, shape, endpoint=True)


@pytest.mark.parametrize("half", _HALVES)
@pytest.mark.parametrize("layout", _LAYOUTS)
@pytest.mark.parametrize("given_out", [False, True])
@pytest.mark.parametrize("wide", [False, True])
def test_product_is_exact(
    device: Device, half: Any, layout: str, given_out: bool, wide: bool
) -> None:
    dtype = np.dtype(np.float32 if wide else half)
    lay, *shapes = _LAYOUTS[layout]
    left, right = (_numbers(shape) for shape in shapes)
    expected = np.matmul(*lay(left, right))
    factors = lay(*(device.asarray(one.astype(np.float32), half) for one in (left, right)))
    out = device.xp.full(expected.shape, np.nan, dtype) if given_out else None
    product = device.matmul(*factors, out=out, dtype=dtype)
    assert product.dtype == dtype
    assert out is None or product is out
    found = device.to_host(device.xp.ascontiguousarray(product)).astype(np.float32)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("half", _HALVES)
def test_wide_product_is_not_rounded_on_its_way(device: Device, half: Any) -> None:
    """257 fits into no 8 bits of mantissa, and 240 * 240 * 8 not into half precision."""
    ones = device.xp.ones((4, 257), half)
    assert (
        device.to_host(device.matmul(ones, ones.T, dtype=np.float32)).tolist() == [[257.0] * 4] * 4
    )
    large = device.xp.full((2, 8), 240, half)
    assert (
        device.to_host(device.matmul(large, large.T, dtype=np.float32)).tolist()
        == [[460800.0] * 2] * 2
    )


def test_part_of_an_array_can_be_written_to(device: Device) -> None:
    whole = device.xp.zeros((4, 6), np.float32)
    ones = device.xp.ones((4, 2), np.float16)
    device.matmul(ones, device.xp.ones((2, 3), np.float16), out=whole[:, ::2])
    assert device.to_host(whole).tolist() == [[2.0, 0.0] * 3] * 4
