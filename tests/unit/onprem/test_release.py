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
    UnreachableError,
)
from clusterctl.hosts.roles import CLAIM
from clusterctl.providers.base import NO_PROMPTS
from clusterctl.providers.onprem import members, release
from clusterctl.providers.onprem.access import AccessError
from clusterctl.providers.onprem.login import Login
from clusterctl.providers.onprem.remote_claim import ORIGIN
from clusterctl.spec.hosts import OnpremHost
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import CONTROLLER, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.sudo import SudoError
from tests.support.inventories import KEY, host_of, inventory_of
from tests.support.messages import condition, refused


def inventory(*names: str) -> Inventory:
    controller = host_of("ctl", CONTROLLER, address="10.0.0.1")
    nodes = (host_of(name, address="10.0.0.2", partition="p") for name in names)
    return inventory_of(hosts=(controller, *nodes), provider="onprem", baked=False)


class PlayedLogin(Login):
    """Logins to machines that answer as their names say.

    left: hosts whose record of the cluster was removed. The claim of the host `damaged` is not JSON.
    """

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.left: set[str] = set()

    def trust(self, *_: Any, **__: Any) -> Mapping[str, ClusterctlError]:
        return {}

    def key_of(self, _: str) -> str:
        return KEY

    def run(self, host: str, argv: Sequence[str], *_: Any, **__: Any) -> str:
        if host == "dead":
            raise UnreachableError("no connection", host=host)
        if host == "locked":
            raise AccessError.of(host, "login-refused", "it refuses the login", "", about="")
        if host == "weak" and argv[0] == "sudo":
            raise SudoError("you can't become root", code="sudo/refused", host=host)
        claims = {"damaged": '{"id": "a1b', "gone": ""}
        return claims.get(host, '{"id": "a1b2c3"}') if CLAIM in argv else ""

    def leave(self, host: str, cluster_id: str) -> None:
        assert cluster_id == "a1b2c3"
        self.left.add(host)


def release_all_but(
    tmp_path: Path, *removed: str
) -> tuple[Callable[[], Mapping[str, str]], set[str]]:
    """Return a function that removes hosts from a cluster, with unreachable host -> reason, and the
    hosts that it released.
    """
    workspace = Workspace(tmp_path / "own")
    workspace.create()
    workspace.create_secrets()
    write_atomic(workspace.inventory, inventory("stays", *removed).text)
    login = PlayedLogin({}, workspace)
    return lambda: release.release_removed(inventory("stays"), login), login.left


def test_machine_released_before_stops_nothing(tmp_path: Path) -> None:
    remove, released = release_all_but(tmp_path, "gone", "well", "dead", "locked")
    assert remove() == {
        "dead": "it does not answer",
        "locked": "login failed: it refuses the login",
    }
    assert released == {"well"}


@pytest.mark.parametrize(
    ("host", "code"), [("weak", "sudo/refused"), ("damaged", "record-damaged/claim")]
)
def test_machine_that_cannot_be_changed_is_an_error(tmp_path: Path, host: str, code: str) -> None:
    remove, released = release_all_but(tmp_path, host, "well")
    with refused(code, ProvisionError, host):
        remove()
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
    claim = {"id": "abc", "name": "own"}
    claims = ({"ctl": claim, "n1": claim}, {})
    monkeypatch.setattr(Login, "key_of", lambda *_: KEY)
    played = {"_claims": claims, "release_all": None}
    for name, result in played.items():
        monkeypatch.setattr(release, name, lambda *_, result=result: result)
    owner = Login(settings.machines, workspace, NO_PROMPTS)
    release.release_orphan(owner, settings, "abc")
    found = Inventory.read(workspace.joining.read_text())
    assert (found.shared_folder.kind, found.controller.name) == ("nfs", "ctl")


def test_joined_member_needs_same_address_given_host_key_and_its_record(tmp_path: Path) -> None:
    cluster = inventory("same", "dead", "moved", "other-key", "gone", "locked")
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
    workspace.adopt_id("a1b2c3")
    found, silent, failed = members.joined_members(wanted, before, PlayedLogin({}, workspace))
    assert found == {name: before[name] for name in ("ctl", "same")}
    assert silent == {"dead": before["dead"]}
    assert {host: condition(exc) for host, exc in failed.items()} == {"locked": "login-refused"}


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
    assert condition(search.failures[1]) == "record-damaged/claim"
