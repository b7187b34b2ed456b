"""Export of a trained model's weights to one safetensors file."""

from __future__ import annotations

import os
from pathlib import Path

from payload.checkpoint.shards import BrokenError, CheckpointReader, read_manifest, verify
from payload.cli.config import ExportConfig
from payload.cli.jsonl import answer
from payload.device.base import CpuDevice
from payload.errors import UsageError
from payload.nn.module import LayerContext, state_of
from payload.node.host import launcher_rank
from payload.saved_model import safetensors
from payload.saved_model.folder import Weights, make_units, read_weights
from payload.saved_model.record import ModelRecord, parse_record, read_record


def run(config: ExportConfig) -> int:
    """Write the weights, print a summary, and return the exit code."""
    # Only rank 0 writes.
    if launcher_rank(os.environ):
        return 0
    if (config.checkpoint is None) == (config.model_folder is None):
        raise UsageError(
            "export: pass either --model-folder or --checkpoint", code="options-exclusive"
        )
    file = config.to or Path("model.safetensors")
    _check_target(file, force=config.force)
    if config.checkpoint:
        record, weights, iteration = of_checkpoint(config.checkpoint)
    else:
        folder = config.model_folder or Path()
        record = read_record(folder)
        weights = read_weights(folder, config.weights, record)
        iteration = record.files[config.weights].iteration
    size = write(file, weights)
    numbers = sum(tensor.size for tensor in weights.values())
    answer(
        model=record.model, iteration=iteration, tensors=len(weights), numbers=numbers, bytes=size
    )
    return 0


def _check_target(to: Path, *, force: bool) -> None:
    """Raise UsageError if the parent of ``to`` is missing, or ``to`` exists and may not be
    overwritten.
    """
    if not to.parent.is_dir():
        raise UsageError(
            f"--to: the folder {to.parent} does not exist; create it first", code="no-such-folder"
        )
    if to.is_dir():
        raise UsageError(f"--to must be a file, but {to} is a folder", code="target-other-kind")
    if to.exists() and not force:
        raise UsageError(
            f"--to: {to} exists; choose another name, or overwrite it with --force",
            code="file-exists",
        )


def write(path: Path, weights: Weights) -> int:
    """Write a safetensors file, and return its size in bytes. Raises UsageError if writing
    fails.
    """
    stream = safetensors.SafetensorsWriter(
        path, {name: weights[name].shape for name in sorted(weights)}
    )
    for name in sorted(weights):
        stream.write(weights[name])
    try:
        stream.close()
    except OSError as exc:
        raise UsageError(
            f"--to: {path} cannot be written: {exc.strerror}", code="file-unwritable"
        ) from exc
    return stream.plan.size


def of_checkpoint(folder: Path) -> tuple[ModelRecord, Weights, int]:
    """Return a checkpoint's model description, weights and iteration. Raises UsageError if it is
    damaged.
    """
    try:
        manifest = read_manifest(folder)
        for facts in manifest.files:
            verify(folder, facts)
    except BrokenError as exc:
        raise UsageError(
            f"--checkpoint: {folder} is damaged: {exc}", code="checkpoint-damaged"
        ) from exc
    record = parse_record(manifest.model, folder)
    reader = CheckpointReader(folder, manifest)
    layers = [
        unit.layer for unit in make_units(record.model, record.settings, LayerContext(CpuDevice()))
    ]
    weights = {name: reader.whole("state", name) for name in state_of(layers)}
    for parameter in (parameter for layer in layers for parameter in layer.parameters):
        whole = reader.whole("weight", parameter.name)[: parameter.rows]
        weights[parameter.name] = parameter.form.to_torch(whole)
    return (
        record,
        {name: array.astype("float32") for name, array in weights.items()},
        manifest.iteration,
    )
