"""Checkpoints on disk: files of tensors in the safetensors format, and the manifest that vouches for them.

The format (https://huggingface.co/docs/safetensors): 8 bytes of header length, little-endian; a JSON header
of dtype, shape and place of each tensor; the numbers. It is written here by hand because the numbers come
from memory that another process fills, and checksums are taken on the way.
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from payload.checkpoint.pieces import Held, Piece

VERSION = 2
MANIFEST = "manifest.json"
DATA = "data.json"
"""What was learned of the training data, such as a tokenizer, by which other data is read."""

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}
_NAMES = {short: name for name, short in _DTYPES.items()}
_BLANK = "00000000"  # stands for the manifest's checksum where that is taken
_CHUNK = 1 << 22


class BrokenError(Exception):
    """A checkpoint is not whole: what is wrong, without its folder."""


def rank_file(rank: int) -> str:
    return f"rank-{rank:05}.safetensors"


@dataclass(frozen=True, slots=True)
class FilePlan:
    """Of one file: its beginning, and where the numbers of each tensor lie."""

    header: bytes
    offsets: Mapping[str, int]  # by the tensor's name
    size: int  # of the whole file


def plan(tensors: Mapping[str, tuple[Sequence[int], np.dtype[Any]]], **metadata: str) -> FilePlan:
    """Lay out a file of such shapes and dtypes by name. Wide numbers come first, so that all are aligned."""
    entries: dict[str, Any] = {"__metadata__": metadata}
    starts, end = {}, 0
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        starts[name], end = end, end + math.prod(shape) * dtype.itemsize
        place = [starts[name], end]
        entries[name] = {"dtype": _DTYPES[dtype.name], "shape": list(shape), "data_offsets": place}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FilePlan(header, {name: len(header) + start for name, start in starts.items()}, len(header) + end)


def plan_pieces(held: Sequence[Held]) -> tuple[FilePlan, list[int]]:
    """Lay out a rank's file; where the numbers of each of these pieces lie."""
    names = [f"{piece.tensor}[{piece.start}:{piece.stop}]" for piece, _ in held]
    tensors = {
        name: ((array.size,), np.dtype(array.dtype)) for name, (_, array) in zip(names, held, strict=True)
    }
    pieces = {name: asdict(piece) for name, (piece, _) in zip(names, held, strict=True)}
    layout = plan(tensors, pieces=json.dumps(pieces))
    return layout, [layout.offsets[name] for name in names]


def contents(path: Path) -> list[tuple[Piece, NDArray[Any]]]:
    """The pieces in a file; their numbers are read when they are touched."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        entries = json.loads(file.read(length))
    pieces = json.loads(entries.pop("__metadata__")["pieces"])
    found: list[tuple[Piece, NDArray[Any]]] = []
    for key, fields in pieces.items():
        piece = Piece(**{**fields, "shape": tuple(fields["shape"])})
        entry = entries[key]
        dtype, offset = _NAMES[entry["dtype"]], 8 + length + entry["data_offsets"][0]
        size = piece.stop - piece.start
        found.append((piece, np.memmap(path, dtype, mode="r", offset=offset, shape=(size,))))
    return found


@dataclass(frozen=True, slots=True)
class FileFacts:
    """By which a file is known to be whole."""

    name: str
    size: int
    crc32: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a checkpoint is."""

    iteration: int  # done
    layout: Mapping[str, float]  # dp, tp, pp, zero, and what else ranks' own state depends on
    identity: Mapping[str, Any]  # settings with which it can be gone on with, by the names of their flags
    scalars: Mapping[str, int | float]  # state that is no array
    config: Mapping[str, Any]  # all settings, for people
    files: Sequence[FileFacts]

    def encode(self) -> str:
        """As text with a checksum of itself in it."""
        fields = {"format": VERSION, "crc32": _BLANK, **asdict(self)}
        text = json.dumps(fields, indent=1, allow_nan=False) + "\n"
        return text.replace(f'"{_BLANK}"', f'"{zlib.crc32(text.encode()):08x}"', 1)


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        BrokenError: it is not there, or not as it was written.
    """
    try:
        text = (folder / MANIFEST).read_bytes().decode()
        fields = json.loads(text)
        version, crc32 = fields.pop("format"), fields.pop("crc32")
        blank = text.replace(f'"{crc32}"', f'"{_BLANK}"', 1)
        if f"{zlib.crc32(blank.encode()):08x}" != crc32:
            raise BrokenError(f"{MANIFEST} is not as it was written")
        if version != VERSION:
            raise BrokenError(
                f"it is of format {version}, and this program reads {VERSION}: use the one that wrote it"
            )
        fields["files"] = [FileFacts(**facts) for facts in fields["files"]]
        return Manifest(**fields)
    except FileNotFoundError as exc:
        raise BrokenError(f"it has no {MANIFEST}") from exc
    except OSError as exc:
        raise BrokenError(f"{MANIFEST} cannot be read: {exc.strerror}") from exc
    except (ValueError, KeyError, TypeError, AttributeError) as exc:  # no JSON, or other than was written
        raise BrokenError(f"{MANIFEST} is not as it was written") from exc


def read_data(folder: Path) -> Mapping[str, Any]:
    """What the run has learned of its data.

    Raises:
        BrokenError: it is not there, or not as it was written.
    """
    try:
        learned: Mapping[str, Any] = json.loads((folder / DATA).read_bytes())
    except OSError as exc:
        raise BrokenError(f"{DATA} cannot be read: {exc.strerror}") from exc
    except ValueError as exc:
        raise BrokenError(f"{DATA} is not as it was written") from exc
    return learned


def verify(folder: Path, facts: FileFacts) -> None:
    """
    Raises:
        BrokenError: the file is not as it was written.
    """
    path = folder / facts.name
    try:
        size, crc32 = path.stat().st_size, 0
        if size != facts.size:
            raise BrokenError(f"{facts.name} has {size} bytes, not {facts.size}")
        with path.open("rb") as file:
            while chunk := file.read(_CHUNK):
                crc32 = zlib.crc32(chunk, crc32)
    except OSError as exc:
        raise BrokenError(f"{facts.name} cannot be read: {exc.strerror}") from exc
    if crc32 != facts.crc32:
        raise BrokenError(f"{facts.name} is not as it was written")
