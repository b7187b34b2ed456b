"""Storage that outlives clusters, with real Terraform."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import StalePlanError, TerraformError
from clusterctl.providers.gcp import storage
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.messages import refused
from tests.support.terraform import RecordingReporter
from tests.support.verbs import Clusterctl
from tests.unit.gcp.clusters import provider_of, put_own_network, workspace_in
from tests.unit.gcp.test_gcp_storage import (
    DISK,
    FILESTORE,
    ON_FILESTORE,
    put_disk,
    spec_of,
    storages,
)


@pytest.fixture
def cloud(cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GoogleCloud:
    """A cloud with a network that belongs to no cluster."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "home"))
    put_own_network(cloud)
    return cloud


def up(spec: ClusterSpec, workspace: Workspace) -> tuple[str, ...]:
    """Plan and apply as `up` does. Return the plan's notes."""
    provider = provider_of(spec)
    planned = provider.plan(spec, workspace)
    done = provider.apply(spec, workspace)
    workspace.inventory.write_text(done.inventory.text)
    return planned.notes


def down(spec: ClusterSpec, workspace: Workspace) -> None:
    """Destroy with Terraform alone. Resources that it leaves are an error."""
    reporter = RecordingReporter()
    cluster_id = workspace.cluster_id()
    provider = provider_of(spec, reporter)
    provider.destroy(cluster_id, workspace=workspace)
    assert not [
        line
        for line in reporter.lines
        if "Terraform could not" in line or line.startswith("deleting")
    ]
    assert provider.leftovers(cluster_id, workspace=None) == ()
    assert provider.orphans("demo").found == ()


def only(cloud: GoogleCloud, kind: str) -> Mapping[str, Any]:
    (one,) = cloud.resources(kind).values()
    found: Mapping[str, Any] = one
    return found


def made_by_a_cluster(
    cloud: GoogleCloud, spec: ClusterSpec, workspace: Workspace, kind: str
) -> KeptStorage:
    """Create and remove a cluster. Return the storage that it created."""
    planned = provider_of(spec).plan(spec, workspace)
    assert any("does not exist" in note for note in planned.notes)
    assert cloud.resources(kind) == {}
    up(spec, workspace)
    made = only(cloud, kind)
    assert made["name"] == "data"
    labels = {
        "clusterctl-storage": "data",
        "clusterctl-user": "ada",
        "clusterctl-uid": "3001",
    }
    assert labels.items() < made["labels"].items()
    state = json.loads((storage.folder(PROJECT, "data") / "terraform.tfstate").read_text())
    assert [one["type"] for one in state["resources"] if one["mode"] == "managed"] == [kind]
    (one,) = storages()
    assert "demo-ctl" in one.used_by
    again = provider_of(spec).plan(spec, workspace)
    assert (again.changes, again.other, again.notes) == ((), (), ())
    down(spec, workspace)
    assert only(cloud, kind) == made
    assert {each for each in cloud.resources().values() if "instance" in each} <= {FILESTORE}
    (one,) = storages()
    assert (one.used_by, one.homes, one.is_from_here) == ((), {"ada": 3001}, True)
    assert one.what.split()[-3:] == ["data", "in", "us-central1-a"]
    assert one.size_mib == (100 if kind == DISK else 1024) * 1024
    assert one.usd_per_month == pytest.approx({DISK: 10.0, FILESTORE: 163.84}[kind], rel=0.05)
    return one


@pytest.mark.parametrize(("kind", "more"), [(DISK, {}), (FILESTORE, ON_FILESTORE)])
def test_storage_is_used_by_the_next_cluster(
    cloud: GoogleCloud, tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    """The next cluster succeeds in its second `up`, without the storage's state, and loses its own
    state.
    """
    spec = spec_of(**more)
    second = workspace_in(tmp_path / "2")
    one = made_by_a_cluster(cloud, spec, workspace_in(tmp_path / "1"), kind)
    (storage.folder(PROJECT, "data") / "terraform.tfstate").unlink()
    cloud.forget_log()
    provider = provider_of(spec)
    planned = provider.plan(spec, second)
    assert any(str(one) in note for note in planned.notes)
    # It costs what it cost all the time.
    assert planned.cost is not None
    assert planned.cost.now > 0
    cloud.fail("quota_of_region", name="demo-train-*", times=1)
    with refused("quota", TerraformError):
        provider.apply(spec, second)
    up(spec, second)
    assert not [each for each in cloud.done("create", "delete") if each[1] == kind]
    there = only(cloud, kind)
    assert there["id"] == one.id
    if kind == DISK:
        (disk,) = cloud.instances["demo-ctl"]["attached_disk"]
        assert (disk["source"], disk["device_name"]) == (there["self_link"], "shared")

    (second.terraform / "terraform.tfstate").unlink()
    provider_of(spec).destroy(second.cluster_id(), workspace=None)
    assert provider_of(spec).leftovers(second.cluster_id(), workspace=None) == ()
    provider_of(spec).remove_storage(one)
    assert storages() == ()
    assert not cloud.resources(kind)
    assert not storage.folder(PROJECT, "data").exists()
    provider_of(spec).remove_storage(one)  # done twice


def test_new_filestore_brings_no_change_that_was_not_shown(
    cloud: GoogleCloud, tmp_path: Path
) -> None:
    spec = spec_of(**ON_FILESTORE)
    workspace = workspace_in(tmp_path)
    provider = provider_of(spec)
    provider.plan(spec, workspace)
    provider.apply(spec, workspace)
    # Both are deleted by hand, the node after the plan was shown.
    cloud.lose("data", FILESTORE)
    provider = provider_of(spec)
    provider.plan(spec, workspace)
    cloud.lose("demo-train-1")
    with refused("plan-changed", StalePlanError, "demo-train-1"):
        provider.apply(spec, workspace)
    assert "demo-train-1" not in cloud.instances


def test_failed_up_keeps_the_storage_that_it_created(cloud: GoogleCloud, tmp_path: Path) -> None:
    spec = spec_of()
    workspace = workspace_in(tmp_path)
    cloud.fail("quota_of_region", name="demo-*", times=5)
    with refused("quota", TerraformError):
        up(spec, workspace)
    made = only(cloud, DISK)
    provider_of(spec).destroy(workspace.cluster_id(), workspace=workspace)
    assert only(cloud, DISK) == made


def test_storage_remove_needs_discard_and_confirmation(google: Google, tmp_path: Path) -> None:
    put_disk(google)
    cli = Clusterctl(tmp_path / "home", tmp_path / "cwd", google.environment)
    cli.cwd.mkdir()
    (cli.cwd / "cluster.yaml").write_text(dump_spec(spec_of()))
    (cli.home / ".storage" / PROJECT / "data").mkdir(parents=True)
    remove = ("-f", "cluster.yaml", "storage", "remove", "data")
    said = cli(*remove, "--yes", rc=1).stderr
    assert "disk data in us-central1-a (100GiB, 10.00 USD" in said
    assert "--discard" in said
    assert storages()
    # --discard does not replace the confirmation.
    assert "pass --yes" in cli(*remove, "--discard", rc=2).stderr
    (listed,) = cli("-o", "json", "storage", "list", "--project", PROJECT).json["storage"]
    assert (listed["name"], listed["used_by"]) == ("data", [])
    cli(*remove, "--discard", "--yes")
    assert "disk data" in (cli.home / "discarded.jsonl").read_text()
    assert not storages()
