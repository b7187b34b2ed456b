"""Benchmarks: both sides do the same work, and check it themselves."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import as_root

pytestmark = pytest.mark.timeout(3000)
BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("benchmark", "parts", "shown"),
    [
        (
            "orchestration.py",
            ("start", "again", "submit", "attached", "files", "fail"),
            (
                "clusterctl --help",
                "up again",
                "failure to the job's end",
                "submit / by hand = ",
                "rsync / collect = ",
                "rsync / put = ",
            ),
        ),
        ("configure.py", (), ("linear / clusterctl linear = ",)),
        (
            "collecting.py",
            ("--jobs", "5", "--log", "0.2", "--files", "1200"),
            ("rsync / collect = ", "peak memory of collect: ", "killed after "),
        ),
        (
            "transfers.py",
            ("--mb", "20", "--files", "500"),
            ("put / rsync = ", "get / rsync = ", "rsync / folder = ", "collect / rsync = "),
        ),
        (
            "packed.py",
            ("--tasks", "10"),
            ("parallel / packed = ", "array / packed = ", "calls of slurmctld, packed: "),
        ),
        (
            "staging.py",
            ("--files", "200", "--gb", "0.2"),
            ("cp / first job = ", "2 x 'copied by an earlier job'", "2 x 'itself'"),
        ),
        (
            "training.py",
            (),
            (
                "PyTorch DDP / payload = ",
                "mpi4py Allreduce / payload = ",
                "waited for / written beside = ",
            ),
        ),
    ],
)
def test_benchmark_round_prints_medians_and_ratios(
    benchmark: str, parts: tuple[str, ...], shown: tuple[str, ...]
) -> None:
    argv = [sys.executable, BENCHMARKS / benchmark, "--rounds", "1", *parts]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=2800, check=False)
    assert done.returncode == 0, done.stderr
    for words in shown:
        assert words in done.stdout


@pytest.mark.sweep  # a dead node: test_nodes.py; the same weights: test_payload.py
def test_trainings_survive_a_campaign_of_faults(tmp_path: Path) -> None:
    results = survived(tmp_path, "campaign", "--seed=14", "--trainings=1", "--faults=20", faults=[])
    assert sum(len(result["faults"]) for result in results) == 20


@pytest.mark.sweep
def test_chain_of_time_limits_completes_the_training(tmp_path: Path) -> None:
    """A training of more than three minutes in limits of two."""
    (result,) = survived(tmp_path, "table", faults=["time limit"])
    assert result["figures"][0]["starts"] > 1


def survived(tmp_path: Path, *words: str, faults: list[str]) -> list[dict[str, Any]]:
    """Return the results of the trainings of faults.py, which must have ended with the right
    weights.
    """
    argv = [
        *as_root(),
        sys.executable,
        BENCHMARKS / "faults.py",
        *words,
        f"--json={tmp_path}/result.json",
    ]
    argv += [f"--only={name}" for name in faults]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=2900, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "result.json").read_text())["results"]
    for result in results:
        assert (result["verdict"], result["compared"], result["residue"]) == ("ok", "same", [])
    return list(results)


@pytest.mark.sweep
def test_benchmark_of_agents_counts_each_side() -> None:
    argv = [sys.executable, BENCHMARKS / "agents.py"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=2800, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("mcp", "shell, tables", "tools", "skill", "sum"):
        assert words in done.stdout
