"""The model that a run leaves gives in PyTorch's modules what it gives here; and folders that are
refused.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import tracemalloc
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from payload.device.base import Array, CpuDevice, Device
from payload.errors import UsageError
from payload.nn.module import Tape, Unit, state_of
from payload.parallel.engine import Engine, Evaluation
from payload.parallel.mesh import alone as on_one_rank
from payload.saved_model.folder import build, make_units, read_weights
from payload.saved_model.record import ModelRecord, read_record
from payload.saved_model.writer import ModelWriter
from tests.support.doubles.layers import engine_of
from tests.support.doubles.models import CASES, Case, Convolutional
from tests.support.doubles.oracle import assert_close, torch
from tests.support.messages import refused


def _filled(model: str, settings: dict[str, Any], device: Device) -> tuple[Engine, list[Unit]]:
    """A model with random numbers everywhere, in its layers' state too."""
    units = make_units(model, settings, on_one_rank().context(device))
    engine = engine_of(device, on_one_rank(), units, seed=3)
    rng = np.random.default_rng(2)
    for segment in engine.storage.segments:
        parameter = segment.parameter
        numbers = rng.uniform(-0.3, 0.3, (parameter.rows, *parameter.full_shape[1:])).astype(
            "float32"
        )
        whole = parameter.padded(numbers).reshape(-1)
        engine.storage.master_weights[segment.start : segment.stop] = device.asarray(whole)
    for array in state_of([unit.layer for unit in units]).values():
        array[...] = device.asarray(rng.uniform(0.5, 1.5, array.shape))
    engine.storage.publish()
    return engine, units


def _left(folder: Path, model: str, settings: dict[str, Any], device: Device) -> None:
    """What a run of such a model leaves, but for its numbers."""
    engine, units = _filled(model, settings, device)
    record = ModelRecord(model, settings, {"kind": "images"}, 5, None)
    writer = ModelWriter(folder, record, engine, units)
    writer.write(7)
    writer.evaluated(Evaluation(0.5, 0.75))


def _forward(units: Sequence[Unit], x: Array, device: Device) -> Array:
    y = device.asarray(x.copy())
    tape = Tape(training=False)
    for unit in units:
        y = unit.layer.forward(y, tape)
    return device.to_host(y).copy()


def _cnn(weights: dict[str, Any], images: torch.Tensor) -> torch.Tensor:
    return Convolutional(weights, weights, training=False).cnn(images.permute(0, 3, 1, 2))


CNN = Case("cnn", {"side": 13, "channels": 3, "classes": 5, "widths": [3, 4, 5]}, (13, 13, 3), _cnn)


@pytest.mark.parametrize("case", [*CASES, CNN], ids=lambda case: case.model)
def test_model_folder_gives_the_same_outputs_in_pytorch(
    case: Case, device: Device, tmp_path: Path
) -> None:
    _left(tmp_path, case.model, case.settings, device)
    x, _ = case.batch(np.random.default_rng(4), samples=4)
    x = x if case.shape is None else x.astype("float32")
    with torch.no_grad():
        weights = {
            name: torch.tensor(a) for name, a in load_file(tmp_path / "final.safetensors").items()
        }
        expected = case.torch_forward(weights, torch.tensor(x)).numpy()
    units = build(read_record(tmp_path), read_weights(tmp_path, "final"), device)
    logits = _forward(units, x, device)
    assert_close(np.ascontiguousarray(logits[..., : expected.shape[-1]]), expected, case.model)
    assert (logits[..., expected.shape[-1] :] < -60000).all()  # padding is never told


def test_export_holds_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    """The model has 41 tensors of 256 KiB. The conversion of a tensor takes up to four copies."""
    settings = {"inputs": 256, "classes": 256, "hidden": [256] * 40}
    engine, units = _filled("mlp", settings, CpuDevice())
    writer = ModelWriter(tmp_path, ModelRecord("mlp", settings, {}, 256, None), engine, units)
    tracemalloc.start()
    try:
        writer.write(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "final.safetensors").stat().st_size > 41 * 256 * 1024
    assert peak < 5 * 256 * 1024


@pytest.fixture(name="trained_folder", scope="module")
def trained_folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    _left(folder, CASES[0].model, CASES[0].settings, CpuDevice())
    return folder


@pytest.mark.parametrize(
    ("change", "code", "value"),
    [
        ({"format": 2}, "model-folder-newer", "model.json has format 2, "),
        ({"model": "gpt-9"}, "model-unknown", "gpt-9"),
        ({"settings": {"hiddn": 3}}, "model-without-size", "hiddn"),
        (
            {"settings": {"inputs": 7, "classes": 5}},
            "weights-other-model",
            "linear0.weight has shape (16, 288)",
        ),
        ({"files": {}}, "weights-not-kept", "not contain best weights"),
        ({"files": 3}, "model-folder-damaged", "model.json"),
    ],
)
def test_folders_that_are_refused(
    trained_folder: Path, tmp_path: Path, change: dict[str, Any], code: str, value: str
) -> None:
    shutil.copytree(trained_folder, tmp_path / "model")
    path = tmp_path / "model" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(code, UsageError, value):
        build(read_record(path.parent), read_weights(path.parent), CpuDevice())


def test_files_that_are_refused(trained_folder: Path, tmp_path: Path) -> None:
    with refused("not-a-model-folder", UsageError, str(tmp_path), os.strerror(errno.ENOENT)):
        read_record(tmp_path)
    shutil.copytree(trained_folder, tmp_path, dirs_exist_ok=True)
    path = tmp_path / "best.safetensors"
    whole = bytearray(path.read_bytes())
    whole[-1] ^= 1
    path.write_bytes(whole)
    with refused("model-folder-damaged", UsageError, str(path), "SHA-256"):
        read_weights(tmp_path)
    path.write_bytes(whole[:-1])
    with refused("file-unreadable", UsageError, str(path), "truncated"):
        read_weights(tmp_path)
    path.write_bytes(b"none at all, but long enough")
    with refused("file-unreadable", UsageError, str(path), "safetensors format"):
        read_weights(tmp_path)
    path.unlink()
    with refused("file-unreadable", UsageError, str(path), os.strerror(errno.ENOENT)):
        read_weights(tmp_path)
