"""A training of a ResNet by its name."""

from __future__ import annotations

from pathlib import Path

from tests.integration.payload.conftest import Runner


def test_training_by_name(mpirun: Runner, tmp_path: Path) -> None:
    residual = ("--model", "resnet18", "--width", "4", "--recompute", "--pp", "2")
    for name, options in {"resnet": residual, "cnn": ("--model", "cnn", "--zero", "3")}.items():
        mpirun(2, "train", *options, "--iterations", "2", "--out", str(tmp_path / name))
