"""What nodes lack, as their health programs report it."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from clusterctl.errors import UnreachableError
from clusterctl.hosts.needs import REPORT, Trial, UnmetNeed, lacks_of, last_trial, text_of
from clusterctl.hosts.roles import node_needs
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import SharedFolder
from clusterctl.transport.base import Transport
from tests.support.inventories import CTL, INVENTORY
from tests.support.scripted import ScriptedTransport, Step

SPEC = ClusterSpec.model_validate(
    {
        "version": 1,
        "name": "d",
        "provider": {"type": "local"},
        "partitions": [{"name": "train", "nodes": 2}],
    }
)
LACK = UnmetNeed("gpu-devices", "device files are missing", "/dev/nvidia0 is missing", "see dmesg")


def test_lacks_are_those_of_nodes_that_answer() -> None:
    need = {key: getattr(LACK, key) for key in ("code", "what", "why", "fix")}
    unseen = {"code": "not-looked-at", "why": "packages: rpm does not end within 8 s"}
    hosts: dict[str, Transport] = {
        "n1": ScriptedTransport([Step(REPORT, json.dumps([need, unseen, need]))]),
        "n2": ScriptedTransport([Step(REPORT, "[]")]),
        "n3": ScriptedTransport([Step(REPORT, error=UnreachableError("no route"))]),
        # Of an earlier version, which prints its problems.
        "n4": ScriptedTransport([Step(REPORT, "GPU 0: 96 C\n")]),
    }
    assert lacks_of(hosts, hosts.__getitem__, within_s=60) == {"n1": [LACK, LACK]}
    assert text_of([LACK]) == LACK.why


@pytest.mark.parametrize(
    "record", ["", "{}", '{"trial": 3}', '{"trial": {"at": "x", "nodes": [], "failed": {}}}']
)
def test_last_trial_is_none_unless_it_is_recorded(record: str) -> None:
    asked = Step(("sudo", "-n", "cat", "*"), record)
    assert last_trial(ScriptedTransport([asked]), within_s=1) is None


def test_last_trial_is_what_the_controller_has_recorded() -> None:
    trial = {"at": 7, "nodes": ["n1", "n2"], "failed": {"n2": "no room"}}
    asked = Step(("sudo", "-n", "cat", "*"), json.dumps({"marks": {}, "trial": trial}))
    found = last_trial(ScriptedTransport([asked]), within_s=1)
    assert found == Trial(7, ("n1", "n2"), {"n2": "no room"})
    assert "n2: no room" in str(found)


def test_needs_of_a_host_are_those_of_its_roles() -> None:
    by_role = {
        role: {need["code"] for need in node_needs(SPEC, INVENTORY, host)}
        for host in INVENTORY.hosts
        for role in host.roles
    }
    of_all = {"shared-folder-away", "account-differs", "disk-full", "clock", "unit-failed"}
    of_all |= {"package-incomplete"}
    of_controller = {
        "slurmctld-restarts",
        "slurmdbd-restarts",
        "database-failed",
        "home-missing",
    }
    of_nodes = {
        "job-python",
        "folder-unwritable",
        "fabric-away",
        "gpu-devices",
        "gpu-fault",
        "gpu-unhealthy",
    }
    assert by_role == {
        "controller": of_all | of_controller,
        "compute": of_all | of_nodes | {"slurmd-restarts", "slurmd-unfit"},
    }


def test_controller_that_serves_the_shared_folder_needs_its_nfs_server() -> None:
    inventory = replace(INVENTORY, shared_folder=SharedFolder(kind="nfs"))
    servers = [
        host.name
        for host in inventory.hosts
        if "nfs-server-failed" in {need["code"] for need in node_needs(SPEC, inventory, host)}
    ]
    assert servers == [CTL]
