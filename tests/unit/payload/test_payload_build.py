"""From settings to models, optimizers and rates."""

from __future__ import annotations

from pathlib import Path

import pytest

from payload.cli.settings import to_toml
from payload.comm.base import Solo
from payload.data.datasets import open_dataset
from payload.device.base import CpuDevice
from payload.errors import UsageError
from payload.models import MODELS
from payload.nn.module import LayerContext, Unit
from payload.parallel.engine import stages_of
from payload.saved_model.record import ModelRecord, WeightsFile
from payload.training.build import build_units
from payload.training.fit import find_error
from payload.training.schedule import build_schedule
from tests.support.messages import refused
from tests.support.payload import train_config


def _units(*flags: str) -> list[Unit]:
    config = train_config(*flags)
    return build_units(config.model, open_dataset(config, Solo()), LayerContext(CpuDevice()))


@pytest.mark.parametrize("name", MODELS)
def test_model_is_built_for_its_kind_of_data(name: str) -> None:
    units = _units("--model", name, "--data", "synthetic")
    assert sum(unit.flops for unit in units) > 0


def test_model_sizes_are_the_defaults_or_the_users() -> None:
    assert len(_units("--model", "gpt-124m", "--data", "synthetic")) == 12 + 2
    assert len(_units("--model", "gpt-124m", "--data", "synthetic", "--layers", "2")) == 2 + 2
    assert len(_units("--hidden", "5,5,5")) == 4


@pytest.mark.parametrize(
    ("flags", "code", "values"),
    [
        ("--heads 2", "model-without-size", ("--heads", "--model mlp")),
        (
            "--model gpt-tiny --data synthetic --hidden 4",
            "model-without-size",
            ("--hidden", "gpt-tiny"),
        ),
        (
            "--model gpt-tiny --data synthetic --heads 3",
            "heads-not-divisible",
            ("128", "3 attention heads"),
        ),
        ("--model vit-tiny --patch 3", "patches-not-divisible", ("8 x 8", "3 x 3")),
    ],
)
def test_impossible_model_size_is_refused_in_one_line(
    flags: str, code: str, values: tuple[str, ...]
) -> None:
    with refused(code, UsageError, *values):
        _units(*flags.split())


def test_more_stages_than_units_are_refused() -> None:
    with refused("too-many-stages", UsageError, "--pp 9", "3 units"):
        stages_of(_units(), tp=1, pp=9, recompute=False)


@pytest.mark.parametrize(
    ("flags", "iterations"), [((), 600), (("--iterations", "7"), 7), (("--epochs", "1"), 20)]
)
def test_run_ends_with_its_epochs_or_iterations(flags: tuple[str, ...], iterations: int) -> None:
    assert build_schedule(train_config(*flags), 1, per_epoch=20).iterations == iterations


def test_optimizer_has_its_own_default_settings() -> None:
    found = [train_config("--optimizer", name).optimizer for name in ("sgd", "adamw", "lamb")]
    assert [(one.lr, one.weight_decay, one.eps) for one in found] == [
        (0.05, 0.0, None),
        (1e-3, 0.01, 1e-8),
        (2e-3, 0.01, 1e-6),
    ]
    assert (
        train_config("--optimizer", "adamw", "--lr", "0.5", "--weight-decay", "0").optimizer.lr
        == 0.5
    )


IMAGES = "train"
TEXT = "train --model gpt-tiny --data text:a"


@pytest.mark.parametrize(
    ("line", "ranks", "parts"),
    [
        (f"{IMAGES} --lrr 0.1", None, ("--lrr 0.1", "mean --lr?")),
        (f"{IMAGES} --lr abc", None, ("argument --lr: 'abc'",)),
        (f"{IMAGES} --beta1 0.5", None, ("--beta1 ", "--optimizer adamw or lamb")),
        (f"{IMAGES} --data text:a", None, ("--data text:a", "the model takes images")),
        (
            f"{IMAGES} --iterations 2 --warmup-iterations 3",
            None,
            ("--warmup-iterations", "after 2 iterations"),
        ),
        (f"{IMAGES} --pp 3", 2, ("--pp 3", "the 2 ranks")),
        (f"{TEXT} --pp 3", 4, ("the 4 ranks",)),
        (f"{IMAGES} --zero 1", 1, ("--zero", "two or more")),
        ("bench --ranks 3", 2, ("--ranks 3", "2 ranks")),
        ("eval --resume x --pp 3", 2, ("--pp 3", "the 2 ranks")),
    ],
)
def test_unfit_arguments_are_found_without_ranks(
    line: str, ranks: int | None, parts: tuple[str, ...]
) -> None:
    error = find_error(line.split(), ranks) or ""
    assert [part for part in parts if part not in error] == []


_KEPT = {"best": WeightsFile("best.safetensors", 1, None, "")}
_RECORDS = {
    "images": ModelRecord("mlp", {}, {"kind": "images"}, 10, None, _KEPT),
    "text": ModelRecord("gpt-tiny", {}, {"kind": "text"}, 256, {"kind": "bytes"}, _KEPT),
    "tokens": ModelRecord("gpt-tiny", {}, {"kind": "text"}, 256, None, _KEPT),
}


@pytest.mark.parametrize(
    ("line", "model", "parts"),
    [
        ("sample", "images", ("mlp", "takes images")),
        ("sample", "tokens", ("synthetic tokens",)),
        ("sample --weights final", "text", ("final weights", "available: best")),
        ("sample", "text", ()),
        ("predict a.png", "text", ("gpt-tiny", "takes text")),
        ("eval --data digits", "text", ("--data digits", "takes text")),
        ("eval --data digits", "images", ()),
        ("export --weights final", "images", ("final weights", "available: best")),
        ("export", "text", ()),
    ],
)
def test_find_error_in_the_use_of_a_model(
    tmp_path: Path, line: str, model: str, parts: tuple[str, ...]
) -> None:
    """The weights are not read, and the folder of the command is on the cluster."""
    (tmp_path / "model.json").write_text(_RECORDS[model].encode())
    command, *words = line.split()
    argv = [command, "--model-folder", "model", *words]
    assert find_error(argv, None) is None
    error = find_error(argv, None, str(tmp_path))
    assert (error is None) == (not parts)
    assert [part for part in parts if part not in (error or "")] == []


@pytest.mark.parametrize(
    ("line", "parts"),
    [
        ("train --resume auto --global-batch-size 32", ("batch-size 64", "batch-size 32")),
        ("train --resume auto --model cnn", ("model mlp", "model cnn")),
        ("train --resume auto --data idx:images", ("data digits", "data idx")),
        ("train --resume auto --seed 9", ("seed 0", "seed 9")),
        ("train --resume auto --precision bf16", ("precision fp32", "precision bf16")),
        # The sizes of the model and the data are compared on the nodes.
        ("train --resume auto --hidden 5 --eval-samples 9", ()),
        ("train --resume auto --lr 0.1 --epochs 40", ()),
        ("train --resume never --global-batch-size 32", ()),
    ],
)
def test_find_error_in_the_settings_of_a_continued_run(
    tmp_path: Path, line: str, parts: tuple[str, ...]
) -> None:
    (tmp_path / "config.toml").write_text(to_toml(train_config()))
    error = find_error(line.split(), None, str(tmp_path))
    assert (error is None) == (not parts)
    assert [part for part in parts if part not in (error or "")] == []


def test_find_error_of_a_run_with_settings_of_another_program(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("depth = 3\n")
    assert find_error(["train", "--resume", "auto"], None, str(tmp_path)) is None
