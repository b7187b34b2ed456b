"""A trained model on one rank, without MPI: what sample, predict and eval make of a model folder."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.nn.module import Tape, Unit
from payload.saved_model.folder import ModelRecord, build, read_record, read_weights


@dataclass(frozen=True, slots=True)
class TrainedModel:
    """A model that is ready to be used."""

    record: ModelRecord
    units: Sequence[Unit]
    device: Device

    @property
    def classes(self) -> int:
        """How many it knows."""
        known = self.record.classes
        return known if isinstance(known, int) else len(known)

    def forward(self, x: Array) -> Array:
        """Inputs on the device (B, ...) → logits (B, ..., classes)"""
        for unit in self.units:
            x = unit.layer.forward(x, Tape(training=False))
        return x


def load(folder: Path, weights: str, device: Device, *, takes: str = "", command: str = "") -> TrainedModel:
    """
    Args:
        takes: what the model must take, if not all the same to the ``command``.

    Raises:
        UsageError: the folder has no such model.
    """
    record = read_record(folder)
    if not isinstance(record.input, Mapping):
        raise UsageError(
            f"{folder} does not tell what the model takes: give one that a training left",
            code="model-input-unknown",
        )
    kind = str(record.input.get("kind"))
    if takes and kind != takes:
        others = {"images": "predict", "text": "sample"}
        fitting = others.get(kind, "eval")
        raise UsageError(
            f"{command} needs a model of {takes}, and {folder} has {record.model}, which takes {kind}: "
            f"use {fitting}",
            code="model-unfit-for-command",
        )
    return TrainedModel(record, build(record, read_weights(folder, weights, record), device), device)
