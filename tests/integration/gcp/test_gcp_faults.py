"""Faults of Google and kills: the same run or the next one completes the cluster."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from clusterctl.errors import TerraformError
from tests.integration.gcp.terraformed import CLUSTER_ID, PLACE, Terraformed
from tests.support.google.refusals import REFUSALS
from tests.support.messages import refused, shows
from tests.support.processes import descendants
from tests.support.terraform import addresses
from tests.unit.gcp.clusters import LEAN

pytestmark = pytest.mark.platform("stand-in", "google-api", "google-terraform")

INSTANCE = "google_compute_instance"
ALL = {"demo-ctl", "demo-train-1", "demo-train-2", "demo-train-3", "demo-train-4"}


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Terraformed:
    """A cluster without any resource yet."""
    return Terraformed(tmp_path, monkeypatch.setenv)


def failures(error: TerraformError) -> list[tuple[str, str | None]]:
    return [(failure.code, failure.host) for failure in error.failures]


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
    expected = [(REFUSALS[kind].code, f"demo-train-{number}") for number, kind in kinds.items()]
    assert sorted(failures(caught.value), key=str) == sorted(expected, key=str)
    assert "the quota NVIDIA_L4_GPUS of project my-project" in str(caught.value)
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
    assert any("already exists: demo-train-3" in line for line in cluster.said)
    assert set(cluster.cloud.instances) == ALL
    assert cluster.terraform.plan().is_empty


def test_up_waits_for_new_apis_and_service_accounts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Networks need a new API, and grants need a new account, which Google knows only later."""
    cluster = Terraformed(tmp_path, monkeypatch.setenv, lag=1)
    cluster.nodes(1)
    cluster.up()
    assert set(cluster.cloud.instances) == {"demo-ctl", "demo-train-1"}
    assert cluster.waited == [5]
    (line,) = (line for line in cluster.said if "; retrying in" in line)
    assert shows(line, "api-off")
    assert shows(line, "iam-propagation")
    cluster.down()
    assert cluster.cloud.resources() == {}


def test_up_and_down_never_touch_resources_of_another_cluster(cluster: Terraformed) -> None:
    cluster.nodes(1, more=LEAN)
    theirs = cluster.plant("demo-train-1", cluster_id="ffffff")
    with pytest.raises(TerraformError) as caught:
        cluster.up()
    assert failures(caught.value) == [("name-taken", "demo-train-1")]
    cluster.down()
    assert cluster.cloud.instances == {"demo-train-1": theirs}


@pytest.mark.sweep
def test_up_with_a_lost_state_imports_existing_resources(cluster: Terraformed) -> None:
    """An imported host lists its disks in Google's order, not in that of the configuration."""
    cluster.nodes(2, "extra_disks: [{size: 100GiB}, {size: 200GiB}]")
    cluster.up()
    before = cluster.cloud.resources()
    cluster.cloud.forget_log()
    for path in cluster.folder.glob("terraform.tfstate*"):
        path.unlink()
    cluster.up()
    assert cluster.cloud.resources() == before
    assert not {kind for _, kind, _ in cluster.cloud.done("create")} & {
        INSTANCE,
        "google_compute_network",
    }
    assert cluster.terraform.plan().is_empty


def test_up_without_credentials_creates_nothing(cluster: Terraformed) -> None:
    cluster.cloud.fail("no_credentials")
    login = ("`gcloud auth application-default login`", "GOOGLE_APPLICATION_CREDENTIALS")
    with refused("credentials", TerraformError, *login) as caught:
        cluster.up()
    assert [(failure.host, failure.phase) for failure in caught.value.failures] == [
        (None, "provision")
    ]
    assert not cluster.cloud.resources()


INSTANCE = "google_compute_instance"
HOSTS = {"demo-ctl", "demo-train-1", "demo-train-2"}


def kill(cluster: Terraformed, verb: str, moment: str, *, all_of_it: bool) -> None:
    """Run a verb and kill it once it has said that; with ``all_of_it``, Terraform too."""
    argv = [
        sys.executable,
        "-m",
        "tests.integration.gcp.carry",
        str(cluster.folder),
        verb,
        CLUSTER_ID,
    ]
    argv += [PLACE.project, PLACE.zone, PLACE.controller]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(moment in line for line in process.stdout)
        for pid in [process.pid, *(descendants(process.pid) if all_of_it else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def in_state(cluster: Terraformed) -> set[str]:
    """Return the hosts in Terraform's state, after Terraform has ended."""
    instances = (each for each in addresses(cluster.terraform) if each.endswith(f"{INSTANCE}.host"))
    return {PLACE.host_of(address) or "" for address in instances}


def converges(cluster: Terraformed, up: str, down: str, *, all_of_it: bool) -> None:
    """Kill `up` and then `down`. The next run of each completes its work."""
    cluster.cloud.fail("slow", name="demo-*", seconds=1.5)
    cluster.cloud.fail("slow", name="demo-*", seconds=1.5, on="delete")
    kill(cluster, "up", up, all_of_it=all_of_it)
    if not all_of_it:
        assert in_state(cluster) == set(cluster.cloud.instances)
    cluster.up()
    assert set(cluster.cloud.instances) == HOSTS
    made = sorted(name for _, kind, name in cluster.cloud.done("create") if kind == INSTANCE)
    assert made == sorted(HOSTS)
    assert cluster.terraform.plan().is_empty
    kill(cluster, "down", down, all_of_it=all_of_it)
    if not all_of_it:
        assert in_state(cluster) == set(cluster.cloud.instances)
    cluster.down()
    assert cluster.cloud.resources() == {}
    assert addresses(cluster.terraform) == ()


def test_killed_up_ends_terraform_and_the_next_run_continues(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = Terraformed(tmp_path, monkeypatch.setenv)
    cluster.nodes(2, more=LEAN)
    converges(cluster, "demo-train-1: creating", "demo-train-1: deleting", all_of_it=False)
    assert any("waiting for" in line for line in cluster.said)


@pytest.mark.sweep
@pytest.mark.parametrize("all_of_it", [False, True])
@pytest.mark.parametrize(
    ("up", "down"),
    [
        ("planned", "planned"),
        ("a network: creating", "demo-ctl: deleted"),
        ("a network: created", "Cloud NAT: deleted"),
        ("demo-ctl: creating", "demo-ctl: deleting"),
        ("demo-train-2: creating", "a subnetwork: deleting"),
        ("demo-train-1: created", "demo-train-1: deleted"),
    ],
)
def test_up_killed_at_any_moment_converges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up: str, down: str, all_of_it: bool
) -> None:
    cluster = Terraformed(tmp_path, monkeypatch.setenv)
    converges(cluster, up, down, all_of_it=all_of_it)
