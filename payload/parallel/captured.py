"""Micro-batches as CUDA graphs: forward pass, loss and backward pass in a single launch.

A graph repeats its work exactly, on the same memory, with the same numbers of the host. So all that
differs between micro-batches of the same shape is in arrays that are filled before each launch:
inputs, targets, the loss scale, and the random words of dropout. Whether a parameter's gradient is
written or added to is part of the key of a graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from payload.device.base import Array, Device
from payload.device.capture import CapturedGraph, GraphRecorder
from payload.nn.loss import LossSums, SoftmaxCrossEntropy
from payload.nn.module import RandomState, Tape, Unit

if TYPE_CHECKING:
    from payload.parallel.pipeline import MicroBatch

_MOST = 8
"""Graphs. Micro-batches have up to two sizes, in an epoch's last batch up to two others, and the
first of an iteration writes gradients to which others add.
"""
_WORDS = 4096
"""Layers that draw random numbers."""


@dataclass(frozen=True, slots=True)
class _CapturedDraw(RandomState):
    """A draw whose words are read from an array, so that each launch can have others."""

    table: Array  # (_WORDS, 2) uint32
    # The purpose of each row that is used.
    names: list[str] = field(default_factory=list)

    def words(self, stream: str) -> tuple[int | Array, int | Array]:
        if stream not in self.names:
            self.names.append(stream)
        row = self.table[self.names.index(stream)]
        return row[0], row[1]


@dataclass(frozen=True, slots=True)
class _Graph:
    """A graph, with the arrays that it reads."""

    batch: MicroBatch
    scale: Array
    draw: _CapturedDraw
    work: CapturedGraph[LossSums]
    # By parameter: whether it still has no gradient after the launch.
    grads_unset: Sequence[bool]


# The state of a key: its work has run once, so that it can be recorded next.
_READY = "ready"


class CapturedPasses:
    """Runs the passes of micro-batches as graphs, on a rank that has all units of the model."""

    def __init__(self, device: Device, units: Sequence[Unit], loss: SoftmaxCrossEntropy) -> None:
        self._device = device
        self._units = units
        self._loss = loss
        self._parameters = [p for unit in units for p in unit.layer.parameters]
        self._recorder: GraphRecorder | None = None
        self._graphs: dict[tuple[Any, ...], _Graph | str] = {}
        self._failure = ""
        self._failure_told = False

    @property
    def graphs(self) -> int:
        """Number of graphs so far."""
        return sum(isinstance(known, _Graph) for known in self._graphs.values())

    def take_failure(self) -> str:
        """Return once why the work could not be recorded, otherwise an empty text."""
        told = self._failure_told
        self._failure_told = bool(self._failure)
        return "" if told else self._failure

    def run(self, batch: MicroBatch, draw: RandomState, scale: float) -> LossSums | None:
        """Add the gradients of ``scale`` times the summed loss, and return the sums, which the next
        call overwrites.

        None: there is no graph, and nothing was computed. This is so the first time that a shape
        comes, and always once recording has failed.
        """
        if self._failure or not batch.inputs.size:
            return None
        key = (*map(_form, (batch.inputs, batch.targets)), *self._unset())
        known = self._graphs.get(key)
        if known is None:
            if len(self._graphs) < _MOST:
                self._graphs[key] = _READY
            return None
        if not isinstance(known, _Graph):
            before = self._unset()
            try:
                known = self._graphs[key] = self._capture(batch, draw)
            # Each library has errors of its own for what can't be recorded. The same work has just
            # run without recording.
            except Exception as exc:
                self._set_unset(before)
                # Their memory may be needed now.
                self._graphs.clear()
                self._recorder = None
                self._failure = f"{type(exc).__name__}: {exc}".splitlines()[0]
                return None
        self._launch(known, batch, draw, scale)
        return known.work.result

    def _capture(self, batch: MicroBatch, draw: RandomState) -> _Graph:
        xp = self._device.xp
        own = replace(
            batch,
            inputs=xp.empty_like(batch.inputs),
            targets=xp.empty_like(batch.targets),
            samples=xp.empty_like(batch.samples),
        )
        scale = xp.empty((), "float64")
        own_draw = _CapturedDraw(
            draw.seed, draw.iteration, own.samples, xp.empty((_WORDS, 2), "uint32")
        )
        self._recorder = self._recorder or self._device.recorder()
        work = self._recorder.capture(lambda: self._passes(own, own_draw, scale))
        return _Graph(own, scale, own_draw, work, self._unset())

    def _passes(self, batch: MicroBatch, draw: RandomState, scale: Array) -> LossSums:
        tape = Tape(draw=draw)
        x = batch.inputs
        for unit in self._units:
            x = unit.layer.forward(x, tape)
        sums = self._loss.forward(x, batch.targets, tape)
        dy = self._loss.backward(scale, tape)
        for unit in reversed(self._units):
            dy = unit.layer.backward(dy, tape)
        return sums

    def _launch(self, graph: _Graph, batch: MicroBatch, draw: RandomState, scale: float) -> None:
        graph.batch.inputs[...] = batch.inputs
        graph.batch.targets[...] = batch.targets
        graph.batch.samples[...] = batch.samples
        graph.scale[...] = scale
        if names := graph.draw.names:
            words = np.array([draw.words(name) for name in names], np.uint32)
            host = self._device.pinned_copy(words)
            graph.draw.table[: len(names)] = self._device.receive(self._device.upload(host))
        graph.work.launch()
        self._set_unset(graph.grads_unset)

    def _unset(self) -> tuple[bool, ...]:
        return tuple(parameter.grad_unset for parameter in self._parameters)

    def _set_unset(self, unset: Sequence[bool]) -> None:
        for parameter, flag in zip(self._parameters, unset, strict=True):
            parameter.grad_unset = flag


def _form(array: Array) -> tuple[Any, ...]:
    return tuple(array.shape), array.dtype.name
