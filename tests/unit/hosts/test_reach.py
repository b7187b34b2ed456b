"""Hosts are probed until they answer. The provider starts hosts that are off."""

from __future__ import annotations

import json
import threading
import time

import pytest

from clusterctl.errors import (
    ClusterctlError,
    KeyRefusedError,
    ProvisionError,
    TransportError,
    UnreachableError,
)
from clusterctl.hosts.probe import ProbeRequest, ask_hosts, probe_hosts, reports_of
from clusterctl.transport.base import Transport
from tests.support.messages import condition
from tests.support.messages import refused as rejected
from tests.support.scripted import Call, ScriptedTransport, Step
from tests.unit.hosts.answers import answer

NO_ROUTE = "No route to host"
ASKED = ("sudo", "-n", "sh", "...")
FINE = Step(ASKED, answer(checksums={"unit munge": "running"}))
STOPPING = Step(ASKED, json.dumps({"state": "stopping"}))


def fails(error: ClusterctlError) -> Step:
    return Step(ASKED, error=error)


class Dead(ScriptedTransport):
    """A host that is off until ``on`` is set."""

    def __init__(self) -> None:
        super().__init__([])
        self.on = threading.Event()

    def _next(self, _: Call) -> Step:
        if not self.on.is_set():
            raise UnreachableError("no SSH connection", why=NO_ROUTE)
        return FINE


def test_probe_hosts_asks_booting_and_stopping_hosts_again() -> None:
    booting = ScriptedTransport([fails(UnreachableError("no SSH connection")), FINE])
    leaving = ScriptedTransport([STOPPING, fails(UnreachableError("no SSH connection")), FINE])
    hosts: dict[str, Transport] = {"a": booting, "b": leaving}
    views = probe_hosts(dict.fromkeys(hosts, ProbeRequest()), hosts.__getitem__)
    assert [view.checksums["unit munge"] for view in views.values()] == ["running", "running"]
    assert booting.left == leaving.left == ()


def test_probe_hosts_has_the_provider_start_a_stopped_host() -> None:
    host = Dead()
    asking = ask_hosts({"a": ProbeRequest()}, lambda _: host, away_s=0.1)
    assert next(asking) is None
    host.on.set()
    *_, answer = asking
    assert answer is not None
    assert list(reports_of(["a"], [answer])) == ["a"]


def test_fix_of_local_nodes_that_up_could_not_connect_is_not_up_again() -> None:
    *_, answer = ask_hosts({"a": ProbeRequest()}, lambda _: Dead(), away_s=0.1, timeout_s=0.1)
    assert answer is not None
    with rejected("unreachable/hosts", TransportError) as caught:
        reports_of(["a"], [answer], are_local=True)
    assert "`clusterctl node replace HOST`" in caught.value.fix


def test_probe_hosts_names_an_unreachable_host_with_the_cause() -> None:
    hosts: dict[str, Transport] = {"a": ScriptedTransport([FINE]), "b": Dead()}
    with rejected("unreachable/hosts", TransportError) as caught:
        probe_hosts(dict.fromkeys(hosts, ProbeRequest()), hosts.__getitem__, timeout_s=0.1)
    (failure,) = caught.value.failures
    assert (failure.host, failure.phase, failure.cause) == ("b", "reach", NO_ROUTE)


@pytest.mark.parametrize("error", [TransportError, KeyRefusedError])
def test_probe_hosts_does_not_repeat_a_refused_login(error: type[TransportError]) -> None:
    host = ScriptedTransport([fails(error("the key is refused"))])
    with pytest.raises(TransportError) as caught:
        probe_hosts({"a": ProbeRequest()}, lambda _: host)
    assert caught.value.why.startswith("a: ")


def test_ask_hosts_repeats_a_refused_key_of_a_new_host(no_pause: None) -> None:
    host = ScriptedTransport([fails(KeyRefusedError("the key is refused")), STOPPING, FINE])
    assert [
        one.host for one in ask_hosts({"a": ProbeRequest()}, lambda _: host, new=True) if one
    ] == ["a"]
    assert host.left == ()
    refusing = ScriptedTransport([fails(KeyRefusedError("the key is refused"))] * 2)
    with pytest.raises(TransportError) as caught:
        reports_of(
            ["a"],
            filter(
                None, ask_hosts({"a": ProbeRequest()}, lambda _: refusing, new=True, timeout_s=-1)
            ),
        )
    assert condition(caught.value.failures[0]) == "login-refused/key"


class Frozen(ScriptedTransport):
    """A host that accepts commands and never answers."""

    def __init__(self) -> None:
        super().__init__([])
        self.asked = threading.Event()
        self.left_alone = threading.Event()
        self.let_go: list[bool] = []

    def _next(self, _: Call) -> Step:
        self.asked.set()
        self.let_go.append(self.left_alone.wait(20))
        raise UnreachableError("the connection broke")

    def leave(self) -> None:
        self.left_alone.set()

    def close(self) -> None:
        raise AssertionError("other processes use the connection")


def test_ask_hosts_ctrl_c_does_not_wait_for_a_frozen_host() -> None:
    host = Frozen()
    hosts: dict[str, Transport] = {"a": host, "b": Dead()}

    asking = ask_hosts(dict.fromkeys(hosts, ProbeRequest()), hosts.__getitem__, away_s=0.1)
    assert next(asking) is None
    host.asked.wait()
    with pytest.raises(KeyboardInterrupt):
        asking.throw(KeyboardInterrupt)
    assert host.let_go == [True]


def test_ask_hosts_does_not_start_a_slow_host() -> None:
    class Slow(ScriptedTransport):
        def _next(self, _: Call) -> Step:
            time.sleep(0.1)  # many times `away_s`
            return FINE

    (answer,) = ask_hosts({"a": ProbeRequest()}, lambda _: Slow([]), away_s=0.001)
    assert answer is not None


def test_ask_hosts_ends_when_its_caller_fails() -> None:
    asking = ask_hosts({"a": ProbeRequest()}, lambda _: Dead(), timeout_s=600, away_s=0.1)
    assert next(asking) is None
    with pytest.raises(ProvisionError):
        asking.throw(ProvisionError("no more room", code="x"))
