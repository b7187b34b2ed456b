"""`plan` for local nodes: their changes, and how nodes share the CPUs and memory of the machine."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.providers.base import HostChange, HostPlan, load_known_hosts
from clusterctl.providers.local import capacity, helper
from clusterctl.providers.local.capacity import (
    MachineCapacity,
    compare,
    divide,
    is_oversubscribed,
    same_uids,
)
from clusterctl.providers.local.layout import ExistingMachines
from clusterctl.providers.local.provider import LocalProvider, unused_gpus
from clusterctl.spec.common import Partition, User
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.local import LocalSettings
from clusterctl.state.inventory import CONTROLLER, Host
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused as rejected
from tests.unit.local.states import a_state, play_helper

HERE = MachineCapacity((0, 1, 2, 3), 9 * 1024)
CTL = "d-ctl"
ONE = "d-train-1"
TWO = "d-train-2"
STATE = a_state(numbers={CTL: 1, ONE: 2, TWO: 3})


def spec(**train: Any) -> ClusterSpec:
    partition = {"name": "train", "nodes": 2, **train}
    return ClusterSpec.model_validate({"version": 1, "name": "d", "partitions": [partition]})


def node(name: str, cpus: int = 2, memory_mib: int = 4096) -> Host:
    return host_of(name, address="10.9.8.3", partition="train", cpus=cpus, memory_mib=memory_mib)


def there(*names: str, off: Collection[str] = ()) -> ExistingMachines:
    nodes = frozenset({CTL, *names})
    return ExistingMachines(state=STATE, nodes=nodes, running=nodes.difference(off))


def look(wanted: ClusterSpec, found: ExistingMachines, *nodes: Host) -> list[HostChange]:
    shares, _ = divide(wanted, HERE)
    hosts = {host.name: host for host in nodes}
    return [host for host in compare(wanted, shares, found, hosts) if host.action != "keep"]


def test_plan_of_a_new_cluster_makes_every_node() -> None:
    assert look(spec(price_per_hour=1.5), ExistingMachines()) == [
        HostChange(CTL, "make", "the controller"),
        HostChange(ONE, "make", "2 CPUs, 4 GiB of memory", usd_per_hour=1.5),
        HostChange(TWO, "make", "2 CPUs, 4 GiB of memory", usd_per_hour=1.5),
    ]


def test_unchanged_nodes_are_kept() -> None:
    assert look(spec(), there(ONE, TWO), node(ONE), node(TWO)) == []


def test_stopped_nodes_will_be_started() -> None:
    (change,) = look(spec(), there(ONE, TWO, off={ONE}), node(ONE), node(TWO))
    assert (change.name, change.action, change.off) == (ONE, "change", True)
    assert not change.ends_jobs


def test_changed_cpus_or_memory_change_a_node_in_place() -> None:
    changes = look(spec(cpus=1, memory="2GiB"), there(ONE, TWO), node(ONE), node(TWO, cpus=1))
    assert [(c.name, c.action, c.why) for c in changes] == [
        (ONE, "change", "was 2 CPUs, 4 GiB of memory"),
        (TWO, "change", "was 1 CPU, 4 GiB of memory"),
    ]
    assert [(change.destroys, change.ends_jobs) for change in changes] == [(False, True)] * 2


def test_recreated_node_is_replaced_with_its_size() -> None:
    shares, _ = divide(spec(), HERE)
    found = compare(spec(), shares, there(TWO), {TWO: node(TWO)}, recreated=(ONE, TWO, CTL))
    assert [(c.name, c.action) for c in found] == [(CTL, "keep"), (ONE, "make"), (TWO, "replace")]


def test_node_missing_in_the_spec_is_removed() -> None:
    (one, gone) = look(spec(nodes=1), there(ONE, TWO), node(ONE), node(TWO))
    assert one.action == "change"  # it has the whole machine now
    assert (gone.name, gone.action, gone.what, gone.destroys) == (
        TWO,
        "remove",
        "2 CPUs, 4 GiB of memory",
        True,
    )


def test_machines_of_a_cluster_are_known_by_its_id() -> None:
    assert helper.machines_of("a1b2c3", ["ca1b2c3-002", "cffffff-001"]) == ["ca1b2c3-002"]


def test_existing_of_a_cluster_reads_its_state_and_its_nodes(tmp_path: Path) -> None:
    machines = ("ca1b2c3-002",)
    folder = tmp_path / "a1b2c3"
    assert helper.existing_of(folder, machines) == ExistingMachines(machines=machines)
    for name in (CTL, ONE):  # TWO has a number already, but was not made any more
        (folder / "nodes" / name).mkdir(parents=True)
    (folder / "nodes" / ".removed-n").mkdir()
    (folder / "cluster.json").write_text(STATE.model_dump_json())
    nodes = frozenset({CTL, ONE})
    assert helper.existing_of(folder, machines) == ExistingMachines(
        state=STATE, nodes=nodes, running=frozenset({ONE}), machines=machines
    )


def test_hosts_are_read_from_the_record_of_up(tmp_path: Path) -> None:
    workspace = Workspace(tmp_path)
    assert load_known_hosts(workspace) == {}
    host = host_of(CTL, CONTROLLER, address="10.9.8.2")
    workspace.inventory.write_text(inventory_of(hosts=(host,)).text)
    assert load_known_hosts(workspace) == {CTL: host}
    workspace.inventory.write_text("torn")
    assert load_known_hosts(workspace) == {}


def test_same_uids_notes_a_uid_of_another_local_account(monkeypatch: pytest.MonkeyPatch) -> None:
    """The other account can kill the jobs, because their processes run on this machine."""
    users = [User(name="ada", uid=1000), User(name="hpc", uid=10000), User(name="kim", uid=1001)]
    names = {1000: "ada", 10000: "eve"}
    monkeypatch.setattr(capacity.pwd, "getpwuid", lambda uid: SimpleNamespace(pw_name=names[uid]))
    (note,) = same_uids(users)
    assert all(word in note for word in ("uid 10000", "eve", "hpc"))


def test_gpus_of_this_machine_give_a_note(tmp_path: Path) -> None:
    assert unused_gpus(tmp_path) == ()
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm"):
        (tmp_path / name).touch()
    (note,) = unused_gpus(tmp_path)
    assert "2 NVIDIA GPUs" in note


def test_plan_sums_costs_before_and_after() -> None:
    hosts = (
        HostChange("a", "keep", "", usd_per_hour=1.0),
        HostChange("b", "make", "", usd_per_hour=2.0),
        HostChange("c", "remove", "", usd_per_hour=4.0),
        HostChange("d", "change", "", usd_per_hour=8.0, was_usd_per_hour=16.0),
        HostChange("e", "replace", ""),
    )
    cost = HostPlan(hosts, other_usd_per_hour=(0.5, 0.25)).cost
    assert cost is not None
    assert (cost.now, cost.then, cost.unpriced) == (1 + 4 + 16 + 0.5, 1 + 2 + 8 + 0.25, ("e",))
    assert HostPlan(hosts[-1:]).cost is None


@pytest.mark.parametrize(
    ("wanted", "refused"), [("debian-13", True), ("debian-12", False), (None, False)]
)
def test_plan_refuses_another_distribution_for_existing_nodes(
    wanted: Any, *, refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = Workspace(tmp_path)
    workspace.create()
    workspace.cluster_id()
    state = STATE.model_copy(update={"distribution": "debian-12"})
    known = there(ONE, TWO).model_copy(update={"state": state})
    play_helper(monkeypatch, known.model_dump(mode="json"))
    provider = LocalProvider(LocalSettings(distribution=wanted))
    if not refused:
        notes = str(provider.plan(spec(), workspace).notes)
        # That of Debian 13 is no newer one of theirs.
        assert ("older image" in notes) == (wanted is not None)
        return
    with rejected("fixed-while-up/distribution", UsageError, "12", "13") as error:
        provider.plan(spec(), workspace)
    assert error.value.where == "provider.distribution"


def shared_by(*partitions: Partition) -> ClusterSpec:
    return ClusterSpec(version=1, name="demo", partitions=partitions)


def test_cores_are_disjoint_while_there_are_enough() -> None:
    shares, notes = divide(
        shared_by(Partition(name="train", nodes=3)), MachineCapacity(tuple(range(8)), 16384)
    )
    cores = [core for share in shares for core in share.cores]
    assert [share.size.cpus for share in shares] == [2, 2, 2]
    assert len(cores) == len(set(cores)) == 6
    assert notes == ()


def test_cores_of_nodes_of_several_sizes_are_disjoint_while_there_are_enough() -> None:
    wide = Partition(name="wide", nodes=1, cpus=5)
    thin = Partition(name="thin", nodes=1, cpus=2)
    shares, _ = divide(shared_by(wide, thin), MachineCapacity(tuple(range(8)), 16384))
    assert [share.cores for share in shares] == [(0, 1, 2, 3, 4), (5, 6)]


def test_divide_uses_only_allowed_cores() -> None:
    shares, _ = divide(shared_by(Partition(name="train", nodes=2)), MachineCapacity((3, 5), 16384))
    assert [share.cores for share in shares] == [(3,), (5,)]


def test_divide_notes_oversubscription() -> None:
    shares, notes = divide(
        shared_by(Partition(name="train", nodes=16)), MachineCapacity((0, 1), 24576)
    )
    assert all(share.size.cpus == 1 for share in shares)
    assert {share.cores for share in shares} == {(0,), (1,)}
    assert len(notes) == 1
    assert all(word in notes[0] for word in ("have 16 cores", "machine has 2;"))


def test_divide_keeps_a_reserve_of_memory() -> None:
    shares, _ = divide(
        shared_by(Partition(name="train", nodes=4)), MachineCapacity(tuple(range(4)), 9 * 1024)
    )
    assert [share.size.memory_mib for share in shares] == [2048] * 4


def test_divide_gives_what_the_spec_asks_for() -> None:
    wide = Partition(name="wide", nodes=1, cpus=4, memory="32GiB")
    shares, notes = divide(
        shared_by(wide, Partition(name="thin", nodes=1)), MachineCapacity((0, 1), 8192)
    )
    assert (shares[0].size.cpus, shares[0].size.memory_mib) == (4, 32 * 1024)
    assert shares[0].cores == (0, 1)
    assert [note.split(":")[0] for note in notes] == ["oversubscribed", "oversubscribed"]


def test_hosts_are_named_after_cluster_and_partition() -> None:
    shares, _ = divide(
        shared_by(Partition(name="a", nodes=2), Partition(name="b", nodes=1)),
        MachineCapacity((0, 1, 2), 4096),
    )
    assert [(s.host, s.partition) for s in shares] == [
        ("demo-a-1", "a"),
        ("demo-a-2", "a"),
        ("demo-b-1", "b"),
    ]


def test_hardware_here_reads_the_kernel() -> None:
    hardware = MachineCapacity.here()
    assert hardware.cores
    assert hardware.memory_mib > 0


@pytest.mark.parametrize(("cores", "oversubscribed"), [((0, 1), True), ((0, 1, 2), False)])
def test_nodes_that_share_cores_have_a_note_on_oversubscription(
    cores: tuple[int, ...], oversubscribed: bool
) -> None:
    shares, _ = divide(shared_by(Partition(name="train", nodes=3)), MachineCapacity(cores, 4096))
    assert is_oversubscribed(shares) is oversubscribed
