"""Small models, with the computation of logits from the same weights in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from payload.device.base import Array, Device
from payload.nn.module import LayerContext, Unit
from payload.saved_model.folder import make_units
from tests.support.doubles.oracle import Tensors, functional, torch

if TYPE_CHECKING:
    from torch import nn

V = 24
T = 6
C = 16
HEADS = 4


@dataclass(frozen=True)
class Case:
    """A model, its settings, the shape of its images (None: it takes tokens), and PyTorch's logits.

    torch_forward: takes the weights, or those in `Convolutional`.
    """

    model: str
    settings: dict[str, Any]
    shape: tuple[int, ...] | None
    torch_forward: Callable[[Any, torch.Tensor], torch.Tensor]

    def units(self, context: LayerContext) -> list[Unit]:
        return make_units(self.model, self.settings, context)

    def batch(self, rng: np.random.Generator, samples: int) -> tuple[Array, Array]:
        """Inputs and targets; -1 does not count."""
        if self.shape:
            return rng.standard_normal((samples, *self.shape)), rng.integers(0, 5, samples)
        tokens = rng.integers(0, V, (samples, T + 1))
        if self.model == "bert-tiny":
            return tokens, np.where(rng.random(tokens.shape) < 0.4, tokens, -1)
        return tokens[:, :-1], tokens[:, 1:]

    def inputs(self, samples: int, device: Device, dtype: Any) -> Array:
        x, _ = self.batch(np.random.default_rng(2), samples)
        return device.asarray(x, dtype if self.shape else None)


def _called(
    module: nn.Module, weights: Tensors, x: torch.Tensor, *prefixes: str, **options: Any
) -> Any:
    """What a module gives with exactly the weights whose names begin so."""
    own = {name: tensor for name, tensor in weights.items() if name.startswith(prefixes)}
    return torch.func.functional_call(module, own, (x,), options, strict=True)


def _encoder(*, norm_first: bool, activation: Any, eps: float) -> nn.Module:
    layer = torch.nn.TransformerEncoderLayer(
        *(C, HEADS, 4 * C, 0.0, activation, eps), batch_first=True, norm_first=norm_first
    )
    norm = torch.nn.LayerNorm(C, eps) if norm_first else None
    return torch.nn.TransformerEncoder(layer, 2, norm, enable_nested_tensor=False)


def _linear(p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.linear(x, p[f"{name}.weight"], p[f"{name}.bias"])


def _norm(p: Tensors, name: str, x: torch.Tensor) -> torch.Tensor:
    return functional.layer_norm(x, (C,), p[f"{name}.weight"], p[f"{name}.bias"], 1e-12)


def _gpt(p: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    table = p["embedding.weight"]
    assert table.shape == (V, C)  # no padding
    x = table[tokens] + p["positions.weight"][: tokens.shape[1]]
    mask = torch.nn.Transformer.generate_square_subsequent_mask(tokens.shape[1])
    encoder = _encoder(norm_first=True, activation=torch.nn.GELU(approximate="tanh"), eps=1e-5)
    y: torch.Tensor = _called(encoder, p, x, "layers.", "norm.", mask=mask, is_causal=True)
    return y @ table.T


def _bert(p: Tensors, tokens: torch.Tensor) -> torch.Tensor:
    table = p["embedding.weight"]
    x = table[tokens] + p["positions.weight"][: tokens.shape[1]] + p["segments.weight"][0]
    encoder = _encoder(norm_first=False, activation=functional.gelu, eps=1e-12)
    y = _linear(p, "head.linear", _called(encoder, p, _norm(p, "norm", x), "layers."))
    return _norm(p, "head.norm", functional.gelu(y)) @ table.T + p["head.bias"]


def _vit(p: Tensors, images: torch.Tensor) -> torch.Tensor:
    x = functional.conv2d(
        images.permute(0, 3, 1, 2), p["patches.weight"], p["patches.bias"], stride=4
    )
    x = torch.cat([p["class_token"].expand(len(x), 1, C), x.flatten(2).swapaxes(1, 2)], dim=1)
    encoder = _encoder(norm_first=True, activation=functional.gelu, eps=1e-6)
    return _linear(
        p, "head", _called(encoder, p, x + p["positions.weight"], "layers.", "norm.")[:, 0]
    )


def _lstm(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    lstm = torch.nn.LSTM(x.shape[2], C, num_layers=2, batch_first=True)
    own = {
        name.removeprefix("lstm."): tensor for name, tensor in p.items() if name.startswith("lstm.")
    }
    for layer in (0, 1):  # not learned, and saved for PyTorch
        own.setdefault(f"bias_hh_l{layer}", torch.zeros(4 * C, dtype=x.dtype))
    return _linear(p, "head", _called(lstm, own, x, "")[0])


def _mlp(p: Tensors, images: torch.Tensor) -> torch.Tensor:
    x = images.permute(0, 3, 1, 2).flatten(1)
    for name in ("linear0", "linear1"):
        x = functional.relu(_linear(p, name, x))
    return _linear(p, "linear2", x)


class Convolutional:
    """The layers that these networks are made of, on images with channels second."""

    def __init__(self, weights: Tensors, state: Tensors, *, training: bool = True) -> None:
        self.weights = weights
        self.state = state
        self._training = training

    def conv(
        self, name: str, norm: str, x: torch.Tensor, stride: int = 1, *, relu: bool = False
    ) -> torch.Tensor:
        weight = self.weights[f"{name}.weight"]
        y = functional.conv2d(x, weight, None, stride, weight.shape[2] // 2)
        gain, bias = (self.weights[f"{norm}.{part}"] for part in ("weight", "bias"))
        parts = (f"{norm}.running_mean", f"{norm}.running_var")
        mean, variance = (self.state[part].to(x.dtype) for part in parts)
        y = functional.batch_norm(y, mean, variance, gain, bias, training=self._training)
        self.state |= dict(zip(parts, (mean, variance), strict=True))
        return functional.relu(y) if relu else y

    def block(self, name: str, x: torch.Tensor, stride: int) -> torch.Tensor:
        y = x
        layers = [number for number in (1, 2, 3) if f"{name}.conv{number}.weight" in self.weights]
        for number in layers:
            at = stride if number == len(layers) - 1 else 1  # the 3x3 one, or the first of two
            last = number == layers[-1]
            y = self.conv(f"{name}.conv{number}", f"{name}.bn{number}", y, at, relu=not last)
        if f"{name}.downsample.0.weight" in self.weights:
            x = self.conv(f"{name}.downsample.0", f"{name}.downsample.1", x, stride)
        return functional.relu(y + x)

    def resnet(self, x: torch.Tensor) -> torch.Tensor:
        large = self.weights["conv1.weight"].shape[2] == 7
        x = self.conv("conv1", "bn1", x, 2 if large else 1, relu=True)
        x = functional.max_pool2d(x, 3, 2, 1) if large else x
        for name in dict.fromkeys(
            name.split(".conv")[0] for name in self.weights if ".conv" in name
        ):
            stage, block = name.split(".")
            x = self.block(name, x, 2 if stage != "layer1" and block == "0" else 1)
        return functional.linear(
            x.mean(dim=(2, 3)), self.weights["fc.weight"], self.weights["fc.bias"]
        )

    def cnn(self, x: torch.Tensor) -> torch.Tensor:
        for name in ("stage0", "stage1", "stage2"):
            x = x if name == "stage0" else functional.max_pool2d(x, 2)
            x = self.conv(f"{name}.conv", f"{name}.norm", x, relu=True)
        return functional.linear(
            x.flatten(1), self.weights["head.weight"], self.weights["head.bias"]
        )


_SMALL = {"layers": 2, "heads": HEADS, "width": C, "dropout": 0.0}
_LSTM = {"layers": 2, "width": C}
CASES = [
    Case(
        "mlp",
        {"inputs": 8 * 12 * 3, "channels": 3, "classes": 5, "hidden": [16, 12]},
        (8, 12, 3),
        _mlp,
    ),
    Case("gpt-tiny", {"vocabulary": V, "length": T + 2, **_SMALL}, None, _gpt),
    Case("bert-tiny", {"vocabulary": V, "length": T + 2, **_SMALL}, None, _bert),
    Case("vit-tiny", {"side": 12, "classes": 5, "patch": 4, **_SMALL}, (12, 12, 3), _vit),
    Case(
        "lstm",
        {"classes": V, "vocabulary": V, **_LSTM},
        None,
        lambda p, tokens: _lstm(p, p["embedding.weight"][tokens]),
    ),
    Case(
        "lstm-rows",
        {"classes": 5, "features": 36, **_LSTM},
        (8, 12, 3),
        lambda p, images: _lstm(p, images.flatten(2))[:, -1],
    ),
]


def _resnet(depth: int, side: int, channels: int) -> Case:
    settings = {"depth": depth, "side": side, "channels": channels, "classes": 5, "width": 4}
    return Case(f"resnet{depth}", settings, (side, side, channels), Convolutional.resnet)


NETWORKS = {
    "resnet18": _resnet(18, 16, 3),
    "resnet18-odd": _resnet(18, 13, 1),
    "resnet50": _resnet(50, 16, 1),
    "resnet50-large": _resnet(50, 65, 3),
    "cnn": Case(
        "cnn", {"side": 14, "classes": 5, "widths": [3, 4, 5]}, (14, 14, 1), Convolutional.cnn
    ),
}

SMALL = {
    case.model: replace(case, settings={**case.settings, **dropout})
    for cases, dropout in (
        (CASES[1:-1], {"dropout": 0.1}),
        ((CASES[0], NETWORKS["resnet18"], NETWORKS["cnn"]), {}),
    )
    for case in cases
}
"""A model of each kind, with dropout where it has any."""
