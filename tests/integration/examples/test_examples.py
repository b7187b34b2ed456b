"""Examples that need nothing of a cluster but variables, run as plain programs."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"


def run(name: str, folder: Path, **variables: str) -> str:
    """Run an example in a folder. Return its output."""
    argv = [sys.executable, str(EXAMPLES / name)]
    return subprocess.run(
        argv,
        cwd=folder,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=True,
    ).stdout


def test_sweep_of_each_task_uses_its_learning_rate(tmp_path: Path) -> None:
    results = []
    for task in range(4):
        run("sweep.py", tmp_path, SLURM_ARRAY_TASK_ID=str(task))
        results.append(json.loads((tmp_path / "result.json").read_text()))
    assert [result["rate"] for result in results] == [0.01, 0.03, 0.1, 0.3]
    assert results[3]["loss"] < results[0]["loss"]


def test_mpi4py_pi_of_a_single_rank_is_pi(tmp_path: Path) -> None:
    assert "3.1415926536 by 1 ranks" in run("mpi4py_pi.py", tmp_path)
