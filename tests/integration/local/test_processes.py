"""The main process of each rank among the processes of nodes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.providers.local import processes
from clusterctl.providers.local.processes import NodeProcess, ranks

OF_JOB = {"SLURM_JOB_ID": "7"}
# A program prints a line when its child runs. Until a process has started, its variables are
# unknown.
PROGRAM = f"""{sys.executable} -c '
import subprocess
subprocess.run(["sh", "-c", "echo; sleep 60; true"])'"""


@pytest.fixture
def started() -> Iterator[list[subprocess.Popen[str]]]:
    with ExitStack() as stack:
        shells: list[subprocess.Popen[str]] = []
        yield shells
        for process in shells:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            stack.enter_context(process)


def start(
    started: list[subprocess.Popen[str]],
    *words: str,
    script: str = "echo; sleep 60; true",
    **variables: str,
) -> NodeProcess:
    """Start a shell in this environment, and return it after its first line of output."""
    argv = ["sh", "-c", script, *words]
    process = subprocess.Popen(
        argv, env={**OF_JOB, **variables}, stdout=subprocess.PIPE, text=True, start_new_session=True
    )
    started.append(process)
    assert process.stdout is not None
    process.stdout.readline()
    return NodeProcess.read(process.pid)


def children(process: NodeProcess) -> list[NodeProcess]:
    shown = subprocess.run(
        ["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True
    )
    return [NodeProcess.read(int(pid)) for pid in shown.stdout.split()]


def test_ranks_has_the_program_without_its_children(started: list[subprocess.Popen[str]]) -> None:
    """Child processes have the same variables."""
    program = start(started, RANK="1", script=f"exec {PROGRAM}")
    other = start(started, RANK="0")
    (child,) = children(program)
    assert child.variables["RANK"] == "1"
    assert [process.pid for process in ranks("7", [child, program, other])] == [
        other.pid,
        program.pid,
    ]


def test_ranks_with_a_lower_pid_of_a_younger_process_finds_the_older(
    started: list[subprocess.Popen[str]],
) -> None:
    """The kernel's pids begin again after the highest."""
    program = start(started, RANK="0")
    younger = replace(program, pid=program.pid - 1, started=program.started + 1)
    assert ranks("7", [younger, program]) == [program]


BATCH = (
    NodeProcess(
        1,
        "slurm_script",
        ("/bin/bash", "/x/job00007/slurm_script"),
        {**OF_JOB, "SLURM_PROCID": "0"},
    ),
    NodeProcess(
        2,
        "python",
        ("python", "-IS", "/x/payload/node/job.py", "run"),
        {**OF_JOB, "SLURM_PROCID": "0"},
    ),
)


def test_program_that_no_launcher_started_is_a_rank(started: list[subprocess.Popen[str]]) -> None:
    assert not ranks("7", BATCH)
    program = start(started, SLURM_PROCID="0", script=f"exec {PROGRAM}")
    assert ranks("7", [*BATCH, *children(program), program]) == [program]


def test_shell_that_waits_for_the_program_is_no_rank(
    started: list[subprocess.Popen[str]],
) -> None:
    shell = start(started, SLURM_PROCID="0", script=f"{PROGRAM}; true")
    (program,) = children(shell)
    assert ranks("7", [*BATCH, *children(program), program, shell]) == [program]


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_RANK": "0", "SLURM_PROCID": "0"},
        {"SLURM_STEP_ID": "0", "SLURM_PROCID": "0"},
        {"RANK": "0", "SLURM_PROCID": "0"},
    ],
    ids=["mpirun", "srun", "torchrun"],
)
def test_script_that_calls_a_launcher_is_no_rank(
    started: list[subprocess.Popen[str]], variables: dict[str, str]
) -> None:
    script = start(started, SLURM_PROCID="0")
    rank = start(started, **variables)
    assert ranks("7", [*BATCH, script, rank]) == [rank]


def test_ranks_of_mpirun_on_the_first_node_are_found(started: list[subprocess.Popen[str]]) -> None:
    """On the other nodes, srun started the daemon of mpirun."""
    first = start(started, RANK="0", SLURM_PROCID="0")
    second = start(started, RANK="1", SLURM_PROCID="0", SLURM_STEP_ID="1")
    assert [process.pid for process in ranks("7", [*BATCH, first, second])] == [
        first.pid,
        second.pid,
    ]


def test_ranks_leaves_out_other_jobs_launchers_and_telemetry(
    started: list[subprocess.Popen[str]],
) -> None:
    rank = start(started, SLURM_PROCID="0", SLURM_STEP_ID="0")
    running = [
        start(started, RANK="0", SLURM_JOB_ID="8"),
        start(started, RANK="0", CLUSTERCTL_WATCHER="1"),
        NodeProcess(
            1, "python", (sys.executable, "/x/payload/node/task.py"), {**OF_JOB, "RANK": "0"}
        ),
        NodeProcess(2, "srun", ("srun", "x"), {**OF_JOB, "SLURM_PROCID": "0"}),
        rank,
    ]
    assert ranks("7", running) == [rank]


@pytest.mark.parametrize(("last", "expected"), [(True, ["n-2"]), (False, ["n-1", "n-2"])])
def test_signal_ranks_reaches_the_last_rank_or_all(
    started: list[subprocess.Popen[str]],
    monkeypatch: pytest.MonkeyPatch,
    last: bool,
    expected: list[str],
) -> None:
    running = [replace(start(started, RANK=str(rank)), machine=f"m{rank}") for rank in (0, 1)]
    monkeypatch.setattr(processes, "processes", lambda _: running)
    monkeypatch.setattr(processes, "_hosts", lambda _: {"m0": "n-1", "m1": "n-2"})
    request = {"id": "abcdef", "job": "7", "number": signal.SIGKILL, "last": last}
    assert processes.signal_ranks(request) == {"hosts": expected}
    assert started[1].wait(30) == -signal.SIGKILL
    if last:
        assert started[0].poll() is None
    else:
        assert started[0].wait(30) == -signal.SIGKILL


# A node that has lost its shared folder: a process that is the first of its namespace.
LOST = """
import os, subprocess, sys
from pathlib import Path
from clusterctl.providers.local.processes import mount_again
folder, target = map(Path, sys.argv[1:])
node = subprocess.Popen(
    ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-c", "echo; exec sleep 60"],
    stdout=subprocess.PIPE,
)
node.stdout.readline()
pid = int(Path(f"/proc/{node.pid}/task/{node.pid}/children").read_text())
print([mount_again([node.pid, pid], folder, str(target)) for _ in range(2)])
print(os.listdir(f"/proc/{pid}/root{target}"), os.listdir(target))
node.kill()
"""


def test_lost_folder_is_mounted_again_in_the_running_node_alone(tmp_path: Path) -> None:
    folder, target = tmp_path / "shared", tmp_path / "target"
    for place in (folder, target):
        place.mkdir()
    (folder / "home").touch()
    argv = ["unshare", "--user", "--map-root-user", "--mount", sys.executable, "-c", LOST]
    done = subprocess.run(
        [*argv, folder, target], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.stdout.splitlines() == ["[True, False]", "['home'] []"], done.stderr
