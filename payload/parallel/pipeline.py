"""Pipeline parallelism: the units of each stage, the data that passes between stages, and the
schedule.

Each rank runs its stage, sends activations to the next stage and gradients to the previous stage.
With a single stage, a rank runs micro-batch after micro-batch and adds up the gradients.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import numpy as np

from payload.comm.base import Communicator, Pending, Solo
from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.nn.form import Shape
from payload.nn.loss import LossSums, SoftmaxCrossEntropy
from payload.nn.module import Parameter, RandomState, Segment, Sequential, Tape, Unit
from payload.parallel.captured import CapturedPasses
from payload.parallel.zero import FlatStorage

_BLOCK = 1 << 20
"""Shared numbers that stages exchange at a time. Each other stage needs a temporary buffer of this
size.
"""
_MEMORY_WEIGHT = 1e-3
"""Weight of a unit's parameters relative to its FLOPs. Decides between splits of about equal work.
"""


def split(units: Sequence[Unit], stages: int) -> list[Sequence[Unit]]:
    """Split a model's units (groups of layers) into stages of about equal cost, or raise
    UsageError.
    """
    if stages > len(units):
        raise UsageError(
            f"--pp {stages}: the model has only {len(units)} units to split; use --pp "
            f"{len(units)} or less",
            code="too-many-stages",
        )
    # cumulative[n]: cost of the first n units.
    cumulative = list(accumulate(_costs(units), initial=0.0))
    # best[n]: cost of the most expensive stage, and where the stages begin, if the first n units
    # are split.
    best = [(math.inf, [0]), *((cost, [0]) for cost in cumulative[1:])]
    for _ in range(1, stages):
        best = [
            min(
                (
                    (max(best[cut][0], cumulative[end] - cumulative[cut]), [*best[cut][1], cut])
                    for cut in range(end)
                ),
                default=(math.inf, [0]),
            )
            for end in range(len(cumulative))
        ]
    _, cuts = best[-1]
    return [units[start:end] for start, end in pairwise([*cuts, len(units)])]


def _costs(units: Sequence[Unit]) -> list[float]:
    sizes = [sum(parameter.size for parameter in unit.layer.parameters) for unit in units]
    flops = sum(unit.flops for unit in units) or 1
    size = sum(sizes) or 1
    return [
        unit.flops / flops + _MEMORY_WEIGHT * numbers / size
        for unit, numbers in zip(units, sizes, strict=True)
    ]


class TiedParameters:
    """Parameters that units on several stages share, such as GPT's embedding, which is also its
    output layer.

    Each of these stages has a copy. All copies start equal, and are updated with the sum of all
    copies' gradients.
    """

    def __init__(self, stages: Sequence[Sequence[Unit]], pp: Communicator, device: Device) -> None:
        """Find the shared parameters. stages: the units of each stage. Every rank passes all
        stages.
        """
        self._pp = pp
        self._device = device
        users: dict[int, list[int]] = {}
        for stage, units in enumerate(stages):
            for parameter in _distinct(units):
                users.setdefault(id(parameter), []).append(stage)
        tied = [p for p in _distinct(stages[pp.rank]) if len(users[id(p)]) > 1]
        tied.sort(key=lambda parameter: parameter.name)
        self._users = {id(parameter): users[id(parameter)] for parameter in tied}
        # A layer without a computation, which only holds the shared parameters.
        holder = Sequential()
        holder.parameters = tied
        self.unit = Unit("tied", holder) if tied else None
        """This stage's shared parameters, as its first unit: same position on all stages, and
        summed last.
        """

    def counts(self, parameter: Parameter) -> bool:
        """Return whether this stage has a parameter's first copy, used in gradient norms and
        checkpoints.
        """
        return self._users.get(id(parameter), [self._pp.rank])[0] == self._pp.rank

    def sum(self, grads: Array, segments: Sequence[Segment]) -> None:
        """Replace the gradients of shared parameters by their sums over stages, bit-identical on
        all stages.

        The gradients are already sums over data-parallel ranks. Ranks at the same position in their
        stages own the same pieces of shared parameters.
        """
        for segment in segments:
            stages = self._users.get(id(segment.parameter), [])
            for start in range(segment.start, segment.stop, _BLOCK) if stages else ():
                self._sum(grads[start : min(start + _BLOCK, segment.stop)], stages)

    def _sum(self, grads: Array, stages: Sequence[int]) -> None:
        sent = [self._pp.isend(grads, stage) for stage in stages if stage != self._pp.rank]
        parts = []
        for stage in stages:
            parts.append(grads)
            if stage != self._pp.rank:
                parts[-1] = self._device.xp.empty_like(grads)
                self._pp.recv(parts[-1], stage)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        for pending in sent:
            pending.wait()
        grads[...] = total


def _distinct(units: Sequence[Unit]) -> list[Parameter]:
    return list({id(p): p for unit in units for p in unit.layer.parameters}.values())


_DTYPES = ("float32", "float64", "float16", "bfloat16")
# Numbers in a header: dtype, number of axes, and up to six sizes.
_HEADER = 8


class StageLink:
    """This rank's end of the connection to a neighbouring stage.

    Activations pass to the later stage, and gradients of the same shape come back. A header with
    shape and dtype precedes the first activation for each input shape; both ends remember the
    header. Sends do not block, so two stages can send to each other at the same time.
    """

    def __init__(self, device: Device, pp: Communicator, neighbour: int) -> None:
        self._device = device
        self._pp = pp
        self._neighbour = neighbour
        self._activation_types: dict[Shape, tuple[Shape, str]] = {}
        self._sent: deque[Pending] = deque()

    def send_activation(self, y: Array, inputs: Shape) -> None:
        """Send an activation to the later stage. inputs: shape of the inputs of the model's first
        stage.
        """
        if inputs not in self._activation_types:
            self._activation_types[inputs] = y.shape, y.dtype.name
            header = [_DTYPES.index(y.dtype.name), y.ndim, *y.shape]
            self._send(self._device.asarray(np.array(header + [0] * (_HEADER - len(header)))))
        self._send(y)

    def receive_activation(self, inputs: Shape) -> Array:
        if inputs not in self._activation_types:
            device_header = self._device.xp.empty(_HEADER, "int64")
            self._pp.recv(device_header, self._neighbour)
            dtype, axes, *sizes = self._device.to_host(device_header).tolist()
            self._activation_types[inputs] = tuple(sizes[:axes]), _DTYPES[dtype]
        return self._receive(inputs)

    def send_gradient(self, dx: Array, inputs: Shape) -> None:
        """Send the gradient of a received activation to the earlier stage."""
        _, dtype = self._activation_types[inputs]
        self._send(dx.astype(dtype, copy=False))

    def receive_gradient(self, inputs: Shape) -> Array:
        return self._receive(inputs)

    def drain(self, unsent: int = 0) -> None:
        """Wait until at most ``unsent`` of this link's messages are still being sent."""
        while len(self._sent) > unsent:
            self._sent.popleft().wait()

    def _send(self, array: Array) -> None:
        while self._sent and self._sent[0].test():
            self._sent.popleft()
        self._sent.append(self._pp.isend(self._device.xp.ascontiguousarray(array), self._neighbour))

    def _receive(self, inputs: Shape) -> Array:
        shape, dtype = self._activation_types[inputs]
        array: Array = self._device.xp.empty(shape, dtype)
        self._pp.recv(array, self._neighbour)
        return array


