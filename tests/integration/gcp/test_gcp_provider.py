"""GcpProvider on the cloud double: plan, apply and destroy. The sweep has real Terraform."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import MachineError, StalePlanError
from clusterctl.providers.gcp import provider
from clusterctl.providers.gcp.preflight import job_environment, network_note
from clusterctl.spec.distributions import UNSEEN
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp_machines
from clusterctl.state.inventory import SharedFolder
from clusterctl.state.workspace import Workspace
from tests.support.google import gcloud
from tests.support.google.answers import HOST_KEY
from tests.support.google.api import PROJECT
from tests.support.google.cloud import GoogleCloud
from tests.support.messages import refused
from tests.unit.gcp import recorded
from tests.unit.gcp.clusters import provider_of, workspace_in

DISTRIBUTION = "rocky-9.6"
HOSTS = ["demo-ctl", "demo-train-1", "demo-train-2"]


def spec_of(nodes: int = 2, **provider: Any) -> ClusterSpec:
    settings = {
        "type": "gcp",
        "project": PROJECT,
        "zone": "us-central1-a",
    }
    train = {"name": "train", "nodes": nodes, "gpus": {"type": "l4", "count": 1}}
    return ClusterSpec.model_validate(
        {"version": 1, "name": "demo", "provider": settings | provider, "partitions": [train]}
    )


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    return workspace_in(tmp_path / "home")


def raised(spec: ClusterSpec, workspace: Workspace) -> Any:
    """Apply as `up` does, and record the inventory."""
    done = provider_of(spec).apply(spec, workspace)
    workspace.inventory.write_text(done.inventory.text)
    return done


def known_distribution(workspace: Workspace) -> None:
    """Record a distribution of all hosts, as `up` does after its first connection."""
    text = workspace.inventory.read_text()
    workspace.inventory.write_text(
        text.replace('"distribution": ""', f'"distribution": "{DISTRIBUTION}"')
    )


def test_plan_of_a_new_cluster_has_its_hosts_and_its_cost(
    planned_cloud: GoogleCloud, workspace: Workspace
) -> None:
    spec = spec_of(enable_apis=False)
    planned = provider_of(spec).plan(spec, workspace)
    assert not planned_cloud.instances
    assert [(host.name, host.action) for host in planned.hosts] == [
        (name, "make") for name in HOSTS
    ]
    assert [host.what for host in planned.hosts[1:]] == ["g2-standard-4, 1 x l4"] * 2
    assert planned.cost is not None
    assert planned.cost.now == 0
    # The rest is Cloud NAT.
    assert planned.cost.then > sum(host.usd_per_hour or 0 for host in planned.hosts) > 2 * 0.7
    assert any("network" in text for text in planned.other)


def test_apply_creates_hosts_and_destroy_removes_them(
    cloud: GoogleCloud, workspace: Workspace
) -> None:
    spec = spec_of(enable_apis=False)
    provider = provider_of(spec)
    done = provider.apply(spec, workspace)
    assert (list(done.made), list(done.started)) == (HOSTS, [])
    inventory = done.inventory
    assert [(host.name, host.roles) for host in inventory.hosts] == [
        (HOSTS[0], ("controller",)),
        (HOSTS[1], ("compute",)),
        (HOSTS[2], ("compute",)),
    ]
    assert [host.address for host in inventory.hosts] == [
        cloud.instances[name]["network_interface"][0]["network_ip"] for name in HOSTS
    ]
    assert {host.host_key for host in inventory.hosts} == {f"ssh-ed25519 {HOST_KEY}"}
    assert {host.distribution for host in inventory.hosts} == {UNSEEN}
    address = inventory.controller.address
    assert inventory.shared_folder == SharedFolder(kind="nfs", server=address, path="/shared")
    workspace.inventory.write_text(inventory.text)
    assert provider.alive(workspace.cluster_id())

    provider.destroy(workspace.cluster_id(), workspace=workspace)
    assert not cloud.instances
    assert provider.leftovers(workspace.cluster_id(), workspace=None) == ()
    assert not provider.alive(workspace.cluster_id())


def test_inventory_of_a_cluster_has_a_tunnel_to_the_controller_only(
    planned_cloud: GoogleCloud, workspace: Workspace
) -> None:
    spec = spec_of(enable_apis=False)
    inventory = provider_of(spec).apply(spec, workspace).inventory
    assert [host.proxy_command[:4] for host in inventory.hosts] == [
        ("gcloud", "compute", "start-iap-tunnel", HOSTS[0]),
        (),
        (),
    ]
    assert [host.jump for host in inventory.hosts] == [None, HOSTS[0], HOSTS[0]]
    assert inventory.network == "10.80.0.0/20"
    assert inventory.hosts[1].job_environment["NCCL_DEBUG"] == "WARN"
    assert not inventory.controller.job_environment
    assert not inventory.baked


def test_stopped_node_is_planned_to_start_and_costs_only_its_disk_until_then(
    planned_cloud: GoogleCloud, workspace: Workspace
) -> None:
    spec = spec_of(enable_apis=False)
    new = provider_of(spec).plan(spec, workspace)
    raised(spec, workspace)
    known_distribution(workspace)
    planned_cloud.stop("demo-train-1")
    planned = provider_of(spec).plan(spec, workspace)
    assert [(host.name, host.action) for host in planned.changes] == [("demo-train-1", "change")]
    assert new.cost is not None
    assert planned.cost is not None
    assert planned.cost.then - planned.cost.now == pytest.approx(0.706824)
    assert planned.cost.then == new.cost.then
    assert not planned.other


def test_lost_node_is_recreated_and_only_its_host_key_is_asked(
    planned_cloud: GoogleCloud, workspace: Workspace
) -> None:
    spec = spec_of(enable_apis=False)
    raised(spec, workspace)
    known_distribution(workspace)
    planned_cloud.stop("demo-train-1")
    planned_cloud.lose("demo-train-2")
    new_key = f"{HOST_KEY[:-4]}new0"
    with planned_cloud.store.change() as state:
        # Every machine would answer with the new key.
        state["guest_attributes"] = {name: {"ssh-ed25519": new_key} for name in HOSTS[1:]}
    done = raised(spec, workspace)
    assert (done.made, done.started) == (("demo-train-2",), ("demo-train-1",))
    assert [host.host_key for host in done.inventory.hosts] == [
        f"ssh-ed25519 {HOST_KEY}",
        f"ssh-ed25519 {HOST_KEY}",
        f"ssh-ed25519 {new_key}",
    ]
    assert [host.distribution for host in done.inventory.hosts] == [
        DISTRIBUTION,
        DISTRIBUTION,
        UNSEEN,
    ]


def test_plan_names_a_removed_node(planned_cloud: GoogleCloud, workspace: Workspace) -> None:
    raised(spec_of(2), workspace)
    fewer = spec_of(1)
    (gone,) = provider_of(fewer).plan(fewer, workspace).changes
    assert (gone.name, gone.action) == ("demo-train-2", "remove")
    assert gone.usd_per_hour
    assert gone.destroys


def test_apply_that_starts_hosts_again_removes_none(
    planned_cloud: GoogleCloud, workspace: Workspace
) -> None:
    """`up` applies a second time if hosts went down meanwhile, and the user has not confirmed
    removals.
    """
    spec = spec_of(2)
    fewer = spec_of(1)
    provider = provider_of(spec)
    provider.apply(spec, workspace)
    planned_cloud.stop("demo-train-2")
    assert provider.apply(spec, workspace).started == ("demo-train-2",)
    with refused("plan-changed", StalePlanError, "demo-train-2"):
        provider.apply(fewer, workspace)
    assert sorted(planned_cloud.instances) == HOSTS


def test_destroy_removes_a_host_that_is_missing_in_the_state(
    workspace: Workspace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network can be deleted only after the host."""
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=False) as (cloud, _):
        raised(spec_of(1), workspace)
        state = workspace.terraform / "terraform.tfstate"
        known = json.loads(state.read_text())
        kept = {name: one for name, one in known.items() if "train-1" not in name}
        assert kept.keys() < known.keys()
        state.write_text(json.dumps(kept))
        provider_of(spec_of(1)).destroy(workspace.cluster_id(), workspace=workspace)
        assert cloud.resources() == {}


