"""A submit makes at most one job, whatever fails or is killed meanwhile.

The number of jobs is read from Slurm itself: each job has the token of its submission as a comment.
"""

from __future__ import annotations

import collections
import json
import os
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.faults import Victim
from tests.support.cluster import Cluster
from tests.support.processes import eventually

PATIENCE_S = 90.0


def controller(cluster: Cluster, command: str) -> str:
    return cluster.ssh(f"{cluster.name}-ctl", command)


def jobs_by_token(cluster: Cluster, name: str) -> collections.Counter[str]:
    """Return the number of jobs of this name by comment, in slurmctld's memory and in the
    accounting.
    """
    ask = (
        f"squeue --noheader --states=all --name={name} --Format=JobID:20,Comment:60; "
        f"sacct -aXnP -o JobID,Comment --name={name} -S now-1hour"
    )
    lines = (line.replace("|", " ").split() for line in controller(cluster, ask).splitlines())
    pairs = {(words[0], words[1]) for words in lines if len(words) > 1}
    return collections.Counter(comment for _, comment in pairs)


@contextmanager
def silent_slurmctld(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """Stop slurmctld, so that requests wait in its socket. Yield a function that continues it."""
    controller(cluster, "sudo systemctl kill --signal=STOP slurmctld")

    def go_on() -> None:
        controller(cluster, "sudo systemctl kill --signal=CONT slurmctld")

    try:
        yield go_on
    finally:
        go_on()


def until_sbatch_waits(cluster: Cluster) -> None:
    eventually(lambda: controller(cluster, "pgrep -x sbatch || true").strip(), PATIENCE_S)


def settle(cluster: Cluster, name: str) -> collections.Counter[str]:
    """Return the number of jobs by token, after all requests have been processed."""
    eventually(lambda: not controller(cluster, "pgrep -x sbatch || true").strip(), PATIENCE_S)
    return jobs_by_token(cluster, name)


def script(cluster: Cluster, name: str) -> Path:
    folder = cluster.runner.cwd / name
    folder.mkdir()
    path = folder / f"{name}.sh"
    path.write_text("echo once >> ran\n")
    return path


def answer(cluster: Cluster, victim: Victim) -> dict[str, object]:
    ended = victim.end(patience_s=300)
    assert "Traceback" not in ended.stderr
    return dict(json.loads(ended.stdout))


def listed_jobs(cluster: Cluster, name: str) -> list[str]:
    """The jobs of that name that `clusterctl jobs` lists."""
    return [job["job_id"] for job in cluster.json("jobs")["jobs"] if job["name"] == name]


def test_submit_with_a_cut_connection_makes_at_most_one_job(cluster: Cluster) -> None:
    """sshd's processes for the user are killed while sbatch waits for its answer."""
    path = script(cluster, "cut")
    with silent_slurmctld(cluster) as go_on:
        victim = Victim(cluster.runner, "-f", cluster.spec, "-o", "json", "submit", path)
        until_sbatch_waits(cluster)
        controller(cluster, f"sudo pkill -KILL -u {cluster.user} sshd")
        go_on()
        answer_json = answer(cluster, victim)
    counts = settle(cluster, "cut")
    assert max(counts.values(), default=0) <= 1
    assert len(counts) <= 1
    if answer_json["ok"]:
        assert listed_jobs(cluster, "cut") == [answer_json["job_id"]]
    else:
        (failure,) = answer_json["failures"]  # type: ignore[misc]
        assert (failure["code"], failure["retryable"]) == ("answer-lost", False)
        # The job is listed if it was taken.
        assert len(listed_jobs(cluster, "cut")) == len(counts)


def test_submit_killed_during_sbatch_is_found_again(cluster: Cluster) -> None:
    path = script(cluster, "killed-in-sbatch")
    with silent_slurmctld(cluster) as go_on:
        victim = Victim(cluster.runner, "-f", cluster.spec, "submit", path)
        until_sbatch_waits(cluster)
        victim.hit("kill")
        go_on()
    counts = settle(cluster, "killed-in-sbatch")
    assert list(counts.values()) in ([], [1])
    listed = listed_jobs(cluster, "killed-in-sbatch")
    assert len(listed) == len(counts)
    if listed:
        cluster("logs", listed[0], "--follow")
        run = cluster.run_of(listed[0])
        assert (run / "ran").read_text() == "once\n"


def racer(cluster: Cluster, name: str) -> Path:
    """Return a script that writes its job ID into the home folder of its cluster."""
    (folder := cluster.runner.cwd / name).mkdir()
    (path := folder / f"{name}.sh").write_text(
        'echo "$SLURM_JOB_ID" >>"$HOME/$SLURM_JOB_NAME.ran"\n'
    )
    return path


def jobs_that_ran(cluster: Cluster, name: str) -> list[str]:
    return cluster.ssh(f"{cluster.name}-ctl", f"cat {name}.ran || true", user=cluster.user).split()


def active(cluster: Cluster, name: str) -> list[str]:
    """Run `clusterctl jobs`, which makes the choice, and return the jobs that it leaves in the
    queue.
    """
    cluster("jobs")
    return controller(cluster, f"squeue --noheader --name={name}").split()


def killed_first(cluster: Cluster, path: Path, name: str, places: str, after: int) -> None:
    """Kill `submit --first` when it has submitted so many jobs."""
    words = [
        cluster.runner.script,
        "-f",
        cluster.spec,
        "submit",
        path,
        "--name",
        name,
        "--first",
        places,
    ]
    env = {**os.environ, "CLUSTERCTL_HOME": str(cluster.runner.home)}
    with subprocess.Popen(
        words, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE
    ) as process:
        assert process.stderr
        for line in process.stderr:
            after -= line.startswith(b"submitted job ")
            if after == 0:
                process.kill()


def test_first_of_two_accounts_runs_a_single_job(cluster: Cluster) -> None:
    path = racer(cluster, "first")
    for race in range(2):
        name = f"race{race}"
        answer_json = cluster.json(
            "submit", path, "--name", name, "--first", "train,@default", "--wait"
        )
        assert (jobs_that_ran(cluster, name), listed_jobs(cluster, name)) == (
            [answer_json["job_id"]],
            [answer_json["job_id"]],
        )
        (lost,) = answer_json["cancelled"]
        assert cluster.job(lost["job_id"])["state"] == "CANCELLED"


@pytest.mark.parametrize("after", [1, 2])
def test_first_killed_runs_a_single_job(cluster: Cluster, after: int) -> None:
    """Without clusterctl, the jobs themselves decide, and the next `jobs` records the decision."""
    path = racer(cluster, f"lone{after}")
    name = f"lone{after}"
    killed_first(cluster, path, name, "train,@default", after)
    look = f"squeue --noheader --name={name}"
    eventually(lambda: not controller(cluster, look).strip(), PATIENCE_S)
    assert len(jobs_that_ran(cluster, name)) == 1
    assert listed_jobs(cluster, name) == jobs_that_ran(cluster, name)


def test_first_of_two_clusters_runs_a_single_job(cluster: Cluster) -> None:
    """The first race is killed: then `jobs` chooses."""
    name = f"{cluster.name}b"
    (spec := cluster.runner.cwd / f"{name}.yaml").write_text(
        "version: 1\n"
        f"name: {name}\n"
        "provider: {type: local}\n"
        "partitions: [{name: train, nodes: 1}]\n"
    )
    other = Cluster(name, spec, cluster.runner, cluster.runner("-o", "json", "-f", spec, "up").json)
    path = racer(cluster, "far")
    try:
        for race in range(2):
            names = f"far{race}"
            if race:
                answer_json = cluster.json(
                    "submit", path, "--name", names, "--first", f"train,{name}", "--wait"
                )
                winner = other if answer_json["cluster"] == name else cluster
                assert jobs_that_ran(winner, names) == [answer_json["job_id"]]
            else:
                killed_first(cluster, path, names, f"{name},train", 2)
                eventually(
                    lambda name=names: not any(active(one, name) for one in (cluster, other)),
                    PATIENCE_S,
                )
            assert len(jobs_that_ran(cluster, names) + jobs_that_ran(other, names)) == 1
    finally:
        cluster.runner("-f", spec, "down", "--yes", "--discard")
