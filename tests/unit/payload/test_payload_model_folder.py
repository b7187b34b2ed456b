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

from payload.__main__ import main
from payload.device.base import Array, Cpu, Device
from payload.errors import PayloadError, UsageError
from payload.nn.module import Tape, Unit, state_of
from payload.parallel.engine import Engine, Evaluation
from payload.parallel.mesh import alone as on_one_rank
from payload.parallel.whole import WholeTensors
from payload.saved_model.folder import (
    ModelRecord,
    build,
    make_units,
    read_record,
    read_weights,
    set_weights,
)
from payload.saved_model.writer import ModelWriter
from tests.support.disks import small_disk
from tests.support.messages import refused
from tests.unit.payload.conftest import Runner, assert_one_error, records
from tests.unit.payload.doubles.layers import engine_of
from tests.unit.payload.doubles.models import CASES, Case, Convolutional
from tests.unit.payload.doubles.oracle import assert_close, torch
from tests.integration.payload.programs import layouts, whole


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
def test_what_a_run_leaves_is_the_same_model_in_pytorch_and_here(
    case: Case, device: Device, tmp_path: Path
) -> None:
    _left(tmp_path, case.model, case.settings, device)
    x, _ = case.batch(np.random.default_rng(4), samples=4)
    x = x if case.shape is None else x.astype("float32")
    with torch.no_grad():
        weights = {
            name: torch.tensor(a) for name, a in load_file(tmp_path / "final.safetensors").items()
        }
        expected = case.theirs(weights, torch.tensor(x)).numpy()
    units = build(read_record(tmp_path), read_weights(tmp_path, "final"), device)
    ours = _forward(units, x, device)
    assert_close(np.ascontiguousarray(ours[..., : expected.shape[-1]]), expected, case.model)
    assert (ours[..., expected.shape[-1] :] < -60000).all()  # padding is never told


def test_the_models_of_all_layouts_are_equal_files(
    program: Runner, real_device: Device, tmp_path: Path
) -> None:
    """To the bit where weights are; after some training, to rounding. On two ranks and on one."""
    program(2, "whole.py", str(tmp_path))
    for model in {model for model, _ in whole.CASES}:
        whole.write(tmp_path / model, layouts.Case(model), on_one_rank(), real_device)
    for model, layout in whole.CASES:
        begun, trained = (
            [
                tmp_path / name / moment / "final.safetensors"
                for name in (f"{model}-{layout}", model)
            ]
            for moment in whole.MOMENTS
        )
        assert begun[0].read_bytes() == begun[1].read_bytes(), (model, layout)
        ours, theirs = (path.read_bytes() for path in trained)
        header = 8 + int.from_bytes(ours[:8], "little")
        assert ours[:header] == theirs[:header]
        numbers, expected = (np.frombuffer(one[header:], "float32") for one in (ours, theirs))
        np.testing.assert_allclose(
            numbers, expected, rtol=1e-3, atol=1e-5, err_msg=f"{model} {layout}"
        )
        assert (
            np.abs(numbers - np.frombuffer(begun[0].read_bytes()[header:], "float32")).max() > 1e-3
        )


def test_rank_0_holds_one_whole_tensor_at_a_time(tmp_path: Path) -> None:
    """Of 41 of 256 KiB, at most as many copies of one as its conversion takes."""
    settings = {"inputs": 256, "classes": 256, "hidden": [256] * 40}
    engine, units = _filled("mlp", settings, Cpu())
    writer = ModelWriter(tmp_path, ModelRecord("mlp", settings, {}, 256, None), engine, units)
    tracemalloc.start()
    try:
        writer.write(1)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (tmp_path / "final.safetensors").stat().st_size > 41 * 256 * 1024
    assert peak < 5 * 256 * 1024


def test_training_can_begin_with_weights_that_a_run_left(device: Device, tmp_path: Path) -> None:
    case = next(case for case in CASES if case.model == "lstm")
    _left(tmp_path, case.model, case.settings, device)
    units = make_units(case.model, case.settings, on_one_rank().context(device))
    engine = engine_of(device, on_one_rank(), units, seed=9)
    set_weights(engine, units, read_weights(tmp_path))
    again = dict(WholeTensors(engine, units))
    for name, tensor in load_file(tmp_path / "best.safetensors").items():
        np.testing.assert_array_equal(again[name], tensor, name)
    assert again["lstm.bias_hh_l1"].all()  # which is not learned


def test_a_run_leaves_the_best_weights_and_the_last(alone: Runner, tmp_path: Path) -> None:
    alone("train", *"--lr 0.5 --epochs 5 --hidden 16".split(), "--out", str(tmp_path))  # too fast
    record = read_record(tmp_path / "model")
    evaluations = {one["step"]: one for one in records(tmp_path, "evaluation")}
    best = min(evaluations.values(), key=lambda one: one["loss"])
    assert record.files["best"].iteration == best["step"]
    assert record.files["final"].iteration == max(evaluations) > best["step"]
    for facts in record.files.values():
        told = evaluations[facts.iteration]
        assert facts.metrics == {"loss": told["loss"], "accuracy": told["accuracy"]}
    assert record.input["shape"] == [8, 8, 1]
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["best.safetensors", "final.safetensors", "model.json"]


