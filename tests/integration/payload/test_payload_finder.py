"""Trainings with the settings that were searched for, and the evaluation of trained models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from payload.data.datasets import open_dataset
from payload.data.tokenizer import BytePairs
from payload.device.base import CpuDevice
from payload.parallel.mesh import alone as alone_mesh
from payload.training.build import build_loader
from payload.training.search import (
    recipe_of,
)
from tests.integration.payload.conftest import Runner
from tests.support.payload import assert_one_error, records, train_config


def test_find_writes_a_recipe_that_trains_well(mpirun: Runner, tmp_path: Path) -> None:
    answer = mpirun(2, "train", "--find", "--optimizer", "adamw", "--out", str(tmp_path))
    sizes = [record["size"] for record in records(tmp_path, "micro_batch", file="find.jsonl")]
    assert sizes == [2**power for power in range(len(sizes))]
    assert len(sizes) > 3
    lines = answer.stdout.splitlines()
    assert len([line for line in lines if line.startswith("micro-batch ")]) > len(sizes)
    (found,) = records(tmp_path, "found", file="find.jsonl")
    best = {name: value for name, value in found.items() if name not in ("kind", "time")}
    trials = records(tmp_path, "trial", file="find.jsonl")
    assert any(best.items() <= trial.items() for trial in trials)
    assert best["loss"] < 1
    recipe = {name: value for name, value in best.items() if name != "loss"}
    flags = lines[-1].removeprefix("use ").split()
    printed = train_config(*flags)
    assert recipe_of(printed) == recipe
    assert printed.given.keys() == recipe.keys()
    mpirun(2, "train", *flags, "--optimizer", "adamw", "--epochs", "4", "--out", str(tmp_path))
    (result,) = records(tmp_path, "result")
    assert result["accuracy"] > 0.93


@pytest.fixture(scope="module")
def trained(alone: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny GPT with two checkpoints."""
    folder = tmp_path_factory.mktemp("trained")
    text = folder / "text"
    text.write_bytes(b"the cat sat on the mat, and the other cat sat on the other mat. " * 60)
    out = folder / "run"
    sizes = "--model gpt-tiny --layers 1 --heads 2 --width 16 --sequence-length 16".split()
    data = (
        "--data",
        f"text:{text}",
        "--tokenizer",
        "bpe:270",
        "--iterations",
        "6",
        "--save-interval",
        "3",
    )
    answer = alone(
        "train", *sizes, *data, "--optimizer", "adamw", "--precision", "fp64", "--out", str(out)
    )
    assert "bits per byte" in answer.stdout
    return out


def test_evaluation_of_a_checkpoint_is_that_of_the_run(
    alone: Runner, mpirun: Runner, trained: Path
) -> None:
    evaluation = records(trained, "evaluation")[-1]
    found = json.loads(alone("eval", "--out", str(trained)).stdout)
    assert (found["iteration"], found["loss"]) == (6, pytest.approx(evaluation["loss"], rel=1e-12))
    assert found["accuracy"] == evaluation["accuracy"]
    assert found["bits_per_byte"] == pytest.approx(evaluation["bits_per_byte"])
    assert found["bits_per_byte"] < found["loss"] / 0.6931 < found["perplexity"]
    split = json.loads(mpirun(2, "eval", "--out", str(trained), "--tp", "2").stdout)
    assert split == pytest.approx(found, rel=1e-12)
    older = str(trained / "checkpoints" / "iteration-00000003")
    earlier = json.loads(alone("eval", "--out", str(trained), "--resume", older).stdout)
    assert earlier["iteration"] == 3
    assert earlier["loss"] > found["loss"]


