"""A multilayer perceptron: linear, ReLU, linear, ..., linear."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from payload.nn.activation import ReLU
from payload.nn.form import of_images
from payload.nn.linear import Linear
from payload.nn.module import Context, Flatten, Layer, Sequential, Unit


def build(
    context: Context,
    *,
    inputs: int,
    classes: int,
    hidden: Sequence[int] = (256, 128),
    channels: int = 1,
) -> list[Unit]:
    """(B, ...), ``inputs`` numbers a sample → logits (B, classes); one unit a linear layer.

    Args:
        channels: of images: their pixels' numbers lie next to each other.
    """
    widths = (inputs, *hidden, classes)
    units = []
    for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
        form = None if number else of_images((1, inputs // channels, channels), fan_out)
        linear = Linear(context, f"linear{number}", fan_in, fan_out, form=form)
        last = number == len(hidden)
        layers: list[Layer] = [linear] if last else [linear, ReLU()]  # logits may be negative
        layer = Sequential(*([] if number else [Flatten()]), *layers)
        units.append(Unit(f"linear{number}", layer, flops=2.0 * fan_in * fan_out))
    return units
