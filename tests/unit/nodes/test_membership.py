"""A spec cut to some hosts: only they change, the others are in it as they are in the cluster."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.inventory import Host, Inventory
from clusterctl.membership import forget, limited, names_of, without
from clusterctl.spec import ClusterSpec
from clusterctl.spec.load import dump_spec
from clusterctl.workspace import Workspace, write_atomic

Raise = Callable[..., Workspace]


def spec(**partitions: str) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "own",
            "provider": {"type": "onprem", "controller": "ctl", "hosts": {"ctl": None, "gpu[1-4]": None}},
            "partitions": [{"name": name, "hosts": hosts} for name, hosts in partitions.items()],
        }
    )


def nodes(found: ClusterSpec) -> dict[str, tuple[str, ...]]:
    return {p.name: found.node_names(p) for p in found.partitions}


@pytest.fixture
def raised(tmp_path: Path) -> Raise:
    """A workspace with a cluster that was raised as this spec says."""

    def write(before: ClusterSpec | None = None) -> Workspace:
        workspace = Workspace(tmp_path / "own")
        workspace.create()
        if before is None:
            return workspace
        hosts = [Host(name="ctl", address="10.0.0.1", roles=("controller",), host_key="ssh-ed25519 AAAA")]
        hosts += [
            Host(
                name=n, address="10.0.0.2", roles=("compute",), partition=p.name, host_key="ssh-ed25519 AAAA"
            )
            for p in before.partitions
            for n in before.node_names(p)
        ]
        inventory = Inventory(
            cluster="own",
            cluster_id="abc",
            provider="onprem",
            hosts=tuple(hosts),
            network="10.0.0.0/24",
            shared="/shared",
            baked=False,
        )
        write_atomic(workspace.hosts, inventory.model_dump_json())
        write_atomic(workspace.spec, dump_spec(before))
        return workspace

    return write


def test_only_the_named_host_joins(raised: Raise) -> None:
    workspace = raised(spec(train="gpu[1-2]"))
    assert nodes(limited(spec(train="gpu[1-4]"), workspace, ["gpu3"])) == {"train": ("gpu1", "gpu2", "gpu3")}


def test_only_the_named_host_leaves(raised: Raise) -> None:
    workspace = raised(spec(train="gpu[1-3]"))
    assert nodes(limited(spec(train="gpu1"), workspace, ["gpu3"])) == {"train": ("gpu1", "gpu2")}


def test_a_host_that_the_spec_moves_stays_where_it_is_unless_it_is_named(raised: Raise) -> None:
    workspace = raised(spec(train="gpu[1-2]", big="gpu3"))
    wanted = spec(train="gpu1", big="gpu[2-3]")
    assert nodes(limited(wanted, workspace, ["ctl"])) == {"train": ("gpu1", "gpu2"), "big": ("gpu3",)}
    assert nodes(limited(wanted, workspace, ["gpu2"])) == {"train": ("gpu1",), "big": ("gpu2", "gpu3")}


def test_a_machine_that_the_spec_forgot_is_known_as_long_as_it_stays(raised: Raise) -> None:
    workspace = raised(spec(train="gpu[1-3]"))
    fewer = ClusterSpec.model_validate(
        {
            **spec(train="gpu1").model_dump(mode="json"),
            "provider": {"type": "onprem", "controller": "ctl", "hosts": {"ctl": None, "gpu1": None}},
        }
    )
    found = limited(fewer, workspace, ["ctl"])
    assert nodes(found) == {"train": ("gpu1", "gpu2", "gpu3")}
    assert {"gpu2", "gpu3"} <= set(found.provider.machines)  # type: ignore[union-attr]


def test_the_first_up_may_begin_with_some(raised: Raise) -> None:
    wanted = spec(train="gpu[1-2]", big="gpu[3-4]")
    assert nodes(limited(wanted, raised(), ["ctl", "gpu2"])) == {"train": ("gpu2",)}
    with pytest.raises(UsageError, match="the controller, ctl, comes first"):
        limited(wanted, raised(), ["gpu2"])


def test_without_a_limit_it_is_the_spec(raised: Raise) -> None:
    wanted = spec(train="gpu[1-2]")
    assert limited(wanted, raised(), ()) is wanted


def test_strangers_and_made_hosts_are_refused(raised: Raise) -> None:
    with pytest.raises(UsageError, match="no host gpu9"):
        limited(spec(train="gpu1"), raised(), ["gpu9"])
    made = ClusterSpec.model_validate(
        {"version": 1, "name": "own", "partitions": [{"name": "a", "nodes": 2}]}
    )
    with pytest.raises(UsageError, match="nodes of a local cluster"):
        limited(made, raised(), ["own-a-1"])


def test_without_some_nodes(raised: Raise) -> None:
    assert nodes(without(spec(train="gpu[1-2]", big="gpu3"), ["gpu3", "gpu1"])) == {"train": ("gpu2",)}
    with pytest.raises(UsageError, match="no node would be left"):
        without(spec(train="gpu1"), ["gpu1"])
    with pytest.raises(UsageError, match="ctl leads the cluster"):
        without(spec(train="gpu1"), ["ctl"])


def test_a_machine_that_is_replaced_is_not_known_any_more(raised: Raise) -> None:
    workspace = raised(spec(train="gpu[1-2]"))
    for name in ("trusted_hosts", "known_hosts"):
        (workspace.root / name).write_text("gpu1 ssh-ed25519 AAAA\ngpu10 ssh-ed25519 BBBB\n")
    forget(workspace, ["gpu1"])
    assert [host.name for host in Inventory.model_validate_json(workspace.hosts.read_bytes()).hosts] == [
        "ctl",
        "gpu2",
    ]
    for name in ("trusted_hosts", "known_hosts"):
        assert (workspace.root / name).read_text() == "gpu10 ssh-ed25519 BBBB\n"


def test_ranges_are_names() -> None:
    assert names_of(["gpu[1-2],ctl", "gpu1"]) == ("gpu1", "gpu2", "ctl")
    with pytest.raises(UsageError, match="no range of hosts"):
        names_of(["gpu[1-"])
