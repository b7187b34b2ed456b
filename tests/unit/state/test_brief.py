"""What verbs about jobs read of hosts.json is what its model says, or they use the model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.state.brief import Brief, brief_of
from clusterctl.state.inventory import Host
from clusterctl.state.workspace import Workspace
from tests.support.inventories import inventory_of

HOSTS = tuple(
    Host(name=name, address="10.0.0.1", roles=roles, host_key="k")
    for name, roles in (("ctl", ("controller", "compute")), ("n1", ("compute",)), ("front", ("login",)))
)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    inventory = inventory_of(cluster="demo", hosts=HOSTS, job_user="hpc")
    (tmp_path / "hosts.json").write_text(inventory.model_dump_json())
    return Workspace(tmp_path)


def test_it_is_what_the_model_says(workspace: Workspace) -> None:
    assert brief_of(workspace) == Brief("demo", "local", "ctl", ("ctl", "n1"), "hpc", pmix=True)


@pytest.mark.parametrize(
    "change",
    [
        {"job_user": None},
        {"scheduler": "none"},
        {"shared_folder": {"kind": "none"}},
        {"shared_folder": None},
        {"hosts": []},
        {"hosts": [{"name": "ctl"}]},
        {"hosts": 3},
        {"pmix": "yes"},
        {"provider": ["local"]},
    ],
)
def test_of_another_cluster_or_a_damaged_record_there_is_none(
    workspace: Workspace, change: dict[str, Any]
) -> None:
    known = json.loads(workspace.inventory.read_bytes())
    workspace.inventory.write_text(json.dumps(known | change))
    assert brief_of(workspace) is None


@pytest.mark.parametrize("text", ["", "[]", "{", "null"])
def test_of_no_record_there_is_none(workspace: Workspace, text: str) -> None:
    workspace.inventory.write_text(text)
    assert brief_of(workspace) is None
    workspace.inventory.unlink()
    assert brief_of(workspace) is None
