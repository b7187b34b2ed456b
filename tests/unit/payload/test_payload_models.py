"""Each model beside the same one in PyTorch: loss, every gradient, and ten iterations of training."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from payload.device import Array, Device
from payload.errors import UsageError
from payload.models import MODELS, bert, gpt, lstm, mlp, vit
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import Context, Unit, recomputed
from payload.optim.adamw import AdamW
from payload.parallel.pipeline import MicroBatch, Pipeline, Stage
from tests.unit.payload.doubles.layers import stored
from tests.unit.payload.doubles.oracle import (
    TOLERANCE,
    Tensors,
    assert_same_gradients,
    functional,
    tensors,
    torch,
)

_V, _T, _C, _HEADS = 24, 6, 16, 4


@dataclass(frozen=True)
class Case:
    """A model, a batch of six samples for it, and PyTorch's logits."""

    build: Callable[[Context], list[Unit]]
    batch: Callable[[np.random.Generator], tuple[Array, Array]]
    theirs: Callable[[Tensors, torch.Tensor], torch.Tensor]


def _linear(p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def _norm(p: Tensors, name: str, x: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.layer_norm(x, x.shape[-1:], p[f"{name}.weight"], p[f"{name}.bias"], eps)


def _attention(p: Tensors, name: str, x: torch.Tensor, *, causal: bool) -> torch.Tensor:
    qkv = functional.linear(x, p[f"{name}.in_proj_weight"], p[f"{name}.in_proj_bias"])
    q, k, v = qkv.unflatten(-1, (3, _HEADS, _C // _HEADS)).permute(2, 0, 3, 1, 4)
    y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
    return _linear(p, f"{name}.out_proj", y.swapaxes(1, 2).flatten(2))


def _feed_forward(p: Tensors, name: str, x: torch.Tensor, approximate: str) -> torch.Tensor:
    up = functional.gelu(_linear(p, f"{name}.linear1", x), approximate=approximate)
    return _linear(p, f"{name}.linear2", up)


def _pre_norm(
    p: Tensors, x: torch.Tensor, *, causal: bool, eps: float, approximate: str = "none"
) -> torch.Tensor:
    for name in ("layers.0", "layers.1"):
        x = x + _attention(p, f"{name}.self_attn", _norm(p, f"{name}.norm1", x, eps), causal=causal)
        x = x + _feed_forward(p, name, _norm(p, f"{name}.norm2", x, eps), approximate)
    return _norm(p, "norm", x[:, 0] if "class_token" in p else x, eps)


def _gpt(p: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    x = p["embedding.weight"][tokens] + p["positions.weight"][: tokens.shape[1]]
    return _pre_norm(p, x, causal=True, eps=1e-5, approximate="tanh") @ p["embedding.weight"].T


def _bert(p: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    x = p["embedding.weight"][tokens] + p["positions.weight"][: tokens.shape[1]] + p["segments.weight"][0]
    x = _norm(p, "norm", x, 1e-12)
    for name in ("layers.0", "layers.1"):
        x = _norm(p, f"{name}.norm1", x + _attention(p, f"{name}.self_attn", x, causal=False), 1e-12)
        x = _norm(p, f"{name}.norm2", x + _feed_forward(p, name, x, "none"), 1e-12)
    x = _norm(p, "head.norm", functional.gelu(_linear(p, "head.linear", x)), 1e-12)
    return x @ p["embedding.weight"].T + p["head.bias"]


def _vit(p: Tensors, images: torch.Tensor) -> torch.Tensor:
    x = functional.conv2d(images.permute(0, 3, 1, 2), p["patches.weight"], p["patches.bias"], stride=4)
    x = torch.cat([p["class_token"].expand(len(x), 1, _C), x.flatten(2).swapaxes(1, 2)], dim=1)
    return _linear(p, "head", _pre_norm(p, x + p["positions.weight"], causal=False, eps=1e-6))


def _layers(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    own = torch.nn.LSTM(x.shape[2], _C, num_layers=2, batch_first=True, dtype=x.dtype)
    weights = {name.removeprefix("lstm."): tensor for name, tensor in p.items() if "lstm." in name}
    second = {f"bias_hh_l{layer}": torch.zeros(4 * _C, dtype=x.dtype) for layer in (0, 1)}
    y: torch.Tensor = torch.func.functional_call(own, {**weights, **second}, (x,))[0]
    return y


def _characters(p: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    return _linear(p, "head", _layers(p, p["embedding.weight"][tokens]))


def _rows(p: Tensors, images: torch.Tensor) -> torch.Tensor:
    return _linear(p, "head", _layers(p, images.flatten(2))[:, -1])


def _mlp(p: Tensors, images: torch.Tensor) -> torch.Tensor:
    x = images.permute(0, 3, 1, 2).flatten(1)
    for name in ("linear0", "linear1"):
        x = functional.relu(_linear(p, name, x))
    return _linear(p, "linear2", x)


def _text(rng: np.random.Generator) -> tuple[Array, Array]:
    tokens = rng.integers(0, _V, (6, _T + 1))
    return tokens[:, :-1], tokens[:, 1:]


def _masked(rng: np.random.Generator) -> tuple[Array, Array]:
    tokens = rng.integers(0, _V, (6, _T))
    return tokens, np.where(rng.random((6, _T)) < 0.4, tokens, -1)


def _images(rng: np.random.Generator) -> tuple[Array, Array]:
    return rng.standard_normal((6, 8, 12, 3)), rng.integers(0, 5, 6)


def _squares(rng: np.random.Generator) -> tuple[Array, Array]:
    return rng.standard_normal((6, 8, 8, 3)), rng.integers(0, 5, 6)


_SMALL = {"layers": 2, "heads": _HEADS, "width": _C}
CASES = {
    "mlp": Case(lambda c: mlp.build(c, inputs=288, channels=3, classes=5, hidden=(16, 12)), _images, _mlp),
    "gpt": Case(lambda c: gpt.build(c, vocabulary=_V, length=_T + 2, **_SMALL), _text, _gpt),
    "bert": Case(lambda c: bert.build(c, vocabulary=_V, length=_T + 2, dropout=0, **_SMALL), _masked, _bert),
    "vit": Case(lambda c: vit.build(c, side=8, classes=5, patch=4, **_SMALL), _squares, _vit),
    "lstm-text": Case(
        lambda c: lstm.build(c, classes=_V, vocabulary=_V, layers=2, width=_C), _text, _characters
    ),
    "lstm-rows": Case(lambda c: lstm.build(c, classes=5, features=36, layers=2, width=_C), _images, _rows),
}


def _adamw(units: list[Unit], theirs: Tensors) -> torch.optim.Optimizer:
    decayed = {p.name: p.decay for unit in units for p in unit.layer.parameters}
    groups = [
        {"params": [theirs[name] for name in decayed if decayed[name] is decay], "weight_decay": 0.1 * decay}
        for decay in (True, False)
    ]
    return torch.optim.AdamW(groups, lr=0.01)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", CASES)
def test_model_is_pytorchs_for_ten_iterations(name: str, dtype: str, device: Device) -> None:
    case, rng = CASES[name], np.random.default_rng(4)
    units = case.build(Context(device))
    storage = stored(units, device, dtype)
    storage.master_weights += device.asarray(0.05 * rng.standard_normal(storage.master_weights.shape), dtype)
    theirs = tensors(units, device)
    schedule = Pipeline(Stage(units, storage), SoftmaxCrossEntropy(Context(device)))
    ours = AdamW(device, storage.master_weights, storage.segments, weight_decay=0.1)
    optimizer = _adamw(units, theirs)
    x, targets = case.batch(rng)
    x = x.astype(dtype) if x.dtype == "float64" else x
    count = int((targets >= 0).sum())
    places = np.arange(6, dtype="uint32")
    batches = [  # of unlike sizes
        MicroBatch(*(device.asarray(array[part]) for array in (x, targets, places)))
        for part in (slice(0, 4), slice(4, 6))
    ]
    for iteration in range(10):
        storage.begin()
        sums = schedule.train(batches, scale=1 / count, seed=0, iteration=iteration)
        logits = case.theirs(theirs, torch.tensor(x))
        loss = functional.cross_entropy(logits.flatten(0, -2), torch.tensor(targets).ravel(), ignore_index=-1)
        assert float(sums.count) == count
        assert float(sums.loss) / count == pytest.approx(loss.item(), rel=TOLERANCE[dtype] / 10)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        assert_same_gradients(units, theirs, device)
        optimizer.step()
        ours.step(storage.master_weights, storage.grads, lr=0.01)


def test_recomputed_blocks_drop_the_same(device: Device) -> None:
    grads = []
    for change in (list, recomputed):
        units = change(gpt.build(Context(device), vocabulary=_V, length=_T, dropout=0.3, **_SMALL))
        storage = stored(units, device)
        x, targets = (device.asarray(array) for array in _text(np.random.default_rng(2)))
        batch = MicroBatch(x, targets, device.asarray(np.arange(6, dtype="uint32")))
        schedule = Pipeline(Stage(units, storage), SoftmaxCrossEntropy(Context(device)))
        schedule.train([batch], scale=1, seed=0, iteration=1)
        grads.append(device.to_host(storage.grads).copy())
    np.testing.assert_array_equal(*grads)


@pytest.mark.parametrize(
    ("size", "millions"), [("124m", 124.48), ("350m", 354.87), ("774m", 774.09), ("1.5b", 1557.69)]
)
def test_gpts_sizes_are_gpt_2s(size: str, millions: float, device: Device) -> None:
    units = gpt.build(Context(device), **MODELS[f"gpt-{size}"].sizes)
    parameters = {id(p): p.size for unit in units for p in unit.layer.parameters}
    assert sum(parameters.values()) / 1e6 == pytest.approx(millions, abs=0.01)


def test_the_sizes_of_bert_base_and_vit_b_16(device: Device) -> None:
    for units, millions in ((bert.build(Context(device)), 109.5), (vit.build(Context(device)), 86.57)):
        parameters = {id(p): p.size for unit in units for p in unit.layer.parameters}
        assert sum(parameters.values()) / 1e6 == pytest.approx(millions, abs=0.1)


def test_operations_are_counted(device: Device) -> None:
    """ViT-B/16 is known for 17.58 billion multiply-adds; llm.c counts 2 N + 2 L T C for a token of GPT-2."""
    images = sum(unit.flops for unit in vit.build(Context(device)))
    assert images == pytest.approx(2 * 17.58e9, rel=0.002)
    text = sum(unit.flops for unit in gpt.build(Context(device)))
    assert text == pytest.approx(1024 * (2 * 124.48e6 + 2 * 12 * 1024 * 768), rel=0.01)


def test_first_loss_of_gpt_is_that_of_chance(device: Device) -> None:
    units = gpt.build(Context(device), vocabulary=256, length=32, **MODELS["gpt-tiny"].sizes)
    storage = stored(units, device, "float32")
    x = device.asarray(np.random.default_rng(1).integers(0, 256, (4, 33)))
    batch = MicroBatch(x[:, :-1], x[:, 1:], device.asarray(np.arange(4, dtype="uint32")))
    sums = Pipeline(Stage(units, storage), SoftmaxCrossEntropy(Context(device))).evaluate([batch])
    assert float(sums.loss) / float(sums.count) == pytest.approx(math.log(256), rel=0.02)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda c: gpt.build(c, heads=5, width=16), "a width of 16 cannot be divided among 5 heads"),
        (lambda c: vit.build(c, side=30), "images of 30 x 30 pixels cannot be cut into patches of 16 x 16"),
        (lambda c: lstm.build(c, classes=3), "either a vocabulary or the number of features"),
        (lambda c: lstm.build(c, classes=3, vocabulary=3, features=3), "either a vocabulary or"),
    ],
)
def test_sizes_that_do_not_fit(build: Callable[[Context], object], message: str, device: Device) -> None:
    with pytest.raises(UsageError, match=message):
        build(Context(device))
