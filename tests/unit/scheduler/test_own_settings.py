"""What of Slurm's settings starts which slurmd anew."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from clusterctl.hosts.gpus import Gpu
from clusterctl.hosts.probe import NodeFacts
from clusterctl.scheduler.slurm_conf import render_files, slurmd_file
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory

ONE, TWO = "d-train-1", "d-train-2"
FACTS = NodeFacts(4, 1, 1, 4, 1, 8000, gpus=(Gpu("t4", 0),))


def digests(one: NodeFacts, *, max_time: str = "1h") -> dict[str, str]:
    partition = {"name": "train", "nodes": 2, "max_time": max_time}
    spec = ClusterSpec.model_validate({"version": 1, "name": "d", "partitions": [partition]})
    hosts = [Host(name="d-ctl", address="10.0.0.2", roles=(CONTROLLER,), host_key="k")]
    hosts += [
        Host(name=name, address=address, roles=(COMPUTE,), partition="train", host_key="k")
        for name, address in ((ONE, "10.0.0.3"), (TWO, "10.0.0.4"))
    ]
    inventory = Inventory(
        cluster="d",
        cluster_id="a1b2c3",
        provider="local",
        hosts=tuple(hosts),
        network="10.0.0.0/24",
        shared="/shared",
        baked=True,
    )
    found: dict[str, str] = json.loads(
        slurmd_file(render_files(spec, inventory, {ONE: one, TWO: FACTS}), [ONE, TWO])
    )
    return found


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
def test_what_came_to_a_node_starts_its_slurmd_alone(changed: dict[str, object]) -> None:
    before, after = digests(FACTS), digests(replace(FACTS, **changed))  # type: ignore[arg-type]
    assert before[ONE] != after[ONE]
    assert before[TWO] == after[TWO]


def test_what_all_need_to_know_starts_all() -> None:
    before, after = digests(FACTS), digests(FACTS, max_time="2h")
    assert all(before[host] != after[host] for host in (ONE, TWO))
