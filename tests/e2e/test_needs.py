"""What a node needs to run jobs is away on a real cluster, and comes back: the node is drained with
the reason, `doctor`, `status` and waiting jobs name it, no job is lost, and it returns by itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest

from tests.support.cluster import Cluster, local_spec, raised
from tests.support.messages import condition
from tests.support.processes import eventually
from tests.support.sweeps import in_sweep

PATIENCE_S = 60
ENV = "/opt/clusterctl/env/bin"
PROGRAMS = "/usr/local/sbin"


@dataclass(frozen=True)
class Away:
    """How root takes a need from a node and gives it back, and what its check then says.

    by_up: code of the error with which `up` ends; "" if `up` repairs the node.
    """

    take: str
    give: str
    code: str
    says: str
    by_up: str


def program(name: str, text: str) -> str:
    """Put a program before the system's on the health check's PATH."""
    path = f"{PROGRAMS}/{name}"
    return f"printf '#!/bin/sh\\n{text}\\n' >{path}; chmod 755 {path}"


NEEDS = {
    "shared folder": Away(
        # Not writable: slurmstepd creates missing folders of logs.
        "mount -t tmpfs -o mode=755 none /shared",
        # `up` mounts the folder on top.
        "[ $(stat -fc %T /shared) != tmpfs ] || umount /shared",
        "shared-folder-away",
        "/shared/home/.",
        by_up="",
    ),
    "shared folder that is unmounted": Away(
        # `up` may have mounted it on top of another.
        "while umount -l /shared; do :; done",
        "true",
        "shared-folder-away",
        "is not mounted",
        by_up="",
    ),
    # The kernel of local nodes has no NFS, whose server could be away.
    "shared folder that hangs": Away(
        program(
            "stat", 'case "$*" in */.clusterctl-*) exec sleep 300 ;; esac; exec /usr/bin/stat "$@"'
        ),
        f"rm {PROGRAMS}/stat",
        "shared-folder-away",
        "does not answer within",
        by_up="host-unfit/folder-silent",
    ),
    "the jobs' Python": Away(
        f"chmod 750 {ENV}", f"chmod 755 {ENV}", "job-python", "Permission denied", by_up=""
    ),
    "MPI": Away(
        "mkdir /root/mpi; mv /usr/lib/x86_64-linux-gnu/libmpi.so.40* /root/mpi",
        "mv /root/mpi/* /usr/lib/x86_64-linux-gnu; rmdir /root/mpi",
        "package-incomplete",
        "lacks /usr/lib/x86_64-linux-gnu/libmpi.so.40",
        by_up="package-incomplete",
    ),
    "the program of steps": Away(
        "mv /usr/sbin/slurmstepd /root",
        "mv /root/slurmstepd /usr/sbin",
        "package-incomplete",
        "lacks /usr/sbin/slurmstepd",
        by_up="package-incomplete",
    ),
    "room": Away(
        "mount -t tmpfs -o size=16m none /var/tmp",
        "umount /var/tmp",
        "disk-full",
        "/var/tmp has",
        by_up="disk-full",
    ),
    "inodes": Away(
        "mount -t tmpfs -o size=99m,nr_inodes=1 none /var/tmp",
        "umount /var/tmp",
        "disk-full",
        "/var/tmp has no free inodes",
        by_up="disk-full",
    ),
    "uid": Away(
        "cp /etc/passwd /root/; sed -i '/^{user}:/s/x:[0-9]*:/x:23456:/' /etc/passwd",
        "cp /root/passwd /etc/passwd",
        "account-differs",
        "has uid 23456 instead of",
        by_up="",
    ),
    "clock": Away(
        program("chronyc", "echo A,10.0.0.1,3,1.0,-61.5,0,0,0,0,0,0,0,64,Normal"),
        f"rm {PROGRAMS}/chronyc",
        "clock",
        "the clock is wrong by 61.5 s",
        by_up="clock",
    ),
    "network": Away(
        "echo UCX_NET_DEVICES=mlx5_0:1 >/opt/clusterctl/job-variables",
        "rm /opt/clusterctl/job-variables",
        "fabric-away",
        "mlx5_0:1",
        by_up="fabric-away",
    ),
}


@pytest.fixture(scope="module")
def one(cluster_name: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    folder = tmp_path_factory.mktemp("needs")
    partitions = "{name: train, nodes: 2, cpus: 1, memory: 1GiB}"
    spec = local_spec(cluster_name, partitions, monitoring="{health: {interval: 5s}}")
    with raised(cluster_name, spec, folder / "home", folder) as cluster:
        yield cluster


def as_root(cluster: Cluster, command: str, host: str = "") -> None:
    """Run a command on a host. Default: the node that lacks something."""
    text = command.replace("{user}", cluster.user).replace("'", "'\\''")
    cluster.ssh(host or bad(cluster), f"sudo sh -c '{text}'")


def bad(cluster: Cluster) -> str:
    return f"{cluster.name}-train-2"


def node(cluster: Cluster) -> dict[str, Any]:
    """The node as `status` shows it."""
    (found,) = (one for one in cluster.json("status")["nodes"] if one["name"] == bad(cluster))
    return dict(found)


def findings(cluster: Cluster) -> dict[str, dict[str, Any]]:
    """Code -> what `doctor` finds on the node."""
    answer = cluster("-o", "json", "doctor", bad(cluster), rc=None).json
    return {condition(found): found for found in answer["findings"]}


def await_return(cluster: Cluster) -> None:
    eventually(lambda: node(cluster)["state"] == "idle" and not node(cluster)["reason"], PATIENCE_S)


@pytest.mark.parametrize(
    "need",
    [
        "shared folder",
        "the jobs' Python",
        *in_sweep(*(need for need in NEEDS if need not in {"shared folder", "the jobs' Python"})),
    ],
)
def test_need_that_is_away_drains_the_node_until_it_is_back(one: Cluster, need: str) -> None:
    away = NEEDS[need]
    script = one.runner.cwd / "there.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodelist={bad(one)}\nhostname\n")
    as_root(one, away.take)
    try:
        drained = eventually(
            lambda: found if away.says in (found := node(one))["reason"] else None, PATIENCE_S
        )
        assert drained["reason"].startswith("clusterctl health: ")
        assert "drain" in drained["state"]
        found = findings(one)[condition(away)]
        assert (found["level"], away.says in found["why"]) == ("error", True)
        job = one.json("submit", script)["job_id"]
        (waits,) = eventually(
            lambda: [w for w in one.json("status")["waiting"] if away.says in w["cause"]],
            PATIENCE_S,
        )
        assert waits["job_id"] == job
        answer = one("-o", "json", "up", rc=1 if away.by_up else 0).json
        failures = [(failure["host"], condition(failure)) for failure in answer.get("failures", ())]
        assert failures == ([(bad(one), away.by_up)] if away.by_up else [])
    finally:
        as_root(one, away.give)
    assert one.job_in("COMPLETED", job)["nodes"] == [bad(one)]
    await_return(one)
    assert one("doctor", rc=0)


def test_thirty_jobs_on_two_nodes_survive_one_without_its_shared_folder(one: Cluster) -> None:
    """Each would end within a second, so that the node would take nearly all."""
    command = "for i in $(seq 30); do sbatch --parsable --wrap=hostname; done"
    away = NEEDS["shared folder"]
    as_root(one, away.take)
    try:
        ids = one.ssh(f"{one.name}-ctl", f"cd ~ && {command}", user=one.user).split()
        query = f"sacct -nPX -j {','.join(ids)} -o State,NodeList"

        def ends() -> list[str] | None:
            rows = one.ssh(f"{one.name}-ctl", query).split()
            is_over = len(rows) == len(ids) and not any("ING" in row for row in rows)
            return rows if is_over else None

        assert set(eventually(ends, 120, pause_s=1)) == {f"COMPLETED|{one.name}-train-1"}
        assert "clusterctl health: " in node(one)["reason"]
    finally:
        as_root(one, away.give)
    await_return(one)


def test_failed_job_names_what_its_node_lacks(one: Cluster) -> None:
    """Somebody has removed the check before jobs, and the folder is lost within its interval."""
    script = one.runner.cwd / "fails.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --nodelist={bad(one)}\nhostname\n")
    as_root(one, "printf '#!/bin/sh\\n' >/opt/clusterctl/prolog; chmod -x /opt/clusterctl/health")
    as_root(one, NEEDS["shared folder"].take)
    try:
        unknown = one.json("submit", script, "--wait", rc=4)["diagnosis"]
        assert condition(unknown) == "log-not-writable"
        as_root(one, "chmod +x /opt/clusterctl/health")
        eventually(lambda: "/shared/home/." in node(one)["reason"], PATIENCE_S)
        known = one.json("logs", unknown["job_id"])["diagnosis"]
        assert condition(known) == "node-unfit"
        assert "/shared/home/." in known["cause"]
    finally:
        as_root(one, f"chmod +x /opt/clusterctl/health; {NEEDS['shared folder'].give}")
    await_return(one)
    one.json("up")


def test_slurmd_that_ends_at_each_start_is_named_with_its_fatal_error(one: Cluster) -> None:
    drop_in = "/etc/systemd/system/slurmd.service.d/zz.conf"
    broken = "[Service]\\nEnvironment=SLURMD_OPTIONS=--no-such-option\\n"
    as_root(one, f"printf '{broken}' >{drop_in}; systemctl daemon-reload")
    as_root(one, "systemctl --no-block restart slurmd")
    found = eventually(lambda: findings(one).get("slurmd-restarts"), PATIENCE_S, pause_s=2)
    assert found["level"] == "error"
    eventually(lambda: "slurmd has ended" in node(one)["reason"], 150, pause_s=3)
    answer = one.json("up")
    assert any(drop_in in repair["what"] for repair in answer["repaired"])
    await_return(one)


def test_doctor_names_what_changed_since_up_and_up_restores_it(one: Cluster) -> None:
    controller = f"{one.name}-ctl"
    conf = "/etc/slurm/slurm.conf"
    as_root(one, f"sed -i s/RealMemory=1024/RealMemory=999/ {conf}", controller)
    as_root(one, f"sed -i /{controller}/d /etc/hosts")
    found = drifted(one)
    assert found.keys() == {controller, bad(one)}
    assert conf in found[controller]
    assert "/etc/hosts" in found[bad(one)]
    one.json("up")
    assert drifted(one) == {}


def drifted(cluster: Cluster) -> dict[str, str]:
    """Return host -> what has changed there since `up`, as `doctor` tells it. Other tests may have
    made slurmd end so often that `doctor` names that, too.
    """
    findings = cluster("-o", "json", "doctor", rc=None).json["findings"]
    return {each["host"]: each["why"] for each in findings if condition(each) == "drifted"}


def controller_lacks(cluster: Cluster) -> list[str]:
    """Return the codes of what `status` says that the controller lacks."""
    answer = cluster.json("status")
    codes = [condition(lack) for lack in answer["controller_lacks"]]
    assert answer["ready"] == (not codes)
    return codes


def test_status_names_a_controller_without_its_shared_folder(one: Cluster) -> None:
    controller = f"{one.name}-ctl"
    away = NEEDS["shared folder"]
    assert controller_lacks(one) == []
    as_root(one, away.take, controller)
    try:
        assert controller_lacks(one) == [condition(away)]
        answer = one("-o", "json", "doctor", controller, rc=1).json
        assert condition(away) in {condition(found) for found in answer["findings"]}
    finally:
        as_root(one, away.give, controller)
    assert controller_lacks(one) == []


@pytest.mark.sweep
def test_status_names_daemons_of_the_controller_that_end_again_and_again(one: Cluster) -> None:
    """Both the database, without which slurmctld runs on, and slurmctld itself."""
    controller = f"{one.name}-ctl"
    broken = "/etc/mysql/mariadb.conf.d/99-broken.cnf"
    as_root(one, f"printf '[mysqld]\\nno_such_option=1\\n' >{broken}", controller)
    as_root(one, "systemctl restart mariadb || true", controller)
    try:
        assert controller_lacks(one) == ["database-failed"]
    finally:
        as_root(one, f"rm {broken}; systemctl restart mariadb", controller)
    eventually(lambda: controller_lacks(one) == [], 90, pause_s=2)
    drop_in = "/etc/systemd/system/slurmctld.service.d/zz.conf"
    text = "[Service]\\nEnvironment=SLURMCTLD_OPTIONS=--no-such-option\\nRestart=always\\nRestartSec=1\\n"
    as_root(one, f"printf '{text}' >{drop_in}; systemctl daemon-reload", controller)
    as_root(one, "systemctl --no-block restart slurmctld", controller)

    def codes() -> set[str] | None:
        failures = one("-o", "json", "status", rc=1).json["failures"]
        found = {condition(failure) for failure in failures}
        return found if "slurmctld-restarts" in found else None

    try:
        eventually(codes, 90, pause_s=2)
    finally:
        as_root(one, f"rm {drop_in}; systemctl daemon-reload", controller)
        as_root(one, "systemctl restart slurmctld", controller)
    one.json("up")


@pytest.mark.sweep
def test_healthy_nodes_are_not_drained_under_load(one: Cluster) -> None:
    """Full of work, of I/O and of jobs that start and end, with a check every five seconds."""
    command = (
        "for i in 1 2; do sbatch --parsable --wrap='timeout 40 sh -c \"while :; do dd if=/dev/zero "
        "of=~/io.$SLURM_JOB_ID bs=1M count=200 conv=fsync; done\"'; done; "
        "for i in $(seq 40); do sbatch --parsable --wrap=hostname; done"
    )
    drains = "sudo grep -c 'state set to DRAIN' /var/log/slurm/slurmctld.log"
    before = one.ssh(f"{one.name}-ctl", drains, rc=None)
    ids = one.ssh(f"{one.name}-ctl", f"cd ~ && {command}", user=one.user).split()
    query = f"squeue -h -j {','.join(ids)}; sinfo -h -R"
    eventually(lambda: one.ssh(f"{one.name}-ctl", query) == "", 240, pause_s=2)
    assert one.ssh(f"{one.name}-ctl", drains, rc=None) == before
