"""From settings to what they name: the model's units, the optimizer and the learning rate."""

from __future__ import annotations

import inspect
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from payload.cli.config import Layout, Model, Optimizer, TrainConfig
from payload.data.base import Dataset
from payload.data.loader import Loader
from payload.device.base import Device
from payload.errors import UsageError
from payload.models import MODELS
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import Context, Unit
from payload.optim import base
from payload.optim.adamw import AdamW
from payload.optim.lamb import LAMB
from payload.optim.precision import PRECISIONS, loss_scale
from payload.optim.sgd import SGD
from payload.parallel.engine import Engine
from payload.parallel.mesh import Mesh, Options, make_mesh
from payload.parallel.zero import Storage
from payload.saved_model.folder import ModelRecord, make_units, module_of
from payload.training.schedule import LearningRate, scaled

if TYPE_CHECKING:
    from payload.comm.compression import Compressed
    from payload.comm.transport import Transport

_EVAL_BATCH = 32  # held-out samples at once on a rank


def build_units(model: Model, dataset: Dataset, context: Context) -> list[Unit]:
    """The model, sized for the data.

    Raises:
        UsageError: it has no such size, or cannot be of that size.
    """
    return make_units(model.model, model_sizes(model, dataset), context)


def model_record(model: Model, dataset: Dataset) -> ModelRecord:
    """What is needed to use the model that is trained, but for its weights."""
    return ModelRecord(
        model=model.model,
        settings=model_sizes(model, dataset),
        input=dataset.input,
        classes=dataset.facts["classes"],
        tokenizer=dataset.tokenizer,
    )


def model_sizes(model: Model, dataset: Dataset) -> dict[str, Any]:
    """All that the model is built with.

    Raises:
        UsageError: it has no such size.
    """
    known = inspect.signature(module_of(model.model).build).parameters
    defaults = {name: one.default for name, one in known.items() if one.default is not one.empty}
    given = {name: value for name, value in asdict(model).items() if name != "model" and value is not None}
    facts = {name: value for name, value in dataset.facts.items() if name in known}
    for name in given:
        if name not in known:
            raise UsageError(
                f"--{name.replace('_', '-')}: --model {model.model} has no such size",
                code="model-without-size",
            )
    return {**defaults, **MODELS[model.model].sizes, **given, **facts}


def run_identity(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """What a run has in common with the checkpoint that it goes on from. All else may change."""
    sizes = model_sizes(config.model, dataset)
    return {
        "model": config.model.model,
        **{name: value for name, value in sizes.items() if name != "dropout"},
        "optimizer": config.optimizer.optimizer,
        "precision": config.precision.precision,
        "data": config.data.data.partition(":")[0],  # which may lie elsewhere now
        "tokenizer": "gpt2" if config.data.tokenizer.startswith("gpt2:") else config.data.tokenizer,
        "samples": dataset.training,
        "global-batch-size": config.batch.global_batch_size,
        "seed": config.batch.seed,
    }


def build_optimizer(settings: Optimizer, storage: Storage, mesh: Mesh) -> base.Optimizer:
    """Of what this rank updates."""
    home, values, segments = storage.optimizer_device, storage.master_weights, storage.segments
    decay = settings.weight_decay or 0.0
    if settings.optimizer == "sgd":
        return SGD(
            home, values, segments, momentum=settings.momentum, nesterov=settings.nesterov, weight_decay=decay
        )
    adam = {
        "beta1": settings.beta1,
        "beta2": settings.beta2,
        "eps": settings.eps or 0.0,
        "weight_decay": decay,
    }
    if settings.optimizer == "adamw":
        return AdamW(home, values, segments, **adam)
    groups = [*([mesh.dp] if storage.sharded else []), mesh.tp]
    return LAMB(home, values, segments, storage.parameters, groups, **adam)


def build_mesh(layout: Layout, world: Transport) -> tuple[Mesh, Compressed | None]:
    """The ranks as the layout has them, and what compresses the sums between those that are data-parallel.

    Raises:
        UsageError: the number of ranks does not fit.
    """
    from payload.comm.compression import make_compressor  # noqa: PLC0415 - these need MPI
    from payload.comm.transport import Transport  # noqa: PLC0415

    mesh = make_mesh(world, tp=layout.tp, pp=layout.pp)
    if layout.compress == "none" or not isinstance(mesh.dp, Transport):  # there is nobody to talk to
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
    """The model on the mesh, in the layout that was asked for.

    Args:
        units: the whole model.
        compressor: of ``mesh``, or what that times.

    Raises:
        UsageError: the model cannot be laid out so.
    """
    layout, precision = config.layout, config.precision
    split = getattr(module_of(config.model.model), "SPLIT_LOGITS", False)
    options = Options(
        seed=config.batch.seed,
        precision=PRECISIONS[precision.precision],
        clip=config.optimizer.clip_grad or math.inf,
        recompute=layout.recompute,
        zero=layout.zero,
        offload=layout.offload_optimizer,
        bucket_bytes=layout.bucket_mib << 20,
        overlap=layout.overlap,
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
    """The loader of this rank's samples.

    Args:
        eval_only: held-out samples alone are asked for, perhaps on fewer ranks than there were in training,
            whose shares of a batch would be too large.

    Raises:
        UsageError: the batch is above the data.
    """
    wanted, micro_batch = config.batch.global_batch_size, config.batch.micro_batch_size
    if eval_only:
        micro_batch = min(micro_batch or _EVAL_BATCH, _EVAL_BATCH)
        wanted = micro_batch * mesh.dp.size
    elif wanted > dataset.training:
        raise UsageError(
            f"--global-batch-size {wanted} is above the {dataset.training} samples",
            code="batch-above-samples",
        )
    return Loader(
        dataset,
        device,
        mesh,
        global_batch=wanted,
        micro_batch=micro_batch,
        seed=config.batch.seed,
        prefetch=config.data.prefetch,
        dtype=PRECISIONS[config.precision.precision].compute,
    )


def build_schedule(config: TrainConfig, mesh: Mesh, per_epoch: int) -> LearningRate:
    """``per_epoch``: iterations in an epoch."""
    settings, batch = config.optimizer, config.batch
    iterations = min(batch.epochs * per_epoch, batch.iterations or batch.epochs * per_epoch)
    return LearningRate(
        peak=scaled(settings.lr or 0.0, settings.scale_lr, mesh.dp.size),
        kind=settings.schedule,
        iterations=iterations,
        warmup=settings.warmup_iterations,
        least=settings.min_lr,
        milestones=settings.decay_iterations or (),
        factor=settings.decay_factor,
    )
