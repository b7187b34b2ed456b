"""Hosts connect to each other's ports while all of them listen."""

from __future__ import annotations

import errno
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest

from clusterctl.errors import UnreachableError
from clusterctl.hosts.pairs import Peer, find_unconnected_hosts, unreached_ports
from clusterctl.hosts.remote_pairs import GREETING, WORDS
from clusterctl.transport.base import Conversation, Transport, remote_argv
from tests.support.local_transport import LocalTransport
from tests.support.scripted import ScriptedTransport
from tests.support.sshd import reserved_port
from tests.unit.hosts.answers import pairs

NAMES = ("d-train-1", "d-train-2")
HERE = dict.fromkeys(NAMES, "127.0.0.1")


def test_unreached_ports_blames_a_late_host_alone() -> None:
    """A busy host may start its program late, so that connections to it are refused."""
    ended = threading.Event()

    class Starved(LocalTransport):
        def converse(self, *_: object, **__: object) -> AbstractContextManager[Conversation]:
            ended.wait()
            raise UnreachableError("too late")

    hosts: dict[str, Transport] = {NAMES[0]: LocalTransport(), NAMES[1]: Starved()}
    try:
        for start_s in (1, 10, 100):  # under load the other one, too, may need more time
            (failure, *others) = find_unconnected_hosts(HERE, hosts.__getitem__, start_s=start_s)
            if not others:
                break
    finally:
        ended.set()
    assert others == []
    assert (failure.host, failure.code) == (NAMES[1], "unreachable")
    assert "load" in failure.fix


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which nothing listens."""
    with reserved_port() as port:
        yield port


def test_unreached_ports_of_real_connections() -> None:
    assert find_unconnected_hosts(HERE, lambda _: LocalTransport()) == ()


def test_unreached_ports_counts_refusals_only_of_listening_hosts(port: int) -> None:
    peers = {"nobody": ("127.0.0.1", {port: True}), "nowhere": ("255.255.255.255", {1: False})}
    peers["stopped"] = ("127.0.0.1", {port: False})  # whose daemon does not run
    with LocalTransport().converse(remote_argv("clusterctl.hosts.remote_pairs", "0", "[]")) as talk:
        own_port, *others = json.loads(talk.receive())
        assert own_port
        assert others == []
        talk.send(json.dumps(peers).encode() + b"\n")
        unreached = json.loads(talk.receive())
        talk.finish()
    assert unreached["nobody"] == {str(port): WORDS[errno.ECONNREFUSED]}
    assert unreached["nowhere"]["1"]
    assert "stopped" not in unreached


def test_remote_pairs_listens_on_free_ports(port: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        argv = remote_argv(
            "clusterctl.hosts.remote_pairs", "0", json.dumps([port, server.getsockname()[1]])
        )
        with LocalTransport().converse(argv) as talk:
            _, *opened = json.loads(talk.receive())
            with socket.create_connection(("127.0.0.1", port)) as connection:
                assert connection.recv(len(GREETING)) == GREETING
            talk.finish()
    assert opened == [port]


@pytest.mark.parametrize(("opens", "opened"), [(True, [6817]), (False, [])])
def test_unreached_ports_opens_ports_only_if_requested(opens: bool, opened: list[int]) -> None:
    nodes = {name: ScriptedTransport([pairs()]) for name in NAMES}
    peers = dict.fromkeys(NAMES, Peer("10.0.0.1", (6817,), opens=opens))
    answers = unreached_ports(peers, lambda host, argv: nodes[host].converse(argv))
    assert (answers.unreached, answers.silent) == ({name: {} for name in NAMES}, {})
    for node in nodes.values():
        _, ports = json.loads(node.calls[0].argv[-1])
        assert json.loads(ports) == opened


def test_unreached_ports_tries_only_selected_hosts() -> None:
    nodes = {name: ScriptedTransport([pairs()]) for name in NAMES}
    peers = {NAMES[0]: Peer("10.0.0.1", (6817,)), NAMES[1]: Peer("10.0.0.2", (6818,), tried=False)}
    unreached_ports(peers, lambda host, argv: nodes[host].converse(argv))
    assert [json.loads(line) for line in nodes[NAMES[0]].sent] == [{}]
    assert [json.loads(line) for line in nodes[NAMES[1]].sent] == [
        {NAMES[0]: ["10.0.0.1", {"1": True, "6817": False}]}
    ]
