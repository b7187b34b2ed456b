"""Tests of connections by paramiko: which hosts they are for, and what ends them.

test_ssh.py and test_conversation.py test the commands.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.errors import HostKeyError, KeyRefusedError, TransportError
from clusterctl.state.inventory import Host
from clusterctl.state.workspace import Workspace
from clusterctl.transport.openssh import ssh_config_text
from clusterctl.transport.paramiko_ssh import ParamikoTransport
from clusterctl.transport.ssh import Connections, SSHTransport
from clusterctl.util.process import call_on_hosts
from tests.support.inventories import inventory_of
from tests.support.messages import refused
from tests.support.processes import eventually

NODES = ("node-1", "node-2", "node-3")


@pytest.fixture
def config(sshd, me: str, tmp_path: Path) -> Path:
    """The ssh_config of a cluster whose hosts are all the same sshd."""
    controller = Host(
        name="controller",
        address="127.0.0.1",
        port=sshd.port,
        user=me,
        roles=("controller",),
        host_key=sshd.host_key,
    )
    nodes = [replace(controller, name=name, roles=("compute",)) for name in NODES]
    carried = replace(controller, name="carried", proxy_command=("carrier", "%p"))
    behind = replace(controller, name="behind", jump="carried")
    inventory = inventory_of(hosts=(controller, *nodes, carried, behind))
    workspace = Workspace(tmp_path / "cluster")
    workspace.root.mkdir()
    workspace.known_hosts.write_text(inventory.known_hosts())
    workspace.ssh_config.write_text(ssh_config_text(inventory, workspace, sshd.folder / "id"))
    return workspace.ssh_config


def kinds(config: Path, *, fans_out: bool = True) -> dict[str, type]:
    with Connections(config, fans_out=fans_out) as connections:
        hosts = ("controller", *NODES, "carried", "behind")
        found = {host: type(connections.to(host)) for host in hosts}
        found["of a user"] = type(connections.to(NODES[0], "ada"))
    return found


def test_paramiko_connects_the_admin_to_hosts_that_clusterctl_made(config):
    expected = dict.fromkeys(("controller", *NODES, "behind"), ParamikoTransport)
    assert kinds(config) == expected | {"carried": SSHTransport, "of a user": SSHTransport}


@pytest.mark.parametrize("case", ["one host", "machines of the user", "attached"])
def test_other_connections_are_openssh(config, case):
    workspace = Workspace(config.parent)
    if case == "machines of the user":
        workspace.access_config.touch()
    elif case == "attached":
        workspace.login.write_text("campus\n")
    assert set(kinds(config, fans_out=case != "one host").values()) == {SSHTransport}


def test_leaving_ends_connections_and_threads(config, sshd):
    before = set(threading.enumerate())
    with Connections(config, fans_out=True) as connections:
        answers, failed = call_on_hosts(
            NODES, lambda name: connections.to(name).run(["echo", name]).stdout
        )
        assert (answers, failed) == ({name: f"{name}\n" for name in NODES}, {})
        connections.to(NODES[0]).run(["true"])
        assert len(sshd.connections()) == len(NODES)
    assert [each for each in set(threading.enumerate()) - before if each.is_alive()] == []
    eventually(lambda: not sshd.connections())


def test_connection_to_a_host_that_was_created_again_is_not_used(config):
    """The new host has another key, while the connection to the old one may still seem open."""
    with Connections(config, fans_out=True) as connections:
        node = connections.to(NODES[0])
        node.run(["true"])
        known = config.parent / "known_hosts"
        known.write_text(known.read_text().replace("AAAA", "BBBB"))
        with pytest.raises(HostKeyError):
            node.run(["true"])


def test_damaged_private_key_is_named(config, sshd):
    (sshd.folder / "id").write_text("damaged\n")
    with Connections(config, fans_out=True) as connections:
        with refused("record-damaged/ssh-key", KeyRefusedError) as caught:
            connections.to(NODES[0]).run(["true"])
        assert caught.value.where == str(sshd.folder / "id")


@pytest.mark.parametrize(
    ("file", "line", "condition"),
    [
        ("known_hosts", "node-1 ", "host-key"),
        ("known_hosts", "node-1 foo AAAA", "unreachable"),
        ("ssh_config", "Host node-1\n    Port many\n", "record-damaged/ssh-config"),
        ("ssh_config", "Host node-1\n    ProxyCommand 'x\n", "record-damaged/ssh-config"),
    ],
)
def test_damaged_file_of_the_cluster_is_one_error(config, file, line, condition):
    damaged = config.parent / file
    damaged.write_text(f"{line}\n{damaged.read_text()}")
    with Connections(config, fans_out=True) as connections, refused(condition, TransportError):
        connections.to("node-1").run(["true"])


def test_more_commands_than_sshd_allows_share_a_connection(config, sshd):
    """sshd's default is MaxSessions 10."""
    with Connections(config, fans_out=True) as connections:
        run: Callable[[str], str] = lambda word: (  # noqa: E731
            connections.to(NODES[0]).run(["bash", "-c", f"sleep 0.2; echo {word}"]).stdout
        )
        answers, failed = call_on_hosts([str(number) for number in range(14)], run)
        assert (len(answers), failed) == (14, {})
        assert len(sshd.connections()) == 1
