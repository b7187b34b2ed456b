"""`node reboot` drains, reboots and resumes nodes, and names nodes that don't come back."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import node
from clusterctl.cli.output import Screen
from clusterctl.cluster import nodes
from clusterctl.errors import SchedulerError, TransportError, UnreachableError, UsageError
from clusterctl.scheduler.base import Jobs, NodeInfo, Nodes
from clusterctl.scheduler.sites.mpirun import MpirunClient
from clusterctl.scheduler.slurm.availability import Availability, availability_of
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.process import Result
from clusterctl.util.progress import Clock
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused as rejected
from tests.support.scripted import ScriptedTransport, use_hosts


class Machine:
    """A host. away: number of commands that fail after a reboot. boots: whether a reboot works."""

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
    with rejected("unreachable/rebooted-node", TransportError) as caught:
        nodes.reboot(hosts, timeout_s=0)
    causes = {failure.host: failure.cause for failure in caught.value.failures}
    assert causes.keys() == {"b", "c"}
    assert causes["b"] == "connection refused"


def test_host_without_answer_does_not_stop_other_reboots() -> None:
    hosts: dict[str, Any] = {"a": Machine(), "b": Machine(), "c": Machine()}
    hosts["a"].down = 10**6
    with rejected("unreachable/rebooted-node", TransportError) as caught:
        nodes.reboot(hosts, timeout_s=60)
    (failure,) = caught.value.failures
    assert failure.cause.endswith(": connection refused")
    assert [(host.boot, host.down) for host in (hosts["b"], hosts["c"])] == [(2, 0), (2, 0)]


@pytest.mark.parametrize(
    ("made", "code"),
    [
        ({"provider": "local"}, "unsupported/reboot"),
        ({"address": "127.0.0.1"}, "unsupported/reboot-of-this-machine"),
        ({"ssh_address": "localhost"}, "unsupported/reboot-of-this-machine"),
    ],
)
def test_nodes_that_can_not_be_drained_are_not_rebooted(made: dict[str, str], code: str) -> None:
    with rejected(code, UsageError):
        node._refuse_reboot(cluster(**made), ["a"])


def test_reboot_of_other_nodes_than_this_machine_is_allowed() -> None:
    inventory = cluster()
    *others, last = inventory.hosts
    here = replace(last, address="127.0.0.1")
    node._refuse_reboot(replace(inventory, hosts=(*others, here)), ["a", "b"])


def test_reboot_without_slurm_is_refused(reboot: Reboot) -> None:
    reboot.slurm = MpirunClient(
        cluster(), "ada", ScriptedTransport([]), lambda _: ScriptedTransport([])
    )
    with rejected("unsupported/slurm", UsageError):
        reboot()


SPEC = """\
version: 1
name: own
provider: {type: onprem, controller: a, hosts: {a: 10.0.0.1, b: 10.0.0.2, c: 10.0.0.3}}
partitions: [{name: t, hosts: "a,b,c"}]
"""


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
    """A Slurm without jobs in which a person has drained b. resumes: a person resumes c."""

    drains_nodes = True

    def __init__(self, workspace: Workspace) -> None:
        self.workspace = workspace
        self.resumes = False
        self.clock = Clock()
        self.reasons = {"b": "noisy disk"}

    def nodes(self) -> tuple[NodeInfo, ...]:
        assert str(self.workspace.lock_holder()).startswith("'clusterctl node reboot'")
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


class Reboot:
    """`node reboot` of a, b and c in a cluster with a played Slurm, played machines and `up`.

    raised: the availability of the nodes at each `up`.
    """

    def __init__(self, workspace: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
        self.slurm: Jobs = SlurmOfThree(workspace)
        self.machines = {name: Machine() for name in "abc"}
        self.raised: list[dict[str, Availability]] = []

        def bring_up(_screen: object, _spec: object, *, limit: Sequence[str], **_: object) -> int:
            assert limit == ("a", "b", "c")
            self.raised.append({node.name: availability_of(node) for node in self.slurm.nodes()})
            return 0

        def with_lock(*args: object, **more: Any) -> int:
            # `up` takes the lock again.
            with workspace.lock("node reboot", wait_s=0, waiting=lambda _: None):
                return bring_up(*args, **more)

        workspace.create()
        workspace.inventory.write_text(cluster().text)
        workspace.spec.write_text(SPEC)
        monkeypatch.setenv("CLUSTERCTL_HOME", str(workspace.root.parent))
        use_hosts(monkeypatch, self.machines.__getitem__)
        monkeypatch.setattr(node, "bring_up", with_lock)
        monkeypatch.setattr(node, "scheduler_of", lambda *_: self.slurm)

    def __call__(self) -> int:
        return node.reboot(Screen(json=False, color=False, cluster="own"), ["a", "b", "c"])


@pytest.fixture
def reboot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Reboot:
    return Reboot(Workspace(tmp_path / "own"), monkeypatch)


def test_nodes_are_resumed_by_up_under_the_same_lock(
    reboot: Reboot,
) -> None:
    assert reboot() == 0
    assert [machine.boot for machine in reboot.machines.values()] == [2, 2, 2]
    # What is OUT is resumed once it is configured.
    assert reboot.raised == [
        {"a": Availability.OUT, "b": Availability.DRAINED, "c": Availability.OUT}
    ]


def test_reboot_of_a_manually_resumed_node_is_refused(reboot: Reboot) -> None:
    reboot.slurm.resumes = True
    with rejected("in-use/node", SchedulerError):
        reboot()
    assert [machine.boot for machine in reboot.machines.values()] == [1, 1, 1]
