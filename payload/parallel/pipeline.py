"""Pipeline parallelism: which units lie on which stage, what passes between stages, and in which order.

Each rank runs its stage, sends activations on, and gradients back. Where the whole model is one stage, it is
one micro-batch after the other, their gradients added up.
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
from payload.nn.module import Draw, Parameter, Segment, Sequential, Tape, Unit
from payload.parallel.zero import Storage

_BLOCK = 1 << 20
"""Numbers that stages exchange at once: the other stages' need a place of their own for so long."""

_MEMORY_WEIGHT = 1e-3
"""Work decides; parameters decide between splits of about the same work."""


def split(units: Sequence[Unit], stages: int) -> list[Sequence[Unit]]:
    """Runs of consecutive units, at least one each, of which the most laborious is as light as can be.

    Raises:
        UsageError: there are fewer units than stages.
    """
    if stages > len(units):
        raise UsageError(
            f"--pp {stages}: the model can only be cut into {len(units)} stages; ask for fewer",
            code="too-many-stages",
        )
    until = list(accumulate(_costs(units), initial=0.0))  # until[n]: of the first n units
    # best[n]: of the first n units cut into runs, the heaviest run, and where the runs begin
    best = [(math.inf, [0]), *((cost, [0]) for cost in until[1:])]
    for _ in range(1, stages):
        best = [
            min(
                ((max(best[cut][0], until[end] - until[cut]), [*best[cut][1], cut]) for cut in range(end)),
                default=(math.inf, [0]),
            )
            for end in range(len(until))
        ]
    _, cuts = best[-1]
    return [units[start:end] for start, end in pairwise([*cuts, len(units)])]


def _costs(units: Sequence[Unit]) -> list[float]:
    sizes = [sum(parameter.size for parameter in unit.layer.parameters) for unit in units]
    flops, size = sum(unit.flops for unit in units) or 1, sum(sizes) or 1
    return [unit.flops / flops + _MEMORY_WEIGHT * own / size for unit, own in zip(units, sizes, strict=True)]


class Ties:
    """Parameters that units on several stages use, such as GPT's embedding, which is its head as well.

    Each of those stages has a copy. All copies start alike, and get the sum of the gradients of all.
    """

    def __init__(self, stages: Sequence[Sequence[Unit]], pp: Communicator, device: Device) -> None:
        """``stages``: all of them, on every rank."""
        self._pp, self._device = pp, device
        users: dict[int, list[int]] = {}
        for stage, units in enumerate(stages):
            for parameter in _distinct(units):
                users.setdefault(id(parameter), []).append(stage)
        tied = [p for p in _distinct(stages[pp.rank]) if len(users[id(p)]) > 1]
        tied.sort(key=lambda parameter: parameter.name)
        self._users = {id(parameter): users[id(parameter)] for parameter in tied}
        holder = Sequential()  # of no layers: it has only parameters that others use
        holder.parameters = tied
        self.unit = Unit("tied", holder) if tied else None
        """Those of this stage, as a unit that comes before its others: so they lie at the same place on all
        stages, and are reduced last, since a unit's gradients are complete when all later ones' are."""

    def counts(self, parameter: Parameter) -> bool:
        """Whether this stage is the one to count and to save it: the first of those that have it."""
        return self._users.get(id(parameter), [self._pp.rank])[0] == self._pp.rank

    def sum(self, grads: Array, segments: Sequence[Segment]) -> None:
        """Replace gradients of tied parameters, which are sums over data-parallel ranks already, by their
        sums over stages: with the same rounding on all.

        Ranks at the same place on their stages own the same pieces of tied parameters.
        """
        for segment in segments:
            stages = self._users.get(id(segment.parameter), [])
            for start in range(segment.start, segment.stop, _BLOCK) if stages else ():
                self._sum(grads[start : min(start + _BLOCK, segment.stop)], stages)

    def _sum(self, mine: Array, stages: Sequence[int]) -> None:
        sent = [self._pp.isend(mine, stage) for stage in stages if stage != self._pp.rank]
        parts = []
        for stage in stages:
            parts.append(mine)
            if stage != self._pp.rank:
                parts[-1] = self._device.xp.empty_like(mine)
                self._pp.recv(parts[-1], stage)
        total = parts[0] + parts[1]
        for part in parts[2:]:
            total += part
        for pending in sent:
            pending.wait()
        mine[...] = total


