"""Weights of a model folder, and models with these weights. ``record`` describes the folder.

Training writes the folder with ``writer``. This module reads and uses it, without MPI.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.models import module_of
from payload.nn.module import LayerContext, Parameter, Tape, Unit, state_of, torch_shapes
from payload.node.heartbeat import beat
from payload.saved_model import safetensors
from payload.saved_model.record import (
    BEST,
    RECORD,
    ModelRecord,
    read_record,
    reject_missing_weights,
    usable_record,
)

Weights = Mapping[str, Array]
"""Tensors by PyTorch's parameter names, in PyTorch's layouts."""


def read_weights(
    folder: Path, which: str = BEST, record: ModelRecord | None = None
) -> dict[str, Array]:
    """Read the ``final`` or ``best`` weights of a model folder. record: the folder's model.json, if
    read.

    Raises UsageError if the folder does not have these weights, or the weights are damaged.
    """
    files = (record or read_record(folder)).files
    reject_missing_weights(folder, which, files)
    facts = files[which]
    path = folder / facts.file
    weights = read_file(path)
    if sha256_of(path) != facts.sha256:
        raise UsageError(
            f"{path} is damaged: its SHA-256 differs from that in {RECORD}",
            code="model-folder-damaged",
        )
    return weights


def read_file(path: Path) -> dict[str, Array]:
    """Read the tensors of a safetensors file. Raises UsageError if the file cannot be read."""
    try:
        return safetensors.read(path)[0]
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}", code="file-unreadable") from exc
    except ValueError as exc:
        raise UsageError(f"{path} cannot be read: {exc}", code="file-unreadable") from exc


def sha256_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def make_units(model: str, settings: Mapping[str, Any], context: LayerContext) -> list[Unit]:
    """Build a model as groups of layers, without weights. settings: arguments of the model's
    ``build``.

    Raises UsageError if the settings do not fit the model.
    """
    module = module_of(model)
    unknown = [name for name in settings if name not in inspect.signature(module.build).parameters]
    if unknown:
        raise UsageError(
            f"--model {model} has no setting {', '.join(unknown)}", code="model-without-size"
        )
    try:
        units: list[Unit] = module.build(context, **settings)
    except (LookupError, ValueError, TypeError) as exc:
        raise UsageError(f"--model {model}: {exc}", code="model-bad-size") from exc
    return units


def build(
    record: ModelRecord, weights: Weights, device: Device, *, dtype: str = "float32"
) -> list[Unit]:
    """Build a whole model on this rank: groups of layers with weights, in the order of the forward
    pass.

    Raises UsageError if the weights do not fit the model.
    """
    units = make_units(record.model, record.settings, LayerContext(device))
    for parameter, whole in fitted(units, weights):
        parameter.value = device.asarray(np.ascontiguousarray(whole), dtype)
    set_state(units, weights, device)
    return units


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A trained model, ready for predictions."""

    record: ModelRecord
    units: Sequence[Unit]
    device: Device

    @property
    def classes(self) -> int:
        classes = self.record.classes
        return classes if isinstance(classes, int) else len(classes)

    def forward(self, x: Array) -> Array:
        """Return the logits (B, ..., classes) of inputs (B, ...), both on the device."""
        beat()
        for unit in self.units:
            x = unit.layer.forward(x, Tape(training=False))
        return x


def load(folder: Path, weights: str, device: Device, *, takes: str = "") -> TrainedModel:
    """Load a model folder. Arguments and errors: see ``usable_record``."""
    record = usable_record(folder, weights, takes=takes)
    return TrainedModel(
        record, build(record, read_weights(folder, weights, record), device), device
    )


def fitted(units: Sequence[Unit], weights: Weights) -> Iterator[tuple[Parameter, Array]]:
    """Yield each parameter with its whole tensor from ``weights``, converted from PyTorch's layout.

    Raises UsageError if weights are missing, unknown, or of another shape.
    """
    refuse_unfit(torch_shapes(units), weights)
    for parameter in {p.name: p for unit in units for p in unit.layer.parameters}.values():
        yield parameter, parameter.from_torch(weights[parameter.name])


def refuse_unfit(shapes: Mapping[str, tuple[int, ...]], weights: Weights) -> None:
    """Raise UsageError unless the weights have exactly the names and shapes in ``shapes``."""
    problems = [f"{name} is missing" for name in shapes if name not in weights]
    problems += [f"{name} is not in the model" for name in weights if name not in shapes]
    problems += [
        f"{name} has shape {tuple(weights[name].shape)}, but the model needs {shape}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != tuple(shape)
    ]
    if problems:
        suffix = f" (and {len(problems) - 1} more)" if len(problems) > 1 else ""
        raise UsageError(
            f"the weights do not fit this model: {problems[0]}{suffix}", code="weights-other-model"
        )


def set_state(units: Sequence[Unit], weights: Weights, device: Device) -> None:
    """Set the layers' state that is not a parameter, such as running means, to its values in
    ``weights``.
    """
    for name, array in state_of([unit.layer for unit in units]).items():
        array[...] = device.asarray(np.asarray(weights[name], "float64"))
