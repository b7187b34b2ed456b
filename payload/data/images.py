"""Labelled images in memory, with deduplication, normalisation and random augmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from payload.data.base import Pair
from payload.device.base import Array
from payload.errors import UsageError
from payload.nn.module import RandomState
from payload.nn.random import random_bits, sample_keys

# A crop moves an image by up to 1/8 of its side: 4 pixels of 32, as in the ResNet paper.
_PAD = 8


@dataclass(frozen=True, slots=True)
class Labelled:
    """Training or held-out images, uint8, with their labels, integers from 0."""

    images: Array  # [N, H, W, C]
    labels: Array  # [N]

    def __len__(self) -> int:
        return len(self.labels)


@dataclass(frozen=True, slots=True)
class ImageFacts:
    """Properties of training images on which a model depends, such as their shape and number of
    classes.
    """

    shape: tuple[int, ...]  # [H, W, C]
    classes: int
    # Mean of the pixels, and 1 / standard deviation, per channel.
    mean: tuple[float, ...]
    scale: tuple[float, ...]

    @classmethod
    def learn(cls, training: Labelled) -> ImageFacts:
        mean, scale = (tuple(map(float, numbers)) for numbers in _statistics(training.images))
        return cls(training.images.shape[1:], int(training.labels.max()) + 1, mean, scale)

    @classmethod
    def read(cls, record: Mapping[str, Any]) -> ImageFacts:
        """Restore an object from ``record``, its fields in a checkpoint.

        Raises KeyError, TypeError or ValueError if the record is damaged, or not of images.
        """
        height, width, channels = map(int, record["shape"])
        mean, scale = (tuple(map(float, record[name])) for name in ("mean", "scale"))
        if len(mean) != channels or len(scale) != channels:
            raise ValueError(f"{len(mean)} means and {len(scale)} scales for {channels} channels")
        return cls((height, width, channels), int(record["classes"]), mean, scale)

    def check(self, name: str, kind: str, samples: Labelled) -> None:
        """Raise UsageError if samples have another shape, or unknown labels. name, kind: for the
        message.
        """
        actual, expected = (
            "x".join(map(str, shape)) for shape in (samples.images.shape[1:], self.shape)
        )
        if actual != expected:
            raise UsageError(
                f"--data: {name} has {kind} images of {actual}, but the model takes {expected}",
                code="images-other-size",
            )
        highest = int(samples.labels.max())
        highest_known = self.classes - 1
        if highest > highest_known:
            raise UsageError(
                f"--data: {name} has {kind} label {highest}, but the model's labels end at "
                f"{highest_known}",
                code="labels-too-high",
            )


class Images:
    """A ``Dataset`` of images."""

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
        image_facts: ImageFacts | None = None,
    ) -> None:
        """
        Args:
            name: value of ``--data``, for messages.
            training: None in an evaluation, which needs ``image_facts`` instead.
            dtype: dtype of the inputs, float32 or float64.
            augment: any of ``crop`` and ``flip``.
            clean: remove repeated images, and held-out images that are also training images.
            image_facts: properties of the resumed or evaluated run's training images. None: those
                of ``training``.

        Raises UsageError if there are no images, or if training and held-out images differ in
        shape.
        """
        eval_only = training is None and image_facts is not None
        if training is None:
            training = Labelled(held_out.images[:0], held_out.labels[:0])
        dropped = 0
        if clean:
            seen_images: set[bytes] = set()
            total = len(training) + len(held_out)
            training = _unseen(training, seen_images)
            held_out = _unseen(held_out, seen_images)
            dropped = total - len(training) - len(held_out)
        if not (len(training) or eval_only) or not len(held_out):
            raise UsageError(
                f"--data: {name} has too few images: {len(training)} training, {len(held_out)} "
                "held-out",
                code="too-few-images",
            )
        image_facts = image_facts or ImageFacts.learn(training)
        for kind, samples in (("training", training), ("held-out", held_out)):
            if len(samples):
                image_facts.check(name, kind, samples)
        self.data_state: Mapping[str, Any] = asdict(image_facts)
        self.input: Mapping[str, Any] = image_input(
            image_facts.shape, image_facts.mean, image_facts.scale
        )
        self._training = training
        self._held_out = held_out
        self._augment = tuple(augment)
        height, width, channels = image_facts.shape
        self.classes = image_facts.classes
        self.training = len(training)
        self.held_out = len(held_out)
        self._mean, self._scale = (
            np.array(numbers, dtype) for numbers in (image_facts.mean, image_facts.scale)
        )
        shape = f"{height}x{width}x{channels}"
        self.about = (
            f"{name}: {self.training} + {self.held_out} images of {shape}, {self.classes} classes"
        )
        if clean:
            self.about += f"; {dropped} repeated images removed"
        self.facts: Mapping[str, int] = facts(height, width, channels, self.classes)

    def training_batch(self, indices: Array, epoch: int, draw: RandomState) -> Pair:  # noqa: ARG002
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


def image_input(
    shape: Sequence[int], mean: Sequence[float], scale: Sequence[float]
) -> dict[str, Any]:
    return {"kind": "images", "shape": [*shape], "mean": [*mean], "scale": [*scale]}


def facts(height: int, width: int, channels: int, classes: int) -> dict[str, int]:
    """Return the sizes of images by name: the arguments that models need for images
    (``Dataset.facts``).
    """
    return {
        "inputs": height * width * channels,
        # A model of sequences reads an image row by row.
        "features": width * channels,
        "length": height,
        "side": height,
        "channels": channels,
        "classes": classes,
    }


def _statistics(images: Array) -> tuple[Array, Array]:
    """Return two arrays with a number per channel: the mean of the pixels, and 1 / standard
    deviation.
    """
    flat = images.reshape(-1, images.shape[-1])
    # The counts of the 256 levels make the sums exact for any number of pixels.
    counts = np.stack([np.bincount(channel, minlength=256) for channel in flat.T])
    levels = np.arange(256.0)
    mean = counts @ levels / len(flat)
    variance = counts @ levels**2 / len(flat) - mean**2
    return mean, 1 / np.sqrt(np.where(variance > 0, variance, 1.0))


def _unseen(samples: Labelled, seen: set[bytes]) -> Labelled:
    """Return the samples with pixels that are not in ``seen``. Add the pixels of each sample to
    ``seen``.
    """
    fresh = np.ones(len(samples), bool)
    for position, image in enumerate(samples.images):
        pixels = image.tobytes()
        fresh[position] = pixels not in seen
        seen.add(pixels)
    return Labelled(samples.images[fresh], samples.labels[fresh])


def _cropped(images: Array, draw: RandomState) -> Array:
    """Return the images, each shifted by a few random pixels, with black at the edges."""
    count, height, width, _ = images.shape
    pad = max(1, height // _PAD)
    padded = np.pad(images, ((0, 0), (pad, pad), (pad, pad), (0, 0)))
    # The offsets have the shape (B, 2).
    offsets = random_bits(sample_keys(draw, "crop"), np.arange(2, dtype="uint32")) % (2 * pad + 1)
    rows = offsets[:, :1].astype(np.int64) + np.arange(height)
    columns = offsets[:, 1:].astype(np.int64) + np.arange(width)
    return padded[np.arange(count)[:, None, None], rows[:, :, None], columns[:, None, :]]


def _flipped(images: Array, draw: RandomState) -> Array:
    """Return the images, a random half of them mirrored left to right."""
    is_flipped = random_bits(sample_keys(draw, "flip"), np.zeros(1, "uint32"))[:, 0] >> 31 == 1
    return np.where(is_flipped[:, None, None, None], images[:, :, ::-1], images)
