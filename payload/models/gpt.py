"""GPT-2 (Radford et al., "Language Models are Unsupervised Multitask Learners", 2019).

Shapes: B samples of T tokens, C numbers per token, V tokens in the vocabulary.
"""

from __future__ import annotations

import math
from functools import partial

from payload.nn.activation import GELU
from payload.nn.attention import Attention
from payload.nn.dropout import Dropout
from payload.nn.embedding import Embedding, TiedHead
from payload.nn.linear import Linear
from payload.nn.module import Layer, LayerContext, Residual, Sequential, Unit, normal
from payload.nn.norm import LayerNorm
from payload.nn.sequence import Positions

VOCABULARY = 50257

SPLIT_LOGITS = True
"""Each tensor-parallel rank computes the logits of its part of the vocabulary."""


def build(
    context: LayerContext,
    *,
    vocabulary: int = VOCABULARY,
    length: int = 1024,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.0,
    norm_eps: float = 1e-5,
) -> list[Unit]:
    """Return the blocks of a model that maps tokens (B, T ≤ ``length``) to next-token logits (B, T,
    V).
    """
    embedding = Embedding(context, "embedding", vocabulary, width)
    first = Sequential(
        embedding,  # (B, T) → (B, T, C)
        Positions(context, "positions", length, width),
        Dropout(context, "dropout", dropout),
    )
    head = Sequential(
        LayerNorm(context, "norm", width, eps=norm_eps),
        TiedHead(context, "head", embedding),  # (B, T, C) → (B, T, V)
    )
    block = partial(
        _block, context, width=width, heads=heads, layers=layers, dropout=dropout, norm_eps=norm_eps
    )
    # FLOPs of a block: 12 C² weights of linear layers for each token, and scores and sums over the
    # earlier tokens, which are half of T · T · C each.
    flops = 2.0 * length * (12 * width * width) + 2.0 * length * length * width
    return [
        Unit("embedding", first),
        *(
            Unit(name, block(name), flops)
            for name in (f"layers.{number}" for number in range(layers))
        ),
        Unit("head", head, flops=2.0 * length * width * vocabulary),
    ]


def _block(
    context: LayerContext,
    name: str,
    *,
    width: int,
    heads: int,
    layers: int,
    dropout: float,
    norm_eps: float,
) -> Layer:
    init = normal(0.02)
    # Smaller weights keep the variance of the shortcut's value, to which 2 · layers results are
    # added.
    into_shortcut = normal(0.02 / math.sqrt(2 * layers))
    return Sequential(
        Residual(
            LayerNorm(context, f"{name}.norm1", width, eps=norm_eps),
            Attention(
                context,
                f"{name}.self_attn",
                width,
                heads,
                causal=True,
                init=init,
                out_init=into_shortcut,
                dropout=dropout,
            ),
            Dropout(context, f"{name}.dropout1", dropout),
        ),
        Residual(
            LayerNorm(context, f"{name}.norm2", width, eps=norm_eps),
            # The result has the shape (B, T, 4 C).
            Linear(context, f"{name}.linear1", width, 4 * width, init=init, split="columns"),
            GELU(context),
            Linear(context, f"{name}.linear2", 4 * width, width, init=into_shortcut, split="rows"),
            Dropout(context, f"{name}.dropout2", dropout),
        ),
    )
