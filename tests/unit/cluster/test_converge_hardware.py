"""Changes of hardware that `up` finds, those that wait for jobs, and differences that are no change."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from clusterctl.cluster.hardware import (
    NodeConfig,
    NodeHardware,
    hardware,
    node_config,
    nodes_with_jobs,
)
from clusterctl.hosts.gpus import Driver, Gpu
from clusterctl.hosts.probe import HostReport, NodeFacts
from clusterctl.scheduler.sites.mpirun import MpirunClient
from tests.support.inventories import CTL, INVENTORY, ONE, TWO
from tests.support.scripted import ScriptedTransport, Step
from tests.unit.cluster.specs import spec_of
from tests.unit.cluster.test_impact import asked_in_order, sinfo, squeue

ADDRESSES = {host.name: host.address for host in INVENTORY.hosts}
SPEC = spec_of(
    {"name": "train", "hosts": "gpu[01-02]"},
    provider={"type": "onprem", "controller": CTL, "hosts": ADDRESSES},
    software={"nvidia": {"driver": "open"}},
)
FACTS = NodeFacts(4, 1, 1, 4, 1, 64_000)


def shows(*types: str, cards: int | None = None, **differs: Any) -> HostReport:
    """Return the report of a node with these GPUs. cards: number of GPUs on the PCI bus."""
    gpus = tuple(Gpu(kind, index, uuid=f"GPU-{index}") for index, kind in enumerate(types))
    facts = replace(FACTS, gpus=gpus, **differs)
    return HostReport(
        facts, {}, driver=Driver(len(gpus), gpus), cards=len(gpus) if cards is None else cards
    )


def failing(*, cards: int, fault: str) -> HostReport:
    """Return the report of a node whose driver failed. cards: number of GPUs on the PCI bus."""
    return replace(shows(cards=cards), driver=Driver(fault=fault))


WAS = shows("t4")


def jobs_on(busy: Collection[str], nodes: Collection[str]) -> dict[str, str]:
    return {host: "a job runs there" for host in busy if host in nodes}


def fitted(
    now: HostReport, *busy: str, was: HostReport = WAS, limit: tuple[str, ...] = (CTL, ONE, TWO)
) -> NodeConfig:
    noted = hardware(SPEC, INVENTORY, {CTL: HostReport(None, {}), ONE: was, TWO: WAS})
    views = {CTL: HostReport(None, {}), ONE: now, TWO: WAS}
    return node_config(SPEC, INVENTORY, views, noted, partial(jobs_on, busy), concerned=limit)


@pytest.mark.parametrize(
    ("now", "words"),
    [
        (shows("h100", "h100", "t4"), "gres: gpu:h100:2,gpu:t4:1 (was gpu:t4:1); cards: 3 (was 1)"),
        (shows(), "gres: none (was gpu:t4:1); cards: 0 (was 1)"),
        (shows("t4", cards=2), "cards: 2 (was 1)"),
        (shows("t4", cpus=8, cores_per_socket=8), "CPUs: 8 (was 4)"),
        (shows("t4", memory_mib=128_000), "memory: 125 GiB (was 62.5 GiB)"),
    ],
)
def test_changed_hardware_is_applied_and_named(now: HostReport, words: str) -> None:
    found = fitted(now, TWO)
    assert found.applied == {ONE: words}
    assert (found.notes, found.reports[ONE]) == ((), now)


def test_changed_device_file_of_a_gpu_is_a_change() -> None:
    gpus = (Gpu("t4", 0, minor=3),)
    found = fitted(HostReport(replace(FACTS, gpus=gpus), {}, driver=Driver(1, gpus), cards=1), ONE)
    assert found.applied.keys() == {ONE}
    assert "topology" in found.applied[ONE]


def test_memory_jitter_and_driver_faults_are_no_change() -> None:
    now = shows("t4", memory_mib=63_800, mpi=("pmix_v4",))
    found = fitted(replace(now, driver=replace(now.driver, fault="later")))
    assert found.changes == {}
    assert found.reports[ONE].facts == replace(now.facts or FACTS, memory_mib=64_000)


@pytest.mark.parametrize(
    "now", [shows("t4", "t4"), shows(), shows("t4", cpus=8), shows("t4", memory_mib=32_000)]
)
def test_busy_node_keeps_its_hardware_until_jobs_end(now: HostReport) -> None:
    found = fitted(now, ONE, TWO)
    assert (found.applied, list(found.waiting)) == ({}, [ONE])
    (note,) = found.notes
    assert note.startswith(f"{ONE}: {found.changes[ONE]}: ")
    assert found.reports[ONE] == WAS


def test_more_memory_ends_no_job() -> None:
    assert fitted(shows("t4", memory_mib=128_000), ONE).waiting == {}


def test_node_outside_limit_keeps_its_hardware() -> None:
    found = fitted(shows("t4", "t4"), limit=(TWO,))
    assert found.waiting.keys() == {ONE}
    assert found.reports[ONE] == WAS


def test_changed_hardware_without_slurm_ends_no_job() -> None:
    bare = replace(INVENTORY, scheduler="none")
    noted = hardware(SPEC, bare, {ONE: WAS})
    mpirun = MpirunClient(bare, "ada", ScriptedTransport([]), lambda _: ScriptedTransport([]))
    for drain in (False, True):
        ask = partial(nodes_with_jobs, mpirun, drain=drain)
        found = node_config(SPEC, bare, {ONE: shows("t4", "t4")}, noted, ask, concerned=(ONE,))
        assert found.changes
        assert found.waiting == {}


def test_gpus_with_a_failed_driver_are_not_removed() -> None:
    found = fitted(failing(cards=1, fault="Driver/library version mismatch"))
    assert (found.applied, found.reports[ONE]) == ({}, WAS)
    (note,) = found.notes
    assert note.startswith(f"{ONE}: its driver ")
    assert note.endswith("Driver/library version mismatch")
    removed = fitted(failing(cards=0, fault="No devices were found"))
    assert removed.applied.keys() == {ONE}
    assert "(was gpu:t4:1)" in removed.applied[ONE]


def test_node_without_recorded_hardware_has_not_changed() -> None:
    views = {ONE: shows("t4")}
    ask = partial(jobs_on, [ONE])
    assert node_config(SPEC, INVENTORY, views, {}, ask, concerned=(ONE,)).changes == {}


def test_cards_on_bus_count_only_with_software_for_gpus() -> None:
    plain = SPEC.model_copy(update={"software": type(SPEC.software)()})
    assert hardware(plain, INVENTORY, {ONE: shows(cards=2)}) == {ONE: NodeHardware(FACTS)}


AT_WORK = "postponed; run `clusterctl up` again when job 7 has ended"
REFUSED = Step(("squeue", "..."), stderr="slurm_load_jobs error: refused", rc=1)


def busy_nodes(*steps: Step, drain: bool = True) -> dict[str, str]:
    """Return busy node -> the jobs on it. steps: all commands to Slurm."""
    with asked_in_order(*steps) as slurm:
        return nodes_with_jobs(slurm, {ONE, TWO}, drain=drain)


def drain(*nodes: str) -> Step:
    words = "reason=clusterctl: the cluster changes"
    return Step(("scontrol", "update", f"nodename={','.join(nodes)}", "state=drain", words))


def resume(*nodes: str) -> Step:
    return Step(("scontrol", "update", f"nodename={','.join(nodes)}", "state=resume"))


def test_idle_nodes_are_drained_and_busy_nodes_resumed() -> None:
    steps = sinfo(TWO, ONE), drain(ONE, TWO), squeue((7, "train", TWO)), resume(TWO)
    assert busy_nodes(*steps) == {TWO: AT_WORK}


def test_node_drained_by_a_person_keeps_its_reason() -> None:
    assert busy_nodes(sinfo(ONE, TWO, state="drained"), squeue((7, "train", ONE))) == {ONE: AT_WORK}


def test_nodes_of_a_silent_slurm_count_as_busy() -> None:
    found = busy_nodes(sinfo(ONE, TWO), drain(ONE, TWO), REFUSED, resume(ONE, TWO))
    assert sorted(found) == [ONE, TWO]
    assert "slurm_load_jobs error: refused" in found[ONE]


def test_preview_of_hardware_changes_drains_nothing() -> None:
    assert busy_nodes(sinfo(ONE, TWO), squeue((7, "train", TWO)), drain=False) == {TWO: AT_WORK}
    assert sorted(busy_nodes(sinfo(ONE, TWO), REFUSED, drain=False)) == [ONE, TWO]
