"""Faults of Google, interrupts and kills: the same run or the next one completes the cluster."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import time
from contextlib import suppress

import pytest

from clusterctl.errors import TerraformError
from tests.integration.gcp.terraformed import Terraformed
from tests.support.google.refusals import REFUSALS
from tests.support.messages import condition, refused, shows
from tests.support.processes import descendants
from tests.support.terraform import addresses
from tests.unit.gcp.clusters import LEAN, NOT_BILLED

pytestmark = pytest.mark.platform("stand-in", "google-api", "google-terraform")

INSTANCE = "google_compute_instance"
ALL = {"demo-ctl", "demo-train-1", "demo-train-2", "demo-train-3", "demo-train-4"}
HOSTS = {"demo-ctl", "demo-train-1", "demo-train-2"}


def failures(error: TerraformError) -> list[tuple[str, str | None]]:
    return [(condition(failure), failure.host) for failure in error.failures]


def made(cluster: Terraformed) -> set[str]:
    """Return the instances that were created since the log began."""
    return {name for _, kind, name in cluster.cloud.done("create") if kind == INSTANCE}


def test_up_names_refused_hosts_and_creates_them_in_the_next_run(
    cluster: Terraformed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """API calls are counted for the cluster's project, whichever project the environment names."""
    monkeypatch.setenv("USER_PROJECT_OVERRIDE", "true")
    monkeypatch.setenv("GOOGLE_BILLING_PROJECT", "elsewhere")
    kinds = {1: "quota_of_region", 2: "stockout_plain", 3: "waited_too_long"}
    cluster.nodes(4, more=LEAN)
    for number, kind in kinds.items():
        cluster.cloud.fail(kind, name=f"demo-train-{number}")
    with pytest.raises(TerraformError) as caught:
        cluster.up()
    expected = [
        (condition(REFUSALS[kind]), f"demo-train-{number}") for number, kind in kinds.items()
    ]
    assert sorted(failures(caught.value), key=str) == sorted(expected, key=str)
    assert "the quota NVIDIA_L4_GPUS of project demo-project" in str(caught.value)
    # Nobody waits for a quota. One was made all the same.
    assert cluster.waited == []
    assert set(cluster.cloud.instances) == ALL - {"demo-train-1", "demo-train-2"}
    assert "demo-ctl: creating…" in cluster.said
    assert any(line.startswith("demo-ctl: created") for line in cluster.said)
    assert not [line for line in cluster.said if "google_" in line or "module." in line]
    cluster.cloud.heal()
    cluster.cloud.forget_log()
    cluster.up()
    assert made(cluster) == {"demo-train-1", "demo-train-2"}
    assert "exists already and is imported: demo-train-3" in cluster.said
    assert set(cluster.cloud.instances) == ALL
    assert cluster.terraform.plan().is_empty


def test_up_waits_for_new_apis_and_service_accounts(cluster: Terraformed) -> None:
    """Networks need a new API, and grants need a new account, which Google knows only later."""
    with cluster.cloud.store.change() as world:
        world["lag"] = 1
    cluster.nodes(1)
    cluster.up()
    assert set(cluster.cloud.instances) == {"demo-ctl", "demo-train-1"}
    assert cluster.waited == [5]
    (line,) = (line for line in cluster.said if "; retrying in" in line)
    assert shows(line, "api-off")
    assert shows(line, "iam-propagation")
    cluster.down()
    assert cluster.resources == set()


def test_up_and_down_never_touch_resources_of_another_cluster(cluster: Terraformed) -> None:
    cluster.nodes(1, more=LEAN)
    theirs = cluster.plant("demo-train-1", cluster_id="ffffff")
    with pytest.raises(TerraformError) as caught:
        cluster.up()
    assert failures(caught.value) == [("exists/cloud-name", "demo-train-1")]
    cluster.destroy()
    assert cluster.cloud.instances == {"demo-train-1": theirs}


# What every kind of resource needs that Terraform creates.
PLACEMENT = "compact_placement: true"
STORAGE = "bucket: {name: demo-data, create: true}, filestore: {tier: BASIC_HDD, capacity: 1TiB}"


