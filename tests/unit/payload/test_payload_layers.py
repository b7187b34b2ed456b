"""Every backward pass against finite differences, in float64."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from payload.device import Array, Cpu
from payload.models.mlp import MLP
from payload.nn.buffers import FlatBuffers
from payload.nn.layers import Layer, Linear, ReLU
from payload.nn.loss import SoftmaxCrossEntropy
from payload.optim import SGD

_STEP = 1e-6


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


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(7)


@pytest.mark.parametrize("layer", [Linear(Cpu(), 5, 3), ReLU()], ids=["linear", "relu"])
def test_layer_gradients(layer: Layer, rng: np.random.Generator) -> None:
    buffers = FlatBuffers(Cpu(), layer.shapes, "float64")
    layer.bind(buffers.parameters, rng)
    buffers.values += rng.standard_normal(buffers.values.shape)
    x = rng.standard_normal((4, 5))
    weights = rng.standard_normal(layer.forward(x).shape)

    def loss() -> float:
        return float((layer.forward(x) * weights).sum())

    loss()
    dx = layer.backward(weights)
    gradients = buffers.grads.copy()
    np.testing.assert_allclose(dx, _slope(loss, x), atol=1e-7)
    np.testing.assert_allclose(gradients, _slope(loss, buffers.values), atol=1e-7)


def test_cross_entropy_gradient(rng: np.random.Generator) -> None:
    loss, logits, labels = (
        SoftmaxCrossEntropy(Cpu()),
        3 * rng.standard_normal((6, 4)),
        np.array([0, 1, 2, 3, 3, 0]),
    )
    loss.forward(logits, labels)
    gradient = loss.backward(scale=0.25)
    np.testing.assert_allclose(
        gradient, _slope(lambda: 0.25 * loss.forward(logits, labels), logits), atol=1e-8
    )


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    loss = SoftmaxCrossEntropy(Cpu())
    assert loss.forward(np.array([[1e4, 0.0], [1e4, 0.0]]), np.array([0, 1])) == pytest.approx(1e4)


def test_model_gradients(rng: np.random.Generator) -> None:
    model, loss = MLP(Cpu(), (5, 7, 6, 3), dtype="float64", seed=1), SoftmaxCrossEntropy(Cpu())
    x, labels = rng.standard_normal((8, 5)), rng.integers(0, 3, 8)

    def value() -> float:
        return loss.forward(model.forward(x), labels)

    value()
    model.backward(loss.backward(scale=1))
    gradients = model.buffers.grads.copy()
    np.testing.assert_allclose(gradients, _slope(value, model.buffers.values), atol=1e-6)


def test_an_empty_shard_has_no_gradient(rng: np.random.Generator) -> None:
    model, loss = MLP(Cpu(), (5, 4, 3), dtype="float64", seed=1), SoftmaxCrossEntropy(Cpu())
    model.buffers.grads[:] = 1
    assert loss.forward(model.forward(np.empty((0, 5))), np.empty(0, np.int64)) == 0
    model.backward(loss.backward(scale=1))
    assert not model.buffers.grads.any()


def test_sgd_adds_up_its_momentum() -> None:
    buffers = FlatBuffers(Cpu(), [(1,)], "float64")
    optimizer = SGD(Cpu(), buffers, lr=0.1, momentum=0.5)
    buffers.grads[:] = 1
    optimizer.step()
    optimizer.step()
    assert buffers.values == pytest.approx([-0.1 - 0.15])
