"""The main process of each rank among the processes of nodes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from clusterctl.providers.local.processes import Process, ranks

OF_JOB = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        processes: list[subprocess.Popen[str]] = []
        yield processes
        for process in processes:
            process.kill()
            stack.enter_context(process)


def start(
    started: list[subprocess.Popen[str]], *words: str, script: str = "echo; sleep 60", **variables: str
) -> Process:
    """Start a shell in this environment, and return it."""
    argv = ["sh", "-c", script, *words]
    process = subprocess.Popen(argv, env={**OF_JOB, **variables}, stdout=subprocess.PIPE, text=True)
    started.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return Process.read(process.pid)


def test_a_rank_is_the_program_and_not_its_children(started: list[subprocess.Popen[str]]) -> None:
    """The child has the same variables."""
    program = start(started, RANK="1", script="sleep 60 & echo $!; wait")
    other = start(started, RANK="0")
    child = subprocess.run(
        ["pgrep", "-P", str(program.pid)], capture_output=True, text=True, check=True
    ).stdout.split()
    running = [Process.read(int(child[0])), program, other]
    assert running[0].variables["RANK"] == "1"
    assert [process.pid for process in ranks("7", running)] == [other.pid, program.pid]


def test_other_jobs_launchers_and_telemetry_are_no_ranks(started: list[subprocess.Popen[str]]) -> None:
    rank = start(started, SLURM_PROCID="0")
    running = [
        start(started, RANK="0", SLURM_JOB_ID="8"),
        start(started, RANK="0", CLUSTERCTL_WATCHER="1"),
        Process(1, "python", (sys.executable, "/x/payload/node/task.py"), {**OF_JOB, "RANK": "0"}),
        Process(2, "srun", ("srun", "x"), {**OF_JOB, "SLURM_PROCID": "0"}),
        rank,
    ]
    assert ranks("7", running) == [rank]
