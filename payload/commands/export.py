"""Export of a trained model's weights to a file with the tensor names of another library."""

from __future__ import annotations

import json
import os
from pathlib import Path

from payload.checkpoint.shards import BrokenError, CheckpointReader, read_manifest, verify
from payload.cli.config import ExportConfig
from payload.cli.jsonl import answer
from payload.data.datasets import tokenizer_of
from payload.data.gpt2 import END, MASK, to_tokenizer_json
from payload.device.base import CpuDevice
from payload.errors import UsageError
from payload.nn.module import LayerContext, state_of
from payload.node.host import launcher_rank
from payload.saved_model import safetensors
from payload.saved_model.folder import (
    ModelRecord,
    Weights,
    make_units,
    parse_record,
    read_record,
    read_weights,
)
from payload.saved_model.libraries import config as library_config
from payload.saved_model.libraries import naming

_TORCHVISION = (64, 3, 7, 7)
"""Shape of the first convolution's weights in torchvision's ResNets."""
_IN_FOLDER = ("model.safetensors", "config.json")
"""Files in the folder of a transformers model."""


def run(config: ExportConfig) -> int:
    """Write the weights, print a summary, and return the exit code."""
    # Only rank 0 writes.
    if launcher_rank(os.environ):
        return 0
    if (config.checkpoint is None) == (config.model_folder is None):
        raise UsageError(
            "export: pass either --model-folder or --checkpoint", code="options-exclusive"
        )
    is_folder = config.export_as == "hf"
    file = config.to or Path("model-hf" if is_folder else "model.safetensors")
    _check_target(file, is_folder=is_folder, force=config.force)
    if config.checkpoint:
        record, weights, iteration = of_checkpoint(config.checkpoint)
    else:
        folder = config.model_folder or Path()
        record = read_record(folder)
        weights = read_weights(folder, config.weights, record)
        iteration = record.files[config.weights].iteration
    tensors = naming(config.export_as, record.model).to_library(weights)
    if config.export_as == "torchvision":
        shape = tensors["conv1.weight"].shape
        if shape != _TORCHVISION:
            raise UsageError(
                "--export-as torchvision: its ResNets begin with weights of shape "
                f"{_TORCHVISION}, but this model, for smaller images, with weights of shape "
                f"{shape}; use --export-as torch",
                code="export-unfit",
            )
    if is_folder:
        _write_texts(file, record)
        file /= _IN_FOLDER[0]
    size = write(file, tensors)
    numbers = sum(tensor.size for tensor in tensors.values())
    answer(
        model=record.model, iteration=iteration, tensors=len(tensors), numbers=numbers, bytes=size
    )
    return 0


def _check_target(to: Path, *, is_folder: bool, force: bool) -> None:
    """Raise UsageError if the parent of ``to`` is missing, or ``to`` exists and may not be
    overwritten.
    """
    if not to.parent.is_dir():
        raise UsageError(
            f"--to: the folder {to.parent} does not exist; create it first", code="no-such-folder"
        )
    if to.exists() and to.is_dir() != is_folder:
        kinds = ("a file", "a folder")[:: 1 if is_folder else -1]
        raise UsageError(
            f"--to must be {kinds[1]}, but {to} is {kinds[0]}", code="target-other-kind"
        )
    existing = [
        file
        for file in ([to / name for name in _IN_FOLDER] if is_folder else [to])
        if file.exists()
    ]
    if existing and not force:
        raise UsageError(
            f"--to: {existing[0]} exists; choose another name, or overwrite it with --force",
            code="file-exists",
        )


def _write_texts(folder: Path, record: ModelRecord) -> None:
    """Write the other files that transformers needs: config, image preprocessing, tokenizer."""
    classes = record.classes
    names = (
        [f"LABEL_{number}" for number in range(classes)] if isinstance(classes, int) else [*classes]
    )
    config = library_config(record.model, record.settings, names)
    texts = {}
    if "mean" in record.input:
        height, width, _ = record.input["shape"]
        images = {
            "image_processor_type": "ViTImageProcessor",
            "size": {"height": height, "width": width},
            "rescale_factor": 1 / 255,
            "image_mean": [mean / 255 for mean in record.input["mean"]],
            "image_std": [1 / scale / 255 for scale in record.input["scale"]],
        }
        texts["preprocessor_config.json"] = json.dumps(images, indent=1)
    if record.tokenizer:
        mask = record.input.get("mask")
        texts["tokenizer.json"] = json.dumps(
            to_tokenizer_json(tokenizer_of(record.tokenizer), mask)
        )
        tokens = {
            "tokenizer_class": "PreTrainedTokenizerFast",
            # By default transformers 4 adds token_type_ids, for which its GPT-2 adds an embedding.
            "model_input_names": ["input_ids", "attention_mask"],
            "clean_up_tokenization_spaces": False,
        }
        if END in (added := record.tokenizer.get("added", {})):
            config |= dict.fromkeys(("bos_token_id", "eos_token_id"), added[END])
            tokens |= dict.fromkeys(("bos_token", "eos_token"), END)
        if mask is not None:
            tokens["mask_token"] = MASK
        texts["tokenizer_config.json"] = json.dumps(tokens, indent=1)
    texts[_IN_FOLDER[1]] = json.dumps(config, indent=1)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in texts.items():
            (folder / name).write_text(text + "\n", encoding="utf-8")
    except OSError as exc:
        raise UsageError(
            f"--to: {exc.filename or folder} cannot be written: {exc.strerror}",
            code="file-unwritable",
        ) from exc


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
