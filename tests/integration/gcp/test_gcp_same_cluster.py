"""A changed spec or a wrong state never orphans, moves or changes another cluster at Google."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cluster import down
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.cluster.up import UpOptions, up
from clusterctl.errors import ProvisionError, UsageError
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.orphans import find_resources, orphan_ids, remove_resources
from clusterctl.providers.gcp.provider import variables
from clusterctl.providers.gcp.storage import VARIABLES
from clusterctl.spec.load import dump_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp
from clusterctl.spec.providers.gcp_nodes import Image
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.chosen_spec import spec_of as read_spec
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock
from tests.support.google import gcloud
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.messages import refused
from tests.support.terraform import RecordingReporter
from tests.unit.gcp import module as shared
from tests.unit.gcp.clusters import NOT_BILLED, provider_of, workspace_in
from tests.unit.gcp.module import CLUSTER_ID, PUBLIC_KEY, Module

DEBIAN = {"image": {"project": "debian-cloud", "family": "debian-12"}}
LOCAL = ClusterSpec.model_validate(
    {"version": 1, "name": "demo", "partitions": [{"name": "x", "nodes": 1}]}
)


def spec_of(**provider: Any) -> ClusterSpec:
    settings = {"type": "gcp", "project": PROJECT, "zone": "us-central1-a", "controller": DEBIAN}
    train = {"name": "train", "nodes": 1}
    settings |= {"partitions": {"train": DEBIAN}} | provider
    return ClusterSpec.model_validate(
        {"version": 1, "name": "demo", "provider": settings, "partitions": [train]}
    )


@pytest.fixture
def cloud(
    planned_cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> GoogleCloud:
    """A cloud. PATH has only `gcloud` and the machine's own programs."""
    bins = f"{planned_cloud.bin}:{gcloud.install(tmp_path, planned_cloud.store.path)}"
    monkeypatch.setenv("PATH", f"{bins}:/usr/local/bin:/usr/bin:/bin")
    return planned_cloud


def test_plan_refuses_another_project_for_an_existing_cluster(
    cloud: GoogleCloud, tmp_path: Path
) -> None:
    spec = spec_of()
    workspace = workspace_in(tmp_path)
    provider_of(spec).apply(spec, workspace)
    elsewhere = spec_of(project="other-project")
    with refused("fixed-while-up", UsageError, PROJECT, where="provider.project"):
        provider_of(elsewhere).plan(elsewhere, workspace)
    assert provider_of(spec_of(zone="europe-west4-a")).alive(workspace.cluster_id())
    provider_of(spec).destroy(workspace.cluster_id(), workspace=workspace)
    assert not cloud.instances


def test_state_of_another_cluster_is_neither_changed_nor_destroyed(
    cloud: GoogleCloud, tmp_path: Path
) -> None:
    """Two clusters with the same name may have their states in the same bucket."""
    spec = spec_of()
    theirs = workspace_in(tmp_path / "theirs")
    ours = workspace_in(tmp_path / "ours")
    provider_of(spec).apply(spec, theirs)
    before = cloud.resources()
    shutil.copytree(theirs.terraform, ours.terraform, symlinks=True)
    with refused("exists/state", ProvisionError, theirs.cluster_id(), where=""):
        provider_of(spec).plan(spec, ours)
    reporter = RecordingReporter()
    provider_of(spec, reporter).destroy(ours.cluster_id(), workspace=ours)
    assert any("another cluster" in line for line in reporter.lines)
    assert cloud.resources() == before


KEY = f"projects/{PROJECT}/locations/us-central1/keyRings/r/cryptoKeys/c"


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({"zone": "us-central1-b"}, "provider.zone"),
        ({"zone": "us-east1-c"}, "provider.zone"),
        ({"network": {"cidr": "10.90.0.0/20"}}, "provider.network.cidr"),
        (
            {"network": {"network": "lab", "subnetwork": "lab-us"}},
            "provider.network.network, provider.network.subnetwork",
        ),
        ({"kms_key": KEY}, "provider.kms_key"),
        ({"filestore": {"tier": "BASIC_HDD", "capacity": "1TiB"}}, "provider.filestore"),
        (
            {"controller": {"image": {"project": "my-images", "family": "other"}}},
            "provider.controller.image",
        ),
        (
            {"controller": {**DEBIAN, "boot_disk": {"size": "50GiB", "type": "pd-ssd"}}},
            "provider.controller.boot_disk.type",
        ),
    ],
)
def test_up_refuses_what_would_recreate_a_cluster_and_touches_nothing(
    cloud: GoogleCloud, tmp_path: Path, change: dict[str, Any], where: str
) -> None:
    """Before `up` asks Google or Terraform anything."""
    spec = spec_of()
    workspace = workspace_in(tmp_path)
    provider_of(spec).apply(spec, workspace)
    before = cloud.resources(), (workspace.terraform / VARIABLES).read_bytes()
    cloud.forget_log()
    other = ClusterContext.of(spec_of(**change), workspace=workspace)
    with refused("fixed-while-up", UsageError, where=where):
        up(other, UpOptions(discard=True))
    assert (cloud.resources(), (workspace.terraform / VARIABLES).read_bytes()) == before
    assert cloud.done() == []
    # What `down` removes is still known.
    provider_of(spec).destroy(workspace.cluster_id(), workspace=workspace)
    assert not cloud.instances


