"""Machines that leave a cluster: those that can't be entered are named, and hold up nothing."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    HostKeyError,
    ProvisionError,
    TransportError,
    UnreachableError,
)
from clusterctl.hosts.roles import CLAIM
from clusterctl.providers.base import NO_PROMPTS, OfferedKey, Prompts, fingerprint
from clusterctl.providers.onprem import access, members, release
from clusterctl.providers.onprem.login import Login
from clusterctl.providers.onprem.remote_account import ORIGIN
from clusterctl.spec.hosts import OnpremHost
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import CONTROLLER, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from tests.support.inventories import KEY, host_of, inventory_of
from tests.support.messages import refused


class Way:
    """Our account's way to a machine that answers as its name says; one that was left lets nobody
    in.
    """

    left: ClassVar[set[str]] = set()

    def __init__(self, host: str) -> None:
        self._host = host

    def run(self, argv: tuple[str, ...], **_: Any) -> None:
        if self._host == "dead":
            raise UnreachableError("no connection", host=self._host)
        if self._host == "gone" or self._host in self.left:
            raise TransportError("it does not accept our key", host=self._host)
        if self._host == "weak":
            raise CommandError("`sudo -n true` failed", rc=1, stderr="", where="weak", host="weak")
        if "systemd-run" in argv:
            self.left.add(self._host)

    def close(self) -> None:
        """Nothing is open."""


def inventory(*names: str) -> Inventory:
    controller = host_of("ctl", CONTROLLER, address="10.0.0.1")
    nodes = (host_of(name, address="10.0.0.2", partition="p") for name in names)
    return inventory_of(hosts=(controller, *nodes), provider="onprem", baked=False)


def dismissed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *going: str) -> Mapping[str, str]:
    for module in (members, release):
        monkeypatch.setattr(module, "admin_login", lambda _: Way)
    monkeypatch.setattr(Way, "left", set())
    workspace = Workspace(tmp_path / "own")
    workspace.create()
    workspace.create_secrets()
    write_atomic(workspace.inventory, inventory("stays", *going).text)
    return release.release_removed(inventory("stays"), Login({}, workspace))


def test_machine_released_before_stops_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert dismissed(tmp_path, monkeypatch, "gone", "well", "dead") == {
        "gone": "it does not accept our key",
        "dead": "it does not answer",
    }
    assert Way.left == {"well"}


def test_machine_with_login_but_no_sudo_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with refused("hosts-unreachable", ProvisionError):
        dismissed(tmp_path, monkeypatch, "weak", "well")
    assert Way.left == {"well"}


def test_orphaned_controller_keeps_its_export(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hosts = {"ctl": {"address": "10.0.0.1"}, "n1": {"address": "10.0.0.2"}}
    shared = {"kind": "nfs", "path": "/shared"}
    settings = OnpremSettings.model_validate(
        {
            "type": "onprem",
            "access": {"user": "me"},
            "controller": "ctl",
            "shared": shared,
            "hosts": hosts,
        }
    )
    workspace = Workspace(tmp_path / "own")
    workspace.create()
    write_atomic(workspace.trusted_hosts, f"ctl {KEY}\nn1 {KEY}\n")
    claim = {"id": "abc", "name": "own"}
    monkeypatch.setattr(release, "_claims", lambda _: ({"ctl": claim, "n1": claim}, {}))
    monkeypatch.setattr(release, "create_account", lambda *_: None)
    monkeypatch.setattr(release, "release_all", lambda *_, **__: None)
    login = Login(settings.machines, workspace, NO_PROMPTS)
    release.release_orphan(login, settings, "abc")
    found = Inventory.read(workspace.joining.read_text())
    assert (found.shared_folder.kind, found.controller.name) == ("nfs", "ctl")


def test_joined_member_needs_same_address_and_given_host_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(members, "admin_login", lambda _: Way)
    monkeypatch.setattr(Way, "left", {"weak"})
    hosts = inventory("same", "dead", "moved", "other-key", "weak").hosts
    before = {host.name: host for host in hosts}
    told = {
        "same": {"host_key": ""},
        "moved": {"address": "10.0.0.9"},
        "other-key": {"host_key": "ssh-rsa B"},
    }
    asked = [replace(host, **told.get(host.name, {})) for host in hosts]
    workspace = Workspace(tmp_path / "own")
    found, silent = members.joined_members(asked, before, workspace)
    assert found == {name: before[name] for name in ("ctl", "same")}
    assert silent == {"dead": before["dead"]}


class Asked(Login):
    """Logins to machines, each with the text of its claim, or the error of its login."""

    answers: Mapping[str, str | ClusterctlError]

    def trust(self, hosts: Sequence[str], *_: Any, **__: Any) -> Mapping[str, ClusterctlError]:
        return {name: exc for name in hosts if isinstance(exc := self.answers[name], HostKeyError)}

    def run(self, host: str, argv: Sequence[str], *_: Any, **__: Any) -> str:
        answer = self.answers[host]
        if isinstance(answer, ClusterctlError):
            raise answer
        return answer if CLAIM in argv else "slurmd runs\njob 7 (train) of hpc is RUNNING\n"


def test_orphans_name_their_jobs_and_origin_and_hosts_that_cannot_be_asked(tmp_path: Path) -> None:
    origin = dict(zip(ORIGIN, ("marta", "laptop", "/home/marta/own", "2026-11-27"), strict=True))
    login = Asked(
        dict.fromkeys(["n1", "n2", "free", "new-key", "broken", "off"], OnpremHost()),
        Workspace(tmp_path),
    )
    login.answers = {
        "n1": json.dumps({"id": "abc", "name": "own", **origin}),
        "n2": json.dumps({"id": "def", "name": "other"}),
        "free": "",
        "new-key": HostKeyError("the host key differs"),
        # ssh may fail with a message that no rule explains.
        "broken": CommandError("`cat` failed", rc=255, stderr="kex_exchange"),
        "off": UnreachableError("no connection"),
    }
    search = release.find_orphans(login, "own")
    (orphan,) = search.found
    assert orphan.id == "abc"
    assert all(value in orphan.origin for value in origin.values())
    assert "n1: job 7 (train) of hpc is RUNNING" in orphan.running
    assert [failure.host for failure in search.failures] == ["new-key", "broken", "off"]


NEW_KEY = "ssh-ed25519 BBBB"


@pytest.mark.parametrize("accepted", [(), (fingerprint(NEW_KEY),)], ids=["refused", "accepted"])
def test_down_releases_a_machine_with_another_host_key_once_it_is_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, accepted: tuple[str, ...]
) -> None:
    """n3 has another host key than at the last `up`. ssh compares those in known_hosts."""
    keys = {"ctl": KEY, "stays": KEY, "n3": NEW_KEY}
    workspace = Workspace(tmp_path / "own")
    workspace.create()
    workspace.create_secrets()
    write_atomic(workspace.inventory, inventory("stays", "n3").text)
    write_atomic(workspace.trusted_hosts, "".join(f"{name} {KEY}\n" for name in keys))

    def enter(host: str) -> Way:
        if f"{host} {keys[host]}" not in workspace.known_hosts.read_text().splitlines():
            raise HostKeyError("the host key differs", host=host)
        return Way(host)

    def refuse(_: Login, host: str, *__: Any, **___: Any) -> str:
        raise HostKeyError("the host key differs", host=host)

    monkeypatch.setattr(Way, "left", set())
    monkeypatch.setattr(release, "admin_login", lambda _: enter)
    monkeypatch.setattr(Login, "run", refuse)
    monkeypatch.setattr(
        access,
        "_offered_key",
        lambda peer, _: OfferedKey(peer.title, peer.address, keys[peer.title]),
    )
    machines = {name: OnpremHost(address="10.0.0.2") for name in keys}
    login = Login(machines, workspace, Prompts(accepted=accepted))
    if accepted:
        release.release_all(login, "a1b2c3")
    else:
        with refused("hosts-unreachable", ProvisionError, "n3"):
            release.release_all(login, "a1b2c3")
    assert Way.left == {"ctl", "stays", *(["n3"] if accepted else [])}
