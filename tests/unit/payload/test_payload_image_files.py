"""The files that `predict` and `eval` read images from: PNG, MNIST's format, and CSV."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import pytest
from numpy.testing import assert_allclose, assert_array_equal
from numpy.typing import NDArray

from payload.data import png
from payload.data.inputs import read_images
from payload.errors import UsageError
from tests.support.messages import refused
from tests.support.payload import (
    GRAY,
    GRAY_ALPHA,
    PALETTE,
    RGB,
    RGB_ALPHA,
    idx_file,
    png_file,
)

# Images of 5 rows of 4 pixels, of up to 4 channels.
NOISE = np.random.default_rng(0).integers(256, size=(5, 4, 4), dtype=np.uint8)


@pytest.mark.parametrize("kind", range(5), ids=["none", "left", "above", "mean", "paeth"])
@pytest.mark.parametrize(
    ("color", "channels"),
    [(GRAY, 1), (RGB, 3), (GRAY_ALPHA, 2), (RGB_ALPHA, 4)],
    ids=["gray", "rgb", "gray-alpha", "rgb-alpha"],
)
def test_png_of_8_bits_is_read_by_each_filter(kind: int, color: int, channels: int) -> None:
    """Transparency is ignored."""
    pixels = NOISE[..., :channels]
    data = png_file(pixels.reshape(5, -1), 4, 8, color, kind=kind)
    shown = pixels[..., : 3 if color in (RGB, RGB_ALPHA) else 1]
    assert_array_equal(png.read(data, (5, 4, shown.shape[2])), shown)


def test_gray_png_for_a_model_of_colors_has_three_equal_channels() -> None:
    gray = NOISE[..., :1]
    found = png.read(png_file(gray.reshape(5, -1), 4, 8, GRAY), (5, 4, 3))
    assert_array_equal(found, np.repeat(gray, 3, axis=2))


def test_color_png_for_a_model_of_gray_is_its_luma() -> None:
    """By the weights of ITU-R BT.601."""
    colors = NOISE[..., :3]
    found = png.read(png_file(colors.reshape(5, -1), 4, 8, RGB), (5, 4, 1))
    assert_allclose(found[..., 0], colors @ np.array([0.299, 0.587, 0.114]), rtol=0, atol=0.5)


def test_png_of_16_bits_is_read_by_its_high_bytes() -> None:
    high, low = NOISE[..., 0], NOISE[..., 1]
    rows = np.stack([high, low], axis=2).reshape(5, -1)
    found = png.read(png_file(rows, 4, 16, GRAY, kind=2), (5, 4, 1))
    assert_array_equal(found[..., 0], high)


def packed(values: NDArray[np.uint8], depth: int) -> NDArray[np.uint8]:
    """Rows of values of less than 8 bits, the first value in the highest bits of a byte."""
    bits = (values[..., None] >> np.arange(depth)[::-1]) & 1
    return np.packbits(bits.reshape(len(values), -1), axis=1)


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_gray_png_of_few_bits_is_scaled_to_8(depth: int) -> None:
    values = NOISE[..., 0] >> (8 - depth)
    found = png.read(png_file(packed(values, depth), 4, depth, GRAY), (5, 4, 1))
    assert_array_equal(found[..., 0], values.astype(int) * 255 // (2**depth - 1))


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_png_with_a_palette_has_its_colors(depth: int) -> None:
    values = NOISE[..., 0] >> (8 - depth)
    palette = np.random.default_rng(1).integers(256, size=(2**depth, 3), dtype=np.uint8)
    data = png_file(packed(values, depth), 4, depth, PALETTE, palette=palette.tobytes())
    assert_array_equal(png.read(data, (5, 4, 3)), palette[values])


GRAY_NOISE = NOISE[..., 0]


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (png_file(GRAY_NOISE, 4, 8, GRAY, interlaced=1), "interlaced"),
        (png_file(GRAY_NOISE[:3], 4, 8, GRAY), "4x3 pixels"),
        (png_file(GRAY_NOISE, 4, 8, GRAY)[:-30], "truncated"),
        (png.SIGNATURE, "damaged"),
        (png.SIGNATURE + struct.pack(">I4sIIBBBBB", 13, b"IHDR", 4, 5, 8, 9, 0, 0, 0), "damaged"),
        (png_file(GRAY_NOISE, 4, 8, PALETTE, palette=b"abc"), "damaged"),
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
