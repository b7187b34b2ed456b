"""Clusters of one machine, and of five."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.lab import Lab, lab
from tests.support.own import raised
from tests.support.verbs import Clusterctl

pytestmark = pytest.mark.sweep


def hosts(machines: Lab, **names: str) -> dict[str, dict[str, str]]:
    """Machines by the names that a spec gives them."""
    found = {name: machines.host(box) for name, box in names.items()}
    return {name: {"address": one.address, "host_key": one.host_key} for name, one in found.items()}


def trained(cluster: Cluster, nodes: int) -> list[str]:
    """The hosts of the ranks of a training that came home."""
    job = cluster.json("submit", "train", "--nodes", str(nodes), "--wait", "--", "--epochs", "1")["job_id"]
    start = json.loads((cluster.run_of(job) / "metrics.jsonl").read_text().splitlines()[0])
    return [rank["host"] for rank in start["ranks"]]


def test_one_machine_that_calls_itself_otherwise_is_a_whole_cluster(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    with lab("debian", 1, internet=True) as machines:
        provider = {"hosts": hosts(machines, desk="node1"), "shared": {}}
        text = machines.spec(cluster_name, controller="desk", partitions={"train": "desk"}, provider=provider)
        with raised(machines, cluster_name, text, clusterctl.home, tmp_path) as cluster:
            assert cluster.raised["probed"] == ["desk"]
            assert trained(cluster, 1) == ["desk"]
            assert cluster.ssh("desk", "hostname").strip() == "node1"
            assert "unchanged: 1 hosts checked" in cluster("up").stdout


def test_a_login_host_a_controller_and_three_nodes(
    no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    with lab("debian", 5, internet=True, shared="/shared") as machines:
        text = machines.spec(
            cluster_name,
            controller="node1",
            partitions={"train": "node[3-5]"},
            provider={
                "login": ["node2"],
                "hosts": hosts(machines, **{f"node{i}": f"node{i}" for i in range(1, 6)}),
            },
        )
        with raised(machines, cluster_name, text, clusterctl.home, tmp_path) as cluster:
            assert cluster.raised["probed"] == ["node3", "node4", "node5"]
            assert trained(cluster, 3) == ["node3", "node4", "node5"]
            assert cluster.ssh("node2", "sinfo -h -o %n | sort").split() == ["node3", "node4", "node5"]
            assert cluster.ssh("node1", "pgrep -x slurmd", rc=1) == ""
