"""The search for a batch size and a learning rate; the evaluation of a trained model."""

from __future__ import annotations

import json
import math
import shutil
from itertools import groupby
from math import inf
from pathlib import Path

import pytest

from payload.comm.base import Solo
from payload.data.datasets import open_dataset
from payload.data.tokenizer import BytePairs
from payload.device.base import Cpu
from payload.errors import UsageError
from payload.parallel.mesh import alone as alone_mesh
from payload.training.build import build_loader, build_schedule
from payload.training.search import (
    Speed,
    SpeedSearch,
    Trial,
    fastest_size,
    most_robust,
    plan_trials,
    recipe_of,
    try_out,
)
from tests.support.messages import refused
from tests.unit.payload.conftest import Runner, assert_one_error, records, train_config


def test_the_knee_is_where_more_gains_nothing() -> None:
    speeds = [Speed(1, 10), Speed(2, 19), Speed(4, 35), Speed(8, 36), Speed(16, 36.5)]
    assert fastest_size(speeds) == 8
    assert fastest_size([Speed(1, 10)]) == 1


GROWING = {1: 10.0, 2: 20.0, 4: 21.0, 8: 40.0, 16: 80.0, 32: 81.0, 64: 81.0, 128: 81.0}


@pytest.mark.parametrize("planted", [*range(10), None])
@pytest.mark.parametrize(("largest", "last"), [(1000, 64), (16, 16), (31, 16), (1, 1)])
def test_the_size_does_not_depend_on_a_bad_measurement(
    largest: int, last: int, planted: int | None
) -> None:
    search = SpeedSearch(largest)
    for number, size in enumerate(search.sizes()):
        search.record(size, 1.0 if number == planted else GROWING[size])
    expected = [Speed(size, speed) for size, speed in GROWING.items() if size <= last]
    assert search.speeds[: len(expected)] == expected
    assert fastest_size(search.speeds) == min(last, 16)


@pytest.mark.parametrize(("before", "later"), [([], 2), ([1, 2, 4, 8, 16, 32, 64], 1)])
def test_sizes_without_memory_are_not_measured_again(before: list[int], later: int) -> None:
    """Also if these sizes had enough memory in the first round."""
    search = SpeedSearch(1000)
    measured = []
    for size in search.sizes():
        search.record(
            size, math.nan if size > 8 and len(measured) >= len(before) else GROWING[size]
        )
        measured.append(size)
    assert measured == [*before, 1, 2, 4, 8, 16, *([1, 2, 4, 8] * later)]
    assert fastest_size(search.speeds) == 8


ALIKE = [Speed(1, 1000), Speed(2, 1100), Speed(4, 1200), Speed(8, 2000)]
SPEEDS = [Speed(16, 1000), Speed(32, 2000), Speed(64, 4000), Speed(128, 8000), Speed(256, 8100)]


@pytest.mark.parametrize(
    ("flags", "speeds", "ranks", "samples", "trials"),
    [
        ("", [], 1, 1000, [(64, None, 100, 10)]),
        ("", SPEEDS, 1, 1000, [(64, 64, 100, 10), (128, 128, 100, 10)]),
        ("", SPEEDS[:2], 1, 1000, [(64, 32, 100, 10)]),
        ("", SPEEDS, 4, 1000, [(64, 16, 100, 10), (512, 128, 100, 10)]),
        ("", ALIKE, 16, 1000, [(64, 4, 100, 10), (128, 8, 83, 8)]),
        ("", ALIKE, 64, 300, [(64, 1, 100, 10), (300, 5, 26, 3)]),
        ("", ALIKE, 256, 1000, [(64, 1, 100, 10), (1000, 4, 20, 2)]),
        ("--global-batch-size 32", SPEEDS, 1, 1000, [(32, 32, 100, 10)]),
    ],
)
def test_trials_have_the_batches_of_the_user_and_of_the_ranks(
    flags: str, speeds: list[Speed], ranks: int, samples: int, trials: list[tuple[int | None, ...]]
) -> None:
    """(batch, micro-batch, iterations, warm-up); larger batches take the same time."""
    planned = list(plan_trials(train_config(*flags.split()), speeds, ranks, samples))
    batches = [
        (b.global_batch_size, b.micro_batch_size, b.iterations, each.optimizer.warmup_iterations)
        for each in planned
        for b in (each.batch,)
    ]
    assert [*dict.fromkeys(batches)] == trials
    series = [
        [*group]
        for _, group in groupby(planned, lambda each: (each.batch, each.optimizer.schedule))
    ]
    assert len(series) == 2 * len(trials)
    for group in series:
        rates = [each.optimizer.lr for each in group]
        assert (rates[0], rates[-1], 0.05 in rates, rates) == (0.0063, 0.8, True, sorted(rates))


