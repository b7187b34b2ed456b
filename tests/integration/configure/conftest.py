"""Fixtures: a spec, an inventory, and a workspace with an unusual path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import CONTROLLER, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from tests.support.inventories import host_of, inventory_of


@pytest.fixture
def local_inventory(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes an inventory whose hosts are all this machine."""

    def write(*names: str, **variables: object) -> Path:
        lines = [f"{name} ansible_connection=local" for name in names]
        lines += ["[all:vars]", "ansible_python_interpreter=/usr/bin/env python3"]
        lines += [f"{key}={value}" for key, value in variables.items()]
        path = tmp_path / "inventory.ini"
        path.write_text("\n".join(lines) + "\n")
        return path

    return write


# Ansible must not take the comment for a template.
ADAS_KEY = (
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIAKEeQlcH+GwmzgE/RlWAKNrD2K+DSBNoCnvcOgaXFev {{ ada }}"
)


@pytest.fixture
def spec() -> ClusterSpec:
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "demo",
            "partitions": [{"name": "train", "nodes": 2}],
            "users": [
                {
                    "name": "ada",
                    "uid": 10001,
                    "accounts": ["physics", "default"],
                    "ssh_keys": [ADAS_KEY],
                }
            ],
            "slurm": {
                "qos": [{"name": "high", "priority": 5, "limits": {"MaxWall": 2}}, {"name": "low"}]
            },
        }
    )


@pytest.fixture
def inventory(spec: ClusterSpec) -> Inventory:
    nodes = (
        host_of(name, address=f"10.1.2.{number}", partition="train")
        for number, name in enumerate(spec.node_names(spec.partitions[0]), 11)
    )
    controller = host_of("demo-ctl", CONTROLLER, address="10.1.2.10")
    known = {"cluster": "demo", "cluster_id": "abc123", "network": "10.1.2.0/24"}
    return inventory_of(hosts=(controller, *nodes), **known)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """A workspace under a path with characters that shells, YAML and Jinja treat specially."""
    made = Workspace(tmp_path / 'it\'s {{ a }} "home": #1' / "demo")
    made.create()
    write_atomic(made.public_key, "ssh-ed25519 AAAA clusterctl\n")
    return made
