"""The error of several hosts: who, why on each, and what to do, each said once."""

from __future__ import annotations

from clusterctl.errors import Failure, ProvisionError, UnreachableError


def test_it_names_hosts_and_remedies_once_and_each_cause() -> None:
    failures = [
        Failure("disk-full", "/opt is full", "a", fix="make room"),
        Failure("disk-full", "/var is full", "a", fix="make room"),
        Failure("clock", "an hour ahead", "b", fix="set it"),
    ]
    error = ProvisionError.of_hosts("no use: {hosts} {x}", failures, then="then go on")
    assert error.what == "no use: a, b {x}"
    assert error.why == "a: /opt is full\na: /var is full\nb: an hour ahead"
    assert error.fix == "make room\nset it\nthen go on"
    assert error.failures == tuple(failures)
    assert ProvisionError.of_hosts("no", failures, fix="look there").fix == "look there"


def test_an_error_as_the_failure_of_a_host() -> None:
    error = UnreachableError("no connection", why="timed out", fix="switch it on")
    assert error.cause == "no connection: timed out"
    assert error.on("a", "probe") == Failure("unreachable", "timed out", "a", "probe", "switch it on", True)
    assert UnreachableError("no connection").on("a", "probe").cause == "no connection"
