"""Machines as near to Rocky Linux as can be had become a cluster, train together, and are given back.

They are somebody's own: an ordinary user with a key and sudo, a running firewall, dnf and its repositories.
What such a machine is and what it can't show: tests/support/el, docs/onprem.md.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster, records
from tests.support.lab import Lab, lab
from tests.support.verbs import Clusterctl

ROOT = Path(__file__).resolve().parents[2]
BIN = Path(sys.executable).parent
NODES = ["node2", "node3"]
# What a cluster brings along, by its traces: accounts, programs, units, folders, firewall policies.
TRACES = """\
set +e
getent passwd clusterctl slurm munge
rpm -qa | grep -E '^(slurm|munge|openmpi|mariadb|epel-release|python3.11)' | sort
ls -d /etc/slurm /etc/munge /opt/clusterctl /var/lib/mysql /etc/sudoers.d/clusterctl 2>/dev/null
systemctl list-units --all --plain --no-legend 'slurm*' 'munge*' 'mariadb*'
firewall-cmd --get-policies; firewall-cmd --get-zones
cat /etc/hosts
"""


def traces(machines: Lab) -> dict[str, str]:
    """What of a cluster is on each machine."""
    return {host.name: host.inside.sh(TRACES, rc=None) for host in machines.hosts}


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    with lab("el", 3, shared="/shared") as one:
        for host in one.hosts:
            host.inside.sh("dnf -q -y install firewalld >/dev/null; systemctl enable --now firewalld")
        yield one


@pytest.fixture(scope="module")
def before(machines: Lab) -> dict[str, str]:
    return traces(machines)


@pytest.fixture(scope="module")
def rocky(
    machines: Lab,
    before: dict[str, str],
    cluster_name: str,
    clusterctl_home: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Cluster]:
    """The cluster of them, up."""
    cwd = tmp_path_factory.mktemp("rocky")
    file = cwd / "cluster.yaml"
    file.write_text(machines.spec(cluster_name))
    runner = Clusterctl(clusterctl_home, cwd)
    try:
        up = runner("-o", "json", "-f", file, "up", "--yes")
        yield Cluster(cluster_name, file, runner, up.json)
    finally:
        runner("-f", file, "down", "--yes", "--discard-runs", rc=None)


def test_up_proves_itself(rocky: Cluster) -> None:
    assert rocky.raised["ready"]
    assert rocky.raised["probed"] == NODES


def test_the_distributions_own_packages_are_there(rocky: Cluster) -> None:
    assert rocky.ssh("node2", "rpm -q --qf '%{name} ' slurm-slurmd openmpi") == "slurm-slurmd openmpi "
    assert (
        rocky.ssh("node1", "systemctl is-active slurmctld slurmdbd mariadb munge").split() == ["active"] * 4
    )
    assert rocky.ssh("node3", "sudo firewall-cmd --state").strip() == "running"


def test_two_nodes_train_together_and_the_run_comes_home(rocky: Cluster) -> None:
    job = rocky.json("submit", "train", "--nodes", "2", "--wait", "--", "--epochs", "2")
    assert job["ok"]
    run = rocky.run_of(job["job_id"])
    (start,) = (record for record in records(run / "metrics.jsonl") if record["kind"] == "run")
    assert (start["world_size"], [rank["host"] for rank in start["ranks"]]) == (2, NODES)
    assert json.loads((run / "run.json").read_text())["state"] == "COMPLETED"
    assert job["job_id"] in (run / "sacct.json").read_text()


def test_up_again_leaves_all_as_it_is(rocky: Cluster) -> None:
    again = rocky.json("up", "--yes")
    assert again["ready"]
    assert again.get("mended", []) == []


def test_the_roles_change_nothing_when_run_again(rocky: Cluster) -> None:
    argv = [BIN / "ansible-playbook", "-i", rocky.workspace / "inventory.yml", ROOT / "ansible/site.yml"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=300, check=False, cwd="/")
    assert done.returncode == 0, done.stdout + done.stderr
    recap = done.stdout.rsplit("PLAY RECAP", 1)[1]
    assert recap.count("changed=0") == 3, done.stdout


def test_down_gives_them_back_as_they_were(rocky: Cluster, machines: Lab, before: dict[str, Any]) -> None:
    assert not any(traces(machines)[host] == said for host, said in before.items())
    rocky("down", "--yes")
    assert traces(machines) == before
