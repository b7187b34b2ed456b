"""Booting nodes: back is who answers after another boot, and who does not come back is named."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.cli import node
from clusterctl.cli.output import Screen
from clusterctl.cluster import nodes
from clusterctl.errors import SchedulerError, TransportError, UnreachableError, UsageError
from clusterctl.scheduler.availability import Availability, availability_of
from clusterctl.scheduler.base import Jobs, NodeInfo, Nodes
from clusterctl.scheduler.mpirun import MpirunClient
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.process import Result
from clusterctl.util.progress import Clock
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused as rejected
from tests.support.scripted import ScriptedTransport


class Machine:
    """A host that boots when it is told to, is away for some questions then, and has another boot
    id.
    """

    def __init__(self, *, away: int = 2, boots: bool = True) -> None:
        self.away = away
        self.boots = boots
        self.boot = 1
        self.down = 0

    def run(self, argv: Sequence[str], **_: Any) -> Result:
        if self.down:
            self.down -= 1
            raise UnreachableError("no SSH connection", why="connection refused")
        if "reboot" in argv:
            if self.boots:
                self.boot = self.boot + 1
                self.down = self.away
                raise TransportError("the connection broke")
            return Result(0, "", "")
        return Result(0, f"boot {self.boot}\n", "")

    def close(self) -> None:
        pass


def test_reboot_waits_for_an_answer_after_another_boot() -> None:
    hosts: dict[str, Any] = {"a": Machine(), "b": Machine(away=1)}
    nodes.reboot(hosts, timeout_s=60)
    assert [(host.boot, host.down) for host in hosts.values()] == [(2, 0), (2, 0)]


def test_reboot_names_hosts_that_stay_away_with_the_cause() -> None:
    hosts: dict[str, Any] = {
        "a": Machine(away=0),
        "b": Machine(away=10**6),
        "c": Machine(boots=False),
    }
    with rejected("nodes-did-not-come-back", TransportError) as caught:
        nodes.reboot(hosts, timeout_s=0)
    said = {failure.host: failure.cause for failure in caught.value.failures}
    assert said.keys() == {"b", "c"}
    assert said["b"] == "connection refused"


def test_host_without_answer_does_not_stop_other_reboots() -> None:
    hosts: dict[str, Any] = {"a": Machine(), "b": Machine(), "c": Machine()}
    hosts["a"].down = 10**6
    with rejected("nodes-did-not-come-back", TransportError) as caught:
        nodes.reboot(hosts, timeout_s=60)
    (failure,) = caught.value.failures
    assert failure.cause.endswith(": connection refused")
    assert [(host.boot, host.down) for host in (hosts["b"], hosts["c"])] == [(2, 0), (2, 0)]


@pytest.mark.parametrize(
    ("made", "code"),
    [
        ({"provider": "local"}, "node-without-kernel"),
        ({"address": "127.0.0.1"}, "node-is-this-machine"),
        ({"ssh_address": "localhost"}, "node-is-this-machine"),
    ],
)
def test_nodes_that_can_not_be_drained_are_not_rebooted(made: dict[str, str], code: str) -> None:
    with rejected(code, UsageError):
        node._refuse_reboot(cluster(**made), ["a"])


def test_reboot_without_slurm_is_refused(booted: Booted) -> None:
    booted.slurm = MpirunClient(
        cluster(), "ada", ScriptedTransport([]), lambda _: ScriptedTransport([])
    )
    with rejected("needs-slurm", UsageError):
        booted()


def cluster(
    *,
    address: str = "10.0.0.1",
    ssh_address: str | None = None,
    provider: str = "onprem",
    **more: Any,
) -> Inventory:
    roles = {"a": ("controller", "compute"), "b": ("compute",), "c": ("compute",)}
    hosts = tuple(
        host_of(name, address=address, ssh_address=ssh_address, roles=parts, partition="t")
        for name, parts in roles.items()
    )
    return inventory_of(cluster="own", provider=provider, hosts=hosts, baked=False, **more)


class SlurmOfThree(Nodes):
    """Slurm without jobs: a and c take some, a person drained b. ``resumes``: somebody puts c
    back.
    """

    drains_nodes = True

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.resumes = False
        self.clock = Clock()
        self.reasons = {"b": "noisy disk"}

    def nodes(self) -> tuple[NodeInfo, ...]:
        assert str(self.workspace.lock_holder()).startswith("`clusterctl node reboot`")
        return tuple(
            NodeInfo(
                name, "idle+drain" if name in self.reasons else "idle", self.reasons.get(name, ""), 1, 1, "",
                ("t",), "clusterctl",
            )
            for name in "abc"
        )  # fmt: skip

    def drain(self, names: Sequence[str], reason: str) -> tuple[str, ...]:
        self.reasons |= dict.fromkeys(names, reason)
        return tuple(names)

    def all_jobs(self) -> tuple[()]:
        if self.resumes and "c" in self.reasons:
            self.resumes = False
            del self.reasons["c"]
        return ()


class Booted:
    """`node reboot` of a, b and c in a cluster whose Slurm, machines and `up` are played."""

    def __init__(self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slurm: Jobs = SlurmOfThree(workspace)
        self.machines = {name: Machine() for name in "abc"}
        self.raised: list[dict[str, Availability]] = []

        def to_machines(_: object) -> AbstractContextManager[Any]:
            return nullcontext(SimpleNamespace(to=self.machines.__getitem__))

        def bring_up(_screen: object, _spec: object, *, limit: Sequence[str], **_: object) -> int:
            assert limit == ("a", "b", "c")
            self.raised.append({one.name: availability_of(one) for one in self.slurm.nodes()})
            return 0

        def unlocked(*args: object, **more: Any) -> int:
            # As the `up` takes it.
            with workspace.lock("node reboot", wait_s=0, waiting=lambda _: None):
                return bring_up(*args, **more)

        monkeypatch.setattr(ChosenCluster, "workspace", lambda _: workspace)
        monkeypatch.setattr(node, "bring_up", unlocked)
        monkeypatch.setattr(node, "inventory_of", lambda _: cluster())
        monkeypatch.setattr(node, "applied_spec", lambda _: SimpleNamespace(provider=None))
        provider = SimpleNamespace(takes_single_hosts=True)
        monkeypatch.setattr(node, "provider_of", lambda _: provider)
        monkeypatch.setattr(node, "scheduler_of", lambda *_: self.slurm)
        monkeypatch.setattr(node, "Connections", to_machines)

    def __call__(self) -> int:
        return node.reboot(Screen(json=False, color=False), ["a", "b", "c"])


@pytest.fixture
def booted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Booted:
    return Booted(Workspace(tmp_path / "own"), monkeypatch)


def test_nodes_are_resumed_by_up_under_the_same_lock(
    booted: Booted,
) -> None:
    assert booted() == 0
    assert [machine.boot for machine in booted.machines.values()] == [2, 2, 2]
    # What is OUT is resumed once it is configured.
    assert booted.raised == [
        {"a": Availability.OUT, "b": Availability.DRAINED, "c": Availability.OUT}
    ]


def test_reboot_of_a_manually_resumed_node_is_refused(booted: Booted) -> None:
    booted.slurm.resumes = True
    with rejected("node-resumed-meanwhile", SchedulerError):
        booted()
    assert [machine.boot for machine in booted.machines.values()] == [1, 1, 1]