@pytest.fixture(scope="module")
def ran(alone: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two epochs, of 23 iterations each, with checkpoints after 20, 40 and 46."""
    out = tmp_path_factory.mktemp("ran")
    flags = (
        "--model",
        "cnn",
        "--epochs",
        "2",
        "--save-interval",
        "20",
        "--keep",
        "9",
        "--out",
        str(out),
    )
    alone("train", *flags)
    return out


def test_what_cannot_be_exported_is_refused(alone: Runner, ran: Path, tmp_path: Path) -> None:
    last = str(ran / "checkpoints" / "iteration-00000046")
    for source, code, value in (
        ((), "options-exclusive", "--model-folder or --checkpoint"),
        (("--model-folder", str(tmp_path)), "not-a-model-folder", "model.json"),
        (("--checkpoint", str(tmp_path)), "checkpoint-damaged", "manifest.json is missing"),
        (("--checkpoint", last, "--weights", "final"), "setting-without-effect", "--weights "),
    ):
        answer = alone("export", *source, "--to", str(tmp_path / "other"), rc=2)
        assert_one_error(answer.stderr, code, value)


def test_an_export_overwrites_nothing_unless_it_is_told_to(
    ran: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said before the model is read."""
    argv = ["export", "--model-folder", str(tmp_path / "nowhere"), "--to"]
    (tmp_path / "file").write_text("precious")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "config.json").write_text("precious")
    for to, library, code, value in (
        ("missing/file", "torch", "no-such-folder", "missing"),
        ("missing/hf", "hf", "no-such-folder", "missing"),
        ("file", "torch", "file-exists", "--force"),
        ("hf", "hf", "file-exists", "config.json"),
        ("hf", "torch", "target-other-kind", "must be a file"),
        ("file", "hf", "target-other-kind", "must be a folder"),
    ):
        assert main([*argv, str(tmp_path / to), "--export-as", library]) == 2
        assert_one_error(capsys.readouterr().err, code, value)
    assert not (tmp_path / "missing").exists()
    assert (
        (tmp_path / "file").read_text()
        == (tmp_path / "hf" / "config.json").read_text()
        == "precious"
    )
    argv[2] = str(ran / "model")
    assert main([*argv, str(tmp_path / "file"), "--force"]) == 0
    assert (tmp_path / "file").read_bytes() == (ran / "model" / "best.safetensors").read_bytes()


def test_a_run_that_goes_on_elsewhere_keeps_the_best_weights(
    alone: Runner, ran: Path, tmp_path: Path
) -> None:
    """Those of the first epoch, in the checkpoint; the second is made worse, by its learning
    rate.
    """
    checkpoint = ran / "checkpoints" / "iteration-00000040"
    best = read_record(ran / "model").files["best"]
    flags = ("--model", "cnn", "--epochs", "2", "--lr", "3", "--out", str(tmp_path))
    alone("train", *flags, "--resume", str(checkpoint))
    files = read_record(tmp_path / "model").files
    assert best.iteration == files["final"].iteration == 46
    assert files["best"].iteration == 23
    assert files["best"].metrics["loss"] < files["final"].metrics["loss"]  # type: ignore[index]
    kept = (checkpoint / "best.safetensors").read_bytes()
    assert (tmp_path / "model" / "best.safetensors").read_bytes() == kept
    assert (
        read_weights(tmp_path / "model").keys() == read_weights(tmp_path / "model", "final").keys()
    )


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    _left(folder, CASES[0].model, CASES[0].settings, Cpu())
    return folder


def test_full_disk_is_one_line_and_leaves_the_old_model(left: Path) -> None:
    with small_disk() as disk:
        folder = disk.path / "model"
        shutil.copytree(left, folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        disk.fill(but=4096)
        with refused(
            "file-unwritable", PayloadError, "--out: ", "safetensors", os.strerror(errno.ENOSPC)
        ):
            _left(folder, CASES[0].model, CASES[0].settings, Cpu())
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


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
    left: Path, tmp_path: Path, change: dict[str, Any], code: str, value: str
) -> None:
    shutil.copytree(left, tmp_path / "model")
    path = tmp_path / "model" / "model.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with refused(code, UsageError, value):
        build(read_record(path.parent), read_weights(path.parent), Cpu())


def test_files_that_are_refused(left: Path, tmp_path: Path) -> None:
    with refused("not-a-model-folder", UsageError, str(tmp_path), os.strerror(errno.ENOENT)):
        read_record(tmp_path)
    shutil.copytree(left, tmp_path, dirs_exist_ok=True)
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