def _distinct(units: Sequence[Unit]) -> list[Parameter]:
    return list({id(p): p for unit in units for p in unit.layer.parameters}.values())


_DTYPES = ("float32", "float64", "float16", "bfloat16")
_HEADER = 8  # numbers: dtype, number of axes, sizes of up to six axes


class Link:
    """One end of it: activations pass to the later stage, and their gradients, of the same shape, back.

    A header says of what shape and dtype an activation is, but only the first time that it comes of inputs of
    some shape: both ends remember. Sends do not block: two stages can send to each other at the same time.
    """

    def __init__(self, device: Device, pp: Communicator, neighbour: int) -> None:
        self._device, self._pp, self._neighbour = device, pp, neighbour
        self._known: dict[Shape, tuple[Shape, str]] = {}
        self._sent: deque[Pending] = deque()

    def send_activation(self, y: Array, inputs: Shape) -> None:
        """To the later stage. ``inputs``: the shape of the micro-batch's inputs, which both ends know."""
        if inputs not in self._known:
            self._known[inputs] = y.shape, y.dtype.name
            header = [_DTYPES.index(y.dtype.name), y.ndim, *y.shape]
            self._send(self._device.asarray(np.array(header + [0] * (_HEADER - len(header)))))
        self._send(y)

    def receive_activation(self, inputs: Shape) -> Array:
        if inputs not in self._known:
            device_header = self._device.xp.empty(_HEADER, "int64")
            self._pp.recv(device_header, self._neighbour)
            dtype, axes, *sizes = self._device.to_host(device_header).tolist()
            self._known[inputs] = tuple(sizes[:axes]), _DTYPES[dtype]
        return self._receive(inputs)

    def send_gradient(self, dx: Array, inputs: Shape) -> None:
        """To the earlier stage: the gradient by what it sent."""
        _, dtype = self._known[inputs]
        self._send(dx.astype(dtype, copy=False))

    def receive_gradient(self, inputs: Shape) -> Array:
        return self._receive(inputs)

    def drain(self, unsent: int = 0) -> None:
        """Wait until no more than so many of the messages sent are still under way."""
        while len(self._sent) > unsent:
            self._sent.popleft().wait()

    def _send(self, array: Array) -> None:
        while self._sent and self._sent[0].test():
            self._sent.popleft()
        self._sent.append(self._pp.isend(self._device.xp.ascontiguousarray(array), self._neighbour))

    def _receive(self, inputs: Shape) -> Array:
        shape, dtype = self._known[inputs]
        array: Array = self._device.xp.empty(shape, dtype)
        self._pp.recv(array, self._neighbour)
        return array


_NOTHING = LossSums(0.0, 0.0, 0.0)
_AHEAD = 2  # micro-batches that an evaluation may be ahead of a slower stage


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """A micro-batch, on the device. Every stage of a pipeline is given all of it, though only the first
    computes with the inputs, and the last with the targets."""

    inputs: Array  # (B, ...)
    targets: Array  # (B,) or (B, ...)
    samples: Array  # (B,) uint32: each sample's place in the global batch


