"""ResNet-50, GPT-2, BERT and the Vision Transformer in PyTorch, as one writes them for speed.

Their parameters have the payload's names, which are those of torchvision and of
``torch.nn.TransformerEncoderLayer``, so that both sides start from the same weights.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Attention(nn.Module):
    """Fused attention, between one product for q, k and v and one for the result."""

    def __init__(self, width: int, heads: int, *, causal: bool) -> None:
        super().__init__()
        self.heads = heads
        self.causal = causal
        self.in_proj_weight = nn.Parameter(torch.empty(3 * width, width))
        self.in_proj_bias = nn.Parameter(torch.empty(3 * width))
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = functional.linear(x, self.in_proj_weight, self.in_proj_bias)
        q, k, v = qkv.view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out_proj(y.transpose(1, 2).reshape(batch, length, width))


class Block(nn.Module):
    """norm_first: whether norms come before attention and perceptron, or after the residual."""

    def __init__(
        self, width: int, heads: int, eps: float, *, causal: bool, norm_first: bool
    ) -> None:
        super().__init__()
        self.norm_first = norm_first
        self.approximate = "tanh" if causal else "none"
        self.self_attn = Attention(width, heads, causal=causal)
        self.linear1 = nn.Linear(width, 4 * width)
        self.linear2 = nn.Linear(4 * width, width)
        self.norm1 = nn.LayerNorm(width, eps=eps)
        self.norm2 = nn.LayerNorm(width, eps=eps)

    def forward(self, x: Tensor) -> Tensor:
        if self.norm_first:
            x = x + self.self_attn(self.norm1(x))
            return x + self._perceptron(self.norm2(x))
        x = self.norm1(x + self.self_attn(x))
        return self.norm2(x + self._perceptron(x))

    def _perceptron(self, x: Tensor) -> Tensor:
        hidden = functional.gelu(self.linear1(x), approximate=self.approximate)
        return self.linear2(hidden)


def _blocks(sizes: dict[str, int], eps: float, *, causal: bool, norm_first: bool) -> nn.Sequential:
    width, heads = sizes["width"], sizes["heads"]
    made = (
        Block(width, heads, eps, causal=causal, norm_first=norm_first)
        for _ in range(sizes["layers"])
    )
    return nn.Sequential(*made)


class GPT(nn.Module):
    """(B, T) tokens → (B, T, vocabulary) logits; the head is the embedding's table."""

    def __init__(self, vocabulary: int, length: int, **sizes: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, sizes["width"])
        self.positions = nn.Embedding(length, sizes["width"])
        self.layers = _blocks(sizes, 1e-5, causal=True, norm_first=True)
        self.norm = nn.LayerNorm(sizes["width"])

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        return functional.linear(self.norm(self.layers(x)), self.embedding.weight)


class BERT(nn.Module):
    """(B, T) tokens → (B, T, vocabulary) logits, without dropout."""

    def __init__(self, vocabulary: int, length: int, **sizes: int) -> None:
        super().__init__()
        width = sizes["width"]
        self.embedding = nn.Embedding(vocabulary, width)
        self.positions = nn.Embedding(length, width)
        self.segments = nn.Embedding(2, width)
        self.norm = nn.LayerNorm(width, eps=1e-12)
        self.layers = _blocks(sizes, 1e-12, causal=False, norm_first=False)
        self.head = nn.Module()
        self.head.linear = nn.Linear(width, width)
        self.head.norm = nn.LayerNorm(width, eps=1e-12)
        self.head.bias = nn.Parameter(torch.empty(vocabulary))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens) + self.positions.weight[: tokens.shape[1]]
        x = self.layers(self.norm(x + self.segments.weight[0]))
        x = self.head.norm(functional.gelu(self.head.linear(x)))
        return functional.linear(x, self.embedding.weight, self.head.bias)


class ViT(nn.Module):
    """(B, 3, side, side) images → (B, classes) logits."""

    def __init__(self, side: int, patch: int, classes: int, **sizes: int) -> None:
        super().__init__()
        width = sizes["width"]
        self.patches = nn.Conv2d(3, width, patch, patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, width))
        self.positions = nn.Embedding(1 + (side // patch) ** 2, width)
        self.layers = _blocks(sizes, 1e-6, causal=False, norm_first=True)
        self.norm = nn.LayerNorm(width, eps=1e-6)
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)
        token = self.class_token.expand(len(x), -1, -1)
        x = torch.cat((token.to(x.dtype), x), dim=1) + self.positions.weight
        return self.head(self.norm(self.layers(x)[:, 0]))


class Bottleneck(nn.Module):
    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * width
        self.conv1 = nn.Conv2d(inputs, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, outputs, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(outputs)
        self.downsample = None
        if stride != 1 or inputs != outputs:
            self.downsample = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = functional.relu(self.bn1(self.conv1(x)))
        y = functional.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        return functional.relu(y + (self.downsample(x) if self.downsample else x))


class ResNet50(nn.Module):
    """(B, 3, side, side) images → (B, classes) logits."""

    def __init__(self, classes: int, width: int = 64) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        inputs = width
        for stage, blocks in enumerate((3, 4, 6, 3)):
            made = []
            for number in range(blocks):
                stride = 2 if stage and not number else 1
                made.append(Bottleneck(inputs, width << stage, stride))
                inputs = 4 * width << stage
            setattr(self, f"layer{stage + 1}", nn.Sequential(*made))
        self.fc = nn.Linear(inputs, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.bn1(self.conv1(x)))
        x = functional.max_pool2d(x, 3, 2, 1)
        for stage in (self.layer1, self.layer2, self.layer3, self.layer4):
            x = stage(x)
        return self.fc(x.mean(dim=(2, 3)))
