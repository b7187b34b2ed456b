"""The role firewall: the ports that it opens, and the rules that a reload would drop."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from clusterctl.spec.names import ALIVE_PORT, FENCE_PORT, SLURMCTLD_PORT, SLURMD_PORT, SLURMDBD_PORT
from clusterctl.state.inventory import SRUN_PORTS
from tests.support.plays import load_module, role_data

pytestmark = pytest.mark.platform("stand-in", "firewalld")

CAPTURES = Path(__file__).parent / "captures"


@pytest.fixture(scope="module")
def policy() -> ModuleType:
    return load_module("firewalld_policy")


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314  # ours


def test_firewall_role_opens_the_ports_of_slurm_conf() -> None:
    ports = role_data("firewall")
    assert ports["firewall_srun"] == [f"{SRUN_PORTS}/tcp"]
    assert ports["firewall_controller"] == [f"{SLURMCTLD_PORT}/tcp", f"{SLURMDBD_PORT}/tcp"]
    assert ports["firewall_compute"] == [f"{SLURMD_PORT}/tcp", f"{ALIVE_PORT}-{FENCE_PORT}/tcp"]


def test_firewall_opens_only_cluster_addresses_and_ports(policy: ModuleType) -> None:
    root = parsed(policy.policy_xml("clusterctl", ["6818/tcp", "61000-64999/tcp"]))
    # What the zones say still holds.
    assert (root.get("target"), root.get("priority")) == (
        "CONTINUE",
        "-1",
    )
    rules = root.findall("rule")
    assert [rule.find("port").attrib for rule in rules] == [  # type: ignore[union-attr]
        {"port": "6818", "protocol": "tcp"},
        {"port": "61000-64999", "protocol": "tcp"},
    ]
    assert all(rule.find("source").attrib == {"ipset": "clusterctl"} for rule in rules)  # type: ignore[union-attr]
    entries = parsed(policy.ipset_xml(["10.9.0.10", "10.9.0.9"])).findall("entry")
    assert [entry.text for entry in entries] == ["10.9.0.9", "10.9.0.10"]


def zones(policy: ModuleType, which: str) -> Any:
    return policy.sections("zone", (CAPTURES / f"firewalld-1.3.3-zones-{which}.txt").read_text())


def test_firewall_policy_names_rules_that_a_reload_drops(policy: ModuleType) -> None:
    found = list(policy.differences(zones(policy, "running"), zones(policy, "permanent")))
    assert found == [
        "zone public: ports 8080/tcp (not permanent)",
        (
            'zone public: rich rules rule family="ipv4" source address="192.0.2.7" drop (not '
            "permanent)"
        ),
    ]


def test_firewall_policy_ignores_interfaces_added_at_runtime(policy: ModuleType) -> None:
    running = (CAPTURES / "firewalld-1.3.3-zones-running.txt").read_text()
    assert "interfaces: eno1" in running
    assert "interfaces: eno1" not in (CAPTURES / "firewalld-1.3.3-zones-permanent.txt").read_text()
    assert not list(policy.differences(zones(policy, "permanent"), zones(policy, "permanent")))
    assert not [key for key, words in zones(policy, "running").items() if "eno1" in words]
