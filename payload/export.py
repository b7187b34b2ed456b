"""Writes a trained model's weights as one file of whole tensors, for other programs."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from payload import safetensors
from payload.checkpoint.shards import BrokenError, Manifest, Reader, read_manifest, verify
from payload.config import ExportConfig
from payload.device import Array, Cpu
from payload.errors import UsageError
from payload.host import launcher_rank
from payload.jsonl import answer
from payload.model_folder import ModelRecord, Weights, make_units, parse_record, read_record, read_weights
from payload.nn.module import Context, state_of


def run(config: ExportConfig) -> int:
    """Write, tell what, and give the exit code.

    Raises:
        UsageError: there is no such model, it is broken, or the file cannot be written.
    """
    if launcher_rank(os.environ):  # one rank does it
        return 0
    if (config.checkpoint is None) == (config.model_folder is None):
        raise UsageError("export: give either --model-folder or --checkpoint")
    if config.checkpoint:
        record, weights, iteration = of_checkpoint(config.checkpoint)
    else:
        folder = config.model_folder or Path()
        record = read_record(folder)
        weights = read_weights(folder, config.weights, record)
        iteration = record.files[config.weights].iteration
    size = write(config.to, weights)
    numbers = sum(tensor.size for tensor in weights.values())
    answer(model=record.model, iteration=iteration, tensors=len(weights), numbers=numbers, bytes=size)
    return 0


def write(path: Path, weights: Weights) -> int:
    """One file in the safetensors format, of so many bytes.

    Raises:
        UsageError: it cannot be written.
    """
    stream = safetensors.Stream(path, {name: weights[name].shape for name in sorted(weights)})
    for name in sorted(weights):
        stream.write(weights[name])
    try:
        stream.close()
    except OSError as exc:
        raise UsageError(f"--to: {path} cannot be written: {exc.strerror}") from exc
    return stream.plan.size


def of_checkpoint(folder: Path) -> tuple[ModelRecord, Weights, int]:
    """What a checkpoint has of a model, and its iteration.

    Raises:
        UsageError: it is broken.
    """
    try:
        manifest = read_manifest(folder)
        for facts in manifest.files:
            verify(folder, facts)
    except BrokenError as exc:
        raise UsageError(f"--checkpoint: {folder} is broken: {exc}") from exc
    record = parse_record(manifest.model, folder)
    return record, _Saved(folder, manifest, record), manifest.iteration


class _Saved(Mapping[str, Array]):
    """The weights in a checkpoint, with PyTorch's names and layouts. Each is read when it is asked for."""

    def __init__(self, folder: Path, manifest: Manifest, record: ModelRecord) -> None:
        self._reader = Reader(folder, manifest)
        units = make_units(record.model, record.settings, Context(Cpu()))
        self._parameters = {p.name: p for unit in units for p in unit.layer.parameters}
        self._names = sorted([*self._parameters, *state_of([unit.layer for unit in units])])

    def __getitem__(self, name: str) -> Array:
        if name not in self._parameters:
            return self._reader.whole("state", name).astype("float32")
        parameter = self._parameters[name]
        whole = self._reader.whole("weight", name)[: parameter.rows]
        return parameter.form.to_torch(whole).astype("float32")

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)
