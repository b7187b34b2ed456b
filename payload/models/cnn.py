"""A small convolutional network for small images such as Fashion-MNIST.

Each stage has a convolution, batch norm and max-pooling, as in VGG (Simonyan and Zisserman,
arXiv:1409.1556).
"""

from __future__ import annotations

from collections.abc import Sequence

from payload.nn.conv import Conv2d
from payload.nn.form import flattened_image
from payload.nn.linear import Linear
from payload.nn.module import Flatten, Layer, LayerContext, Sequential, Unit
from payload.nn.norm import BatchNorm
from payload.nn.pool import MaxPool2d


def build(
    context: LayerContext,
    *,
    side: int = 28,
    channels: int = 1,
    classes: int = 10,
    widths: Sequence[int] = (16, 32, 64),
) -> list[Unit]:
    """Return the stages of a model that maps images (B, side, side, channels) to logits (B,
    classes).

    widths: output channels of each stage. Each stage but the last halves the sides of the images.
    """
    units = []
    for number, width in enumerate(widths):
        name = f"stage{number}"
        conv = Conv2d(context, f"{name}.conv", channels, width, 3, padding=1, first=number == 0)
        layers: list[Layer] = [conv, BatchNorm(context, f"{name}.norm", width, relu=True)]
        # (B, side, side, channels) → (B, side, side, width).
        flops = 2.0 * side**2 * conv.weight.size
        if number < len(widths) - 1:
            pool = MaxPool2d(context, 2)
            layers.append(pool)
            side = pool.output_size(side)
            channels = width
        units.append(Unit(name, Sequential(*layers), flops))
    inputs = side * side * widths[-1]
    form = flattened_image((side, side, widths[-1]), classes)
    head = Sequential(Flatten(), Linear(context, "head", inputs, classes, form=form))
    return [*units, Unit("head", head, flops=2.0 * inputs * classes)]