def assert_made_once(cluster: Terraformed) -> None:
    """Check that all is there, that nothing was removed meanwhile, and that no plan has changes."""
    assert set(cluster.cloud.instances) == HOSTS
    assert cluster.cloud.done("delete") == []
    assert cluster.terraform.plan().is_empty


def assert_destroyed(cluster: Terraformed) -> None:
    """Remove all as `down` does, and check that nothing is left that costs anything."""
    cluster.destroy()
    assert {cluster.cloud.resources()[each] for each in cluster.resources} <= NOT_BILLED
    assert addresses(cluster.terraform) == ()


def test_up_with_a_lost_state_imports_existing_resources(cluster: Terraformed) -> None:
    cluster.nodes(2, PLACEMENT, STORAGE)
    cluster.up()
    before = cluster.cloud.resources()
    cluster.cloud.forget_log()
    shutil.rmtree(cluster.workspace.terraform)
    cluster.up()
    assert cluster.cloud.resources() == before
    created = {kind for _, kind, _ in cluster.cloud.done("create")}
    assert created <= NOT_BILLED | {"google_compute_instance_iam_member"}
    assert_made_once(cluster)


def test_up_without_credentials_creates_nothing(cluster: Terraformed) -> None:
    cluster.cloud.fail("no_credentials")
    login = ("`gcloud auth application-default login`", "GOOGLE_APPLICATION_CREDENTIALS")
    with refused("cloud-login", TerraformError, *login) as caught:
        cluster.up()
    assert [(failure.host, failure.phase) for failure in caught.value.failures] == [
        (None, "provision")
    ]
    assert cluster.resources == set()


def end(cluster: Terraformed, verb: str, how: str) -> None:
    """Run a verb in a process of its own, and end it as soon as the last fault plays.

    how: "Ctrl-C"; "kill" ends clusterctl alone, "kill all" also Terraform.
    """
    with subprocess.Popen(cluster.argv(verb), stdout=subprocess.PIPE, text=True) as process:
        while not cluster.cloud.store.read()["faults"][-1]["played"]:
            assert process.poll() is None
            time.sleep(0.05)
        victims = [process.pid, *(descendants(process.pid) if how == "kill all" else [])]
        for pid in victims:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGINT if how == "Ctrl-C" else signal.SIGKILL)
        said, _ = process.communicate()
    assert how != "Ctrl-C" or shows(said, "terraform-interrupted")


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    [
        ("google_compute_router_nat", "*", "Ctrl-C"),
        ("google_storage_bucket", "*", "crash"),
        (INSTANCE, "demo-train-2", "kill all"),
    ],
)
def test_interrupted_up_is_completed_by_the_next(
    cluster: Terraformed, kind: str, name: str, how: str
) -> None:
    """What Google was creating is not in the state. A crash of the provider is retried at once."""
    cluster.nodes(2, PLACEMENT, STORAGE)
    if how == "crash":
        cluster.cloud.fail("crash", of=kind, name=name, times=1)
    else:
        cluster.cloud.fail("slow", of=kind, name=name, seconds=10, times=1)
        end(cluster, "up", how)
    cluster.up()
    assert any(line.startswith("exists already and is imported: ") for line in cluster.said)
    assert_made_once(cluster)
    assert_destroyed(cluster)


def test_down_after_an_interrupted_up_leaves_nothing(cluster: Terraformed) -> None:
    cluster.nodes(2, PLACEMENT, STORAGE)
    cluster.cloud.fail("slow", of="google_filestore_instance", seconds=10, times=1)
    end(cluster, "up", "Ctrl-C")
    assert_destroyed(cluster)


def test_killed_up_and_down_leave_nothing(cluster: Terraformed) -> None:
    cluster.nodes(2, more=LEAN)
    cluster.cloud.fail("slow", seconds=10, times=1)
    end(cluster, "up", "kill")
    cluster.cloud.fail("slow", on="delete", of="google_service_account", seconds=2, times=1)
    end(cluster, "down", "kill")
    assert_destroyed(cluster)
