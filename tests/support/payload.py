"""Devices, settings and records of runs, for tests of the payload."""

from __future__ import annotations

import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.cli.arguments import parse
from payload.cli.config import TrainConfig
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
