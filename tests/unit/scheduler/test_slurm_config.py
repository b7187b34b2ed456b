"""Tests of Slurm's configuration files, against golden files and Slurm's rules."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import pytest

from clusterctl.errors import SlurmError
from clusterctl.hosts.gpus import Gpu
from clusterctl.hosts.probe import NodeFacts
from clusterctl.scheduler.slurm.conf import FENCE, fault_timeouts, render_files
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import PROOF_PARTITION
from clusterctl.spec.slurm_lines import OWNED_SLURM_KEYS
from clusterctl.state.inventory import CONTROLLER, Inventory
from tests.support.inventories import host_of, inventory_of

Golden = Callable[[str, str], None]
METAL = NodeFacts(
    cpus=64, boards=1, sockets=2, cores_per_socket=16, threads_per_core=2, memory_mib=257_000
)


def make_spec(*partitions: dict[str, Any], **more: Any) -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "demo",
            "partitions": partitions or ({"name": "train", "nodes": 2},),
            **more,
        }
    )


def make_inventory(spec: ClusterSpec, **share: int | None) -> Inventory:
    """Return the inventory of a spec. share: each compute node's share of a machine."""
    hosts = [host_of("demo-ctl", CONTROLLER, address="10.1.2.10")]
    for partition in spec.partitions:
        for name in spec.node_names(partition):
            address = f"10.1.2.{10 + len(hosts)}"
            hosts.append(host_of(name, address=address, partition=partition.name, **share))
    return inventory_of(cluster="demo", hosts=tuple(hosts), network="10.1.2.0/24")


def on_metal(spec: ClusterSpec, facts: NodeFacts = METAL) -> dict[str, str]:
    inventory = make_inventory(spec)
    return render_files(spec, inventory, {host.name: facts for host in inventory.compute})


def settings(text: str) -> Mapping[str, str]:
    """Return the settings of the `Key=value` lines."""
    return dict(re.findall(r"^(\w+)=(.*)$", text, re.MULTILINE))


def lines(text: str, key: str) -> list[dict[str, str]]:
    """Return the lines that start with a key, each as a mapping."""
    return [
        dict(word.split("=", 1) for word in line.split())
        for line in text.splitlines()
        if line.startswith(f"{key}=")
    ]


