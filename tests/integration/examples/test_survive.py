"""examples/survive.py: a killed training resumes from its checkpoints."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.support.manual import blocks

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


# Runs that stdin names, one after the other. PyTorch and its optimizers are imported once for all of
# them, which takes two seconds of CPU time.
FORK = """\
import os, runpy, shlex, sys
import torch._dynamo, torch.distributed as dist
begin = dist.init_process_group
for line in sys.stdin:
    folder, *argv = shlex.split(line)
    for rank in range(2):
        if not os.fork():
            os.dup2(2, 1)
            os.chdir(folder)
            store = dist.FileStore("store", 2)
            dist.init_process_group = lambda backend: begin(backend, store=store, rank=rank, world_size=2)
            sys.argv[:] = argv
            runpy.run_path(argv[0], run_name="__main__")
            sys.exit()
    print(any([os.wait()[1] for _ in range(2)]), flush=True)
"""
FLAGS = ("--epochs=2", "--checkpoint-seconds=0")
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"}
Run = Callable[[Path, Path], bool]


@pytest.fixture
def fork() -> Iterator[Run]:
    """Run a program in a folder with two ranks. Return whether it succeeds."""
    argv = [sys.executable, "-c", FORK]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, env=ENVIRONMENT, stdin=pipe, stdout=pipe, text=True) as process:

        def run(folder: Path, program: Path) -> bool:
            assert process.stdin is not None
            assert process.stdout is not None
            (folder / "store").unlink(missing_ok=True)
            process.stdin.write(f"{shlex.join([str(folder), str(program), *FLAGS])}\n")
            process.stdin.flush()
            return process.stdout.readline() == "False\n"

        yield run


KILLED = """\
import os, runpy, signal, survive
import torch.distributed as dist
end_step = survive.Training.end_step
def end_step_and_die(self):
    end_step(self)
    if self.step == 40 and dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
survive.Training.end_step = end_step_and_die
runpy.run_path({program!r}, run_name="__main__")
"""


def test_killed_training_resumes_bit_identical(fork: Run, tmp_path: Path) -> None:
    """After SIGKILL of a rank and a torn checkpoint, the weights equal those of an undisturbed
    training.
    """
    program = EXAMPLES / "torch_ddp.py"
    dies = tmp_path / "dies.py"
    dies.write_text(KILLED.format(program=str(program)))
    (whole := tmp_path / "whole").mkdir()
    (killed := tmp_path / "killed").mkdir()
    assert fork(whole, program)
    assert not fork(killed, dies)
    checkpoints = sorted((killed / "checkpoints").glob("step-*.pt"))
    assert checkpoints[-1].stem in {"step-00000039", "step-00000040"}
    with checkpoints[-1].open("r+b") as file:
        file.truncate(1000)
    assert fork(killed, program)
    expected, weights = (torch.load(folder / "model.pt") for folder in (whole, killed))
    assert all(torch.equal(expected[name], weights[name]) for name in expected)


@pytest.mark.parametrize(
    ("status", "restarts", "state", "requeued"),
    [
        (75, "", "RUNNING", True),
        (0, "", "RUNNING", False),
        (75, "20", "RUNNING", False),
        (143, "", "COMPLETING", False),  # after scancel
    ],
)
def test_script_for_another_slurm_requeues_a_failed_attempt(
    tmp_path: Path, status: int, restarts: str, state: str, requeued: bool
) -> None:
    """The script of docs/restarts.md, with commands of Slurm that are played."""
    (script,) = (
        block.text
        for block in blocks(EXAMPLES.parent / "docs" / "restarts.md")
        if block.file == "survive.sbatch"
    )
    commands = {
        "srun": f'echo "$MASTER_ADDR $MASTER_PORT" >ranks; exit {status}',
        "scontrol": '[ "$1" = show ] && printf "n1\\nn2\\n" || echo "$*" >requeued',
        "squeue": f"echo {state}",
    }
    for name, body in commands.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / name).chmod(0o755)
    environment = {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "n[1-2]",
        "SLURM_RESTART_COUNT": restarts,
    }
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, check=False)
    assert done.returncode == status
    assert (tmp_path / "ranks").read_text() == "n1 29500\n"
    assert (tmp_path / "requeued").exists() == requeued