_NOTHING = LossSums(0.0, 0.0, 0.0)
# Number of micro-batches that an evaluation may be ahead of a slower stage.
_AHEAD = 2


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch on the device. The first stage uses the inputs, the last stage the targets."""

    inputs: Array  # (B, ...)
    targets: Array  # (B,) or (B, ...)
    # Positions of the samples in the global batch: (B,) uint32.
    samples: Array


class Stage:
    """A pipeline stage: consecutive units (groups of layers), and the storage of their
    parameters.
    """

    def __init__(
        self, units: Sequence[Unit], storage: FlatStorage, tied: Unit | None = None
    ) -> None:
        """Create the stage. tied: a unit with the parameters that other stages also have (see
        ``TiedParameters``).
        """
        self.units = units
        self.storage = storage
        self._tied = tied

    def forward(self, x: Array, tape: Tape) -> Array:
        for unit in self.units:
            self.storage.gather(unit)
            x = unit.layer.forward(x, tape)
            self.storage.release()
        return x

    def backward(self, dy: Array, tape: Tape, *, last: bool) -> Array:
        """Run the backward pass. last: whether this is the last micro-batch of the iteration."""
        for unit in reversed(self.units):
            self.storage.gather(unit, backward=True)
            dy = unit.layer.backward(dy, tape)
            self.storage.backward_done(unit, last=last)
        if self._tied:
            self.storage.backward_done(self._tied, last=last)
        return dy

    def begin_passes(self) -> None:
        """Prepare the weights of all units at once, for passes that don't use ``forward``."""
        for unit in self.units:
            self.storage.gather(unit)
            self.storage.release()

    def passes_done(self, *, last: bool) -> None:
        """Start summing the gradients after passes that don't use ``backward``."""
        for unit in reversed(self.units):
            self.storage.backward_done(unit, last=last)


