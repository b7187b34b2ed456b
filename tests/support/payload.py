"""Devices, settings and records of runs, for tests of the payload."""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from payload.cli.arguments import parse
from payload.cli.config import TrainConfig
from payload.data import png
from payload.device import choose
from payload.device.base import Array, Device
from tests.support.doubles.strict import Strict
from tests.support.messages import shows


def records(folder: Path, *kinds: str, file: str = "metrics.jsonl") -> list[dict[str, Any]]:
    """Return the records of these kinds, or all, that a run wrote."""
    found = [json.loads(line) for line in (folder / file).read_text().splitlines()]
    return [record for record in found if not kinds or record["kind"] in kinds]


def train_config(*flags: str) -> TrainConfig:
    config = parse(["train", *flags])
    assert isinstance(config, TrainConfig)
    return config


def idx_file(array: Array) -> bytes:
    """Bytes in the format of MNIST's files."""
    return struct.pack(f">BBBB{array.ndim}I", 0, 0, 8, array.ndim, *array.shape) + array.tobytes()


# The kinds of pixels of a PNG, and their channels.
GRAY, RGB, PALETTE, GRAY_ALPHA, RGB_ALPHA = 0, 2, 3, 4, 6
_CHANNELS = {GRAY: 1, RGB: 3, PALETTE: 1, GRAY_ALPHA: 2, RGB_ALPHA: 4}


def png_file(
    rows: Array,
    width: int,
    depth: int,
    color: int,
    *,
    kind: int = 0,
    palette: bytes = b"",
    interlaced: int = 0,
) -> bytes:
    """A PNG by its specification (W3C, 2003).

    rows: (height, bytes of a row), the packed pixels. width: in pixels. depth: bits of a channel.
    color: the kind of its pixels, such as RGB. kind: the filter of each row: 0 none, 1 left,
        2 above, 3 their mean, 4 Paeth's. palette: 3 bytes for each value.
    """
    step = max(1, _CHANNELS[color] * depth // 8)
    above = np.zeros(rows.shape[1], int)
    raw = bytearray()
    for row in rows.astype(int):
        left, corner = (np.concatenate([np.zeros(step, int), one[:-step]]) for one in (row, above))
        predicted = (0 * row, left, above, (left + above) // 2, _paeth(left, above, corner))[kind]
        raw += bytes([kind]) + ((row - predicted) % 256).astype(np.uint8).tobytes()
        above = row
    header = struct.pack(">IIBBBBB", width, len(rows), depth, color, 0, 0, interlaced)
    return (
        png.SIGNATURE
        + _png_chunk(b"IHDR", header)
        + (_png_chunk(b"PLTE", palette) if palette else b"")
        + _png_chunk(b"IDAT", zlib.compress(bytes(raw)))
        + _png_chunk(b"IEND", b"")
    )


def _paeth(left: Array, above: Array, corner: Array) -> Array:
    """Of the three neighbours, the one nearest to left + above - corner."""
    guess = left + above - corner
    is_left = (abs(guess - left) <= abs(guess - above)) & (abs(guess - left) <= abs(guess - corner))
    is_above = abs(guess - above) <= abs(guess - corner)
    return np.where(is_left, left, np.where(is_above, above, corner))


def _png_chunk(name: bytes, content: bytes) -> bytes:
    checksum = zlib.crc32(name + content)
    return struct.pack(">I4s", len(content), name) + content + struct.pack(">I", checksum)


def assert_one_error(stderr: str, code: str, *values: str) -> None:
    """Standard error is one line: the message of this code, with these values."""
    (line,) = stderr.splitlines()
    assert line.startswith("payload: error: ")
    assert shows(line, code), line
    assert [value for value in values if value not in line] == [], line


@pytest.fixture(scope="module", autouse=True)
def pythons_own_intern() -> Iterator[None]:
    """PyTorch needs it, and Ansible's modules, which other tests load, replace it."""
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(sys, "intern", getattr(sys.intern, "unpatched_implementation", sys.intern))
        yield


@pytest.fixture
def tensorboard_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep tensorboardX from importing PyTorch, which takes 2 s."""
    if "torch" not in sys.modules:
        monkeypatch.setitem(sys.modules, "torch", None)


@pytest.fixture(scope="session")
def real_device() -> Device:
    """A GPU where CuPy finds one, else the CPU; pytest's header says which."""
    return choose("auto", 0)


@pytest.fixture(params=["real", "strict"])
def device(request: pytest.FixtureRequest, real_device: Device) -> Device:
    """The real one, and then the double of CuPy, on which fails what would fail on a GPU.

    With the scope of a session, pytest would sort all tests by device, and set up the fixtures of a
    module several times.
    """
    return real_device if request.param == "real" else Strict()
