"""Tests of errors about several hosts: hosts, causes and fixes are each listed once."""

from __future__ import annotations

from clusterctl.errors import Failure, ProvisionError, UnreachableError


def test_error_of_hosts_names_hosts_and_fixes_once_and_each_cause() -> None:
    failures = [
        Failure("disk-full", "/opt", "a", fix="clear"),
        Failure("disk-full", "/var", "a", fix="clear"),
        Failure("clock", "ahead", "b", fix="set"),
    ]
    error = ProvisionError.of_hosts("lost: {hosts} {x}", failures, then="proceed")
    assert error.what == "lost: a, b {x}"
    assert error.why.splitlines() == ["a: /opt", "a: /var", "b: ahead"]
    assert error.fix.splitlines() == ["clear", "set", "proceed"]
    assert error.failures == tuple(failures)
    assert ProvisionError.of_hosts("no", failures, fix="look there").fix == "look there"


def test_error_on_returns_the_failure_of_a_host() -> None:
    error = UnreachableError("away", why="silent", fix="wait")
    assert error.cause == "away: silent"
    assert error.on("a", "probe") == Failure("unreachable", "silent", "a", "probe", "wait", True)
    assert UnreachableError("away").on("a", "probe").cause == "away"
