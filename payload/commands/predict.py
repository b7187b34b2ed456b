"""Classification of images with a trained model."""

from __future__ import annotations

import numpy as np

from payload.cli.config import PredictConfig
from payload.cli.jsonl import answer, print_line
from payload.data.inputs import read_images
from payload.device import choose
from payload.device.base import Array
from payload.errors import UsageError
from payload.saved_model.folder import TrainedModel, load

_BATCH = 64


def run(config: PredictConfig) -> int:
    """Classify all images of all files, print a line for each, and return the exit code."""
    model = load(config.model_folder, config.weights, choose(config.device, 0), takes=config.takes)
    try:
        height, width, channels = map(int, model.record.input["shape"])
        mean, scale = (np.array(model.record.input[name], float) for name in ("mean", "scale"))
        names = [str(name) for name in _names(model)]
    except (LookupError, TypeError, ValueError) as exc:
        raise UsageError(
            f"{config.model_folder}/model.json does not describe the images that the model takes",
            code="model-input-unknown",
        ) from exc
    files = [(file, read_images(file, (height, width, channels))) for file in config.files]
    predictions = []
    for file, images in files:
        probs = probabilities(model, (images - mean) * scale)
        for row, (best, share) in enumerate(
            zip(probs.argmax(axis=1), probs.max(axis=1), strict=True), 1
        ):
            if config.output == "text":
                place = f"{file}:{row}" if len(images) > 1 else str(file)
                print_line(f"{place}: {names[best]} {share:.4f}")
            else:
                prediction = {"class": names[best], "probability": round(float(share), 6)}
                predictions.append({"file": str(file), "row": row, **prediction})
    if config.output == "json":
        answer(predictions=predictions)
    return 0


def _names(model: TrainedModel) -> list[str] | range:
    classes = model.record.classes
    return range(classes) if isinstance(classes, int) else list(classes)


def probabilities(model: TrainedModel, inputs: Array) -> Array:
    """Return class probabilities (N, classes) of images (N, H, W, C), both as NumPy arrays."""
    parts = []
    for start in range(0, len(inputs), _BATCH):
        x = model.device.asarray(np.ascontiguousarray(inputs[start : start + _BATCH], "float32"))
        logits = np.array(model.device.to_host(model.forward(x)), float)
        logits = np.exp(logits - logits.max(axis=1, keepdims=True))
        parts.append(logits / logits.sum(axis=1, keepdims=True))
    return np.concatenate(parts)
