"""Residual networks for images (He et al. 2015, arXiv:1512.03385); ResNet-50 with the stride in the 3x3
convolution, which is known as version 1.5. Layers have torchvision's names."""

from __future__ import annotations

from payload.device.base import Array
from payload.nn.activation import ReLU
from payload.nn.conv import Conv2d
from payload.nn.linear import Linear
from payload.nn.module import Context, Layer, Sequential, Tape, Unit, ones, zeros
from payload.nn.norm import BatchNorm
from payload.nn.pool import GlobalAveragePool, MaxPool2d

_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
"""Of each of the four stages, by depth."""

_SMALL = 64  # images up to this are not shrunk fourfold before the first block


def build(
    context: Context,
    *,
    side: int = 32,
    channels: int = 3,
    classes: int,
    depth: int = 18,
    width: int = 64,
) -> list[Unit]:
    """Images (B, side, side, channels) to logits (B, classes); a unit a residual block.

    The first layer is a 3x3 convolution for small images; for larger ones, such as ImageNet's, it is a 7x7
    convolution of stride 2, and a max-pooling of stride 2 follows.

    Args:
        width: channels of the first stage; each further stage has twice as many on a quarter of the area.
    """
    built = _Builder(context, side)
    units = [built.unit("stem", built.stem(channels, width, large=side > _SMALL))]
    block = built.basic if depth == 18 else built.bottleneck  # noqa: PLR2004
    inputs = width
    for stage, blocks in enumerate(_BLOCKS[depth]):
        for number in range(blocks):
            name = f"layer{stage + 1}.{number}"
            layer, inputs = block(name, inputs, width << stage, stride=2 if stage and not number else 1)
            units.append(built.unit(name, layer))
    head = Sequential(GlobalAveragePool(context), Linear(context, "fc", inputs, classes))
    return [*units, Unit("head", head, flops=2.0 * inputs * classes)]


class Residual(Sequential):
    """y = max(0, branch(x) + shortcut(x))"""

    def __init__(self, branch: Layer, shortcut: Layer | None) -> None:
        """``shortcut``: None for x itself."""
        super().__init__(branch, *([shortcut] if shortcut else []))
        self._branch, self._shortcut, self._relu = branch, shortcut, ReLU()

    def forward(self, x: Array, tape: Tape) -> Array:
        """(B, H, W, channels) → (B, H', W', channels')"""
        y = self._branch.forward(x, tape)
        y += self._shortcut.forward(x, tape) if self._shortcut else x
        return self._relu.forward(y, tape)

    def backward(self, dy: Array, tape: Tape) -> Array:
        """(B, H', W', channels') → (B, H, W, channels)"""
        dy = self._relu.backward(dy, tape)
        by_shortcut = self._shortcut.backward(dy, tape) if self._shortcut else dy
        dx = self._branch.backward(dy, tape)
        dx += by_shortcut
        return dx


class _Builder:
    """Makes blocks one after the other, and keeps account of the image's side and of what a block costs."""

    def __init__(self, context: Context, side: int) -> None:
        self._context, self._side, self._flops = context, side, 0.0

    def unit(self, name: str, layer: Layer) -> Unit:
        """Of the layers made since the last one."""
        flops, self._flops = self._flops, 0.0
        return Unit(name, layer, flops)

    def stem(self, channels: int, width: int, *, large: bool) -> Layer:
        """side → side, or side / 4 if large"""
        if not large:
            return self._conv("conv1", "bn1", channels, width, 3, relu=True, first=True)
        layer = self._conv("conv1", "bn1", channels, width, 7, stride=2, relu=True, first=True)
        pool = MaxPool2d(self._context, 3, stride=2, padding=1)
        self._side = pool.output_size(self._side)
        return Sequential(layer, pool)

    def basic(self, name: str, inputs: int, width: int, *, stride: int) -> tuple[Layer, int]:
        """Two 3x3 convolutions: (B, H, W, inputs) → (B, H/stride, W/stride, width); and how many channels."""
        shortcut = self._shrink(name, inputs, width, stride)
        branch = Sequential(
            self._conv(f"{name}.conv1", f"{name}.bn1", inputs, width, 3, stride=stride, relu=True),
            self._conv(f"{name}.conv2", f"{name}.bn2", width, width, 3, last=True),
        )
        return Residual(branch, shortcut), width

    def bottleneck(self, name: str, inputs: int, width: int, *, stride: int) -> tuple[Layer, int]:
        """1x1, 3x3, 1x1: (B, H, W, inputs) → (B, H/stride, W/stride, 4 · width); and how many channels."""
        outputs = 4 * width
        shortcut = self._shrink(name, inputs, outputs, stride)
        branch = Sequential(
            self._conv(f"{name}.conv1", f"{name}.bn1", inputs, width, 1, relu=True),
            self._conv(f"{name}.conv2", f"{name}.bn2", width, width, 3, stride=stride, relu=True),
            self._conv(f"{name}.conv3", f"{name}.bn3", width, outputs, 1, last=True),
        )
        return Residual(branch, shortcut), outputs

    def _shrink(self, name: str, inputs: int, outputs: int, stride: int) -> Layer | None:
        """The shortcut of a block whose output has another shape than its input."""
        if stride == 1 and inputs == outputs:
            return None
        side = self._side
        name = f"{name}.downsample"
        shortcut = self._conv(f"{name}.0", f"{name}.1", inputs, outputs, 1, stride=stride)
        self._side = side  # the branch begins where the shortcut did
        return shortcut

    def _conv(
        self,
        conv_name: str,
        norm_name: str,
        inputs: int,
        outputs: int,
        kernel: int,
        *,
        stride: int = 1,
        relu: bool = False,
        first: bool = False,
        last: bool = False,
    ) -> Layer:
        """A convolution and its normalisation.

        The ``last`` one of a block begins with a gain of 0, so that the block begins as its shortcut: easier
        to train with large batches (Goyal et al. 2017, arXiv:1706.02677).
        """
        conv = Conv2d(
            *(self._context, conv_name, inputs, outputs, kernel),
            stride=stride,
            padding=kernel // 2,
            first=first,
        )
        self._side = conv.output_size(self._side)
        self._flops += 2.0 * self._side**2 * conv.weight.size
        norm = BatchNorm(self._context, norm_name, outputs, relu=relu, weight=zeros if last else ones)
        return Sequential(conv, norm)
