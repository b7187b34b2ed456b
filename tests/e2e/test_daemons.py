"""Slurm's daemons are killed under 50 queued jobs: each job runs once, and `up` starts dead
daemons.
"""

from __future__ import annotations

import collections
import time
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.processes import eventually

# Minutes.
pytestmark = pytest.mark.sweep

UNITS = ("slurmctld", "slurmdbd", "mariadb", "munge")
JOBS = 50
KILLS = 10
PATIENCE_S = 300.0
# slurmctld saves its jobs so often, and a second more.
SAVED_S = 6.0


def kill_daemon(cluster: Cluster, unit: str) -> None:
    """Kill the processes of a unit, munge on all hosts."""
    nodes = [f"{cluster.name}-train-1", f"{cluster.name}-train-2"] if unit == "munge" else []
    for host in [f"{cluster.name}-ctl", *nodes]:
        cluster.ssh(host, f"sudo systemctl kill --signal=KILL {unit}")


def jobs_that_ran(cluster: Cluster, folder: str) -> list[str]:
    """Return a line for each job that has run."""
    return cluster.ssh(
        f"{cluster.name}-ctl", f"cat {folder}/files/ran 2>/dev/null", user=cluster.user, rc=None
    ).split()


def await_daemons(cluster: Cluster) -> None:
    look = f"systemctl is-active {' '.join(UNITS)}"
    eventually(
        lambda: cluster.ssh(f"{cluster.name}-ctl", look, rc=None).split() == ["active"] * len(UNITS)
    )


@pytest.mark.parametrize("units", [UNITS[:1], UNITS[1:]], ids="+".join)
def test_killed_daemons_each_queued_job_runs_once(
    cluster: Cluster, tmp_path: Path, units: tuple[str, ...]
) -> None:
    """Each daemon is killed ten times, in turn, each time after another job has run.

    slurmctld forgets its last seconds, so that Slurm starts some jobs again. job.py does not run
    those again that have completed.
    """
    script = tmp_path / "once.sh"
    script.write_text('sleep 2; srun --mpi=none bash -c "echo $SLURM_ARRAY_TASK_ID >> ../ran"\n')
    job = cluster.json("submit", script, "--requeue", "--array", f"0-{JOBS - 1}")
    # slurmctld may forget a job that was submitted in its last seconds.
    time.sleep(SAVED_S)
    for number in range(KILLS * len(units)):
        eventually(
            lambda least=number: len(jobs_that_ran(cluster, job["dir"])) >= least,
            PATIENCE_S,
            pause_s=0.5,
        )  # type: ignore[misc]
        await_daemons(cluster)
        kill_daemon(cluster, units[number % len(units)])
    await_daemons(cluster)
    cluster("logs", job["job_id"], "--follow", timeout_s=600)
    look = f"sacct -nPX -j {job['job_id']} -o State,ExitCode"
    expected = ["COMPLETED|0:0"] * JOBS
    eventually(
        lambda: cluster.ssh(f"{cluster.name}-ctl", look, rc=None).split() == expected, PATIENCE_S
    )
    assert collections.Counter(jobs_that_ran(cluster, job["dir"])) == {
        str(number): 1 for number in range(JOBS)
    }


@pytest.mark.parametrize("unit", UNITS)
def test_up_starts_a_daemon_that_stays_dead(cluster: Cluster, unit: str) -> None:
    """systemd gives up on munge after too many deaths. It restarts the other daemons for ever."""
    command, dead = ("kill --signal=KILL", "failed") if unit == "munge" else ("stop", "inactive")

    def is_dead() -> bool:
        cluster.ssh(f"{cluster.name}-ctl", f"sudo systemctl {command} {unit}", rc=None)
        return (
            cluster.ssh(f"{cluster.name}-ctl", f"systemctl is-active {unit}", rc=None).strip()
            == dead
        )

    eventually(is_dead)
    cluster("up")
    await_daemons(cluster)
    assert cluster.json("submit", "probe", "--nodes", "2", "--wait")["state"] == "COMPLETED"