def test_run_is_evaluated_from_any_folder(
    alone: Runner, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(trained.parent)
    sizes = ("--model", "lstm", "--width", "8", "--layers", "1", "--sequence-length", "16")
    given = (
        "--data",
        "text:text",
        "--save-interval",
        "1",
        "--checkpoints",
        "kept",
        "--out",
        str(tmp_path),
    )
    first = "kept/iteration-00000001"
    for more in (("--iterations", "1"), ("--iterations", "2", "--resume", first)):
        alone("train", *sizes, *given, *more)
    assert f'resume = "{trained.parent / first}"\n' in (tmp_path / "config.toml").read_text()
    monkeypatch.chdir("/")
    alone("eval", "--out", str(tmp_path))


def test_evaluation_uses_small_batches_and_few_samples(
    alone: Runner, trained: Path, tmp_path: Path
) -> None:
    sizes = ("--model", "lstm", "--width", "8", "--layers", "1", "--sequence-length", "16")
    given = (
        "--data",
        f"text:{trained.parent / 'text'}",
        "--iterations",
        "1",
        "--save-interval",
        "1",
    )
    config = train_config(*sizes, *given, "--global-batch-size", "150", "--out", str(tmp_path))
    device = CpuDevice()
    mesh = alone_mesh()
    batches = build_loader(
        config, open_dataset(config, mesh.world), device, mesh, eval_only=True
    ).held_out()
    assert len(next(batches).inputs) <= 32
    alone("train", *sizes, *given, "--global-batch-size", "150", "--out", str(tmp_path))
    (tmp_path / "short").write_bytes((trained.parent / "text").read_bytes()[:1000])
    answer = alone("eval", "--out", str(tmp_path), "--data", f"text:{tmp_path / 'short'}")
    assert 0 < json.loads(answer.stdout)["samples"] < 30


def test_infinite_loss_ends_the_run_in_one_line_and_is_null(alone: Runner, tmp_path: Path) -> None:
    """The weights of the first iteration are too large; their loss is that of the second, or of a
    test.
    """
    flags = ("--lr", "1e30", "--save-interval", "1", "--save", "sync")
    for iterations, values in (("1", ("iteration 1 ", "test loss")), ("2", ("iteration 2 ",))):
        out = str(tmp_path / iterations)
        answer = alone("train", "--iterations", iterations, *flags, "--out", out, rc=1)
        assert_one_error(answer.stderr, "training-diverged", *values)
    found = json.loads(alone("eval", "--out", out).stdout, parse_constant=pytest.fail)
    assert (found["iteration"], found["loss"], found["perplexity"]) == (1, None, None)


@pytest.mark.parametrize(
    ("flags", "code", "value"),
    [
        (("--out", "/nowhere"), "file-unreadable", "--out: /nowhere/config.toml"),
        (("--resume", "/nowhere"), "checkpoint-damaged", "--resume: /nowhere"),
        (("--data", "digits"), "data-unfit-for-model", "text:FILE"),
        (("--pp", "2"), "ranks-not-divisible", "--pp 2"),
    ],
)
def test_eval_with_wrong_arguments_is_refused_in_one_line(
    alone: Runner, trained: Path, flags: tuple[str, ...], code: str, value: str
) -> None:
    assert_one_error(alone("eval", "--out", str(trained), *flags, rc=2).stderr, code, value)


def test_run_without_checkpoints_cannot_be_evaluated(alone: Runner, tmp_path: Path) -> None:
    alone("train", "--iterations", "1", "--out", str(tmp_path))
    answer = alone("eval", "--out", str(tmp_path), rc=2)
    assert_one_error(answer.stderr, "no-checkpoint", "--resume auto", str(tmp_path))


def test_eval_of_another_text_uses_the_tokenizer_of_the_run(
    alone: Runner, trained: Path, tmp_path: Path
) -> None:
    text = b"a dog and a bird, and a fish and a bird. " * 80
    kept = _newest(trained) / "data.json"
    (tmp_path / "text").write_bytes(text)
    before = kept.read_bytes()
    answer = alone("eval", "--out", str(trained), "--data", f"text:{tmp_path / 'text'}")
    tokens = BytePairs.read(json.loads(before)).encode(text[-len(text) // 20 :])
    assert json.loads(answer.stdout)["samples"] == (len(tokens) - 1) // 16
    assert kept.read_bytes() == before


def test_resume_uses_the_tokenizer_of_the_checkpoint(
    alone: Runner, trained: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(trained, tmp_path / "run")
    before = (_newest(out) / "data.json").read_text()
    again = ("train", "--config", str(out / "config.toml"), "--resume", "auto", "--out", str(out))
    answer = alone(*again, "--tokenizer", "bytes", rc=2)
    values = ("tokenizer bpe:270,", "vocabulary 270,", "samples 70,")
    assert_one_error(answer.stderr, "checkpoint-other-settings", *values)
    alone(*again, "--iterations", "7")
    assert (_newest(out) / "data.json").read_text() == before
    broken = _newest(out) / "data.json"
    broken.write_text(before.replace("1", "2", 1))
    answer = alone(*again, "--iterations", "7")
    assert f"{broken.parent} is broken: " in answer.stdout
    assert "resuming from " in answer.stdout
    assert broken.read_text() == before  # it was made anew


def test_moved_checkpoint_is_evaluated_exported_and_resumed(
    alone: Runner, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = json.loads(alone("eval", "--out", str(trained)).stdout)
    moved = str(shutil.copytree(_newest(trained), tmp_path / "mine"))
    monkeypatch.chdir(tmp_path)
    assert json.loads(alone("eval", "--resume", moved).stdout) == expected
    alone("export", "--checkpoint", moved, "--to", "weights")
    config = ("--config", str(trained / "config.toml"), "--checkpoints", "new", "--out", "new")
    answer = alone("train", *config, "--resume", moved, "--iterations", "7")
    assert f"resuming from {moved}" in answer.stdout
    (tmp_path / "mine" / "data.json").write_text("{}")
    answer = alone("eval", "--resume", moved, rc=2)
    assert_one_error(
        answer.stderr, "checkpoint-damaged", f"--resume: {moved}", "data.json has 2 bytes"
    )


def _newest(out: Path) -> Path:
    return max((out / "checkpoints").glob("iteration-*"))
