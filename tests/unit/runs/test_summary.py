"""What run.json says of a run's arguments, configuration and metrics."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from clusterctl.runs.series import config_of, config_of_task, summarize
from clusterctl.spec.sweep import ArgumentForm, sweep_arguments
from clusterctl.state.run_record import Metric


def lines(folder: Path, *records: object) -> None:
    (folder / "metrics.jsonl").write_text("".join(json.dumps(one) + "\n" for one in records))


def test_options_of_any_program_are_its_configuration() -> None:
    words = (
        "train.csv --lr=1e-3 --epochs 5 --name a b --warm-up --offset -3 -v --x= --seed 0x1".split()
    )
    words += "optimizer.lr=0.1 ++db/type=a=b ./c=d".split()
    switches = {"warm_up": True, "v": True}
    options = {"lr": 0.001, "epochs": 5, "name": "a", "offset": -3, "x": "", "seed": "0x1"}
    options |= {"optimizer.lr": 0.1, "db/type": "a=b"}
    assert config_of(words) == (switches | options, ["train.csv", "b", "./c=d"])


def test_words_that_begin_with_a_dash_are_values_if_they_are_numbers() -> None:
    words = "--low -1e-3 --high -inf --tag=-x --nan -nan -v".split()
    assert config_of(words) == (
        {"low": -0.001, "high": "-inf", "tag": "-x", "nan": "-nan", "v": True},
        [],
    )


def test_texts_that_only_resemble_numbers_are_kept() -> None:
    words = [
        f"--x{n}={text}"
        for n, text in enumerate(("007", "1_000", "0x1", " 5", "1e3", "+2", ".5", "0.10"))
    ]
    assert [*config_of(words)[0].values()] == ["007", "1_000", "0x1", " 5", 1000, 2, 0.5, 0.1]


@pytest.mark.parametrize("form", [None, *ArgumentForm])
def test_values_of_a_task_are_its_configuration_as_they_were_written(
    form: ArgumentForm | None,
) -> None:
    values = {
        "tag": "-x",
        "shift": "-1e-3",
        "layers": "[64,64]",
        "why": "a=b, 'c'",
        "name": "",
        "n": "007",
    }
    values |= {"+opt/sgd.lr": "2", "batch-size": "64"}
    expected = {
        "tag": "-x",
        "shift": -0.001,
        "layers": "[64,64]",
        "why": "a=b, 'c'",
        "name": "",
        "n": "007",
    }
    assert config_of_task(values, form) == {**expected, "opt/sgd.lr": 2, "batch_size": 64}
    if form != ArgumentForm.OPTION:
        del values["+opt/sgd.lr"]
        assert config_of(sweep_arguments(values, form))[0] == {**expected, "batch_size": 64}


def test_switches_of_a_task_are_booleans_if_it_gets_them_as_options_alone() -> None:
    assert config_of_task({"fast": "true", "slow": "false"}) == {"fast": True}
    assert config_of_task({"fast": "true"}, "key=value") == {"fast": "true"}


def test_summary_of_a_metric_has_last_lowest_and_highest(tmp_path: Path) -> None:
    config = {"lr": 0.1, "model": {"width": 8}, "tags": ["a"]}
    lines(
        tmp_path,
        {"kind": "run", "time": 1.5, "world_size": 2, "config": config},
        {"kind": "iteration", "step": 1, "loss": 3.0, "note": "x", "ok": True},
        {"kind": "iteration", "step": 2, "loss": 1.0},
        {"kind": "iteration", "step": 3, "loss": 2.0},
        {"kind": "evaluation", "step": 3, "accuracy": 0.9, "loss": 1.5},
        {"kind": "result", "accuracy": 0.9},
    )
    found = summarize(tmp_path, ("--lr", "0.2"))
    assert found.config == {"lr": 0.2, "model.width": 8, "tags": '["a"]'}
    assert found.metrics == {
        "loss": Metric(
            first=3.0, last=2.0, last_step=3, min=1.0, min_step=2, max=3.0, max_step=1, count=3
        ),
        "eval_accuracy": Metric(
            first=0.9, last=0.9, last_step=3, min=0.9, min_step=3, max=0.9, max_step=3, count=1
        ),
        "eval_loss": Metric(
            first=1.5, last=1.5, last_step=3, min=1.5, min_step=3, max=1.5, max_step=3, count=1
        ),
    }


def test_summarize_counts_values_that_are_not_finite(tmp_path: Path) -> None:
    values = ((1, 1.0), (4, float("nan")), (7, float("inf")), (9, 10**400))
    lines(tmp_path, *({"loss": loss, "step": step} for step, loss in values))
    assert summarize(tmp_path).metrics["loss"] == Metric(
        first=1.0, last_step=7, min=1.0, min_step=1, max=1.0, max_step=1, count=3, nonfinite=2,
        nonfinite_step=4, last_nonfinite="inf",
    )  # fmt: skip


@pytest.mark.parametrize(
    "text",
    [
        "no json\n[1]\n" + "[" * 100_000 + '\n"x"\n',
        '{"loss": 1' + " " * (2 << 20) + "}\n",
        '{"step": 1, "loss": 5.0',  # half a line
        json.dumps({"config": {"a": {"a": {"a": {"a": {"a": {"a": {"a": 1}}}}}}}}),
        '{"kind": []}\n{"kind": {"a": 1}}\n{"kind": ' + "[" * 800 + "]" * 800 + "}",
    ],
    ids=["no-records", "long-line", "half-a-line", "nested", "kinds"],
)
def test_summarize_skips_lines_that_are_no_record(tmp_path: Path, text: str) -> None:
    (tmp_path / "metrics.jsonl").write_text(f'{{"loss": 2.0}}\n{text}\n{{"loss": 3.0}}\n')
    assert summarize(tmp_path).metrics["loss"].count == 2


def test_names_and_values_are_bounded_and_can_be_printed(tmp_path: Path) -> None:
    many = {"\x1b[31m\u202e" * 100: 1, **{f"m{number}": number for number in range(1099)}}
    lines(tmp_path, {"config": {"\x1b[2J": "\x1b[31m" * 100, **many}}, many)
    found = summarize(tmp_path)
    assert (len(found.config), len(found.metrics)) == (1000, 1000)
    assert [text[:17] for text in found.left_out] == ["metrics after the", "options of the pr"]
    assert all(name.isprintable() and len(name) <= 100 for name in (*found.config, *found.metrics))
    assert all(not isinstance(value, str) or value.isprintable() for value in found.config.values())


def test_summarize_of_a_very_large_file_names_the_omitted_part(tmp_path: Path) -> None:
    """A hole in the file takes no space on the disk."""
    lines(tmp_path, {"config": {"lr": 1}}, *({"step": n, "loss": float(n)} for n in range(901)))
    with (tmp_path / "metrics.jsonl").open("r+") as file:
        file.seek((1 << 30) + (2 << 20))
        file.write("\n")
        file.writelines(f'{{"step": {n}, "loss": {n}.0}}\n' for n in range(901, 1000))
    found = summarize(tmp_path)
    assert found.config == {"lr": 1}
    loss = found.metrics["loss"]
    assert (loss.last, loss.max) == (999.0, 999.0)
    assert loss.min == 901.0
    # Nothing was left of the budget to look for other files.
    left_out, others = found.left_out
    assert "metrics.jsonl" in left_out
    assert "1 GiB" in left_out
    assert "beyond" in others


@pytest.mark.parametrize("kind", ["gone", "link", "pipe", "folder"])
def test_summarize_ignores_what_is_no_regular_file(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "metrics.jsonl"
    (tmp_path / "other").write_text('{"loss": 1}\n')
    {
        "gone": lambda _: None,
        "link": lambda p: p.symlink_to("other"),
        "pipe": os.mkfifo,
        "folder": Path.mkdir,
    }[kind](path)
    assert summarize(tmp_path).metrics == {}


def test_measurements_of_bundled_jobs_are_metrics(tmp_path: Path) -> None:
    """Of `bench` the side with all ranks counts, of `--find` the recipe, of a list the mean over
    ranks.
    """
    lines = {
        "bench.jsonl": [
            {"kind": "bench", "side": "all", "ranks": 2, "iteration_ms": 5.0, "mfu": None},
            {"kind": "bench", "side": "weak 1", "ranks": 1, "iteration_ms": 4.0},
        ],
        "gemm.jsonl": [
            {"kind": "gemm", "m": 8, "gflops": [1.5, 2.5]},
            {"kind": "gemm", "gflops": [2.0, 1.0]},
        ],
        "allreduce.jsonl": [{"kind": "allreduce", "bytes": 8, "bus_gb_per_s": 3.0, "ok": True}],
        "find.jsonl": [
            {"kind": "micro_batch", "size": 4, "samples_per_s": 70.0},
            {"kind": "trial", "lr": 8.0, "loss": 2.5},
            {"kind": "found", "lr": 0.5, "loss": 0.25},
        ],
    }
    for name, records in lines.items():
        (tmp_path / name).write_text("".join(f"{json.dumps(record)}\n" for record in records))
    found = {name: (metric.min, metric.max) for name, metric in summarize(tmp_path).metrics.items()}
    assert found == {
        "iteration_ms": (5.0, 5.0),
        "gflops": (1.5, 2.0),
        "bus_gb_per_s": (3.0, 3.0),
        "samples_per_s": (70.0, 70.0),
        "lr": (0.5, 0.5),
        "loss": (0.25, 0.25),
    }
