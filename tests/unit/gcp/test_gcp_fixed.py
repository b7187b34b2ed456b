"""Settings that a cluster keeps from its first `up` on: another value is refused, and nothing changes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.providers.gcp.provider import (
    APPLIED,
    record_applied,
    variables,
    write_module,
)
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.state.workspace import Workspace
from tests.support.messages import refused
from tests.unit.gcp.clusters import provider_of, workspace_in
from tests.unit.gcp.module import CLUSTER_ID, PUBLIC_KEY

KEY = "projects/k/locations/us-central1/keyRings/r/cryptoKeys/c"
IMAGE = {"project": "debian-cloud", "family": "debian-12"}
LAB = {"network": "lab", "subnetwork": "lab-us"}
SHARED = {"filestore": {"tier": "ZONAL", "capacity": "1TiB"}}


def spec_of(*, controller: dict[str, Any] | None = None, **provider: Any) -> ClusterSpec:
    settings = {"type": "gcp", "project": "my-project", "zone": "us-central1-a"}
    settings |= {"controller": controller or {}, **provider}
    train = {"name": "train", "nodes": 1}
    return ClusterSpec.model_validate(
        {"version": 1, "name": "demo", "provider": settings, "partitions": [train]}
    )


def up_with(spec: ClusterSpec, folder: Path) -> Workspace:
    """Return a workspace as the first `up` leaves it."""
    workspace = workspace_in(folder)
    made = variables(spec, CLUSTER_ID, PUBLIC_KEY)
    assert isinstance(spec.provider, GcpSettings)
    write_module(workspace.terraform, made)
    record_applied(workspace.terraform)
    return workspace


@pytest.mark.parametrize(
    ("before", "after", "where"),
    [
        ({}, {"project": "other-project"}, "provider.project"),
        ({}, {"zone": "us-central1-b"}, "provider.zone"),
        ({}, {"zone": "us-east1-c"}, "provider.zone"),
        ({}, {"kms_key": KEY}, "provider.kms_key"),
        ({"kms_key": KEY}, {}, "provider.kms_key"),
        ({}, {"network": {"cidr": "10.90.0.0/20"}}, "provider.network.cidr"),
        ({}, {"network": {"cidr": "10.80.0.0/24"}}, "provider.network.cidr"),
        ({}, {"network": LAB}, "provider.network.network, provider.network.subnetwork"),
        ({"network": LAB}, {}, "provider.network.network, provider.network.subnetwork"),
        (
            {"network": LAB},
            {"network": LAB | {"host_project": "hosts-net"}},
            "provider.network.host_project",
        ),
        ({}, SHARED, "provider.filestore"),
        (SHARED, {}, "provider.filestore"),
        (
            SHARED,
            {"filestore": {"tier": "BASIC_HDD", "capacity": "1TiB"}},
            "provider.filestore",
        ),
        ({}, {"controller": {"image": IMAGE}}, "provider.controller.image"),
        (
            {},
            {"controller": {"boot_disk": {"size": "50GiB", "type": "pd-ssd"}}},
            "provider.controller.boot_disk.type",
        ),
        ({}, {"controller": {"gvnic": False}}, "provider.controller.gvnic"),
        ({}, {"controller": {"reservation": "mine"}}, "provider.controller.reservation"),
        (
            {},
            {"controller": {"machine_type": "c4-standard-8"}},
            "provider.controller.machine_type, provider.controller.boot_disk.type",
        ),
        (
            {},
            {"zone": "us-central1-b", "kms_key": KEY},
            "provider.zone, provider.kms_key",
        ),
    ],
)
def test_changed_setting_of_a_cluster_is_refused(
    tmp_path: Path, before: dict[str, Any], after: dict[str, Any], where: str
) -> None:
    workspace = up_with(spec_of(**before), tmp_path)
    files = {path: path.read_bytes() for path in workspace.root.rglob("*") if path.is_file()}
    other = spec_of(**after)
    provider = provider_of(other)
    for ask in (provider.plan, provider.preflight):
        with refused("fixed-while-up", UsageError, where=where):
            ask(other, workspace)
    assert {path: path.read_bytes() for path in files} == files


class PlannedError(Exception):
    """The settings were accepted."""


@pytest.mark.parametrize(
    ("after", "is_up"),
    [
        ({"network": {"cidr": "10.80.0.0/19"}}, True),
        ({"controller": {"machine_type": "n2-standard-8", "boot_disk": {"size": "80GiB"}}}, True),
        ({"labels": {"team": "x"}, "secure_boot": True}, True),
        ({"partitions": {"train": {"image": IMAGE, "gvnic": False}}}, True),
        ({"zone": "us-east1-c"}, False),
    ],
)
def test_changes_in_place_and_of_what_does_not_exist_are_accepted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, after: dict[str, Any], is_up: bool
) -> None:
    """A plan that the user declined has written Terraform's files, and nothing exists."""
    workspace = up_with(spec_of(), tmp_path)
    if not is_up:
        (workspace.terraform / APPLIED).unlink()
    other = spec_of(**after)

    def planned(*_: object, **__: object) -> None:
        raise PlannedError

    monkeypatch.setattr("clusterctl.providers.gcp.provider.Terraform", planned)
    with pytest.raises(PlannedError):
        provider_of(other).plan(other, workspace)


@pytest.mark.parametrize("record", ["", "[]", "1"])
def test_change_is_refused_while_the_applied_settings_are_unknown(
    tmp_path: Path, record: str
) -> None:
    workspace = up_with(spec_of(), tmp_path)
    (workspace.terraform / APPLIED).write_text(record)
    with refused("record-damaged/settings", UsageError, where=str(workspace.terraform / APPLIED)):
        provider_of(spec_of()).plan(spec_of(), workspace)


def test_gvnic_false_reaches_google_also_for_a_machine_that_needs_gvnic() -> None:
    spec = spec_of(controller={"machine_type": "c3-standard-8", "gvnic": False})
    made = variables(spec, CLUSTER_ID, PUBLIC_KEY)
    assert made["hosts"][spec.controller_host]["nic_type"] == "VIRTIO_NET"
