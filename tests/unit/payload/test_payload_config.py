from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from payload.config import ProbeConfig, TelemetryConfig, TrainConfig, parse
from payload.errors import UsageError

Runner = Callable[..., subprocess.CompletedProcess[str]]


def test_train_arguments() -> None:
    config = parse(["train", "--hidden", "8,4", "--lr", "1e-2", "--iterations", "5", "--out", "runs/a"])
    assert isinstance(config, TrainConfig)
    assert (config.hidden, config.lr, config.iterations, config.out) == ((8, 4), 0.01, 5, Path("runs/a"))
    assert (config.dtype, config.global_batch_size, config.seed) == ("float64", 64, 0)


def test_other_arguments() -> None:
    assert parse(["probe", "--expect-hosts", "a, b,a"]) == ProbeConfig(expect_hosts=("a", "b"), device="auto")
    assert parse(["telemetry", "--out", "t", "--interval", ".5"]) == TelemetryConfig(Path("t"), 0.5)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "tarin",
        "train --epochs 0",
        "train --epochs 1.5",
        "train --iterations 0",
        "train --global-batch-size 0",
        "train --lr 0",
        "train --lr nan",
        "train --lr inf",
        "train --momentum 1",
        "train --momentum -0.1",
        "train --hidden 8,,4",
        "train --hidden 0",
        "train --seed -1",
        "train --dtype float16",
        "train --device tpu",
        "train --epoch 3",
        "train stray",
        "probe --device",
        "telemetry",
        "telemetry --out t --interval 0",
    ],
)
def test_bad_arguments_are_one_line(line: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(line.split())
    assert "\n" not in str(caught.value)


def test_the_message_names_flag_and_value() -> None:
    with pytest.raises(UsageError, match=r"payload train: argument --lr: 'fast' is not a finite number"):
        parse(["train", "--lr", "fast"])


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"]])
def test_help_needs_neither_numpy_nor_mpi(arguments: list[str]) -> None:
    blocked = "import sys; sys.modules.update(numpy=None, mpi4py=None)"
    code = f"{blocked}; from payload.__main__ import main; main({arguments!r})"
    root = Path(__file__).parents[3]
    answer = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    assert (answer.returncode, answer.stderr) == (0, "")
    assert "usage: python -m payload" in answer.stdout


def test_all_ranks_refuse_and_one_speaks(mpirun: Runner) -> None:
    answer = mpirun(3, "train", "--lr", "fast")
    assert answer.returncode == 2
    assert answer.stderr.count("payload: error:") == 1


def test_the_others_wait_for_the_one_that_speaks(program: Runner) -> None:
    answer = program(2, "late.py")
    assert answer.returncode == 2
    assert answer.stderr.count("payload: error:") == 1


def test_alone_it_refuses_without_mpi(alone: Runner, tmp_path: Path) -> None:
    (tmp_path / "mpi4py.py").write_text("raise RuntimeError('must not be imported')")
    answer = alone("train", "--lr", "fast", PYTHONPATH=f"{tmp_path}:{Path(__file__).parents[3]}")
    assert answer.returncode == 2
    assert len(answer.stderr.splitlines()) == 1
