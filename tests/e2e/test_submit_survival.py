"""Never two jobs for one submit: what ends it, or what it is asked through, fails while it is under
way.

How many there are is asked of Slurm itself: each job bears its submission's token as a comment.
"""

from __future__ import annotations

import collections
import json
import os
import random
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.faults import Victim, cause, eventually_none
from tests.support.cluster import Cluster
from tests.support.processes import eventually
from tests.support.sweeps import in_sweep

SEED = int(os.environ.get("SWEEP_SEED") or random.SystemRandom().randrange(10_000))
PATIENCE_S = 90.0


def controller(cluster: Cluster, command: str) -> str:
    return cluster.ssh(f"{cluster.name}-ctl", command)


def jobs_by_token(cluster: Cluster, name: str) -> collections.Counter[str]:
    """Comment -> number of jobs of that name, by slurmctld's memory and by the accounting."""
    ask = (
        f"squeue --noheader --states=all --name={name} --Format=JobID:20,Comment:60; "
        f"sacct -aXnP -o JobID,Comment --name={name} -S now-1hour"
    )
    lines = (line.replace("|", " ").split() for line in controller(cluster, ask).splitlines())
    pairs = {(words[0], words[1]) for words in lines if len(words) > 1}
    return collections.Counter(comment for _, comment in pairs)


@contextmanager
def silent_slurmctld(cluster: Cluster) -> Iterator[Callable[[], None]]:
    """slurmctld stands still: what it is asked lies in its socket. Yields what lets it go on."""
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
    """The jobs that there are once nothing is on its way any more."""
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


def told(cluster: Cluster, name: str) -> list[str]:
    """The jobs of that name that `clusterctl jobs` lists."""
    return [job["job_id"] for job in cluster.json("jobs")["jobs"] if job["name"] == name]


def test_cut_connection_while_slurm_takes_the_job(cluster: Cluster) -> None:
    """sshd's processes for the user are killed while sbatch waits for its answer."""
    path = script(cluster, "cut")
    with silent_slurmctld(cluster) as go_on:
        victim = Victim(cluster.runner, "-f", cluster.spec, "-o", "json", "submit", path)
        until_sbatch_waits(cluster)
        controller(cluster, f"sudo pkill -KILL -u {cluster.user} sshd")
        go_on()
        said = answer(cluster, victim)
    there = settle(cluster, "cut")
    assert max(there.values(), default=0) <= 1
    assert len(there) <= 1
    if said["ok"]:
        assert told(cluster, "cut") == [said["job_id"]]
    else:
        (failure,) = said["failures"]  # type: ignore[misc]
        assert (failure["code"], failure["retryable"]) == ("answer-lost", False)
        # The job is listed if it was taken.
        assert len(told(cluster, "cut")) == len(there)


def test_submit_killed_during_sbatch_is_found_again(cluster: Cluster) -> None:
    path = script(cluster, "killed-in-sbatch")
    with silent_slurmctld(cluster) as go_on:
        victim = Victim(cluster.runner, "-f", cluster.spec, "submit", path)
        until_sbatch_waits(cluster)
        victim.hit("kill")
        go_on()
    there = settle(cluster, "killed-in-sbatch")
    assert list(there.values()) in ([], [1])
    listed = told(cluster, "killed-in-sbatch")
    assert len(listed) == len(there)
    if listed:
        cluster("logs", listed[0], "--follow")
        run = cluster.run_of(listed[0])
        assert (run / "ran").read_text() == "once\n"


@pytest.mark.sweep
def test_cable_that_is_out_for_a_while(cluster: Cluster) -> None:
    path = script(cluster, "cable")
    cluster_id = (cluster.workspace / "id").read_text().strip()
    for pause_s in (2, 20):
        with silent_slurmctld(cluster) as go_on:
            victim = Victim(cluster.runner, "-f", cluster.spec, "-o", "json", "submit", path)
            until_sbatch_waits(cluster)
            cause("unplug", cluster_id)
            time.sleep(pause_s)
            cause("plug", cluster_id)
            go_on()
            answer(cluster, victim)
        there = settle(cluster, "cable")
        assert set(there.values()) <= {1}
        assert len(told(cluster, "cable")) == len(there)


@pytest.mark.sweep
def test_killed_at_twenty_instants(cluster: Cluster) -> None:
    draw = random.Random(SEED)  # noqa: S311
    path = script(cluster, "twenty")
    began = time.monotonic()
    cluster("submit", path)
    seconds = time.monotonic() - began
    for number in range(20):
        victim = Victim(cluster.runner, "-f", cluster.spec, "submit", path)
        victim.until(draw.random() * seconds)
        victim.hit(("kill", "kill-all")[number % 2])
    assert eventually_none(cluster.runner.home) == []
    there = settle(cluster, "twenty")
    assert set(there.values()) == {1}, f"seed {SEED}"
    assert len(there) <= 21
    assert len(told(cluster, "twenty")) == len(there), f"seed {SEED}"
    for job in told(cluster, "twenty"):
        cluster("logs", job, "--follow")
    cluster("collect", timeout_s=600)


