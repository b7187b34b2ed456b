"""The differences between a Slurm of clusterctl, a foreign Slurm, and no Slurm."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.mpirun import MpirunClient
from clusterctl.scheduler.sites.script import fitted_to
from clusterctl.scheduler.sites.site import Pace
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.messages import condition, refused
from tests.support.scripted import ScriptedTransport

TRAIN = PartitionFacts("train", ("d-train-1",))
INVENTORY = inventory_with(TRAIN, folder="/scratch/ada/c", max_array=11, account="proj")
OWN = site_of(INVENTORY)
FOREIGN = site_of(inventory_with(TRAIN, folder="/scratch/ada/c", max_array=11, is_foreign=True))
MPIRUN = site_of(inventory_with(TRAIN, scheduler="none"))
SPEC = ClusterSpec.model_validate(
    {"version": 1, "name": "d", "partitions": [{"name": "big", "nodes": 1}]}
)


def test_foreign_site_is_polled_rarely_and_repaired_by_its_administrators() -> None:
    assert OWN.pace == MPIRUN.pace == Pace()
    assert FOREIGN.pace.changed_s > 0
    assert FOREIGN.pace.running_s > FOREIGN.pace.pending_s
    assert OWN.advice == MPIRUN.advice
    assert (OWN.advice.repair, OWN.advice.is_operator) == ("run `clusterctl up`", True)
    assert "administrators" in FOREIGN.advice.repair
    assert not FOREIGN.advice.is_operator


def test_foreign_site_keeps_clusterctl_to_its_folder() -> None:
    assert (OWN.upload_folder, OWN.own_folder, OWN.as_root) == (".", "", ("sudo", "-n"))
    assert FOREIGN.upload_folder == "/scratch/ada/c/files"
    assert (FOREIGN.own_folder, FOREIGN.as_root) == ("/scratch/ada/c", ())


def test_job_gets_the_options_that_the_site_demands_unless_it_sets_them() -> None:
    options = ("--constraint=cpu", "--partition=x")
    site = site_of(replace(FOREIGN.inventory, slurm_options=options))
    plain = fitted_to(site, Request.read(JobSpec(bundled="probe", name="a")))
    assert (plain.value("--constraint"), plain.value("--partition")) == ("cpu", "x")
    own = JobSpec(bundled="probe", name="a", slurm=("-C gpu",), partition="train")
    request = fitted_to(site, Request.read(own))
    assert (request.value("--constraint"), request.value("--partition")) == ("gpu", "train")


@pytest.mark.parametrize(
    ("default", "line", "options", "sent"),
    [
        ("--gres=gpu:1", "--gpus-per-node=4", {}, {"--gpus-per-node": "4"}),
        ("--gres=gpu:1", "", {"gpus": 4}, {"--gpus-per-node": "4"}),
        ("--gres=gpu:1", "", {"gpus": 0}, {}),
        ("--gres=gpu:1,tmpfs:9G", "--gpus=4", {}, {"--gpus": "4", "--gres": "tmpfs:9G"}),
        ("--gres=gpu:1", "--gres=tmpfs:9G", {}, {"--gres": "tmpfs:9G"}),
        ("--mem-per-cpu=2G", "--mem=64G", {}, {"--mem": "64G"}),
        ("--mem-per-cpu=2G", "", {}, {"--mem-per-cpu": "2G"}),
    ],
)
def test_option_that_the_site_demands_replaces_none_of_the_job(
    default: str, line: str, options: dict[str, Any], sent: dict[str, str], tmp_path: Path
) -> None:
    (script := tmp_path / "a.sh").write_text(f"#!/bin/bash\n{line and '#SBATCH '}{line}\n")
    site = site_of(replace(FOREIGN.inventory, slurm_options=(default,)))
    request = fitted_to(site, Request.read(JobSpec(name="a", script=script, **options)))
    names = ("--gres", "--gpus", "--gpus-per-node", "--mem", "--mem-per-cpu")
    assert {name: request.value(name) for name in names if request.last(name)} == sent


def test_site_that_chooses_the_partition_gets_jobs_without_one() -> None:
    site = site_of(replace(FOREIGN.inventory, is_routed=True))
    request = fitted_to(site, Request.read(JobSpec(bundled="probe", name="a")))
    assert request.last("--partition") is None
    assert request.partition_in(site.inventory) is None


def test_slurm_operations_without_slurm_are_refused() -> None:
    for site in (OWN, FOREIGN):
        site.reject_without_slurm()
    with refused("unsupported/slurm", UsageError):
        MPIRUN.reject_without_slurm()


def test_dependencies_are_refused_without_slurm() -> None:
    job = JobSpec(name="t", bundled="train", after=("12",))
    for site in (OWN, FOREIGN):
        assert [*site.faults(Request.read(job))] == []
    (fault,) = MPIRUN.faults(Request.read(job))
    assert (condition(fault), "--after" in fault.what) == ("unsupported/slurm", True)


def test_foreign_site_plans_no_change_of_the_inventory() -> None:
    assert FOREIGN.planned(SPEC) is FOREIGN.inventory
    assert [part.name for part in OWN.planned(SPEC).partitions] == ["big"]


def test_site_has_the_client_of_its_scheduler() -> None:
    transport = ScriptedTransport([])
    clients = [site.client(transport, lambda _: transport, 3.0) for site in (OWN, FOREIGN, MPIRUN)]
    assert [type(client) for client in clients] == [SlurmClient, SlurmClient, MpirunClient]
    assert [client.patience_s for client in clients] == [3.0] * 3
    assert [client.advice for client in clients[:2]] == [OWN.advice, FOREIGN.advice]


def test_unknown_partition_error_lists_the_partitions() -> None:
    for site in (OWN, FOREIGN, MPIRUN):
        error = site.unknown_partition("gpu")
        assert (condition(error), error.fix.endswith("train")) == ("not-found/partition", True)
        assert ("clusterctl attach" in error.fix) is (site is FOREIGN)
