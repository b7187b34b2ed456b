"""GPT-2 and its training in a single file: one rank, plain NumPy or CuPy. Read this first.

    python -m payload.minimal book.txt --steps 200

The rest of the package trains the same model (``models/gpt.py``) in the same way. A test checks
that the weights after both trainings are equal except for rounding. The differences:

    here                          in the package
    a dictionary of arrays        flat buffers, sharded over ranks (``parallel/zero.py``)
    one function for each layer   a class for each layer, which also works on a part of a tensor (``nn/``)
    probs of all T x T pairs      blocks of queries, which fit in the cache (``nn/attention.py``)
    one batch                     micro-batches, over ranks and stages of a pipeline (``parallel/``)
    float32                       four precisions, with a loss scale (``optim/precision.py``)

Shapes: B samples of T tokens, C numbers per token, H heads of D = C / H numbers, V tokens in the
    vocabulary.
"""

from __future__ import annotations

import argparse
import math
import sys
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Tensors = dict[str, Array]
"""Weights or gradients, by the names used in checkpoints and in PyTorch's modules."""

xp: ModuleType = np
"""The module numpy or cupy."""


@dataclass(frozen=True)
class Config:
    """The sizes of a GPT model."""

    vocabulary: int = 256
    length: int = 128  # maximum T
    layers: int = 4
    heads: int = 4
    width: int = 128  # C


# --------------------------------------------------------------------------------------------------- weights


def init(config: Config, seed: int, dtype: str = "float32") -> Tensors:
    """Return initial weights: normal for matrices, ones for norms, zeros for biases."""
    c = config.width
    # Smaller weights preserve the variance of the residual stream, to which 2 · layers outputs are
    # added.
    into_residual = 0.02 / math.sqrt(2 * config.layers)
    deviations = {"embedding.weight": 0.02, "positions.weight": 0.02}
    shapes: dict[str, tuple[int, ...]] = {
        "embedding.weight": (config.vocabulary, c),
        "positions.weight": (config.length, c),
    }
    for block in (f"layers.{number}" for number in range(config.layers)):
        shapes |= {
            f"{block}.norm1.weight": (c,),
            f"{block}.norm1.bias": (c,),
            f"{block}.self_attn.in_proj_weight": (c, 3, c),
            f"{block}.self_attn.in_proj_bias": (3, c),
            f"{block}.self_attn.out_proj.weight": (c, c),
            f"{block}.self_attn.out_proj.bias": (c,),
            f"{block}.norm2.weight": (c,),
            f"{block}.norm2.bias": (c,),
            f"{block}.linear1.weight": (c, 4 * c),
            f"{block}.linear1.bias": (4 * c,),
            f"{block}.linear2.weight": (4 * c, c),
            f"{block}.linear2.bias": (c,),
        }
        deviations |= {f"{block}.self_attn.in_proj_weight": 0.02, f"{block}.linear1.weight": 0.02}
        deviations |= dict.fromkeys(
            (f"{block}.self_attn.out_proj.weight", f"{block}.linear2.weight"), into_residual
        )
    shapes |= {"norm.weight": (c,), "norm.bias": (c,)}
    weights = {}
    for name, shape in shapes.items():
        if name in deviations:
            # A generator for each name, so that the order of the names does not matter.
            rng = np.random.default_rng((seed, zlib.crc32(name.encode())))
            initial = rng.standard_normal(shape) * deviations[name]
        else:
            initial = np.ones(shape) if name.endswith(".weight") else np.zeros(shape)
        weights[name] = xp.asarray(initial, dtype=dtype)
    return weights


# ---------------------------------------------------------------------------------------------------- layers
# Each forward function returns the output, and the values that the backward function needs. A
# backward function takes dy, the gradient with respect to the output. It writes the gradients of
# the weights to ``grads`` and returns the gradient with respect to x.


def linear(w: Tensors, name: str, x: Array) -> Array:
    """Return x W + b: (B, T, inputs) → (B, T, outputs). The names of W and b in ``w`` begin with
    ``name``.
    """
    weight = w[f"{name}weight"]
    return x @ weight.reshape(len(weight), -1) + w[f"{name}bias"].ravel()


def linear_backward(w: Tensors, grads: Tensors, name: str, dy: Array, x: Array) -> Array:
    weight = w[f"{name}weight"]
    bias = w[f"{name}bias"]
    # The array has the shape (B · T, ...).
    rows = x.reshape(-1, x.shape[-1])
    dy_rows = dy.reshape(-1, dy.shape[-1])
    grads[f"{name}weight"] = (rows.T @ dy_rows).reshape(weight.shape)
    grads[f"{name}bias"] = dy_rows.sum(axis=0).reshape(bias.shape)
    return dy @ weight.reshape(len(weight), -1).T


def norm(w: Tensors, name: str, x: Array) -> tuple[Array, tuple[Array, Array]]:
    """Return the layer norm of x (B, T, C) over its last axis, and two arrays for
    ``norm_backward``.
    """
    centered = x - x.mean(axis=-1, keepdims=True)
    inverse = 1 / xp.sqrt((centered * centered).mean(axis=-1, keepdims=True) + 1e-5)
    unit = centered * inverse
    return unit * w[f"{name}.weight"] + w[f"{name}.bias"], (unit, inverse)


