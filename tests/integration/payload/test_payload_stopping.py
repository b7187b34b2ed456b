"""A run that a signal stops saves, and leaves with the code that says so, whatever comes while it
leaves.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import pytest

from payload.checkpoint.folder import FolderLock, checkpoint_name
from payload.checkpoint.session import command_to_resume, variables_to_set
from payload.checkpoint.shards import read_manifest
from payload.node.history import attempts_of
from payload.saved_model.folder import read_weights
from payload.saved_model.record import read_record
from tests.integration.payload.conftest import Runner
from tests.support.payload import assert_one_error, records

ROOT = Path(__file__).parents[3]


@contextmanager
def started(out: Path, *flags: str) -> Iterator[tuple[subprocess.Popen[str], IO[str], IO[str]]]:
    """A run that ends by a signal only, its standard output and its standard error."""
    given = ("--epochs", "100000", "--peak-tflops", "1", *(flags or ("--save-interval", "1000000")))
    argv = [sys.executable, "-u", "-m", "payload", "train", *given, "--out", str(out)]
    pipe = subprocess.PIPE
    env = {**os.environ, "CLUSTERCTL_HEARTBEAT": str(out / "heartbeat")}
    with subprocess.Popen(argv, cwd=ROOT, stdout=pipe, stderr=pipe, text=True, env=env) as process:
        assert process.stdout
        assert process.stderr
        try:
            yield process, process.stdout, process.stderr
        finally:
            process.kill()


def test_signal_before_the_first_iteration_stops_after_that(tmp_path: Path) -> None:
    held = FolderLock(tmp_path / "checkpoints", patience_s=0)
    with started(tmp_path) as (process, _, stderr):
        assert ", which process " in stderr.readline()
        process.send_signal(signal.SIGUSR1)
        time.sleep(0.1)  # while it waits
        held.close()
        errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (75, "")
    assert [record["step"] for record in records(tmp_path, "iteration", "checkpoint")] == [1, 1]


def test_signals_during_exit_change_nothing(tmp_path: Path) -> None:
    with started(tmp_path) as (process, stdout, _):
        next(line for line in stdout if line.startswith("epoch"))
        process.send_signal(signal.SIGUSR1)
        line = next(line for line in stdout if not line.startswith("epoch"))
        while process.poll() is None:  # as srun does to the ranks that leave after the first
            process.send_signal(signal.SIGTERM)
    assert line.startswith("stopped by a signal; saved ")
    assert process.returncode == 75
    (attempt,) = attempts_of((tmp_path / "job.events").read_text())
    assert attempt.saved_iteration == int(line.rpartition(" ")[2])
    there = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name.split("-")[0] for path in there) == [".lock", "iteration"]


def test_run_without_checkpoints_leaves_its_model(tmp_path: Path) -> None:
    """Within an epoch: the weights are as they are then, and the best as of the last evaluation."""
    with started(tmp_path, "--global-batch-size", "2", "--hidden", "8") as (process, stdout, _):
        next(line for line in stdout if line.startswith("epoch   1 "))
        process.send_signal(signal.SIGTERM)
        line = next(line for line in stdout if not line.startswith("epoch"))
        assert process.wait(timeout=60) == 143
    iteration = int(line.removeprefix("stopped by a signal; saved after iteration "))
    files = read_record(tmp_path / "model").files
    assert (files["final"].iteration, files["final"].metrics) == (iteration, None)
    assert files["best"].iteration in range(719, iteration, 719)  # the end of an epoch
    for which in files:
        read_weights(tmp_path / "model", which)
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["best.safetensors", "final.safetensors", "model.json"]
    assert not (tmp_path / "checkpoints").exists()


RUN = (
    *(
        "--hidden",
        "8",
        "--optimizer",
        "adamw",
        "--global-batch-size",
        "256",
        "--micro-batch-size",
        "16",
    ),
    *("--iterations", "12", "--eval-interval", "4", "--save-interval", "3", "--peak-tflops", "1"),
)
"""Evaluations of 23 batches after iterations 4, 8 and 12; checkpoints after 3, 6, 9 and 12."""

Undisturbed = Callable[..., tuple[Any, ...]]


def outcome(out: Path) -> tuple[Any, ...]:
    """What must be the same to the last digit, disturbed or not."""
    kept = ("kind", "step", "epoch", "loss", "lr", "grad_norm", "accuracy", "param_hashes")
    lines = records(out, "iteration", "evaluation", "result")
    rows = [tuple(str(line.get(name)) for name in kept) for line in lines]
    for which in ("best", "final"):
        read_weights(out / "model", which)
    return sorted(rows), read_record(out / "model")


@pytest.fixture(scope="module")
def undisturbed(program: Runner, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    """Return the outcome of a run without a signal."""
    found: dict[tuple[int, tuple[str, ...]], tuple[Any, ...]] = {}

    def run(ranks: int, *flags: str) -> tuple[Any, ...]:
        if (ranks, flags) not in found:
            out = tmp_path_factory.mktemp("undisturbed")
            program(ranks, "payload", "train", *RUN, *flags, "--out", str(out))
            found[ranks, flags] = outcome(out)
        return found[ranks, flags]

    return run


class Job:
    """A training that starts again in its folder until it is complete."""

    def __init__(self, program: Runner, out: Path) -> None:
        self.out = out
        self._program = program

    def train(
        self, ranks: int, *flags: str, signalled: Sequence[str] = (), **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Train once. signalled: the signal, the rank that gets it, and when: see
        programs/signalled.py.
        """
        run = (*RUN, *flags, "--resume", "auto", "--out", str(self.out))
        program = ("signalled.py", *signalled) if signalled else ("payload", "train")
        return self._program(ranks, *program, *run, rc=None, **options)

    def saved(self) -> int:
        """Return the last iteration. The model and a checkpoint of this iteration must be there."""
        last = int(records(self.out, "iteration")[-1]["step"])
        files = read_record(self.out / "model").files
        assert files["final"].iteration == last
        for which in files:
            read_weights(self.out / "model", which)
        assert read_manifest(self.out / "checkpoints" / checkpoint_name(last)).iteration == last
        return last


