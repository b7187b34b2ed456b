"""Files of tensors in the safetensors format (https://huggingface.co/docs/safetensors): 8 bytes of header
length, little-endian; a JSON header of dtype, shape and place of each tensor; the numbers.

Written by hand, because the numbers of a checkpoint come from memory that another process fills, and those of
a model one tensor after the other.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

_DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "uint8": "U8",
}
_NAMES = {short: np.dtype(getattr(ml_dtypes, name, name)) for name, short in _DTYPES.items()}
_MOST_HEADER = 100 << 20
"""As the format has it."""


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


def read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """The tensors of a file by name, and its metadata. Their numbers are read when they are used.

    Raises:
        OSError: it cannot be read.
        ValueError: it is no such file, is cut short, or has numbers of a type that is not known.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MOST_HEADER):
            raise ValueError("it is not in the safetensors format, or cut short")
        entries = json.loads(file.read(length))
    found = {}
    try:
        metadata = entries.pop("__metadata__", {})
        for name, entry in entries.items():
            dtype, shape = _NAMES[entry["dtype"]], tuple(entry["shape"])
            start, end = entry["data_offsets"]
            if end - start != math.prod(shape) * dtype.itemsize or 8 + length + end > size:
                raise ValueError(f"{name} is cut short")
            place = 8 + length + start
            found[name] = np.memmap(path, dtype, "r", place, shape) if end > start else np.empty(shape, dtype)
    except (AttributeError, KeyError, TypeError) as exc:
        raise ValueError(f"its header tells of no tensors as it should: {exc!r}") from exc
    return found, metadata


INCOMPLETE = ".incomplete"


class Stream:
    """A file of float32 tensors, written one after the other beside the one that it replaces, and renamed
    when it is whole. What goes wrong is told at its end: until then other ranks send their parts."""

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        """``shapes``: in the order in which the tensors come."""
        self._path, self._beside = path, path.with_name(f"{path.name}{INCOMPLETE}")
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._failure: OSError | None = None
        float32 = np.dtype("float32")
        self.plan = plan({name: (shape, float32) for name, shape in shapes.items()}, format="pt")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._beside.open("wb")
        except OSError as exc:
            self._failure = exc
        self._write(memoryview(self.plan.header))

    def write(self, tensor: NDArray[Any]) -> None:
        """The next one."""
        self._write(np.ascontiguousarray(tensor, "float32").reshape(-1).view(np.uint8).data)

    def _write(self, numbers: memoryview) -> None:
        if self._file is None or self._failure:
            return
        try:
            self._digest.update(numbers)
            self._file.write(numbers)
        except OSError as exc:
            self._failure = exc

    def close(self) -> str:
        """Rename it.

        Returns:
            Its SHA-256.

        Raises:
            OSError: it could not be written; nothing is left of it.
        """
        try:
            if self._file:
                self._file.close()
            if self._failure:
                raise self._failure
            self._beside.replace(self._path)
        except OSError:
            with suppress(OSError):
                self._beside.unlink(missing_ok=True)
            raise
        return self._digest.hexdigest()
