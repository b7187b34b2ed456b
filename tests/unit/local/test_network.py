"""The subnet of a local cluster avoids networks of VPNs, containers and other clusters."""

import json
from ipaddress import IPv4Network

import pytest

from clusterctl.errors import MachineError, ProvisionError
from clusterctl.providers.local import system
from clusterctl.providers.local.layout import bridge_name, machine_name, netns_name
from clusterctl.providers.local.system import choose_subnet, sorting
from tests.support.messages import refused

# Not a fragment, of the network, to its bridge: in the words of tc.
WHOLE_AND_FROM_HERE = "match u16 0 0x3fff at 6 match ip src 10.7.1.0/24 match ip dst 10.7.1.1/32"


def networks(*texts: str) -> tuple[IPv4Network, ...]:
    return tuple(IPv4Network(text) for text in texts)


def test_choose_subnet_returns_a_private_24() -> None:
    subnet = choose_subnet("a1b2c3", ())
    assert subnet.prefixlen == 24
    assert subnet.is_private


def test_choose_subnet_depends_on_the_cluster_id() -> None:
    assert choose_subnet("a1b2c3", ()) == choose_subnet("a1b2c3", ())
    assert len({choose_subnet(f"{i:06x}", ()) for i in range(20)}) == 20


def test_choose_subnet_avoids_a_block_routed_by_a_vpn() -> None:
    subnet = choose_subnet("a1b2c3", networks("10.0.0.0/8", "172.17.0.0/16"))
    assert subnet.overlaps(IPv4Network("172.16.0.0/12"))
    assert not subnet.overlaps(IPv4Network("172.17.0.0/16"))


def test_used_networks_ignores_a_split_default_route(monkeypatch: pytest.MonkeyPatch) -> None:
    routes = [{"dst": dst} for dst in ("default", "0.0.0.0/1", "128.0.0.0/1", "10.0.0.0/8")]
    links = [{"addr_info": [{"local": "172.17.0.1", "prefixlen": 16}]}]
    answers = {"route": routes, "addr": links}
    monkeypatch.setattr(system, "_ip", lambda *argv, action: json.dumps(answers[argv[2]]))  # noqa: ARG005
    assert system.used_networks() == networks("10.0.0.0/8", "172.17.0.0/16")


def test_choose_subnet_avoids_subnets_of_other_clusters() -> None:
    taken: list[IPv4Network] = []
    for i in range(200):
        subnet = choose_subnet("same00" if i % 2 else "other0", taken)
        assert not any(subnet.overlaps(other) for other in taken)
        taken.append(subnet)


def test_choose_subnet_without_a_free_subnet_is_an_error() -> None:
    with refused("in-use/all-subnets", MachineError) as caught:
        choose_subnet("a1b2c3", networks("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))
    assert "provider.subnet" in caught.value.fix


def test_subnet_of_the_spec_in_use_is_refused() -> None:
    with refused("in-use/subnet", MachineError, "10.7.0.0/24") as caught:
        choose_subnet("a1b2c3", networks("10.7.0.0/16"), IPv4Network("10.7.0.0/24"))
    assert "10.7.0.0/16" in caught.value.why


def test_kernel_names_fit_fifteen_characters() -> None:
    cluster = "ffffff"
    names = [
        netns_name(cluster),
        bridge_name(cluster),
        f"vb-{machine_name(cluster, 250)}",
    ]
    assert all(len(name) <= 15 for name in names), names


def test_traffic_filter_lets_only_answers_leave_the_cluster_network() -> None:
    """Packets that no filter accepts go to the class whose queue discipline drops them."""
    first, dropped, drops, arp, *others = sorting(IPv4Network("10.7.1.0/24"))
    assert first.endswith(" default 2")
    assert " classid 1:2 " in dropped
    assert drops.endswith("parent 1:2 handle 2: blackhole")
    assert " protocol arp " in arp
    assert len(others) == 6
    for line in others:
        assert " protocol ip " in line, "no IPv6"
        assert WHOLE_AND_FROM_HERE in line
    tcp = [line for line in others if "match ip protocol 6 0xff" in line]
    # What connects has SYN set and neither ACK nor RST.
    assert [line.split(" match u8 ")[-1] for line in tcp] == [
        f"{bit} {bit} at 33 flowid 1:0" for bit in ("0x10", "0x04")
    ]


def test_up_without_a_traffic_filter_says_that_nodes_reach_this_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(system.shutil, "which", lambda *_, **__: None)
    (note,) = system.close_network("a1b2c3", IPv4Network("10.7.1.0/24"))
    assert "`tc` is missing" in note
    monkeypatch.undo()

    def run(argv: list[str], **_: object) -> str:
        if "-batch" in argv:
            raise ProvisionError("failed", code="tool-failed", why="Specified qdisc not found")
        return ""

    monkeypatch.setattr(system, "run", run)
    (note,) = system.close_network("a1b2c3", IPv4Network("10.7.1.0/24"))
    assert "qdisc not found" in note
