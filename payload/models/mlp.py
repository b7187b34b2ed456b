"""A multilayer perceptron: linear, ReLU, linear, ..., linear."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from payload.nn.activation import ReLU
from payload.nn.base import Context, Sequential, Unit
from payload.nn.linear import Linear


def build(context: Context, *, inputs: int, classes: int, hidden: Sequence[int] = (256, 128)) -> list[Unit]:
    """(B, inputs) → logits (B, classes); one unit a linear layer."""
    widths = (inputs, *hidden, classes)
    units = []
    for number, (wide, narrow) in enumerate(pairwise(widths)):
        linear = Linear(context, f"linear{number}", wide, narrow)
        last = number == len(hidden)
        layer = linear if last else Sequential(linear, ReLU())  # logits may be negative
        units.append(Unit(f"linear{number}", layer, flops=2.0 * wide * narrow))
    return units
