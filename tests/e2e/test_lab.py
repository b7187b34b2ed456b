"""The machines that stand for somebody's own (tests/support/lab.py) are what they are taken for."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from tests.support.lab import GATE, PASSWORD, Box, Lab, lab

pytestmark = pytest.mark.sweep  # what the labs of other modules are made of
BOXES = (Box("node1"), Box("node2", sudo="password", disk_mib=128), Box("node3", sudo="none"))


@pytest.fixture(scope="module")
def behind(no_residue: None) -> Iterator[Lab]:
    """Three machines behind a gate."""
    with lab("debian", BOXES, gate=True, shared="/shared") as one:
        yield one


def test_a_machine_knows_its_owner_and_nothing_of_us(behind: Lab) -> None:
    assert behind.ssh("node1", "hostname; id -un; sudo -n id -un").stdout.split() == [
        "node1",
        behind.user,
        "root",
    ]
    assert behind.ssh("node1", "getent passwd clusterctl; command -v slurmctld munged", rc=None).stdout == ""
    assert behind.ssh("node1", "ip route show default").stdout == ""
    assert behind.ssh("node1", "systemctl is-system-running").stdout.strip() == "running"


def test_machines_behind_a_gate_are_reached_through_it_alone(behind: Lab) -> None:
    direct = "timeout 3 bash -c 'echo > /dev/tcp/{}/22'"
    node, other = behind.host("node1"), behind.host("node2")
    assert behind.enter(GATE, ["bash", "-c", direct.format(node.address)]).rc == 0
    assert behind.enter("node1", ["bash", "-c", direct.format(other.address)]).rc == 0
    assert not _reached_from_here(node.address)
    assert _reached_from_here(behind.host(GATE).address)


def test_what_a_user_may_do_is_asked_for(behind: Lab) -> None:
    assert behind.ssh("node2", "sudo -n true", rc=None).rc != 0
    assert behind.ssh("node2", "sudo -S id -un", stdin=f"{PASSWORD}\n").stdout.strip() == "root"
    assert behind.ssh("node3", "sudo -S true", rc=None, stdin=f"{PASSWORD}\n").rc != 0


def test_a_small_disk_fills_up_and_a_shared_folder_is_one(behind: Lab) -> None:
    full = behind.enter("node2", ["dd", "if=/dev/zero", "of=/var/fill", "bs=1M", "count=512"])
    assert "No space left on device" in full.stderr
    behind.enter("node1", ["touch", "/shared/here"])
    assert behind.ssh("node3", "ls /shared").stdout == "here\n"


def test_a_machine_comes_back_from_a_reboot(behind: Lab) -> None:
    booted = behind.ssh("node3", "cat /proc/1/stat | cut -d' ' -f22").stdout
    behind.reboot("node3")
    assert behind.ssh("node3", "cat /proc/1/stat | cut -d' ' -f22").stdout != booted
    assert behind.ssh("node3", "hostname").stdout == "node3\n"


def _reached_from_here(address: str) -> bool:
    try:
        with socket.create_connection((address, 22), timeout=2) as connection:
            return connection.recv(4) == b"SSH-"  # a router may take connections to anywhere
    except OSError:
        return False
