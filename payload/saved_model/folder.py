"""The model that a run leaves: its weights, and all that is needed to use them, in one folder.

    model/final.safetensors    the weights as training ended, float32, with PyTorch's names and layouts
    model/best.safetensors     those with the lowest loss on held-out samples; maybe the same file
    model/model.json           the ``ModelRecord``

``train`` writes it by ``writer``; here it is read and used, without MPI.
"""

from __future__ import annotations

import hashlib
import inspect
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from payload.device.base import Array, Device
from payload.errors import UsageError
from payload.models import MODELS
from payload.nn.module import Context, Parameter, Tape, Unit, state_of, torch_shapes
from payload.parallel.engine import Engine
from payload.saved_model import safetensors

FORMAT = 1
RECORD = "model.json"
FINAL, BEST = "final", "best"

Weights = Mapping[str, Array]
"""By PyTorch's names, in PyTorch's layouts."""


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """Weights at one point of a run."""

    file: str
    iteration: int
    metrics: Mapping[str, float] | None  # loss and accuracy on held-out samples; None: not evaluated then
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """All that is needed to use a model's weights, and nothing else."""

    model: str  # as of --model
    settings: Mapping[str, Any]  # with which it is built
    input: Mapping[str, Any]  # what a sample is; see ``payload.data.base.Dataset.input``
    classes: int | Sequence[str]  # how many there are, or their names
    tokenizer: Mapping[str, Any] | None  # of text
    files: Mapping[str, WeightsFile] = field(
        default_factory=dict
    )  # ``final`` and ``best``, where it has them

    def fields(self) -> dict[str, Any]:
        """For JSON."""
        return {"format": FORMAT, **asdict(self)}

    def encode(self) -> str:
        return json.dumps(self.fields(), indent=1, allow_nan=False) + "\n"


def read_record(folder: Path) -> ModelRecord:
    """
    Raises:
        UsageError: there is none, or this program does not know such a model.
    """
    path = folder / RECORD
    try:
        return parse_record(json.loads(path.read_bytes()), path)
    except OSError as exc:
        why = f"{path} cannot be read: {exc.strerror}"
        raise UsageError(
            f"{why}: give the folder model/ that a training left", code="not-a-model-folder"
        ) from exc
    except ValueError as exc:
        raise UsageError(f"{path} is not as a training wrote it: {exc}", code="model-folder-damaged") from exc


def parse_record(fields: Any, path: Path) -> ModelRecord:
    """What ``ModelRecord.fields`` made.

    Args:
        path: whence it is, for messages.

    Raises:
        UsageError: it is something else, or this program does not know such a model.
    """
    try:
        version, given = fields["format"], {name: value for name, value in fields.items() if name != "format"}
        if version != FORMAT:
            raise UsageError(
                f"{path} is of format {version}, and this program reads {FORMAT}: update it",
                code="model-folder-newer",
            )
        files = {which: WeightsFile(**facts) for which, facts in given.pop("files").items()}
        record = ModelRecord(**given, files=files)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(
            f"{path} is not as a training wrote it: {exc!r}", code="model-folder-damaged"
        ) from exc
    if record.model not in MODELS:
        raise UsageError(
            f"{path} is of a model {record.model}; this program knows {', '.join(MODELS)}",
            code="model-unknown",
        )
    return record


def read_weights(folder: Path, which: str = BEST, record: ModelRecord | None = None) -> dict[str, Array]:
    """The ``final`` or the ``best`` weights.

    Args:
        record: what ``read_record`` gave for the folder.

    Raises:
        UsageError: there are none such, or they are not as they were written.
    """
    files = (record or read_record(folder)).files
    if which not in files:
        raise UsageError(
            f"{folder} has no {which} weights, only {', '.join(files) or 'none'}: take others",
            code="weights-not-kept",
        )
    facts = files[which]
    path = folder / facts.file
    weights = read_file(path)
    if sha256_of(path) != facts.sha256:
        raise UsageError(
            f"{path} is not as a training wrote it: its SHA-256 is not that of {RECORD}",
            code="model-folder-damaged",
        )
    return weights