def norm_backward(
    w: Tensors, grads: Tensors, name: str, dy: Array, saved: tuple[Array, Array]
) -> Array:
    unit, inverse = saved
    grads[f"{name}.weight"] = (dy * unit).sum(axis=(0, 1))
    grads[f"{name}.bias"] = dy.sum(axis=(0, 1))
    dunit = dy * w[f"{name}.weight"]
    # The norm removes these two components of any change of x.
    along_ones = dunit.mean(axis=-1, keepdims=True)
    along_unit = unit * (dunit * unit).mean(axis=-1, keepdims=True)
    return (dunit - along_ones - along_unit) * inverse


_A = math.sqrt(2 / math.pi)
_B = 0.044715


def gelu(x: Array) -> Array:
    """Return GELU of x by the tanh approximation: ½ x (1 + tanh(√(2/π) (x + 0.044715 x³)))."""
    return 0.5 * x * (1 + xp.tanh(_A * (x + _B * x * x * x)))


def gelu_backward(dy: Array, x: Array) -> Array:
    tanh = xp.tanh(_A * (x + _B * x * x * x))
    return dy * 0.5 * (1 + tanh + x * (1 - tanh * tanh) * _A * (1 + 3 * _B * x * x))


def attention(w: Tensors, name: str, x: Array, heads: int) -> tuple[Array, tuple[Array, ...]]:
    """Return causal self-attention, (B, T, C) → (B, T, C), and the arrays for
    ``attention_backward``.
    """
    b, t, c = x.shape
    qkv = linear(w, f"{name}.in_proj_", x).reshape(b, t, 3, heads, c // heads)
    q, k, v = qkv.transpose(2, 0, 3, 1, 4)  # (B, H, T, D) each
    scores = q @ k.swapaxes(-1, -2) / math.sqrt(c // heads)  # (B, H, T, T)
    scores[..., xp.triu(xp.ones((t, t), bool), 1)] = -math.inf
    probs = softmax(scores)
    joined = (probs @ v).swapaxes(1, 2).reshape(b, t, c)
    return linear(w, f"{name}.out_proj.", joined), (x, q, k, v, probs, joined)


def attention_backward(
    w: Tensors, grads: Tensors, name: str, dy: Array, saved: tuple[Array, ...]
) -> Array:
    x, q, k, v, probs, joined = saved
    b, heads, t, d = q.shape
    djoined = linear_backward(w, grads, f"{name}.out_proj.", dy, joined)
    do = djoined.reshape(b, t, heads, d).swapaxes(1, 2)
    dv = probs.swapaxes(-1, -2) @ do
    dprobs = do @ v.swapaxes(-1, -2)
    dscores = probs * (dprobs - (probs * dprobs).sum(axis=-1, keepdims=True)) / math.sqrt(d)
    dq = dscores @ k
    dk = dscores.swapaxes(-1, -2) @ q
    dqkv = xp.stack([dq, dk, dv]).transpose(1, 3, 0, 2, 4).reshape(b, t, 3 * heads * d)
    return linear_backward(w, grads, f"{name}.in_proj_", dqkv, x)


def softmax(x: Array) -> Array:
    """Return the softmax over the last axis. Subtracting the maximum prevents overflow."""
    exps = xp.exp(x - x.max(axis=-1, keepdims=True))
    return exps / exps.sum(axis=-1, keepdims=True)


def block(w: Tensors, name: str, x: Array, heads: int) -> tuple[Array, tuple[Any, ...]]:
    """Return y + feed_forward(norm(y)) with y = x + attention(norm(x)), and values for
    ``block_backward``.
    """
    normed1, saved_norm1 = norm(w, f"{name}.norm1", x)
    attended, saved_attention = attention(w, f"{name}.self_attn", normed1, heads)
    x = x + attended
    normed2, saved_norm2 = norm(w, f"{name}.norm2", x)
    up = linear(w, f"{name}.linear1.", normed2)
    active = gelu(up)
    x = x + linear(w, f"{name}.linear2.", active)
    return x, (saved_norm1, saved_attention, saved_norm2, normed2, up, active)


def block_backward(
    w: Tensors, grads: Tensors, name: str, dx: Array, saved: tuple[Any, ...]
) -> Array:
    saved_norm1, saved_attention, saved_norm2, normed2, up, active = saved
    dup = gelu_backward(linear_backward(w, grads, f"{name}.linear2.", dx, active), up)
    dnormed2 = linear_backward(w, grads, f"{name}.linear1.", dup, normed2)
    dx = dx + norm_backward(w, grads, f"{name}.norm2", dnormed2, saved_norm2)
    dnormed1 = attention_backward(w, grads, f"{name}.self_attn", dx, saved_attention)
    return dx + norm_backward(w, grads, f"{name}.norm1", dnormed1, saved_norm1)


# ----------------------------------------------------------------------------------------------------- model


def loss_and_grads(
    w: Tensors, config: Config, tokens: Array, targets: Array
) -> tuple[float, Tensors]:
    """Return the mean cross-entropy of the next tokens, in nats, and its gradients.

    Args:
        tokens: (B, T) integers in [0, V).
        targets: (B, T) next token of each token.
    """
    blocks = [f"layers.{number}" for number in range(config.layers)]
    b, t = tokens.shape

    x = w["embedding.weight"][tokens] + w["positions.weight"][:t]  # (B, T, C)
    saved = []
    for name in blocks:
        x, block_saved = block(w, name, x, config.heads)
        saved.append(block_saved)
    last, saved_norm = norm(w, "norm", x)
    # The output layer shares the weights of the embedding.
    logits = last @ w["embedding.weight"].T  # (B, T, V)
    probs = softmax(logits)
    target_index = (*xp.ogrid[:b, :t], targets)  # into (B, T, V)
    loss = -float(xp.log(probs[target_index]).mean())

    grads: Tensors = {}
    dlogits = probs
    dlogits[target_index] -= 1
    dlogits /= b * t
    dlast = dlogits @ w["embedding.weight"]
    dx = norm_backward(w, grads, "norm", dlast, saved_norm)
    for name, block_saved in zip(reversed(blocks), reversed(saved), strict=True):
        dx = block_backward(w, grads, name, dx, block_saved)
    grads["positions.weight"] = xp.zeros_like(w["positions.weight"])
    grads["positions.weight"][:t] = dx.sum(axis=0)
    # The shared weights have two gradients: as the output layer and as the embedding.
    grads["embedding.weight"] = dlogits.reshape(b * t, -1).T @ last.reshape(b * t, -1)
    xp.add.at(grads["embedding.weight"], tokens, dx)
    return loss, grads


class AdamW:
    """Adam with decoupled weight decay (Loshchilov and Hutter, 2019, algorithm 2)."""

    def __init__(
        self,
        w: Tensors,
        *,
        beta1: float = 0.9,
        beta2: float = 0.999,
        eps: float = 1e-8,
        decay: float = 0.01,
    ) -> None:
        self.beta1 = beta1
        self.beta2 = beta2
        self.eps = eps
        self.decay = decay
        self.mean = {name: xp.zeros_like(weight) for name, weight in w.items()}
        self.square = {name: xp.zeros_like(weight) for name, weight in w.items()}
        self.steps = 0

    def step(self, w: Tensors, grads: Tensors, lr: float) -> None:
        """Update the weights ``w`` in place with their gradients, at the learning rate ``lr``."""
        self.steps += 1
        for name, grad in grads.items():
            mean = self.mean[name]
            square = self.square[name]
            weight = w[name]
            mean += (1 - self.beta1) * (grad - mean)
            square += (1 - self.beta2) * (grad * grad - square)
            # Correct the bias of the moments, which start at 0.
            unbiased_mean = mean / (1 - self.beta1**self.steps)
            unbiased_square = square / (1 - self.beta2**self.steps)
            if weight.ndim > 1 and not name.endswith("bias"):
                weight *= 1 - lr * self.decay
            weight -= lr * unbiased_mean / (xp.sqrt(unbiased_square) + self.eps)


# --------------------------------------------------------------------------------------------------
# training


def windows(
    text: Array, config: Config, batch: int, rng: np.random.Generator
) -> tuple[Array, Array]:
    """Return tokens (batch, T) from random positions in the text, and the next token of each
    token.
    """
    starts = rng.integers(len(text) - config.length, size=batch)
    samples = text[starts[:, None] + np.arange(config.length + 1)].astype("int64")
    return xp.asarray(samples[:, :-1]), xp.asarray(samples[:, 1:])


def train(text: Array, config: Config, *, steps: int, batch: int, lr: float, seed: int) -> Tensors:
    """Train a model on ``text``, an array of bytes, print each step's loss, and return the
    weights.
    """
    rng = np.random.default_rng(seed)
    w = init(config, seed)
    optimizer = AdamW(w)
    for step in range(1, steps + 1):
        loss, grads = loss_and_grads(w, config, *windows(text, config, batch, rng))
        optimizer.step(w, grads, lr)
        sys.stdout.write(f"step {step:5}  loss {loss:.4f}\n")
    return w


def main(argv: Sequence[str]) -> None:
    """Train on the bytes of the file in the command line ``argv``."""
    global xp  # noqa: PLW0603
    parser = argparse.ArgumentParser(
        prog="python -m payload.minimal", description="Train a small GPT."
    )
    parser.add_argument("text", type=Path, help="file whose bytes are the tokens")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=16, help="samples per step")
    parser.add_argument("--lr", type=float, default=1e-3, help="learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gpu", action="store_true", help="compute with CuPy")
    args = parser.parse_args(argv)
    if args.gpu:
        import cupy as xp  # noqa: PLC0415
    text = np.frombuffer(args.text.read_bytes(), np.uint8)
    train(text, Config(), steps=args.steps, batch=args.batch, lr=args.lr, seed=args.seed)


if __name__ == "__main__":
    main(sys.argv[1:])
