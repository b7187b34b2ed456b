"""Reading images for prediction: from an IDX file, or rows of numbers in a CSV file."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from payload.data import idx
from payload.device.base import Array
from payload.errors import UsageError

Shape = tuple[int, int, int]


def read_images(file: Path, shape: Shape) -> Array:
    """Read images as (images, height, width, channels). The file's first bytes determine its
    format.

    Raises UsageError if the file cannot be read, or its images do not have the shape that the model
    takes.
    """
    try:
        with file.open("rb") as opened:
            start = opened.read(2)
        if start.startswith((b"\0\0", b"\x1f\x8b")):
            return _of_idx(file, shape)
        return _of_csv(file.read_text(encoding="utf-8-sig"), shape)
    except OSError as exc:
        raise UsageError(f"{file} cannot be read: {exc.strerror}", code="file-unreadable") from exc
    except UnicodeDecodeError as exc:
        raise UsageError(
            f"{file} is neither IDX nor CSV; convert it to CSV", code="not-an-input"
        ) from exc
    except ValueError as exc:
        raise UsageError(f"{file}: {exc}", code="bad-input") from exc


def _of_idx(file: Path, shape: Shape) -> Array:
    images = idx.read(file)
    if images.ndim not in (3, 4) or images[0].size != math.prod(shape):
        actual, expected = ("x".join(map(str, sizes)) for sizes in (images.shape[1:], shape))
        raise ValueError(f"its images are {actual or 'empty'}, but the model takes {expected}")
    return images.reshape(-1, *shape)


def _of_csv(text: str, shape: Shape) -> Array:
    """Parse CSV text with an image per line: elements of an array (height, width, channels) in C
    order.
    """
    size = math.prod(shape)
    rows: list[Array] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = np.array([float(part) for part in line.replace(";", ",").split(",")])
        except ValueError:
            if not rows and number == 1:
                # The first line may be a header.
                continue
            raise ValueError(f"line {number} must contain only numbers and commas") from None
        if len(row) != size:
            label = "; remove the column of labels" if len(row) == size + 1 else ""
            expected = "x".join(map(str, shape))
            raise ValueError(
                f"line {number} has {len(row)} numbers, but the model takes {expected}{label}"
            )
        if not np.isfinite(row).all():
            raise ValueError(f"line {number} has a number that is not finite")
        rows.append(row)
    if not rows:
        raise ValueError("the file has no rows of numbers")
    return np.stack(rows).reshape(-1, *shape)
