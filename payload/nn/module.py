"""The layer interface: parameters, the tape between forward and backward, and units of layers.

B is the number of samples in the current micro-batch; it may be 0. ``forward`` pushes the values
that ``backward`` needs onto a tape. ``backward`` takes the gradient dy of the loss with respect to
the layer's output y, *adds* to the gradients of the layer's parameters, and returns the gradient dx
with respect to its input x. dy has the shape of y, and dx that of x. A layer itself stores nothing
about a micro-batch, so several micro-batches can be in flight, and forward passes can be repeated.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from payload.comm.base import Communicator, Solo
from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.nn.form import Shape, TorchForm, identity


@dataclass(frozen=True, slots=True)
class RandomState:
    """Seed of a micro-batch's random numbers: the same for any layout of ranks and in repeated
    passes.
    """

    seed: int
    iteration: int
    # Positions of the samples in the global batch: (B,) uint32.
    samples: Array

    def words(self, stream: str) -> tuple[int | Array, int | Array]:
        """Return two random numbers of 32 bits that a purpose has for all samples. stream: its
        name, usually that of a layer.
        """
        words = hashlib.blake2b(
            f"{self.seed} {self.iteration} {stream}".encode(), digest_size=8
        ).digest()
        return int.from_bytes(words[:4], "little"), int.from_bytes(words[4:], "little")


@dataclass(slots=True)
class Tape:
    """Stack of saved values for a micro-batch in flight: ``forward`` pushes and ``backward`` pops.

    The backward pass runs layers in reverse order, so each layer finds its own values on top of the
    stack.
    """

    training: bool = True
    # Dropout is off if there is no draw of random numbers.
    draw: RandomState | None = None
    # True while a forward pass is repeated: running statistics have already counted this
    # micro-batch.
    recompute: bool = False
    _stack: list[tuple[Any, ...]] = field(default_factory=list)

    def push(self, *values: Any) -> None:
        """Save values for ``backward``. Does nothing in evaluation."""
        if self.training:
            self._stack.append(values)

    def pop(self) -> tuple[Any, ...]:
        """Remove and return the values that were pushed last."""
        return self._stack.pop()

    def fork(self, *, recompute: bool) -> Tape:
        """Return an empty tape for the same micro-batch. recompute: whether to repeat a forward
        pass.
        """
        return Tape(self.training, self.draw, recompute)

    @property
    def nbytes(self) -> int:
        """Bytes that this tape keeps allocated. Memory shared by several views counts once."""
        owners = {id(owner): owner.nbytes for values in self._stack for owner in _owners(values)}
        return sum(owners.values())


def _owners(value: Any) -> Iterator[Array]:
    if isinstance(value, tuple | list):
        for part in value:
            yield from _owners(part)
    elif hasattr(value, "nbytes"):
        base = getattr(value, "base", None)
        yield value if base is None else base


Init = Callable[[np.random.Generator, Shape], Array]
"""Draws the initial values of a whole parameter, on the host."""


class Parameter:
    """A trainable tensor, or this rank's part of it.

    ``value`` and ``grad`` are views, of shape ``shape``, into flat buffers. The buffers' owner sets
    both, and may replace both between any two layers, so a layer must read both again in each pass.
    """

    value: Array
    grad: Array

    def __init__(
        self,
        context: LayerContext,
        name: str,
        full_shape: Shape,
        init: Init,
        *,
        axis: int | None = None,
        decay: bool | None = None,
        form: TorchForm | None = None,
        rows: int | None = None,
    ) -> None:
        """Describe the parameter; the owner of the buffers binds ``value`` and ``grad`` later.

        Args:
            name: unique in the model, as in PyTorch. Initial values depend only on the name and the
                seed.
            full_shape: shape of the whole tensor, over all tensor-parallel ranks.
            axis: axis that is split over tensor-parallel ranks. Default: every rank holds the whole
                tensor.
            decay: whether weight decay applies. Default: only to tensors of two or more axes.
            form: conversion to PyTorch's layout, without padding. Default: the same layout.
            rows: number of rows (first axis) before the padding, which stays 0. Default: no
                padding.

        Raises:
            UsageError: ``axis`` cannot be divided evenly among the tensor-parallel ranks.
        """
        self.context = context
        self.name = name
        self.full_shape = full_shape
        self.init = init
        self.axis = axis
        self.decay = len(full_shape) > 1 if decay is None else decay
        self.rows = full_shape[0] if rows is None else rows
        self.form = form or identity((self.rows, *full_shape[1:]))
        # True until the first gradient of an iteration is written.
        self.grad_unset = True
        size = 1 if axis is None else context.tp.size
        if axis is not None and full_shape[axis] % size:
            raise UsageError(
                f"--tp {size} does not divide the {full_shape[axis]} rows or columns of {name}; "
                f"use a divisor of {full_shape[axis]}",
                code="tp-not-divisible",
            )
        self.shape: Shape = tuple(n // size if i == axis else n for i, n in enumerate(full_shape))

    @property
    def size(self) -> int:
        """Number of elements in this rank's part."""
        return math.prod(self.shape)

    def initial_value(self, seed: int) -> Array:
        """Return this rank's part of the initial values, with padding: float64, ``shape``, on the
        host.
        """
        rng = np.random.default_rng((seed, zlib.crc32(self.name.encode())))
        return self.part(self.padded(self.init(rng, (self.rows, *self.full_shape[1:]))))

    def padded(self, whole: Array) -> Array:
        """Pad a whole tensor of ``rows`` rows with zeros to ``full_shape``."""
        missing = self.full_shape[0] - len(whole)
        return np.pad(whole, [(0, missing), *[(0, 0)] * (whole.ndim - 1)]) if missing else whole

    def from_torch(self, theirs: Array) -> Array:
        """Convert PyTorch's tensor to ``full_shape``, usually as a view. Raise ValueError if sizes
        differ.
        """
        return self.padded(self.form.from_torch(theirs).reshape(self.rows, *self.full_shape[1:]))

    def part(self, full: Array) -> Array:
        """Return this rank's part of a whole tensor, as a view."""
        if self.axis is None:
            return full
        start = self.context.tp.rank * self.shape[self.axis]
        index = (slice(None),) * self.axis + (slice(start, start + self.shape[self.axis]),)
        return full[index]

    def add(self, gradient: Array) -> None:
        """Add a gradient to ``grad``. Its shape may differ, but not the order of its elements."""
        gradient = gradient.reshape(self.shape)
        if self.grad_unset:
            self.grad[...] = gradient
            self.grad_unset = False
        else:
            self.grad += gradient

    def add_product(self, left: Array, right: Array, bias: Parameter | None = None) -> None:
        """Add leftᵀ @ right to ``grad``: left (N, I), right (N, O), and ``grad`` with I rows of O
        numbers.

        bias: receives the sum of the rows of ``right``.
        """
        out = self.grad.reshape(left.shape[1], right.shape[1])
        sums = self.context.device.add_product(
            left.T, right, out, add=not self.grad_unset, column_sums=bias is not None
        )
        self.grad_unset = False
        if bias is not None and sums is not None:
            bias.add(sums)

    def zero_unset_grad(self) -> None:
        """Set the gradient to zero if nothing was added to it in this iteration."""
        if self.grad_unset:
            self.grad[...] = 0
            self.grad_unset = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a parameter, stored in the elements [start, stop) of a flat array."""

    parameter: Parameter
    start: int
    stop: int
    # Position of element ``start`` in this rank's flattened part of the parameter.
    offset: int = 0


def zeros(_: np.random.Generator, shape: Shape) -> Array:
    return np.zeros(shape)


def ones(_: np.random.Generator, shape: Shape) -> Array:
    return np.ones(shape)


def normal(std: float) -> Init:
    """Return an initializer that draws from a normal distribution with mean 0."""
    return lambda rng, shape: rng.standard_normal(shape) * std


def uniform(limit: float) -> Init:
    """Return an initializer that draws uniformly between -limit and limit."""
    return lambda rng, shape: rng.uniform(-limit, limit, shape)


@dataclass(frozen=True, slots=True)
class LayerContext:
    """Arguments for creating any layer: the device, and communicators for tensor and data
    parallelism.
    """

    device: Device
    # Ranks that hold parts of the same layers.
    tp: Communicator = field(default_factory=Solo)
    # Ranks that hold different samples of the same batch.
    dp: Communicator = field(default_factory=Solo)


class Layer(Protocol):
    """Interface of all layers."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """Trainable parameters, always in the same order."""

    def forward(self, x: Array, tape: Tape) -> Array:
        """Return the output, and push the values that ``backward`` needs onto the tape."""

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Add to the parameters' gradients, and return the gradient with respect to x."""


