"""`--limit`, `node replace` and `node forget` change only the named hosts."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.cluster.nodes import (
    check_pending_release,
    expand_hosts,
    forget_machines,
    replacing,
)
from clusterctl.errors import UsageError
from clusterctl.providers.base import REPLACED, pending_releases
from clusterctl.providers.registry import provider_of
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import CONTROLLER, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused as rejected
from tests.unit.cluster.specs import spec_of

MakeWorkspace = Callable[..., Workspace]


def spec(nodes: str = "gpu[1-4]", **partitions: str) -> ClusterSpec:
    provider = {"type": "onprem", "controller": "ctl", "hosts": {"ctl": None, nodes: None}}
    named = ({"name": name, "hosts": hosts} for name, hosts in partitions.items())
    return spec_of(*named, name="own", provider=provider)


def nodes(found: ClusterSpec) -> dict[str, tuple[str, ...]]:
    return {p.name: found.node_names(p) for p in found.partitions}


def limit_spec(wanted: ClusterSpec, workspace: Workspace, limit: list[str]) -> ClusterSpec:
    return provider_of(wanted.provider).limited(wanted, workspace, limit)


def spec_without(wanted: ClusterSpec, names: list[str]) -> ClusterSpec:
    return provider_of(wanted.provider).without(wanted, names)


@pytest.fixture
def make_workspace(tmp_path: Path) -> MakeWorkspace:
    """Return the workspace of a cluster that `up` created from a spec."""

    def write(before: ClusterSpec | None = None) -> Workspace:
        workspace = Workspace(tmp_path / "own")
        workspace.create()
        if before is None:
            return workspace
        hosts = [host_of("ctl", CONTROLLER, address="10.0.0.1", host_key="ssh-ed25519 AAAA")]
        hosts += [
            host_of(n, address="10.0.0.2", partition=p.name, host_key="ssh-ed25519 AAAA")
            for p in before.partitions
            for n in before.node_names(p)
        ]
        inventory = inventory_of(cluster="own", provider="onprem", hosts=tuple(hosts), baked=False)
        write_atomic(workspace.inventory, inventory.text)
        write_atomic(workspace.spec, dump_spec(before))
        return workspace

    return write


def test_limit_spec_with_all_nodes_is_the_spec(make_workspace: MakeWorkspace) -> None:
    """After `node reboot`, `plan` compares the recorded spec with the file."""
    wanted = spec(train="gpu[1-2]")
    assert limit_spec(wanted, make_workspace(wanted), ["gpu2"]).partitions == wanted.partitions


def test_limit_spec_adds_only_the_named_host(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace(spec(train="gpu[1-2]"))
    assert nodes(limit_spec(spec(train="gpu[1-4]"), workspace, ["gpu3"])) == {
        "train": ("gpu1", "gpu2", "gpu3")
    }


def test_limit_spec_removes_only_the_named_host(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace(spec(train="gpu[1-3]"))
    assert nodes(limit_spec(spec(train="gpu1"), workspace, ["gpu3"])) == {"train": ("gpu1", "gpu2")}


def test_moved_host_outside_limit_keeps_its_partition(make_workspace: MakeWorkspace) -> None:
    workspace = make_workspace(spec(train="gpu[1-2]", big="gpu3"))
    wanted = spec(train="gpu1", big="gpu[2-3]")
    assert nodes(limit_spec(wanted, workspace, ["ctl"])) == {
        "train": ("gpu1", "gpu2"),
        "big": ("gpu3",),
    }
    assert nodes(limit_spec(wanted, workspace, ["gpu2"])) == {
        "train": ("gpu1",),
        "big": ("gpu2", "gpu3"),
    }


def test_machine_removed_from_spec_is_known_while_it_stays(
    make_workspace: MakeWorkspace,
) -> None:
    workspace = make_workspace(spec(train="gpu[1-3]"))
    found = limit_spec(spec("gpu1", train="gpu1"), workspace, ["ctl"])
    assert nodes(found) == {"train": ("gpu1", "gpu2", "gpu3")}
    assert {"gpu2", "gpu3"} <= set(found.provider.machines)  # type: ignore[union-attr]


def test_limit_spec_before_the_first_up_keeps_the_named_nodes(
    make_workspace: MakeWorkspace,
) -> None:
    wanted = spec(train="gpu[1-2]", big="gpu[3-4]")
    assert nodes(limit_spec(wanted, make_workspace(), ["ctl", "gpu2"])) == {"train": ("gpu2",)}
    with rejected("not-ready/controller", UsageError):
        limit_spec(wanted, make_workspace(), ["gpu2"])


def test_limit_spec_refuses_unknown_and_created_hosts(make_workspace: MakeWorkspace) -> None:
    with rejected("not-found/name", UsageError, "gpu9") as refused:
        limit_spec(spec(train="gpu1"), make_workspace(), ["gpu9"])
    assert refused.value.where == "--limit"
    with rejected("unsupported/nodes", UsageError):
        limit_spec(spec_of(name="own"), make_workspace(), ["own-train-1"])
    with rejected("unsupported/nodes", UsageError):
        spec_without(spec_of(name="own"), ["own-train-1"])


def test_spec_without_nodes_keeps_the_others(make_workspace: MakeWorkspace) -> None:
    assert nodes(spec_without(spec(train="gpu[1-2]", big="gpu3"), ["gpu3", "gpu1"])) == {
        "train": ("gpu2",)
    }
    with rejected("unsupported/last-node", UsageError):
        spec_without(spec(train="gpu1"), ["gpu1"])
    with rejected("unsupported/controller-removal", UsageError):
        spec_without(spec(train="gpu1"), ["ctl"])


@pytest.fixture
def workspace(make_workspace: MakeWorkspace) -> Workspace:
    """The workspace of a cluster of ctl, gpu1 and gpu2, each with its own host key."""
    workspace = make_workspace(spec(train="gpu[1-2]"))
    workspace.create_secrets()
    workspace.cluster_id()
    workspace.known_hosts.write_text("gpu1 ssh-ed25519 AAAA\ngpu10 ssh-ed25519 BBBB\n")
    workspace.joining.write_bytes(workspace.inventory.read_bytes())  # of an `up` that was killed
    return workspace


def files_below(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def known(file: Path) -> list[str]:
    return [host.name for host in Inventory.read(file.read_bytes()).hosts]


def test_replaced_machine_has_only_a_pending_release(workspace: Workspace) -> None:
    with replacing(workspace, ["gpu1"]):
        pass
    assert known(workspace.inventory) == known(workspace.joining) == ["ctl", "gpu2"]
    assert workspace.known_hosts.read_text() == "gpu10 ssh-ed25519 BBBB\n"
    (one,) = pending_releases(workspace)
    assert (one.host.name, one.address, one.why) == ("gpu1", "10.0.0.2", REPLACED)
    assert one.workspace.known_id() == workspace.known_id()
    assert one.workspace.key.read_bytes() == workspace.key.read_bytes()
    assert (one.machine.address, one.machine.become) == ("10.0.0.2", "sudo")


def test_replacement_that_fails_changes_nothing(workspace: Workspace) -> None:
    before = files_below(workspace.root)
    with pytest.raises(KeyboardInterrupt), replacing(workspace, ["gpu1"]):
        raise KeyboardInterrupt
    assert files_below(workspace.root) == before
    assert pending_releases(workspace) == ()


def test_replacement_repeated_is_recorded_once(workspace: Workspace) -> None:
    for _ in range(2):
        with replacing(workspace, ["gpu1"]):
            pass
        assert len(pending_releases(workspace)) == 1


def test_forget_machines_removes_pending_releases(workspace: Workspace) -> None:
    with replacing(workspace, ["gpu1"]):
        pass
    with rejected("not-found/name", UsageError, "gpu9"):
        forget_machines(workspace, ["gpu9"])
    with rejected("not-found/name", UsageError, "gpu2"):
        check_pending_release(workspace, ["gpu2"])
    forget_machines(workspace, ["gpu1"])
    assert pending_releases(workspace) == ()
    # Forgetting gpu1 again is no error. gpu2 becomes the controller in place of ctl.
    forget_machines(workspace, ["gpu1", "ctl"])
    inventory = Inventory.read(workspace.inventory.read_bytes())
    assert inventory.controller.name == "gpu2"
    forget_machines(workspace, ["gpu2"])
    assert not workspace.inventory.exists()


def test_forget_removes_release_but_not_host_of_same_name(
    workspace: Workspace,
) -> None:
    files_after_up = {
        path: path.read_bytes() for path in workspace.root.iterdir() if path.is_file()
    }
    with replacing(workspace, ["gpu1"]):
        pass
    for path, content in files_after_up.items():  # the machine in its place has joined
        write_atomic(path, content.replace(b"10.0.0.2", b"10.0.0.9"))
    before = {path: path.read_bytes() for path in files_after_up}
    (line,) = forget_machines(workspace, ["gpu1"])
    assert line.startswith("gpu1 (10.0.0.2), ")
    assert "stays" in line
    assert pending_releases(workspace) == ()
    assert {path: path.read_bytes() for path in files_after_up} == before
    (line,) = forget_machines(workspace, ["gpu1"])
    assert line.startswith("gpu1, ")
    assert known(workspace.inventory) == ["ctl", "gpu2"]


def test_host_ranges_are_expanded_to_names() -> None:
    assert expand_hosts(["gpu[1-2],ctl", "gpu1"]) == ("gpu1", "gpu2", "ctl")
    with rejected("option-invalid/hostlist", UsageError):
        expand_hosts(["gpu[1-"])
