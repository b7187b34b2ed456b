"""hosts.json is read as it was written, also that of an earlier version, and a damaged one is refused."""

from __future__ import annotations

import json
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import NotUpError, UsageError
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import (
    Inventory,
    PartitionFacts,
    SharedFolder,
    applied_spec,
    job_inventory,
    job_settings,
    planned_inventory,
)
from clusterctl.state.inventory import inventory_of as inventory_of_workspace
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused

_LATER = {"job_user", "max_submit", "root", "no_accounting", "is_foreign", "slurm_path", "pmix"}
SPEC = ClusterSpec.model_validate(
    {
        "version": 1,
        "name": "d",
        "provider": {"type": "gcp", "project": "my-project", "zone": "us-central1-a"},
        "partitions": [
            {"name": "cpu", "nodes": 2, "max_time": "90m"},
            {"name": "gpu", "nodes": 1, "gpus": {"type": "l4", "count": 4}},
        ],
        "users": [{"name": "hpc", "uid": 10000}],
        "monitoring": {"interval": "30s"},
        "software": {"python": {"requirements": "/r.txt"}},
    }
)
PARTITIONS = (
    PartitionFacts("cpu", ("d-cpu-1", "d-cpu-2"), max_time=5400),
    PartitionFacts("gpu", ("d-gpu-1",), gpus=4),
)
NODES = ("d-cpu-1", "d-cpu-2", "d-gpu-1")
INVENTORY = inventory_of(
    *NODES[:2],
    host_of(NODES[2], cpus=4, proxy_command=("nc", "%h"), job_environment={"NCCL_DEBUG": "WARN"}),
    host_of("front", "login"),
    provider="gcp",
    usd_per_hour=1.5,
    shared_folder=SharedFolder(kind="nfs", server="10.0.0.2", path="/shared"),
    **job_settings(SPEC),
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    (tmp_path / "hosts.json").write_text(INVENTORY.text)
    return Workspace(tmp_path)


def test_job_inventory_is_read_back_equal(workspace: Workspace) -> None:
    assert job_inventory(workspace) == INVENTORY


def test_planned_inventory_has_the_settings_of_the_spec() -> None:
    planned = planned_inventory(SPEC)
    assert (planned.cluster, planned.provider, planned.controller.name) == ("d", "gcp", "d-ctl")
    assert tuple(host.name for host in planned.compute) == NODES
    assert planned.partitions == INVENTORY.partitions == PARTITIONS
    for inventory in (planned, INVENTORY):
        assert (inventory.job_user, inventory.interval_s) == ("hpc", 30)
        assert (inventory.requirements, inventory.scheduler) == ("/r.txt", "slurm")


def test_planned_inventory_on_a_single_machine_has_it_once() -> None:
    """On the user's own machine, the controller may compute."""
    hosts = {"here": {"address": "127.0.0.1"}}
    onprem = {"type": "onprem", "controller": "here", "hosts": hosts}
    spec = SPEC.model_copy(
        update={
            "provider": OnpremSettings.model_validate(onprem),
            "partitions": (SPEC.partitions[0].model_copy(update={"hosts": "here", "nodes": 1}),),
        }
    )
    (only,) = planned_inventory(spec).hosts
    assert (only.name, only.is_controller, only.is_compute) == ("here", True, True)


@pytest.mark.parametrize("key", sorted(_LATER))
def test_inventory_of_an_earlier_version_has_the_default_of_a_later_key(
    workspace: Workspace, key: str
) -> None:
    record = json.loads(INVENTORY.text)
    del record[key]
    default = next(item for item in fields(Inventory) if item.name == key).default
    assert Inventory.read(json.dumps(record)) == replace(INVENTORY, **{key: default})


def test_inventory_ignores_keys_of_a_later_version() -> None:
    record = json.loads(INVENTORY.text)
    record["hosts"][0]["colour"] = record["colour"] = "red"
    assert Inventory.read(json.dumps(record)) == INVENTORY


def test_inventory_without_a_user_is_read_but_not_for_jobs(workspace: Workspace) -> None:
    """An earlier version wrote null until `up` had configured the hosts."""
    record = json.loads(INVENTORY.text) | {"job_user": None}
    workspace.inventory.write_text(json.dumps(record))
    assert inventory_of_workspace(workspace) == replace(INVENTORY, job_user="")
    with refused("record-damaged/cluster", UsageError):
        job_inventory(workspace)


@pytest.mark.parametrize(
    ("change", "values"),
    [
        ({"shared_folder": {"kind": "none"}}, {"is_shared": False}),
        ({"pmix": False}, {"pmix": False, "is_shared": True}),
        ({"usd_per_hour": 2}, {"usd_per_hour": 2.0}),
        ({"slurm_path": "/opt/slurm/bin"}, {"path": "/opt/slurm/bin"}),
    ],
)
def test_inventory_has_the_recorded_values(change: dict[str, Any], values: dict[str, Any]) -> None:
    inventory = Inventory.read(json.dumps(json.loads(INVENTORY.text) | change))
    assert {name: getattr(inventory, name) for name in values} == values


@pytest.mark.parametrize(
    "change",
    [
        {"job_user": None},
        {"shared_folder": None},
        {"hosts": []},
        {"hosts": [{"name": "ctl"}]},
        {"hosts": 3},
        {"partitions": []},
        {"partitions": [{"name": "cpu"}]},
        {"provider": ["local"]},
        {"cluster": 3},
        {"pmix": "yes"},
        {"max_array": True},
        {"interval_s": 1.5},
        {"scheduler": "pbs"},
        {"hosts": [{**asdict(INVENTORY.hosts[0]), "roles": ["controller", 3]}]},
        {"hosts": [{**asdict(INVENTORY.hosts[0]), "job_environment": {"A": 1}}]},
    ],
)
def test_damaged_record_is_refused(workspace: Workspace, change: dict[str, Any]) -> None:
    known = json.loads(workspace.inventory.read_bytes())
    workspace.inventory.write_text(json.dumps(known | change))
    with refused("record-damaged/cluster", UsageError):
        job_inventory(workspace)


def test_cluster_without_a_record_is_not_up(workspace: Workspace) -> None:
    workspace.inventory.write_text("{")
    with refused("record-damaged/cluster", UsageError):
        job_inventory(workspace)
    workspace.inventory.unlink()
    with refused("not-up", NotUpError):
        job_inventory(workspace)


def test_record_of_an_attached_cluster_is_written_by_attach_only(workspace: Workspace) -> None:
    workspace.login.write_text("ada@login\n")
    workspace.inventory.write_text("{")
    with refused("record-damaged/cluster", UsageError, "`clusterctl attach`"):
        job_inventory(workspace)
    workspace.inventory.unlink()
    with refused("not-up", NotUpError, "`clusterctl attach`"):
        job_inventory(workspace)


def test_keys_of_another_version_are_dropped_at_any_depth(workspace: Workspace) -> None:
    record = json.loads(INVENTORY.text)
    for part in (record, record["hosts"][0], record["shared_folder"], record["partitions"][0]):
        part["of_another_version"] = {"a": [1]}
    workspace.inventory.write_text(json.dumps(record))
    assert job_inventory(workspace) == INVENTORY


@pytest.mark.parametrize("is_attached", [False, True])
def test_wrong_value_in_the_recorded_spec_is_a_damaged_record(
    workspace: Workspace, *, is_attached: bool
) -> None:
    """No user can correct a line that clusterctl wrote; `up` writes it again."""
    text = dump_spec(SPEC)
    workspace.spec.write_text(text)
    assert applied_spec(workspace).partitions == SPEC.partitions
    if is_attached:
        workspace.login.write_text("ada@login\n")
    workspace.spec.write_text(text.replace("project: my-project", "project: 3"))
    command = "clusterctl attach" if is_attached else "clusterctl up -f FILE"
    with refused("record-damaged/spec", UsageError, "provider.project", f"`{command}`"):
        applied_spec(workspace)
