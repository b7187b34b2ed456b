"""A cluster at Google is not forgotten, moved or taken to pieces by a spec or a state that is not its own."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cluster import down
from clusterctl.cluster.session import PhaseRunner
from clusterctl.cluster.up import UpOptions, up
from clusterctl.errors import ProvisionError, UsageError
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from tests.support.cluster_session import session_of
from tests.support.google import gcloud
from tests.support.google.api import PROJECT
from tests.support.google.cloud import GoogleCloud
from tests.unit.gcp.clusters import provider_of, silent, workspace_in

DEBIAN = {"image": {"project": "debian-cloud", "family": "debian-12"}}
LOCAL = ClusterSpec.model_validate({"version": 1, "name": "demo", "partitions": [{"name": "x", "nodes": 1}]})


def spec_of(**provider: Any) -> ClusterSpec:
    settings = {"type": "gcp", "project": PROJECT, "zone": "us-central1-a", "controller": DEBIAN}
    train = {"name": "train", "nodes": 1}
    settings |= {"partitions": {"train": DEBIAN}} | provider
    return ClusterSpec.model_validate(
        {"version": 1, "name": "demo", "provider": settings, "partitions": [train]}
    )


@pytest.fixture
def cloud(cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> GoogleCloud:
    """The cloud, and no programs but `gcloud` and the machine's own."""
    path = f"{cloud.bin}:{gcloud.install(tmp_path, cloud.store.path)}:/usr/local/bin:/usr/bin:/bin"
    monkeypatch.setenv("PATH", path)
    return cloud


def test_a_cluster_stays_in_its_project_and_is_seen_in_any_zone(cloud: GoogleCloud, tmp_path: Path) -> None:
    spec, workspace = spec_of(), workspace_in(tmp_path)
    provider_of(spec).apply(spec, workspace, keep={}, report=silent)
    elsewhere = spec_of(project="other-project")
    with pytest.raises(UsageError, match=PROJECT) as caught:
        provider_of(elsewhere).plan(elsewhere, workspace, keep={}, report=silent)
    assert caught.value.where == "provider.project"
    assert provider_of(spec_of(zone="europe-west4-a")).alive(workspace.cluster_id())
    provider_of(spec).destroy(workspace.cluster_id(), workspace=workspace, report=silent)
    assert not cloud.instances


def test_another_clusters_state_is_neither_changed_nor_destroyed(cloud: GoogleCloud, tmp_path: Path) -> None:
    """As where two clusters of one name have their states in one bucket."""
    spec, theirs, ours = spec_of(), workspace_in(tmp_path / "theirs"), workspace_in(tmp_path / "ours")
    provider_of(spec).apply(spec, theirs, keep={}, report=silent)
    before = cloud.resources()
    shutil.copytree(theirs.terraform, ours.terraform, symlinks=True)
    with pytest.raises(ProvisionError, match=theirs.cluster_id()):
        provider_of(spec).plan(spec, ours, keep={}, report=silent)
    said: list[str] = []
    provider_of(spec).destroy(ours.cluster_id(), workspace=ours, report=said.append)
    assert any("another cluster" in line for line in said)
    assert cloud.resources() == before


class DeclinedError(Exception):
    """The user said no."""


def decline(_: object) -> None:
    raise DeclinedError


def test_a_half_made_cluster_is_not_forgotten_by_another_provider(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    workspace.spec.write_text(dump_spec(spec_of()))  # as an `up` leaves it that fails before the inventory
    with pytest.raises(UsageError, match="under the provider gcp"):
        up(session_of(LOCAL, workspace), UpOptions(approve=decline))


def test_what_was_declined_can_be_taken_down_and_what_was_made_is_not_forgotten(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(down, "find_orphans", lambda *_: {})  # this machine may have one of the name
    workspace = workspace_in(tmp_path)
    with pytest.raises(DeclinedError):
        up(session_of(spec_of(), workspace), UpOptions(approve=decline))
    assert not cloud.resources()
    (workspace.terraform / "terraform.tfstate").write_text("{}")
    with pytest.raises(UsageError, match="no spec file"):
        down.down(PhaseRunner(workspace=workspace), down.DownOptions())
    (workspace.terraform / "terraform.tfstate").unlink()
    down.down(PhaseRunner(workspace=workspace), down.DownOptions())
    assert not workspace.root.exists()
