"""Tests of which changes of Slurm's settings restart which slurmd."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from clusterctl.hosts.gpus import Gpu
from clusterctl.hosts.probe import NodeFacts
from clusterctl.scheduler.slurm.conf import render_files, slurmd_digests
from tests.unit.scheduler.test_slurm_config import make_inventory, make_spec

ONE = "demo-train-1"
TWO = "demo-train-2"
FACTS = NodeFacts(4, 1, 1, 4, 1, 8000, gpus=(Gpu("t4", 0),))


def digests(
    one: NodeFacts,
    *,
    nodes: int = 2,
    release: str = "debian-12",
    share: int | None = None,
    **extra: Any,
) -> dict[str, str]:
    spec = make_spec({"name": "train", "nodes": nodes}, slurm=extra)
    given = make_inventory(spec, cpus=share and 1, memory_mib=share)
    hosts = tuple(replace(host, distribution=release) for host in given.hosts)
    inventory = replace(given, hosts=hosts)
    facts = {host.name: one if host.name == ONE else FACTS for host in inventory.compute}
    return slurmd_digests(render_files(spec, inventory, facts), inventory)


@pytest.mark.parametrize("release", ["debian-12", "debian-13"])
@pytest.mark.parametrize(
    "changed",
    [
        {"gpus": (Gpu("t4", 0), Gpu("t4", 1))},
        {"gpus": (Gpu("t4", 0, minor=1),)},
        {"gpus": (Gpu("h100", 0),)},
        {"cpus": 8, "cores_per_socket": 8},
        {"memory_mib": 4000},
    ],
    ids=["card", "device", "model", "cpus", "memory"],
)
def test_new_hardware_of_a_node_restarts_its_slurmd_alone(
    changed: dict[str, object], release: str
) -> None:
    before = digests(FACTS, release=release)
    after = digests(replace(FACTS, **changed), release=release)  # type: ignore[arg-type]
    assert before[ONE] != after[ONE]
    assert before[TWO] == after[TWO]


def test_changed_cluster_setting_restarts_every_slurmd() -> None:
    before = digests(FACTS)
    after = digests(FACTS, extra=("LaunchParameters=use_interactive_step",))
    assert all(before[host] != after[host] for host in (ONE, TWO))


@pytest.mark.parametrize(
    ("release", "starts"), [("debian-12", True), ("ubuntu-24.04", True), ("debian-13", False)]
)
def test_added_nodes_restart_slurmd_only_before_slurm_24_05(release: str, *, starts: bool) -> None:
    before = digests(FACTS, release=release)
    for nodes in (3, 16):  # from 8 on, timeouts grow
        after = digests(FACTS, nodes=nodes, release=release)
        assert (before[ONE] != after[ONE]) == starts
        assert len(after) == nodes


@pytest.mark.parametrize(("release", "starts"), [("debian-12", True), ("debian-13", False)])
def test_changed_share_restarts_slurmd_only_before_slurm_24_11(
    release: str, *, starts: bool
) -> None:
    before, after = (digests(FACTS, release=release, share=share) for share in (1000, 500))
    assert (before[ONE] != after[ONE]) == starts
