"""Judges a checkpoint by held-out data: one JSON object on stdout."""

from __future__ import annotations

import math
from pathlib import Path

from payload.build import build_engine, build_loader, build_units
from payload.checkpoint.session import Session
from payload.checkpoint.shards import BrokenError, read_manifest
from payload.comm.base import on_all_ranks
from payload.comm.mpi import MpiCommunicator
from payload.config import EvalConfig, TrainConfig
from payload.data.datasets import open_dataset
from payload.device import Device
from payload.errors import UsageError
from payload.jsonl import answer
from payload.parallel.mesh import make_mesh
from payload.report import begin
from payload.settings import from_record, make


def run(config: EvalConfig) -> int:
    """Evaluate, print, and give the exit code."""
    world, device = begin(config.device)
    trained = on_all_ranks(world, lambda: _settings(config))
    found = evaluate(trained, device, MpiCommunicator(device))
    if world.rank == 0:
        answer(**found)
    return 0


def _settings(config: EvalConfig) -> TrainConfig:
    """Those of the run, but for what is asked otherwise; of a checkpoint without its run, those in it."""
    out = config.out or Path()
    flags = {
        "[run] out": out,
        "[run] device": config.device,
        "[checkpoints] resume": config.resume,
        "[checkpoints] save-interval": None,
        "[layout] tp": config.tp,
        "[layout] pp": config.pp,
    }
    if config.data:
        flags["[data] data"] = config.data
    if config.out or config.resume == "auto":
        return make(TrainConfig, flags, out / "config.toml", named_by="--out")
    try:
        return from_record(TrainConfig, read_manifest(Path(config.resume)).config, flags)
    except BrokenError as exc:
        raise UsageError(f"--resume: {config.resume} is broken: {exc}") from exc


def evaluate(config: TrainConfig, device: Device, world: MpiCommunicator) -> dict[str, int | float | None]:
    """Loss in nats a target, accuracy, and for text perplexity and bits per byte; the same on all ranks."""
    mesh = make_mesh(world, tp=config.layout.tp, pp=config.layout.pp)
    checkpoints = Session(config, world)
    if checkpoints.data_state is None:
        raise UsageError(f"--resume {config.checkpoints.resume}: there is no checkpoint in {config.run.out}")
    dataset = open_dataset(config, world, checkpoints.data_state, eval_only=True)
    loader = build_loader(config, dataset, device, mesh, eval_only=True)
    engine = build_engine(config, device, mesh, build_units(config.model, dataset, mesh.context(device)))
    resumed = checkpoints.resume(engine)
    found = engine.evaluate(loader.held_out())
    size = dataset.bytes_per_target
    return {
        "iteration": resumed.iteration,
        "samples": dataset.held_out,
        "loss": _finite(found.loss),
        "accuracy": found.accuracy,
        "perplexity": _finite(found.perplexity),
        "bits_per_byte": _finite(found.bits_per_byte(size)) if size else None,
    }


def _finite(value: float) -> float | None:
    """JSON has no other numbers."""
    return value if math.isfinite(value) else None
