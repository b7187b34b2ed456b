"""A multilayer perceptron: linear layers with ReLU between them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from payload.nn.activation import ReLU
from payload.nn.form import flattened_image
from payload.nn.linear import Linear
from payload.nn.module import Flatten, Layer, LayerContext, Sequential, Unit


def build(
    context: LayerContext,
    *,
    inputs: int,
    classes: int,
    hidden: Sequence[int] = (256, 128),
    channels: int = 1,
) -> list[Unit]:
    """Return the layers of a model that maps samples of ``inputs`` numbers to logits (B, classes).

    channels: number of channels of an image. A pixel's channels are adjacent in memory.
    """
    widths = (inputs, *hidden, classes)
    units = []
    for number, (fan_in, fan_out) in enumerate(pairwise(widths)):
        form = None if number else flattened_image((1, inputs // channels, channels), fan_out)
        linear = Linear(context, f"linear{number}", fan_in, fan_out, form=form)
        last = number == len(hidden)
        # The last layer has no ReLU, because logits may be negative.
        layers: list[Layer] = [linear] if last else [linear, ReLU()]
        layer = Sequential(*([] if number else [Flatten()]), *layers)
        units.append(Unit(f"linear{number}", layer, flops=2.0 * fan_in * fan_out))
    return units
