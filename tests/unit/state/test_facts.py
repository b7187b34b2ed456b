"""What verbs about jobs read of hosts.json is what its model wrote, and what the spec says."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import NotUpError, UsageError
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.facts import (
    ClusterFacts,
    PartitionFacts,
    facts_of,
    facts_of_spec,
    job_settings,
)
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused

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
FACTS = ClusterFacts(
    cluster="d",
    provider="gcp",
    controller="d-ctl",
    compute=("d-cpu-1", "d-cpu-2", "d-gpu-1"),
    job_user="hpc",
    has_slurm=True,
    is_shared=True,
    pmix=True,
    partitions=(
        PartitionFacts("cpu", ("d-cpu-1", "d-cpu-2"), max_time=5400),
        PartitionFacts("gpu", ("d-gpu-1",), gpus=4),
    ),
    interval_s=30,
    requirements="/r.txt",
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    front = host_of("front", "login")
    inventory = inventory_of(*FACTS.compute, front, provider="gcp", **job_settings(SPEC))
    (tmp_path / "hosts.json").write_text(inventory.model_dump_json())
    return Workspace(tmp_path)


def test_what_is_recorded_is_what_the_spec_says(workspace: Workspace) -> None:
    assert facts_of(workspace) == replace(facts_of_spec(SPEC), provider="gcp") == FACTS


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        ({"scheduler": "none"}, {"has_slurm": False}),
        ({"shared_folder": {"kind": "none"}}, {"is_shared": False}),
        ({"pmix": False}, {"pmix": False}),
        ({"root": "/scratch/ada/clusterctl"}, {"root": "/scratch/ada/clusterctl"}),
    ],
)
def test_the_record_may_say_more_than_the_spec(
    workspace: Workspace, change: dict[str, Any], fact: dict[str, Any]
) -> None:
    known = json.loads(workspace.inventory.read_bytes())
    workspace.inventory.write_text(json.dumps(known | change))
    assert facts_of(workspace) == replace(FACTS, **fact)


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
    ],
)
def test_a_damaged_record_is_refused(workspace: Workspace, change: dict[str, Any]) -> None:
    known = json.loads(workspace.inventory.read_bytes())
    workspace.inventory.write_text(json.dumps(known | change))
    with refused("inventory-damaged", UsageError):
        facts_of(workspace)


def test_a_cluster_without_a_record_is_not_up(workspace: Workspace) -> None:
    workspace.inventory.write_text("{")
    with refused("inventory-damaged", UsageError):
        facts_of(workspace)
    workspace.inventory.unlink()
    with refused("not-up", NotUpError):
        facts_of(workspace)


def test_only_attach_writes_the_record_of_an_attached_cluster(workspace: Workspace) -> None:
    workspace.login.write_text("ada@login\n")
    workspace.inventory.write_text("{")
    with refused("inventory-damaged", UsageError, "`clusterctl attach`"):
        facts_of(workspace)
    workspace.inventory.unlink()
    with refused("not-up", NotUpError, "`clusterctl attach`"):
        facts_of(workspace)
