"""Machines that leave a cluster are released; unreachable machines are named and don't stop `up`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

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
from clusterctl.providers.onprem import access, login, members, release
from clusterctl.providers.onprem.login import Login
from clusterctl.providers.onprem.remote_account import ORIGIN
from clusterctl.spec.hosts import OnpremHost
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import CONTROLLER, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util.process import Result
from tests.support.inventories import KEY, host_of, inventory_of
from tests.support.messages import refused


class AdminLogin:
    """The ssh connection of the admin account to a host, which answers as the host's name says.

    released: hosts whose admin account was removed. The claim of the host `damaged` is not JSON.
    """

    def __init__(self, host: str, released: set[str]) -> None:
        self._host = host
        self._released = released

    def run(self, argv: tuple[str, ...], **_: Any) -> Result:
        if self._host == "dead":
            raise UnreachableError("no connection", host=self._host)
        if self._host == "gone" or self._host in self._released:
            raise TransportError("it does not accept our key", host=self._host)
        if self._host == "weak":
            raise CommandError("`sudo -n true` failed", rc=1, stderr="", where="weak", host="weak")
        if "systemd-run" in argv:
            self._released.add(self._host)
        claim = '{"id": "a1b' if self._host == "damaged" else '{"id": "a1b2c3"}'
        return Result(0, claim if CLAIM in argv else "", "")

    def close(self) -> None:
        """Close nothing, because no connection is open."""


def inventory(*names: str) -> Inventory:
    controller = host_of("ctl", CONTROLLER, address="10.0.0.1")
    nodes = (host_of(name, address="10.0.0.2", partition="p") for name in names)
    return inventory_of(hosts=(controller, *nodes), provider="onprem", baked=False)


def use_ssh(monkeypatch: pytest.MonkeyPatch, connect: Callable[[str, Path], AdminLogin]) -> None:
    """Connect to hosts by a function, so that no ssh starts."""
    monkeypatch.setattr(login, "SSHTransport", connect)


@pytest.fixture
def released(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """Hosts whose admin account was removed. No ssh starts: hosts answer as ``AdminLogin``."""
    hosts: set[str] = set()
    use_ssh(monkeypatch, lambda host, _: AdminLogin(host, hosts))
    return hosts


def release_all_but(tmp_path: Path, *removed: str) -> Mapping[str, str]:
    """Remove hosts from a cluster. Return unreachable host -> reason."""
    workspace = Workspace(tmp_path / "own")
    workspace.create()
    workspace.create_secrets()
    write_atomic(workspace.inventory, inventory("stays", *removed).text)
    return release.release_removed(inventory("stays"), Login({}, workspace))


def test_machine_released_before_stops_nothing(tmp_path: Path, released: set[str]) -> None:
    assert release_all_but(tmp_path, "gone", "well", "dead") == {
        "gone": "it does not accept our key",
        "dead": "it does not answer",
    }
    assert released == {"well"}


def test_machine_with_login_but_no_sudo_is_an_error(tmp_path: Path, released: set[str]) -> None:
    with refused("hosts-unreachable", ProvisionError):
        release_all_but(tmp_path, "weak", "well")
    assert released == {"well"}


def test_machine_with_a_damaged_claim_is_not_released(tmp_path: Path, released: set[str]) -> None:
    with refused("claim-unreadable", ProvisionError, "damaged"):
        release_all_but(tmp_path, "damaged", "well")
    assert released == {"well"}


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
    claims = ({"ctl": claim, "n1": claim}, {})
    played = {"_claims": claims, "create_account": None, "release_all": None}
    for name, result in played.items():
        monkeypatch.setattr(release, name, lambda *_, result=result: result)
    owner = Login(settings.machines, workspace, NO_PROMPTS)
    release.release_orphan(owner, settings, "abc")
    found = Inventory.read(workspace.joining.read_text())
    assert (found.shared_folder.kind, found.controller.name) == ("nfs", "ctl")


def test_joined_member_needs_same_address_and_given_host_key(
    tmp_path: Path, released: set[str]
) -> None:
    released.add("weak")
    cluster = inventory("same", "dead", "moved", "other-key", "weak")
    hosts = cluster.hosts
    before = {host.name: host for host in hosts}
    changes = {
        "same": {"host_key": ""},
        "moved": {"address": "10.0.0.9"},
        "other-key": {"host_key": "ssh-rsa B"},
    }
    wanted = [replace(host, **changes.get(host.name, {})) for host in hosts]
    workspace = Workspace(tmp_path / "own")
    workspace.create()
    write_ssh_files(cluster, workspace)
    found, silent = members.joined_members(wanted, before, workspace)
    assert found == {name: before[name] for name in ("ctl", "same")}
    assert silent == {"dead": before["dead"]}


class OwnerLogin(Login):
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
    owner = OwnerLogin(
        dict.fromkeys(["n1", "n2", "free", "damaged", "new-key", "broken", "off"], OnpremHost()),
        Workspace(tmp_path),
    )
    owner.answers = {
        "n1": json.dumps({"id": "abc", "name": "own", **origin}),
        "n2": json.dumps({"id": "def", "name": "other"}),
        "free": "",
        "damaged": "\n",
        "new-key": HostKeyError("the host key differs"),
        # ssh may fail with a message that no rule explains.
        "broken": CommandError("`cat` failed", rc=255, stderr="kex_exchange"),
        "off": UnreachableError("no connection"),
    }
    search = release.find_orphans(owner, "own")
    (orphan,) = search.found
    assert orphan.id == "abc"
    assert all(value in orphan.origin for value in origin.values())
    assert "n1: job 7 (train) of hpc is RUNNING" in orphan.running
    assert [failure.host for failure in search.failures] == ["new-key", "damaged", "broken", "off"]
    assert search.failures[1].code == "claim-unreadable"


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

    released: set[str] = set()

    def connect(host: str, _: Path) -> AdminLogin:
        if f"{host} {keys[host]}" not in workspace.known_hosts.read_text().splitlines():
            raise HostKeyError("the host key differs", host=host)
        return AdminLogin(host, released)

    def refuse(_: Login, host: str, *__: Any, **___: Any) -> str:
        raise HostKeyError("the host key differs", host=host)

    use_ssh(monkeypatch, connect)
    monkeypatch.setattr(Login, "run", refuse)
    monkeypatch.setattr(
        access,
        "_offered_key",
        lambda peer, _: OfferedKey(peer.title, peer.address, keys[peer.title]),
    )
    machines = {name: OnpremHost(address="10.0.0.2") for name in keys}
    owner = Login(machines, workspace, Prompts(accepted=accepted))
    if accepted:
        release.release_all(owner, "a1b2c3")
    else:
        with refused("hosts-unreachable", ProvisionError, "n3"):
            release.release_all(owner, "a1b2c3")
    assert released == {"ctl", "stays", *(["n3"] if accepted else [])}
