"""A run that a signal stops saves, and leaves with the code that says so, whatever comes while it leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import pytest

from payload.checkpoint.folder import Lock
from payload.checkpoint.session import command_to_resume
from payload.saved_model.folder import read_record, read_weights
from tests.unit.payload.conftest import Runner, records

ROOT = Path(__file__).parents[3]


@contextmanager
def started(out: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    """A run that ends by a signal only, its standard output and its standard error."""
    given = ("--epochs", "100000", "--peak-tflops", "1", *(flags or ("--save-interval", "1000000")))
    argv = [sys.executable, "-u", "-m", "payload", "train", *given, "--out", str(out)]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, cwd=ROOT, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout
        assert process.stderr
        try:
            yield process, process.stdout, process.stderr
        finally:
            process.kill()


def test_a_signal_before_the_first_iteration_stops_after_that(tmp_path: Path) -> None:
    held = Lock(tmp_path / "checkpoints", patience_s=0)
    with started(tmp_path) as (process, _, stderr):
        assert ", which process " in stderr.readline()
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)  # while it waits
        held.close()
        output, errors = process.communicate(timeout=60)
    assert (process.returncode, errors) == (75, "")
    assert "saved after iteration 1\n" in output


def test_signals_while_it_leaves_change_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as (process, stdout, _):
        next(line for line in stdout if line.startswith("epoch"))
        process.send_signal(signal.SIGUSR1)
        said = next(line for line in stdout if not line.startswith("epoch"))
        while process.poll() is None:  # as srun does to the ranks that leave after the first
            process.send_signal(signal.SIGTERM)
    assert said.startswith("stopped by a signal; saved ")
    assert process.returncode == 75
    there = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name.split("-")[0] for path in there) == [".lock", "iteration"]


def test_a_run_without_checkpoints_leaves_its_model(tmp_path: Path) -> None:
    """Within an epoch: the weights are as they are then, and the best as of the last evaluation."""
    with started(tmp_path, "--global-batch-size", "2", "--hidden", "8") as (process, stdout, _):
        next(line for line in stdout if line.startswith("epoch   1 "))
        process.send_signal(signal.SIGTERM)
        said = next(line for line in stdout if not line.startswith("epoch"))
        assert process.wait(timeout=60) == 143
    iteration = int(said.removeprefix("stopped by a signal; saved after iteration "))
    files = read_record(tmp_path / "model").files
    assert (files["final"].iteration, files["final"].metrics) == (iteration, None)
    assert files["best"].iteration in range(719, iteration, 719)  # the end of an epoch
    for which in files:
        read_weights(tmp_path / "model", which)
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["best.safetensors", "final.safetensors", "model.json"]
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.parametrize("flags", ["--pp 2", "--iterations 1"], ids=["between", "last"])
def test_a_signal_in_an_evaluation_stops_it(
    program: Runner, mpirun: Runner, tmp_path: Path, flags: str
) -> None:
    """The model is saved without it, and the run that resumes makes it up: as if there had been no signal."""
    run = (
        "--global-batch-size",
        "1438",
        "--hidden",
        "8",
        "--peak-tflops",
        "1",
        "--epochs",
        "3",
        *flags.split(),
    )
    out, undisturbed = tmp_path / "out", tmp_path / "undisturbed"
    saved = ("--save-interval", "1000000", "--out", str(out))
    program(2, "interrupted.py", *run, *saved, rc=75)
    assert [record["step"] for record in records(out, "iteration", "evaluation")] == [1]
    assert read_record(out / "model").files["final"].metrics is None
    mpirun(2, "train", *run, *saved, "--resume", "auto")
    mpirun(2, "train", *run, "--out", str(undisturbed))
    evaluations = [
        [(record["step"], record["epoch"], record["loss"]) for record in records(folder, "evaluation")]
        for folder in (out, undisturbed)
    ]
    assert evaluations[0] == evaluations[1]
    assert read_record(out / "model") == read_record(undisturbed / "model")


ADA = {"SLURM_JOB_ID": "7", "CLUSTERCTL_HEARTBEAT": "h", "SLURM_JOB_PARTITION": "a100"}


@pytest.mark.parametrize(
    ("words", "env", "command"),
    [
        ("--lr 1 --resume auto", {}, "python -m payload train --lr 1 --resume auto"),
        ("--resume=a/b --lr 1", {"SLURM_JOB_ID": "7"}, "python -m payload train --lr 1 --resume auto"),
        ("--lr 1", ADA, "clusterctl submit train --partition a100 --nodes 1 --tasks-per-node 4 {job}"),
        ("--resume x --lr 1", ADA | {"SLURM_JOB_NUM_NODES": "4"}, "{all} --nodes 4 {job}"),
        (
            "--lr 1",
            ADA | {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2", "SLURM_JOB_NUM_NODES": "4"},
            "{all} --nodes 4 --from-run 5_2 -- --lr 1",
        ),
    ],
)
def test_a_stopped_run_names_the_command_that_continues_it(
    words: str, env: dict[str, str], command: str
) -> None:
    told = {"job": "--from-run 7 -- --lr 1", "all": "clusterctl submit train --partition a100"}
    assert command_to_resume(["train", *words.split()], env, 4) == command.format_map(told)


def test_auto_that_finds_no_checkpoint_says_so_before_the_training(alone: Runner, tmp_path: Path) -> None:
    out = ("--iterations", "1", "--save-interval", "1", "--out", str(tmp_path))
    told = [alone("train", *out, "--resume", "auto").stdout for _ in range(2)]
    note = f"--resume auto: no checkpoint in {tmp_path}/checkpoints, so training starts from zero\n"
    assert [text.find(note) in range(text.find("epoch")) for text in told] == [True, False]
