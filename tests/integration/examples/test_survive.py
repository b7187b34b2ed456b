"""examples/survive.py: a killed training resumes from its checkpoints."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


FORK = """\
import os, runpy, sys
import torch._dynamo, torch.distributed as dist
store = dist.FileStore(sys.argv[1], 2)
for rank in range(2):
    if not os.fork():
        begin = dist.init_process_group
        dist.init_process_group = lambda backend: begin(backend, store=store, rank=rank, world_size=2)
        sys.argv[:] = sys.argv[2:]
        runpy.run_path(sys.argv[0], run_name="__main__")
sys.exit(any([os.wait()[1] for _ in range(2)]))
"""


LAUNCHERS = {
    # A single process imports PyTorch and its optimizers for all ranks: two seconds of CPU time.
    "fork": ["-c", FORK, "store"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"],
}


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


@pytest.mark.parametrize("launcher", ["fork", pytest.param("torchrun", marks=pytest.mark.sweep)])
def test_killed_training_resumes_bit_identical(launcher: str, tmp_path: Path) -> None:
    """After SIGKILL of a rank and a torn checkpoint, the weights equal those of an undisturbed
    training.
    """
    program = EXAMPLES / "torch_ddp.py"
    killed = tmp_path / "killed.py"
    killed.write_text(KILLED.format(program=str(program)))
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES), "OMP_NUM_THREADS": "1"}

    def run(name: str, file: Path) -> int:
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        (folder / "store").unlink(missing_ok=True)
        argv = [
            sys.executable,
            *LAUNCHERS[launcher],
            str(file),
            "--epochs=2",
            "--checkpoint-seconds=0",
        ]
        return subprocess.run(argv, cwd=folder, env=environment, check=False).returncode

    assert run("whole", program) == 0
    assert run("killed", killed) != 0
    checkpoints = sorted((tmp_path / "killed/checkpoints").glob("step-*.pt"))
    assert checkpoints[-1].stem in {"step-00000039", "step-00000040"}
    with checkpoints[-1].open("r+b") as file:
        file.truncate(1000)
    assert run("killed", program) == 0
    expected, weights = (torch.load(tmp_path / name / "model.pt") for name in ("whole", "killed"))
    assert all(torch.equal(expected[name], weights[name]) for name in expected)
