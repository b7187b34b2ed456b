"""Stacked LSTMs that predict the next character of a text, or the class of a sequence, such as
image rows.

Hochreiter and Schmidhuber 1997; Graves, arXiv:1308.0850. Shapes: B samples of T steps, H hidden
units.
"""

from __future__ import annotations

from payload.nn.dropout import Dropout
from payload.nn.embedding import Embedding
from payload.nn.linear import Linear
from payload.nn.lstm import LSTM
from payload.nn.module import Flatten, Layer, LayerContext, Sequential, Unit, uniform
from payload.nn.sequence import SelectPosition


def build(
    context: LayerContext,
    *,
    classes: int,
    vocabulary: int | None = None,
    features: int | None = None,
    length: int = 128,
    layers: int = 2,
    width: int = 512,
    dropout: float = 0.0,
) -> list[Unit]:
    """Return the layers of a model for text or for other sequences.

    Args:
        classes: number of logits. For text, the size of the vocabulary.
        vocabulary: number of tokens. The model maps tokens (B, T) to logits (B, T, classes).
        features: numbers per step, if not text. The model maps (B, T, ...) to logits (B, classes).
        length: T, used only to count operations.
    """
    text = vocabulary is not None
    first: Layer
    if vocabulary is not None:
        # (B, T) → (B, T, H)
        first = Embedding(context, "embedding", vocabulary, width)
        inputs = width
    else:
        # (B, ...) → (B, T, features)
        first = Flatten(features)
        inputs = features or 1
    units = [Unit("first", first)]
    for number in range(layers):
        lstm = LSTM(context, "lstm", inputs, width, number=number)  # (B, T, inputs) → (B, T, H)
        layer = Sequential(lstm, Dropout(context, f"dropout{number}", dropout))
        units.append(Unit(f"lstm{number}", layer, flops=8.0 * length * width * (inputs + width)))
        inputs = width
    linear = Linear(context, "head", width, classes, init=uniform(width**-0.5))
    head = (
        linear if text else Sequential(SelectPosition(context, -1), linear)
    )  # (B, H) → (B, classes)
    units.append(Unit("head", head, flops=2.0 * width * classes * (length if text else 1)))
    return units