@pytest.mark.parametrize(
    "flags", ["--schedule cosine --min-lr 0.01", "--schedule step --decay-iterations 500"]
)
def test_each_trial_has_a_schedule_of_its_length(flags: str) -> None:
    for trial in plan_trials(train_config("--lr", "0.05", *flags.split()), SPEEDS, 1, 1000):
        build_schedule(trial, alone_mesh(), 16)


def tried(*losses: float, batch: int = 64) -> list[Trial]:
    configs = (
        train_config("--global-batch-size", str(batch), "--lr", str(number + 1))
        for number in range(len(losses))
    )
    return [Trial(config, loss) for config, loss in zip(configs, losses, strict=True)]


@pytest.mark.parametrize(
    ("trials", "found"),
    [
        (tried(5, 4, 3, 3, 3, 4), (64, 4)),
        (tried(5, 3, 3, 1, inf, 1), (64, 3)),
        (tried(1, 1, 9) + tried(9, 1, 1, batch=128), (64, 2)),
        (tried(3, 3, 3) + tried(9, 1, 1, 1, batch=128), (128, 3)),
    ],
)
def test_the_best_rate_has_good_neighbours(trials: list[Trial], found: tuple[int, float]) -> None:
    recipe = recipe_of(most_robust(trials).settings)
    assert (recipe["global_batch_size"], recipe["lr"]) == found


def test_a_search_in_which_nothing_is_learned_is_refused() -> None:
    with refused("no-learning-rate", UsageError):
        most_robust(tried(1, inf, 1, inf))


def test_a_diverging_trial_has_no_loss() -> None:
    config = train_config("--lr", "1e30", "--iterations", "3")
    assert try_out(config, Cpu(), alone_mesh(), open_dataset(config, Solo())) == inf


def test_the_recipe_is_of_one_trial_and_trains_well(mpirun: Runner, tmp_path: Path) -> None:
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
    told = records(trained, "evaluation")[-1]
    found = json.loads(alone("eval", "--out", str(trained)).stdout)
    assert (found["iteration"], found["loss"]) == (6, pytest.approx(told["loss"], rel=1e-12))
    assert found["accuracy"] == told["accuracy"]
    assert found["bits_per_byte"] == pytest.approx(told["bits_per_byte"])
    assert found["bits_per_byte"] < found["loss"] / 0.6931 < found["perplexity"]
    split = json.loads(mpirun(2, "eval", "--out", str(trained), "--tp", "2").stdout)
    assert split == pytest.approx(found, rel=1e-12)
    older = str(trained / "checkpoints" / "iteration-00000003")
    earlier = json.loads(alone("eval", "--out", str(trained), "--resume", older).stdout)
    assert earlier["iteration"] == 3
    assert earlier["loss"] > found["loss"]


def test_a_run_is_evaluated_from_any_folder(
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
    device = Cpu()
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
def test_what_cannot_be_evaluated_is_one_line(
    alone: Runner, trained: Path, flags: tuple[str, ...], code: str, value: str
) -> None:
    assert_one_error(alone("eval", "--out", str(trained), *flags, rc=2).stderr, code, value)


def test_a_run_without_checkpoints_cannot_be_evaluated(alone: Runner, tmp_path: Path) -> None:
    alone("train", "--iterations", "1", "--out", str(tmp_path))
    answer = alone("eval", "--out", str(tmp_path), rc=2)
    assert_one_error(answer.stderr, "no-checkpoint", "--resume auto", str(tmp_path))


def test_other_text_is_judged_by_the_runs_tokenizer(
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
    assert_one_error(answer.stderr, "checkpoint-other-settings", "tokenizer bpe:270, samples ")
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
