"""`logs --stacks` shows where the ranks of a job are that really runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from clusterctl.errors import SchedulerError, UsageError
from clusterctl.jobs.stacks import stacks_of
from clusterctl.jobs.watch import folder_of
from clusterctl.scheduler.session import Session
from clusterctl.util.assets import data_folder
from tests.support.messages import refused
from tests.support.played.cluster import PlayedCluster, finished, submitted
from tests.support.processes import eventually


def test_job_without_ranks_is_a_single_rank(
    session: Session, cluster: PlayedCluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ranks are found by the job's id, which another test that runs now must not have.
    with cluster.state() as state:
        state["next"] = os.getpid()
    job_id = submitted(session, tmp_path, "touch ../ready; sleep 1000")
    folder = Path(folder_of(session, job_id))
    eventually((folder / "ready").exists)
    (folder / "job.sbatch").write_text(
        f"python={sys.executable}\npayload={data_folder('payload').parent}\n"
    )
    monkeypatch.setenv("SLURM_JOB_ID", job_id)
    job_stacks = stacks_of(session, job_id)
    assert [(rank["rank"], rank["state"]) for rank in job_stacks.ranks] == [(0, "running")]
    assert [group.startswith("rank 0 on ") for group in job_stacks.groups] == [True]
    assert "sleep 1000" in "".join(job_stacks.ranks[0]["stack"])
    # This Python has no py-spy.
    assert "py-spy" in job_stacks.ranks[0]["unread"]
    assert "sleep 1000" in (folder / "rank-logs" / "0.stack").read_text()


def test_job_that_has_ended_has_no_stacks(
    session: Session, cluster: PlayedCluster, tmp_path: Path
) -> None:
    job_id = finished(session, cluster, tmp_path, "true")
    with refused("not-running/job", UsageError):
        stacks_of(session, job_id)


def test_job_without_the_program_is_an_error(session: Session, tmp_path: Path) -> None:
    job_id = submitted(session, tmp_path, "touch ../ready; sleep 1000")
    folder = Path(folder_of(session, job_id))
    eventually((folder / "ready").exists)
    (folder / "job.sbatch").write_text("")
    with refused("tool-failed/stacks", SchedulerError):
        stacks_of(session, job_id)
