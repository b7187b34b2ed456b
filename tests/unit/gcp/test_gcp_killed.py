"""clusterctl is killed while Terraform is at work on Google Cloud: the next run goes on from there."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from tests.support.processes import descendants
from tests.support.terraform import addresses
from tests.unit.gcp.clusters import LEAN
from tests.unit.gcp.terraformed import CLUSTER_ID, PLACE, Terraformed

INSTANCE = "google_compute_instance"
HOSTS = {"demo-ctl", "demo-train-1", "demo-train-2"}


def kill(cluster: Terraformed, verb: str, moment: str, *, all_of_it: bool) -> None:
    """Run a verb and kill it once it has said that; with ``all_of_it``, Terraform too."""
    argv = [sys.executable, "-m", "tests.unit.gcp.carry", str(cluster.folder), verb, CLUSTER_ID]
    argv += [PLACE.project, PLACE.zone, PLACE.controller]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert any(moment in line for line in process.stdout)
        for pid in [process.pid, *(descendants(process.pid) if all_of_it else [])]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def in_state(cluster: Terraformed) -> set[str]:
    """The hosts whose instances Terraform knows, once it has ended."""
    instances = (each for each in addresses(cluster.terraform) if each.endswith(f"{INSTANCE}.host"))
    return {PLACE.host_of(address) or "" for address in instances}


def converges(cluster: Terraformed, up: str, down: str, *, all_of_it: bool) -> None:
    """Killed while it is raised and again while it is removed, it is raised and removed by the next runs."""
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


def test_killed_it_ends_terraform_first_and_the_next_run_goes_on(
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
def test_killed_at_any_moment_it_converges(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, up: str, down: str, all_of_it: bool
) -> None:
    cluster = Terraformed(tmp_path, monkeypatch.setenv)
    converges(cluster, up, down, all_of_it=all_of_it)
