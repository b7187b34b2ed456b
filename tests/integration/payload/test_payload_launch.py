"""Ranks that do not find each other, and ranks that die."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from payload.__main__ import main
from payload.commands import telemetry
from payload.node.host import launcher_rank, pmi_complaint, size_complaint
from tests.integration.payload.conftest import Runner


@pytest.mark.parametrize(
    ("world_size", "environ"),
    [
        (1, {}),
        (4, {"SLURM_NTASKS": "4"}),
        (2, {"SLURM_NTASKS": "4", "SLURM_STEP_NUM_TASKS": "2"}),
        (8, {"OMPI_COMM_WORLD_SIZE": "8", "SLURM_NTASKS": "8"}),
        # on a remote node under mpirun, the step is that of mpirun's daemons
        (8, {"OMPI_COMM_WORLD_SIZE": "8", "SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "1"}),
    ],
)
def test_launchers_that_agree_with_mpi(world_size: int, environ: dict[str, str]) -> None:
    assert size_complaint(world_size, environ) is None


@pytest.mark.parametrize(
    ("world_size", "environ", "named"),
    [
        (1, {"SLURM_NTASKS": "2"}, "SLURM_NTASKS=2"),
        (1, {"SLURM_NTASKS": "1", "SLURM_STEP_NUM_TASKS": "2"}, "SLURM_STEP_NUM_TASKS=2"),
        (1, {"OMPI_COMM_WORLD_SIZE": "2"}, "OMPI_COMM_WORLD_SIZE=2"),
        (2, {"OMPI_COMM_WORLD_SIZE": "2", "SLURM_NTASKS": "4"}, "SLURM_NTASKS=4"),
    ],
)
def test_launchers_that_disagree(world_size: int, environ: dict[str, str], named: str) -> None:
    complaint = size_complaint(world_size, environ)
    assert complaint is not None
    assert named in complaint
    assert f"size {world_size}" in complaint


def test_rank_of_open_mpi_takes_precedence_over_slurms() -> None:
    assert launcher_rank({}) is None
    assert launcher_rank({"SLURM_PROCID": "3"}) == 3
    assert launcher_rank({"SLURM_PROCID": "0", "OMPI_COMM_WORLD_RANK": "5"}) == 5


def test_world_of_one_rank_in_a_job_of_two_is_refused(alone: Runner) -> None:
    answer = alone("train", SLURM_NTASKS="2", SLURM_PROCID="1", rc=3)
    assert answer.stdout == ""
    assert "SLURM_NTASKS=2" in answer.stderr
    assert "srun --mpi=pmix" in answer.stderr
    assert len(answer.stderr.splitlines()) == 1


def test_srun_without_pmix_is_refused_before_mpi_starts(alone: Runner) -> None:
    srun = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": "0",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_NODELIST": "a",
    }
    first = alone("probe", **srun, SLURM_PROCID="0", rc=3)
    assert "srun --mpi=pmix" in first.stderr
    assert len(first.stderr.splitlines()) == 1
    assert alone("probe", **srun, SLURM_PROCID="1", rc=3).stderr == ""


def test_pmi_is_needed_by_open_mpi_under_srun_only() -> None:
    assert pmi_complaint("Open MPI v4.1.4", {"SLURM_STEP_ID": "0"}) is not None
    assert pmi_complaint("Open MPI v4.1.4", {"SLURM_STEP_ID": "0", "PMIX_RANK": "0"}) is None
    assert (
        pmi_complaint("Open MPI v5.0.7", {"SLURM_STEP_ID": "0", "PMIX_NAMESPACE": "none"})
        is not None
    )
    assert pmi_complaint("Open MPI v4.1.4", {"SLURM_JOB_ID": "1"}) is None
    assert pmi_complaint("MPICH Version: 4.2", {"SLURM_STEP_ID": "0"}) is None


def test_wrong_world_size_under_mpirun_is_reported_once(mpirun: Runner) -> None:
    answer = mpirun(2, "probe", SLURM_NTASKS="4", rc=3)
    assert answer.stderr.count("payload: error:") == 1


def test_exception_on_one_rank_ends_them_all(program: Runner) -> None:
    answer = program(2, "faults.py", "breaks", "1", launched=True, rc=1)
    assert "rank 1 on " in answer.stderr
    assert "ZeroDivisionError: " in answer.stderr
    assert "Traceback" in answer.stderr


@pytest.mark.parametrize(
    "line",
    [
        "gemm --sizes 99999999",
        "train --hidden 99999999999999999999 --iterations 1",
    ],
)
def test_memory_that_runs_out_is_one_line_and_ends_all_ranks(
    mpirun: Runner, tmp_path: Path, line: str
) -> None:
    answer = mpirun(
        2, *line.split(), "--device", "cpu", "--out", str(tmp_path), launched=True, rc=1
    )
    assert "Traceback" not in answer.stderr
    error_lines = [
        text for text in answer.stderr.splitlines() if text.startswith("payload: error: rank ")
    ]
    assert 1 <= len(error_lines) <= 2  # on both ranks, if neither was ended before
    assert all("--micro-batch-size" in text for text in error_lines)


def test_memory_that_runs_out_without_mpi_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def exhausted(_: object) -> int:
        raise MemoryError

    # Tests before this one may have loaded MPI.
    monkeypatch.setattr(sys, "excepthook", sys.__excepthook__)
    monkeypatch.setattr(telemetry, "run", exhausted)
    assert main(["telemetry", "--out", str(tmp_path)]) == 1
    (error_lines,) = capsys.readouterr().err.splitlines()
    assert error_lines.startswith("payload: error: out of memory: ")


def test_freed_memory_is_used_again_without_page_faults(program: Runner) -> None:
    program(1, "freed.py", launched=True)
