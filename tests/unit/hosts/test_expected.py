"""The ports, accounts, GPUs and space that a spec requires of its hosts."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.hosts.roles import (
    host_facts_request,
    host_roles,
    probe_requests,
    requirements_of_hosts,
    role_files,
    role_ports,
)
from clusterctl.spec.load import parse_spec
from clusterctl.state.inventory import CONTROLLER
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of, inventory_of

SPEC = """\
version: 1
name: demo
provider: {type: onprem, controller: a, hosts: {a: 10.0.0.1, b: 10.0.0.2}}
partitions: [{name: train, hosts: b}]
scheduler: SCHEDULER
"""
HOSTS = (host_of("a", CONTROLLER, address="10.0.0.1"), host_of("b", address="10.0.0.2"))


def test_role_is_noted_only_on_the_hosts_that_it_runs_on() -> None:
    """`down` takes back what the roles of a host change there: no database of a node."""
    spec = parse_spec(SPEC.replace("SCHEDULER", "slurm"), Path("cluster.yaml"))
    roles = host_roles(spec, inventory_of(*HOSTS))
    assert set(roles["a"]) ^ set(roles["b"]) == {
        *("mariadb", "slurmdbd", "slurmctld"),
        *("slurmd",),
    }


@pytest.mark.parametrize(
    ("scheduler", "ports"),
    [
        ("slurm", {"a": {6817, 6819}, "b": {6816, 6818}}),
        ("none", {"a": set(), "b": set()}),
    ],
)
def test_required_ports_depend_on_the_scheduler(scheduler: str, ports: dict[str, set[int]]) -> None:
    spec = parse_spec(SPEC.replace("SCHEDULER", scheduler), Path("cluster.yaml"))
    assert {host.name: {*role_ports(spec, host.roles)} for host in HOSTS} == ports
    found = requirements_of_hosts(spec, HOSTS, installed=())
    assert {name: one.cgroups for name, one in found.items()} == {
        "a": False,
        "b": scheduler == "slurm",
    }


@pytest.mark.parametrize(
    ("scheduler", "daemons"), [("slurm", {"slurm": 64030, "munge": 64031}), ("none", {})]
)
def test_uids_of_slurm_and_munge_must_be_free(
    tmp_path: Path, scheduler: str, daemons: dict[str, int]
) -> None:
    spec = parse_spec(SPEC.replace("SCHEDULER", scheduler), Path("cluster.yaml"))
    wanted = daemons | {user.name: user.uid for user in spec.users}
    assert {
        name: one.accounts for name, one in requirements_of_hosts(spec, HOSTS, installed=()).items()
    } == {
        "a": wanted,
        "b": wanted,
    }
    host_request = host_facts_request(spec, HOSTS).host
    assert host_request is not None
    assert set(wanted) <= set(host_request["accounts"])
    assert set(wanted.values()) <= set(host_request["uids"])
    Workspace(tmp_path).create_secrets()
    inventory = inventory_of(hosts=HOSTS, provider="onprem", scheduler=scheduler, baked=False)
    requests = probe_requests(spec, inventory, Workspace(tmp_path))
    for request in requests.values():
        assert {
            name: uid for name, uid in request.numbers.items() if name != "clusterctl"
        } == wanted
    # slurmd tells the size of nodes, unless that is known.
    assert {name: one.hardware for name, one in requests.items()} == {"a": "gpus", "b": "all"}
    shares = replace(inventory, hosts=[replace(host, cpus=1) for host in HOSTS])
    requests = probe_requests(spec, shares, Workspace(tmp_path))
    assert all(request.hardware == "gpus" for request in requests.values())


@pytest.mark.parametrize("cupy", [True, False])
def test_hosts_with_gpus_need_room_for_cupy(cupy: bool) -> None:
    text = SPEC.replace("SCHEDULER", "slurm").replace(
        "hosts: b}]", "hosts: b, gpus: {type: t4, count: 1}}]"
    )
    spec = parse_spec(f"{text}software: {{cupy: {str(cupy).lower()}}}\n", Path("cluster.yaml"))
    found = requirements_of_hosts(spec, HOSTS, installed=())
    assert (found["b"].free_mib["/opt"] > found["a"].free_mib["/opt"]) == cupy


@pytest.mark.parametrize(("address", "here"), [("10.0.0.1", False), ("localhost", True)])
def test_local_machine_is_recognized_by_the_spec(address: str, here: bool) -> None:
    provider = f"{{type: onprem, controller: a, hosts: {{a: {address}}}, network: 10.0.0.0/24}}"
    text = (
        f"version: 1\nname: desk\nprovider: {provider}\npartitions: [{{name: train, hosts: a}}]\n"
    )
    found = requirements_of_hosts(
        parse_spec(text, Path("cluster.yaml")), HOSTS[:1], installed=["a"]
    )
    assert found["a"].here == here


def test_probed_files_are_those_of_the_roles_of_the_host() -> None:
    spec = parse_spec(SPEC.replace("SCHEDULER", "slurm"), Path("cluster.yaml"))
    leads, computes = (role_files(spec, host.roles) for host in HOSTS)
    assert {"/etc/hosts", "/etc/munge/munge.key", "/etc/slurm/slurm.conf"} <= leads & computes
    assert "/etc/slurm/slurmdbd.conf" in leads - computes
    # Nobody else has these.
    assert not [path for path in leads | computes if "clusterctl" in path]
    host_request = host_facts_request(spec, HOSTS).host
    assert host_request is not None
    assert set(host_request["files"]) == leads | computes
    without = parse_spec(SPEC.replace("SCHEDULER", "none"), Path("cluster.yaml"))
    assert "/etc/hosts" in role_files(without, HOSTS[0].roles)
    assert not [
        path for path in role_files(without, HOSTS[0].roles) if "slurm" in path or "munge" in path
    ]
