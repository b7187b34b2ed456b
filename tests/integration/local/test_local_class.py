"""The image layer of a class of nodes: built completely or not at all, kept while nodes use it."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from ipaddress import IPv4Network
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import ProvisionError
from clusterctl.providers.base import HostOptions
from clusterctl.providers.local import helper, image, layout, machine, provider, system
from clusterctl.providers.local.layout import NspawnNode, PlacedFile
from clusterctl.providers.templates import NodeFile, NodeTemplates
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import key_mark
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.state.workspace import Workspace
from tests.unit.local.states import a_state, play_helper

IMAGE = "a" * 16
INPUTS = "b" * 16
KEY = "ssh-ed25519 AAAA"
CLASS = image.class_key(IMAGE, INPUTS)
REQUEST = {"id": "abcdef", "image": IMAGE, "inputs": {"compute": INPUTS}, "admin_key": KEY}


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache with an image. Classes are baked without a machine."""
    for name in ("STATE", "CACHE", "RUN"):
        monkeypatch.setattr(layout, name, tmp_path / name.lower())
    upper = image.image_dir(IMAGE) / "upper"
    for folder in (upper, layout.CACHE / "base-b/root/etc", layout.STATE):
        folder.mkdir(parents=True)
    (image.image_dir(IMAGE) / "image.json").write_text('{"base": "b", "made": 0}')
    monkeypatch.setattr(image, "_open_for_baking", lambda *_: "key")
    monkeypatch.setattr(image, "_serve_ssh", lambda *_: (subprocess.Popen(["sleep", "60"]), 22))
    monkeypatch.setattr(image, "_close_after_baking", lambda _: None)
    monkeypatch.setattr(machine, "remove_cgroups", lambda _: None)
    monkeypatch.setattr(machine, "running", dict)  # what others bake is not ours to end
    return layout.CACHE


def unfinished() -> list[Path]:
    return sorted(layout.CACHE.glob(".building-*"))


def bake(text: str = "configured") -> None:
    others = unfinished()
    with image.class_baking(CLASS, IMAGE, KEY):
        (building,) = {*unfinished()} - {*others}
        (building / "root/etc/conf").write_text(text)
        (building / "root/etc/link").symlink_to("conf")


@contextmanager
def begun_and_killed(cache: Path) -> Iterator[Path]:
    """A builder that is killed when the body ends. Yield its folder."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        with image.class_baking(CLASS, IMAGE, KEY):
            (*cache.glob(".building-*/root"),)[0].joinpath("etc/conf").write_text("half of i")
            os.write(write, b".")
            signal.pause()
    os.read(read, 1)
    try:
        yield unfinished()[0]
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(read)
        os.close(write)


def raised(cluster_id: str, key: str) -> Path:
    """Create a cluster with a node of a class."""
    state = a_state(cluster_id, name="one", image=IMAGE)
    node = layout.cluster_dir(cluster_id) / "nodes" / "n"
    node.mkdir(parents=True)
    layout.class_note(node).write_text(key)
    layout.state_file(cluster_id).write_text(state.model_dump_json())
    return node


def test_template_with_killed_build_is_not_cached(cache: Path) -> None:
    with begun_and_killed(cache) as left:
        pass
    with pytest.raises(ProvisionError):
        image.class_layer(CLASS)
    assert left.exists()
    bake()
    assert unfinished() == []
    assert (image.class_layer(CLASS) / "etc/conf").read_text() == "configured"


def test_build_beside_a_living_one_succeeds_and_the_slower_is_discarded(cache: Path) -> None:
    others = threading.Event()
    done = threading.Event()

    def slower() -> None:
        with image.class_baking(CLASS, IMAGE, KEY):
            others.set()
            done.wait()

    thread = threading.Thread(target=slower)
    thread.start()
    others.wait()
    bake("the faster")
    done.set()
    thread.join()
    assert (image.class_layer(CLASS) / "etc/conf").read_text() == "the faster"
    assert unfinished() == []


@pytest.mark.parametrize("clean", ["down", "prune", "build"])
def test_only_the_folder_of_a_dead_builder_is_removed(
    cache: Path, clean: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped: list[str] = []
    monkeypatch.setattr(machine, "stop", stopped.extend)

    def remove() -> None:
        if clean == "down":
            image.remove_unfinished()
        elif clean == "prune":
            helper.cache({"prune": True})
        else:
            bake()

    with begun_and_killed(cache) as left:
        remove()
        assert left.exists()
        # What it lies on stays, too.
        assert image.image_dir(IMAGE).exists()
    assert stopped == []
    remove()
    assert unfinished() == []
    assert stopped == [f"clusterctl-bake-{left.name.rpartition('.')[2]}"]


def test_cache_is_listed_while_others_build_and_hold_the_locks(cache: Path) -> None:
    bake()
    with begun_and_killed(cache), image.cache_lock("up"), helper.state_lock("down"):
        found = helper.cache({})["images"]
    image.remove_unfinished()
    assert [one["key"] for one in found] == [IMAGE, f"class-{CLASS}", "base-b"]


@pytest.fixture
def configured(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The groups that the caller configured, in each call."""
    told: list[list[str]] = []

    class Caller:
        reading = None

        def check(self) -> None:
            pass

        def wait(self) -> None:
            for root in layout.CACHE.glob(".building-class-*/root"):
                # Another helper may have finished its own folder meanwhile.
                with suppress(FileNotFoundError):
                    (root / "etc/conf").write_text("configured")

    def answer(said: dict[str, Any]) -> None:
        if "ready" in said:
            told.append([*said["ready"]])

    monkeypatch.setattr(helper, "_Caller", Caller)
    monkeypatch.setattr(system, "answer", answer)
    return told


