"""The impact of a changed spec: jobs that would end, and nodes that must keep their size."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import pytest

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.impact import (
    Impact,
    free_leaving_hosts,
    impact_of,
    reject,
    reject_taken_uids,
)
from clusterctl.errors import ClusterctlError, Notice, SlurmError, UnreachableError, UsageError
from clusterctl.providers.base import HostChange, HostPlan, Provider, Size
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
NOTHING: tuple[dict[str, Size], tuple[str, ...]] = ({}, ())
RESUME = Step(("scontrol", "update", f"nodename={TWO}", "state=resume"))


def spec(*partitions: dict[str, Any], **users: int) -> ClusterSpec:
    return spec_of(*partitions, users=[{"name": name, "uid": uid} for name, uid in users.items()])


def train(nodes: int, **more: Any) -> dict[str, Any]:
    return {"name": "train", "nodes": nodes, **more}


def before(*nodes: str, cpus: int = 1, memory_mib: int = 4000) -> Inventory:
    return inventory_of(*(host_of(name, cpus=cpus, memory_mib=memory_mib) for name in nodes))


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


def squeue(*jobs: tuple[int, str, str], asks_for: int = 1) -> Step:
    """Return the answer of squeue about jobs (id, partition, node). A job without a node is
    pending. asks_for: the number of nodes that each job requested.
    """
    return queued(
        *(
            {
                "JobID": str(number),
                "Name": "long",
                "Partition": partition,
                "State": "RUNNING" if node else "PENDING",
                "NodeList": node,
                "tres-alloc": f"cpu=1,node={asks_for}",
            }
            for number, partition, node in jobs
        )
    )


@dataclass
class Hosts:
    of: Mapping[str, Size]
    up: bool

    def sizes(self, spec: ClusterSpec) -> Mapping[str, Size]:
        del spec
        return self.of

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


def context(wanted: ClusterSpec, provider: Hosts) -> Any:
    return ClusterContext.of(
        wanted, workspace=Workspace(Path("unused")), provider=cast(Provider, provider)
    )


def look(
    wanted: ClusterSpec,
    was: Inventory,
    sizes: dict[str, Size],
    *steps: Step,
    hosts: tuple[HostChange, ...] = (),
    force: bool = False,
    alive: bool = True,
) -> tuple[dict[str, Size], tuple[str, ...]]:
    """Return (node -> size that it keeps, notes)."""
    with asked_in_order(*steps) as slurm:
        cluster = context(wanted, Hosts(sizes, alive))
        cluster.inventory = was
        cluster.applied = wanted
        cluster.scheduler = lambda *_, **__: slurm
        keep = free_leaving_hosts(cluster, HostPlan(hosts), force=force)
        return {**keep}, tuple(cluster.notes)


def look_ahead(
    wanted: ClusterSpec,
    was: Inventory,
    sizes: dict[str, Size],
    *steps: Step,
    hosts: tuple[HostChange, ...] = (),
    alive: bool = True,
) -> Impact:
    """Return the impact of a plan. steps: all commands; none of them changes the cluster."""
    with asked_in_order(*steps) as slurm:
        return impact_of(context(wanted, Hosts(sizes, alive)), was, HostPlan(hosts), slurm)


def test_look_ahead_drains_nothing_and_ends_nothing() -> None:
    sizes = {ONE: Size(2, 8000)}
    commands = sinfo(ONE, TWO), squeue((7, "train", TWO), (8, "train", ONE))
    found = look_ahead(spec(train(1)), before(ONE, TWO), sizes, *commands)
    ((job, why),) = ((job.job.id, job.why) for job in found.affected)
    assert (job, TWO in why) == ("7", True)
    assert found.keep == {ONE: Size(1, 4000)}
    (note,) = found.notes
    assert note.startswith(f"{ONE} keeps 1 CPU and 3.9GiB")
    with rejected("jobs-would-end", UsageError):
        reject(found)


def test_hosts_replaced_or_restarted_by_the_provider_end_jobs() -> None:
    same = {ONE: Size(1, 4000), TWO: Size(1, 4000)}
    hosts = (
        HostChange(ONE, "replace", "", "another zone"),
        HostChange(TWO, "change", "", "another machine type", restarts=True),
        HostChange("d-ctl", "change", "", "another machine type", restarts=True),
    )
    commands = sinfo(ONE, TWO), squeue((7, "train", ONE), (8, "train", TWO), (9, "train", ""))
    found = look_ahead(spec(train(2)), before(ONE, TWO), same, *commands, hosts=hosts)
    assert [(job.job.id, job.why) for job in found.affected] == [
        ("7", f"{ONE} is recreated: another zone"),
        ("8", f"{TWO} is restarted: another machine type"),
    ]
    none_begins = Step(
        ("scontrol", "update", f"nodename={ONE},{TWO}", "state=drain", "reason=clusterctl: *")
    )
    resumed = Step(("scontrol", "update", f"nodename={ONE},{TWO}", "state=resume"))
    commands = sinfo(ONE, TWO), none_begins, squeue((7, "train", ONE)), resumed
    with rejected("jobs-would-end", UsageError):
        look(spec(train(2)), before(ONE, TWO), same, *commands, hosts=hosts)


def test_node_with_a_job_keeps_its_disks() -> None:
    hosts = (
        HostChange(ONE, "change", "", detached_disks=("mine",)),
        HostChange("d-ctl", "change", "", deleted_disks=("data",)),
    )
    same = {ONE: Size(1, 4000), TWO: Size(1, 4000)}
    commands = sinfo(ONE, TWO), squeue((7, "train", ONE), (8, "train", TWO))
    found = look_ahead(spec(train(2)), before(ONE, TWO), same, *commands, hosts=hosts)
    assert [(job.job.id, job.why) for job in found.affected] == [("7", f"{ONE} loses mine")]


def test_replaced_machine_loses_its_jobs() -> None:
    hosts = (HostChange(TWO, "replace", "", "another machine takes its place", released=True),)
    found = look_ahead(
        spec(train(2)),
        before(ONE),
        {},
        sinfo(ONE, TWO),
        squeue((7, "train", TWO), (8, "train", ONE)),
        hosts=hosts,
    )
    ((job, why),) = ((job.job.id, job.why) for job in found.affected)
    assert (job, why.startswith(TWO)) == ("7", True)


def test_replaced_controller_ends_all_jobs() -> None:
    hosts = (HostChange("d-ctl", "replace", "", "another disk"),)
    commands = sinfo(ONE), squeue((7, "train", ONE), (9, "train", ""))
    found = look_ahead(spec(train(1)), before(ONE), {}, *commands, hosts=hosts)
    (why,) = {job.why for job in found.affected}
    assert why.endswith(": another disk")
    assert len(found.affected) == 2


def test_look_ahead_without_an_answer_of_slurm_is_unknown() -> None:
    away = Step(("sinfo", "..."), error=UnreachableError("no answer"))
    found = look_ahead(spec(train(1)), before(ONE, TWO), {}, away)
    assert found.unknown == "no answer"
    with rejected("jobs-unknown", UsageError):
        reject(found)
    assert look_ahead(spec(train(1)), before(ONE, TWO), {}, away, alive=False) == Impact()


@pytest.mark.parametrize("was", [(ONE, TWO), (ONE,)])
def test_impact_of_no_change_does_not_ask_slurm(was: tuple[str, ...]) -> None:
    assert look(spec(train(2)), before(*was), {ONE: Size(1, 4000), TWO: Size(1, 4000)}) == NOTHING


def test_busy_node_keeps_its_default_size() -> None:
    sizes = {ONE: Size(2, 8000)}
    idle = look(spec(train(1)), before(ONE), sizes, sinfo(ONE), squeue())
    assert idle == NOTHING
    keep, notes = look(spec(train(1)), before(ONE), sizes, sinfo(ONE), squeue((7, "train", ONE)))
    assert keep == {ONE: Size(1, 4000)}
    (note,) = notes
    assert note.startswith(f"{ONE} keeps 1 CPU and 3.9GiB")


def test_node_whose_jobs_end_gets_its_new_size() -> None:
    commands = sinfo(ONE, TWO), squeue((7, "train", f"{ONE},{TWO}"))
    found = look_ahead(spec(train(1)), before(ONE, TWO), {ONE: Size(2, 8000)}, *commands)
    assert ([job.job.id for job in found.affected], found.keep) == (["7"], {})


def test_leaving_node_with_job_is_rejected_and_resumed() -> None:
    commands = sinfo(ONE, TWO), DRAIN, squeue((7, "train", TWO), (8, "train", ONE)), RESUME
    with rejected("jobs-would-end", UsageError) as caught:
        look(spec(train(1)), before(ONE, TWO), {ONE: Size(1, 4000)}, *commands)
    assert f"{TWO}" in caught.value.why
    assert "--force" in caught.value.fix


def test_leaving_idle_node_is_drained() -> None:
    commands = sinfo(ONE, TWO), DRAIN, squeue((8, "train", ONE))
    assert look(spec(train(1)), before(ONE, TWO), {ONE: Size(1, 4000)}, *commands) == NOTHING


def test_force_ends_the_jobs_with_the_reason_in_their_accounting() -> None:
    why = f"admincomment=clusterctl up --force: {TWO} leaves the cluster"
    commands = (
        *(sinfo(ONE, TWO), DRAIN, squeue((7, "train", TWO))),
        Step(("scontrol", "update", "jobid=7", why)),
        Step(("scontrol", "update", "jobid=7", "requeue=0")),
        *(Step(("scancel", "7")), squeue()),
    )
    _, notes = look(spec(train(1)), before(ONE, TWO), {ONE: Size(1, 4000)}, *commands, force=True)
    (note,) = notes
    assert isinstance(note, Notice)
    assert note.code == "job-ended"
    assert "job 7 (long)" in note


def required(*rows: str) -> Step:
    argv = ("squeue", "--noheader", "--states=PENDING", "--format=%F|%n")
    return Step(argv, "".join(f"{row}\n" for row in rows))


@pytest.mark.parametrize(
    ("jobs", "rows", "affected"),
    [
        (squeue((7, "train", ""), (8, "train", "")), ["7|d-train-[1-2]", "8|"], ["7"]),
        (squeue((7, "train", ""), (8, "train", "")), [f"7|{ONE}", f"8|{TWO}"], ["8"]),
        (squeue((7, "train", ""), asks_for=2), ["7|"], ["7"]),
        (squeue((7, "old,train", "")), ["7|"], []),
        (squeue((7, "train", "")), ["7|", "garbage", "x|y"], []),
    ],
    ids=["range", "other-node", "too-many", "removed-partition-too", "damaged"],
)
def test_impact_waiting_job_that_could_never_start_is_named(
    jobs: Step, rows: list[str], affected: list[str]
) -> None:
    commands = sinfo(ONE, TWO), jobs, required(*rows)
    impact = look_ahead(spec(train(1)), before(ONE, TWO), {ONE: Size(1, 4000)}, *commands)
    assert [job.job.id for job in impact.affected] == affected


def test_impact_partition_of_slurm_extra_keeps_its_jobs() -> None:
    lines = {"slurm": {"extra": ["PartitionName=low Nodes=ALL PriorityTier=0"]}}
    wanted = spec_of(train(1), **lines)
    commands = sinfo(ONE, TWO), squeue((7, "low", "")), required("7|")
    assert look_ahead(wanted, before(ONE, TWO), {ONE: Size(1, 4000)}, *commands).affected == ()


def test_waiting_job_of_a_removed_partition_is_named() -> None:
    jobs = squeue((7, "old", ""), (8, "old,train", ""), (9, "train", ""))
    commands = sinfo(ONE), jobs, required("7|", "8|", "9|")
    with pytest.raises(UsageError) as caught:
        look(spec(train(1)), before(ONE, OLD), {ONE: Size(1, 4000)}, *commands)
    assert caught.value.why.startswith("job 7 (long)")
    assert "partition old" in caught.value.why


@pytest.mark.parametrize(
    ("more", "size", "why"),
    [
        ({"cpus": 2}, Size(2, 4000), "gets 2 CPUs, 3.9GiB of memory instead of 1 CPU"),
        ({"memory": "1GiB"}, Size(1, 1024), "gets 1 CPU, 1GiB of memory instead of 1 CPU"),
    ],
)
def test_size_below_the_use_of_running_jobs_is_refused(
    more: dict[str, Any], size: Size, why: str
) -> None:
    with pytest.raises(UsageError) as caught:
        look(
            spec(train(1, **more)),
            before(ONE),
            {ONE: size},
            sinfo(ONE, allocated=2000),
            squeue((7, "train", ONE)),
        )
    assert why in caught.value.why


def test_memory_that_no_job_uses_may_be_removed() -> None:
    commands = sinfo(ONE, allocated=1000), squeue((7, "train", ONE))
    assert (
        look(spec(train(1, memory="1GiB")), before(ONE), {ONE: Size(1, 1024)}, *commands) == NOTHING
    )


@pytest.mark.parametrize("error", [SlurmError("slurmctld is away"), UnreachableError("no")])
def test_silent_controller_means_unknown_jobs_if_nodes_live(error: ClusterctlError) -> None:
    away = Step(("sinfo", "..."), error=error)
    with rejected("jobs-unknown", UsageError):
        look(spec(train(1)), before(ONE, TWO), {}, away)
    assert look(spec(train(1)), before(ONE, TWO), {}, away, force=True) == NOTHING


@pytest.mark.parametrize("error", [SlurmError("away"), UnreachableError("no")])
def test_nodes_are_resumed_if_jobs_are_unknown(error: ClusterctlError) -> None:
    commands = sinfo(ONE, TWO), DRAIN, Step(("squeue", "..."), error=error), RESUME
    with rejected("jobs-unknown", UsageError):
        look(spec(train(1)), before(ONE, TWO), {ONE: Size(1, 4000)}, *commands)


def test_node_that_slurm_does_not_drain_is_not_removed() -> None:
    refused = Step(DRAIN.argv, stderr="slurm_update error", rc=1)
    with rejected("jobs-unknown", UsageError):
        look(
            spec(train(1)), before(ONE, TWO), {ONE: Size(1, 4000)}, sinfo(ONE, TWO), refused, RESUME
        )


def test_uid_of_another_user_is_refused() -> None:
    accounts = "root:x:0:0:root:/root:/bin/sh\nada:x:2001:2001::/shared/home/ada:/bin/bash\n"
    reject_taken_uids(spec(train(1), ada=2001, bob=2002), accounts)
    reject_taken_uids(spec(train(1), ada=2003), accounts)
    with rejected("uid-taken", UsageError, "2001") as caught:
        reject_taken_uids(spec(train(1), bob=2001), accounts)
    assert "2001" in caught.value.why