@pytest.fixture
def job(program: Runner, tmp_path: Path) -> Job:
    return Job(program, tmp_path)


@pytest.mark.parametrize(
    ("where", "flags", "saved"),
    [
        pytest.param("1 Loader.held_out 3", "", 4, id="evaluation"),
        pytest.param("2 Loader.held_out 3", "--zero 1", 4, id="evaluation-on-one-of-two"),
        pytest.param("2 Loader.held_out 3", "--pp 2", 4, id="evaluation-in-a-pipeline"),
        pytest.param("1 Trainer.evaluate 3", "", 12, id="last-evaluation"),
        pytest.param("2 ModelWriter.write 1", "", 4, id="export"),
        pytest.param("2 ModelWriter.evaluated 1", "", 5, id="best-weights"),
        pytest.param("2 Saver._begin 1", "", 4, id="checkpoint"),
        pytest.param("1 Images.training_batch 1", "--prefetch 0", 1, id="prefetch"),
    ],
)
def test_signal_at_each_stage_loses_nothing(
    job: Job, undisturbed: Undisturbed, where: str, flags: str, saved: int
) -> None:
    """The model and a checkpoint are there, and the run that resumes ends as if there had been no
    signal.

    where: the number of ranks, of which the last gets the signal, the function, and the number of
        the call.
    """
    ranks, function, number = where.split()
    signalled = ("SIGUSR1", str(int(ranks) - 1), function, number)
    assert job.train(int(ranks), *flags.split(), signalled=signalled).returncode == 75
    assert job.saved() == saved
    assert job.train(int(ranks), *flags.split()).returncode == 0
    assert [record["done"] for record in records(job.out, "run")] == [0, saved]
    assert outcome(job.out) == undisturbed(int(ranks), *flags.split())


@pytest.mark.parametrize(
    "where", [("Loader.held_out", "30"), ("Saver.evaluated", "2")], ids=["in", "after"]
)
def test_kill_in_an_evaluation_loses_nothing(
    job: Job, undisturbed: Undisturbed, where: tuple[str, str]
) -> None:
    """The model and a checkpoint that is due are complete before the evaluation begins.

    A kill after the evaluation comes before the checkpoint records it: the next run repeats it.
    """
    due = ("--save-interval", "4")
    assert job.train(0, *due, signalled=("SIGKILL", "0", *where), launched=True).returncode
    assert job.saved() == 8
    assert job.train(0, *due).returncode == 0
    assert [record["done"] for record in records(job.out, "run")] == [0, 8]
    assert outcome(job.out) == undisturbed(0)


def test_signal_in_a_repeated_evaluation_loses_nothing(
    job: Job, undisturbed: Undisturbed, mpirun: Runner
) -> None:
    """The last run is the command that the runs print."""
    for _ in range(2):
        stopped = job.train(2, signalled=("SIGTERM", "0", "Loader.held_out", "2"))
        assert (stopped.returncode, job.saved()) == (75, 4)
    (command,) = re.findall("continue with: python -m payload (.*)", stopped.stdout)
    mpirun(2, *shlex.split(command))
    assert outcome(job.out) == undisturbed(2)


ADA = {"SLURM_JOB_ID": "7", "CLUSTERCTL_SUBMITTED_WITH": "--cluster=c --time 1h --note 'a b'"}


@pytest.mark.parametrize(
    ("words", "env", "command"),
    [
        ("--lr 1 --resume auto", {}, "python -m payload train --lr 1 --resume auto"),
        (
            "--resume=a/b --lr 1",
            {"SLURM_JOB_ID": "7"},
            "python -m payload train --lr 1 --resume auto",
        ),
        ("--resume x --lr 1", ADA, "{submit} --from-run c/7 -- --lr 1"),
        (
            "",
            ADA | {"SLURM_ARRAY_JOB_ID": "5", "SLURM_ARRAY_TASK_ID": "2"},
            "{submit} --from-run c/5_2 --",
        ),
        (
            "",
            {"CLUSTERCTL_SUBMITTED_WITH": "--cluster=d", "CLUSTERCTL_JOB_ID": "m3"},
            "clusterctl submit train --cluster=d --from-run d/m3 --",
        ),
    ],
)
def test_stopped_run_names_the_command_that_continues_it(
    words: str, env: dict[str, str], command: str
) -> None:
    command_line = command.format(
        submit="clusterctl submit train --cluster=c --time 1h --note 'a b'"
    )
    assert command_to_resume(["train", *words.split()], env) == command_line


