"""Which roles hosts of each provider have use for, beside those of every cluster."""

from __future__ import annotations

import pytest

from clusterctl.configure.inventory_file import own_machine_variables
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import Inventory, SharedFolder

PARTITIONS = [{"name": "train", "nodes": 2}]
GCP = {"type": "gcp", "project": "my-project", "zone": "us-central1-a"}


@pytest.mark.parametrize(("kind", "homes_are"), [("nfs", "exported"), ("filestore", "mounted")])
def test_a_host_at_google_is_guarded_and_is_nobodys_own(
    inventory: Inventory, kind: str, homes_are: str
) -> None:
    spec = ClusterSpec.model_validate({"version": 1, "name": "d", "provider": GCP, "partitions": PARTITIONS})
    shared = SharedFolder.model_validate({"kind": kind, "server": "10.0.0.2", "path": "/shared"})
    values = own_machine_variables(spec, inventory.model_copy(update={"shared_folder": shared}))
    assert values["clusterctl_guarded"] is True
    assert values["firewall_addresses"] == [host.address for host in inventory.hosts]
    assert (values["firewall_exports"], values["selinux_homes_are"]) == (kind == "nfs", homes_are)
    assert "clusterctl_keeps" not in values
    assert not [name for name in values if name.startswith("time_")]


def test_a_local_node_has_neither(spec: ClusterSpec, inventory: Inventory) -> None:
    assert own_machine_variables(spec, inventory) == {}
