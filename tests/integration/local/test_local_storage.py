"""The kept shared folder of a local cluster, which the next cluster of this name reuses."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import ProvisionError, UsageError
from clusterctl.providers.local import helper, image, layout, machine, provider, system
from clusterctl.providers.local.client import Helper
from clusterctl.providers.local.layout import ClusterRequest, Existing
from clusterctl.providers.local.provider import LocalProvider
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.state.workspace import Workspace
from tests.support.messages import refused
from tests.unit.local.states import a_state

NEW = "aaaaaa"
OLD = "bbbbbb"
OTHER = "cccccc"
UID = os.getuid() or 1001


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
    ):
        monkeypatch.setattr(module, name, lambda *_: None)
    monkeypatch.setattr(machine, "cgroups", lambda _: ())
    monkeypatch.setattr(Helper, "call", lambda _, verb, request: helper.VERBS[verb](request))
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    return tmp_path / "state"


def raised(
    cluster_id: str,
    *,
    keep: bool = True,
    name: str = "d",
    owner: int | None = None,
    home: Path | None = None,
) -> Path:
    """Create a cluster with a shared folder, as `up` leaves it."""
    state = a_state(
        cluster_id,
        name=name,
        owner=os.getuid() if owner is None else owner,
        workspace=str(home / name if home else Workspace.of(name).root),
        keep_storage=keep,
    )
    folder = layout.cluster_dir(cluster_id)
    (folder / "nodes" / "d-ctl" / "upper").mkdir(parents=True)
    (folder / "cluster.json").write_text(state.model_dump_json())
    home_of_ada = folder / "shared" / "home" / "ada"
    home_of_ada.mkdir(parents=True)
    (folder / "shared" / "home" / f".clusterctl-{cluster_id}").mkdir()
    (home_of_ada / "weights").write_text("0.5")
    os.chown(home_of_ada, UID, -1)
    return folder


def leave_behind(cluster_id: str) -> None:
    """Have a shared folder of a cluster that is down."""
    raised(cluster_id)
    helper.down({"id": cluster_id})


def request(storage: str | None, owner: int | None = None) -> ClusterRequest:
    return ClusterRequest(
        id=NEW,
        name="d",
        owner=os.getuid() if owner is None else owner,
        workspace="/w",
        image="0" * 16,
        distribution="debian-12",
        admin_key="ssh-ed25519 AAAA",
        storage=storage,
        nodes=(),
    )


def spec(*, keep: bool = True, **user: Any) -> ClusterSpec:
    said: dict[str, Any] = {
        "version": 1,
        "name": "d",
        "partitions": [{"name": "train", "nodes": 1}],
    }
    ada = {"name": "ada", "uid": UID, **user}
    return ClusterSpec.model_validate({**said, "storage": {"keep": keep}, "users": [ada]})


def kept_here(name: str = "d") -> tuple[KeptStorage, ...]:
    return LocalProvider(LocalSettings()).kept_storage(name, ["ada"])


def test_down_with_keep_leaves_only_the_shared_folder(state: Path) -> None:
    folder = raised(OLD)
    tried = [place / system.CHECK for place in (state, layout.CACHE)]
    for path in tried:  # as a check that was killed leaves them
        (path / "lower").mkdir(parents=True)
    helper.down({"id": OLD})
    assert not any(path.exists() for path in tried)
    assert {path.name for path in folder.iterdir()} == {"shared", "storage.json"}
    assert [path.name for path in (folder / "shared" / "home").iterdir()] == ["ada"]
    assert image.states() == ()
    assert helper.look({"id": OLD}) == {"residue": []}
    (kept,) = kept_here()
    assert (kept.cluster, kept.id, kept.homes) == ("d", OLD, {"ada": UID})
    assert str(kept) == f"folder {state / OLD / 'shared'} (1MiB)"
    helper.down({"id": OLD})  # done twice
    assert kept_here() == (kept,)


def test_down_without_keep_leaves_nothing(state: Path) -> None:
    raised(OLD, keep=False)
    helper.down({"id": OLD})
    assert list(state.iterdir()) == []
    assert kept_here() == ()


@pytest.mark.parametrize(
    ("noted", "keep", "was_up", "stays"),
    [
        (False, True, True, True),  # the last `up` was to keep it, but never came to it
        (False, False, True, False),
        (True, False, True, False),  # `down` has looked at what is on it
        (True, False, False, True),  # an `up` took it up and failed, and so did one without `keep`
        (True, None, True, True),  # the spec is lost
    ],
)
def test_down_removes_only_checked_folders(
    state: Path, *, noted: bool, keep: bool | None, was_up: bool, stays: bool
) -> None:
    """`down` does not look at what the applied spec keeps, nor at a cluster that was never up."""
    raised(OLD, keep=noted)
    workspace = Workspace.of("d")
    workspace.create()
    if keep is not None:
        workspace.spec.write_text(dump_spec(spec(keep=keep)))
    if was_up:
        workspace.configured.touch()
    LocalProvider(LocalSettings()).destroy(OLD, workspace=workspace)
    assert [storage.id for storage in kept_here()] == [OLD] * stays


def test_interrupted_down_and_up_without_keep_lose_nothing(state: Path) -> None:
    """The first has ended the cluster, but not its workspace: the second goes on under the same
    id.
    """
    leave_behind(OLD)
    here = {"id": OLD, "keep_storage": False, "workspace": str(Workspace.of("d").root)}
    wanted = request(None).model_copy(update=here)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(image, "layers", lambda _: ())
        patch.setattr(system, "choose_subnet", lambda *_: "10.9.0.0/24")
        helper._load_state(wanted)
    helper._prepare_shared_folder(wanted)
    helper.down({"id": OLD})
    assert [storage.id for storage in kept_here()] == [OLD]


def test_up_without_keep_does_not_cancel_an_earlier_keep(state: Path) -> None:
    raised(OLD)
    wanted = request(None).model_copy(update={"id": OLD, "keep_storage": False})
    helper._assign_numbers(helper._load_state(wanted), wanted)
    helper.down({"id": OLD})
    assert [storage.id for storage in kept_here()] == [OLD]


@pytest.mark.parametrize("fails", ["erase", "unlink"])
def test_interrupted_down_keeps_the_storage(
    state: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def end(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    folder = raised(OLD)
    place = system if fails == "erase" else Path
    with monkeypatch.context() as ended:
        ended.setattr(place, fails, end)
        with pytest.raises(KeyboardInterrupt):
            helper.down({"id": OLD})
    monkeypatch.setattr(layout, "RUN", state.with_name("run2"))  # the lock of the dead
    assert (folder / "shared/home/ada/weights").read_text() == "0.5"
    # It is the cluster's still.
    assert kept_here() == ()
    helper.down({"id": OLD})
    assert [kept.id for kept in kept_here()] == [OLD]


@pytest.mark.parametrize("made", [NEW, f"{NEW}/shared"], ids=["new", "an `up` was ended"])
def test_next_cluster_reuses_kept_storage(state: Path, made: str) -> None:
    leave_behind(OLD)
    (state / made).mkdir(parents=True)
    shared = helper._prepare_shared_folder(request(OLD))
    assert shared == state / NEW / "shared"
    assert (shared / "home/ada/weights").read_text() == "0.5"
    assert [path.name for path in state.iterdir()] == [NEW]
    # An `up` that goes on.
    assert helper._prepare_shared_folder(request(OLD)) == shared


def test_interrupted_up_leaves_no_kept_folder(state: Path) -> None:
    leave_behind(OLD)
    (state / OLD / "shared").rename(state / "taken")
    assert kept_here() == ()
    assert not (state / OLD).exists()


@pytest.mark.parametrize("wanted", [request(OTHER), request(OLD, owner=4711)])
def test_missing_or_foreign_storage_is_not_reused(state: Path, wanted: ClusterRequest) -> None:
    leave_behind(OLD)
    (state / NEW).mkdir()
    with refused("storage-gone", ProvisionError):
        helper._prepare_shared_folder(wanted)
    assert (state / OLD / "shared/home/ada/weights").exists()


def test_kept_storage_belongs_to_a_user_and_state_folder(state: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    for cluster_id, more in ((OLD, {}), (NEW, {"owner": 4711}), (OTHER, {"home": elsewhere})):
        raised(cluster_id, **more)  # type: ignore[arg-type]
        helper.down({"id": cluster_id})
    assert [kept.id for kept in kept_here()] == [OLD]
    assert kept_here("e") == ()
    elsewhere.rmdir()  # then it would be lost
    assert [kept.id for kept in kept_here()] == [OLD, OTHER]


def test_kept_storage_is_removed_by_name(state: Path) -> None:
    for cluster_id in (OLD, OTHER):
        leave_behind(cluster_id)
    (first, second) = kept_here()
    LocalProvider(LocalSettings()).remove_storage(first)
    assert kept_here() == (second,)
    assert [path.name for path in state.iterdir()] == [OTHER]


def notes(wanted: ClusterSpec, found: Existing = Existing()) -> tuple[str, ...]:  # noqa: B008
    """Return the notes of a plan about storage."""
    storages = (
        LocalProvider(LocalSettings()).kept_storage(wanted.name, ()) if wanted.storage.keep else ()
    )
    return provider._storage_notes(wanted, storages, found)


def test_plan_notes_that_kept_storage_is_reused(state: Path) -> None:
    assert notes(spec()) == ()
    leave_behind(OLD)
    (note,) = notes(spec())
    assert "reused" in note
    assert str(state / OLD / "shared") in note
    assert notes(spec(keep=False)) == ()


def test_kept_storage_needs_the_same_uids(state: Path) -> None:
    leave_behind(OLD)
    with pytest.raises(UsageError) as caught:
        notes(spec(uid=2000))
    assert caught.value.where == "users"
    assert all(word in caught.value.why for word in ("ada has", "2000", f"but uid {UID} "))


def test_cluster_with_a_shared_folder_reuses_no_kept_folder(state: Path) -> None:
    leave_behind(OLD)
    with refused("storage-keep-changed", UsageError):
        notes(spec(), Existing(nodes={"d-ctl": None}))
