"""One training step over the mesh: gradients of a global batch, their sums and norm, and the update."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import Parameter, Unit, recomputed
from payload.optim.base import Optimizer
from payload.optim.precision import LossScale
from payload.parallel.mesh import Mesh, Options
from payload.parallel.pipeline import MicroBatch, Pipeline, Stage, Ties, split
from payload.parallel.zero import Storage

if TYPE_CHECKING:
    from payload.comm.compression import Compressed

_LARGEST_EXPONENT = 700.0
_DEFAULT = Options()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Of one step, the same on every rank."""

    loss: float  # mean over the global batch's targets, before the update
    grad_norm: float  # of that mean, over all parameters, before clipping
    targets: int  # in the global batch
    flags: tuple[float, ...] = ()  # sums over all ranks
    skipped: bool = False  # for gradients that overflowed; the loss scale has been lowered
    skips: int = 0  # of the whole training so far
    loss_scale: float = 1.0  # with which gradients were computed

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Over all held-out targets, the same on every rank."""

    loss: float  # mean, in nats
    accuracy: float  # in [0, 1]

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < _LARGEST_EXPONENT else math.inf

    def bits_per_byte(self, bytes_per_target: float) -> float:
        """Of text, whatever its tokens are."""
        return self.loss / math.log(2) / bytes_per_target


class Engine:
    """A model on the mesh, in the layout that was chosen: trains, evaluates or measures."""

    def __init__(
        self,
        device: Device,
        mesh: Mesh,
        units: Sequence[Unit],
        loss: SoftmaxCrossEntropy,
        make_optimizer: Callable[[Storage], Optimizer],
        *,
        options: Options = _DEFAULT,
        loss_scale: LossScale | None = None,
        compressor: Compressed | None = None,
    ) -> None:
        """
        Args:
            units: the whole model, built with ``mesh.context(device)``; its parameters take no memory yet.
            make_optimizer: of what this rank updates.
            loss_scale: by default none.
            compressor: of ``mesh.dp``, or what that times; it is given the gradients to compress.

        Raises:
            UsageError: the model cannot be laid out on this mesh.
        """
        if mesh.tp.size > 1 and all(p.axis is None for unit in units for p in unit.layer.parameters):
            raise UsageError(
                f"--tp {mesh.tp.size}: this model has no tensor-parallel layers", code="tp-without-layers"
            )
        stages = split(recomputed(units) if options.recompute else units, mesh.pp.size)
        self.device, self.mesh, self._options = device, mesh, options
        self.units = stages[mesh.pp.rank]
        """Of this rank's stage."""
        self.ties = Ties(stages, mesh.pp, device)
        """Those of their parameters that other stages have, too."""
        self.storage = Storage(device, self.units, mesh.dp, options, tied=self.ties.unit)
        self.loss_scale = loss_scale or LossScale()
        self.own_state: Mapping[str, Array] = {}
        """Arrays that this rank alone has, and must have again to go on."""
        if compressor:
            from payload.comm.compression import ParamSlice  # noqa: PLC0415 - it needs MPI

            slices = [ParamSlice(s.start, s.parameter.shape) for s in self.storage.segments]
            compressor.attach(self.storage.grad_buffer, slices)
            self.own_state = compressor.state
        self._pipeline = Pipeline(Stage(self.units, self.storage, self.ties.unit), loss, mesh.pp)
        self.optimizer = make_optimizer(self.storage)

    @np.errstate(over="ignore", invalid="ignore")  # the outcome tells
    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        targets: int,
        iteration: int,
        lr: float,
        flags: Sequence[float] = (),
    ) -> StepResult:
        """Train on this rank's share of a global batch, cut into micro-batches; their number is the same on
        all ranks.

        Args:
            targets: in the whole global batch, as far as known beforehand: gradients are scaled by it, and
                put right by what was really counted.
            flags: numbers of this rank that are summed along, so that ranks agree at no cost.

        A step whose numbers are not finite changes no weights, but the loss scale, and layers' own state
        such as the statistics of batch norm.
        """
        self.storage.begin()
        loss_scale = self.loss_scale.value
        sums = self._pipeline.train(
            batches, scale=loss_scale / targets, seed=self._options.seed, iteration=iteration
        )
        self.storage.reduce(across=self.ties.sum)
        first = self.mesh.tp.rank == 0  # tensor-parallel ranks have the same sums
        mine = [float(value) if first else 0.0 for value in (sums.loss, sums.count)]
        loss, count, squares, *summed_flags = self.mesh.world.sum([*mine, float(self._squares()), *flags])
        scale = targets / count / loss_scale if count else 0.0
        mean, norm = loss / count if count else 0.0, math.sqrt(squares) * scale
        # A loss that is not finite is not the scale's fault.
        overflow = math.isfinite(mean) and not math.isfinite(norm) and self.loss_scale.overflowed()
        skips = self.loss_scale.skipped
        outcome = StepResult(mean, norm, int(count), tuple(summed_flags), overflow, skips, loss_scale)
        if outcome.finite:
            self.loss_scale.held()
            if outcome.grad_norm > self._options.clip:
                scale *= self._options.clip / outcome.grad_norm
            self.optimizer.step(self.storage.master_weights, self.storage.grads, lr=lr, scale=scale)
            self.storage.publish()
        return outcome

    @np.errstate(over="ignore", invalid="ignore")  # the loss tells
    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """Of this rank's share of the held-out data; the number of batches is the same on all ranks."""
        sums = self._pipeline.evaluate(batches)
        first = self.mesh.tp.rank == 0
        loss, correct, count = self.mesh.world.sum(
            [float(value) if first else 0.0 for value in (sums.loss, sums.correct, sums.count)]
        )
        return Evaluation(loss / count, correct / count)

    def counts(self, parameter: Parameter) -> bool:
        """Whether this rank is to count and to save what it holds of a parameter, among the tensor-parallel
        ranks and stages that hold the same."""
        parted = parameter.axis is not None
        return (parted or self.mesh.tp.rank == 0) and self.ties.counts(parameter)

    def _squares(self) -> Array | float:
        """The sum of this rank's squared gradients, each number of the model being counted on one rank."""
        if not self.storage.sharded and self.mesh.dp.rank:
            return 0.0
        flat = self.storage.grads
        total: Array | float = 0.0
        for segment in self.storage.segments:
            if self.counts(segment.parameter):
                slice_ = flat[segment.start : segment.stop]
                total = total + (slice_ @ slice_).astype("float64")
        return total
