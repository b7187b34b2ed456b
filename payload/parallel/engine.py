"""A training step on a mesh of ranks: gradients of a global batch, their sum and norm, and the
update.
"""

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
from payload.parallel.captured import CapturedPasses
from payload.parallel.mesh import EngineOptions, Mesh
from payload.parallel.pipeline import MicroBatch, Pipeline, Stage, TiedParameters, split
from payload.parallel.zero import FlatStorage

if TYPE_CHECKING:
    from payload.comm.compression import Compressed

_LARGEST_EXPONENT = 700.0
_DEFAULT = EngineOptions()


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of a training step, the same on every rank."""

    # Mean over the targets of the global batch, before the update.
    loss: float
    # Norm of the gradient of that mean over all parameters, before clipping.
    grad_norm: float
    # Number of targets in the global batch.
    targets: int
    # Sums of all ranks' ``flags``.
    flags: tuple[float, ...] = ()
    # Whether the gradients overflowed. The weights are unchanged, and the loss scale was lowered.
    skipped: bool = False
    # Number of skipped steps so far in the whole training.
    skips: int = 0
    # Scale with which the gradients were computed.
    loss_scale: float = 1.0

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm)


@dataclass(frozen=True, slots=True)
class Evaluation:
    """Result of an evaluation on all held-out targets, the same on every rank."""

    # The mean of all targets, in nats.
    loss: float
    # The share of targets that were predicted, from 0 to 1.
    accuracy: float

    @property
    def perplexity(self) -> float:
        return math.exp(self.loss) if self.loss < _LARGEST_EXPONENT else math.inf

    def bits_per_byte(self, bytes_per_target: float) -> float:
        """Return the loss of text in bits per byte, which does not depend on the tokenizer."""
        return self.loss / math.log(2) / bytes_per_target


def stages_of(
    units: Sequence[Unit], *, tp: int, pp: int, recompute: bool, capture: bool = False
) -> list[Sequence[Unit]]:
    """Split a model's units into pipeline stages. Raise UsageError if the model does not suit tp,
    pp or capture.
    """
    if capture and any(getattr(unit.layer, "communicates", False) for unit in units):
        raise UsageError(
            "--capture: this model's batch norm sums its statistics over the data-parallel ranks, "
            "which a CUDA graph can't; omit --capture, or use a single rank",
            code="bad-settings",
        )
    if tp > 1 and all(p.axis is None for unit in units for p in unit.layer.parameters):
        raise UsageError(
            f"--tp {tp}: this model has no tensor-parallel layers; omit --tp",
            code="tp-without-layers",
        )
    return split(recomputed(units) if recompute else units, pp)


class Engine:
    """Trains and evaluates a model that is distributed over a mesh of ranks."""

    def __init__(
        self,
        device: Device,
        mesh: Mesh,
        units: Sequence[Unit],
        loss: SoftmaxCrossEntropy,
        make_optimizer: Callable[[FlatStorage], Optimizer],
        *,
        options: EngineOptions = _DEFAULT,
        loss_scale: LossScale | None = None,
        compressor: Compressed | None = None,
    ) -> None:
        """Distribute the model over the mesh. Raise UsageError if the mesh does not suit the model.

        Args:
            units: layer groups of the whole model, built with ``mesh.context(device)``, without
                memory yet.
            make_optimizer: called once with this rank's parameters; returns their optimizer.
            loss_scale: default: no scaling.
            compressor: compresses the gradients. Must be ``mesh.dp`` itself, or the communicator
                that ``mesh.dp`` wraps.
        """
        stages = stages_of(
            units,
            tp=mesh.tp.size,
            pp=mesh.pp.size,
            recompute=options.recompute,
            capture=options.capture,
        )
        self.device = device
        self.mesh = mesh
        self._options = options
        self.units = stages[mesh.pp.rank]
        """Units of this rank's stage."""
        self.ties = TiedParameters(stages, mesh.pp, device)
        """Parameters of this stage that other stages also have."""
        self.storage = FlatStorage(device, self.units, mesh.dp, options, tied=self.ties.unit)
        self.loss_scale = loss_scale or LossScale()
        self.own_state: Mapping[str, Array] = {}
        """Arrays that only this rank has. They must be restored to resume training."""
        if compressor:
            from payload.comm.compression import ParamSlice  # noqa: PLC0415 - needs MPI

            slices = [ParamSlice(s.start, s.parameter.shape) for s in self.storage.segments]
            compressor.attach(self.storage.grad_buffer, slices)
            self.own_state = compressor.state
        self.captured = CapturedPasses(device, self.units, loss) if options.capture else None
        """The CUDA graphs of micro-batches."""
        self._pipeline = Pipeline(
            Stage(self.units, self.storage, self.ties.unit), loss, mesh.pp, self.captured
        )
        self.optimizer = make_optimizer(self.storage)

    def take_capture_failure(self) -> str:
        """Return once why micro-batches could not be captured, otherwise an empty text."""
        return self.captured.take_failure() if self.captured else ""

    # Overflow shows in the result.
    @np.errstate(over="ignore", invalid="ignore")
    def step(
        self,
        batches: Sequence[MicroBatch],
        *,
        targets: int,
        iteration: int,
        lr: float,
        flags: Sequence[float] = (),
    ) -> StepResult:
        """Train on this rank's share of a global batch, cut into micro-batches.

        If the loss or the gradients are not finite, the weights do not change; the loss scale, and
        layer state such as the statistics of batch norm, may change.

        Args:
            batches: this rank's micro-batches. Every rank must pass the same number of
                micro-batches.
            targets: expected number of targets in the global batch, by which gradients are divided.
                If the actual number differs, the summed gradients are corrected.
            flags: this rank's numbers to sum over ranks together with the loss, at no extra cost.
        """
        self.storage.begin()
        loss_scale = self.loss_scale.value
        sums = self._pipeline.train(
            batches, scale=loss_scale / targets, seed=self._options.seed, iteration=iteration
        )
        self.storage.reduce(across=self.ties.sum)
        counts = self.mesh.tp.rank == 0  # tensor-parallel ranks have the same sums
        local = [float(value) if counts else 0.0 for value in (sums.loss, sums.count)]
        loss, count, squares, *summed_flags = self.mesh.world.sum(
            [*local, float(self._squares()), *flags]
        )
        scale = targets / count / loss_scale if count else 0.0
        mean = loss / count if count else 0.0
        norm = math.sqrt(squares) * scale
        # A loss that is not finite was not caused by the loss scale.
        overflow = math.isfinite(mean) and not math.isfinite(norm) and self.loss_scale.overflowed()
        skips = self.loss_scale.skipped
        result = StepResult(
            mean, norm, int(count), tuple(summed_flags), overflow, skips, loss_scale
        )
        if result.finite:
            self.loss_scale.record_success()
            if result.grad_norm > self._options.clip:
                scale *= self._options.clip / result.grad_norm
            self.optimizer.step(self.storage.master_weights, self.storage.grads, lr=lr, scale=scale)
            self.storage.publish()
        return result

    # Overflow shows in the loss.
    @np.errstate(over="ignore", invalid="ignore")
    def evaluate(self, batches: Iterable[MicroBatch]) -> Evaluation:
        """Evaluate all ranks' batches. batches: this rank's share, with the same number on every
        rank.
        """
        sums = self._pipeline.evaluate(batches)
        counts = self.mesh.tp.rank == 0
        loss, correct, count = self.mesh.world.sum(
            [float(value) if counts else 0.0 for value in (sums.loss, sums.correct, sums.count)]
        )
        return Evaluation(loss / count, correct / count)

    def counts(self, parameter: Parameter) -> bool:
        """Return False if a lower tensor-parallel rank or earlier stage has a copy of this rank's
        part.
        """
        is_split = parameter.axis is not None
        return (is_split or self.mesh.tp.rank == 0) and self.ties.counts(parameter)

    def _squares(self) -> Array | float:
        # Sum of squares of this rank's gradients, without copies that a lower rank also has.
        if not self.storage.sharded and self.mesh.dp.rank:
            return 0.0
        flat = self.storage.grads
        total: Array | float = 0.0
        for segment in self.storage.segments:
            if self.counts(segment.parameter):
                slice_ = flat[segment.start : segment.stop]
                total = total + (slice_ @ slice_).astype("float64")
        return total
