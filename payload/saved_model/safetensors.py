"""Reading and writing files in the safetensors format (https://huggingface.co/docs/safetensors).

A file has 8 bytes of header length, little-endian; a JSON header with each tensor's dtype, shape
and offsets; and the numbers. This module does not use the safetensors package, which cannot write a
file tensor by tensor, or from the memory into which the training copies checkpoints.
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

from payload.node.heartbeat import beat

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
"""The format's maximum size of the header, in bytes."""


@dataclass(frozen=True, slots=True)
class FilePlan:
    """The layout of a file: its header, and the offset of each tensor's numbers."""

    header: bytes
    offsets: Mapping[str, int]  # by tensor name
    size: int  # in bytes


def plan(tensors: Mapping[str, tuple[Sequence[int], np.dtype[Any]]], **metadata: str) -> FilePlan:
    """Plan a file. tensors: (shape, dtype) by name. Wide dtypes come first, so that numbers are
    aligned.
    """
    entries: dict[str, Any] = {"__metadata__": metadata}
    starts = {}
    end = 0
    for name, (shape, dtype) in sorted(tensors.items(), key=lambda item: -item[1][1].itemsize):
        start = end
        end = start + math.prod(shape) * dtype.itemsize
        starts[name] = start
        place = [start, end]
        entries[name] = {"dtype": _DTYPES[dtype.name], "shape": list(shape), "data_offsets": place}
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return FilePlan(
        header, {name: len(header) + start for name, start in starts.items()}, len(header) + end
    )


def read(path: Path) -> tuple[dict[str, NDArray[Any]], dict[str, str]]:
    """Return a file's tensors by name, and its metadata. The numbers are memory-mapped.

    Raises OSError if the file cannot be read, ValueError if it is truncated or not in this format.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if length > min(size - 8, _MOST_HEADER):
            raise ValueError("the file is not in the safetensors format, or is truncated")
        entries = json.loads(file.read(length))
    tensors = {}
    try:
        metadata = entries.pop("__metadata__", {})
        for name, entry in entries.items():
            dtype = _NAMES[entry["dtype"]]
            shape = tuple(entry["shape"])
            start, end = entry["data_offsets"]
            count = math.prod(shape)
            if end - start != count * dtype.itemsize or 8 + length + end > size:
                raise ValueError(f"{name} is truncated")
            place = 8 + length + start
            tensors[name] = (
                np.memmap(path, dtype, "r", place, shape) if count else np.empty(shape, dtype)
            )
    except (AttributeError, KeyError, TypeError) as exc:
        raise ValueError(f"the header does not describe tensors correctly: {exc!r}") from exc
    return tensors, metadata


INCOMPLETE = ".incomplete"


class SafetensorsWriter:
    """Writes float32 tensors to a file with a temporary name, and renames the file at the end.

    Only ``close`` raises errors: an earlier error would leave other ranks waiting to send their
        parts.
    """

    def __init__(self, path: Path, shapes: Mapping[str, Sequence[int]]) -> None:
        """shapes: the shape of each tensor by name, in the order in which ``write`` gets the
        tensors.
        """
        self._path = path
        self._temporary = path.with_name(f"{path.name}{INCOMPLETE}")
        self._digest = hashlib.sha256()
        self._file: BinaryIO | None = None
        self._failure: OSError | None = None
        float32 = np.dtype("float32")
        self.plan = plan({name: (shape, float32) for name, shape in shapes.items()}, format="pt")
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._temporary.open("wb")
        except OSError as exc:
            self._failure = exc
        self._write(memoryview(self.plan.header))

    def write(self, tensor: NDArray[Any]) -> None:
        beat()
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
        """Close and rename the file, and return its SHA-256. If that fails, remove it and raise
        OSError.
        """
        try:
            if self._file:
                self._file.close()
            if self._failure:
                raise self._failure
            self._temporary.replace(self._path)
        except OSError:
            with suppress(OSError):
                self._temporary.unlink(missing_ok=True)
            raise
        return self._digest.hexdigest()
