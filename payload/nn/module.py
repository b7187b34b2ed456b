"""What a layer is: its parameters, the tape between its two passes, and units of layers.

B is the number of samples in the micro-batch at hand; it may be 0. ``forward`` pushes onto the tape what
``backward`` pops. ``backward`` takes the gradient of the loss by the layer's output, *adds* to the gradients
of its parameters, and gives the gradient by its input. A layer keeps nothing of a micro-batch in itself:
several can be in flight, and a part can be run again.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import numpy as np

from payload.comm.base import Communicator, Solo
from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.nn.form import Form, Shape, same


@dataclass(frozen=True, slots=True)
class Draw:
    """Whence one micro-batch's random numbers come: the same on any layout, and again in a recompute."""

    seed: int
    iteration: int
    samples: Array  # (B,) uint32 on the device: each sample's place in the global batch


@dataclass(slots=True)
class Tape:
    """A stack, one for each micro-batch in flight: layers push in ``forward`` and pop in ``backward``.

    Layers run backward in the reverse order of forward, so that each finds its own on top.
    """

    training: bool = True
    draw: Draw | None = None  # None: dropout is off
    again: bool = False  # in a recompute: running statistics and the like have seen this micro-batch
    _stack: list[tuple[Any, ...]] = field(default_factory=list)

    def push(self, *values: Any) -> None:
        """Keep values for ``backward``; an evaluation keeps none."""
        if self.training:
            self._stack.append(values)

    def pop(self) -> tuple[Any, ...]:
        """The values that were pushed last."""
        return self._stack.pop()

    def fork(self, *, again: bool) -> Tape:
        """An empty tape of the same micro-batch, for a part of it: first run, or run again."""
        return Tape(self.training, self.draw, again)

    @property
    def nbytes(self) -> int:
        """Memory that it keeps from being freed; what several views look into is counted once."""
        owners = {id(owner): owner.nbytes for values in self._stack for owner in _owners(values)}
        return sum(owners.values())


def _owners(value: Any) -> Iterator[Array]:
    """The arrays that own the memory of the arrays in a value."""
    if isinstance(value, tuple | list):
        for part in value:
            yield from _owners(part)
    elif hasattr(value, "nbytes"):
        base = getattr(value, "base", None)
        yield value if base is None else base


Init = Callable[[np.random.Generator, Shape], Array]
"""Draws the first values of a whole parameter, on the host."""


