"""Runs of the whole program, on one rank and on several."""

from __future__ import annotations

import os
import re
import socket
from pathlib import Path

import pytest

from payload.device.base import Device
from tests.integration.payload.conftest import Runner
from tests.support.payload import assert_one_error, records

# 1,438 samples in batches of 50 leave a last one of 38, and neither divides by 3.
# Sums in fp64 do not depend on the number of ranks in any digit that is compared.
_SMALL = ("--epochs", "2", "--global-batch-size", "50", "--precision", "fp64")


def _losses(folder: Path) -> list[float]:
    return [record["loss"] for record in records(folder, "iteration")]


@pytest.fixture(scope="module")
def one_rank(alone: Runner, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("one")
    alone("train", *_SMALL, "--out", str(out))
    return out


def test_training_on_several_ranks_has_the_losses_of_one(
    mpirun: Runner, one_rank: Path, tmp_path: Path
) -> None:
    mpirun(2, "train", *_SMALL, "--zero", "3", "--recompute", "--out", str(tmp_path))
    assert _losses(tmp_path) == pytest.approx(_losses(one_rank), abs=1e-6, rel=0)
    assert len(_losses(tmp_path)) == 2 * 29
    several_ranks, single_rank = (records(out, "evaluation") for out in (tmp_path, one_rank))
    assert [record["accuracy"] for record in several_ranks] == [
        record["accuracy"] for record in single_rank
    ]


def test_transformer_over_tensor_and_pipeline_parallel_ranks(
    mpirun: Runner, alone: Runner, tmp_path: Path
) -> None:
    text = tmp_path / "text"
    text.write_text("".join(f"{number} bottles of beer on the wall, " for number in range(300)))
    sizes = "--model gpt-tiny --layers 2 --heads 2 --width 16 --sequence-length 8 --dropout 0.1"
    training = "--global-batch-size 9 --iterations 5 --clip-grad 1 --optimizer adamw"
    arguments = ["train", "--data", f"text:{text}", *f"{sizes} {training}".split()]
    layout = "--tp 2 --pp 2 --micro-batch-size 2".split()
    answer = mpirun(4, *arguments, *layout, "--out", str(tmp_path / "4"))
    assert "2 stages, 5 micro-batches: " in answer.stdout
    assert "idle 17% of" in answer.stdout
    alone(*arguments, "--out", str(tmp_path / "1"))
    assert _losses(tmp_path / "4") == pytest.approx(_losses(tmp_path / "1"), rel=1e-5)
    several_ranks, single_rank = (records(tmp_path / n, "evaluation")[-1]["loss"] for n in "41")
    assert several_ranks == pytest.approx(single_rank, rel=1e-5)


def test_training_with_more_ranks_than_samples_in_a_batch(
    mpirun: Runner, alone: Runner, tmp_path: Path
) -> None:
    arguments = "train --global-batch-size 2 --iterations 5 --lr 0.01 --precision fp64".split()
    mpirun(3, *arguments, "--out", str(tmp_path / "3"))
    alone(*arguments, "--out", str(tmp_path / "1"))
    assert _losses(tmp_path / "3") == pytest.approx(_losses(tmp_path / "1"), abs=1e-6, rel=0)


def test_defaults_learn_the_digits(mpirun: Runner, tmp_path: Path) -> None:
    answer = mpirun(2, "train", "--out", str(tmp_path / "made" / "for it"))
    run, result = records(tmp_path / "made" / "for it", "run", "result")
    host = socket.gethostname().split(".")[0]
    assert result["accuracy"] >= 0.97
    assert answer.stdout.splitlines()[-1] == f"test accuracy {result['accuracy']:.4f}"
    assert run["world_size"] == result["world_size"] == 2
    assert [(rank["rank"], rank["host"]) for rank in run["ranks"]] == [(0, host), (1, host)]
    assert run["ranks"][0]["cores"] == sorted(os.sched_getaffinity(0))
    assert run["config"]["lr"] == 0.05
    assert run["given"] == ["out"]
    assert "lr = 0.05\n" in (tmp_path / "made" / "for it" / "config.toml").read_text()
    assert set(run["versions"]) >= {"python", "numpy", "mpi4py", "mpi"}
    assert result["hosts"] == [host, host]
    first, second = result["param_hashes"]
    assert first == second
    assert len(first) == 64


def test_metrics_file_has_the_records_in_order(one_rank: Path) -> None:
    lines = records(one_rank)
    kinds = [line["kind"] for line in lines]
    assert kinds == [
        "run",
        *["iteration"] * 29,
        "evaluation",
        *["iteration"] * 29,
        "evaluation",
        "result",
    ]
    iterations = records(one_rank, "iteration")
    assert [(line["step"], line["epoch"]) for line in iterations] == [
        (i, 1 + (i > 29)) for i in range(1, 59)
    ]
    assert all(
        line["samples_per_s"] > 0 and line["grad_norm"] > 0 and line["lr"] == 0.05
        for line in iterations
    )
    assert [line["time"] for line in lines] == sorted(line["time"] for line in lines)


def test_training_is_reproducible_by_its_seed(
    alone: Runner, one_rank: Path, tmp_path: Path
) -> None:
    def hashes(seed: str) -> list[str]:
        out = tmp_path / seed
        alone("train", *_SMALL, "--out", str(out), "--seed", seed)
        return list(records(out, "result")[0]["param_hashes"])

    first = records(one_rank, "result")[0]["param_hashes"]
    assert hashes("0") == first != hashes("1")


def test_iterations_end_within_an_epoch_with_an_evaluation(alone: Runner, tmp_path: Path) -> None:
    alone("train", "--iterations", "30", "--out", str(tmp_path))
    *evaluations, result = records(tmp_path, "evaluation", "result")
    assert [evaluation["step"] for evaluation in evaluations] == [23, 30]
    assert result["accuracy"] == evaluations[-1]["accuracy"]


def test_lines_of_an_eval_interval_have_the_iteration(alone: Runner, tmp_path: Path) -> None:
    answer = alone("train", "--iterations", "4", "--eval-interval", "2", "--out", str(tmp_path))
    assert re.findall(r"iteration (\d+)", answer.stdout) == ["2", "4"]


def test_training_learns_from_compressed_gradients(mpirun: Runner, tmp_path: Path) -> None:
    flags = ("--compress", "topk", "--compress-ratio", "0.1", "--comm", "hierarchical")
    mpirun(2, "train", "--epochs", "3", *flags, "--out", str(tmp_path))
    assert records(tmp_path, "result")[0]["accuracy"] > 0.92


@pytest.mark.parametrize(
    ("flag", "value", "code"),
    [
        ("--global-batch-size", "1439", "batch-above-samples"),
        ("--out", "/proc/nowhere", "file-unwritable"),
    ],
)
def test_training_on_missing_hardware_or_data_is_refused_in_one_line(
    alone: Runner, flag: str, value: str, code: str
) -> None:
    assert_one_error(alone("train", flag, value, rc=2).stderr, code, flag, value)


def test_training_on_a_missing_gpu_is_refused_in_one_line(alone: Runner) -> None:
    answer = alone("train", "--device", "gpu", CUDA_VISIBLE_DEVICES="", rc=2)
    assert_one_error(answer.stderr, "no-gpu", "--device gpu")


@pytest.mark.parametrize(
    ("layout", "code", "values"),
    [
        ("--pp 4", "ranks-not-divisible", ("--tp 1 x --pp 4", "the 2 ranks", "multiple of 4")),
        ("--tp 2", "tp-without-layers", ("--tp 2",)),
        (
            "--tp 2 --model vit-tiny --heads 3 --width 12",
            "tp-not-divisible",
            ("3 attention heads", "1, 3"),
        ),
    ],
)
def test_layout_that_cannot_be_is_refused(
    mpirun: Runner, tmp_path: Path, layout: str, code: str, values: tuple[str, ...]
) -> None:
    answer = mpirun(2, "train", *layout.split(), "--out", str(tmp_path), rc=2)
    assert_one_error(answer.stderr, code, *values)


def test_error_of_rank_0_stops_all_ranks(mpirun: Runner) -> None:
    answer = mpirun(2, "train", "--out", "/proc/nowhere", rc=2)
    assert_one_error(answer.stderr, "file-unwritable", "rank 0 on ")


def test_training_in_half_precision_on_two_ranks(
    mpirun: Runner, tmp_path: Path, real_device: Device
) -> None:
    layout = "--precision fp16 --zero 2 --epochs 4"
    layout += " --offload-optimizer" if real_device.gpu else ""
    answer = mpirun(2, "train", *layout.split(), "--out", str(tmp_path))
    assert {record["loss_scale"] for record in records(tmp_path, "iteration")} == {2.0**16}
    assert records(tmp_path, "result")[0]["accuracy"] > 0.93
    assert "Warning" not in answer.stderr


def test_loss_scale_that_is_too_high_is_named(alone: Runner, tmp_path: Path) -> None:
    answer = alone(
        "train", "--precision", "fp16", "--loss-scale", "1e9", "--out", str(tmp_path), rc=1
    )
    assert_one_error(
        answer.stderr, "training-diverged", "iteration 1 (loss 2.", "--lr or --loss-scale"
    )


def test_ranks_that_drifted_apart_fail_the_run(program: Runner, tmp_path: Path) -> None:
    answer = program(3, "faults.py", "drifts", str(tmp_path), rc=1)
    assert_one_error(answer.stderr, "parameters-differ", "differ: rank 2 on ", "rank 0 on ")
    assert "rank 1 on " not in answer.stderr
    assert "test accuracy" not in answer.stdout
    first, second, third = records(tmp_path, "result")[0]["param_hashes"]
    assert first == second != third
