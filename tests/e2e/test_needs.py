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

PATIENCE_S = 60
ENV = "/opt/clusterctl/env/bin"


@dataclass(frozen=True)
class Away:
    """How root takes a need from a node and gives it back, and what its check then says.

    by_up: condition of the error with which `up` ends; "" if `up` repairs the node.
    """

    take: str
    give: str
    code: str
    says: str
    by_up: str


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
    "the jobs' Python": Away(
        f"chmod 750 {ENV}", f"chmod 755 {ENV}", "job-python", "Permission denied", by_up=""
    ),
    "MPI": Away(
        "mkdir /root/mpi; mv /usr/lib/x86_64-linux-gnu/libmpi.so.40* /root/mpi",
        "mv /root/mpi/* /usr/lib/x86_64-linux-gnu; rmdir /root/mpi",
        "package-incomplete",
        "lacks /usr/lib/x86_64-linux-gnu/libmpi.so.40",
        by_up="host-unfit/package-incomplete",
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
    text = command.replace("'", "'\\''")
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


@pytest.mark.parametrize("need", NEEDS)
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
