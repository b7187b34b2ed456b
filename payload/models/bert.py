"""BERT with its masked-language head (Devlin et al., arXiv:1810.04805).

There is no next-sentence task, as in RoBERTa (Liu et al., arXiv:1907.11692), so all tokens are in
the first
segment. Shapes: B samples of T tokens, C numbers per token, V tokens in the vocabulary.
"""

from __future__ import annotations

from functools import partial

from payload.nn.activation import GELU
from payload.nn.attention import Attention
from payload.nn.dropout import Dropout
from payload.nn.embedding import Embedding, TiedHead
from payload.nn.linear import Linear
from payload.nn.module import Layer, LayerContext, Residual, Sequential, Unit, normal
from payload.nn.norm import LayerNorm
from payload.nn.sequence import Positions, Segments

VOCABULARY = 30522

SPLIT_LOGITS = True
"""Each tensor-parallel rank computes the logits of its part of the vocabulary."""

_INIT = normal(0.02)


def build(
    context: LayerContext,
    *,
    vocabulary: int = VOCABULARY,
    length: int = 512,
    layers: int = 12,
    heads: int = 12,
    width: int = 768,
    dropout: float = 0.1,
    norm_eps: float = 1e-12,
) -> list[Unit]:
    """Return the blocks of a model that maps masked tokens (B, T), T ≤ ``length``, to logits (B, T,
    V).

    A target is the original token at a masked position, and -1 at any other position.
    """
    embedding = Embedding(context, "embedding", vocabulary, width)
    first = Sequential(
        embedding,  # (B, T) → (B, T, C)
        Positions(context, "positions", length, width),
        Segments(context, "segments", width),
        LayerNorm(context, "norm", width, eps=norm_eps),
        Dropout(context, "dropout", dropout),
    )
    head = Sequential(
        Linear(context, "head.linear", width, width, init=_INIT),
        GELU(context, exact=True),
        LayerNorm(context, "head.norm", width, eps=norm_eps),
        TiedHead(context, "head", embedding, bias=True),  # (B, T, C) → (B, T, V)
    )
    block = partial(_block, context, width=width, heads=heads, dropout=dropout, norm_eps=norm_eps)
    # FLOPs of a block: 12 C² weights of linear layers for each token, and scores and sums of T · T
    # · C each.
    flops = 2.0 * length * (12 * width * width) + 4.0 * length * length * width
    return [
        Unit("embedding", first),
        *(
            Unit(name, block(name), flops)
            for name in (f"layers.{number}" for number in range(layers))
        ),
        Unit("head", head, flops=2.0 * length * width * (width + vocabulary)),
    ]


def _block(
    context: LayerContext, name: str, *, width: int, heads: int, dropout: float, norm_eps: float
) -> Layer:
    return Sequential(
        Residual(
            Attention(
                context,
                f"{name}.self_attn",
                width,
                heads,
                causal=False,
                init=_INIT,
                dropout=dropout,
            ),
            Dropout(context, f"{name}.dropout1", dropout),
        ),
        LayerNorm(context, f"{name}.norm1", width, eps=norm_eps),
        Residual(
            Linear(context, f"{name}.linear1", width, 4 * width, init=_INIT, split="columns"),
            GELU(context, exact=True),
            Linear(context, f"{name}.linear2", 4 * width, width, init=_INIT, split="rows"),
            Dropout(context, f"{name}.dropout2", dropout),
        ),
        LayerNorm(context, f"{name}.norm2", width, eps=norm_eps),
    )
