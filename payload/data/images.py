"""Labelled images in memory: cleaned, normalised, and varied by chance while training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from payload.data.base import Pair
from payload.device.base import Array
from payload.errors import UsageError
from payload.nn.module import Draw
from payload.nn.random import drawn, sample_keys

_PAD = 8  # a crop is moved by up to a side's 8th: 4 pixels of 32, as ResNet's authors did


@dataclass(frozen=True, slots=True)
class Labelled:
    """Images of one kind, training or held-out."""

    images: Array  # (N, H, W, C), uint8
    labels: Array  # (N,), whole numbers from 0

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class Known:
    """What a model knows of images: how those that it was trained on are."""

    shape: tuple[int, ...]  # height, width, channels
    classes: int
    mean: tuple[float, ...]  # of each channel's pixels
    scale: tuple[float, ...]  # one over their standard deviation

    @classmethod
    def learn(cls, training: Labelled) -> Known:
        mean, scale = (tuple(map(float, numbers)) for numbers in _statistics(training.images))
        return cls(training.images.shape[1:], int(training.labels.max()) + 1, mean, scale)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> Known:
        """Of what ``Dataset.data_state`` was.

        Raises:
            KeyError, TypeError, ValueError: it is something else.
        """
        height, width, channels = map(int, record["shape"])
        mean, scale = (tuple(map(float, record[name])) for name in ("mean", "scale"))
        if len(mean) != channels or len(scale) != channels:
            raise ValueError(f"{len(mean)} means and {len(scale)} scales for {channels} channels")
        return cls((height, width, channels), int(record["classes"]), mean, scale)

    def check(self, name: str, kind: str, samples: Labelled) -> None:
        """
        Raises:
            UsageError: they are of another shape, or have labels that are not known.
        """
        theirs, ours = ("x".join(map(str, shape)) for shape in (samples.images.shape[1:], self.shape))
        if theirs != ours:
            raise UsageError(
                f"--data: {name} has {kind} images of {theirs}, but the model knows those of {ours}",
                code="images-other-size",
            )
        highest, known = int(samples.labels.max()), self.classes - 1
        if highest > known:
            raise UsageError(
                f"--data: {name} has {kind} labels up to {highest}, but the model knows those up to {known}",
                code="labels-too-high",
            )


class Images:
    """A data set of images, as ``Dataset``."""

    targets = 1.0
    bytes_per_target: float | None = None
    tokenizer: Mapping[str, Any] | None = None

    def __init__(
        self,
        name: str,
        training: Labelled | None,
        held_out: Labelled,
        *,
        dtype: str,
        augment: Sequence[str] = (),
        clean: bool = False,
        known: Known | None = None,
    ) -> None:
        """
        Args:
            name: for people.
            training: None where samples are only judged by what is ``known``.
            dtype: of the inputs, float32 or float64.
            augment: of ``crop`` and ``flip``.
            clean: leave out samples that were there before, and held-out ones that are trained on.
            known: by the run that is gone on from; else it is learned of ``training``.

        Raises:
            UsageError: there is nothing in it, or it is not of one kind.
        """
        eval_only = training is None and known is not None
        if training is None:
            training = Labelled(held_out.images[:0], held_out.labels[:0])
        dropped = 0
        if clean:
            seen: set[bytes] = set()
            before = len(training) + len(held_out)
            training, held_out = _unseen(training, seen), _unseen(held_out, seen)
            dropped = before - len(training) - len(held_out)
        if not (len(training) or eval_only) or not len(held_out):
            raise UsageError(
                f"--data: {name} has {len(training)} training and {len(held_out)} held-out images",
                code="too-few-images",
            )
        known = known or Known.learn(training)
        for kind, samples in (("training", training), ("held-out", held_out)):
            if len(samples):
                known.check(name, kind, samples)
        self.data_state: Mapping[str, Any] = asdict(known)
        self.input: Mapping[str, Any] = image_input(known.shape, known.mean, known.scale)
        self._training, self._held_out, self._augment = training, held_out, tuple(augment)
        height, width, channels = known.shape
        self.classes = known.classes
        self.training, self.held_out = len(training), len(held_out)
        self._mean, self._scale = (np.array(numbers, dtype) for numbers in (known.mean, known.scale))
        shape = f"{height}x{width}x{channels}"
        self.about = f"{name}: {self.training} + {self.held_out} images of {shape}, {self.classes} classes"
        if clean:
            self.about += f"; {dropped} repeated ones left out"
        self.facts: Mapping[str, int] = facts(height, width, channels, self.classes)

    def training_batch(self, indices: Array, epoch: int, draw: Draw) -> Pair:  # noqa: ARG002
        images = self._training.images[indices]
        if "crop" in self._augment:
            images = _cropped(images, draw)
        if "flip" in self._augment:
            images = _flipped(images, draw)
        return self._normalised(images), self._training.labels[indices]

    def held_out_batch(self, indices: Array) -> Pair:
        return self._normalised(self._held_out.images[indices]), self._held_out.labels[indices]

    def _normalised(self, images: Array) -> Array:
        x = images.astype(self._mean.dtype)
        x -= self._mean
        x *= self._scale
        return x


def image_input(shape: Sequence[int], mean: Sequence[float], scale: Sequence[float]) -> dict[str, Any]:
    """See ``Dataset.input``."""
    return {"kind": "images", "shape": [*shape], "mean": [*mean], "scale": [*scale]}


def facts(height: int, width: int, channels: int, classes: int) -> dict[str, int]:
    """The sizes of images, by the names under which models ask for them."""
    return {
        "inputs": height * width * channels,
        "features": width * channels,  # of a row, for models that read images row by row
        "length": height,  # rows
        "side": height,
        "channels": channels,
        "classes": classes,
    }


def _statistics(images: Array) -> tuple[Array, Array]:
    """Of each channel's pixels: the mean, and one over the standard deviation."""
    flat = images.reshape(-1, images.shape[-1])
    counts = np.stack([np.bincount(channel, minlength=256) for channel in flat.T])  # exact, however many
    levels = np.arange(256.0)
    mean = counts @ levels / len(flat)
    variance = counts @ levels**2 / len(flat) - mean**2
    return mean, 1 / np.sqrt(np.where(variance > 0, variance, 1.0))


def _unseen(samples: Labelled, seen: set[bytes]) -> Labelled:
    """Those whose image is not among ``seen``, where it is put."""
    fresh = np.ones(len(samples), bool)
    for place, image in enumerate(samples.images):
        pixels = image.tobytes()
        fresh[place] = pixels not in seen
        seen.add(pixels)
    return Labelled(samples.images[fresh], samples.labels[fresh])


def _cropped(images: Array, draw: Draw) -> Array:
    """Each image moved by up to a few pixels, with black where it came from."""
    count, height, width, _ = images.shape
    pad = max(1, height // _PAD)
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    offsets = drawn(sample_keys(draw, "crop"), np.arange(2, dtype="uint32")) % (2 * pad + 1)  # (B, 2)
    rows = offsets[:, :1].astype(np.int64) + np.arange(height)
    columns = offsets[:, 1:].astype(np.int64) + np.arange(width)
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _flipped(images: Array, draw: Draw) -> Array:
    """Every other image, by chance, mirrored left to right."""
    turned = drawn(sample_keys(draw, "flip"), np.zeros(1, "uint32"))[:, 0] >> 31 == 1
    return np.where(turned[:, None, None, None], images[:, :, ::-1], images)
