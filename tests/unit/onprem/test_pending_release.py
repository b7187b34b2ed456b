"""Machines whose release is pending are tried again, unless another machine has taken their place."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import Notice, ProvisionError, UnreachableError
from clusterctl.providers.base import NO_PROMPTS, REPLACED, pending_releases
from clusterctl.providers.onprem import release
from clusterctl.providers.onprem.access import Resolved
from clusterctl.providers.onprem.login import Login
from clusterctl.providers.onprem.provider import OnpremProvider
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import Host
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import condition, refused

SETTINGS = OnpremSettings.model_validate(
    {
        "type": "onprem",
        "controller": "ctl",
        "hosts": {"ctl": "10.0.0.1", "gpu1": "10.0.0.9"},
        "access": {"user": "rocky"},
    }
)


def host(name: str = "gpu1", address: str = "10.0.0.2", key: str = "AAAA") -> Host:
    return host_of(name, address=address, partition="p", host_key=f"ssh-ed25519 {key}")


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """The workspace of a cluster with a pending release of the host gpu1."""
    workspace = Workspace(tmp_path / "own")
    workspace.create()
    workspace.create_secrets()
    workspace.cluster_id()
    inventory = inventory_of(hosts=(host(),), provider="onprem", baked=False)
    release.record_pending(host(), inventory, SETTINGS, workspace, why="it does not answer")
    return workspace


def play_release(monkeypatch: pytest.MonkeyPatch, **functions: Any) -> None:
    """Replace the commands on the machine: ``release_all`` and ``find_leftovers``."""
    for name in ("release_all", "find_leftovers"):
        monkeypatch.setattr(release, name, functions.get(name, lambda *_, **__: ()))
    monkeypatch.setattr(Login, "trust", lambda *_, **__: {})
    monkeypatch.setattr(
        "clusterctl.providers.onprem.provider.as_ssh_resolves",
        lambda one: Resolved(one, {}),
    )


def retried(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, *members: Host, **functions: Any
) -> tuple[Notice, ...]:
    """Try the pending releases again, with ``play_release``. Return the notes."""
    play_release(monkeypatch, **functions)
    return release.retry_all(members, Login({}, workspace))


def silent(*_: object, **__: object) -> None:
    raise UnreachableError("no SSH connection", host="gpu1")


def test_owner_access_is_kept_if_the_spec_names_another_machine(
    workspace: Workspace,
) -> None:
    (pending,) = pending_releases(workspace)
    assert (pending.machine.address, pending.machine.user) == ("10.0.0.2", "rocky")


def test_pending_machine_is_asked_at_its_own_port(workspace: Workspace) -> None:
    away = dataclasses.replace(host(), port=2222)
    inventory = inventory_of(hosts=(away,), provider="onprem", baked=False)
    pending = release.record_pending(away, inventory, SETTINGS, workspace, why="it does not answer")
    assert (pending.machine.port, pending.machine.user) == (2222, "rocky")


def test_silent_machine_stays_pending(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (before,) = pending_releases(workspace)
    (note,) = retried(workspace, monkeypatch, release_all=silent)
    assert condition(note) == "still-pending"
    assert note.startswith("gpu1 (10.0.0.2)")
    assert "the cluster's files" in note
    (now,) = pending_releases(workspace)
    assert (now.since, now.failure.host) == (before.since, "gpu1")
    assert "--forget gpu1`" in now.failure.fix


def test_failed_release_note_names_cause_and_leftovers(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: object, **__: object) -> None:
        raise ProvisionError("could not be released", why="its disk is full", host="gpu1")

    (note,) = retried(
        workspace,
        monkeypatch,
        release_all=refuses,
        find_leftovers=lambda *_, **__: ("gpu1: /etc/clusterctl",),
    )
    assert condition(note) == "still-pending"
    assert all(word in note for word in ("disk is full", "the cluster's files"))


def test_released_machine_is_no_longer_pending(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = retried(workspace, monkeypatch)
    assert condition(note) == "late-release"
    assert pending_releases(workspace) == ()
    assert not (workspace.root / "pending-releases").exists()


@pytest.mark.parametrize("again", [host("gpu7"), host(address="10.0.0.7")], ids=["name", "address"])
def test_machine_in_the_cluster_again_is_not_released(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, again: Host
) -> None:
    assert retried(workspace, monkeypatch, again, release_all=silent) == ()
    assert pending_releases(workspace) == ()


def test_machine_sharing_a_host_key_waits_until_down(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = retried(
        workspace,
        monkeypatch,
        clone := host("gpu7", "10.0.0.7"),
        release_all=lambda *_, **__: 1 / 0,
    )
    assert condition(note) == "host-key-of-another"
    assert "gpu7 (10.0.0.7)" in note
    assert len(pending_releases(workspace)) == 1
    play_release(monkeypatch)
    (note,) = release.retry_all((clone,), Login({}, workspace), ending=True)
    assert condition(note) == "late-release"
    assert "gpu1 (10.0.0.2)" in note


def test_clone_with_the_name_of_a_replaced_machine_stays_pending(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (pending,) = pending_releases(workspace)
    dataclasses.replace(pending, why=REPLACED).save()
    (note,) = retried(workspace, monkeypatch, host(address="10.0.0.7"))
    assert condition(note) == "host-key-of-another"
    assert len(pending_releases(workspace)) == 1


def test_other_machine_at_the_address_of_a_pending_release_is_not_touched(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = retried(workspace, monkeypatch, host(key="BBBB"), release_all=silent)
    assert condition(note) == "address-of-another"
    assert pending_releases(workspace) == ()


def test_release_with_leftovers_stays_pending(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (note,) = retried(
        workspace, monkeypatch, find_leftovers=lambda *_, **__: ("gpu1: /etc/clusterctl",)
    )
    assert "/etc/clusterctl" in note
    assert len(pending_releases(workspace)) == 1


def test_down_releases_all_but_fails_for_a_silent_machine(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def release_all(login: Login, *_: object, **__: object) -> None:
        names.append(login.workspace.root.name)
        if login.workspace != workspace:
            silent()

    play_release(monkeypatch, release_all=release_all)
    provider = OnpremProvider(SETTINGS, NO_PROMPTS)
    with refused("leftovers/hosts", ProvisionError, "gpu1") as caught:
        provider.destroy("abc", workspace=workspace)
    assert names[0] == "own"
    assert names[1].startswith("gpu1-")
    assert [condition(failure) for failure in caught.value.failures] == [
        "leftovers/pending-release"
    ]
    (pending,) = pending_releases(workspace)
    pending.remove()
    provider.destroy("abc", workspace=workspace)
