"""Images and labels in IDX files, as of MNIST or Fashion-MNIST (Debian's ``dataset-fashion-mnist``).

The format is told at http://yann.lecun.com/exdb/mnist: two zero bytes, the type of the numbers, how many
dimensions, each as four bytes, the highest first, and the numbers.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from payload.data.images import Labelled
from payload.device.base import Array
from payload.errors import UsageError

_UINT8 = b"\0\0\x08"


def load(folder: Path, *, eval_only: bool = False) -> tuple[Labelled | None, Labelled]:
    """Training (``train-``) and held-out images (``t10k-``), each file plain or gzipped.

    Args:
        eval_only: training images are not asked for, and need not be there.

    Raises:
        UsageError: a file is missing, damaged, empty, or does not go with its labels.
    """
    return None if eval_only else _pair(folder, "train"), _pair(folder, "t10k")


def files(folder: Path) -> list[Path]:
    """The files that ``load`` reads.

    Raises:
        UsageError: one is missing.
    """
    return [_find(folder, f"{kind}-{what}") for kind in ("train", "t10k") for what in ("images", "labels")]


def _pair(folder: Path, kind: str) -> Labelled:
    image_file, label_file = _find(folder, f"{kind}-images"), _find(folder, f"{kind}-labels")
    images, labels = read(image_file), read(label_file)
    if (images.ndim, labels.ndim) not in ((3, 1), (4, 1)) or len(images) != len(labels) or not images.size:
        sizes = ("x".join(map(str, array.shape)) for array in (images, labels))
        raise UsageError(
            f"--data: {image_file} is of {next(sizes)} and {label_file} of {next(sizes)} numbers, "
            "which are not images with a label each",
            code="images-labels-differ",
        )
    return Labelled(images.reshape(*images.shape[:3], -1), labels.astype(np.int64))


def _find(folder: Path, start: str) -> Path:
    found = sorted(folder.glob(f"{start}[-.]idx[134]-ubyte*"))
    if not found:
        raise UsageError(
            f"--data: there is no {start}-idx*-ubyte or {start}-idx*-ubyte.gz in {folder}",
            code="no-such-file",
        )
    return found[0]


def read(file: Path) -> Array:
    """The numbers of one file, uint8.

    Raises:
        UsageError: it cannot be read, or is not what it should be.
    """
    try:
        raw = file.read_bytes()
        data = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    except (OSError, EOFError, zlib.error) as exc:  # gzip's own errors are OSErrors
        raise UsageError(f"--data: {file} cannot be read: {exc}", code="file-unreadable") from exc
    if len(data) < 4 or not data.startswith(_UINT8):  # noqa: PLR2004
        raise UsageError(
            f"--data: {file} is no IDX file of bytes: it begins with {data[:4].hex() or 'nothing'}",
            code="not-idx",
        )
    dimensions = data[3]
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", data[4:start]) if len(data) >= start else ()
    if len(data) != start + math.prod(shape) or not shape:
        wanted = f"{'x'.join(map(str, shape))} numbers" if shape else "its sizes"
        raise UsageError(
            f"--data: {file} is cut short or damaged: {len(data)} bytes for {wanted}", code="idx-truncated"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
