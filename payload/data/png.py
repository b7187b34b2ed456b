"""Reading PNG files of any bit depth, for prediction (W3C, "Portable Network Graphics", 2003).

Interlaced images are rejected. The size in the header is checked before the pixels are
decompressed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator

import numpy as np

from payload.device.base import Array

SIGNATURE = b"\x89PNG\r\n\x1a\n"
_GRAY = 0
_RGB = 2
_PALETTE = 3
_GRAY_ALPHA = 4
_RGB_ALPHA = 6
_CHANNELS = {_GRAY: 1, _RGB: 3, _PALETTE: 1, _GRAY_ALPHA: 2, _RGB_ALPHA: 4}
_LUMA = np.array([299, 587, 114])
"""Weights of red, green and blue in thousandths: ITU-R BT.601, as in Pillow."""


def read(data: bytes, shape: tuple[int, int, int]) -> Array:
    """Decode an image of ``shape`` (height, width, 1 or 3 channels), uint8. Transparency is
    ignored.

    Raises ValueError if the image has another size, is damaged, or is interlaced.
    """
    header = b""
    palette = b""
    packed = b""
    for kind, content in _chunks(data):
        if kind == b"IHDR":
            header = content
        elif kind == b"PLTE":
            palette = content
        elif kind == b"IDAT":
            packed += content
    try:
        width, height, depth, color, _, _, interlaced = struct.unpack(">IIBBBBB", header)
        bits = _CHANNELS[color] * depth
    except (struct.error, KeyError) as exc:
        raise ValueError("the file is damaged") from exc
    if (height, width) != shape[:2]:
        size = f"{width}x{height} pixels"
        raise ValueError(
            f"the image has {size}, but the model takes {shape[1]}x{shape[0]}: scale it first"
        )
    if interlaced:
        raise ValueError("the image is interlaced: save it without interlacing")
    row = -(-width * bits // 8)
    rows = _unfiltered(_unpacked(packed, height * (1 + row)), height, row, max(1, bits // 8))
    return _as(shape[2], _pixels(rows, width, depth, color, palette))


def _chunks(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    position = len(SIGNATURE)
    while position + 8 <= len(data):
        size, kind = struct.unpack_from(">I4s", data, position)
        yield kind, data[position + 8 : position + 8 + size]
        position += 12 + size


def _unpacked(packed: bytes, size: int) -> bytes:
    try:
        data = zlib.decompressobj().decompress(packed, size)
    except zlib.error as exc:
        raise ValueError("the file is damaged") from exc
    if len(data) < size:
        raise ValueError("the file is truncated")
    return data


def _unfiltered(data: bytes, height: int, row: int, step: int) -> Array:
    """Undo the PNG filter of each row. Return bytes (height, row). row, step: bytes per row and per
    pixel.
    """
    rows = []
    above = bytearray(row)
    for number in range(height):
        start = number * (1 + row)
        line = bytearray(data[start + 1 : start + 1 + row])
        _unfilter(data[start], line, above, step)
        rows.append(line)
        above = line
    return np.array(rows, np.uint8)


def _unfilter(kind: int, line: bytearray, above: bytearray, step: int) -> None:
    if kind > 4:  # noqa: PLR2004
        raise ValueError("the file is damaged")
    for i in range(len(line)) if kind else ():
        left, up, corner = (
            (line[i - step], above[i], above[i - step]) if i >= step else (0, above[i], 0)
        )
        predicted = (0, left, up, (left + up) // 2, _paeth(left, up, corner))[kind]
        line[i] = (line[i] + predicted) & 0xFF


def _paeth(left: int, up: int, corner: int) -> int:
    guess = left + up - corner
    return min((left, up, corner), key=lambda value: abs(guess - value))


def _pixels(rows: Array, width: int, depth: int, color: int, palette: bytes) -> Array:
    """Return the pixels as (height, width, channels) of 8 bits, without transparency."""
    if depth < 8:  # noqa: PLR2004
        bits = np.unpackbits(rows, axis=1)[:, : width * depth].reshape(len(rows), width, depth)
        values = bits @ (1 << np.arange(depth)[::-1])
    else:
        values = rows.reshape(len(rows), width, -1, depth // 8)[..., 0]  # higher 8 bits
    if color == _PALETTE:
        colors = np.frombuffer(palette[: len(palette) // 3 * 3], np.uint8).reshape(-1, 3)
        if not len(colors) or int(values.max()) >= len(colors):
            raise ValueError("the file is damaged")
        return colors[values.reshape(len(rows), width)]
    if depth < 8:  # noqa: PLR2004
        values = values[..., None] * 255 // ((1 << depth) - 1)
    return values[..., : 1 if color in (_GRAY, _GRAY_ALPHA) else 3]


def _as(channels: int, image: Array) -> Array:
    if channels == image.shape[2]:
        return image.astype(np.uint8)
    if channels == 3:  # noqa: PLR2004
        return np.repeat(image, 3, axis=2).astype(np.uint8)
    if channels == 1:
        gray: Array = (image.astype(int) @ _LUMA + 500) // 1000
        return gray[..., None].astype(np.uint8)
    raise ValueError(f"the model takes images of {channels} channels, but a PNG has 1 or 3")
