"""`up` reads the state of the machine, not its records: it restarts what has ended and leaves the
rest.

First `up` itself is ended by Ctrl-C, `kill` and SIGKILL: no process remains, and the next `up`
continues.
"""

from __future__ import annotations

import functools
import secrets
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.providers.local import machine
from tests.e2e.faults import Victim, at_work, at_work_on_nodes, cause, eventually_none
from tests.support.cluster import Cluster
from tests.support.messages import codes
from tests.support.verbs import Clusterctl, CommandResult

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions: [{{name: train, nodes: 1}}]
users: [{{name: ada, uid: {uid}}}]
"""
# Another user in each run, so that the first `up` builds templates, which clusters of any name share.
UID = 20_000 + 2 * secrets.randbelow(10_000)


@pytest.fixture(scope="module")
def spec(clusterctl: Clusterctl, cluster_name: str) -> Iterator[Path]:
    """A spec whose cluster is removed at the end."""
    path = clusterctl.cwd / "cluster.yaml"
    path.write_text(SPEC.format(name=cluster_name, uid=UID))
    yield path
    clusterctl("down", "--yes", "--discard", rc=None)


def interrupted(clusterctl: Clusterctl, phase: str, how: str) -> CommandResult:
    """Start `up` and end it after it has begun a phase.

    It also runs Ansible on the hosts, which hosts of a class do without.
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


def test_up_killed_by_sigkill_leaves_no_process(
    clusterctl: Clusterctl, spec: Path, cluster_name: str
) -> None:
    assert interrupted(clusterctl, "converge", "kill").rc == -signal.SIGKILL
    assert eventually_none(clusterctl.home) == []
    identity = (clusterctl.home / cluster_name / "id").read_text().strip()
    on_nodes = functools.partial(at_work_on_nodes, identity)
    assert eventually_none(clusterctl.home, on_nodes) == []


@pytest.fixture(scope="module")
def convergence_cluster(clusterctl: Clusterctl, cluster_name: str, spec: Path) -> Cluster:
    """The cluster, complete: a killed `up` holds no lock."""
    return Cluster(cluster_name, spec, clusterctl, clusterctl("-o", "json", "up").json)


def cluster_id(cluster: Cluster) -> str:
    return (cluster.workspace / "id").read_text().strip()


def boot_of(cluster: Cluster) -> str:
    return cluster.ssh(
        f"{cluster.name}-train-1", "systemctl show -p UserspaceTimestampMonotonic --value"
    )


def test_node_survives_its_killed_supervisor_and_can_be_stopped(
    convergence_cluster: Cluster,
) -> None:
    """`up` continues where it was ended, and makes a home folder accessible that a job closed."""
    assert convergence_cluster.raised["ready"]
    name = f"c{cluster_id(convergence_cluster)}-002"
    before = boot_of(convergence_cluster)
    cause("kill-supervisor", name)
    leader = f"{convergence_cluster.name}-ctl"
    convergence_cluster.ssh(leader, "chmod 000 .", user=convergence_cluster.user)
    # Else `submit` would share the connection, and need no login.
    convergence_cluster.end_connection(leader, user=convergence_cluster.user)
    assert "clusterctl up" in convergence_cluster("submit", "probe", rc=1).stderr
    assert convergence_cluster.json("up")["probed"] == [f"{convergence_cluster.name}-train-1"]
    assert boot_of(convergence_cluster) == before
    assert convergence_cluster.json("submit", "probe", "--wait")["state"] == "COMPLETED"
    cause("stop", name)
    assert name not in machine.alive()


def test_up_after_a_reboot_keeps_data_and_accounting(convergence_cluster: Cluster) -> None:
    """`down` that cannot collect runs, without Slurm or without the machines, names the command to
    type.
    """
    leader = f"{convergence_cluster.name}-ctl"
    node = f"{convergence_cluster.name}-train-1"
    assert convergence_cluster.json("up")["probed"] == [node]
    before = boot_of(convergence_cluster)
    job = convergence_cluster.json("submit", "probe", "--wait")["job_id"]
    convergence_cluster.ssh(node, "touch kept /tmp/gone && sync")
    convergence_cluster.ssh(leader, "sudo systemctl stop slurmctld")
    assert "--discard" in convergence_cluster("down", "--yes", rc=1).stderr
    cause("reboot", convergence_cluster.runner.home, cluster_id(convergence_cluster))
    assert "--discard" in convergence_cluster("down", "--yes", rc=1).stderr
    assert convergence_cluster.json("up")["ready"]
    assert boot_of(convergence_cluster) != before
    convergence_cluster.ssh(node, "test -e kept && ! test -e /tmp/gone")
    convergence_cluster.ssh(
        node, f"sudo -iu {convergence_cluster.user} true && systemctl is-system-running"
    )
    assert (
        convergence_cluster.ssh(node, "echo $HOME", user=convergence_cluster.user).strip()
        == f"/shared/home/{convergence_cluster.user}"
    )
    assert (convergence_cluster.run_of(job) / "stdout.log").is_file()


