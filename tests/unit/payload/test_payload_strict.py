"""The double of CuPy refuses what CuPy refuses; how often a training step makes the host wait for a GPU."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from payload.models import gpt
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import Context
from payload.optim.adamw import AdamW
from payload.parallel.engine import Engine
from payload.parallel.mesh import Options, alone
from payload.parallel.pipeline import MicroBatch
from payload.precision import PRECISIONS, loss_scale
from tests.unit.payload.doubles.micro import cut
from tests.unit.payload.doubles.strict import Strict, Waits

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
def test_what_a_gpu_would_refuse_fails(act: Callable[[Any], Any]) -> None:
    with pytest.raises((TypeError, AttributeError, ValueError)):
        act(_DEVICE.asarray(_HOST))


@pytest.mark.parametrize("name", ["nditer", "emath", "nonsense", "linalg.matmul_of_nothing"])
def test_what_cupy_lacks_is_not_there(name: str) -> None:
    with pytest.raises(AttributeError, match="there is no"):
        operator.attrgetter(name)(_DEVICE.xp)


def test_it_computes_as_numpy_does() -> None:
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
def test_a_product_that_is_wanted_in_float32_was_never_rounded_to_16_bits(kind: str) -> None:
    ones = np.ones((1, 2, 2049)).astype(getattr(ml_dtypes, kind, kind))  # neither knows 2049
    left, right = _DEVICE.asarray(ones), _DEVICE.asarray(ones.swapaxes(1, 2).copy())
    out = _DEVICE.xp.empty((1, 2, 2), "float32")
    assert set(_DEVICE.matmul(left, right, dtype="float32").get().ravel()) == {2049}
    _DEVICE.matmul(left, right, out=out)
    assert set(out.get().ravel()) == {2049}
    assert str(_DEVICE.matmul(left, right).dtype) == kind


def _waits_of_a_step(micro_batches: int, layers: int, precision: str) -> int:
    units = gpt.build(
        Context(_DEVICE), vocabulary=32, length=6, dropout=0.1, layers=layers, heads=2, width=16
    )
    engine = Engine(
        _DEVICE,
        alone(),
        units,
        SoftmaxCrossEntropy(Context(_DEVICE)),
        lambda storage: AdamW(storage.optimizer_device, storage.master_weights, storage.segments),
        options=Options(precision=PRECISIONS[precision]),
        loss_scale=loss_scale(precision, None),
    )
    tokens = _DEVICE.asarray(np.random.default_rng(1).integers(0, 32, (4, 6)))
    batch = MicroBatch(tokens, tokens, _DEVICE.asarray(np.arange(4, dtype="uint32")))
    engine.step(cut(batch, micro_batches), targets=24, iteration=1, lr=1e-3)
    before = Waits.count
    assert engine.step(cut(batch, micro_batches), targets=24, iteration=2, lr=1e-3).finite
    return Waits.count - before


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_the_host_waits_a_fixed_number_of_times_a_step(precision: str) -> None:
    """For the loss, the number of targets and the gradients' norm; and for the embedding's table, to find out
    how many tokens of a micro-batch differ."""
    waits = {cuts: {_waits_of_a_step(cuts, layers, precision) for layers in (1, 3)} for cuts in (1, 2)}
    assert waits == {1: {3 + 1}, 2: {3 + 2}}
