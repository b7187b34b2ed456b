"""Opening the data set that ``--data`` names: images, text, or synthetic noise."""

from __future__ import annotations

import hashlib
import json
import os
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from payload.cli.config import TrainConfig
from payload.comm.base import Communicator, on_all_ranks
from payload.data import idx
from payload.data.base import Dataset, Pair
from payload.data.gpt2 import GPT2, load
from payload.data.images import ImageFacts, Images, Labelled, facts, image_input
from payload.data.text import MaskedText, Text, parts
from payload.data.tokenizer import BytePairs, Bytes, Tokenizer, learn
from payload.device.base import Array
from payload.errors import UsageError
from payload.models import MODELS
from payload.nn.module import RandomState
from payload.node.host import hostname

T = TypeVar("T")

_GPT2_VOCABULARY = 50_257
_IMAGENET = (224, 3, 1000)  # side, channels, classes
_FEW = 4
_DIGITS = Path(__file__).with_name("digits.npz")
_HELD_OUT_EVERY = 5
# These are the sizes of synthetic data.
_SAMPLES = 65_536
_HELD_OUT = 64
# Of larger files, only the size and the first and last _SAMPLE bytes are hashed.
_WHOLE = 256 << 20
_SAMPLE = 1 << 20
# Number of synthetic samples, which are used in turn, because new noise would take longer than many
# models.
_POOL = 64


def open_dataset(
    config: TrainConfig,
    world: Communicator,
    data_state: Mapping[str, Any] | None = None,
    *,
    eval_only: bool = False,
) -> Dataset:
    """Open the data that ``--data`` names, as images, text or masked text, depending on the model.

    Args:
        data_state: state that the resumed or evaluated run learned from its training data, such as
            a tokenizer (``Dataset.data_state``). None: learn the state from the data.
        eval_only: the caller needs only held-out samples, so skip the training samples if possible.

    Raises UsageError on every rank if the data does not exist, is invalid, or differs between
    nodes.
    """
    data = config.data
    model = MODELS[config.model.model]
    model.reject_unfit_data(data.data)
    dtype = "float64" if config.precision.precision == "fp64" else "float32"
    kind, _, location = data.data.partition(":")
    if kind == "synthetic":
        if model.takes == "images":
            return synthetic_images(*_IMAGENET, dtype=dtype)
        return synthetic_tokens(_GPT2_VOCABULARY, data.sequence_length)
    if kind == "text":
        return _text(config, Path(location), world, data_state)
    image_facts = None
    if data_state is not None:
        image_facts = _as_learned(f"--data {data.data}", "images", ImageFacts.read, data_state)
    # --clean needs the training samples, to remove copies of them from the held-out samples.
    held_out_only = eval_only and not data.clean
    training, held_out = on_all_ranks(
        world,
        lambda: (
            idx.load(Path(location), eval_only=held_out_only) if kind == "idx" else load_digits()
        ),
    )
    arrays = [
        array for half in (training, held_out) if half for array in (half.images, half.labels)
    ]
    _check_same(world, data.data, *(array.data for array in arrays))
    return Images(
        data.data,
        training,
        held_out,
        dtype=dtype,
        augment=data.augment,
        clean=data.clean,
        image_facts=image_facts,
    )


def data_record(config: TrainConfig, dataset: Dataset) -> dict[str, Any]:
    """Return the name and size of a run's data, and the hashes of its files, for JSON.

    Raises UsageError if a file can no longer be read.
    """
    kind, _, location = config.data.data.partition(":")
    files: dict[str, Callable[[], list[Path]]] = {
        "digits": lambda: [_DIGITS],
        "idx": lambda: idx.files(Path(location)),
        "text": lambda: [Path(location)],
        "synthetic": list,
    }
    record: dict[str, Any] = {"name": config.data.data, "bytes": 0}
    record |= {"training": dataset.training, "held_out": dataset.held_out}
    try:
        for file in files[kind]():
            add_hash(record, file)
    except OSError as exc:
        raise UsageError(
            f"--data: {exc.filename} cannot be read: {exc.strerror}", code="file-unreadable"
        ) from exc
    if dataset.tokenizer:
        learned = json.dumps(dataset.tokenizer, sort_keys=True).encode()
        record["tokenizer_sha256"] = hashlib.sha256(learned).hexdigest()
    return record


