"""The layers of Transformers and LSTMs: against PyTorch, and against finite differences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from payload.device import Array, Cpu, Device
from payload.nn.activation import GELU
from payload.nn.attention import Attention
from payload.nn.dropout import Dropout
from payload.nn.embedding import Embedding, TiedHead
from payload.nn.linear import Linear
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.lstm import LSTM
from payload.nn.module import Context, Draw, Layer, Residual, Sequential, Tape, Unit, normal
from payload.nn.norm import LayerNorm
from payload.nn.sequence import ClassToken, Patches, Pick, Positions, Segments
from tests.unit.payload.doubles.layers import draw, slope, stored
from tests.unit.payload.doubles.oracle import Tensors, assert_close, compare, functional, torch

Theirs = Callable[[Tensors, "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Case:
    """A layer, the shape of what it is given (None: tokens), and PyTorch's way to the same."""

    make: Callable[[Context], Layer]
    shape: tuple[int, ...] | None
    theirs: Theirs


def _attention(causal: bool, mask: Array | None = None) -> Theirs:
    def theirs(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        qkv = functional.linear(x, p["a.in_proj_weight"], p["a.in_proj_bias"])
        q, k, v = qkv.reshape(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        seen = None if mask is None else torch.tensor(mask)[:, None, None, :]
        if causal and seen is not None:
            seen = seen & torch.ones(t, t, dtype=torch.bool).tril()
        y = functional.scaled_dot_product_attention(q, k, v, seen, is_causal=causal and seen is None)
        return functional.linear(
            y.swapaxes(1, 2).reshape(b, t, c), p["a.out_proj.weight"], p["a.out_proj.bias"]
        )

    return theirs


def _lstm(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    lstm = torch.nn.LSTM(x.shape[2], 3, batch_first=True, dtype=x.dtype)
    names = {name.removeprefix("l."): tensor for name, tensor in p.items()}
    names["bias_hh_l0"] = torch.zeros_like(p["l.bias_ih_l0"])
    y: torch.Tensor = torch.func.functional_call(lstm, names, (x,))[0]
    return y


def _tied(c: Context) -> Layer:
    embedding = Embedding(c, "e", 64, 4)
    return Sequential(embedding, TiedHead(c, "h", embedding, bias=True))


CASES = {
    "layernorm": Case(
        lambda c: LayerNorm(c, "n", 6),
        (2, 5, 6),
        lambda p, x: functional.layer_norm(x, (6,), p["n.weight"], p["n.bias"]),
    ),
    "gelu-tanh": Case(GELU, (3, 40), lambda _, x: functional.gelu(x, approximate="tanh")),
    "gelu-exact": Case(lambda c: GELU(c, exact=True), (3, 40), lambda _, x: functional.gelu(x)),
    "parts": Case(
        lambda c: Linear(c, "l", 3, 8, parts=2),
        (2, 4, 3),
        lambda p, x: functional.linear(x, p["l_weight"], p["l_bias"]),
    ),
    "embedding": Case(
        lambda c: Embedding(c, "e", 11, 4), None, lambda p, x: functional.embedding(x, p["e.weight"])
    ),
    "tied": Case(
        _tied, None, lambda p, x: functional.embedding(x, p["e.weight"]) @ p["e.weight"].T + p["h.bias"]
    ),
    "positions": Case(lambda c: Positions(c, "p", 7, 4), (2, 5, 4), lambda p, x: x + p["p.weight"][:5]),
    "segments": Case(lambda c: Segments(c, "s", 4), (2, 5, 4), lambda p, x: x + p["s.weight"][0]),
    "classtoken": Case(
        lambda c: ClassToken(c, "t", 4),
        (2, 3, 4),
        lambda p, x: torch.cat([p["t"].expand(2, 1, 4), x], dim=1),
    ),
    "pick": Case(lambda c: Pick(c, -1), (2, 3, 4), lambda _, x: x[:, -1]),
    "patches": Case(
        lambda _: Patches(2),
        (2, 4, 6, 3),
        lambda _, x: (
            functional.unfold(x.permute(0, 3, 1, 2), 2, stride=2)
            .reshape(2, 3, 4, 6)
            .permute(0, 3, 2, 1)
            .reshape(2, 6, 12)
        ),
    ),
    "residual": Case(
        lambda c: Residual(LayerNorm(c, "n", 4), Linear(c, "l", 4, 4), Dropout(c, "d", 0.5)),
        (3, 4),
        lambda p, x: (
            x
            + functional.linear(
                functional.layer_norm(x, (4,), p["n.weight"], p["n.bias"]), p["l.weight"], p["l.bias"]
            )
        ),
    ),
    "causal": Case(
        lambda c: Attention(c, "a", 8, 2, causal=True, init=normal(0.5), dropout=0.3),
        (2, 9, 8),
        _attention(True),
    ),
    "bidirectional": Case(
        lambda c: Attention(c, "a", 8, 2, causal=False, init=normal(0.5), dropout=0.3),
        (2, 5, 8),
        _attention(False),
    ),
    "lstm": Case(lambda c: LSTM(c, "l", 2, 3), (2, 5, 2), _lstm),
}


def _input(case: Case, dtype: str) -> Array:
    rng = np.random.default_rng(5)
    if case.shape is None:
        return rng.integers(0, 11, (3, 5))
    return (1.5 * rng.standard_normal(case.shape)).astype(dtype)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_layer_is_pytorchs(name: str, dtype: str, device: Device) -> None:
    case = CASES[name]
    compare(case.make(Context(device)), _input(case, dtype), device, case.theirs)


@pytest.mark.parametrize("causal", [True, False])
def test_attention_over_several_blocks_is_pytorchs(causal: bool, device: Device) -> None:
    layer = Attention(Context(device), "a", 8, 2, causal=causal, init=normal(0.5))
    x = np.random.default_rng(2).standard_normal((2, 300, 8))
    compare(layer, x, device, _attention(causal))


@pytest.mark.parametrize("causal", [True, False])
def test_padding_is_not_seen(causal: bool, device: Device) -> None:
    mask = np.arange(300) < np.array([[300], [7], [140]])
    layer = Attention(Context(device), "a", 8, 2, causal=causal, init=normal(0.5))
    x = np.random.default_rng(2).standard_normal((3, 300, 8))
    compare(layer, x, device, _attention(causal, mask), Tape(mask=device.asarray(mask)))


def test_a_sample_of_padding_alone_makes_no_nan(device: Device) -> None:
    layer = Attention(Context(device), "a", 8, 2, causal=False, init=normal(0.5))
    stored([Unit("u", layer)], device)
    x, tape = device.asarray(np.ones((2, 5, 8))), Tape(mask=device.asarray(np.zeros((2, 5), bool)))
    y = layer.forward(x, tape)
    assert np.isfinite(device.to_host(y)).all()
    assert np.isfinite(device.to_host(layer.backward(device.xp.ones_like(y), tape))).all()


def test_segments_are_pytorchs(device: Device) -> None:
    segments = np.random.default_rng(1).integers(0, 2, (2, 5))
    for given in (None, segments):
        index = torch.tensor(np.zeros_like(segments) if given is None else given)
        tape = Tape(segments=None if given is None else device.asarray(given))
        layer, x = Segments(Context(device), "s", 4), np.random.default_rng(2).standard_normal((2, 5, 4))
        compare(
            layer, x, device, lambda p, x, index=index: x + functional.embedding(index, p["s.weight"]), tape
        )


@pytest.mark.parametrize("name", CASES)
def test_layer_gradients_are_slopes(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(6)
    layer = case.make(Context(Cpu()))
    storage = stored([Unit("u", layer)], Cpu())
    storage.master_weights += 0.5 * rng.standard_normal(storage.master_weights.shape)
    x = _input(case, "float64")
    x = x[:2, :9] if x.ndim == 2 else x
    samples = draw(len(x), Cpu())
    weights = rng.standard_normal(layer.forward(x.copy(), Tape()).shape)

    def loss() -> float:
        return float((layer.forward(x.copy(), Tape(draw=samples)) * weights).sum())

    first, second = Tape(draw=samples), Tape(draw=samples)  # two micro-batches in flight: gradients add up
    layer.forward(x.copy(), first)
    layer.forward(x.copy(), second)
    dx = layer.backward(weights.copy(), first)
    layer.backward(weights.copy(), second)
    if case.shape is not None:
        np.testing.assert_allclose(dx, slope(loss, x), atol=1e-7)
    np.testing.assert_allclose(storage.grads, 2 * slope(loss, storage.master_weights), atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_layer_of_no_samples(name: str, device: Device) -> None:
    case = CASES[name]
    layer = case.make(Context(device))
    storage = stored([Unit("u", layer)], device)
    x, tape = device.asarray(_input(case, "float64")), Tape(draw=draw(0, device))
    full = layer.forward(x.copy(), Tape())
    y = layer.forward(x[:0].copy(), tape)
    assert y.shape == (0, *full.shape[1:])
    dx = layer.backward(device.xp.zeros_like(y), tape)
    assert case.shape is None or dx.shape == (0, *x.shape[1:])
    assert not storage.grads.any()


@pytest.mark.parametrize("name", CASES)
def test_layer_in_half_precision(name: str, device: Device) -> None:
    case = CASES[name]
    layer, x = case.make(Context(device)), _input(case, "float64")
    results = []
    for dtype in ("float64", "float16"):
        stored([Unit("u", layer)], device, dtype)
        tape = Tape()
        y = layer.forward(device.asarray(x.copy(), dtype if case.shape else None), tape)
        dx = layer.backward(device.xp.ones_like(y), tape)
        assert y.dtype == dx.dtype == dtype
        results.append(device.to_host(y).astype("float64"))
    np.testing.assert_allclose(results[1], results[0], atol=0.02)


def test_cross_entropy_is_pytorchs(device: Device) -> None:
    rng = np.random.default_rng(3)
    logits, labels = 3 * rng.standard_normal((4, 5, 7)), rng.integers(-1, 7, (4, 5))
    labels[1, 2] = -1
    theirs = torch.tensor(logits, requires_grad=True)
    expected = functional.cross_entropy(
        theirs.reshape(-1, 7), torch.tensor(labels).ravel(), ignore_index=-1, reduction="sum"
    )
    (0.25 * expected).backward()
    tape, loss = Tape(), SoftmaxCrossEntropy(Context(device))
    sums = loss.forward(device.asarray(logits), device.asarray(labels), tape)
    assert float(sums.loss) == pytest.approx(expected.item(), rel=1e-12)
    assert float(sums.count) == (labels >= 0).sum() < labels.size
    assert float(sums.correct) == (logits.argmax(axis=-1) == labels).sum()
    assert_close(device.to_host(loss.backward(0.25, tape)).copy(), theirs.grad, "dlogits")


def _masked(name: str, device: Device, draws: Draw | None, *, training: bool = True) -> Array:
    """What comes out of dropout alone, or of attention where every position's value is 1."""
    context = Context(device)
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
def test_dropout_keeps_the_mean_and_depends_on_its_key_alone(name: str, device: Device) -> None:
    def draws(*samples: int, iteration: int = 1, seed: int = 0) -> Draw:
        return Draw(seed, iteration, device.asarray(np.array(samples, "uint32")))

    y = _masked(name, device, draws(4, 5, 6, 7))
    assert y.mean() == pytest.approx(1, abs=0.03)
    assert len({sample.tobytes() for sample in y}) == 4
    np.testing.assert_array_equal(_masked(name, device, draws(7, 4, 5, 6)), y[[3, 0, 1, 2]])
    for other in (draws(4, 5, 6, 7, iteration=2), draws(4, 5, 6, 7, seed=1)):
        assert (_masked(name, device, other) != y).any(axis=(1, 2)).all()
    for off in (_masked(name, device, None), _masked(name, device, draws(4, 5, 6, 7), training=False)):
        np.testing.assert_allclose(off, 1)


def test_dropout_drops_each_place_as_often(device: Device) -> None:
    samples = device.asarray(np.arange(4000, dtype="uint32"))
    tape = Tape(draw=Draw(0, 1, samples))
    y = device.to_host(Dropout(Context(device), "d", 0.25).forward(device.xp.ones((4000, 64)), tape))
    shares = (y == 0).mean(axis=0)
    deviation = (0.25 * 0.75 / 4000) ** 0.5
    assert np.abs(shares - 0.25).max() < 4.5 * deviation
    assert 0.7 < shares.std() / deviation < 1.3
    correlations = np.corrcoef(y.T) - np.eye(64)
    assert np.abs(correlations).max() < 5.5 / 4000**0.5
    assert set(np.unique(y)) == {0, 1 / 0.75}
