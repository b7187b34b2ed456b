"""The role firewall: what it opens, what it will not lose, and what it says where ufw is in the way."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from clusterctl.assets import asset
from clusterctl.inventory import SLURMCTLD_PORT, SLURMD_PORT, SLURMDBD_PORT, SRUN_PORTS
from tests.support.plays import program, run_tasks

CAPTURES = Path(__file__).parent / "captures"
HOSTS = ["10.9.0.1", "10.9.0.2"]
OPEN_TO_ALL = "22/tcp                     ALLOW       Anywhere\n"
ACTIVE = """\
Status: active

To                         Action      From
--                         ------      ----
"""


@pytest.fixture(scope="module")
def policy() -> ModuleType:
    path = asset("ansible") / "library" / "firewalld_policy.py"
    found = importlib.util.spec_from_file_location("firewalld_policy", path)
    assert found
    assert found.loader
    loaded = importlib.util.module_from_spec(found)
    found.loader.exec_module(loaded)
    return loaded


def parsed(text: str) -> ElementTree.Element:
    return ElementTree.fromstring(text)  # noqa: S314  # ours


def role_vars() -> dict[str, list[str]]:
    return dict(yaml.safe_load((asset("ansible") / "roles/firewall/vars/main.yml").read_text()))


def test_the_ports_are_those_that_slurm_is_told() -> None:
    ports = role_vars()
    assert f"{SRUN_PORTS}/tcp" in ports["firewall_every_host"]
    assert ports["firewall_controller"] == [f"{SLURMCTLD_PORT}/tcp", f"{SLURMDBD_PORT}/tcp"]
    assert ports["firewall_compute"] == [f"{SLURMD_PORT}/tcp"]


def test_only_the_clusters_addresses_get_through_and_only_to_these_ports(policy: ModuleType) -> None:
    root = parsed(policy.policy_xml("clusterctl", ["6818/tcp", "61000-64999/tcp"]))
    assert (root.get("target"), root.get("priority")) == ("CONTINUE", "-1")  # what the zones say still holds
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


def test_rules_that_a_reload_would_drop_are_named(policy: ModuleType) -> None:
    found = list(policy.unsaved(zones(policy, "running"), zones(policy, "permanent")))
    assert found == [
        "zone public: ports 8080/tcp (not permanent)",
        'zone public: rich rules rule family="ipv4" source address="192.0.2.7" drop (not permanent)',
    ]


def test_an_interface_that_came_while_it_runs_is_no_rule(policy: ModuleType) -> None:
    running = (CAPTURES / "firewalld-1.3.3-zones-running.txt").read_text()
    assert "interfaces: eno1" in running
    assert "interfaces: eno1" not in (CAPTURES / "firewalld-1.3.3-zones-permanent.txt").read_text()
    assert not list(policy.unsaved(zones(policy, "permanent"), zones(policy, "permanent")))
    assert not [key for key, words in zones(policy, "running").items() if "eno1" in words]


@pytest.mark.parametrize(
    ("said", "closed"),
    [
        ("Status: inactive\n", ()),
        (ACTIVE + OPEN_TO_ALL, ("10.9.0.1", "10.9.0.2")),
        (ACTIVE + OPEN_TO_ALL + "Anywhere                   ALLOW       10.9.0.1\n", ("10.9.0.2",)),
        (ACTIVE + "Anywhere                   ALLOW       10.9.0.0/24\n", ()),
    ],
    ids=["inactive", "closed", "one of two", "network"],
)
def test_an_active_ufw_is_left_alone_and_what_it_keeps_out_is_said(
    tmp_path: Path, said: str, closed: tuple[str, ...]
) -> None:
    (tmp_path / "said").write_text(said)
    program(tmp_path, "ufw", f'echo "$@" >>{tmp_path}/calls; cat {tmp_path}/said')
    done = run_tasks(tmp_path, "firewall", "ufw", firewall_addresses=HOSTS, firewall_network="10.9.0.0/24")
    assert (tmp_path / "calls").read_text() == "status\n"
    assert (done.returncode != 0) == bool(closed), done.stdout
    if closed:
        assert f"lets {', '.join(closed)} not through" in done.stdout
        assert "sudo ufw allow from 10.9.0.0/24" in done.stdout
