"""The double of CuPy refuses what CuPy refuses, and computes what NumPy does."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from tests.support.doubles.strict import Strict

_DEVICE = Strict()
_HOST: Any = np.ones((2, 3))


@pytest.mark.parametrize(
    "act",
    [
        lambda x: x + _HOST,
        lambda x: _HOST + x,
        lambda x: x[np.array([0, 1])],
        lambda x: x.__setitem__(..., _HOST),
        lambda x: x.__iadd__(_HOST),
        lambda x: x.add(_HOST),
        np.exp,
        np.asarray,
        lambda x: np.zeros((2, 3)).__iadd__(x),
        lambda _: _DEVICE.xp.exp(_HOST),
        lambda _: _DEVICE.xp.concatenate([_HOST, _HOST]),
        lambda x: _DEVICE.xp.exp(x, where=True),
        lambda x: x.sum(initial=0),
        lambda x: _DEVICE.xp.matmul(x, x.T.astype("float32")),
        lambda x: x.astype(ml_dtypes.bfloat16) * 0.5,
        lambda x: x.__setitem__(_DEVICE.asarray(np.array([1, 1])), 0),
    ],
)
def test_cupy_double_refuses_what_a_gpu_refuses(act: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError)):
        act(_DEVICE.asarray(_HOST))


@pytest.mark.parametrize("name", ["nditer", "emath", "nonsense", "linalg.matmul_of_nothing"])
def test_cupy_double_lacks_functions_that_cupy_lacks(name: str) -> None:
    with pytest.raises(AttributeError) as caught:
        operator.attrgetter(name)(_DEVICE.xp)
    assert "no cupy." in str(caught.value)


def test_cupy_double_computes_like_numpy() -> None:
    x = _DEVICE.asarray(_HOST)
    x[0] *= 3
    x[:, 1] += x[:, 0]
    y = 2 * x @ x.T - x.sum(axis=1, keepdims=True)
    host = _HOST.copy()
    host[0] *= 3
    host[:, 1] += host[:, 0]
    np.testing.assert_array_equal(y.get(), 2 * host @ host.T - host.sum(axis=1, keepdims=True))
    assert x[0, 0].shape == ()
    assert x[1:].base is x
    assert x.reshape(3, 2).T.base is x
    assert x.copy().base is None


@pytest.mark.parametrize("kind", ["bfloat16", "float16"])
def test_float32_product_is_never_rounded_to_16_bits(kind: str) -> None:
    ones = np.ones((1, 2, 2049)).astype(getattr(ml_dtypes, kind, kind))  # neither knows 2049
    left = _DEVICE.asarray(ones)
    right = _DEVICE.asarray(ones.swapaxes(1, 2).copy())
    out = _DEVICE.xp.empty((1, 2, 2), "float32")
    assert set(_DEVICE.matmul(left, right, dtype="float32").get().ravel()) == {2049}
    _DEVICE.matmul(left, right, out=out)
    assert set(out.get().ravel()) == {2049}
    assert str(_DEVICE.matmul(left, right).dtype) == kind