class Sequential:
    """Layers that run in the given order."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.parameters: Sequence[Parameter] = [p for layer in layers for p in layer.parameters]
        self.state = state_of(layers)
        self.communicates = any(getattr(layer, "communicates", False) for layer in layers)

    def forward(self, x: Array, tape: Tape) -> Array:
        for layer in self.layers:
            x = layer.forward(x, tape)
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:
        for layer in reversed(self.layers):
            dy = layer.backward(dy, tape)
        return dy


class Residual(Sequential):
    """y = x + f(x), with f a sequence of layers. The first must not overwrite x, the last not
    dy.
    """

    def forward(self, x: Array, tape: Tape) -> Array:
        y = super().forward(x, tape)
        y += x
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        dx = super().backward(dy, tape)
        dx += dy
        return dx


class Flatten:
    """Flatten each sample to a vector, or to a sequence of vectors, such as the rows of an
    image.
    """

    parameters: Sequence[Parameter] = ()

    def __init__(self, step: int | None = None) -> None:
        """Create the layer. step: size of each vector of a sequence. Default: a single vector per
        sample.
        """
        self._step = step

    def forward(self, x: Array, tape: Tape) -> Array:
        """Map x (B, ...) to (B, numbers) or (B, steps, step)."""
        tape.push(x.shape)
        numbers = math.prod(x.shape[1:])
        return x.reshape(
            len(x), *((numbers // self._step, self._step) if self._step else (numbers,))
        )

    def backward(self, dy: Array, tape: Tape) -> Array:
        (shape,) = tape.pop()
        return dy.reshape(shape)


def state_of(layers: Sequence[Layer]) -> dict[str, Array]:
    """Return the layers' arrays that gradients do not train, such as running statistics, by unique
    name.

    Checkpoints contain these arrays. To restore a checkpoint, overwrite the arrays in place.
    """
    return {name: array for layer in layers for name, array in getattr(layer, "state", {}).items()}


@dataclass(frozen=True, slots=True)
class Unit:
    """A group of layers, such as a Transformer block, on a single pipeline stage. Ranks gather
    weights, sum gradients and recompute activations for whole units. A unit must not change its
    input array."""

    name: str
    layer: Layer
    # FLOPs of matrix products in the forward pass of a single sample; a multiply-add counts as 2.
    flops: float = 0.0


def torch_shapes(units: Sequence[Unit]) -> dict[str, Shape]:
    """Return the PyTorch shape of each parameter and each state array of a whole model, by name."""
    layers = [unit.layer for unit in units]
    shapes = {p.name: p.form.shape for layer in layers for p in layer.parameters}
    return shapes | {name: tuple(array.shape) for name, array in state_of(layers).items()}


class Recompute(Sequential):
    """Layers that save only their input on the tape, to save memory (Chen et al.,
    arXiv:1604.06174).

    The layers' forward pass runs again before their backward pass. This is a third more work. The
    gradients are bit-identical.
    """

    def forward(self, x: Array, tape: Tape) -> Array:
        tape.push(x)
        return super().forward(x, tape.fork(recompute=False))

    def backward(self, dy: Array, tape: Tape) -> Array:
        (x,) = tape.pop()
        replayed = tape.fork(recompute=True)
        super().forward(x, replayed)
        return super().backward(dy, replayed)


def recomputed(units: Sequence[Unit]) -> list[Unit]:
    """Wrap all units but the last in ``Recompute``. The last unit is needed again at once."""
    return [*(replace(unit, layer=Recompute(unit.layer)) for unit in units[:-1]), *units[-1:]]
