"""The layers of Transformers, beyond what all layers are tested for."""

from __future__ import annotations

import numpy as np
import pytest

from payload.device.base import Array, Device
from payload.nn.attention import Attention
from payload.nn.dropout import Dropout
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import LayerContext, RandomState, Tape, Unit, normal
from tests.support.doubles.cases import attention
from tests.support.doubles.layers import stored
from tests.support.doubles.oracle import assert_close, compare, functional, torch


@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_several_blocks_is_pytorchs(causal: bool, device: Device) -> None:
    layer = Attention(LayerContext(device), "a", 8, 2, causal=causal, init=normal(0.5))
    x = np.random.default_rng(2).standard_normal((2, 300, 8))
    compare(layer, x, device, attention(causal))


def test_cross_entropy_is_pytorchs(device: Device) -> None:
    rng = np.random.default_rng(3)
    logits = 3 * rng.standard_normal((4, 5, 7))
    labels = rng.integers(-1, 7, (4, 5))
    labels[1, 2] = -1
    torch_logits = torch.tensor(logits, requires_grad=True)
    expected = functional.cross_entropy(
        torch_logits.reshape(-1, 7), torch.tensor(labels).ravel(), ignore_index=-1, reduction="sum"
    )
    (0.25 * expected).backward()
    tape = Tape()
    loss = SoftmaxCrossEntropy(LayerContext(device))
    sums = loss.forward(device.asarray(logits), device.asarray(labels), tape)
    assert float(sums.loss) == pytest.approx(expected.item(), rel=1e-12)
    assert float(sums.count) == (labels >= 0).sum() < labels.size
    assert float(sums.correct) == (logits.argmax(axis=-1) == labels).sum()
    assert_close(device.to_host(loss.backward(0.25, tape)).copy(), torch_logits.grad, "dlogits")


def _masked(
    name: str, device: Device, draws: RandomState | None, *, training: bool = True
) -> Array:
    """What comes out of dropout alone, or of attention where every position's value is 1."""
    context = LayerContext(device)
    tape = Tape(training, draws)
    ones = device.xp.ones((4, 300, 8))
    if name == "dropout":
        return device.to_host(Dropout(context, "d", 0.25).forward(ones, tape)).copy()
    layer = Attention(context, "a", 8, 2, causal=False, init=normal(0), dropout=0.25)
    stored([Unit("u", layer)], device)
    layer.qkv.bias.value[2] = 1  # type: ignore[union-attr]
    layer.out.weight.value[...] = device.xp.eye(8)
    return device.to_host(layer.forward(ones, tape)).copy()


@pytest.mark.parametrize("name", ["dropout", "attention"])
def test_dropout_keeps_the_mean_and_depends_on_its_key_only(name: str, device: Device) -> None:
    def draws(*samples: int, iteration: int = 1, seed: int = 0) -> RandomState:
        return RandomState(seed, iteration, device.asarray(np.array(samples, "uint32")))

    y = _masked(name, device, draws(4, 5, 6, 7))
    assert y.mean() == pytest.approx(1, abs=0.03)
    assert len({sample.tobytes() for sample in y}) == 4
    np.testing.assert_array_equal(_masked(name, device, draws(7, 4, 5, 6)), y[[3, 0, 1, 2]])
    for other in (draws(4, 5, 6, 7, iteration=2), draws(4, 5, 6, 7, seed=1)):
        assert (_masked(name, device, other) != y).any(axis=(1, 2)).all()
    for off in (
        _masked(name, device, None),
        _masked(name, device, draws(4, 5, 6, 7), training=False),
    ):
        np.testing.assert_allclose(off, 1)


def test_dropout_drops_each_position_equally_often(device: Device) -> None:
    samples = device.asarray(np.arange(4000, dtype="uint32"))
    tape = Tape(draw=RandomState(0, 1, samples))
    y = device.to_host(
        Dropout(LayerContext(device), "d", 0.25).forward(device.xp.ones((4000, 64)), tape)
    )
    shares = (y == 0).mean(axis=0)
    deviation = (0.25 * 0.75 / 4000) ** 0.5
    assert np.abs(shares - 0.25).max() < 4.5 * deviation
    assert 0.7 < shares.std() / deviation < 1.3
    correlations = np.corrcoef(y.T) - np.eye(64)
    assert np.abs(correlations).max() < 5.5 / 4000**0.5
    assert set(np.unique(y)) == {0, 1 / 0.75}
