"""Machines of somebody's own run their playbooks themselves: killed, raised, looked at ahead, repaired."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

from tests.support.cluster import Cluster
from tests.support.faults import eventually_none
from tests.support.lab import Kind, lab
from tests.support.own import as_before, state
from tests.support.verbs import Clusterctl
from tests.support.victim import Victim

pytestmark = [pytest.mark.sweep, pytest.mark.platform("real", "debian-12")]

NODES = ("node2", "node3")
FOLDER = "/var/lib/clusterctl-ansible"
BEGUN_S = 60.0


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("kind", ["el", "debian"])
def test_nodes_configure_themselves(
    kind: Kind, no_residue: None, cluster_name: str, clusterctl: Clusterctl, tmp_path: Path
) -> None:
    spec = tmp_path / "own.yaml"
    with lab(kind, 3, shared="/shared", internet=kind == "debian") as machines:
        before = {host.name: state(machines, host.name) for host in machines.hosts}
        spec.write_text(machines.spec(cluster_name, provider={"ansible": "nodes"}))
        try:
            victim = Victim(clusterctl, "-f", spec, "up", "--yes")
            victim.until_phase("converge")
            deadline = time.monotonic() + BEGUN_S
            while any(machines.enter(node, ["test", "-e", f"{FOLDER}/inventory.yml"]).rc for node in NODES):
                assert time.monotonic() < deadline
            assert machines.enter(NODES[0], ["stat", "-c", "%a %u", FOLDER]).stdout == "700 0\n"
            assert victim.hit("kill").code == -signal.SIGKILL
            assert eventually_none(clusterctl.home) == []

            one = Cluster(cluster_name, spec, clusterctl, clusterctl("-o", "json", "-f", spec, "up").json)
            assert one.raised["probed"] == list(NODES)
            assert one.json("plan", "--diff")["tasks"] == []
            for node in NODES:
                one.ssh(node, "sudo sh -c 'rm /etc/munge/munge.key; systemctl stop slurmd'")
            foreseen = one.json("plan", "--diff")["tasks"]
            assert {task["host"] for task in foreseen} == set(NODES)
            repaired = {(each["host"], each["what"]) for each in one.json("up")["repaired"]}
            assert repaired >= {(node, "/etc/munge/munge.key was missing") for node in NODES}
            spec.write_text(machines.spec(cluster_name))  # what they have done is right from here, too
            again = clusterctl("-o", "json", "-f", spec, "up", "--reconfigure").json["phases"]
            (note,) = (phase["note"] for phase in again if phase["phase"] == "converge")
            assert note.endswith(" 0 changed")
            for node in NODES:
                assert machines.enter(node, ["test", "-e", FOLDER]).rc == 1
        finally:
            clusterctl("-f", spec, "down", "--yes", "--discard")
        as_before(machines, before)