class DeclinedError(Exception):
    """The user declined the plan."""


def decline(_: object) -> None:
    raise DeclinedError


def test_half_made_cluster_survives_a_provider_change(tmp_path: Path) -> None:
    workspace = workspace_in(tmp_path)
    # As an `up` leaves it that fails before the inventory.
    workspace.spec.write_text(dump_spec(spec_of()))
    with refused("exists/cluster", UsageError, "provider.type: gcp"):
        up(ClusterContext.of(LOCAL, workspace=workspace), UpOptions(approve=decline))


def test_declined_change_keeps_the_cluster_for_down(
    cloud: GoogleCloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace = workspace_in(tmp_path)
    with pytest.raises(DeclinedError):
        up(ClusterContext.of(spec_of(), workspace=workspace), UpOptions(approve=decline))
    assert not cloud.resources()
    (workspace.terraform / "terraform.tfstate").write_text("{}")
    with refused("not-found/file", UsageError, "spec.yaml"):
        down.down(PhaseRunner(workspace=workspace), down.DownOptions())
    (workspace.terraform / "terraform.tfstate").unlink()
    down.down(PhaseRunner(workspace=workspace), down.DownOptions())
    assert not workspace.root.exists()


GPUS = f"""\
version: 1
name: demo
provider: {{type: gcp, project: {PROJECT}, zone: us-central1-a}}
partitions: [{{name: train, nodes: 1, gpus: {{type: l4}}}}]
"""
PLAIN, TODAY = (f"rocky-linux-9-optimized-gcp{end}" for end in ("", "-nvidia-580"))


def read(folder: Path, text: str) -> ClusterSpec:
    """Return the spec that `up` reads from a file."""
    path = folder / "cluster.yaml"
    path.write_text(text)
    return read_spec(ChosenCluster(path))


def images(spec: ClusterSpec) -> list[str]:
    """Return the image families of all hosts in Terraform's variables. Another family recreates a
    host.
    """
    return [host["image"]["family"] for host in variables(spec, "a1b2c3", "key")["hosts"].values()]


def test_new_defaults_do_not_change_an_existing_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "home"))
    new = read(tmp_path, GPUS)
    assert (images(new), new.job_user.uid) == ([PLAIN, TODAY], 10_000)
    workspace = Workspace.of("demo")
    workspace.create()
    record = f"{GPUS}users: [{{name: {new.job_user.name}, uid: 1234}}]\n"
    workspace.spec.write_text(record)  # as a version left it whose default was another one
    spec = read(tmp_path, GPUS)
    assert (images(spec), spec.job_user.uid) == ([PLAIN, TODAY], 1234)

    workspace.spec.write_text(dump_spec(spec))  # as `up` leaves it now
    monkeypatch.setattr(gcp, "GPU_IMAGE", Image(project="any-project", family="of-next-year"))
    assert read(tmp_path, GPUS) == spec
    named = GPUS.replace(
        "zone:", "partitions: {train: {image: {project: my-images, family: mine}}}, zone:"
    )
    # What the spec names counts.
    assert images(read(tmp_path, named)) == [PLAIN, "mine"]
    assert images(read(tmp_path, GPUS.replace(", gpus: {type: l4}", ""))) == [PLAIN, PLAIN]
    more = GPUS.replace("partitions: [", "partitions: [{name: more, nodes: 1, gpus: {type: l4}}, ")
    assert images(read(tmp_path, more)) == [PLAIN, "of-next-year", TODAY]
    other = read(tmp_path, f"{GPUS}users: [{{name: grace, uid: 2000}}]\n")
    assert (other.job_user.name, other.job_user.uid) == ("grace", 2000)
    workspace.spec.write_text("damaged")
    assert read(tmp_path, GPUS).job_user.uid == 10_000


def test_down_with_a_lost_state_removes_the_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Module(tmp_path)
    spec = shared.spec_of("everything")
    module.set(variables(spec, CLUSTER_ID, PUBLIC_KEY))
    module.apply()
    (module.path / "terraform.tfstate").unlink()
    made = {kind for kind in module.cloud.resources().values() if "iam_member" not in kind}
    assert spec.provider.type == "gcp"
    with Google(module.cloud.store, spec.provider.project) as google:
        for key, value in google.environment.items():
            monkeypatch.setenv(key, value)
        api = Api(spec.provider.project, clock=Clock(sleep=lambda _: None))
        assert orphan_ids(api, spec.name) == (CLUSTER_ID,)
        found = find_resources(api, CLUSTER_ID)
        assert len({finding.kind for finding in found}) >= len(made - NOT_BILLED)
        remove_resources(api, found)
        assert find_resources(api, CLUSTER_ID) == ()
        assert not google.violations
    left = set(module.cloud.resources().values())
    assert left <= NOT_BILLED
