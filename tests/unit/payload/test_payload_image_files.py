"""A trained model in use: sample, predict, and eval by a model folder; and the files that images
come in.
"""

from __future__ import annotations

import struct
import zlib
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from payload.data import png
from payload.data.inputs import read_images
from payload.errors import UsageError
from tests.support.messages import refused
from tests.support.payload import idx_file


def encoded(
    rows: NDArray[np.uint8],
    width: int,
    depth: int,
    color: int,
    *,
    kind: int = 0,
    palette: bytes = b"",
    interlaced: int = 0,
) -> bytes:
    """A PNG of packed rows, each filtered by ``kind``."""
    step = max(1, {0: 1, 2: 3, 3: 1, 4: 2, 6: 4}[color] * depth // 8)
    above = np.zeros(rows.shape[1], int)
    raw = bytearray()
    for row in rows.astype(int):
        left, corner = (np.concatenate([np.zeros(step, int), one[:-step]]) for one in (row, above))
        guess = left + above - corner
        nearest = np.where(
            (abs(guess - left) <= abs(guess - above)) & (abs(guess - left) <= abs(guess - corner)),
            left,
            np.where(abs(guess - above) <= abs(guess - corner), above, corner),
        )
        predicted = (0 * row, left, above, (left + above) // 2, nearest)[kind]
        raw += bytes([kind]) + ((row - predicted) % 256).astype(np.uint8).tobytes()
        above = row
    header = struct.pack(">IIBBBBB", width, len(rows), depth, color, 0, 0, interlaced)
    parts = [
        (b"IHDR", header),
        (b"PLTE", palette),
        (b"IDAT", zlib.compress(bytes(raw))),
        (b"IEND", b""),
    ]
    return png.SIGNATURE + b"".join(
        struct.pack(">I4s", len(content), name)
        + content
        + struct.pack(">I", zlib.crc32(name + content))
        for name, content in parts
        if content or name == b"IEND"
    )


NOISE = np.random.default_rng(0).integers(256, size=(5, 4, 4), dtype=np.uint8)


@pytest.mark.parametrize("kind", range(5))
def test_pngs_of_8_bits_by_each_filter(kind: int) -> None:
    for color, channels in ((0, 1), (2, 3), (4, 2), (6, 4)):
        pixels = NOISE[..., :channels]
        data = encoded(pixels.reshape(5, -1), 4, 8, color, kind=kind)
        seen = pixels[..., : 1 if channels < 3 else 3]
        assert (png.read(data, (5, 4, seen.shape[2])) == seen).all()


def test_pngs_in_gray_and_in_color() -> None:
    gray = encoded(NOISE[..., 0], 4, 8, 0)
    assert (png.read(gray, (5, 4, 3)) == NOISE[..., :1]).all()
    color = encoded(NOISE[..., :3].reshape(5, -1), 4, 8, 2)
    luma = NOISE[..., :3] @ np.array([0.299, 0.587, 0.114])
    assert abs(png.read(color, (5, 4, 1))[..., 0] - luma).max() <= 0.5


@pytest.mark.parametrize("depth", [1, 2, 4, 16])
def test_pngs_of_other_depths_and_with_a_palette(depth: int) -> None:
    if depth == 16:
        rows = np.stack([NOISE[..., 0], NOISE[..., 1]], axis=2).reshape(5, -1)
        assert (png.read(encoded(rows, 4, 16, 0, kind=2), (5, 4, 1)) == NOISE[..., :1]).all()
        return
    values = NOISE[..., 0] >> (8 - depth)
    bits = (values[..., None] >> np.arange(depth)[::-1]) & 1
    rows = np.packbits(bits.reshape(5, -1), axis=1)
    gray = png.read(encoded(rows, 4, depth, 0), (5, 4, 1))[..., 0]
    assert (gray == values.astype(int) * 255 // (2**depth - 1)).all()
    palette = np.random.default_rng(1).integers(256, size=(2**depth, 3), dtype=np.uint8)
    found = png.read(encoded(rows, 4, depth, 3, palette=palette.tobytes()), (5, 4, 3))
    assert (found == palette[values]).all()


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encoded(NOISE[..., 0], 4, 8, 0, interlaced=1), "interlaced"),
        (encoded(NOISE[:3, :, 0], 4, 8, 0), "4x3 pixels"),
        (encoded(NOISE[..., 0], 4, 8, 0)[:-30], "truncated"),
        (png.SIGNATURE, "damaged"),
        (png.SIGNATURE + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 4, 5, 8, 9, 0, 0, 0), "damaged"),
        (encoded(NOISE[..., 0], 4, 8, 3, palette=b"abc"), "damaged"),
        (b"1,2,3\n", "line 1 has 3 numbers"),
        (",".join("1" * 21).encode(), "column of labels"),
        (b"a,b\nc,d\n", "line 2 must"),
        (b"nan," * 19 + b"1", "not finite"),
        (b"a,b\n", "no rows"),
        (idx_file(np.zeros((1, 2, 2), np.uint8)), "images are 2x2,"),
    ],
)
def test_files_without_such_images_are_refused(data: bytes, why: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(data)
    with refused("bad-input", UsageError, str(file), why):
        read_images(file, (5, 4, 1))


def test_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"\xff\xd8\xff\xe0 as of a JPEG")
    with refused("not-an-input", UsageError, str(file)):
        read_images(file, (5, 4, 1))


def test_columns_may_have_names_and_semicolons(tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("\ufeffp0;p1;p2;p3\n\n1;2;3;4.5\n")
    assert read_images(file, (2, 2, 1)).tolist() == [[[[1], [2]], [[3], [4.5]]]]
