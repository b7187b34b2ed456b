"""Residual networks for images (He et al. 2015, arXiv:1512.03385), with torchvision's layer names.

In ResNet-50, a block's 3x3 convolution has the stride ("version 1.5").
"""

from __future__ import annotations

from payload.device.base import Array
from payload.nn.activation import ReLU
from payload.nn.conv import Conv2d
from payload.nn.linear import Linear
from payload.nn.module import Layer, LayerContext, Sequential, Tape, Unit, ones, zeros
from payload.nn.norm import BatchNorm
from payload.nn.pool import GlobalAveragePool, MaxPool2d

_BLOCKS = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3)}
"""Number of blocks in each of the four stages, by depth."""

# Images with a larger side than this shrink to a quarter of it before the first block.
_SMALL = 64


def build(
    context: LayerContext,
    *,
    side: int = 32,
    channels: int = 3,
    classes: int,
    depth: int = 18,
    width: int = 64,
) -> list[Unit]:
    """Return the blocks of a model that maps images (B, side, side, channels) to logits (B,
    classes).

    For images of up to 64 pixels a side, the first layer is a 3x3 convolution. For larger images it
    is a 7x7 convolution with stride 2, followed by max-pooling with stride 2. width: channels of
    the first stage. Each later stage has twice the channels of the stage before it, and half the
    side.
    """
    builder = _Builder(context, side)
    units = [builder.unit("stem", builder.stem(channels, width, large=side > _SMALL))]
    block = builder.basic if depth == 18 else builder.bottleneck  # noqa: PLR2004
    inputs = width
    for stage, blocks in enumerate(_BLOCKS[depth]):
        for number in range(blocks):
            name = f"layer{stage + 1}.{number}"
            layer, inputs = block(
                name, inputs, width << stage, stride=2 if stage and not number else 1
            )
            units.append(builder.unit(name, layer))
    head = Sequential(GlobalAveragePool(context), Linear(context, "fc", inputs, classes))
    return [*units, Unit("head", head, flops=2.0 * inputs * classes)]


class ResidualBlock(Sequential):
    """y = max(0, branch(x) + shortcut(x)). Without a shortcut layer, x itself is added."""

    def __init__(self, context: LayerContext, branch: Layer, shortcut: Layer | None) -> None:
        super().__init__(branch, *([shortcut] if shortcut else []))
        self._device = context.device
        self._branch = branch
        self._shortcut = shortcut
        self._relu = ReLU()

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, H, W, channels) to y (B, H', W', channels')."""
        y = self._branch.forward(x, tape)
        kept = self._shortcut.forward(x, tape) if self._shortcut else x
        if fused := self._device.fused_for(y):
            y = fused.add_relu(y, kept)
            tape.push(y)
            return y
        y += kept
        return self._relu.forward(y, tape)

    def backward(self, dy: Array, tape: Tape) -> Array:
        if fused := self._device.fused_for(dy):
            dy = fused.relu_gradient(dy, *tape.pop())
        else:
            dy = self._relu.backward(dy, tape)
        shortcut_dx = self._shortcut.backward(dy, tape) if self._shortcut else dy
        dx = self._branch.backward(dy, tape)
        dx += shortcut_dx
        return dx


class _Builder:
    """Builds the blocks in order, and computes the sizes of their images and their FLOPs."""

    def __init__(self, context: LayerContext, side: int) -> None:
        self._context = context
        self._side = side
        self._flops = 0.0

    def unit(self, name: str, layer: Layer) -> Unit:
        """Return a ``Unit`` of a layer, with the FLOPs of all convolutions built since the previous
        unit.
        """
        flops = self._flops
        self._flops = 0.0
        return Unit(name, layer, flops)

    def stem(self, channels: int, width: int, *, large: bool) -> Layer:
        """Build the first layers. large: whether to reduce the image's side to a quarter."""
        if not large:
            return self._conv("conv1", "bn1", channels, width, 3, relu=True, first=True)
        layer = self._conv("conv1", "bn1", channels, width, 7, stride=2, relu=True, first=True)
        pool = MaxPool2d(self._context, 3, stride=2, padding=1)
        self._side = pool.output_size(self._side)
        return Sequential(layer, pool)

    def basic(self, name: str, inputs: int, width: int, *, stride: int) -> tuple[Layer, int]:
        """Return a block of two 3x3 convolutions, and the number of output channels: ``width``."""
        shortcut = self._shrink(name, inputs, width, stride)
        branch = Sequential(
            self._conv(f"{name}.conv1", f"{name}.bn1", inputs, width, 3, stride=stride, relu=True),
            self._conv(f"{name}.conv2", f"{name}.bn2", width, width, 3, last=True),
        )
        return ResidualBlock(self._context, branch, shortcut), width

    def bottleneck(self, name: str, inputs: int, width: int, *, stride: int) -> tuple[Layer, int]:
        """Return a block of 1x1, 3x3 and 1x1 convolutions, and the number of output channels: 4 ·
        width.
        """
        outputs = 4 * width
        shortcut = self._shrink(name, inputs, outputs, stride)
        branch = Sequential(
            self._conv(f"{name}.conv1", f"{name}.bn1", inputs, width, 1, relu=True),
            self._conv(f"{name}.conv2", f"{name}.bn2", width, width, 3, stride=stride, relu=True),
            self._conv(f"{name}.conv3", f"{name}.bn3", width, outputs, 1, last=True),
        )
        return ResidualBlock(self._context, branch, shortcut), outputs

    def _shrink(self, name: str, inputs: int, outputs: int, stride: int) -> Layer | None:
        """Return a block's shortcut layer, or None if the block keeps the shape of images."""
        if stride == 1 and inputs == outputs:
            return None
        side = self._side
        name = f"{name}.downsample"
        shortcut = self._conv(f"{name}.0", f"{name}.1", inputs, outputs, 1, stride=stride)
        # The branch starts at the same image as the shortcut.
        self._side = side
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
        """Build a convolution with batch norm. first: it is the model's first. last: it is a
        block's last.

        The weight of a block's last batch norm starts at 0, so that the block first equals its
        shortcut. This helps with large batches (Goyal et al., arXiv:1706.02677).
        """
        conv = Conv2d(
            self._context,
            conv_name,
            inputs,
            outputs,
            kernel,
            stride=stride,
            padding=kernel // 2,
            first=first,
        )
        self._side = conv.output_size(self._side)
        self._flops += 2.0 * self._side**2 * conv.weight.size
        norm = BatchNorm(
            self._context, norm_name, outputs, relu=relu, weight=zeros if last else ones
        )
        return Sequential(conv, norm)
