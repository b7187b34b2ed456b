"""Every layer beside PyTorch's and finite differences; and PyTorch's answers to infinities and
NaN.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pytest

from payload.comm.base import Solo
from payload.device.base import Array, CpuDevice, Device, Kernel
from payload.models import mlp
from payload.nn.activation import GELU, ReLU
from payload.nn.attention import Attention
from payload.nn.dropout import Dropout
from payload.nn.embedding import Embedding
from payload.nn.linear import Linear
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import Layer, LayerContext, Sequential, Tape, Unit, normal
from payload.nn.norm import BatchNorm
from payload.nn.pool import MaxPool2d
from payload.parallel.pipeline import Pipeline, Stage
from tests.support.doubles.cases import BLOCKS, CASES, WINOGRAD
from tests.support.doubles.layers import batch_of, draw, slope, stored
from tests.support.doubles.oracle import EACH_DTYPE, compare, functional, torch

_CONTEXT = LayerContext(CpuDevice())


@EACH_DTYPE
@pytest.mark.parametrize("name", [*CASES, *BLOCKS, *WINOGRAD])
def test_layer_is_pytorchs(name: str, dtype: str, device: Device) -> None:
    case = {**CASES, **BLOCKS, **WINOGRAD}[name]
    compare(case.make(LayerContext(device)), case.input(dtype), device, case.torch_forward)


@pytest.mark.parametrize("name", CASES)
def test_layer_gradients_are_slopes(name: str) -> None:
    case = CASES[name]
    rng = np.random.default_rng(6)
    layer = case.make(_CONTEXT)
    storage = stored([Unit("u", layer)], _CONTEXT.device)
    storage.master_weights += 0.5 * rng.standard_normal(storage.master_weights.shape)
    x = case.input()
    samples = draw(len(x), _CONTEXT.device)
    weights = rng.standard_normal(layer.forward(x.copy(), Tape()).shape)

    def loss() -> float:
        return float((layer.forward(x.copy(), Tape(draw=samples)) * weights).sum())

    # two micro-batches in flight: gradients add up
    first = Tape(draw=samples)
    second = Tape(draw=samples)
    layer.forward(x.copy(), first)
    layer.forward(x.copy(), second)
    dx = layer.backward(weights.copy(), first)
    layer.backward(weights.copy(), second)
    if case.shape is not None:
        np.testing.assert_allclose(dx, slope(loss, x), atol=1e-7)
    np.testing.assert_allclose(storage.grads, 2 * slope(loss, storage.master_weights), atol=1e-7)


@pytest.mark.parametrize("exact", [True, False])
def test_slope_of_gelu_is_computed_in_training_only(exact: bool) -> None:
    class Counting(CpuDevice):
        def apply(self, kernel: Kernel, scalars: Mapping[str, float], *arrays: Array) -> None:
            counts.append(len(arrays))
            super().apply(kernel, scalars, *arrays)

    counts: list[int] = []
    layer = GELU(LayerContext(Counting()), exact=exact)
    x = np.linspace(-5, 5, 999, dtype="float32")
    results = [layer.forward(x.copy(), Tape(training=training)) for training in (True, False)]
    assert counts == [3, 2]
    np.testing.assert_array_equal(*results)


@pytest.mark.parametrize("name", CASES)
def test_layer_accepts_a_batch_of_no_samples(name: str, device: Device) -> None:
    case = CASES[name]
    layer = case.make(LayerContext(device))
    storage = stored([Unit("u", layer)], device)
    x = device.asarray(case.input())
    tape = Tape(draw=draw(0, device))
    full = layer.forward(x.copy(), Tape())
    y = layer.forward(x[:0].copy(), tape)
    assert y.shape == (0, *full.shape[1:])
    dx = layer.backward(device.xp.zeros_like(y), tape)
    assert case.shape is None or dx.shape == (0, *x.shape[1:])
    assert not storage.grads.any()


def test_cross_entropy_of_huge_logits_is_finite() -> None:
    sums = SoftmaxCrossEntropy(_CONTEXT).forward(
        np.array([[1e4, 0.0], [1e4, 0.0]]), np.array([0, 1]), Tape()
    )
    assert sums.loss == pytest.approx(1e4)
    assert (sums.correct, sums.count) == (1, 2)


def test_empty_shard_has_no_gradient() -> None:
    units = mlp.build(_CONTEXT, inputs=5, classes=3, hidden=(4,))
    storage = stored(units, _CONTEXT.device)
    storage.grads[:] = 1
    nothing = batch_of(_CONTEXT.device, np.empty((0, 5)), np.empty(0, np.int64))
    schedule = Pipeline(Stage(units, storage), SoftmaxCrossEntropy(_CONTEXT))
    assert schedule.train([nothing], scale=1, seed=0, iteration=1).loss == 0
    assert not storage.grads.any()


def test_parameter_without_a_gradient_has_zero() -> None:
    linear = Linear(_CONTEXT, "l", 2, 2)
    storage = stored([Unit("u", Sequential(linear))], _CONTEXT.device)
    storage.grads[:] = 1
    storage.begin()
    storage.backward_done(Unit("u", Sequential(linear)), last=True)
    assert not storage.grads.any()


_ODD = [np.inf, -np.inf, np.nan, 2.0, -2.0, 0.0]
"""What is no finite number, and what is."""


def _passed(device: Device, layer: Layer, x: Array, dy: Array) -> tuple[Array, Array]:
    """What a layer makes of an input, and of the gradient by its output."""
    stored([Unit("u", layer)], device, "float32")
    tape = Tape()
    with np.errstate(all="ignore"):
        y = device.to_host(layer.forward(device.asarray(x.copy()), tape)).copy()
        return y, device.to_host(layer.backward(device.asarray(dy.copy()), tape)).copy()


@pytest.mark.parametrize("gradient", [1.0, np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_relu_of_infinity_and_nan_is_that_of_pytorch(
    device: Device, kind: str, gradient: float
) -> None:
    x = np.array([_ODD], kind)
    dy = np.full((1, len(_ODD)), gradient, kind)
    torch_x = torch.tensor(x, requires_grad=True)
    y = functional.relu(torch_x)
    (dx,) = torch.autograd.grad(y, torch_x, torch.tensor(dy))
    results = _passed(device, ReLU(), x, dy)
    np.testing.assert_array_equal(results[0], y.detach())
    np.testing.assert_array_equal(results[1], dx)


@pytest.mark.parametrize("gradient", [1.0, np.inf])
def test_batch_norm_with_relu_equals_pytorch_if_not_finite(device: Device, gradient: float) -> None:
    """In an evaluation, and in training by a gradient that has overflowed where ReLU lets none
    through.
    """
    x = np.array([_ODD, _ODD[::-1]], "float32").T.copy()
    norm = BatchNorm(LayerContext(device), "norm", 2, relu=True)
    stored([Unit("u", norm)], device, "float32")
    y = device.to_host(norm.forward(device.asarray(x), Tape(training=False)))
    state = torch.zeros(2), torch.ones(2)
    expected = functional.relu(functional.batch_norm(torch.tensor(x), *state))
    np.testing.assert_allclose(y, expected, rtol=1e-6)
    x = np.array([[3.0, 1.0], [1.0, 2.0], [-4.0, 3.0]], "float32")
    dy = np.array([[1.0, 1.0], [1.0, 1.0], [gradient, 1.0]], "float32")
    torch_x = torch.tensor(x, requires_grad=True)
    out = functional.relu(functional.batch_norm(torch_x, *state, training=True))
    (dx,) = torch.autograd.grad(out, torch_x, torch.tensor(dy))
    _, results = _passed(device, norm, x, dy)
    np.testing.assert_allclose(results, dx, atol=1e-6)


def test_max_pool_passes_an_infinite_gradient_to_one_position(device: Device) -> None:
    x = np.array([[1.0, 5.0], [-np.inf, 2.0]], "float32").reshape(1, 2, 2, 1)
    y, dx = _passed(
        device, MaxPool2d(LayerContext(device), 2), x, np.full((1, 1, 1, 1), np.inf, "float32")
    )
    assert (y.item(), dx.ravel().tolist()) == (5, [0, np.inf, 0, 0])


@pytest.mark.parametrize("kind", ["float64", "float32", "float16"])
def test_dropout_of_infinity_is_zero(device: Device, kind: str) -> None:
    layer = Dropout(LayerContext(device), "d", 0.5)
    tape = Tape(draw=draw(1, device))
    x = np.full((1, 64), np.inf, kind)
    y = device.to_host(layer.forward(device.asarray(x), tape)).copy()
    dx = device.to_host(layer.backward(device.asarray(-x), tape))
    assert set(y.ravel().tolist()) == {0, np.inf}
    np.testing.assert_array_equal(dx, -y)


@pytest.mark.parametrize("sign", [1, -1], ids=["infinite", "nan"])
def test_attention_ignores_later_keys(sign: int, device: Device) -> None:
    """As in PyTorch's fused attention: keys after a position are left out, not subtracted from.

    The score of the last key is ∞ + ∞ or ∞ - ∞.
    """
    layer = Attention(LayerContext(device), "a", 2, 1, causal=True, init=normal(1))
    stored([Unit("u", layer)], device, "float32")
    qkv = [[1, sign, 0, 0, 1, 1], [0, 0, 10, 10, 0, 0]]  # queries and values of x[0], keys of x[1]
    layer.qkv.weight.value[...] = device.asarray(np.reshape(np.array(qkv, "float32"), (2, 3, 2)))
    x = np.array([[[1, 0.1], [2, 0.1], [3, 3e38]]], "float32")
    with np.errstate(all="ignore"):
        y = device.to_host(layer.forward(device.asarray(x), Tape()))
    assert np.isfinite(y).all(axis=-1).tolist() == [[True, True, False]]


class _Half(Solo):
    """The first of two ranks, of which the other adds nothing."""

    size = 2


class _Part(Solo):
    """One of two ranks. sent: rank -> what it has sent, also before."""

    size = 2

    def __init__(self, rank: int, sent: dict[int, Array]) -> None:
        self.rank = rank
        self._sent = sent

    def allgather_into(self, part: Array, out: Array) -> None:
        self._sent[self.rank] = part.copy()
        for rank in range(self.size):
            out.reshape(2, -1)[rank] = self._sent.get(rank, part)


def test_loss_with_classes_over_ranks_is_that_of_all_classes(device: Device) -> None:
    """Tensor-parallel ranks exchange four numbers a target, not logits."""
    rng = np.random.default_rng(5)
    logits = rng.standard_normal((60, 16)).astype("float32")
    labels = np.where(rng.random(60) < 0.5, logits.argmax(axis=1), rng.integers(-1, 16, 60))

    def loss_of(loss: SoftmaxCrossEntropy, part: Array) -> tuple[list[float], Array]:
        tape = Tape()
        sums = loss.forward(device.asarray(part.copy()), device.asarray(labels), tape)
        gradient = device.to_host(loss.backward(0.5, tape)).copy()
        return [float(each) for each in (sums.loss, sums.correct, sums.count)], gradient

    expected, gradient = loss_of(SoftmaxCrossEntropy(LayerContext(device)), logits)
    assert 30 <= expected[1] < expected[2] < 60
    sent: dict[int, Array] = {}
    # In the first rank's first turn, the other has sent nothing: its own values stand for it.
    for rank in (0, 1, 0):
        columns = slice(8 * rank, 8 * rank + 8)
        loss = SoftmaxCrossEntropy(LayerContext(device, tp=_Part(rank, sent)), split=True)
        found, part = loss_of(loss, logits[:, columns])
        assert sent[rank].size == 4 * 60
        if len(sent) == 2:
            assert found == pytest.approx(expected, rel=1e-6)
            np.testing.assert_allclose(part, gradient[:, columns], rtol=1e-5, atol=1e-7)


def test_embedding_ignores_tokens_of_another_rank(device: Device) -> None:
    """Not even where that has overflowed; nor does its gradient come here."""
    layer = Embedding(LayerContext(device, tp=_Half()), "e", 128, 2)
    storage = stored([Unit("u", layer)], device, "float32")
    layer.table.value[...] = math.inf
    tape = Tape()
    y = device.to_host(layer.forward(device.asarray(np.array([[1, 65]])), tape))
    assert y[0].tolist() == [[np.inf, np.inf], [0, 0]]
    layer.backward(device.asarray(np.array([[[1, 1], [np.inf, np.inf]]], "float32")), tape)
    assert device.to_host(storage.grads).reshape(64, 2)[:3].tolist() == [[0, 0], [1, 1], [0, 0]]
