"""Specs for machines of one's own: ranges of hosts, and what must hold between the fields."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import BadValueError, SpecError
from clusterctl.spec.hosts import OnpremHost, expand, is_this_machine
from clusterctl.spec.load import dump_spec, load_spec, parse_spec
from clusterctl.spec.providers.onprem import OnpremSettings

BASE = Path(__file__).with_name("onprem-base.yaml")


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("head", "head"),
        ("gpu[01-03]", "gpu01 gpu02 gpu03"),
        ("gpu[9-11]", "gpu9 gpu10 gpu11"),
        ("a[1,3-4]b", "a1b a3b a4b"),
        ("r[1-2]n[1-2]", "r1n1 r1n2 r2n1 r2n2"),
        ("a, b[1-2]", "a b1 b2"),
    ],
)
def test_range_names_hosts(text: str, names: str) -> None:
    assert " ".join(expand(text)) == names


@pytest.mark.parametrize(
    "text", ["", "a,", "a[1", "a]1", "a[]", "a[x]", "a[3-1]", "a[1-5000]", "a[1,1]"]
)
def test_invalid_host_range_is_refused(text: str) -> None:
    with pytest.raises(BadValueError):
        expand(text)


def test_host_range_gives_each_host_its_address_and_access() -> None:
    spec = load_spec(BASE)
    assert isinstance(spec.provider, OnpremSettings)
    machines = spec.provider.machines
    assert {name: host.address for name, host in machines.items()} == {
        "head": "10.0.0.10",
        "front": "10.0.0.11",
        "gpu01": "10.0.0.21",
        "gpu02": "10.0.0.22",
        "gpu03": "10.0.0.23",
        "gpu07": "10.0.0.27",
        "big": "big",
    }
    assert (machines["front"].port, machines["gpu07"].port) == (2222, 22)
    assert {host.user for host in machines.values()} == {"rocky"}
    assert spec.controller_host == "head"
    assert spec.node_names(spec.partitions[0]) == ("gpu01", "gpu02", "gpu03", "gpu07")
    assert spec.partitions[0].nodes == 4
    assert parse_spec(dump_spec(spec), "dump.yaml") == spec


@pytest.mark.parametrize(
    ("hosts", "more", "keys"),
    [
        ("desk: localhost", "", ""),
        ("desk: {address: '::1', become: none}", "", ""),
        ("desk: localhost, gpu1: 10.0.0.1", "", "provider.hosts.desk"),
        ("desk: {address: 127.0.0.1, port: 2222}", "", "provider.hosts.desk.port"),
        ("desk: localhost", "access: {user: rocky}", "provider.access.user"),
        ("localhost: ", "", "provider.hosts.localhost"),
    ],
)
def test_localhost_is_single_host_cluster_without_login(hosts: str, more: str, keys: str) -> None:
    name = hosts.partition(":")[0]
    provider = f"{{type: onprem, controller: {name}, hosts: {{{hosts}}}, {more}}}"
    text = f"version: 1\nname: d\nprovider: {provider}\npartitions: [{{name: t, hosts: {name}}}]\n"
    try:
        spec = parse_spec(text, "cluster.yaml")
        assert parse_spec(dump_spec(spec), "dump.yaml") == spec
        found = ""
    except SpecError as exc:
        found = " ".join(problem.key for problem in exc.problems)
    assert found == keys


@pytest.mark.parametrize(
    "address",
    ["10.0.0.1", "fe80::1", "fe80::[1-4]", "node-7.example.org", "10.0.0.[1-3]", "10.0.0.1,a"],
)
def test_addresses_and_names_lead_to_hosts(address: str) -> None:
    assert OnpremHost(address=address).address == address


@pytest.mark.parametrize(
    ("address", "is_here"),
    [
        *(
            (one, True)
            for one in ("localhost", "LOCALHOST.localdomain", "127.0.0.2", "0.0.0.0", "::", "::1")  # noqa: S104
        ),
        ("::ffff:127.0.0.1", True),
        *(
            (one, False)
            for one in ("::ffff:10.0.0.1", "10.0.0.1", "localhost.example.org", "fe80::1", "")
        ),
    ],
)
def test_which_addresses_are_this_machine(address: str, is_here: bool) -> None:
    assert is_this_machine(address) is is_here
