"""Runs that are killed or stopped, and go on: with the numbers of the run that nobody disturbed."""

from __future__ import annotations

import errno
import functools
import json
import os
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from payload.checkpoint.folder import FolderLock
from payload.errors import UsageError
from tests.integration.payload.conftest import Runner, Starter, children
from tests.support.messages import refused
from tests.support.payload import assert_one_error, records
from tests.support.processes import eventually

Undisturbed = Callable[[str], tuple[Any, ...]]

ITERATIONS = 80
RUN = ("train", "--iterations", str(ITERATIONS), "--save-interval", "5", "--peak-tflops", "1")
_MLP = ("--hidden", "64,32")
_GPT = ("--model", "gpt-tiny", "--layers", "1", "--heads", "2", "--width", "16", "--dropout", "0.1")
_TEXT = ("--data", f"text:{Path(__file__)}", "--sequence-length", "16", "--global-batch-size", "4")
LAYOUTS = {
    "dp": (2, _MLP),
    "zero": (2, (*_MLP, "--zero", "3", "--optimizer", "adamw")),
    "pp": (2, (*_MLP, "--pp", "2")),
    "tp": (2, (*_GPT, *_TEXT, "--tp", "2", "--optimizer", "lamb", "--precision", "bf16")),
}
"""Ranks, and options."""


def steps(folder: Path) -> list[int]:
    """Return the iterations that a run has told of; it may be writing."""
    path = folder / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    records = [json.loads(line) for line in lines if line.endswith("\n")]
    return [record["step"] for record in records if record["kind"] == "iteration"]


def outcome(folder: Path) -> tuple[Any, ...]:
    """What must be the same, disturbed or not."""
    losses = [(record["step"], record["loss"]) for record in records(folder, "iteration")]
    (result,) = records(folder, "result")
    return losses, result["param_hashes"], result["accuracy"], result["loss"]


# A kill is to hit any moment, so the moment must be seen early.
wait_until = functools.partial(eventually, pause_s=0.005)


@pytest.fixture(scope="module")
def undisturbed(mpirun: Runner, tmp_path_factory: pytest.TempPathFactory) -> Undisturbed:
    found: dict[str, tuple[Any, ...]] = {}

    def run(layout: str) -> tuple[Any, ...]:
        if layout not in found:
            out = tmp_path_factory.mktemp(layout)
            ranks, options = LAYOUTS[layout]
            mpirun(ranks, *RUN, *options, "--out", str(out))
            found[layout] = outcome(out)
        return found[layout]

    return run


class Run:
    """A run under mpirun, of which ranks can be found and killed."""

    def __init__(self, launch: Starter, out: Path, layout: str) -> None:
        ranks, options = LAYOUTS[layout]
        self._out = out
        self._size = ranks
        # `timeout`, which has mpirun as its only child
        self._process = launch(
            ranks,
            *("-m", "payload", *RUN, *options, "--resume", "auto", "--out", str(out)),
            # Open MPI leaves the memory that ranks share, by default in /dev/shm, if they are
            # killed.
            OMPI_MCA_btl_vader_backing_directory=str(out.parent),
        )
        wait_until(lambda: self.over or len(self.ranks()) == ranks)

    @property
    def over(self) -> bool:
        return self._process.poll() is not None

    @property
    def saving(self) -> bool:
        return any((self._out / "checkpoints").glob("*.incomplete"))

    def mpirun(self) -> int:
        return children(self._process.pid)[0]

    def ranks(self) -> list[int]:
        return [rank for mpirun in children(self._process.pid) for rank in sorted(children(mpirun))]

    def reach(self, step: int) -> None:
        """Until so many iterations are done."""
        wait_until(lambda: self.over or len(steps(self._out)) >= step)

    def kill(self, rank: int) -> None:
        """With SIGKILL, unless it is through by then. Nothing that this or another rank started
        lives on.
        """
        family = [pid for each in self.ranks() for pid in (each, *children(each))]
        with suppress(IndexError, ProcessLookupError):
            os.kill(self.ranks()[rank], signal.SIGKILL)
        assert self.wait()[0] != 0 or outcome(self._out)  # only what is through ends well
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in family))

    def wait(self) -> tuple[int, str]:
        _, errors = self._process.communicate(timeout=60)
        return self._process.returncode, errors


def test_stopped_and_killed_run_ends_with_the_same_weights(
    launch: Starter, undisturbed: Undisturbed, tmp_path: Path
) -> None:
    """mpirun hands SIGUSR1 on to all ranks. SIGTERM comes to one alone here, and comes again."""
    ends = [0]
    for signals in ([signal.SIGUSR1], [signal.SIGTERM, signal.SIGTERM]):
        run = Run(launch, tmp_path, "zero")
        run.reach(ends[-1] + ITERATIONS // 4)
        with refused("checkpoints-in-use", UsageError):
            FolderLock(tmp_path / "checkpoints", patience_s=0)
        victim = run.mpirun() if signal.SIGUSR1 in signals else run.ranks()[1]
        for number in signals:
            os.kill(victim, number)
        code, errors = run.wait()
        assert (code, "Traceback" in errors, run.saving) == (75, False, False)
        ends.append(steps(tmp_path)[-1])
        assert (tmp_path / "checkpoints" / f"iteration-{ends[-1]:08}").is_dir()
    assert ends == sorted(set(ends))
    run = Run(launch, tmp_path, "zero")
    run.reach(ends[-1] + ITERATIONS // 8)
    run.kill(1)
    code, errors = Run(launch, tmp_path, "zero").wait()
    assert (code, errors) == (0, "")
    assert [record["done"] for record in records(tmp_path, "run")][:3] == ends
    assert outcome(tmp_path) == undisturbed("zero")


def test_resume_in_any_layout_from_any_other(program: Runner, tmp_path: Path) -> None:
    program(4, "elastic.py", str(tmp_path))


def test_folder_that_is_not_shared_is_refused(program: Runner, tmp_path: Path) -> None:
    answer = program(2, "faults.py", "has_its_own_folder", str(tmp_path), rc=2)
    assert_one_error(answer.stderr, "checkpoints-not-shared", str(tmp_path))


def test_file_that_one_rank_cannot_write_fails_all(program: Runner, tmp_path: Path) -> None:
    answer = program(2, "faults.py", "cannot_write", str(tmp_path), rc=1)
    assert_one_error(answer.stderr, "checkpoint-unwritable", "rank 1 on ", os.strerror(errno.EIO))
