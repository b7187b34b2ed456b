"""What a spec and the facts of machines make of them: roles, addresses, names, the network."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.errors import ProvisionError
from clusterctl.hosts.probe import HostFacts
from clusterctl.providers.onprem.members import inventory, members
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.onprem import OnpremSettings
from clusterctl.state.inventory import Inventory
from tests.support.messages import refused


def spec_of(**provider: Any) -> ClusterSpec:
    given = {
        "type": "onprem",
        "controller": "n1",
        "login": ["n3"],
        "hosts": {"n[1-3]": "10.0.0.[1-3]"},
        **provider,
    }
    return ClusterSpec.model_validate(
        {"version": 1, "name": "d", "provider": given, "partitions": [{"name": "t", "hosts": "n[1-2]"}]}
    )


def facts(name: str, *addresses: str, version: str = "12") -> HostFacts:
    system = {"id": "debian", "version": version, "name": "Debian", "machine": "x86_64",
              "python": (3, 11), "systemd": True, "cpus": 2, "memory_mib": 2000,
              "hostname": f"{name}.lab", "machine_id": name}  # fmt: skip
    gpus = {"cards": 0, "shown": (), "driver": None, "nouveau": False, "secure_boot": False}
    return HostFacts.model_validate(
        {"time": 0, "uid": 0, "system": system, "addresses": ("127.0.0.1/8", *addresses), "resolved": {},
         "space": (), "listeners": {}, "lock_holders": (), "selinux": "disabled", "units": (), "gpus": gpus,
         "accounts": {}}
    )  # fmt: skip


def made(spec: ClusterSpec, seen: dict[str, HostFacts]) -> Inventory:
    assert isinstance(spec.provider, OnpremSettings)
    asked = members(spec, spec.provider)
    keys = {one.name: "ssh-ed25519 AAAA" for one in asked}
    return inventory(spec, spec.provider, asked, seen, keys, cluster_id="abc123", proxies={}, silent={})


def test_roles_names_and_the_network_of_the_controller() -> None:
    seen = {
        f"n{i}": facts(f"n{i}" if i < 3 else "door", f"10.0.0.{i}/24", f"172.17.0.{i}/16") for i in (1, 2, 3)
    }
    found = made(spec_of(), seen)
    assert {host.name: host.roles for host in found.hosts} == {
        "n1": ("controller", "compute"),
        "n2": ("compute",),
        "n3": ("login",),
    }
    assert [host.partition for host in found.hosts] == ["t", "t", None]
    assert (found.network, found.controller.distribution) == ("10.0.0.0/24", "debian-12")
    assert [host.hostname for host in found.hosts] == [None, None, "door"]
    assert {host.ssh_address for host in found.hosts} == {None}


def test_slurm_has_another_network_than_ssh() -> None:
    seen = {f"n{i}": facts(f"n{i}", f"10.0.0.{i}/24", f"192.168.7.{i}/24") for i in (1, 2, 3)}
    found = made(spec_of(network="192.168.7.0/24"), seen)
    assert [(host.address, host.ssh_address) for host in found.hosts] == [
        (f"192.168.7.{i}", f"10.0.0.{i}") for i in (1, 2, 3)
    ]


def test_machines_that_are_not_on_the_network_are_each_named() -> None:
    seen = {"n1": facts("n1", "10.0.0.1/24"), "n2": facts("n2", "10.0.9.2/24"), "n3": facts("n3")}
    with pytest.raises(ProvisionError) as caught:
        made(spec_of(), seen)
    assert [failure.host for failure in caught.value.failures] == ["n2", "n3"]
    assert "10.0.9.2/24" in caught.value.failures[0].cause


def test_a_controller_whose_address_is_not_its_own_needs_the_network_said() -> None:
    seen = {f"n{i}": facts(f"n{i}", f"10.1.0.{i}/24", f"10.2.0.{i}/24") for i in (1, 2, 3)}
    with refused("no-common-network", ProvisionError, "n1"):
        made(spec_of(), seen)
    assert made(spec_of(network="10.2.0.0/24"), seen).controller.address == "10.2.0.1"


def test_machines_of_two_releases_are_no_cluster() -> None:
    seen = {f"n{i}": facts(f"n{i}", f"10.0.0.{i}/24", version="12" if i < 3 else "11") for i in (1, 2, 3)}
    with pytest.raises(ProvisionError) as caught:
        made(spec_of(), seen)
    assert [failure.host for failure in caught.value.failures] == ["n3"]


@pytest.mark.parametrize(
    ("shared", "kind"),
    [
        ({}, "nfs"),
        ({"kind": "existing"}, "existing"),
        ({"kind": "none"}, "none"),
        ({"server": "nas", "export": "/vol"}, "server"),
    ],
)
def test_where_the_shared_folder_comes_from(shared: dict[str, str], kind: str) -> None:
    seen = {f"n{i}": facts(f"n{i}", f"10.0.0.{i}/24") for i in (1, 2, 3)}
    assert made(spec_of(shared=shared), seen).shared_folder.kind == kind


def workstation(address: str) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "d",
            "provider": {"type": "onprem", "controller": "desk", "hosts": {"desk": address}},
            "partitions": [{"name": "t", "hosts": "desk"}],
        }
    )


def test_one_machine_exports_its_folder_to_nobody() -> None:
    found = made(workstation("10.0.0.1"), {"desk": facts("desk", "10.0.0.1/24")})
    assert (found.shared_folder.kind, found.controller.is_compute) == ("existing", True)


@pytest.mark.parametrize("address", ["localhost", "127.0.0.1", "::1"])
def test_this_machine_talks_with_itself_whatever_networks_it_has(address: str) -> None:
    found = made(workstation(address), {"desk": facts("box", "10.0.0.1/24", "172.17.0.1/16")})
    assert (found.network, found.controller.address) == ("127.0.0.0/8", "127.0.0.1")
    assert found.controller.hostname == "box"
