"""The changes of a Terraform plan in terms of hosts, disks and networks."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.providers.base import HostChange
from clusterctl.providers.gcp.apply import (
    ProjectZone,
    host_changes,
    label_for,
    other_changes,
    reject_loss_of_files,
    reject_smaller_disks,
)
from clusterctl.providers.gcp.costs import INSTANCE, HostPrices
from clusterctl.providers.gcp.terraform import TAINTED, Action, ResourceChange, TerraformPlan
from clusterctl.providers.gcp.terraform_run import Resource, progress_text
from tests.support.messages import refused

PLACE = ProjectZone("my-project", "us-central1-a", "demo-ctl", enables_apis=True)


def change(
    kind: str,
    action: Action,
    before: dict[str, Any] | None,
    after: dict[str, Any] | None,
    address: str = "a",
) -> ResourceChange:
    return ResourceChange(f"{address}.{kind}.host", kind, None, action, before, after)


def plan(*changes: ResourceChange) -> TerraformPlan:
    return TerraformPlan(Path("plan.tfplan"), "0", changes)


def instance(**more: Any) -> dict[str, Any]:
    return {"name": "demo-train-1", "machine_type": "g2-standard-4", "scheduling": [{}], **more}


def test_host_changes_describe_machine_and_reason() -> None:
    t4 = [{"type": "projects/p/zones/z/acceleratorTypes/nvidia-tesla-t4", "count": 2}]
    spot = [{"provisioning_model": "SPOT"}]
    before = instance(machine_type="n1-standard-4", guest_accelerator=t4, scheduling=spot)
    (removed,) = host_changes(plan(change(INSTANCE, "delete", before, None)))
    assert (removed.action, removed.what) == ("remove", "n1-standard-4, 2 x nvidia-tesla-t4, spot")
    l4 = [{"type": "projects/p/zones/z/acceleratorTypes/nvidia-l4", "count": 1}]
    # Google shows a machine type's own, too.
    for there in (
        instance(),
        instance(guest_accelerator=l4),
    ):
        (kept,) = host_changes(plan(change(INSTANCE, "no-op", there, there)))
        assert kept == HostChange("demo-train-1", "keep", "g2-standard-4, 1 x l4")


@pytest.mark.parametrize(
    ("action", "size", "is_rejected"),
    [("update", 49, True), ("update", 51, False), ("replace", 49, False)],
)
def test_disk_of_an_existing_host_never_shrinks(
    action: Action, size: int, is_rejected: bool
) -> None:
    before, after = (
        instance(boot_disk=[{"initialize_params": [{"size": gib}]}]) for gib in (50, size)
    )
    with (
        refused("fixed-while-up/disk", UsageError, "demo-train-1") if is_rejected else nullcontext()
    ):
        reject_smaller_disks(plan(change(INSTANCE, action, before, after)))


def test_new_machine_type_stops_controller_and_replaces_node() -> None:
    after = instance(machine_type="g2-standard-8", effective_labels={"new": "1"})
    prices = HostPrices("demo")
    (stopped,) = host_changes(plan(change(INSTANCE, "update", instance(), after)), prices)
    assert stopped == HostChange(
        "demo-train-1",
        "change",
        "g2-standard-8, 1 x l4",
        "machine type changes",
        pytest.approx(0.853608),
        pytest.approx(0.706824),
        ends_jobs=True,
        stops=True,
    )
    (labelled,) = host_changes(
        plan(change(INSTANCE, "update", instance(), instance(labels={"a": "b"})))
    )
    assert (labelled.why, labelled.ends_jobs) == ("labels change", False)
    shape = change(
        "terraform_data",
        "update",
        {"input": {"machine_type": "g2-standard-4", "image": "a", "local_ssds": 0}},
        {"input": {"machine_type": "g2-standard-8", "image": "b", "local_ssds": 0}},
    )
    shape = ResourceChange(
        "a.terraform_data.shape", *[getattr(shape, n) for n in shape.__slots__[1:]]
    )
    (replaced,) = host_changes(plan(shape, change(INSTANCE, "replace", instance(), after)))
    assert (replaced.action, replaced.why.split(" and ")) == (
        "replace",
        ["machine type", "image change"],
    )


def test_host_changes_name_disks_that_were_attached_by_hand() -> None:
    folder = "projects/p/zones/z/disks"
    before = instance(attached_disk=[{"source": f"https://x/{folder}/{n}"} for n in "bc"])
    after = instance(attached_disk=[{"source": f"{folder}/b"}])
    (changed,) = host_changes(plan(change(INSTANCE, "update", before, after)))
    assert (changed.detached_disks, changed.ends_jobs) == (("c",), True)
    assert changed.why.split("; ") == ["attached disk changes", "detaches c"]


CONTROLLER = "module.controller.module.host"


@pytest.mark.parametrize(
    ("kind", "address", "where"),
    [
        (INSTANCE, CONTROLLER, "provider.controller"),
        ("google_filestore_instance", "module.filestore[0]", "provider.filestore"),
        (INSTANCE, "module.nodes", None),
        ("google_compute_instance_iam_member", CONTROLLER, None),
    ],
)
@pytest.mark.parametrize("action", ["replace", "delete", "update"])
def test_controller_and_shared_folder_are_never_recreated(
    kind: str, address: str, where: str | None, action: Action
) -> None:
    asked = change(kind, action, {"name": "its-name"}, None, address)
    is_rejected = where and action != "update"
    refusal = refused("fixed-while-up", UsageError, "its-name", where=where or "")
    with refusal if is_rejected else nullcontext():
        reject_loss_of_files(plan(asked))
    reject_loss_of_files(plan(replace(asked, why_replaced=(TAINTED,))))


def test_host_changes_start_a_stopped_host() -> None:
    """No jobs run on a stopped host, so that no other change of it matters."""
    off = instance(current_status="TERMINATED", desired_status="TERMINATED")
    on = instance(desired_status="RUNNING")
    (start,) = host_changes(plan(change(INSTANCE, "update", off, on)))
    assert start == HostChange(
        "demo-train-1", "change", "g2-standard-4, 1 x l4", "it is off", off=True
    )
    (other,) = host_changes(
        plan(change(INSTANCE, "update", off, on | {"machine_type": "g2-standard-8"}))
    )
    assert other.why.split("; ") == ["it is off", "machine type changes"]
    assert (other.ends_jobs, other.off) == (False, True)


def test_other_changes_counts_resources_that_are_not_hosts() -> None:
    made = [
        change("google_compute_network", "create", None, {}),
        *[change("google_service_account", "create", None, {}) for _ in range(2)],
        *[change("google_compute_resource_policy", "create", None, {}) for _ in range(2)],
        *[change("google_project_service", "create", None, {}) for _ in range(7)],
        change("terraform_data", "create", None, {}),
        change(INSTANCE, "create", None, instance()),
        change("google_compute_firewall", "delete", {}, None),
    ]
    assert other_changes(plan(*made)) == (
        "make a network, 2 service accounts, 2 compact placement policies, 7 APIs of the project",
        "remove a firewall rule",
    )


def test_every_resource_type_of_the_module_has_a_name() -> None:
    module = Path(__file__).parents[3] / "terraform" / "gcp"
    text = "".join(path.read_text() for path in module.rglob("*.tf"))
    kinds = {line.split('"')[1] for line in text.splitlines() if line.startswith('resource "')} - {
        INSTANCE
    }
    unnamed = {
        kind for kind in kinds if label_for(kind) == kind.removeprefix("google_").replace("_", " ")
    }
    assert kinds
    assert not unnamed


def test_resource_names_are_those_of_their_hosts() -> None:
    call = PLACE.name
    nodes = 'module.nodes.module.partition["train"]'
    node = f'{nodes}.{INSTANCE}.host["demo-train-1"]'
    assert call(Resource(node, INSTANCE, "demo-train-1")) == "demo-train-1"
    account = "google_service_account"
    assert call(Resource("x", account, "compute")) == "a service account (compute)"
    controller = f'module.controller.module.host.{INSTANCE}.host["demo-ctl"]'
    assert call(Resource(controller, INSTANCE)) == "demo-ctl"
    assert call(Resource("x", "google_compute_network")) == "a network"
    assert call(Resource("x", "terraform_data")) == ""


def test_progress_text_names_hosts() -> None:
    address = f'module.controller.module.host.{INSTANCE}.host["demo-ctl"]'
    resource = {"addr": address, "resource_type": INSTANCE}
    hook = {"resource": resource, "action": "create", "elapsed_seconds": 12}
    kinds = ("apply_start", "apply_progress", "apply_complete", "apply_errored", "refresh_start")
    texts = [progress_text({"type": kind, "hook": hook}) for kind in kinds]
    assert [(PLACE.name(text[0]), text[1]) for text in texts if text] == [
        ("demo-ctl", "creating…"),
        ("demo-ctl", "creating… 12 s"),
        ("demo-ctl", "created after 12 s"),
        ("demo-ctl", "failed after 12 s"),
    ]
    assert progress_text({"type": "version"}) is None