def add_hash(record: dict[str, Any], file: Path) -> None:
    """Add a file's size and SHA-256 to the record. For a large file, hash only size, start and
    end.
    """
    with file.open("rb") as opened:
        size = opened.seek(0, os.SEEK_END)
        opened.seek(0)
        record["bytes"] += size
        if size <= _WHOLE:
            record.setdefault("sha256", {})[file.name] = hashlib.file_digest(
                opened, "sha256"
            ).hexdigest()
            return
        sample = hashlib.sha256(f"{size}\n".encode() + opened.read(_SAMPLE))
        opened.seek(-_SAMPLE, os.SEEK_END)
        sample.update(opened.read(_SAMPLE))
        record.setdefault("sampled_sha256", {})[file.name] = sample.hexdigest()


def _text(
    config: TrainConfig, file: Path, world: Communicator, data_state: Mapping[str, Any] | None
) -> Dataset:
    def read() -> bytes:
        try:
            return file.read_bytes()
        except OSError as exc:
            raise UsageError(
                f"--data: {file} cannot be read: {exc.strerror}", code="file-unreadable"
            ) from exc

    text = on_all_ranks(world, read)
    data = config.data
    _check_same(world, data.data, text)
    kind = Text if MODELS[config.model.model].takes == "text" else MaskedText
    tokenizer = _tokenizer(data.tokenizer, text, world, data_state)
    return kind(data.data, text, tokenizer, length=data.sequence_length, seed=config.batch.seed)


def _check_same(world: Communicator, name: str, *contents: bytes | memoryview) -> None:
    """Raise UsageError on every rank if ``contents``, the data that each rank has read, is not the
    same.
    """
    size = 0
    crc32 = 0
    for piece in contents:
        size = size + memoryview(piece).nbytes
        crc32 = zlib.crc32(piece, crc32)
    hosts_by_content: dict[str, list[str]] = {}
    for content, host in world.allgather((f"{size} bytes with CRC-32 {crc32:08x}", hostname())):
        hosts_by_content.setdefault(content, []).append(host)
    if len(hosts_by_content) > 1:
        sides = ", ".join(
            f"{content} on {_few(hosts)}" for content, hosts in hosts_by_content.items()
        )
        raise UsageError(
            f"--data: {name} is not the same on all nodes: {sides}; "
            "copy it to all nodes again, or put it in a shared folder",
            code="data-differs-on-nodes",
        )


def _few(hosts: Iterable[str]) -> str:
    names = list(dict.fromkeys(hosts))
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def _tokenizer(
    name: str, text: bytes, world: Communicator, data_state: Mapping[str, Any] | None
) -> Tokenizer:
    """Return the tokenizer ``name``. If ``data_state`` is None, rank 0 reads or learns it for all
    ranks.
    """
    kind, _, argument = name.partition(":")
    if kind == "bytes":
        return Bytes()
    if data_state is not None:
        return tokenizer_of({"kind": kind, **data_state}, f"--tokenizer {name}")
    if kind == "gpt2":
        record: Mapping[str, Any] = on_all_ranks(
            world, lambda: load(Path(argument)).data_state if world.rank == 0 else {}
        )
        return GPT2.read(world.allgather(record)[0])
    merges = learn(parts(text)[0], int(argument)).merges if world.rank == 0 else ()
    return BytePairs(world.allgather(merges)[0])