class Stage:
    """A run of units, whose parameters a storage holds."""

    def __init__(self, units: Sequence[Unit], storage: Storage, tied: Unit | None = None) -> None:
        """``tied``: the parameters that other stages use too (see ``Ties``)."""
        self.units, self.storage, self._tied = units, storage, tied

    def forward(self, x: Array, tape: Tape) -> Array:
        for unit in self.units:
            self.storage.gather(unit)
            x = unit.layer.forward(x, tape)
            self.storage.release()
        return x

    def backward(self, dy: Array, tape: Tape, *, last: bool) -> Array:
        """``last``: of this iteration's micro-batches."""
        for unit in reversed(self.units):
            self.storage.gather(unit, backward=True)
            dy = unit.layer.backward(dy, tape)
            self.storage.backward_done(unit, last=last)
        if self._tied:
            self.storage.backward_done(self._tied, last=last)
        return dy


def one_forward_one_backward(micro_batches: int, later_stages: int) -> Iterator[bool]:
    """What a stage does next: forward (True) of the next micro-batch, or backward of the oldest in flight."""
    ahead = min(micro_batches, later_stages)
    yield from [True] * ahead
    yield from [True, False] * (micro_batches - ahead)
    yield from [False] * ahead


def idle_share(stages: int, micro_batches: int) -> float:
    """Of a stage's time: the bubble, while the pipeline fills and empties, if all micro-batches take as long.

    Of Narayanan et al. (SC 2021), section 2.2.1, who divide by the ideal time: (stages - 1) / micro_batches.
    """
    return (stages - 1) / (micro_batches + stages - 1)


class Pipeline:
    """1F1B: after as many forward passes as there are later stages, one backward and one forward in turn.

    So a stage keeps tapes for itself and the later stages, however many micro-batches there are; all forward
    first (GPipe) would keep all. Of PipeDream (Narayanan et al., SOSP 2019), with one update for all
    micro-batches, as in Megatron (Narayanan et al., SC 2021, section 2.2.1). Sums are the last stage's, and
    0 elsewhere.
    """

    def __init__(self, stage: Stage, loss: SoftmaxCrossEntropy, pp: Communicator | None = None) -> None:
        pp = pp or Solo()
        device = stage.storage.device
        self._stage, self._loss, self._later = stage, loss, pp.size - 1 - pp.rank
        self._before = Link(device, pp, pp.rank - 1) if pp.rank else None
        self._after = Link(device, pp, pp.rank + 1) if self._later else None

    def train(self, batches: Sequence[MicroBatch], *, scale: float, seed: int, iteration: int) -> LossSums:
        """Forward and backward; the gradients are of ``scale`` times the summed loss."""
        sums = _NOTHING
        waiting, flying = deque(batches), deque[tuple[MicroBatch, Tape]]()
        for forward in one_forward_one_backward(len(batches), self._later):
            if forward:
                batch = waiting.popleft()
                tape = Tape(draw=Draw(seed, iteration, batch.samples))
                flying.append((batch, tape))
                sums += self._forward(batch, tape)
            else:
                batch, tape = flying.popleft()
                self._backward(batch, tape, scale=scale, last=not (waiting or flying))
        self._drain()
        return sums

    def evaluate(self, batches: Iterable[MicroBatch]) -> LossSums:
        """Forward only."""
        sums = _NOTHING
        for batch in batches:
            sums += self._forward(batch, Tape(training=False))
            self._drain(_AHEAD)
        self._drain()
        return sums

    def _forward(self, batch: MicroBatch, tape: Tape) -> LossSums:
        shape = batch.inputs.shape
        x = self._before.receive_activation(shape) if self._before else batch.inputs
        y = self._stage.forward(x, tape)
        if not self._after:
            return self._loss.forward(y, batch.targets, tape)
        self._after.send_activation(y, shape)
        return _NOTHING

    def _backward(self, batch: MicroBatch, tape: Tape, *, scale: float, last: bool) -> None:
        shape = batch.inputs.shape
        dy = self._after.receive_gradient(shape) if self._after else self._loss.backward(scale, tape)
        dx = self._stage.backward(dy, tape, last=last)
        if self._before:
            self._before.send_gradient(dx, shape)

    def _drain(self, unsent: int = 0) -> None:
        for link in (self._before, self._after):
            if link:
                link.drain(unsent)
