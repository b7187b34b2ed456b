"""Writes a model's weights for other programs: whole tensors in one safetensors file, named as PyTorch,
transformers or torchvision has them."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from payload.checkpoint.shards import BrokenError, Reader, read_data, read_manifest, verify
from payload.config import ExportConfig
from payload.data.images import Known, image_input
from payload.device import Array, Cpu
from payload.errors import UsageError
from payload.jsonl import answer
from payload.libraries import config as library_config
from payload.libraries import naming
from payload.model_folder import (
    ModelRecord,
    WeightsFile,
    make_units,
    module_of,
    read_record,
    read_weights,
)
from payload.models import MODELS
from payload.nn.module import Context
from payload.safetensors import plan

_TORCHVISION = (64, 3, 7, 7)
"""Of its ResNets' first convolution."""


def run(config: ExportConfig) -> int:
    """Write, tell what, and give the exit code.

    Raises:
        UsageError: there is no whole model there, the library has none such, or a file cannot be written.
    """
    if config.checkpoint:
        record, weights = _of_checkpoint(config.checkpoint)
        iteration = record.files["final"].iteration
    else:
        assert config.model_folder  # noqa: S101  one of the two was given
        record = read_record(config.model_folder)
        weights = read_weights(config.model_folder, config.weights, record)
        iteration = record.files[config.weights].iteration
    tensors = naming(config.export_as, record.model).to_library(weights)
    first = tensors.get("conv1.weight")
    if config.export_as == "torchvision" and first is not None and first.shape != _TORCHVISION:
        width, channels, kernel, _ = first.shape
        stem = "padding=1, " if kernel < 7 else "stride=2, padding=3, "  # noqa: PLR2004
        pool = ", and whose maxpool is Identity()" if kernel < 7 else ""  # noqa: PLR2004
        raise UsageError(
            f"--export-as torchvision: its ResNets begin with weights of {_TORCHVISION}, and this one, for "
            f"other images, with {first.shape}: take torch, and load that into one whose conv1 is Conv2d("
            f"{channels}, {width}, {kernel}, {stem}bias=False){pool}"
        )
    size = _write(config, record, tensors)
    numbers = sum(tensor.size for tensor in tensors.values())
    answer(iteration=iteration, tensors=len(tensors), numbers=numbers, bytes=size)
    return 0


def _of_checkpoint(folder: Path) -> tuple[ModelRecord, dict[str, Array]]:
    """The model in a checkpoint, from any layout of ranks, as a run leaves it.

    Raises:
        UsageError: the checkpoint is broken.
    """
    try:
        manifest = read_manifest(folder)
        for facts in manifest.files:
            verify(folder, facts)
        learned = read_data(folder)
    except BrokenError as exc:
        raise UsageError(f"--checkpoint: {folder} is broken: {exc}") from exc
    record = _record(manifest.identity, learned, manifest.iteration)
    units = make_units(record.model, record.settings, Context(Cpu()))
    reader = Reader(folder, manifest)
    weights = reader.tensors("weight")
    parameters = {p.name: p for unit in units for p in unit.layer.parameters}
    shaped = {
        name: parameters[name].form.to_torch(weights[name][: parameters[name].rows]) for name in weights
    }
    return record, {**shaped, **reader.tensors("state")}


def _record(identity: Mapping[str, Any], learned: Mapping[str, Any], iteration: int) -> ModelRecord:
    """
    Args:
        identity: of the run: the model's sizes are among it.
        learned: of the training data.
    """
    model, kind = identity["model"], identity["tokenizer"].partition(":")[0]
    sizes = inspect.signature(module_of(model).build).parameters
    settings = {
        name: identity.get(name, size.default)
        for name, size in sizes.items()
        if name in identity or size.default is not size.empty
    }
    known = Known.read(learned) if "mean" in learned else None
    return ModelRecord(
        model,
        settings,
        image_input(known.shape, known.mean, known.scale) if known else {"kind": MODELS[model].takes},
        settings["classes"] if "classes" in settings else settings["vocabulary"],
        None if MODELS[model].takes == "images" else {"kind": kind, **learned},
        {"final": WeightsFile("", iteration, None, "")},
    )


def _write(config: ExportConfig, record: ModelRecord, tensors: Mapping[str, Array]) -> int:
    """All files; the size of that with the weights.

    Raises:
        UsageError: one cannot be written.
    """
    layout = plan({name: (t.shape, np.dtype("float32")) for name, t in tensors.items()}, format="pt")
    file, texts = config.to, dict[str, str]()
    if config.export_as == "hf":
        file, texts = config.to / "model.safetensors", _texts(record)
    try:
        if texts:
            config.to.mkdir(parents=True, exist_ok=True)
        beside = file.with_name(f"{file.name}.incomplete")
        with beside.open("wb") as out:
            out.write(layout.header)
            for name in layout.offsets:
                out.write(np.ascontiguousarray(tensors[name], "float32").data)
        beside.replace(file)
        for name, text in texts.items():
            (config.to / name).write_text(text, encoding="utf-8")
    except OSError as exc:
        raise UsageError(f"--to: {exc.filename or config.to} cannot be written: {exc.strerror}") from exc
    return layout.size


def _texts(record: ModelRecord) -> dict[str, str]:
    """What transformers has beside the weights: its config, how images are given to it, GPT-2's tokens."""
    classes = record.classes
    names = [f"LABEL_{number}" for number in range(classes)] if isinstance(classes, int) else [*classes]
    found: dict[str, Any] = {"config.json": library_config(record.model, record.settings, names)}
    if "mean" in record.input:
        height, width, _ = record.input["shape"]
        found["preprocessor_config.json"] = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": height, "width": width},
            "rescale_factor": 1 / 255,
            "image_mean": [mean / 255 for mean in record.input["mean"]],
            "image_std": [1 / scale / 255 for scale in record.input["scale"]],
        }
    texts = {name: json.dumps(content, indent=1) + "\n" for name, content in found.items()}
    if record.tokenizer and record.tokenizer["kind"] == "gpt2":
        texts["vocab.json"] = json.dumps({**record.tokenizer["vocabulary"], **record.tokenizer["added"]})
        pairs = (" ".join(pair) for pair in record.tokenizer["merges"])
        texts["merges.txt"] = "\n".join(["#version: 0.2", *pairs, ""])
    return texts