def tokenizer_of(record: Mapping[str, Any], flag: str = "the model") -> Tokenizer:
    """Restore the tokenizer of a trained model or resumed run. Raises UsageError if that fails.

    record: the tokenizer's kind and learned state. flag: its source, such as a flag, for error
        messages.
    """
    kinds: dict[str, Callable[[Mapping[str, Any]], Tokenizer]] = {
        "bytes": lambda _: Bytes(),
        "bpe": BytePairs.read,
        "gpt2": GPT2.read,
    }
    kind = str(record.get("kind"))
    if kind not in kinds:
        raise UsageError(
            f"{flag} has an unknown kind of tokenizer: {kind!r}", code="tokens-unknown"
        )
    return _as_learned(flag, kind, kinds[kind], record)


def _as_learned(
    flag: str, subject: str, read: Callable[[Mapping[str, Any]], T], record: Mapping[str, Any]
) -> T:
    try:
        return read(record)
    except (KeyError, TypeError, ValueError, AttributeError) as exc:
        raise UsageError(
            f"{flag}: the saved training state does not fit {subject}; use the same --data and "
            "--tokenizer",
            code="data-state-unfit",
        ) from exc


def load_digits() -> tuple[Labelled, Labelled]:
    """Load the UCI handwritten digits: images of 8 by 8 pixels (README.md names the source).

    Return (1,438 training images, 359 held-out images). The split is always the same.
    """
    with np.load(_DIGITS, allow_pickle=False) as file:
        images = file["images"][..., None]
        labels = file["labels"].astype(np.int64)
    held_out = np.arange(len(labels)) % _HELD_OUT_EVERY == _HELD_OUT_EVERY - 1
    return Labelled(images[~held_out], labels[~held_out]), Labelled(
        images[held_out], labels[held_out]
    )


class Synthetic:
    """A ``Dataset`` of noise, for speed measurements. Nothing can be learned from it."""

    training = _SAMPLES
    held_out = _HELD_OUT
    bytes_per_target: float | None = None
    data_state: Mapping[str, Any] = MappingProxyType({})
    tokenizer: Mapping[str, Any] | None = None

    def __init__(
        self,
        about: str,
        inputs: Array,
        targets: Array,
        sizes: Mapping[str, int],
        input_: Mapping[str, Any],
    ) -> None:
        self.about = f"synthetic {about}"
        self.facts = sizes
        self.input = input_
        self.targets = float(np.prod(targets.shape[1:]))
        self._inputs = inputs
        self._targets = targets

    def training_batch(self, indices: Array, epoch: int, draw: RandomState) -> Pair:  # noqa: ARG002
        return self.held_out_batch(indices)

    def held_out_batch(self, indices: Array) -> Pair:
        return self._inputs[indices % _POOL], self._targets[indices % _POOL]


def synthetic_images(side: int, channels: int, classes: int, *, dtype: str) -> Synthetic:
    """Return a data set of noise images. A batch is (B, side, side, channels)."""
    rng = np.random.default_rng(0)
    pixels = rng.standard_normal((_POOL, side, side, channels), dtype)  # type: ignore[call-overload]
    about = f"images of {side}x{side}x{channels}, {classes} classes"
    sizes = facts(side, side, channels, classes)
    input_ = image_input((side, side, channels), [0.0] * channels, [1.0] * channels)
    return Synthetic(about, pixels, rng.integers(classes, size=_POOL), sizes, input_)


def synthetic_tokens(vocabulary: int, length: int) -> Synthetic:
    """Return a data set of random tokens. A batch is (B, length)."""
    rng = np.random.default_rng(0)
    sizes = {"vocabulary": vocabulary, "classes": vocabulary, "length": length, "tokens": length}
    drawn = rng.integers(vocabulary, size=(2, _POOL, length))
    about = f"tokens, {length} a sample, of {vocabulary}"
    return Synthetic(about, drawn[0], drawn[1], sizes, {"kind": "text", "length": length})