class Parameter:
    """One tensor that is learned, or this rank's part of it.

    ``value`` and ``grad`` are views of ``shape`` into flat buffers. Whoever holds the buffers binds them, and
    may bind others at any time between two layers: a layer must ask for them anew in each pass.
    """

    value: Array
    grad: Array

    def __init__(
        self,
        context: Context,
        name: str,
        full_shape: Shape,
        init: Init,
        *,
        axis: int | None = None,
        decay: bool | None = None,
        form: Form | None = None,
        rows: int | None = None,
    ) -> None:
        """
        Args:
            name: unique in the model, as PyTorch has it; first values depend on it and the seed alone,
                whatever the layout.
            full_shape: of the whole tensor, over all tensor-parallel ranks.
            axis: that along which tensor-parallel ranks hold parts; None: each holds the whole.
            decay: whether weight decay applies; by default to matrices and larger, not to biases and gains.
            form: how PyTorch has it, without what is padding; by default the same.
            rows: those of the first axis that are no padding; by default all. Padding is 0, and stays it.

        Raises:
            UsageError: ``axis`` cannot be divided evenly.
        """
        self.context, self.name, self.full_shape, self.init, self.axis = context, name, full_shape, init, axis
        self.decay = len(full_shape) > 1 if decay is None else decay
        self.rows = full_shape[0] if rows is None else rows
        self.form = form or same((self.rows, *full_shape[1:]))
        self.fresh = True  # the gradient of this iteration is still to be set
        size = 1 if axis is None else context.tp.size
        if axis is not None and full_shape[axis] % size:
            raise UsageError(
                f"--tp {size} does not divide the {full_shape[axis]} rows or columns of {name}",
                code="tp-not-divisible",
            )
        self.shape: Shape = tuple(n // size if i == axis else n for i, n in enumerate(full_shape))

    @property
    def size(self) -> int:
        """Numbers in this rank's part."""
        return math.prod(self.shape)

    def initial_value(self, seed: int) -> Array:
        """This rank's part of the first values, float64 on the host: of ``shape``."""
        return self.part(self.padded(self.drawn(seed)))

    def drawn(self, seed: int) -> Array:
        """All first values, without padding, float64 on the host."""
        rng = np.random.default_rng((seed, zlib.crc32(self.name.encode())))
        return self.init(rng, (self.rows, *self.full_shape[1:]))

    def padded(self, whole: Array) -> Array:
        """The whole tensor, of ``rows``, in its ``full_shape``."""
        missing = self.full_shape[0] - len(whole)
        return np.pad(whole, [(0, missing), *[(0, 0)] * (whole.ndim - 1)]) if missing else whole

    def from_torch(self, theirs: Array) -> Array:
        """PyTorch's tensor in the ``full_shape``; as a rule a view.

        Raises:
            ValueError: it is of another size.
        """
        return self.padded(self.form.from_torch(theirs).reshape(self.rows, *self.full_shape[1:]))

    def part(self, full: Array) -> Array:
        """This rank's part of the whole tensor."""
        if self.axis is None:
            return full
        start = self.context.tp.rank * self.shape[self.axis]
        index = (slice(None),) * self.axis + (slice(start, start + self.shape[self.axis]),)
        return full[index]

    def add(self, gradient: Array) -> None:
        """Add to the gradient: any shape of the same size and order."""
        gradient = gradient.reshape(self.shape)
        if self.fresh:
            self.grad[...] = gradient
            self.fresh = False
        else:
            self.grad += gradient

    def add_product(self, left: Array, right: Array) -> None:
        """Add left ᵀ @ right to the gradient: (N, I), (N, O) for a parameter whose rows are of O numbers."""
        device = self.context.device
        if self.fresh:
            device.matmul(left.T, right, out=self.grad.reshape(left.shape[1], right.shape[1]))
            self.fresh = False
        else:
            self.grad += device.matmul(left.T, right, dtype=self.grad.dtype).reshape(self.shape)

    def settle(self) -> None:
        """Make the gradient zero if nothing was added to it in this iteration."""
        if self.fresh:
            self.grad[...] = 0
            self.fresh = False


@dataclass(frozen=True, slots=True)
class Segment:
    """A piece of a parameter in a flat array: ``[start, stop)`` there begins at ``offset`` of the parameter's
    own part, flattened."""

    parameter: Parameter
    start: int
    stop: int
    offset: int = 0


def zeros(_: np.random.Generator, shape: Shape) -> Array:
    """For biases."""
    return np.zeros(shape)


def ones(_: np.random.Generator, shape: Shape) -> Array:
    """For gains."""
    return np.ones(shape)


def normal(std: float) -> Init:
    """A normal distribution around 0."""
    return lambda rng, shape: rng.standard_normal(shape) * std


def uniform(limit: float) -> Init:
    """Evenly between -limit and limit."""
    return lambda rng, shape: rng.uniform(-limit, limit, shape)


@dataclass(frozen=True, slots=True)
class Context:
    """What layers are built with: where they compute, and with whom they share a tensor or a statistic."""

    device: Device
    tp: Communicator = field(default_factory=Solo)  # the ranks that hold parts of the same layers
    dp: Communicator = field(default_factory=Solo)  # the ranks that hold other samples of the same batch


class Layer(Protocol):
    """One step of a network."""

    @property
    def parameters(self) -> Sequence[Parameter]:
        """What it learns, always in the same order."""

    def forward(self, x: Array, tape: Tape) -> Array: ...

    def backward(self, dy: Array, tape: Tape) -> Array: ...


class Sequential:
    """Layers one after the other."""

    def __init__(self, *layers: Layer) -> None:
        self.layers = layers
        self.parameters: Sequence[Parameter] = [p for layer in layers for p in layer.parameters]
        self.state = state_of(layers)

    def forward(self, x: Array, tape: Tape) -> Array:
        for layer in self.layers:
            x = layer.forward(x, tape)
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:
        for layer in reversed(self.layers):
            dy = layer.backward(dy, tape)
        return dy


class Residual(Sequential):
    """y = x + f(x), f being layers one after the other. The first must not change x, nor the last dy."""

    def forward(self, x: Array, tape: Tape) -> Array:
        """Same shape."""
        y = super().forward(x, tape)
        y += x
        return y

    def backward(self, dy: Array, tape: Tape) -> Array:
        """Same shape."""
        dx = super().backward(dy, tape)
        dx += dy
        return dx


class Flatten:
    """All numbers of a sample in a row, or in steps: of an image its rows."""

    parameters: Sequence[Parameter] = ()

    def __init__(self, step: int | None = None) -> None:
        """``step``: numbers in one."""
        self._step = step

    def forward(self, x: Array, tape: Tape) -> Array:
        """(B, ...) → (B, numbers), or (B, steps, step)"""
        tape.push(x.shape)
        numbers = math.prod(x.shape[1:])
        return x.reshape(len(x), *((numbers // self._step, self._step) if self._step else (numbers,)))

    def backward(self, dy: Array, tape: Tape) -> Array:
        (shape,) = tape.pop()
        return dy.reshape(shape)


def state_of(layers: Sequence[Layer]) -> dict[str, Array]:
    """What layers keep in ``state`` that is not learned by gradients, such as running statistics: arrays by
    unique name, which are saved with the parameters, and restored in place."""
    return {name: array for layer in layers for name, array in getattr(layer, "state", {}).items()}


@dataclass(frozen=True, slots=True)
class Unit:
    """A run of layers, such as one Transformer block: what is placed on a pipeline stage, gathered and freed,
    reduced and recomputed as a whole. Between two units passes one array; the second leaves it as it was."""

    name: str
    layer: Layer
    flops: float = 0.0  # of one sample's forward pass through its matrix products, each multiply-add as 2


def torch_shapes(units: Sequence[Unit]) -> dict[str, Shape]:
    """The shapes that PyTorch's tensors of a whole model have: of its parameters and of layers' state."""
    layers = [unit.layer for unit in units]
    shapes = {p.name: p.form.shape for layer in layers for p in layer.parameters}
    return shapes | {name: tuple(array.shape) for name, array in state_of(layers).items()}


class Recompute(Sequential):
    """Layers that leave nothing but their input on the tape: memory for computation (Chen et al., "Training
    Deep Nets with Sublinear Memory Cost", 2016).

    Their forward pass is run again before their backward pass: about a third more computation, the gradients
    the same to the bit.
    """

    def forward(self, x: Array, tape: Tape) -> Array:
        tape.push(x)
        return super().forward(x, tape.fork(again=False))

    def backward(self, dy: Array, tape: Tape) -> Array:
        (x,) = tape.pop()
        again = tape.fork(again=True)
        super().forward(x, again)
        return super().backward(dy, again)


def recomputed(units: Sequence[Unit]) -> list[Unit]:
    """The units of a whole model, but its last, whose backward pass follows its forward pass at once."""
    return [*(replace(unit, layer=Recompute(unit.layer)) for unit in units[:-1]), *units[-1:]]
