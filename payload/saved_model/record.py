"""The record of a model folder, which describes how to use its weights.

    model/final.safetensors    the weights at the end of training, float32, with PyTorch's names and layouts
    model/best.safetensors     the weights with the lowest held-out loss, which may be a link to the same file
    model/model.json           the ``ModelRecord``

Standard library only: it is also read where a job is submitted.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from payload.errors import UsageError
from payload.models import MODELS

FORMAT = 1
RECORD = "model.json"
FINAL = "final"
BEST = "best"


@dataclass(frozen=True, slots=True)
class WeightsFile:
    """The description of a file that contains a model's weights at an iteration of the training."""

    file: str
    iteration: int
    # Loss and accuracy on held-out samples. None: not evaluated at this iteration.
    metrics: Mapping[str, float] | None
    sha256: str


@dataclass(frozen=True, slots=True)
class ModelRecord:
    """The description of a trained model: its sizes, input, classes, tokenizer and files of
    weights.
    """

    model: str
    settings: Mapping[str, Any]
    # See ``payload.data.base.Dataset.input``.
    input: Mapping[str, Any]
    # The number of classes, or the names of the classes.
    classes: int | Sequence[str]
    tokenizer: Mapping[str, Any] | None
    files: Mapping[str, WeightsFile] = field(default_factory=dict)

    def fields(self) -> dict[str, Any]:
        """Return the fields as a dictionary, for JSON."""
        return {"format": FORMAT, **asdict(self)}

    def encode(self) -> str:
        return json.dumps(self.fields(), indent=1, allow_nan=False) + "\n"


def read_record(folder: Path) -> ModelRecord:
    """Read the description in a model folder. Raises UsageError if it is missing or damaged."""
    path = folder / RECORD
    try:
        return parse_record(json.loads(path.read_bytes()), path)
    except OSError as exc:
        reason = f"{path} cannot be read: {exc.strerror}"
        raise UsageError(
            f"{reason}: pass the folder model/ of a training run", code="not-a-model-folder"
        ) from exc
    except ValueError as exc:
        raise UsageError(f"{path} is damaged: {exc}", code="model-folder-damaged") from exc


def parse_record(fields: Any, path: Path) -> ModelRecord:
    """Restore a record from the result of ``ModelRecord.fields``. path: its file, for messages.

    Raises UsageError if the fields are damaged, or the model is unknown.
    """
    try:
        version = fields["format"]
        values = {name: fields[name] for name in fields if name != "format"}
        if version != FORMAT:
            raise UsageError(
                f"{path} has format {version}, but this program reads {FORMAT}: update the program",
                code="model-folder-newer",
            )
        files = {which: WeightsFile(**facts) for which, facts in values.pop("files").items()}
        record = ModelRecord(**values, files=files)
    except (ValueError, KeyError, TypeError, AttributeError) as exc:
        raise UsageError(f"{path} is damaged: {exc!r}", code="model-folder-damaged") from exc
    if record.model not in MODELS:
        raise UsageError(
            f"{path} names the unknown model {record.model}; known models: {', '.join(MODELS)}",
            code="model-unknown",
        )
    return record


def reject_missing_weights(folder: Path, which: str, files: Mapping[str, WeightsFile]) -> None:
    """Raise UsageError if the ``final`` or ``best`` weights are not in ``files`` of a model
    folder.
    """
    if which not in files:
        raise UsageError(
            f"{folder} does not contain {which} weights; available: {', '.join(files) or 'none'}",
            code="weights-not-kept",
        )


def usable_record(folder: Path, weights: str, *, takes: str = "") -> ModelRecord:
    """Return the description of a model that a command can use.

    Args:
        weights: ``final`` or ``best``.
        takes: the kind of input that the model must take, such as ``text``. Empty: any kind.

    Raises UsageError if the folder does not have these weights, or the model takes another kind of
    input.
    """
    record = read_record(folder)
    if not isinstance(record.input, Mapping):
        raise UsageError(
            f"{folder} does not describe the model's input: pass the folder model/ of a training "
            "run",
            code="model-input-unknown",
        )
    kind = str(record.input.get("kind"))
    if takes and kind != takes:
        raise UsageError(
            f"{folder} contains {record.model}, which takes {kind}, but this command needs {takes}",
            code="model-unfit-for-command",
        )
    if takes == "text" and record.tokenizer is None:
        raise UsageError(
            f"{folder} was trained on synthetic tokens, which cannot be converted to text",
            code="model-without-text",
        )
    reject_missing_weights(folder, weights, record.files)
    return record