def read_file(path: Path) -> dict[str, Array]:
    """The tensors of any file in the safetensors format.

    Raises:
        UsageError: it cannot be read, or is none.
    """
    try:
        return safetensors.read(path)[0]
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}", code="file-unreadable") from exc
    except ValueError as exc:
        raise UsageError(f"{path} cannot be read: {exc}", code="file-unreadable") from exc


def sha256_of(path: Path) -> str:
    """In hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def module_of(model: str) -> ModuleType:
    """Where ``--model`` is built."""
    return import_module(f"payload.models.{MODELS[model].module}")


def make_units(model: str, settings: Mapping[str, Any], context: Context) -> list[Unit]:
    """The model, without any numbers yet.

    Raises:
        UsageError: it cannot be of such sizes.
    """
    module = module_of(model)
    unknown = [name for name in settings if name not in inspect.signature(module.build).parameters]
    if unknown:
        raise UsageError(f"--model {model} has no {', '.join(unknown)}", code="model-without-size")
    try:
        units: list[Unit] = module.build(context, **settings)
    except (LookupError, ValueError, TypeError) as exc:
        raise UsageError(f"--model {model}: {exc}", code="model-bad-size") from exc
    return units


def build(record: ModelRecord, weights: Weights, device: Device, *, dtype: str = "float32") -> list[Unit]:
    """The model on this rank alone, ready for the forward pass of its units one after the other.

    Raises:
        UsageError: the weights are not those of such a model.
    """
    units = make_units(record.model, record.settings, Context(device))
    for parameter, whole in fitted(units, weights):
        parameter.value = device.asarray(np.ascontiguousarray(whole), dtype)
    set_state(units, weights, device)
    return units


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


def load(folder: Path, weights: str, device: Device, *, takes: str = "") -> TrainedModel:
    """
    Args:
        takes: what the model must take. Default: anything.

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
        raise UsageError(
            f"{folder} has {record.model}, which takes {kind}, not {takes}", code="model-unfit-for-command"
        )
    return TrainedModel(record, build(record, read_weights(folder, weights, record), device), device)


def fitted(units: Sequence[Unit], weights: Weights) -> Iterator[tuple[Parameter, Array]]:
    """Each parameter, and the whole tensor as the layers here have it; first, that all fit the model.

    Raises:
        UsageError: some are missing, too many, or of another shape.
    """
    refuse_unfit(torch_shapes(units), weights)
    for parameter in {p.name: p for unit in units for p in unit.layer.parameters}.values():
        yield parameter, parameter.from_torch(weights[parameter.name])


def refuse_unfit(shapes: Mapping[str, tuple[int, ...]], weights: Weights) -> None:
    """
    Args:
        shapes: of the model's tensors.

    Raises:
        UsageError: the weights are not those of the model.
    """
    wrong = [f"no {name}" for name in shapes if name not in weights]
    wrong += [f"{name}, which the model has not" for name in weights if name not in shapes]
    wrong += [
        f"{name} of {tuple(weights[name].shape)}, and the model's is of {shape}"
        for name, shape in shapes.items()
        if name in weights and tuple(weights[name].shape) != tuple(shape)
    ]
    if wrong:
        more = f" (and {len(wrong) - 1} more)" if len(wrong) > 1 else ""
        raise UsageError(
            f"the weights are not of this model: there is {wrong[0]}{more}", code="weights-other-model"
        )


def set_state(units: Sequence[Unit], weights: Weights, device: Device) -> None:
    """What layers keep beside their parameters."""
    for name, array in state_of([unit.layer for unit in units]).items():
        array[...] = device.asarray(np.asarray(weights[name], "float64"))


def set_weights(engine: Engine, units: Sequence[Unit], weights: Weights) -> None:
    """Let training begin with such weights, on any layout of ranks.

    Args:
        units: the whole model, of which the engine has this rank's stage.

    Raises:
        UsageError: the weights are not those of the model.
    """
    storage = engine.storage
    segments = {id(segment.parameter): segment for segment in storage.segments}
    for parameter, whole in fitted(units, weights):
        if segment := segments.get(id(parameter)):
            stop = segment.offset + segment.stop - segment.start
            part = np.ascontiguousarray(parameter.part(whole)).reshape(-1)[segment.offset : stop]
            mine = storage.master_weights[segment.start : segment.stop]
            mine[...] = storage.optimizer_device.asarray(part, mine.dtype)
    set_state(engine.units, weights, engine.device)
    storage.publish()
