"""The model that a run leaves, and what is exported of it."""

from __future__ import annotations

import errno
import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from payload.__main__ import main
from payload.device.base import CpuDevice, Device
from payload.errors import PayloadError
from payload.parallel.mesh import alone as on_one_rank
from payload.saved_model.folder import read_weights
from payload.saved_model.record import read_record
from tests.integration.payload.conftest import Runner
from tests.integration.payload.programs import layouts, whole
from tests.support.disks import small_disk
from tests.support.doubles.models import CASES
from tests.support.messages import refused
from tests.support.payload import assert_one_error, records
from tests.unit.payload.test_payload_model_folder import (
    _left,
    trained_folder_fixture,  # noqa: F401
)


def test_models_of_all_layouts_are_equal_files(
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


def test_run_leaves_the_best_weights_and_the_last(alone: Runner, tmp_path: Path) -> None:
    alone("train", *"--lr 0.5 --epochs 5 --hidden 16".split(), "--out", str(tmp_path))  # too fast
    record = read_record(tmp_path / "model")
    evaluations = {one["step"]: one for one in records(tmp_path, "evaluation")}
    best = min(evaluations.values(), key=lambda one: one["loss"])
    assert record.files["best"].iteration == best["step"]
    assert record.files["final"].iteration == max(evaluations) > best["step"]
    for facts in record.files.values():
        evaluation = evaluations[facts.iteration]
        assert facts.metrics == {"loss": evaluation["loss"], "accuracy": evaluation["accuracy"]}
    assert record.input["shape"] == [8, 8, 1]
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["best.safetensors", "final.safetensors", "model.json"]


@pytest.fixture(scope="module")
def train_output(alone: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
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


def test_export_of_an_unsupported_model_is_refused(
    alone: Runner, train_output: Path, tmp_path: Path
) -> None:
    last = str(train_output / "checkpoints" / "iteration-00000046")
    for source, code, value in (
        ((), "options-exclusive", "--model-folder or --checkpoint"),
        (("--model-folder", str(tmp_path)), "not-a-model-folder", "model.json"),
        (("--checkpoint", str(tmp_path)), "checkpoint-damaged", "manifest.json is missing"),
        (("--checkpoint", last, "--weights", "final"), "setting-without-effect", "--weights "),
    ):
        answer = alone("export", *source, "--to", str(tmp_path / "other"), rc=2)
        assert_one_error(answer.stderr, code, value)


def test_checkpoint_and_a_model_folder_are_exported_alike(
    train_output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = []
    for name, *source in (
        ("model", "--model-folder", str(train_output / "model"), "--weights", "final"),
        ("saved", "--checkpoint", str(train_output / "checkpoints" / "iteration-00000046")),
    ):
        assert main(["export", *source, "--to", str(tmp_path / name)]) == 0
        answer = json.loads(capsys.readouterr().out)
        files.append((tmp_path / name).read_bytes())
        found = (answer["model"], answer["iteration"], answer["bytes"])
        assert found == ("cnn", 46, len(files[-1]))
    assert files[0] == files[1]


def test_export_overwrites_nothing_by_default(
    train_output: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It is said before the model is read."""
    argv = ["export", "--model-folder", str(tmp_path / "nowhere"), "--to"]
    (tmp_path / "file").write_text("precious")
    (tmp_path / "folder").mkdir()
    for to, code, value in (
        ("missing/file", "no-such-folder", "missing"),
        ("file", "file-exists", "--force"),
        ("folder", "target-other-kind", "must be a file"),
    ):
        assert main([*argv, str(tmp_path / to)]) == 2
        assert_one_error(capsys.readouterr().err, code, value)
    assert not (tmp_path / "missing").exists()
    assert (tmp_path / "file").read_text() == "precious"
    argv[2] = str(train_output / "model")
    assert main([*argv, str(tmp_path / "file"), "--force"]) == 0
    assert (tmp_path / "file").read_bytes() == (
        train_output / "model" / "best.safetensors"
    ).read_bytes()


def test_run_continued_in_another_folder_keeps_the_best_weights(
    alone: Runner, train_output: Path, tmp_path: Path
) -> None:
    """Those of the first epoch, in the checkpoint; the second is made worse, by its learning
    rate.
    """
    checkpoint = train_output / "checkpoints" / "iteration-00000040"
    best = read_record(train_output / "model").files["best"]
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


def test_export_on_a_full_disk_is_one_line_and_keeps_the_old_model(trained_folder: Path) -> None:
    with small_disk() as disk:
        folder = disk.path / "model"
        shutil.copytree(trained_folder, folder)
        before = {path.name: path.read_bytes() for path in folder.iterdir()}
        disk.fill(but=4096)
        with refused(
            "file-unwritable", PayloadError, "--out: ", "safetensors", os.strerror(errno.ENOSPC)
        ):
            _left(folder, CASES[0].model, CASES[0].settings, CpuDevice())
        assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
