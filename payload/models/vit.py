"""The Vision Transformer (Dosovitskiy et al., arXiv:2010.11929).

Shapes: B images, each cut into square patches; T = 1 + number of patches; C numbers per patch.
"""

from __future__ import annotations

from functools import partial

from payload.errors import UsageError
from payload.nn.activation import GELU
from payload.nn.attention import Attention
from payload.nn.dropout import Dropout
from payload.nn.form import patches as as_patches
from payload.nn.linear import Linear
from payload.nn.module import Layer, LayerContext, Residual, Sequential, Unit, normal
from payload.nn.norm import LayerNorm
from payload.nn.sequence import ClassToken, Patches, Positions, SelectPosition

_INIT = normal(0.02)


def build(
    context: LayerContext,
    *,
    side: int = 224,
    channels: int = 3,
    classes: int = 1000,
    patch: int = 16,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.0,
    norm_eps: float = 1e-6,
) -> list[Unit]:
    """Return the blocks of a model that maps images (B, side, side, channels) to logits (B,
    classes).

    Raises UsageError if the image's side is not a multiple of the patch's side.
    """
    if side % patch:
        raise UsageError(
            f"--patch {patch}: images of {side} x {side} pixels cannot be cut into patches of "
            f"{patch} x {patch}; use images with a side that is a multiple of {patch}",
            code="patches-not-divisible",
        )
    patches = (side // patch) ** 2
    pixels = patch * patch * channels
    length = 1 + patches
    first = Sequential(
        Patches(patch),  # (B, side, side, channels) → (B, patches, pixels)
        Linear(
            context, "patches", pixels, width, init=_INIT, form=as_patches(patch, channels, width)
        ),
        ClassToken(context, "class_token", width),  # → (B, T, C)
        Positions(context, "positions", length, width),
        Dropout(context, "dropout", dropout),
    )
    head = Sequential(
        SelectPosition(context, 0),  # (B, T, C) → (B, C)
        LayerNorm(context, "norm", width, eps=norm_eps),
        Linear(context, "head", width, classes, init=_INIT),  # → (B, classes)
    )
    block = partial(_block, context, width=width, heads=heads, dropout=dropout, norm_eps=norm_eps)
    # FLOPs of a block: 12 C² weights of linear layers for each token, and scores and sums of T · T
    # · C each.
    flops = 2.0 * length * (12 * width * width) + 4.0 * length * length * width
    return [
        Unit("patches", first, flops=2.0 * patches * pixels * width),
        *(
            Unit(name, block(name), flops)
            for name in (f"layers.{number}" for number in range(layers))
        ),
        Unit("head", head, flops=2.0 * width * classes),
    ]


def _block(
    context: LayerContext, name: str, *, width: int, heads: int, dropout: float, norm_eps: float
) -> Layer:
    return Sequential(
        Residual(
            LayerNorm(context, f"{name}.norm1", width, eps=norm_eps),
            Attention(context, f"{name}.self_attn", width, heads, causal=False, init=_INIT),
            Dropout(context, f"{name}.dropout1", dropout),
        ),
        Residual(
            LayerNorm(context, f"{name}.norm2", width, eps=norm_eps),
            Linear(context, f"{name}.linear1", width, 4 * width, init=_INIT, split="columns"),
            GELU(context, exact=True),
            Dropout(context, f"{name}.dropout2", dropout, split=True),
            Linear(context, f"{name}.linear2", 4 * width, width, init=_INIT, split="rows"),
            Dropout(context, f"{name}.dropout3", dropout),
        ),
    )
