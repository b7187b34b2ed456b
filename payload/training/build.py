"""Construction of a run's parts from its settings: model, optimizer, mesh, engine and loader."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any, Protocol

from payload.checkpoint.identity import identity_of_settings
from payload.cli.config import ModelSettings, OptimizerSettings, ParallelismSettings, TrainConfig
from payload.data.base import Dataset
from payload.data.loader import Loader
from payload.device.base import Device
from payload.errors import UsageError
from payload.models import MODELS, module_of
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import LayerContext, Unit
from payload.optim import base
from payload.optim.adamw import AdamW
from payload.optim.lamb import LAMB
from payload.optim.precision import PRECISIONS, loss_scale
from payload.optim.sgd import SGD
from payload.parallel.engine import Engine
from payload.parallel.mesh import EngineOptions, Mesh, make_mesh
from payload.parallel.zero import FlatStorage
from payload.saved_model.folder import make_units
from payload.saved_model.record import ModelRecord

if TYPE_CHECKING:
    from payload.comm.compression import Compressed
    from payload.comm.transport import MpiTransport

# Held-out samples that a rank evaluates at once.
_EVAL_BATCH = 32


class DatasetSizes(Protocol):
    """The sizes of a data set, see ``Dataset``. training: None: unknown."""

    @property
    def facts(self) -> Mapping[str, int]: ...
    @property
    def training(self) -> int | None: ...
    @property
    def held_out(self) -> int: ...


def build_units(model: ModelSettings, dataset: DatasetSizes, context: LayerContext) -> list[Unit]:
    """Build all units (groups of layers) of the model. Raises UsageError if a size does not fit the
    data.
    """
    return make_units(model.model, model_sizes(model, dataset), context)


def model_record(model: ModelSettings, dataset: Dataset) -> ModelRecord:
    """Return a ``ModelRecord`` of the model to be trained. The record lists no files of weights
    yet.
    """
    return ModelRecord(
        model=model.model,
        settings=model_sizes(model, dataset),
        input=dataset.input,
        classes=dataset.facts["classes"],
        tokenizer=dataset.tokenizer,
    )


def model_sizes(model: ModelSettings, dataset: DatasetSizes) -> dict[str, Any]:
    """Return all arguments for building the model. Raises UsageError for a flag that this model
    lacks.
    """
    parameters = inspect.signature(module_of(model.model).build).parameters
    defaults = {name: p.default for name, p in parameters.items() if p.default is not p.empty}
    given = {
        name: value
        for name, value in asdict(model).items()
        if name != "model" and value is not None
    }
    facts = {name: value for name, value in dataset.facts.items() if name in parameters}
    for name in given:
        if name not in parameters:
            flag = f"--{name.replace('_', '-')}"
            raise UsageError(
                f"{flag} has no effect on --model {model.model}: remove it",
                code="model-without-size",
            )
    return {**defaults, **MODELS[model.model].sizes, **given, **facts}


def run_identity(config: TrainConfig, dataset: DatasetSizes) -> dict[str, Any]:
    """Return the settings that must be the same when a later run resumes from this run's
    checkpoints.
    """
    sizes = model_sizes(config.model, dataset)
    evaluated = config.evaluation.eval_samples
    return {
        **identity_of_settings(config),
        **{name: value for name, value in sizes.items() if name != "dropout"},
        "samples": dataset.training,
        # The best weights have the lowest loss on these.
        "eval-samples": min(evaluated or dataset.held_out, dataset.held_out),
    }


def build_optimizer(
    settings: OptimizerSettings, storage: FlatStorage, mesh: Mesh
) -> base.Optimizer:
    """Build the optimizer that ``settings`` name, for the parameters that this rank updates."""
    device = storage.optimizer_device
    values = storage.master_weights
    segments = storage.segments
    decay = settings.weight_decay or 0.0
    if settings.optimizer == "sgd":
        return SGD(
            device,
            values,
            segments,
            momentum=settings.momentum,
            nesterov=settings.nesterov,
            weight_decay=decay,
        )
    adam = {
        "beta1": settings.beta1,
        "beta2": settings.beta2,
        "eps": settings.eps or 0.0,
        "weight_decay": decay,
    }
    if settings.optimizer == "adamw":
        return AdamW(device, values, segments, **adam)
    groups = [*([mesh.dp] if storage.sharded else []), mesh.tp]
    return LAMB(device, values, segments, storage.parameters, groups, **adam)


def build_mesh(layout: ParallelismSettings, world: MpiTransport) -> tuple[Mesh, Compressed | None]:
    """Arrange the ranks as in ``layout``, and compress the sums of gradients if requested.

    Return the mesh, and the compressor that wraps the mesh's data-parallel group. None: no
    compression. Raises UsageError if the number of ranks does not fit the layout.
    """
    from payload.comm.compression import make_compressor  # noqa: PLC0415 - needs MPI
    from payload.comm.transport import MpiTransport  # noqa: PLC0415

    mesh = make_mesh(world, tp=layout.tp, pp=layout.pp)
    # A single data-parallel rank sums nothing.
    if layout.compress == "none" or not isinstance(mesh.dp, MpiTransport):
        return mesh, None
    options: dict[str, dict[str, float]] = {
        "topk": {"ratio": layout.compress_ratio},
        "powersgd": {"rank": layout.compress_rank},
    }
    compressor = make_compressor(layout.compress, mesh.dp, **options.get(layout.compress, {}))
    return replace(mesh, dp=compressor), compressor


def build_engine(
    config: TrainConfig,
    device: Device,
    mesh: Mesh,
    units: Sequence[Unit],
    *,
    compressor: Compressed | None = None,
) -> Engine:
    """Build this rank's engine from the units of the whole model and the compressor of
    ``build_mesh``.

    Raises UsageError if the model cannot be split in the configured layout.
    """
    layout = config.layout
    precision = config.precision
    split = getattr(module_of(config.model.model), "SPLIT_LOGITS", False)
    options = EngineOptions(
        seed=config.batch.seed,
        precision=PRECISIONS[precision.precision],
        clip=config.optimizer.clip_grad or math.inf,
        recompute=layout.recompute,
        zero=layout.zero,
        offload=layout.offload_optimizer,
        bucket_bytes=layout.bucket_mib << 20,
        overlap=layout.overlap,
        capture=precision.capture,
    )
    return Engine(
        device,
        mesh,
        units,
        SoftmaxCrossEntropy(mesh.context(device), split=split),
        lambda storage: build_optimizer(config.optimizer, storage, mesh),
        options=options,
        loss_scale=loss_scale(precision.precision, precision.loss_scale),
        compressor=compressor,
    )


def build_loader(
    config: TrainConfig, dataset: Dataset, device: Device, mesh: Mesh, *, eval_only: bool = False
) -> Loader:
    """Build the loader of this rank's samples. Raises UsageError if the global batch exceeds the
    data.

    eval_only: load only held-out samples, and all of these. Batches are small, so that fewer ranks
        than in training suffice.
    """
    global_batch = config.batch.global_batch_size
    micro_batch = config.batch.micro_batch_size
    if eval_only:
        micro_batch = min(micro_batch or _EVAL_BATCH, _EVAL_BATCH)
        global_batch = micro_batch * mesh.dp.size
    else:
        reject_large_batch(global_batch, dataset.training)
    return Loader(
        dataset,
        device,
        mesh,
        global_batch=global_batch,
        micro_batch=micro_batch,
        seed=config.batch.seed,
        eval_samples=None if eval_only else config.evaluation.eval_samples,
        prefetch=config.data.prefetch,
        dtype=PRECISIONS[config.precision.precision].compute,
    )


def reject_large_batch(global_batch: int, samples: int) -> None:
    """Raise UsageError if a global batch is larger than the number of training samples."""
    if global_batch > samples:
        raise UsageError(
            f"--global-batch-size {global_batch} is too large: there are {samples} training "
            "samples",
            code="batch-above-samples",
        )
