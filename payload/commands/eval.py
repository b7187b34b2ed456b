"""Evaluation of a model folder or a checkpoint on held-out data. The result is a line of JSON on
stdout.
"""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from payload.checkpoint.session import CheckpointSession, resume
from payload.checkpoint.shards import BrokenError, read_manifest
from payload.cli.config import EvalConfig, TrainConfig
from payload.cli.jsonl import answer
from payload.cli.settings import from_record, make
from payload.comm.base import Communicator, Solo, on_all_ranks
from payload.data.base import Dataset
from payload.data.datasets import open_dataset
from payload.device import choose
from payload.device.base import Device
from payload.errors import UsageError
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import LayerContext, Tape
from payload.node.host import launcher_rank
from payload.parallel.engine import Evaluation
from payload.parallel.mesh import Mesh, make_mesh
from payload.saved_model.folder import TrainedModel, load
from payload.training.build import build_engine, build_loader, build_units

if TYPE_CHECKING:
    from payload.comm.transport import MpiTransport


def run(config: EvalConfig) -> int:
    """Evaluate a model folder or a checkpoint, print the result, and return the exit code."""
    if config.model_folder is not None:
        return _run_on_model(config, config.model_folder)
    from payload.cli.report import begin  # noqa: PLC0415
    from payload.comm.mpi import MpiCommunicator  # noqa: PLC0415 - evaluating a model folder needs no MPI

    world, device = begin(config.device)
    trained = on_all_ranks(world, lambda: _settings_of_run(config))
    result = evaluate(trained, device, MpiCommunicator(device))
    if world.rank == 0:
        answer(**result)
    return 0


def _settings_of_run(config: EvalConfig) -> TrainConfig:
    """Return the run's settings from its config.toml or checkpoint, changed by the flags of this
    command.
    """
    out = config.out or Path()
    flags = {
        "out": out,
        "device": config.device,
        "resume": config.resume,
        "save_interval": None,
        "tp": config.tp,
        "pp": config.pp,
    }
    if config.data:
        flags["data"] = config.data
    if config.out or config.resume == "auto":
        return make(TrainConfig, flags, out / "config.toml", named_by="--out")
    try:
        return from_record(TrainConfig, read_manifest(Path(config.resume)).config, flags)
    except BrokenError as exc:
        raise UsageError(
            f"--resume: {config.resume} is damaged: {exc}", code="checkpoint-damaged"
        ) from exc


def _run_on_model(config: EvalConfig, folder: Path) -> int:
    """Evaluate a model folder, with MPI if a launcher started this process."""
    world: Communicator = Solo()
    if launcher_rank(os.environ) is None:
        device = choose(config.device, 0)
    else:
        from payload.cli.report import begin  # noqa: PLC0415 - needs MPI

        world, device = begin(config.device)
    model = on_all_ranks(world, lambda: load(folder, config.weights, device))
    trained = on_all_ranks(world, lambda: _settings_of_model(config, folder, model))
    dataset = open_dataset(trained, world, _data_state(model), eval_only=True)
    solo = Solo()
    mesh = Mesh(world, dp=world, tp=solo, pp=solo)
    loader = build_loader(trained, dataset, device, mesh, eval_only=True)
    loss = SoftmaxCrossEntropy(LayerContext(device))
    tape = Tape(training=False)
    parts = [
        loss.forward(model.forward(batch.inputs), batch.targets, tape)
        for batch in loader.held_out()
    ]
    names = ("loss", "correct", "count")
    total, correct, count = world.sum(
        [float(sum(getattr(part, name) for part in parts)) for name in names]
    )
    evaluation = Evaluation(total / count, correct / count)
    if world.rank == 0:
        answer(**_as_record(model.record.files[config.weights].iteration, dataset, evaluation))
    return 0


def _settings_of_model(config: EvalConfig, folder: Path, model: TrainedModel) -> TrainConfig:
    """Return settings to open data as the model's training did. Without ``--data``: the same data
    set.
    """
    record = model.record
    run = folder.absolute().parent / "config.toml"
    flags: dict[str, Any] = {"model": record.model, "device": config.device}
    if config.data:
        flags["data"] = config.data
    elif run.is_file():
        flags["data"] = make(TrainConfig, {}, run, named_by="the run's settings").data.data
    else:
        raise UsageError(
            f"pass --data: {folder} is not in a run's folder, so no config.toml names the data",
            code="data-not-named",
        )
    if record.tokenizer is not None:
        kind = record.tokenizer.get("kind")
        flags["tokenizer"] = kind if kind == "bytes" else f"{kind}:"
        flags["sequence_length"] = int(record.input["length"])
    return make(TrainConfig, flags)


def _data_state(model: TrainedModel) -> dict[str, Any]:
    return {**model.record.input, "classes": model.classes, **(model.record.tokenizer or {})}


def evaluate(
    config: TrainConfig, device: Device, world: MpiTransport
) -> dict[str, int | float | None]:
    """Evaluate a checkpoint. Return the loss in nats per target, accuracy and perplexity, on all
    ranks.

    For text, the result also has bits per byte.
    """
    mesh = make_mesh(world, tp=config.layout.tp, pp=config.layout.pp)
    checkpoints = CheckpointSession(config, world)
    if checkpoints.data_state is None:
        raise UsageError(
            f"--resume {config.checkpoints.resume}: {config.run.out} contains no checkpoint",
            code="no-checkpoint",
        )
    dataset = open_dataset(config, world, checkpoints.data_state, eval_only=True)
    loader = build_loader(config, dataset, device, mesh, eval_only=True)
    engine = build_engine(
        config, device, mesh, build_units(config.model, dataset, mesh.context(device))
    )
    resumed = resume(checkpoints.chosen, engine, checkpoints.describe(engine, {}))
    evaluation = engine.evaluate(loader.held_out())
    return _as_record(resumed.iteration, dataset, evaluation)


def _as_record(
    iteration: int, dataset: Dataset, evaluation: Evaluation
) -> dict[str, int | float | None]:
    size = dataset.bytes_per_target
    return {
        "iteration": iteration,
        "samples": dataset.held_out,
        "loss": _finite(evaluation.loss),
        "accuracy": evaluation.accuracy,
        "perplexity": _finite(evaluation.perplexity),
        "bits_per_byte": _finite(evaluation.bits_per_byte(size)) if size else None,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