@pytest.mark.usefixtures("cache")
def test_concurrent_helpers_agree_on_a_class(configured: list[list[str]]) -> None:
    both = threading.Barrier(2)
    answers = []

    def ask() -> None:
        both.wait()
        answers.append(helper.bake_class(REQUEST))

    threads = [threading.Thread(target=ask) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The second may have found the class of the first.
    assert configured in ([["compute"]], [["compute"], ["compute"]])
    assert answers == [{"compute": CLASS}, {"compute": CLASS}]
    assert unfinished() == []


@pytest.mark.usefixtures("cache")
def test_missing_groups_are_baked_in_one_run(configured: list[list[str]]) -> None:
    both = {**REQUEST, "inputs": {"compute": INPUTS, "controller": "c" * 16}}
    made = helper.bake_class(both)
    assert all(map(image.class_layer, made.values()))
    assert configured == [["compute", "controller"]]
    system.erase(layout.class_folder(made["controller"]))
    assert helper.bake_class(both).keys() == made.keys()
    assert configured[1:] == [["controller"]]


def test_class_of_a_running_cluster_lies_over_its_image(cache: Path) -> None:
    bake()
    raised("abcdef", CLASS)
    assert helper.bake_class({**REQUEST, "image": "c" * 16})["compute"] == CLASS


def test_prune_keeps_the_classes_of_nodes(cache: Path) -> None:
    bake()
    node = raised("abcdef", CLASS)
    assert [(one.key, one.used_by) for one in image.cache_list()][1] == (f"class-{CLASS}", ("one",))
    assert image.prune() == ()
    system.erase(node)
    assert [one.key for one in image.prune()] == [f"class-{CLASS}"]
    assert sorted(path.name for path in cache.iterdir()) == ["base-b", f"image-{IMAGE}"]


def test_erase_old_classes_keeps_the_last_used(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A found class counts as used, because an `up` may be about to create nodes of it."""
    monkeypatch.setattr(image, "_KEPT_CLASSES", 2)
    bake()
    for number, name in enumerate(("old", "under-a-node", "newer", "newest")):
        (cache / f"class-{name}").mkdir()
        os.utime(cache / f"class-{name}", (number, number))
    os.utime(cache / f"class-{CLASS}", (0, 0))
    raised("abcdef", "under-a-node")
    assert helper.bake_class({**REQUEST, "id": "fedcba"})["compute"]
    image.erase_old_classes()
    left = {path.name for path in cache.glob("class-*")}
    assert left == {f"class-{CLASS}", "class-under-a-node", "class-newest"}


def test_baked_class_replaces_the_oldest(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image, "_KEPT_CLASSES", 1)
    monkeypatch.setattr(helper, "_bake_missing", lambda _: bake())
    (cache / "class-old").mkdir()
    os.utime(cache / "class-old", (0, 0))
    assert helper.bake_class(REQUEST)["compute"]
    assert [path.name for path in cache.glob("class-*")] == [f"class-{CLASS}"]


def test_homes_of_a_new_cluster_are_private(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """useradd creates them like this with umask 0077."""
    monkeypatch.setattr(layout, "STATE", tmp_path / "state")
    lower = (tmp_path / "upper", tmp_path / "base")
    for layer, text in zip(lower, ("ours", "theirs"), strict=True):
        (layer / "etc/skel").mkdir(parents=True)
        (layer / "etc/skel/.bashrc").write_text(text)
    wanted = layout.ClusterRequest(
        id="abcdef",
        name="one",
        owner=0,
        workspace="/w",
        nodes=(),
        image=IMAGE,
        distribution="debian-13",
        admin_key=KEY,
        homes=(layout.Home(name="ada", uid=2001, keys=(KEY,)),),
    )
    # of one that was ended midway
    shared = tmp_path / "shared"
    ended = tmp_path / "homes/bob"
    shared.mkdir()
    ended.mkdir(parents=True)
    machine.make_homes(wanted, shared, lower)
    found = {
        str(path.relative_to(shared)): (
            path.stat().st_uid,
            path.stat().st_gid,
            path.stat().st_mode & 0o777,
        )
        for path in shared.rglob("*")
    }
    assert found == {
        "home": (0, 0, 0o755),
        "home/.clusterctl-abcdef": (0, 0, 0o755),
        "home/ada": (2001, 2001, 0o700),
        "home/ada/.bashrc": (2001, 2001, 0o644),
        "home/ada/.ssh": (2001, 2001, 0o700),
        "home/ada/.ssh/authorized_keys": (2001, 2001, 0o600),
    }
    assert (shared / "home/ada/.bashrc").read_text() == "ours"
    lines = (shared / "home/ada/.ssh/authorized_keys").read_text().splitlines()
    assert lines == [f"# BEGIN{key_mark('one')}", KEY, f"# END{key_mark('one')}"]


def test_node_restarted_keeps_its_template_and_files(cache: Path) -> None:
    bake()
    number = machine.Machine("abcdef", NspawnNode(name="n"), 2)
    lower = (image.class_layer(CLASS), *image.layers(IMAGE))
    for name in ("etc/ssh", "home/clusterctl/.ssh"):
        (cache / "base-b/root" / name).mkdir(parents=True)
    own = PlacedFile(path="/etc/secret", data="c2VjcmV0", mode=0o400, owner=1234)
    try:
        for files in ([own], []):
            machine.prepare(number, lower, IPv4Network("10.9.0.0/24"), KEY, files)
            secret = number.root / "etc/secret"
            assert secret.read_text() == "secret"
            assert (secret.stat().st_mode & 0o777, secret.stat().st_uid) == (0o400, 1234)
            assert (number.root / "etc/conf").read_text() == "configured"
            system.run(["umount", str(number.root)], action="stopping")
    finally:
        system.erase(number.folder)
    assert not (image.class_layer(CLASS) / "etc/secret").exists()


@pytest.mark.parametrize(
    ("group", "classed"), [("compute", "one-train-1"), ("controller", "one-ctl")]
)
def test_hosts_of_a_group_without_class_get_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: str, classed: str
) -> None:
    """The distribution has none for controllers."""
    nodes = [
        {"name": name, "address": "10.9.8.2", "host_key": "k", "started": True, "made": True}
        for name in ("one-ctl", "one-train-1")
    ]
    made = {
        "subnet": "10.9.8.0/24",
        "distribution": "debian-13",
        "nodes": nodes,
        "limits_memory": True,
    }
    sent = play_helper(monkeypatch, made, made)
    workspace = Workspace(tmp_path / "one")
    workspace.create()
    workspace.create_secrets()
    settings = LocalSettings(distribution="debian-13")
    partitions = [{"name": "train", "nodes": 1}]
    values = {"version": 1, "name": "one", "provider": settings, "partitions": partitions}
    files = {host: {"/etc/secret": NodeFile(b"")} for host in ("one-ctl", "one-train-1")}
    found = provider.LocalProvider(settings).apply(
        ClusterSpec.model_validate(values),
        workspace,
        HostOptions(templates=NodeTemplates({group: CLASS}, lambda _: files)),
    )
    assert ([*sent[0]], found.from_template) == ([classed], (classed,))