def one_forward_one_backward(micro_batches: int, later_stages: int) -> Iterator[bool]:
    """Yield a stage's schedule: True for the next forward pass, False for the next backward
    pass.
    """
    ahead = min(micro_batches, later_stages)
    yield from [True] * ahead
    yield from [True, False] * (micro_batches - ahead)
    yield from [False] * ahead


def idle_share(stages: int, micro_batches: int) -> float:
    """Return the share of time that a stage is idle while the pipeline fills and empties (the
    bubble).

    Assumes that all micro-batches take equally long. Narayanan et al. (SC 2021), section 2.2.1,
    divide by
    the ideal time instead: (stages - 1) / micro_batches.
    """
    return (stages - 1) / (micro_batches + stages - 1)


class Pipeline:
    """A rank's stage, run in the order 1F1B: one forward pass, one backward pass.

    First a stage runs a forward pass for each later stage, then forward and backward passes in
    turn. So a stage keeps at most as many tapes as there are later stages, plus 1, for any number
    of micro-batches. (GPipe runs all forward passes first, and keeps all tapes.) 1F1B is from
    PipeDream (Narayanan et al., SOSP 2019); a single update for all micro-batches is from Megatron
    (Narayanan et al., SC 2021, section 2.2.1). The last stage returns the loss sums; earlier stages
    return 0.
    """

    def __init__(
        self,
        stage: Stage,
        loss: SoftmaxCrossEntropy,
        pp: Communicator | None = None,
        captured: CapturedPasses | None = None,
    ) -> None:
        """Create the pipeline. captured: runs micro-batches as graphs, if there is one stage."""
        pp = pp or Solo()
        device = stage.storage.device
        self._stage = stage
        self._loss = loss
        self._captured = captured
        self._later = pp.size - 1 - pp.rank
        self._previous_link = StageLink(device, pp, pp.rank - 1) if pp.rank else None
        self._next_link = StageLink(device, pp, pp.rank + 1) if self._later else None

    def train(
        self, batches: Sequence[MicroBatch], *, scale: float, seed: int, iteration: int
    ) -> LossSums:
        """Add the gradients of ``scale`` times the summed loss. Return the sums over all
        micro-batches.
        """
        if self._captured:
            return self._train_captured(self._captured, batches, scale, seed, iteration)
        sums = _NOTHING
        remaining = deque(batches)
        in_flight = deque[tuple[MicroBatch, Tape]]()
        for forward in one_forward_one_backward(len(batches), self._later):
            if forward:
                batch = remaining.popleft()
                tape = Tape(draw=RandomState(seed, iteration, batch.samples))
                in_flight.append((batch, tape))
                sums += self._forward(batch, tape)
            else:
                batch, tape = in_flight.popleft()
                self._backward(batch, tape, scale=scale, last=not (remaining or in_flight))
        self._drain()
        return sums

    def _train_captured(
        self,
        captured: CapturedPasses,
        batches: Sequence[MicroBatch],
        scale: float,
        seed: int,
        iteration: int,
    ) -> LossSums:
        sums = _NOTHING
        for number, batch in enumerate(batches, 1):
            last = number == len(batches)
            draw = RandomState(seed, iteration, batch.samples)
            self._stage.begin_passes()
            if launched := captured.run(batch, draw, scale):
                self._stage.passes_done(last=last)
                sums += launched
                continue
            tape = Tape(draw=draw)
            sums += self._forward(batch, tape)
            self._backward(batch, tape, scale=scale, last=last)
        return sums

    def evaluate(self, batches: Iterable[MicroBatch]) -> LossSums:
        """Run forward passes only. Return loss, correct predictions and targets, summed over the
        batches.
        """
        sums = _NOTHING
        for batch in batches:
            sums += self._forward(batch, Tape(training=False))
            self._drain(_AHEAD)
        self._drain()
        return sums

    def _forward(self, batch: MicroBatch, tape: Tape) -> LossSums:
        shape = batch.inputs.shape
        x = self._previous_link.receive_activation(shape) if self._previous_link else batch.inputs
        y = self._stage.forward(x, tape)
        if not self._next_link:
            return self._loss.forward(y, batch.targets, tape)
        self._next_link.send_activation(y, shape)
        return _NOTHING

    def _backward(self, batch: MicroBatch, tape: Tape, *, scale: float, last: bool) -> None:
        shape = batch.inputs.shape
        dy = (
            self._next_link.receive_gradient(shape)
            if self._next_link
            else self._loss.backward(scale, tape)
        )
        dx = self._stage.backward(dy, tape, last=last)
        if self._previous_link:
            self._previous_link.send_gradient(dx, shape)

    def _drain(self, unsent: int = 0) -> None:
        for link in (self._previous_link, self._next_link):
            if link:
                link.drain(unsent)