def test_stopped_run_names_the_variables_without_a_value() -> None:
    with_values = "--env=NOTE --time 1h '--slurm=--export=KEY' --env=A_B"
    assert variables_to_set({"CLUSTERCTL_SUBMITTED_WITH": with_values}) == ["NOTE", "A_B"]
    assert variables_to_set(ADA) == variables_to_set({}) == []


def test_auto_without_a_checkpoint_says_so_before_training(alone: Runner, tmp_path: Path) -> None:
    out = ("--iterations", "1", "--save-interval", "1", "--out", str(tmp_path))
    command_line = [alone("train", *out, "--resume", "auto").stdout for _ in range(2)]
    note = f"--resume auto: no checkpoint in {tmp_path}/checkpoints, so training starts from zero\n"
    assert [text.find(note) in range(text.find("epoch")) for text in command_line] == [True, False]


def test_evaluation_that_ended_is_not_repeated(job: Job) -> None:
    assert job.train(0, "--iterations", "4", "--save-interval", "4").returncode == 0
    manifest = read_manifest(job.out / "checkpoints" / checkpoint_name(4))
    assert (manifest.evaluated, manifest.model["files"]["best"]["iteration"]) == (True, 4)


def test_complete_run_that_resumes_keeps_its_evaluation(job: Job) -> None:
    flags = ("--iterations", "4", "--save-interval", "4")
    assert job.train(0, *flags).returncode == 0
    before = read_record(job.out / "model")
    assert job.train(0, *flags).returncode == 0
    assert read_record(job.out / "model") == before


def test_evaluations_use_the_set_number_of_samples(job: Job) -> None:
    """Of 359 samples, 5 spread over all: an accuracy in fifths."""
    assert job.train(0, "--eval-samples", "5", "--eval-interval", "5").returncode == 0
    evaluations = records(job.out, "evaluation")
    assert [line["step"] for line in evaluations] == [5, 10, 12]
    assert all((line["accuracy"] * 5).is_integer() for line in evaluations)


def test_resume_with_other_evaluation_samples_is_refused(job: Job) -> None:
    """The best weights are those of the lowest loss, which must be of the same samples."""
    flags = ("--iterations", "4", "--save-interval", "4")
    assert job.train(0, *flags).returncode == 0
    for more in ("--eval-samples=5", "--eval-samples=6"):
        assert_one_error(job.train(0, *flags, more).stderr, "checkpoint-other-settings", more[-1])
    assert job.train(0, *flags, "--eval-samples=359").returncode == 0
    # Earlier versions did not record them.
    path = job.out / "checkpoints" / checkpoint_name(4) / "manifest.json"
    text = re.sub(r'"crc32": "\w{8}"', '"crc32": "00000000"', path.read_text(), count=1)
    text = re.sub(r',\s*"eval-samples": 359', "", text)
    path.write_text(text.replace('"00000000"', f'"{zlib.crc32(text.encode()):08x}"'))
    assert job.train(0, *flags, "--eval-samples=5").returncode == 0


def test_signal_in_another_runs_evaluation_leaves_a_checkpoint(
    undisturbed: Undisturbed, program: Runner, tmp_path: Path
) -> None:
    """The checkpoint is in the run's own folder, from which the command continues that the run
    prints.
    """
    other = Job(program, tmp_path / "other")
    evaluating = ("SIGTERM", "0", "Loader.held_out", "2")
    assert other.train(0, signalled=evaluating).returncode == 75
    resumed = ("--resume", str(other.out / "checkpoints" / checkpoint_name(4)))
    job = Job(program, tmp_path / "own")
    run = (*RUN, *resumed, "--out", str(job.out))
    stopped = program(0, "signalled.py", *evaluating, *run, rc=75)
    saved = job.out / "checkpoints" / checkpoint_name(4)
    assert not read_manifest(saved).evaluated
    (command,) = re.findall("continue with: python -m payload (.*)", stopped.stdout)
    program(0, "payload", *shlex.split(command))
    rows, model = undisturbed(0)
    later = [
        row for row in rows if row[:2] not in {("iteration", str(step)) for step in range(1, 5)}
    ]
    assert outcome(job.out) == (later, model)


def test_evaluation_covers_each_sample_of_a_short_text(alone: Runner, tmp_path: Path) -> None:
    """A sample of two tokens has a masked token, although 15 % of the tokens are masked."""
    model = (
        "--model",
        "bert-tiny",
        "--layers",
        "1",
        "--heads",
        "1",
        "--width",
        "8",
        "--iterations",
        "1",
    )
    data = ("--data", f"text:{Path(__file__)}", "--sequence-length", "2", "--eval-samples", "1")
    alone("train", *model, *data, "--out", str(tmp_path))
