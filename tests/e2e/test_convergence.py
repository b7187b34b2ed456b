"""`up` looks at the machine, not at its records: what died is started again, what lives is left
alone.

First `up` itself is ended, by Ctrl-C, `kill` and SIGKILL: nothing runs on, and the next goes on
from there.
"""

from __future__ import annotations

import functools
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.providers.local import machine
from tests.e2e.faults import Victim, at_work, at_work_on_nodes, cause, eventually_none
from tests.support.cluster import Cluster, of_this_run
from tests.support.messages import codes
from tests.support.verbs import Clusterctl, Ran

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions: [{{name: train, nodes: 1}}]
users: [{{name: ada, uid: {uid}}}]
"""


@pytest.fixture(scope="module")
def spec(clusterctl: Clusterctl, cluster_name: str) -> Iterator[Path]:
    """A spec whose cluster is down in the end."""
    path = clusterctl.cwd / "cluster.yaml"
    path.write_text(of_this_run(SPEC.format(name=cluster_name, uid=2101)))
    yield path
    clusterctl("down", "--yes", "--discard", rc=None)


def interrupted(clusterctl: Clusterctl, phase: str, how: str) -> Ran:
    """Start `up` and end it once it has said that phase: wherever in it, the outcome is the same.

    It runs Ansible on the hosts, too, which those of classes do without.
    """
    victim = Victim(clusterctl, "up", "--reconfigure")
    victim.until_phase(phase)
    assert at_work(clusterctl.home)
    return victim.hit(how)


# In all phases: test_survival_sweep.py.
@pytest.mark.parametrize(
    ("phase", "how", "code"),
    [("prepare_template", "int", 130), ("converge", "term", 128 + signal.SIGTERM)],
)
def test_up_that_is_interrupted_ends_cleanly(
    clusterctl: Clusterctl, spec: Path, phase: str, how: str, code: int
) -> None:
    ended = interrupted(clusterctl, phase, how)
    assert ended.rc == code, ended
    assert "Traceback" not in ended.stderr
    if how == "int":
        assert "interrupted" in ended.stderr
        assert "`clusterctl up`" in ended.stderr
        assert "error" not in ended.stderr
    assert at_work(clusterctl.home) == []


def test_even_a_sudden_death_leaves_nothing_at_work(
    clusterctl: Clusterctl, spec: Path, cluster_name: str
) -> None:
    assert interrupted(clusterctl, "converge", "kill").rc == -signal.SIGKILL
    assert eventually_none(clusterctl.home) == []
    identity = (clusterctl.home / cluster_name / "id").read_text().strip()
    on_nodes = functools.partial(at_work_on_nodes, identity)
    assert eventually_none(clusterctl.home, on_nodes) == []


@pytest.fixture(scope="module")
def one(clusterctl: Clusterctl, cluster_name: str, spec: Path) -> Cluster:
    """The cluster, whole: no lock is held by the dead."""
    return Cluster(cluster_name, spec, clusterctl, clusterctl("-o", "json", "up").json)


def cluster_id(cluster: Cluster) -> str:
    return (cluster.workspace / "id").read_text().strip()


def boot_of(cluster: Cluster) -> str:
    return cluster.ssh(
        f"{cluster.name}-train-1", "systemctl show -p UserspaceTimestampMonotonic --value"
    )


def test_node_survives_its_killed_supervisor_and_can_be_stopped(one: Cluster) -> None:
    """`up` goes on from where it was ended, and opens a home that a job closed."""
    assert one.raised["ready"]
    name = f"c{cluster_id(one)}-002"
    before = boot_of(one)
    cause("kill-supervisor", name)
    one.ssh(f"{one.name}-ctl", "chmod 000 .", user=one.user)
    assert "clusterctl up" in one("submit", "probe", rc=1).stderr
    assert one.json("up")["probed"] == [f"{one.name}-train-1"]
    assert boot_of(one) == before
    assert one.json("submit", "probe", "--wait")["state"] == "COMPLETED"
    cause("stop", name)
    assert name not in machine.alive()


def test_up_after_a_reboot_keeps_data_and_accounting(one: Cluster) -> None:
    """`down` that cannot bring runs home, without Slurm or without the machines, says what to
    do.
    """
    leader = f"{one.name}-ctl"
    node = f"{one.name}-train-1"
    assert one.json("up")["probed"] == [node]
    before = boot_of(one)
    job = one.json("submit", "probe", "--wait")["job_id"]
    one.ssh(node, "touch kept /tmp/gone && sync")
    one.ssh(leader, "sudo systemctl stop slurmctld")
    assert "--discard" in one("down", "--yes", rc=1).stderr
    cause("reboot", one.runner.home, cluster_id(one))
    assert "--discard" in one("down", "--yes", rc=1).stderr
    assert one.json("up")["ready"]
    assert boot_of(one) != before
    one.ssh(node, "test -e kept && ! test -e /tmp/gone")
    one.ssh(node, f"sudo -iu {one.user} true && systemctl is-system-running")
    assert one.ssh(node, "echo $HOME", user=one.user).strip() == f"/shared/home/{one.user}"
    assert (one.run_of(job) / "stdout.log").is_file()


def test_user_whose_number_changed_can_still_submit(one: Cluster) -> None:
    assert one.ssh(f"{one.name}-ctl", "id -u", user=one.user).strip() == "2101"
    one.spec.write_text(one.spec.read_text().replace("2101", "2102"))
    one("up")
    assert one.ssh(f"{one.name}-ctl", "id -u", user=one.user).strip() == "2102"
    assert one.json("submit", "probe", "--wait")["state"] == "COMPLETED"


SAVES = """\
#!/bin/bash
#SBATCH --requeue
mkdir -p out/checkpoint-{1,2}
echo "run ${SLURM_RESTART_COUNT-0}" | tee out/checkpoint-{1,2}/weights >result.txt
touch ~/saved-$SLURM_JOB_ID
[ "$1" = fails ] && exit 3
sleep 600
"""


def test_down_refuses_files_of_failed_and_cancelled_jobs(one: Cluster) -> None:
    """A requeued job writes into the folder of a run that is here already."""
    script = one.runner.cwd / "saves.sh"
    controller = f"{one.name}-ctl"
    script.write_text(SAVES)
    failed = one.json("submit", script, "--wait", "--", "fails", rc=4)["job_id"]
    ended = one.json("submit", script)["job_id"]
    home = one.ssh(controller, "pwd", user=one.user).strip()
    one.ssh(controller, f"until test -e saved-{ended}; do sleep 0.2; done", user=one.user)
    one("cancel", ended)
    one("logs", ended, "--follow", rc=5)
    one("collect")
    one.ssh(controller, f"sudo rm {home}/saved-{failed} && sudo scontrol requeue {failed}")
    one.ssh(controller, f"until sudo test -e {home}/saved-{failed}; do sleep 0.2; done")
    one.ssh(
        controller,
        f"until scontrol show job {failed} | grep -q JobState=FAILED; do sleep 0.2; done",
    )
    one.ssh(controller, "sbatch --parsable --hold --wrap true", user=one.user)

    # Slurm may have taken up a job anew that had just ended when this module cut the power: it
    # counts, too.
    waits = f"(wrap) of {one.user} is PENDING"
    causes = [one["cause"] for one in one.json("down", "--yes", rc=1)["failures"]]
    jobs = [cause for cause in causes if cause.startswith("job ")]
    assert any(cause.endswith(waits) for cause in jobs)
    left = {cause.partition(": ")[0] for cause in causes[len(jobs) :]}
    assert left >= {f"files of job {job} (saves)" for job in (failed, ended)}
    (folder,) = one.json("collect", "--all")["folders"]
    assert {path.read_text() for path in Path(folder).rglob("result.txt")} == {"run 1\n"}
    assert "run 0\n" in {path.read_text() for path in one.runner.cwd.glob("runs/*/result.txt")}
    causes = [one["cause"] for one in one.json("down", "--yes", rc=1)["failures"]]
    assert all(cause.startswith("job ") for cause in causes)
    assert any(cause.endswith(waits) for cause in causes)
    one.ssh(controller, "scancel --me", user=one.user)


def test_lost_workspace_does_not_keep_a_cluster_alive(one: Cluster) -> None:
    kept = one.workspace.rename(one.runner.cwd / "orphaned")
    (listed,) = (each for each in one.json("list")["clusters"] if each["cluster"] == one.name)
    assert listed["state"] == "orphaned"
    assert listed["fix"] in one("list").stdout
    typed = shlex.split(listed["fix"])[1:]
    # Nothing can be looked at without its keys.
    assert "--discard" in one.runner(*typed, "--yes", rc=1).stderr
    assert codes(one("-o", "json", "down", "--yes", rc=2)) == ["unknown-cluster"]
    assert "cleanup verified" in one.runner(*typed, "--yes", "--discard").stdout
    assert codes(one("-o", "json", "down", "--yes", rc=2)) == ["unknown-cluster"]
    kept.rename(one.workspace)
    one("down", "--yes", "--discard")
