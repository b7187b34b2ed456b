"""Storage of local clusters: a folder of an account, which the helper creates, lists and removes."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import ProvisionError, UsageError
from clusterctl.providers.local import helper, image, layout, machine, system
from clusterctl.providers.local.client import Helper
from clusterctl.providers.local.provider import LocalProvider
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.state.workspace import Workspace
from tests.support.messages import refused

FIRST = "aaaaaa"
SECOND = "bbbbbb"
ME = os.getuid()
UID = ME or 1001


@pytest.fixture
def state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of local clusters, on a machine without running nodes. The helper runs in this
    process.
    """
    for name in ("STATE", "RUN", "CACHE"):
        monkeypatch.setattr(layout, name, tmp_path / name.lower())
    monkeypatch.setattr(machine, "alive", dict)
    for module, name in (
        (machine, "end_rooted"),
        (machine, "remove_cgroups"),
        (system, "remove_network"),
        (system, "restore_kernel_settings"),
        (system, "remove_netns_folder"),
        (system, "erase_doomed"),
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(machine, "cgroups", lambda _: ())
    monkeypatch.setattr(image, "layers", lambda _: ())
    monkeypatch.setattr(system, "choose_subnet", lambda *_: "10.9.0.0/24")
    monkeypatch.setattr(Helper, "call", lambda _, verb, request: helper.VERBS[verb](request))
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "home"))
    layout.make_private(tmp_path / "state")
    return tmp_path / "state"


def up(cluster_id: str, storage: str | None, *, name: str = "d", owner: int = ME) -> Path:
    """Create a cluster without nodes as the helper does. Return its shared folder."""
    request = layout.ClusterRequest(
        id=cluster_id,
        name=name,
        owner=owner,
        workspace="/w",
        image="0" * 16,
        distribution="debian-12",
        admin_key="ssh-ed25519 AAAA",
        storage=storage,
        nodes=(),
    )
    shared = helper._shared_folder(helper._load_state(request))
    home = shared / "home" / "ada"
    home.mkdir(parents=True, exist_ok=True)
    os.chown(home, UID, -1)
    return shared


def storages() -> Mapping[str, KeptStorage]:
    return {one.name: one for one in LocalProvider(LocalSettings()).storages()}


def spec(storage: str | None = "data", **user: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "e",
            "partitions": [{"name": "train", "nodes": 1}],
            "storage": {"name": storage},
            "users": [{"name": "ada", "uid": UID, **user}],
        }
    )


def plan(wanted: ClusterSpec) -> tuple[str, ...]:
    return LocalProvider(LocalSettings()).plan(wanted, Workspace.of(wanted.name)).notes


def test_storage_outlives_its_clusters(state: Path) -> None:
    (up(FIRST, "data") / "home/ada/weights").write_text("0.5")
    assert storages()["data"].used_by == ("d",)
    helper.down({"id": FIRST})
    assert [path.name for path in state.iterdir()] == ["storage"]
    assert helper.look({"id": FIRST}) == {"residue": []}
    (one,) = storages().values()
    assert (one.used_by, one.homes) == ((), {"ada": UID})
    assert str(one) == f"folder {state}/storage/{ME}/data (1MiB)"
    assert (up(SECOND, "data", name="e") / "home/ada/weights").read_text() == "0.5"


def test_last_storage_leaves_no_folder(state: Path) -> None:
    up(FIRST, "data")
    helper.down({"id": FIRST})
    LocalProvider(LocalSettings()).remove_storage(storages()["data"])
    assert list(state.iterdir()) == []


def test_folder_without_a_name_goes_with_its_cluster(state: Path) -> None:
    assert up(FIRST, None) == state / FIRST / "shared"
    helper.down({"id": FIRST})
    assert list(state.iterdir()) == []
    assert storages() == {}


def test_storage_is_used_by_one_cluster_at_a_time(state: Path) -> None:
    up(FIRST, "data")
    with refused("in-use/storage", ProvisionError, "cluster d"):
        up(SECOND, "data", name="e")
    assert not (state / SECOND).exists()
    with refused("in-use/storage", UsageError):
        plan(spec())
    with refused("in-use/storage", ProvisionError, "cluster d"):
        LocalProvider(LocalSettings()).remove_storage(storages()["data"])
    assert storages().keys() == {"data"}
    up(FIRST, "data")  # the same cluster again


@pytest.mark.parametrize(("had", "asked"), [(None, "data"), ("data", None), ("data", "other")])
def test_storage_of_an_existing_cluster_stays(
    state: Path, had: str | None, asked: str | None
) -> None:
    """Even if the workspace has lost its record of the last `up`."""
    workspace = Workspace.of("e")
    workspace.create()
    up(workspace.cluster_id(), had, name="e")
    assert plan(spec(had)) is not None
    with refused("exists/cluster", UsageError, "storage.name"):
        plan(spec(asked))
    assert (state / workspace.cluster_id()).is_dir()


def test_storage_belongs_to_an_account(state: Path) -> None:
    mine = up(FIRST, "data")
    assert up(SECOND, "data", owner=4711) != mine
    assert len(storages()) == 1
    helper.down({"id": FIRST})
    LocalProvider(LocalSettings()).remove_storage(storages()["data"])
    assert storages() == {}
    assert (state / "storage/4711/data").is_dir()


def test_plan_names_the_storage(state: Path) -> None:
    (note,) = (note for note in plan(spec()) if "storage" in note)
    assert "does not exist" in note
    up(FIRST, "data")
    helper.down({"id": FIRST})
    assert any(f"folder {state}/storage/{ME}/data" in note for note in plan(spec()))
    assert not any("storage" in note for note in plan(spec(None)))
    with refused("option-invalid/storage-users", UsageError):
        plan(spec(uid=2000))
