"""An ordinary user's clusterctl where PID 1 is systemd and the firewall is shut, as beside Docker.

The host is a machine made for this module (tests/support/nested.py). Before `up` its packet filter drops all
that it should forward, and all that comes in unasked; it does not forward; and where the kernel has
br_netfilter, traffic between a bridge's ports would go through that filter too.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.nested import CLUSTERCTL, Host, booted, lent_image

pytestmark = pytest.mark.platform("real", "systemd-host")

USER = "ada"
NODES = ("nested-ctl", "nested-train-1", "nested-train-2")
SPEC = "version: 1\nname: nested\nprovider: {type: local}\npartitions:\n  - {name: train, nodes: 2}\n"
PEOPLE = f"""\
useradd --create-home {USER}
echo '{USER} ALL=(ALL) NOPASSWD: ALL' > /etc/sudoers.d/{USER}
printf '{SPEC}' | runuser -u {USER} -- tee ~{USER}/cluster.yaml
"""
FIREWALL = """\
iptables -P FORWARD DROP
iptables -N DOCKER-USER
iptables -A DOCKER-USER -j RETURN
iptables -A FORWARD -j DOCKER-USER
iptables -A INPUT -i lo -j ACCEPT
iptables -A INPUT -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT
iptables -P INPUT DROP
nft add table inet shut
nft add chain inet shut forward '{ type filter hook forward priority 10; policy drop; }'
echo 0 > /proc/sys/net/ipv4/ip_forward
"""
BRIDGE_FILTER = "/proc/sys/net/bridge/bridge-nf-call-iptables"


@pytest.fixture(scope="module")
def host(no_residue: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Host]:
    images = lent_image(tmp_path_factory.mktemp("bake"))
    with booted(tmp_path_factory.mktemp("host"), images) as one:
        one.sh(PEOPLE + FIREWALL)
        yield one


def clusterctl(host: Host, *argv: str) -> Any:
    """A verb's answer under `-o json`."""
    return host(CLUSTERCTL, "-o", "json", *argv, user=USER, timeout_s=300).json


def machines(host: Host) -> list[str]:
    listed = json.loads(host("machinectl", "list", "--output=json").stdout)
    assert all(one["class"] == "container" and one["service"] == "systemd-nspawn" for one in listed), listed
    return sorted(one["machine"] for one in listed)


@pytest.fixture(scope="module")
def before(host: Host, record_testsuite_property: Any) -> dict[str, str]:
    """The host before `up`. Whether this kernel has br_netfilter goes into the report."""
    offered = host.sh(
        f"if test -e {BRIDGE_FILTER}; then echo 1 > {BRIDGE_FILTER}; echo yes; else echo no; fi"
    )
    record_testsuite_property("br_netfilter", offered.strip())
    return host.look()


@pytest.fixture(scope="module")
def cluster(host: Host, before: dict[str, str]) -> dict[str, Any]:
    """What `up` said."""
    answer: dict[str, Any] = clusterctl(host, "up")
    return answer


def test_up_proves_itself(host: Host, cluster: dict[str, Any]) -> None:
    assert cluster["ready"]
    assert cluster["probed"] == list(NODES[1:])
    assert clusterctl(host, "status")["ready"]


def test_the_hosts_filter_never_saw_the_nodes_traffic(host: Host, cluster: dict[str, Any]) -> None:
    shown = host("iptables", "--list", "FORWARD", "--verbose", "--exact", "--numeric").stdout
    assert "policy DROP 0 packets, 0 bytes" in shown


def test_machinectl_lists_the_nodes(host: Host, cluster: dict[str, Any]) -> None:
    ask = ("hostname", "--pipe", "--quiet")
    names = [host("systemd-run", "--machine", one, *ask[1:], ask[0]).stdout.strip() for one in machines(host)]
    assert names == list(NODES)


def test_nodes_live_in_units_of_machine_slice(host: Host, cluster: dict[str, Any]) -> None:
    for machine in machines(host):
        unit = f"clusterctl-{machine}.service"
        shown = host("systemctl", "show", "--property=Slice,ActiveState,Delegate", unit).stdout
        assert set(shown.split()) == {"Slice=machine.slice", "ActiveState=active", "Delegate=yes"}
        leader = host("machinectl", "show", "--property=Leader", "--value", machine).stdout.strip()
        assert f"/machine.slice/{unit}/" in host("cat", f"/proc/{leader}/cgroup").stdout


def test_a_job_runs_across_the_nodes_as_its_user(host: Host, cluster: dict[str, Any]) -> None:
    assert clusterctl(host, "submit", "probe", "--nodes", "2", "--wait")["state"] == "COMPLETED"
    (job,) = (job for job in clusterctl(host, "jobs")["jobs"] if job["name"] == "probe")
    assert job["user"] == USER


def test_what_was_written_for_the_user_is_theirs(host: Host, cluster: dict[str, Any]) -> None:
    others = host.sh(f"find ~{USER} ! -user {USER}")
    assert others == ""


@pytest.mark.sweep  # test_convergence.py
def test_a_node_ended_behind_our_back_comes_back(host: Host, cluster: dict[str, Any]) -> None:
    before = machines(host)
    host("machinectl", "terminate", before[-1])
    host.sh(f"while machinectl show {before[-1]} >/dev/null 2>&1; do sleep 0.1; done", timeout_s=60)
    assert machines(host) == before[:-1]
    assert clusterctl(host, "up")["ready"]
    assert machines(host) == before


def test_down_leaves_the_host_as_it_was(host: Host, cluster: dict[str, Any], before: dict[str, str]) -> None:
    clusterctl(host, "down", "--yes")
    assert host.look() == before
    assert host.sh(f"ls ~{USER}/.local/state/clusterctl") == "runs.jsonl\n", "where runs are"
    assert before["machines"] == before["units"] == before["failed"] == before["processes"] == ""
    assert re.search(r"^net\.ipv4\.ip_forward = 0$", before["sysctl"], re.MULTILINE)
    units = host("journalctl", "--no-pager", "--unit=clusterctl-*").stdout
    assert "Trying to halt container" in units
    assert [line for line in units.splitlines() if "Failed with result" in line] == []