EIGHT_GPUS = tuple(Gpu("h200", i) for i in range(8))
CASES: dict[str, Callable[[], dict[str, str]]] = {
    "metal": lambda: on_metal(make_spec()),
    "two-partitions": lambda: on_metal(
        make_spec(
            {"name": "train", "nodes": 2, "max_time": "1h29m1s"}, {"name": "debug", "nodes": 1}
        )
    ),
    "shares": lambda: render_files(
        make_spec(), make_inventory(make_spec(), cpus=1, memory_mib=2000), {}
    ),
    "gpus": lambda: on_metal(
        make_spec({"name": "train", "nodes": 1}),
        NodeFacts(224, 1, 2, 56, 2, 2_000_000, gpus=EIGHT_GPUS),
    ),
    "extra": lambda: on_metal(
        make_spec(
            slurm={
                "qos": [{"name": "high"}],
                "extra": [
                    "KillWait=30",
                    "MaxArraySize=5000",
                    "NodeSet=first Nodes=demo-train-1",
                    "PartitionName=low Nodes=first PriorityTier=0 DefMemPerNode=500",
                    "PartitionName=train priorityTier=7 State=DRAIN",
                ],
            }
        )
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_slurm_config_files_equal_their_golden_files(case: str, golden: Golden) -> None:
    files = CASES[case]()
    for name, text in files.items():
        golden(f"{case}/{name}", text)
    # No setting occurs twice.
    keys = re.findall(r"^(\w+)=", files["slurm.conf"], re.MULTILINE)
    once = [key for key in keys if key not in ("NodeName", "PartitionName")]
    assert len(once) == len(set(once))


def test_slurm_conf_without_control_groups_uses_linuxproc() -> None:
    """For example in a container. Slurm then enforces memory limits itself."""
    spec = make_spec()
    whole = make_inventory(spec)
    last = replace(whole.hosts[-1], cgroups=False)
    inventory = replace(whole, hosts=(*whole.hosts[:-1], last))
    files = render_files(spec, inventory, {host.name: METAL for host in inventory.compute})
    text = settings(files["slurm.conf"])
    assert (text["ProctrackType"], text["TaskPlugin"]) == ("proctrack/linuxproc", "task/affinity")
    metal = settings(
        render_files(spec, whole, {host.name: METAL for host in whole.compute})["slurm.conf"]
    )
    assert metal["ProctrackType"] == "proctrack/cgroup"
    # The Epilog ends daemons, which only control groups would find, and removes files in memory.
    assert text["Epilog"] == metal["Epilog"] == FENCE
    assert "OverMemoryKill" in text["JobAcctGatherParams"]
    assert "Cgroup" not in files["cgroup.conf"]


@pytest.mark.parametrize(
    ("release", "cgroups", "by_kernel"),
    [("debian-13", True, True), ("debian-13", False, False), ("debian-12", True, False)],
)
def test_kernel_or_slurm_limits_the_memory_of_jobs_on_shares(
    release: str, *, cgroups: bool, by_kernel: bool
) -> None:
    """Slurm's own count includes the pages of files, which the kernel can drop."""
    spec = make_spec()
    given = make_inventory(spec, cpus=1, memory_mib=2000)
    controller = replace(given.controller, distribution=release)
    nodes = [replace(node, cgroups=cgroups) for node in given.compute]
    files = render_files(spec, replace(given, hosts=(controller, *nodes)), {})
    text = settings(files["slurm.conf"])
    assert ("OverMemoryKill" in text["JobAcctGatherParams"]) != by_kernel
    assert text["TaskPlugin"] == ("task/cgroup" if by_kernel else "task/none")
    constrained = settings(files["cgroup.conf"])
    assert ("ConstrainRAMSpace" in constrained) == by_kernel
    # Cores and GPUs of a share are bound from outside.
    assert not {"ConstrainCores", "ConstrainDevices"} & {*constrained}


def test_slurm_conf_keys_of_clusterctl_are_reserved() -> None:
    keys = (
        "clustername slurmctldhost slurmctldparameters taskplugin accountingstorageenforce".split()
    )
    assert {*keys} <= {key.lower() for key in settings(CASES["shares"]()["slurm.conf"])}
    assert {*keys} <= OWNED_SLURM_KEYS


def test_missing_facts_are_an_error_that_names_the_host() -> None:
    spec = make_spec()
    with pytest.raises(SlurmError) as raised:
        render_files(spec, make_inventory(spec), {"demo-train-1": METAL})
    assert raised.value.host == "demo-train-2"


@pytest.mark.parametrize("key", ["SlurmdTimeout", "SlurmctldTimeout", "MessageTimeout"])
def test_larger_clusters_wait_longer(key: str) -> None:
    waits = [int(fault_timeouts(nodes)[key]) for nodes in (1, 2, 16, 64, 250)]
    assert waits == sorted(waits)
    assert waits[-1] > waits[0]


def test_task_prolog_is_set_if_a_node_has_variables() -> None:
    spec = make_spec()
    plain = make_inventory(spec, cpus=2, memory_mib=1024)
    assert "TaskProlog" not in settings(render_files(spec, plain, {})["slurm.conf"])
    controller, first, second = plain.hosts
    first = replace(first, job_environment={"NCCL_DEBUG": "WARN"})
    some = replace(plain, hosts=(controller, first, second))
    conf = settings(render_files(spec, some, {})["slurm.conf"])
    assert conf["TaskProlog"] == "/opt/clusterctl/task-prolog"


def test_slurm_conf_uses_the_hostname_of_each_machine() -> None:
    spec = make_spec()
    made = make_inventory(spec)
    hosts = (replace(made.hosts[0], hostname="big"), *made.hosts[1:])
    hosts = (*hosts[:-1], replace(hosts[-1], hostname="small"))
    inventory = replace(made, hosts=hosts)
    files = render_files(spec, inventory, {host.name: METAL for host in inventory.compute})
    assert settings(files["slurm.conf"])["SlurmctldHost"] == "big(10.1.2.10)"
    assert settings(files["slurmdbd.conf"])["DbdHost"] == "big"
    nodes = lines(files["slurm.conf"], "NodeName")
    assert [node.get("NodeHostname") for node in nodes] == [None, "small"]


def test_partitions_whose_machines_are_not_there_yet_are_left_out() -> None:
    before = make_spec({"name": "train", "nodes": 1})
    after = make_spec(
        {"name": "train", "nodes": 1},
        {"name": "big", "nodes": 1},
        slurm={"extra": ["PartitionName=low Nodes=demo-big-1"]},
    )
    inventory = make_inventory(before)
    conf = render_files(after, inventory, {"demo-train-1": METAL})["slurm.conf"]
    names = [line["PartitionName"] for line in lines(conf, "PartitionName")]
    assert names == ["train", PROOF_PARTITION]
