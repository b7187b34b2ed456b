"""The program that runs packed tasks on a node, without Slurm: it reads which tasks to start, and
prints their ends.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.support.processes import ROOT

# Tells more often that it is alive.
WORK = """\
import sys
from payload.node import pack
pack.ALIVE_S = 0.2
sys.exit(pack.work(sys.argv[1:]))
"""
OPTIONS = ("--slots=1", "--count=9", "--min=1", "--max=17", "--cpus=2")


def command_of(pid: str) -> str:
    """Return the command line of a process. "": it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except FileNotFoundError:
        return ""


def start(folder: Path, *program: str) -> subprocess.Popen[str]:
    """Start it as rank 1 of job 12, in the folder of the job."""
    (folder / "files").mkdir()
    argv = [sys.executable, "-c", WORK, *OPTIONS, f"--files={folder / 'files'}", *program]
    slurm = {"SLURM_PROCID": "1", "SLURM_JOB_ID": "12", "SLURM_STEP_ID": "1", "SLURM_NTASKS": "2"}
    pipe = subprocess.PIPE
    return subprocess.Popen(
        argv,
        cwd=folder,
        stdin=pipe,
        stdout=pipe,
        text=True,
        bufsize=1,
        env={**os.environ, **slurm, "PYTHONPATH": str(ROOT)},
        # A task that kills its caller's group must not kill this process.
        start_new_session=True,
    )


def test_node_tells_that_it_is_alive_while_others_get_tasks(tmp_path: Path) -> None:
    node = start(tmp_path, "true")
    assert node.stdin is not None
    assert node.stdout is not None
    assert node.stdout.readline().startswith("on ")
    # A line for rank 0 each 0.05 s, for at most 30 s.
    feeder = subprocess.Popen(
        ["sh", "-c", "for i in $(seq 600); do echo 0 $i 0; sleep 0.05; done"], stdout=node.stdin
    )
    try:
        assert node.stdout.readline() == "alive\n"
        assert feeder.poll() is None
    finally:
        feeder.kill()
        feeder.wait()
        node.communicate()


def test_task_has_the_variables_of_a_task_of_an_array(tmp_path: Path) -> None:
    script = 'env; pwd; echo "$1" >&2; echo again >/dev/stderr'
    node = start(tmp_path, "sh", "-c", script, "sh", "two words")
    printed, _ = node.communicate("1 3 0\n0 5 0\n")
    (end,) = (line.split() for line in printed.splitlines() if line.startswith("end"))
    assert end[:3] == ["end", "3", "0"]
    lines = (tmp_path / "task-3" / "stdout.log").read_text().splitlines()
    found = dict(line.partition("=")[::2] for line in lines)
    asked = (
        "JOB_ID ARRAY_JOB_ID ARRAY_TASK_ID ARRAY_TASK_COUNT ARRAY_TASK_MIN ARRAY_TASK_MAX".split()
    )
    assert [found[f"SLURM_{name}"] for name in asked] == ["12", "12", "3", "9", "1", "17"]
    assert (found["SLURM_NTASKS"], found["SLURM_PROCID"], found["SLURM_CPUS_PER_TASK"]) == (
        "1",
        "0",
        "2",
    )
    assert "SLURM_STEP_ID" not in found
    assert lines[-1] == str(tmp_path / "files" / "task-3")
    assert (tmp_path / "task-3" / "stderr.log").read_text() == "two words\nagain\n"
    assert not (tmp_path / "task-5").exists()


def test_end_of_a_task_has_its_exit_code_or_its_signal(tmp_path: Path) -> None:
    node = start(
        tmp_path, "sh", "-c", "case $SLURM_ARRAY_TASK_ID in 1) exit 3;; 2) kill -9 $$;; esac"
    )
    printed, _ = node.communicate("1 1 0\n1 2 0\n1 4 0\n")
    ends = {tuple(line.split()[1:3]) for line in printed.splitlines() if line.startswith("end")}
    assert ends == {("1", "3"), ("2", "-9"), ("4", "0")}
    # Empty logs are removed.
    assert [path.name for path in (tmp_path / "task-1").iterdir()] == []
    node = start_missing(tmp_path / "again")
    assert node.split()[:3] == ["end", "1", "127"]


def test_task_kills_only_its_own_process_group(tmp_path: Path) -> None:
    """Scripts end with `kill 0`, to take their children with them. What they leave is killed."""
    script = (
        'case $SLURM_ARRAY_TASK_ID in 1) (trap "" TERM; sleep 60) & kill -9 0;; '
        "2) sleep 60 & echo $! >left;; esac"
    )
    node = start(tmp_path, "sh", "-c", script)
    printed, _ = node.communicate("1 1 0\n1 2 0\n1 3 0\n")
    ends = {tuple(line.split()[1:3]) for line in printed.splitlines() if line.startswith("end")}
    assert ends == {("1", "-9"), ("2", "0"), ("3", "0")}
    left = (tmp_path / "files/task-2/left").read_text().strip()
    while "sleep" in command_of(left):
        time.sleep(0.01)


def test_end_of_the_job_cuts_tasks(tmp_path: Path) -> None:
    node = start(tmp_path, "sh", "-c", "[ $SLURM_ARRAY_TASK_ID = 1 ] || exec sleep 60")
    assert node.stdin is not None
    assert node.stdout is not None
    assert node.stdout.readline().startswith("on ")
    node.stdin.write("1 1 0\n")
    assert next(line for line in node.stdout if line != "alive\n").split()[:3] == ["end", "1", "0"]
    node.stdin.write("1 2 0\n")
    while not (tmp_path / "task-2" / "stdout.log").exists():
        time.sleep(0.01)
    node.send_signal(signal.SIGTERM)
    printed, _ = node.communicate()
    (cut,) = (line.split() for line in printed.splitlines() if line != "alive")
    assert cut[:3] == ["cut", "2", "-15"]


def start_missing(folder: Path) -> str:
    folder.mkdir()
    node = start(folder, "/no/such/program")
    printed, _ = node.communicate("1 1 0\n")
    return next(line for line in printed.splitlines() if line.startswith("end"))
