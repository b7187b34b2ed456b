"""Every backward pass against finite differences, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from payload.device import Array, Cpu
from payload.models import mlp
from payload.nn.activation import ReLU
from payload.nn.base import Context, Layer, Sequential, Unit
from payload.nn.linear import Linear
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.tape import Tape
from payload.parallel.mesh import alone
from payload.parallel.options import Options
from payload.parallel.pipeline import Batch, Pipeline, Stage
from payload.parallel.storage import Storage
from payload.precision import PRECISIONS

_STEP = 1e-6
_CONTEXT = Context(Cpu())


def _slope(function: Callable[[], float], variable: Array) -> Array:
    """Central differences of a function of ``variable``, which is moved in place."""
    slope = np.zeros_like(variable)
    for index in np.ndindex(variable.shape):
        value = variable[index]
        variable[index] = value + _STEP
        above = function()
        variable[index] = value - _STEP
        slope[index] = (above - function()) / (2 * _STEP)
        variable[index] = value
    return slope


def _stored(units: list[Unit]) -> Storage:
    """The units' parameters and gradients in flat float64 arrays."""
    dp = alone().dp
    storage = Storage(_CONTEXT.device, units, dp, Options(seed=1, precision=PRECISIONS["fp64"]))
    storage.begin()
    return storage


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("layer", [Linear(_CONTEXT, "l", 5, 3), ReLU()], ids=["linear", "relu"])
def test_layer_gradients(layer: Layer, rng: np.random.Generator) -> None:
    storage = _stored([Unit("u", layer)])
    storage.values += rng.standard_normal(storage.values.shape)
    x = rng.standard_normal((4, 5))
    weights = rng.standard_normal(layer.forward(x.copy(), Tape()).shape)

    def loss() -> float:
        return float((layer.forward(x.copy(), Tape(training=False)) * weights).sum())

    first, second = Tape(), Tape()  # two micro-batches in flight: their gradients add up
    layer.forward(x.copy(), first)
    layer.forward(x.copy(), second)
    dx = layer.backward(weights.copy(), first)
    layer.backward(weights.copy(), second)
    np.testing.assert_allclose(dx, _slope(loss, x), atol=1e-7)
    np.testing.assert_allclose(storage.grads, 2 * _slope(loss, storage.values), atol=1e-7)


def test_cross_entropy_gradient(rng: np.random.Generator) -> None:
    loss, logits, labels = (
        SoftmaxCrossEntropy(_CONTEXT),
        3 * rng.standard_normal((6, 4)),
        np.array([0, 1, 2, 3, 3, 0]),
    )
    tape = Tape()
    loss.forward(logits.copy(), labels, tape)
    np.testing.assert_allclose(
        loss.backward(0.25, tape),
        _slope(lambda: 0.25 * float(loss.forward(logits, labels, Tape()).loss), logits),
        atol=1e-8,
    )


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    sums = SoftmaxCrossEntropy(_CONTEXT).forward(np.array([[1e4, 0.0], [1e4, 0.0]]), np.array([0, 1]), Tape())
    assert sums.loss == pytest.approx(1e4)
    assert (sums.correct, sums.count) == (1, 2)


def test_model_gradients(rng: np.random.Generator) -> None:
    units = mlp.build(_CONTEXT, inputs=5, classes=3, hidden=(7, 6))
    storage, loss = _stored(units), SoftmaxCrossEntropy(_CONTEXT)
    stage = Stage(units, storage)
    x, labels = rng.standard_normal((8, 5)), rng.integers(0, 3, 8)

    def value() -> float:
        tape = Tape(training=False)
        return float(loss.forward(stage.forward(x, tape), labels, tape).loss)

    Pipeline(stage, loss).train(
        [Batch(x, labels, np.arange(8, dtype="uint32"))], scale=1, seed=0, iteration=1
    )
    np.testing.assert_allclose(storage.grads, _slope(value, storage.values), atol=1e-6)


def test_an_empty_shard_has_no_gradient() -> None:
    units = mlp.build(_CONTEXT, inputs=5, classes=3, hidden=(4,))
    storage = _stored(units)
    storage.grads[:] = 1
    nothing = Batch(np.empty((0, 5)), np.empty(0, np.int64), np.empty(0, "uint32"))
    schedule = Pipeline(Stage(units, storage), SoftmaxCrossEntropy(_CONTEXT))
    assert schedule.train([nothing], scale=1, seed=0, iteration=1).loss == 0
    assert not storage.grads.any()


def test_a_parameter_without_a_gradient_has_zero() -> None:
    linear = Linear(_CONTEXT, "l", 2, 2)
    storage = _stored([Unit("u", Sequential(linear))])
    storage.grads[:] = 1
    storage.begin()
    storage.produced(Unit("u", Sequential(linear)), last=True)
    assert not storage.grads.any()
