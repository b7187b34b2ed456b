"""`up` refuses a changed spec that would cancel jobs, and drains the nodes that it changes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

import pytest

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.impact import free_changed_hosts, reject_jobs, reject_taken_uids
from clusterctl.errors import ClusterctlError, SlurmError, UnreachableError, UsageError
from clusterctl.providers.base import HostChange, HostPlan, Provider
from clusterctl.scheduler.admin import SlurmNodes
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused as rejected
from tests.support.scripted import ScriptedTransport, Step, listed_nodes, queued
from tests.unit.cluster.specs import spec_of

ONE = "d-train-1"
TWO = "d-train-2"
OLD = "d-old-1"
DRAIN = Step(("scontrol", "update", f"nodename={TWO}", "state=drain", "reason=clusterctl: *"))
RESUME = Step(("scontrol", "update", f"nodename={TWO}", "state=resume"))
GROWS = HostChange(ONE, "change", "2 CPUs", "was 1 CPU", ends_jobs=True)
LEAVES = HostChange(TWO, "remove", "1 CPU", "no longer in the spec")


def spec(*partitions: dict[str, Any], **users: int) -> ClusterSpec:
    return spec_of(*partitions, users=[{"name": name, "uid": uid} for name, uid in users.items()])


def train(nodes: int, **more: Any) -> dict[str, Any]:
    return {"name": "train", "nodes": nodes, **more}


def before(*nodes: str) -> Inventory:
    return inventory_of(*(host_of(name) for name in nodes))


def sinfo(
    *nodes: str,
    state: str = "idle",
    allocated: int = 0,
    size: tuple[str, str] = ("1", "4000"),
    gres: str = "(null)",
) -> Step:
    cpus, memory = size
    facts = {"CPUs": cpus, "Memory": memory, "Gres": gres, "AllocMem": str(allocated)}
    return listed_nodes(*({"NodeList": name, "StateLong": state, **facts} for name in nodes))


def squeue(*jobs: tuple[int, str, str], asks_for: int = 1, state: str = "") -> Step:
    """Return the answer of squeue about jobs (id, partition, node). A job without a node is
    pending, unless ``state`` says otherwise. asks_for: the number of nodes that each job requested.
    """
    return queued(
        *(
            {
                "JobID": str(number),
                "Name": "long",
                "Partition": partition,
                "State": state or ("RUNNING" if node else "PENDING"),
                "NodeList": node,
                "tres-alloc": f"cpu=1,node={asks_for}",
            }
            for number, partition, node in jobs
        )
    )


@dataclass
class Hosts:
    up: bool

    def alive(self, cluster_id: str) -> bool:
        assert cluster_id == "a1b2c3"
        return self.up


@contextmanager
def asked_in_order(*steps: Step) -> Iterator[SlurmNodes]:
    """Yield a client of Slurm that must run exactly these commands."""
    transport = ScriptedTransport(steps)
    try:
        yield SlurmNodes(transport, clock=Clock(sleep=lambda _: None), patience_s=0)
    finally:
        assert transport.left == ()


def cluster_of(wanted: ClusterSpec, was: Inventory, slurm: SlurmNodes, *, alive: bool) -> Any:
    cluster: Any = ClusterContext.of(
        wanted, workspace=Workspace(Path("unused")), provider=cast(Provider, Hosts(alive))
    )
    cluster.inventory = was
    cluster.applied = wanted
    cluster.scheduler = lambda *_, **__: slurm
    return cluster


def look(
    wanted: ClusterSpec,
    was: Inventory,
    *steps: Step,
    hosts: tuple[HostChange, ...] = (LEAVES,),
    drain: bool = False,
    alive: bool = True,
) -> tuple[str, ...]:
    """Return the drained nodes. steps: all commands that Slurm gets."""
    with asked_in_order(*steps) as slurm:
        cluster = cluster_of(wanted, was, slurm, alive=alive)
        return reject_jobs(cluster, HostPlan(hosts), drain=drain)


def causes(wanted: ClusterSpec, was: Inventory, *steps: Step, hosts: Any = (LEAVES,)) -> list[str]:
    """Return a text for each job for which the change is refused."""
    with rejected("would-lose/jobs", UsageError) as caught:
        look(wanted, was, *steps, hosts=hosts)
    return caught.value.why.split("; ")


def test_jobs_of_a_leaving_node_refuse_the_change() -> None:
    commands = sinfo(ONE, TWO), squeue((7, "train", TWO), (8, "train", ONE))
    with rejected("would-lose/jobs", UsageError) as caught:
        look(spec(train(1)), before(ONE, TWO), *commands)
    assert caught.value.why == f"job 7 (long) of ada on {TWO}: {TWO} leaves the cluster"
    assert f"clusterctl node drain {TWO} " in caught.value.fix


def test_without_slurm_the_user_waits_instead_of_draining() -> None:
    with asked_in_order(sinfo(ONE, TWO), squeue((7, "train", TWO))) as scheduler:
        scheduler.drains_nodes = False  # as MpirunClient
        cluster = cluster_of(spec(train(1)), before(ONE, TWO), scheduler, alive=True)
        with rejected("would-lose/jobs", UsageError) as caught:
            reject_jobs(cluster, HostPlan((LEAVES,)))
    assert "clusterctl wait 7" in caught.value.fix
    assert "node drain" not in caught.value.fix


@pytest.mark.parametrize(
    ("state", "refuses"), [("RUNNING", True), ("NEWER_STATE", True), ("REQUEUE_HOLD", False)]
)
def test_job_on_unknown_nodes_refuses_the_change(state: str, refuses: bool) -> None:
    commands = sinfo(ONE), squeue((7, "train", ""), state=state)
    if not refuses:
        assert look(spec(train(1)), before(ONE), *commands, hosts=(GROWS,)) == ()
        return
    (cause,) = causes(spec(train(1)), before(ONE), *commands, hosts=(GROWS,))
    assert cause.startswith("job 7 ")


def test_node_with_a_job_is_not_resized() -> None:
    commands = sinfo(ONE), squeue((7, "train", ONE))
    (cause,) = causes(spec(train(1)), before(ONE), *commands, hosts=(GROWS,))
    assert cause.endswith(f"{ONE} is changed: was 1 CPU")
    assert look(spec(train(1)), before(ONE), sinfo(ONE), squeue(), hosts=(GROWS,)) == ()


@pytest.mark.parametrize(("sizes", "is_told"), [({}, True), ({"cpus": 1, "memory": "4GiB"}, False)])
def test_user_is_told_how_nodes_keep_their_shares_of_this_machine(
    sizes: dict[str, Any], is_told: bool
) -> None:
    with rejected("would-lose/jobs", UsageError) as caught:
        commands = sinfo(ONE), squeue((7, "train", ONE))
        look(spec(train(2, **sizes)), before(ONE), *commands, hosts=(GROWS,))
    assert ("`cpus` and `memory` of train" in caught.value.fix) is is_told


def test_hosts_recreated_or_changed_by_the_provider_refuse_jobs() -> None:
    hosts = (
        HostChange(ONE, "replace", "", "another zone"),
        HostChange(TWO, "change", "", "another machine type", ends_jobs=True),
        HostChange("d-ctl", "change", "", "another machine type", ends_jobs=True),
    )
    commands = sinfo(ONE, TWO), squeue((7, "train", ONE), (8, "train", TWO), (9, "train", ""))
    found = causes(spec(train(2)), before(ONE, TWO), *commands, hosts=hosts)
    assert [cause.partition(": ")[2] for cause in found] == [
        f"{ONE} is recreated: another zone",
        f"{TWO} is changed: another machine type",
    ]


def test_replaced_machine_loses_its_jobs() -> None:
    hosts = (HostChange(TWO, "replace", "", "another machine takes its place", released=True),)
    commands = sinfo(ONE, TWO), squeue((7, "train", TWO), (8, "train", ONE))
    (cause,) = causes(spec(train(2)), before(ONE), *commands, hosts=hosts)
    assert cause.startswith("job 7 ")


def test_replaced_controller_ends_all_jobs() -> None:
    hosts = (HostChange("d-ctl", "replace", "", "another disk"),)
    commands = sinfo(ONE), squeue((7, "train", ONE), (9, "train", ""))
    found = causes(spec(train(1)), before(ONE), *commands, hosts=hosts)
    assert [cause.endswith(": another disk") for cause in found] == [True, True]


@pytest.mark.parametrize(
    "hosts",
    [
        (),
        (HostChange(ONE, "change", "", "it is off", off=True),),
        (HostChange("d-new-1", "make", ""),),
    ],
    ids=["nothing", "started", "added"],
)
def test_change_that_ends_no_jobs_does_not_ask_slurm(hosts: tuple[HostChange, ...]) -> None:
    assert look(spec(train(2)), before(ONE, TWO), hosts=hosts) == ()


def test_leaving_node_with_job_is_resumed() -> None:
    commands = sinfo(ONE, TWO), DRAIN, squeue((7, "train", TWO), (8, "train", ONE)), RESUME
    with rejected("would-lose/jobs", UsageError):
        look(spec(train(1)), before(ONE, TWO), *commands, drain=True)


def test_leaving_idle_node_is_drained() -> None:
    commands = sinfo(ONE, TWO), DRAIN, squeue((8, "train", ONE))
    assert look(spec(train(1)), before(ONE, TWO), *commands, drain=True) == (TWO,)


def test_nodes_are_free_before_files_are_looked_for() -> None:
    """A job that runs there may still write files."""
    with asked_in_order(sinfo(ONE, TWO), DRAIN, squeue((7, "train", TWO)), RESUME) as slurm:
        cluster = cluster_of(spec(train(1)), before(ONE, TWO), slurm, alive=True)
        with rejected("would-lose/jobs", UsageError):
            free_changed_hosts(cluster, HostPlan((LEAVES,)))


def required(*rows: str) -> Step:
    argv = ("squeue", "--noheader", "--states=PENDING", "--format=%F|%n")
    return Step(argv, "".join(f"{row}\n" for row in rows))


@pytest.mark.parametrize(
    ("rows", "affected"),
    [
        (["7|d-train-[1-2]", "8|"], ["7"]),
        ([f"7|{ONE}", f"8|{TWO}"], ["8"]),
        (["7|", "garbage", "x|y"], []),
    ],
    ids=["range", "other-node", "damaged"],
)
def test_waiting_job_that_names_a_leaving_node_refuses_the_change(
    rows: list[str], affected: list[str]
) -> None:
    waiting = squeue((7, "train", ""), (8, "old,train", ""))
    commands = sinfo(ONE, TWO), waiting, required(*rows)
    if not affected:
        assert look(spec(train(1)), before(ONE, TWO), *commands) == ()
        return
    found = causes(spec(train(1)), before(ONE, TWO), *commands)
    assert [cause.split()[1] for cause in found] == affected


def test_verification_job_of_a_killed_up_refuses_no_change() -> None:
    commands = sinfo(ONE, TWO), squeue((7, "clusterctl-proof", TWO))
    assert look(spec(train(1)), before(ONE, TWO), *commands) == ()


def test_partition_of_slurm_extra_keeps_its_jobs() -> None:
    lines = {"slurm": {"extra": ["PartitionName=low Nodes=ALL PriorityTier=0"]}}
    wanted = spec_of(train(1), **lines)
    commands = sinfo(ONE, TWO), squeue((7, "low", "")), required("7|")
    assert look(wanted, before(ONE, TWO), *commands) == ()


def test_waiting_job_of_a_removed_partition_refuses_the_change() -> None:
    jobs = squeue((7, "old", ""), (8, "old,train", ""), (9, "train", ""))
    commands = sinfo(ONE), jobs, required("7|", "8|", "9|")
    (cause,) = causes(spec(train(1)), before(ONE, OLD), *commands)
    assert cause.startswith("job 7 (long)")
    assert "partition old" in cause


@pytest.mark.parametrize(("partition", "refuses"), [("train", True), ("train,big", False)])
def test_waiting_job_with_more_nodes_than_its_partition_keeps_refuses_the_change(
    partition: str, *, refuses: bool
) -> None:
    wanted = spec(train(1), {"name": "big", "nodes": 2})
    commands = sinfo(ONE, TWO), squeue((7, partition, ""), asks_for=2), required("7|")
    if not refuses:
        assert look(wanted, before(ONE, TWO), *commands) == ()
        return
    (cause,) = causes(wanted, before(ONE, TWO), *commands)
    assert cause.startswith("job 7 (long)")
    assert "2 nodes" in cause


def test_waiting_job_that_had_too_few_nodes_before_keeps_none_in_the_cluster() -> None:
    commands = sinfo(ONE, TWO), squeue((7, "train", ""), asks_for=5), required("7|")
    assert look(spec(train(1)), before(ONE, TWO), *commands) == ()


@pytest.mark.parametrize("error", [SlurmError("slurmctld is away"), UnreachableError("no answer")])
def test_silent_controller_means_unknown_jobs_if_nodes_live(error: ClusterctlError) -> None:
    away = Step(("sinfo", "..."), error=error)
    with rejected("would-lose/jobs-unknown", UsageError):
        look(spec(train(1)), before(ONE, TWO), away)


def test_silent_controller_of_hosts_that_are_off_has_no_jobs() -> None:
    away = Step(("sinfo", "..."), error=UnreachableError("no answer"))
    assert look(spec(train(1)), before(ONE, TWO), away, alive=False) == ()


@pytest.mark.parametrize("error", [SlurmError("away"), UnreachableError("no")])
def test_nodes_are_resumed_if_jobs_are_unknown(error: ClusterctlError) -> None:
    commands = sinfo(ONE, TWO), DRAIN, Step(("squeue", "..."), error=error), RESUME
    with rejected("would-lose/jobs-unknown", UsageError):
        look(spec(train(1)), before(ONE, TWO), *commands, drain=True)


def test_nodes_are_resumed_if_waiting_jobs_are_unknown_or_the_user_interrupts() -> None:
    asked = sinfo(ONE, TWO), DRAIN, squeue((7, "train", ""))
    away = replace(required(), error=SlurmError("away"))
    with rejected("would-lose/jobs-unknown", UsageError):
        look(spec(train(1)), before(ONE, TWO), *asked, away, RESUME, drain=True)
    interrupted = Step(("squeue", "..."), error=KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        look(
            spec(train(1)),
            before(ONE, TWO),
            sinfo(ONE, TWO),
            DRAIN,
            interrupted,
            RESUME,
            drain=True,
        )


def test_node_that_slurm_does_not_drain_is_not_removed() -> None:
    refused = Step(DRAIN.argv, stderr="slurm_update error", rc=1)
    with rejected("would-lose/jobs-unknown", UsageError):
        look(spec(train(1)), before(ONE, TWO), sinfo(ONE, TWO), refused, RESUME, drain=True)


def test_uid_of_another_user_is_refused() -> None:
    accounts = "root:x:0:0:root:/root:/bin/sh\nada:x:2001:2001::/shared/home/ada:/bin/bash\n"
    reject_taken_uids(spec(train(1), ada=2001, bob=2002), accounts)
    reject_taken_uids(spec(train(1), ada=2003), accounts)
    with rejected("host-unfit/uid-taken", UsageError, "2001") as caught:
        reject_taken_uids(spec(train(1), bob=2001), accounts)
    assert "2001" in caught.value.why