def test_terraform_folder_is_updated_without_user_files(tmp_path: Path) -> None:
    place = tmp_path / "terraform"
    provider.write_module(place, {"a": 1})
    kept = {"terraform.tfstate": "{}", ".terraform.lock.hcl": "", "my_override.tf": ""}
    for name, text in {**kept, "of_an_older_module.tf": "", "modules/nodes/old.tf": ""}.items():
        (place / name).write_text(text)
    (place / "main.tf").write_text("# of an older module\n")
    before = (place / "outputs.tf").stat().st_mtime_ns
    provider.write_module(place, {"a": 2})
    assert all((place / name).read_text() == text for name, text in kept.items())
    assert not (place / "of_an_older_module.tf").exists()
    assert not (place / "modules/nodes/old.tf").exists()
    assert "older" not in (place / "main.tf").read_text()
    assert (place / "outputs.tf").stat().st_mtime_ns == before
    assert json.loads((place / provider.VARIABLES).read_text()) == {"a": 2}
    assert place.stat().st_mode & 0o077 == 0


def test_lock_file_of_another_release_is_removed_with_its_module(tmp_path: Path) -> None:
    """Otherwise `init` refuses the version that the new module pins."""
    place = tmp_path / "terraform"
    provider.write_module(place, {})
    lock_file = place / ".terraform.lock.hcl"
    lock_file.touch()
    provider.write_module(place, {})
    assert lock_file.exists()
    versions = place / "versions.tf"
    versions.write_text(versions.read_text().replace("~> ", "~> 1"))
    provider.write_module(place, {})
    assert not lock_file.exists()


