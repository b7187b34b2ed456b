"""Images and labels in IDX files, such as MNIST or Fashion-MNIST (Debian's
``dataset-fashion-mnist``).

A file (see http://yann.lecun.com/exdb/mnist) has two zero bytes, a byte with the type of the
numbers, a byte with the number of dimensions, the size of each dimension as four big-endian bytes,
and the numbers.
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
    """Load training images (``train-``; None if ``eval_only``) and held-out images (``t10k-``).

    Files may be gzipped. Raises UsageError if a file is missing, damaged or empty, or if the
    numbers of images and labels differ.
    """
    return None if eval_only else _pair(folder, "train"), _pair(folder, "t10k")


def files(folder: Path) -> list[Path]:
    """Return the files that ``load`` reads. Raises UsageError if a file is missing."""
    return [
        _find(folder, f"{kind}-{part}")
        for kind in ("train", "t10k")
        for part in ("images", "labels")
    ]


def _pair(folder: Path, kind: str) -> Labelled:
    image_file = _find(folder, f"{kind}-images")
    label_file = _find(folder, f"{kind}-labels")
    images = read(image_file)
    labels = read(label_file)
    if (
        (images.ndim, labels.ndim) not in ((3, 1), (4, 1))
        or len(images) != len(labels)
        or not images.size
    ):
        sizes = ("x".join(map(str, array.shape)) for array in (images, labels))
        raise UsageError(
            f"--data: {image_file} has shape {next(sizes)}, and {label_file} has shape "
            f"{next(sizes)}: each image must have a label",
            code="images-labels-differ",
        )
    return Labelled(images.reshape(*images.shape[:3], -1), labels.astype(np.int64))


def _find(folder: Path, start: str) -> Path:
    if not folder.is_dir():
        raise UsageError(f"--data: there is no folder {folder.absolute()}", code="no-such-file")
    files = sorted(folder.glob(f"{start}[-.]idx[134]-ubyte*"))
    if not files:
        raise UsageError(
            f"--data: {folder.absolute()} does not contain {start}-idx*-ubyte or "
            f"{start}-idx*-ubyte.gz",
            code="no-such-file",
        )
    return files[0]


def read(file: Path) -> Array:
    """Read a file as uint8. Raises UsageError if it cannot be read, or is not a valid IDX file of
    bytes.
    """
    try:
        raw = file.read_bytes()
        data = gzip.decompress(raw) if raw.startswith(b"\x1f\x8b") else raw
    # gzip raises OSError for damaged data.
    except (OSError, EOFError, zlib.error) as exc:
        raise UsageError(f"--data: {file} cannot be read: {exc}", code="file-unreadable") from exc
    if len(data) < 4 or not data.startswith(_UINT8):  # noqa: PLR2004
        raise UsageError(
            f"--data: {file} is not an IDX file of bytes: it begins with "
            f"{data[:4].hex() or 'nothing'}",
            code="not-idx",
        )
    dimensions = data[3]
    start = 4 + 4 * dimensions
    shape = struct.unpack(f">{dimensions}I", data[4:start]) if len(data) >= start else ()
    if len(data) != start + math.prod(shape) or not shape:
        expected = f"{'x'.join(map(str, shape))} numbers" if shape else "its header"
        raise UsageError(
            f"--data: {file} is damaged: it has {len(data)} bytes for {expected}",
            code="idx-truncated",
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
