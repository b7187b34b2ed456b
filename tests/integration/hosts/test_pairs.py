"""Hosts connect to the daemons of all others."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator, Mapping, Sequence

import pytest

from clusterctl.errors import UnreachableError
from clusterctl.hosts import remote_pairs
from clusterctl.hosts.checks import Finding
from clusterctl.hosts.pairs import Targets, examine_pairs, server_target
from tests.support.local_transport import LocalTransport
from tests.support.sshd import reserved_port

TARGETS: Targets = {f"n{one}": (f"10.0.0.{one}", (6818,)) for one in (1, 2, 3)}
DROPPED = {"6818": "no answer within 2 s"}
REFUSED = {"6818": "Connection refused"}
Answers = Mapping[str, Mapping[str, Mapping[str, str]]]


def found(
    answers: Answers, targets: Targets = TARGETS, *, silent: Sequence[str] = ()
) -> list[tuple[str, str, str]]:
    """Return host, code and cause of the findings. answers: host -> the hosts and ports that it can't
    reach.
    """

    def run(host: str, _: Sequence[str]) -> str:
        if host in silent:
            raise UnreachableError("no answer", why="it is off", host=host)
        return f"a word of the account's shell\n{json.dumps(answers.get(host, {}))}\n"

    findings: Iterator[Finding] = examine_pairs(targets, ["n1", "n2", "n3"], run)
    return [(one.host, one.code, one.why) for one in findings]


@pytest.fixture
def port() -> Iterator[int]:
    """A port on which nothing listens."""
    with reserved_port() as port:
        yield port


def test_pairs_of_real_connections() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        targets: Targets = {name: ("127.0.0.1", (server.getsockname()[1],)) for name in "ab"}
        run = LocalTransport().run
        assert [*examine_pairs(targets, ["a", "b"], lambda _, argv: run(argv).stdout)] == []


def test_closed_port_is_tried_until_the_deadline(port: int) -> None:
    assert remote_pairs.reach("127.0.0.1", port, 0.0) == "Connection refused"
    server = socket.create_server(("127.0.0.1", port))
    with server:
        assert remote_pairs.reach("127.0.0.1", port, 0.0) == ""


def test_host_that_two_others_do_not_reach_has_one_finding() -> None:
    answers = {"n2": {"n1": DROPPED}, "n3": {"n1": DROPPED}}
    cause = "n2, n3 can't reach 10.0.0.1, port 6818: no answer within 2 s"
    assert found(answers) == [("n1", "network", cause)]


def test_port_that_a_firewall_refuses_to_others_is_found() -> None:
    cause = "n2 can't reach 10.0.0.1, port 6818: Connection refused"
    assert found({"n2": {"n1": REFUSED}}) == [("n1", "network", cause)]


def test_daemon_that_does_not_run_is_no_fault_of_the_network() -> None:
    """Its host does not reach it, either."""
    assert found({name: {"n1": REFUSED} for name in TARGETS}) == []


def test_silent_host_is_named_alone() -> None:
    answers = {"n2": {"n1": DROPPED}, "n3": {"n1": DROPPED}}
    ((host, code, _),) = found(answers, silent=["n1"])
    assert (host, code) == ("n1", "not-looked-at")


def test_file_server_is_a_finding_of_each_host_that_does_not_reach_it() -> None:
    answers = {name: {"nas": {"2049": "No route to host"}} for name in ("n1", "n3")}
    assert found(answers, {**TARGETS, **server_target("nas")}) == [
        (name, "nfs", "nas, port 2049: No route to host") for name in ("n1", "n3")
    ]


def test_garbled_answer_is_a_warning() -> None:
    (one,) = examine_pairs(TARGETS, ["n1"], lambda *_: "bash: python3: not found\n")
    assert (one.host, one.level, one.code) == ("n1", "warning", "not-looked-at")