@pytest.mark.sweep
def test_collect_killed_at_ten_instants_goes_on(cluster: Cluster) -> None:
    draw = random.Random(SEED)  # noqa: S311
    path = cluster.runner.cwd / "many.sh"
    path.write_text(
        "mkdir d; for i in $(seq 2000); do head -c 3000 /dev/urandom > d/$i; done\n"
        "head -c 80M /dev/urandom > large\n"
    )
    job = cluster.json("submit", path, "--no-folder", "--wait")["job_id"]
    began = time.monotonic()
    cluster("collect", job, "--out", cluster.runner.cwd / "undisturbed")
    seconds = time.monotonic() - began
    shutil.rmtree(cluster.runner.cwd / "undisturbed")  # else it is home, and left as it is
    out = cluster.runner.cwd / "again"
    for number in range(10):
        victim = Victim(cluster.runner, "-f", cluster.spec, "collect", job, "--out", out)
        victim.until((0.2 + 0.8 * draw.random()) * seconds)
        victim.hit(("kill", "kill-all")[number % 2])
    assert eventually_none(cluster.runner.home) == []
    cluster("collect", job, "--out", out)
    (run,) = (path for path in out.iterdir() if not path.name.startswith("."))
    checked = subprocess.run(
        ["sha256sum", "--quiet", "-c", "SHA256SUMS"],
        cwd=run,
        capture_output=True,
        text=True,
        check=False,
    )
    assert checked.returncode == 0, checked
    assert len(list((run / "d").iterdir())) == 2000
    assert [path.name for path in out.iterdir()] == [run.name], "nothing unfinished stays"


def racer(cluster: Cluster, name: str) -> Path:
    """A script that leaves its job's id in the home of its cluster."""
    (folder := cluster.runner.cwd / name).mkdir()
    (path := folder / f"{name}.sh").write_text(
        'echo "$SLURM_JOB_ID" >>"$HOME/$SLURM_JOB_NAME.ran"\n'
    )
    return path


def ran(cluster: Cluster, name: str) -> list[str]:
    return cluster.ssh(f"{cluster.name}-ctl", f"cat {name}.ran || true", user=cluster.user).split()


def active(cluster: Cluster, name: str) -> list[str]:
    """The jobs that `clusterctl jobs`, which chooses, leaves in the queue."""
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


@pytest.mark.parametrize("races", [2, *in_sweep(20)])
def test_first_of_two_accounts_runs_a_single_job(cluster: Cluster, races: int) -> None:
    path = racer(cluster, f"first{races}")
    for race in range(races):
        name = f"race{races}-{race}"
        said = cluster.json("submit", path, "--name", name, "--first", "train,@default", "--wait")
        assert (ran(cluster, name), told(cluster, name)) == ([said["job_id"]], [said["job_id"]])
        (lost,) = said["cancelled"]
        assert cluster.job(lost["job_id"])["state"] == "CANCELLED"


@pytest.mark.parametrize("after", [1, 2])
def test_first_killed_runs_a_single_job(cluster: Cluster, after: int) -> None:
    """Nobody watches then: the jobs themselves decide, and the next `jobs` records it."""
    path = racer(cluster, f"lone{after}")
    name = f"lone{after}"
    killed_first(cluster, path, name, "train,@default", after)
    look = f"squeue --noheader --name={name}"
    eventually(lambda: not controller(cluster, look).strip(), PATIENCE_S)
    assert len(ran(cluster, name)) == 1
    assert told(cluster, name) == ran(cluster, name)


@pytest.mark.sweep
def test_first_of_two_clusters_runs_a_single_job(cluster: Cluster) -> None:
    """20 races, of which each third is killed: then `jobs` chooses."""
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
        for race in range(20):
            names = f"far{race}"
            if race % 3:
                said = cluster.json(
                    "submit", path, "--name", names, "--first", f"train,{name}", "--wait"
                )
                winner = other if said["cluster"] == name else cluster
                assert ran(winner, names) == [said["job_id"]]
            else:
                killed_first(cluster, path, names, f"{name},train", 1 + race % 2)
                eventually(
                    lambda name=names: not any(active(one, name) for one in (cluster, other)),
                    PATIENCE_S,
                )
            assert len(ran(cluster, names) + ran(other, names)) == 1
    finally:
        cluster.runner("-f", spec, "down", "--yes", "--discard")