def test_user_with_a_changed_uid_can_still_submit(convergence_cluster: Cluster) -> None:
    assert convergence_cluster.ssh(
        f"{convergence_cluster.name}-ctl", "id -u", user=convergence_cluster.user
    ).strip() == str(UID)
    convergence_cluster.spec.write_text(
        convergence_cluster.spec.read_text().replace(f"uid: {UID}", f"uid: {UID + 1}")
    )
    convergence_cluster("up")
    assert convergence_cluster.ssh(
        f"{convergence_cluster.name}-ctl", "id -u", user=convergence_cluster.user
    ).strip() == str(UID + 1)
    assert convergence_cluster.json("submit", "probe", "--wait")["state"] == "COMPLETED"


SAVES = """\
#!/bin/bash
#SBATCH --requeue
mkdir -p out/checkpoint-{1,2}
echo "run ${SLURM_RESTART_COUNT-0}" | tee out/checkpoint-{1,2}/weights >result.txt
touch ~/saved-$SLURM_JOB_ID
[ "$1" = fails ] && exit 3
sleep 600
"""


def test_down_refuses_files_of_failed_and_cancelled_jobs(convergence_cluster: Cluster) -> None:
    """A requeued job writes into the folder of a run that was already collected."""
    script = convergence_cluster.runner.cwd / "saves.sh"
    controller = f"{convergence_cluster.name}-ctl"
    script.write_text(SAVES)
    failed = convergence_cluster.json("submit", script, "--wait", "--", "fails", rc=4)["job_id"]
    ended = convergence_cluster.json("submit", script)["job_id"]
    home = convergence_cluster.ssh(controller, "pwd", user=convergence_cluster.user).strip()
    convergence_cluster.ssh(
        controller,
        f"until test -e saved-{ended}; do sleep 0.2; done",
        user=convergence_cluster.user,
    )
    convergence_cluster("cancel", ended)
    convergence_cluster("logs", ended, "--follow", rc=5)
    convergence_cluster("collect")
    convergence_cluster.ssh(
        controller, f"sudo rm {home}/saved-{failed} && sudo scontrol requeue {failed}"
    )
    convergence_cluster.ssh(
        controller, f"until sudo test -e {home}/saved-{failed}; do sleep 0.2; done"
    )
    convergence_cluster.ssh(
        controller,
        f"until scontrol show job {failed} | grep -q JobState=FAILED; do sleep 0.2; done",
    )
    convergence_cluster.ssh(
        controller, "sbatch --parsable --hold --wrap true", user=convergence_cluster.user
    )

    # Slurm may have taken up a job anew that had just ended when this module cut the power: it
    # counts, too.
    waits = f"(wrap) of {convergence_cluster.user} is PENDING"
    causes = [
        failure["cause"] for failure in convergence_cluster.json("down", "--yes", rc=1)["failures"]
    ]
    jobs = [cause for cause in causes if cause.startswith("job ")]
    assert any(cause.endswith(waits) for cause in jobs)
    left = {cause.partition(": ")[0] for cause in causes[len(jobs) :]}
    assert left >= {f"files of job {job} (saves)" for job in (failed, ended)}
    assert convergence_cluster.json("collect", "--all")["folders"] == []
    run = convergence_cluster.runner.cwd / "runs" / f"{convergence_cluster.name}-{failed}-saves"
    assert (run / "result.txt").read_text() == "run 1\n"
    # The job has overwritten it on the cluster.
    assert (run / "result.txt.changed").read_text() == "run 0\n"
    causes = [
        failure["cause"] for failure in convergence_cluster.json("down", "--yes", rc=1)["failures"]
    ]
    assert all(cause.startswith("job ") for cause in causes)
    assert any(cause.endswith(waits) for cause in causes)
    convergence_cluster.ssh(controller, "scancel --me", user=convergence_cluster.user)


def test_cluster_with_a_lost_workspace_is_removed_by_the_listed_command(
    convergence_cluster: Cluster,
) -> None:
    kept = convergence_cluster.workspace.rename(convergence_cluster.runner.cwd / "orphaned")
    (listed,) = (
        each
        for each in convergence_cluster.json("list")["clusters"]
        if each["cluster"] == convergence_cluster.name
    )
    assert listed["state"] == "orphaned"
    assert listed["fix"] in convergence_cluster("list").stdout
    typed = shlex.split(listed["fix"])[1:]
    # Nothing can be looked at without its keys.
    assert "--discard" in convergence_cluster.runner(*typed, "--yes", rc=1).stderr
    assert codes(convergence_cluster("-o", "json", "down", "--yes", rc=2)) == ["not-found/cluster"]
    assert "cleanup verified" in convergence_cluster.runner(*typed, "--yes", "--discard").stdout
    assert codes(convergence_cluster("-o", "json", "down", "--yes", rc=2)) == ["not-found/cluster"]
    kept.rename(convergence_cluster.workspace)
    convergence_cluster("down", "--yes", "--discard")