def test_check_refuses_a_gcloud_that_is_missing_logged_out_or_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of()
    monkeypatch.setenv("PATH", str(tmp_path))
    with refused("tool-missing", MachineError, "gcloud", "https://cloud.google.com/sdk"):
        provider_of(spec).check(spec)
    bin_folder = gcloud.install(tmp_path, tmp_path / "world.json")
    monkeypatch.setenv("PATH", f"{bin_folder}:{os.defpath}")
    provider_of(spec).check(spec)
    for state in ("none", "expired", "reauth"):
        (bin_folder / "login").write_text(state)
        with refused("cloud-login/gcloud", MachineError, "gcloud auth login"):
            provider_of(spec).check(spec)
    (bin_folder / "gcloud").write_text(
        "#!/bin/sh\necho 'ERROR: Max retries exceeded' >&2; exit 1\n"
    )
    with refused("tool-failed/gcloud", MachineError, "Max retries exceeded"):
        provider_of(spec).check(spec)


def test_job_environment_depends_on_the_machine_type() -> None:
    l4 = gcp_machines.machines()["g2-standard-4"]
    plain = gcp_machines.machines()["e2-standard-4"]
    assert job_environment(l4, gvnic=True) == {
        "NCCL_DEBUG": "WARN",
        "NCCL_SOCKET_IFNAME": "={interface}",
        "GLOO_SOCKET_IFNAME": "{interface}",
        "NCCL_SOCKET_NTHREADS": "4",
        "NCCL_NSOCKS_PERTHREAD": "1",
    }
    assert set(job_environment(l4, gvnic=False)) == {
        "NCCL_DEBUG",
        "NCCL_SOCKET_IFNAME",
        "GLOO_SOCKET_IFNAME",
    }
    assert job_environment(plain, gvnic=True) == {}
    assert network_note(l4) is None
    assert "GPUDirect-TCPX " in str(network_note(gcp_machines.machines()["a3-highgpu-8g"]))
