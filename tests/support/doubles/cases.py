"""A small case of every layer of the payload, with the same computation in PyTorch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from payload.device.base import Array
from payload.nn.activation import GELU, ReLU
from payload.nn.attention import Attention
from payload.nn.conv import Conv2d
from payload.nn.dropout import Dropout
from payload.nn.embedding import Embedding, TiedHead
from payload.nn.linear import Linear
from payload.nn.lstm import LSTM
from payload.nn.module import Layer, LayerContext, Residual, Sequential, normal
from payload.nn.norm import BatchNorm, LayerNorm
from payload.nn.pool import GlobalAveragePool, MaxPool2d
from payload.nn.sequence import ClassToken, Patches, Positions, Segments, SelectPosition
from tests.support.doubles.oracle import Tensors, functional, torch

TorchForward = Callable[[Tensors, "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Case:
    """A layer, the shape of what it is given (None: tokens), and PyTorch's way to the same."""

    make: Callable[[LayerContext], Layer]
    shape: tuple[int, ...] | None
    torch_forward: TorchForward

    def input(self, dtype: str = "float64") -> Array:
        rng = np.random.default_rng(5)
        if self.shape is None:
            return rng.integers(0, 11, (3, 5))
        return (1.5 * rng.standard_normal(self.shape)).astype(dtype)


def channels_last(torch_forward: TorchForward) -> TorchForward:
    """Images have their channels second in PyTorch."""

    def call(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        return torch_forward(p, x.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)

    return call


def _conv(
    inputs: int, outputs: int, kernel: int, stride: int = 1, pad: int = 0, *, size: int = 7
) -> Case:
    def torch_forward(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, p["c.weight"], None, stride, pad)

    return Case(
        lambda c: Conv2d(c, "c", inputs, outputs, kernel, stride=stride, padding=pad),
        (3, size, size - 1, inputs),
        channels_last(torch_forward),
    )


def _norm(relu: bool) -> Case:
    def torch_forward(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        y = functional.batch_norm(x, None, None, p["n.weight"], p["n.bias"], training=True)
        return functional.relu(y) if relu else y

    return Case(
        lambda c: BatchNorm(c, "n", 5, relu=relu), (3, 4, 5, 5), channels_last(torch_forward)
    )


def attention(causal: bool) -> TorchForward:
    def torch_forward(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        b, t, c = x.shape
        qkv = functional.linear(x, p["a.in_proj_weight"], p["a.in_proj_bias"])
        q, k, v = qkv.reshape(b, t, 3, 2, c // 2).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=causal)
        return functional.linear(
            y.swapaxes(1, 2).reshape(b, t, c), p["a.out_proj.weight"], p["a.out_proj.bias"]
        )

    return torch_forward


def _lstm(p: Tensors, x: torch.Tensor) -> torch.Tensor:
    lstm = torch.nn.LSTM(x.shape[2], 3, batch_first=True, dtype=x.dtype)
    names = {name.removeprefix("l."): tensor for name, tensor in p.items()}
    names["bias_hh_l0"] = torch.zeros_like(p["l.bias_ih_l0"])
    y: torch.Tensor = torch.func.functional_call(lstm, names, (x,))[0]
    return y


def _tied(c: LayerContext) -> Layer:
    embedding = Embedding(c, "e", 64, 4)
    return Sequential(embedding, TiedHead(c, "h", embedding, bias=True))


CASES = {
    "linear": Case(
        lambda c: Linear(c, "l", 5, 3),
        (4, 5),
        lambda p, x: functional.linear(x, p["l.weight"], p["l.bias"]),
    ),
    "relu": Case(lambda _: ReLU(), (4, 5), lambda _, x: functional.relu(x)),
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
        lambda c: Embedding(c, "e", 11, 4),
        None,
        lambda p, x: functional.embedding(x, p["e.weight"]),
    ),
    "tied": Case(
        _tied,
        None,
        lambda p, x: functional.embedding(x, p["e.weight"]) @ p["e.weight"].T + p["h.bias"],
    ),
    "positions": Case(
        lambda c: Positions(c, "p", 7, 4), (2, 5, 4), lambda p, x: x + p["p.weight"][:5]
    ),
    "segments": Case(lambda c: Segments(c, "s", 4), (2, 5, 4), lambda p, x: x + p["s.weight"][0]),
    "classtoken": Case(
        lambda c: ClassToken(c, "t", 4),
        (2, 3, 4),
        lambda p, x: torch.cat([p["t"].expand(2, 1, 4), x], dim=1),
    ),
    "pick": Case(lambda c: SelectPosition(c, -1), (2, 3, 4), lambda _, x: x[:, -1]),
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
                functional.layer_norm(x, (4,), p["n.weight"], p["n.bias"]),
                p["l.weight"],
                p["l.bias"],
            )
        ),
    ),
    "causal": Case(
        lambda c: Attention(c, "a", 8, 2, causal=True, init=normal(0.5), dropout=0.3),
        (2, 9, 8),
        attention(True),
    ),
    "bidirectional": Case(
        lambda c: Attention(c, "a", 8, 2, causal=False, init=normal(0.5), dropout=0.3),
        (2, 5, 8),
        attention(False),
    ),
    "lstm": Case(lambda c: LSTM(c, "l", 2, 3), (2, 5, 2), _lstm),
    "3x3": _conv(2, 3, 3, pad=1),
    "3x3-unpadded": _conv(2, 3, 3),
    "3x3-stride-2": _conv(2, 3, 3, stride=2, pad=1),
    "3x3-far-padded": _conv(2, 3, 3, pad=3),
    "7x7-stride-2": _conv(3, 2, 7, stride=2, pad=3),
    "4x4-stride-3": _conv(2, 2, 4, stride=3, pad=1),
    "1x1": _conv(4, 3, 1),
    "1x1-stride-2": _conv(4, 3, 1, stride=2),
    "norm": _norm(relu=False),
    "norm-relu": _norm(relu=True),
    "max": Case(
        lambda c: MaxPool2d(c, 2),
        (3, 7, 6, 2),
        channels_last(lambda _, x: functional.max_pool2d(x, 2)),
    ),
    "max-overlapping": Case(
        lambda c: MaxPool2d(c, 3, stride=2, padding=1),
        (3, 7, 6, 2),
        channels_last(lambda _, x: functional.max_pool2d(x, 3, 2, 1)),
    ),
    "global": Case(GlobalAveragePool, (3, 4, 5, 2), lambda _, x: x.mean(dim=(1, 2))),
}

BLOCKS = {
    "part-of-an-image": _conv(64, 8, 3, pad=1, size=33),
    "part-of-an-image-stride-2": _conv(64, 8, 3, stride=2, pad=1, size=65),
    "two-images-of-three": _conv(4, 8, 3, pad=1, size=40),
    "one-image-of-three": _conv(48, 2, 3, pad=1, size=20),
}
"""Of 512 positions or a MiB of patches, whichever is more."""

WINOGRAD = {
    "tiles": _conv(32, 40, 3, pad=1, size=16),
    "tiles-cut-at-edges": _conv(33, 32, 3, pad=1, size=15),
    "tiles-unpadded": _conv(32, 33, 3, size=18),
    "tiles-far-padded": _conv(32, 33, 3, pad=2, size=15),
    "tiles-of-two-images-of-three": _conv(32, 32, 3, pad=1, size=32),
    "tiles-of-part-of-an-image": _conv(32, 32, 3, pad=1, size=46),
}
"""In blocks of 128 tiles of 4x4 outputs."""
