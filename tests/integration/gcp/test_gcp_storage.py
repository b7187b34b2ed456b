"""Shared storage that outlives its cluster, with real Terraform."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import TerraformError
from clusterctl.providers.storage import KeptStorage
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.workspace import Workspace
from tests.support.google.api import Google
from tests.support.google.cloud import GoogleCloud
from tests.support.messages import refused
from tests.support.sweeps import in_sweep
from tests.support.terraform import RecordingReporter
from tests.support.verbs import Clusterctl
from tests.unit.gcp.clusters import provider_of, put_own_network, workspace_in
from tests.unit.gcp.test_gcp_storage import DISK, FILESTORE, ON_FILESTORE, kept, left_disk, spec_of


@pytest.fixture
def cloud(cloud: GoogleCloud) -> GoogleCloud:
    """A cloud with a network that belongs to no cluster."""
    put_own_network(cloud)
    return cloud


def up(spec: ClusterSpec, workspace: Workspace) -> tuple[str, ...]:
    """Plan and apply as `up` does. Return the notes."""
    provider = provider_of(spec)
    provider.plan(spec, workspace)
    done = provider.apply(spec, workspace)
    workspace.inventory.write_text(done.inventory.text)
    return done.notes


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


def left_by_a_cluster(
    cloud: GoogleCloud, spec: ClusterSpec, workspace: Workspace, kind: str
) -> KeptStorage:
    """Create and remove a cluster. Return the storage that it leaves."""
    assert up(spec, workspace) == ()
    name = f"demo-{workspace.cluster_id()}-shared"
    made = only(cloud, kind)
    assert made["name"] == name
    assert made["labels"] == {
        "clusterctl-cluster": "demo",
        "clusterctl-storage": "demo",
        "clusterctl-user": "ada",
        "clusterctl-uid": "3001",
    }
    again = provider_of(spec).plan(spec, workspace)
    assert (again.changes, again.other, again.notes) == ((), (), ())
    with refused("terraform", TerraformError, "prevent_destroy"):
        provider_of(spec)._terraform(workspace, spec.controller_host).plan(destroy=True)

    down(spec, workspace)
    assert only(cloud, kind) == made
    assert {each for each in cloud.resources().values() if "instance" in each} <= {FILESTORE}
    (storage,) = kept(spec)
    assert storage.what.split()[-3:] == [name, "in", "us-central1-a"]
    assert storage.homes == {"ada": 3001}
    assert storage.size_mib == (100 if kind == DISK else 1024) * 1024
    assert storage.usd_per_month == pytest.approx({DISK: 10.0, FILESTORE: 163.84}[kind], rel=0.05)
    return storage


@pytest.mark.parametrize(("kind", "more"), [(DISK, {}), *in_sweep((FILESTORE, ON_FILESTORE))])
def test_kept_storage_is_reused_by_the_next_cluster(
    cloud: GoogleCloud, tmp_path: Path, kind: str, more: dict[str, Any]
) -> None:
    """The next cluster succeeds in its second `up`, enlarges the storage, and loses its state."""
    spec = spec_of(**more)
    second = workspace_in(tmp_path / "2")
    storage = left_by_a_cluster(cloud, spec, workspace_in(tmp_path / "1"), kind)
    cloud.forget_log()
    provider = provider_of(spec)
    planned = provider.plan(spec, second)
    (note,) = (note for note in planned.notes if "reused" in note)
    assert storage.id.rpartition("/")[2] in note
    # It costs what it cost all the time.
    assert planned.cost is not None
    assert planned.cost.now > 0
    cloud.fail("quota_of_region", name="demo-train-*", times=1)
    with refused("quota", TerraformError):
        provider.apply(spec, second)
    larger = {} if more else {"shared_disk": {"size": "200GiB"}}
    up(spec_of(**more, **larger), second)
    assert not [one for one in cloud.done("create", "delete") if one[1] == kind]
    there = only(cloud, kind)
    assert there["id"] == storage.id
    if kind == DISK:
        (disk,) = cloud.instances["demo-ctl"]["attached_disk"]
        assert (disk["source"], disk["device_name"]) == (there["self_link"], "shared")
        assert there["size"] == 200

    (second.terraform / "terraform.tfstate").unlink()
    provider_of(spec).destroy(second.cluster_id(), workspace=None)
    assert provider_of(spec).leftovers(second.cluster_id(), workspace=None) == ()
    (last,) = kept(spec)
    assert last.id == storage.id
    provider_of(spec).remove_storage(last)
    assert kept(spec) == ()
    assert not cloud.resources(kind)
    provider_of(spec).remove_storage(storage)  # done twice


def test_storage_remove_needs_discard_and_confirmation(google: Google, tmp_path: Path) -> None:
    left_disk(google)
    cli = Clusterctl(tmp_path / "home", tmp_path / "cwd", google.environment)
    cli.cwd.mkdir()
    (cli.cwd / "cluster.yaml").write_text(dump_spec(spec_of()))
    remove = ("-f", "cluster.yaml", "storage", "remove")
    said = cli(*remove, "--yes", rc=1).stderr
    assert "disk demo-a1b2c3-shared in us-central1-a (100GiB, 10.00 USD" in said
    assert "--discard" in said
    assert kept(spec_of())
    # --discard does not replace the confirmation.
    assert "pass --yes" in cli(*remove, "--discard", rc=2).stderr
    done = cli(*remove, "--discard", "--yes")
    assert "discarded: disk demo-a1b2c3-shared" in done.stderr
    assert "disk demo-a1b2c3-shared" in (cli.home / "discarded.jsonl").read_text()
    assert not kept(spec_of())
