"""`up` looks at the machine, not at its records: what died is started again, what lives is left alone."""

from __future__ import annotations

import json
import secrets
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.providers.local import machine
from tests.support.cluster import Cluster, raised
from tests.support.disks import FAULTS, small_disk_at
from tests.support.faults import cause

SPEC = """\
version: 1
name: {name}
provider: {{type: local}}
partitions: [{{name: train, nodes: 1}}]
users: [{{name: ada, uid: {uid}}}]
"""


@pytest.fixture(scope="module")
def one(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    name = f"m{secrets.token_hex(3)}"
    with raised(
        name,
        SPEC.format(name=name, uid=2101),
        tmp_path_factory.mktemp("home"),
        tmp_path_factory.mktemp("cwd"),
    ) as cluster:
        yield cluster


def cluster_id(cluster: Cluster) -> str:
    return (cluster.workspace / "id").read_text().strip()


def boot_of(cluster: Cluster) -> str:
    return cluster.ssh(f"{cluster.name}-train-1", "systemctl show -p UserspaceTimestampMonotonic --value")


# A line each: what must be a cluster's own. MariaDB's accounts have no passwords: theirs are the system's.
SECRETS = """\
set -e
sha256sum /etc/munge/munge.key /etc/ssh/ssh_host_*_key /etc/machine-id ~clusterctl/.ssh/authorized_keys \\
    /shared/home/*/.ssh/authorized_keys
mariadb -BNe "select user, plugin from mysql.user where authentication_string not in ('', 'invalid')" >&2
"""
OF_LAYER = (
    *("*/munge/*", "*/ssh_host_*", "*/machine-id", "*/random-seed", "*/.ssh/id_*", "*/shared/*"),
    *("*/var/lib/slurm/*/*", "*/var/log/slurm/*", "*/etc/slurm/jwt*", "*/*.pem", "*/*.key"),
)


def own_of(cluster: Cluster, host: str) -> dict[str, str]:
    """File -> the hash of what must be in no other cluster."""
    script = shlex.quote(SECRETS if host.endswith("-ctl") else SECRETS.partition("mariadb")[0])
    said = cluster.ssh(host, f"sudo sh -c {script} 2>&1").splitlines()
    return {path: found for found, path in (line.split() for line in said)}


def test_clusters_from_one_layer_share_no_secret(
    one: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Of one name and one kind, in two homes; and there is none in what they were made from."""
    home, cwd = tmp_path_factory.mktemp("other home"), tmp_path_factory.mktemp("other cwd")
    with raised(one.name, one.spec.read_text(), home, cwd) as there:
        notes = {phase["phase"]: phase["note"] for phase in there.raised["phases"]}
        assert notes["prepare_class"] == "cached"
        assert notes["converge"] == "2 hosts as their class", "Ansible ran"
        for host in (f"{one.name}-ctl", f"{one.name}-train-1"):
            mine, theirs = own_of(one, host), own_of(there, host)
            assert len(mine) == 5
            assert not [path for path in mine if mine[path] == theirs[path]]
        assert there.json("submit", "probe", "--wait")["state"] == "COMPLETED"
        assert len(there.json("jobs")["jobs"]) == 1, "of the cluster that it was made from, too"
    note = Path(f"/var/lib/clusterctl/{cluster_id(one)}/nodes/{one.name}-ctl/class").read_text()
    layer = Path(f"/var/cache/clusterctl/class-{note}/upper")
    assert (layer / "var/lib/mysql/slurm_acct_db").is_dir()
    files = [path for path in layer.rglob("*") if path.is_file() and path.stat().st_size]
    assert not [path for path in files if any(path.match(pattern) for pattern in OF_LAYER)]


def test_a_dead_node_is_started_again(one: Cluster) -> None:
    name, before = f"c{cluster_id(one)}-002", boot_of(one)
    cause("stop", name)
    assert name not in machine.alive()
    assert one.json("up")["probed"] == [f"{one.name}-train-1"]
    assert boot_of(one) != before


def test_a_node_whose_supervisor_was_killed_lives_on_and_can_be_stopped(one: Cluster) -> None:
    name, before = f"c{cluster_id(one)}-002", boot_of(one)
    cause("kill-supervisor", name)
    assert one.json("up")["probed"] == [f"{one.name}-train-1"]
    assert boot_of(one) == before
    cause("stop", name)
    assert name not in machine.alive()
    assert one.json("up")["ready"]


def test_a_reboot_of_this_machine_is_mended_with_data_and_accounting_kept(one: Cluster) -> None:
    job = one.json("submit", "probe", "--wait")["job_id"]
    cause("reboot", one.runner.home, cluster_id(one))
    assert one.json("up")["ready"]
    assert (one.run_of(job) / "stdout.log").is_file()


def test_a_node_that_reboots_itself_has_its_files_its_logins_and_an_empty_tmp(one: Cluster) -> None:
    node, before = f"{one.name}-train-1", boot_of(one)
    # Slurm may have taken up a job anew that had just ended when the power was cut: its node would be busy.
    idle = f'sudo scancel --user={one.user}; until [ -z "$(squeue --noheader)" ]; do sleep 0.2; done'
    one.ssh(f"{one.name}-ctl", idle)
    one.ssh(node, "touch kept /tmp/gone && sync && sudo systemctl reboot", rc=None)
    assert one.json("up")["probed"] == [node]
    assert boot_of(one) != before
    one.ssh(node, "test -e kept && ! test -e /tmp/gone")
    one.ssh(node, f"sudo -iu {one.user} true && systemctl is-system-running")
    assert one.ssh(node, "echo $HOME", user=one.user).strip() == f"/shared/home/{one.user}"


def test_down_that_cannot_bring_runs_home_says_what_to_do(one: Cluster) -> None:
    """Neither without Slurm nor without the machines; and nothing is lost by the attempt."""
    one.json("submit", "probe", "--wait")
    one.ssh(f"{one.name}-ctl", "sudo systemctl stop slurmctld")
    assert "--discard" in one("down", "--yes", rc=1).stderr
    ours = f"c{cluster_id(one)}-"
    cause("stop", *(name for name in machine.alive() if name.startswith(ours)))
    assert "--discard" in one("down", "--yes", rc=1).stderr
    assert one.workspace.is_dir()
    assert one.json("up")["ready"]


def test_a_home_that_a_job_closed_is_opened_again(one: Cluster) -> None:
    one.ssh(f"{one.name}-ctl", "chmod 000 .", user=one.user)
    assert "clusterctl up" in one("submit", "probe", rc=1).stderr
    one("up")
    assert one.json("submit", "probe", "--wait")["state"] == "COMPLETED"


def test_a_user_whose_number_changed_can_still_submit(one: Cluster) -> None:
    assert one.ssh(f"{one.name}-ctl", "id -u", user=one.user).strip() == "2101"
    one.spec.write_text(SPEC.format(name=one.name, uid=2102))
    one("up")
    assert one.ssh(f"{one.name}-ctl", "id -u", user=one.user).strip() == "2102"
    assert one.json("submit", "probe", "--wait")["state"] == "COMPLETED"


SAVES = """\
#!/bin/bash
#SBATCH --requeue
mkdir -p out/checkpoint-{1,2}
echo "weights of run ${SLURM_RESTART_COUNT-0}" | tee out/checkpoint-{1,2}/weights >result.txt
touch ~/saved-$SLURM_JOB_ID
[ "$1" = fails ] && exit 3
sleep 600
"""


def test_down_stops_at_what_failed_cancelled_and_requeued_jobs_left(one: Cluster) -> None:
    """A requeued job writes into the folder of a run that is here already."""
    script, controller = one.runner.cwd / "saves.sh", f"{one.name}-ctl"
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
    one.ssh(controller, f"until scontrol show job {failed} | grep -q JobState=FAILED; do sleep 0.2; done")
    one.ssh(controller, "sbatch --parsable --hold --wrap true", user=one.user)

    # Slurm may have taken up a job anew that had just ended when this module cut the power: it counts, too.
    waits = f"(wrap) of {one.user} is PENDING"
    causes = [one["cause"] for one in one.json("down", "--yes", rc=1)["failures"]]
    jobs = [cause for cause in causes if cause.startswith("job ")]
    assert any(cause.endswith(waits) for cause in jobs)
    left = {cause.partition(": ")[0] for cause in causes[len(jobs) :]}
    assert left >= {f"out of job {job} (saves)" for job in (failed, ended)}
    # Both logs, and result.txt; and telemetry, where its first sample came before the job's end.
    logs = {f"stderr.log and 2 more of job {failed} (saves)", f"telemetry and 3 more of job {failed} (saves)"}
    assert len(left & logs) == 1
    (folder,) = one.json("collect", "--all")["folders"]
    brought = {path.read_text() for path in Path(folder).rglob("result.txt")}
    assert brought == {"weights of run 1\n"}
    assert "weights of run 0\n" in {p.read_text() for p in one.runner.cwd.glob("runs/*/result.txt")}
    causes = [one["cause"] for one in one.json("down", "--yes", rc=1)["failures"]]
    assert all(cause.startswith("job ") for cause in causes)
    assert any(cause.endswith(waits) for cause in causes)
    one.ssh(controller, "scancel --me", user=one.user)


@pytest.mark.sweep
def test_what_slurm_refuses_in_the_spec_is_named_and_can_be_corrected(one: Cluster) -> None:
    text = one.spec.read_text()
    one.spec.write_text(f"{text}slurm:\n  extra: [SchedulerType=sched/nonsense]\n")
    (failure,) = one.json("up", rc=1)["failures"]
    assert failure["host"] == f"{one.name}-ctl"
    assert "cannot find sched plugin for sched/nonsense" in failure["cause"]
    one.spec.write_text(text)
    assert one.json("up")["ready"]


def network(cluster: Cluster) -> str:
    return str(json.loads((cluster.workspace / "hosts.json").read_text())["network"])


@pytest.mark.sweep  # what is written there: tests/unit/util/test_disk.py
def test_on_a_full_disk_up_and_submit_refuse_and_down_says_what_is_gone_with_the_cluster(
    one: Cluster, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The state folder is on a disk of its own, which takes nothing more. The cluster in it has the name of
    another one, which is up in another home: they do not meet."""
    cwd = tmp_path_factory.mktemp("other cwd")
    script = one.runner.cwd / "save.sh"
    script.write_text("mkdir checkpoints && touch checkpoints/last weights && chmod 000 weights\n")
    with (
        small_disk_at(tmp_path, mib=8) as disk,
        raised(one.name, one.spec.read_text(), disk.path, cwd) as there,
    ):
        assert network(there) != network(one)
        there("submit", script, "--wait")
        for fault, said in FAULTS.items():
            disk.suffer(fault)
            (failure,) = there.json("up", rc=1)["failures"]
            assert failure["code"] == "disk"
            assert said in failure["cause"]
            there("status")
            (job,) = there.json("jobs")["jobs"]
            if fault == "read-only":  # else the line may fit into what the file has already
                (failure,) = there.json("submit", script, rc=1)["failures"]
                assert failure["code"] == "disk"
                assert there.json("jobs")["jobs"] == [job]
            disk.recover()
        assert there.json("up")["ready"]
        disk.suffer("full")
        assert "was not collected: weights (Permission denied)" in there("down", "--yes").stderr
        assert not there.workspace.exists()
    assert one.json("status")["ready"], "it went down with the other of its name"


def test_a_lost_workspace_does_not_keep_a_cluster_alive(one: Cluster) -> None:
    kept = one.workspace.rename(one.runner.cwd / "orphaned")
    (listed,) = (each for each in one.json("list")["clusters"] if each["cluster"] == one.name)
    assert listed["state"] == "orphaned"
    assert listed["fix"] in one("list").stdout
    typed = shlex.split(listed["fix"])[1:]
    assert (
        "--discard" in one.runner(*typed, "--yes", rc=1).stderr
    )  # nothing can be looked at without its keys
    assert "--discard" in one("down", "--yes", rc=1).stderr
    assert "cleanup verified" in one.runner(*typed, "--yes", "--discard").stdout
    assert f"there is no cluster {one.name!r}" in one("down", "--yes", rc=2).stderr
    kept.rename(one.workspace)
    one("down", "--yes", "--discard")
