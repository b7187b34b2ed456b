"""Opens what ``--data`` names."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from pathlib import Path

from payload.comm.base import Communicator, together
from payload.config import TrainConfig
from payload.data import digits, idx, synthetic
from payload.data.images import Images, Labelled
from payload.data.source import Source
from payload.data.text import MaskedText, Text
from payload.data.tokenizer import BytePairs, Bytes, Tokenizer, learn
from payload.errors import UsageError
from payload.host import hostname
from payload.models import MODELS

_GPT2_VOCABULARY = 50_304
_IMAGENET = (224, 3, 1000)  # side, channels, classes
_FEW = 4


def open_source(config: TrainConfig, world: Communicator) -> Source:
    """The data that was asked for, as the model takes it.

    Raises:
        UsageError: there is none such, it is not what it should be, or not the same on all nodes; on every
            rank.
    """
    data, takes = config.data, MODELS[config.model.model].takes
    dtype = "float64" if config.precision.precision == "fp64" else "float32"
    kind, _, where = data.data.partition(":")
    if kind == "synthetic":
        if takes == "images":
            return synthetic.images(*_IMAGENET, dtype=dtype)
        return synthetic.tokens(_GPT2_VOCABULARY, data.sequence_length)
    if (kind == "text") == (takes == "images"):
        fitting = "digits, idx:DIR or synthetic" if takes == "images" else "text:FILE or synthetic"
        raise UsageError(f"--data {data.data}: the model takes {takes}; give it {fitting}")
    if kind == "text":
        return _text(config, Path(where), world)
    training, held_out = together(world, lambda: _images(Path(where) if kind == "idx" else None))
    parts = (training.images, training.labels, held_out.images, held_out.labels)
    _check_same(world, data.data, *(part.data for part in parts))
    return Images(data.data, training, held_out, dtype=dtype, augment=data.augment, clean=data.clean)


def _images(folder: Path | None) -> tuple[Labelled, Labelled]:
    return idx.load(folder) if folder else digits.load()


def _text(config: TrainConfig, file: Path, world: Communicator) -> Source:
    def read() -> bytes:
        try:
            return file.read_bytes()
        except OSError as exc:
            raise UsageError(f"--data: {file} cannot be read: {exc.strerror}") from exc

    text = together(world, read)
    data = config.data
    _check_same(world, data.data, text)
    kind = Text if MODELS[config.model.model].takes == "text" else MaskedText
    tokenizer = _tokenizer(data.tokenizer, text, world, config.run.out)
    return kind(data.data, text, tokenizer, length=data.sequence_length, seed=config.batch.seed)


def _check_same(world: Communicator, name: str, *parts: bytes | memoryview) -> None:
    """
    Raises:
        UsageError: some rank has read something else than another.
    """
    size, crc32 = 0, 0
    for part in parts:
        size, crc32 = size + memoryview(part).nbytes, zlib.crc32(part, crc32)
    found: dict[str, list[str]] = {}
    for what, host in world.allgather((f"{size} bytes with CRC-32 {crc32:08x}", hostname())):
        found.setdefault(what, []).append(host)
    if len(found) > 1:
        sides = ", ".join(f"{what} on {_few(hosts)}" for what, hosts in found.items())
        raise UsageError(
            f"--data: {name} is not the same on all nodes: {sides}; "
            "copy it anew, or put it in a shared folder"
        )


def _few(hosts: Iterable[str]) -> str:
    """Each once, and not all of many."""
    names = list(dict.fromkeys(hosts))
    return ", ".join(names[:_FEW]) + (f" and {len(names) - _FEW} more" if len(names) > _FEW else "")


def _tokenizer(wanted: str, text: bytes, world: Communicator, out: Path) -> Tokenizer:
    """Byte pairs are learned by rank 0, for all, and kept with the run."""
    kind, _, size = wanted.partition(":")
    if kind == "bytes":
        return Bytes()
    learned = learn(text, int(size)) if world.rank == 0 else None
    pairs = BytePairs(world.allgather(learned.merges if learned else ())[0])
    together(world, lambda: pairs.save(out / "tokenizer.json") if world.rank == 0 else None)
    return pairs
