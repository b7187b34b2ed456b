"""On attached clusters whose Slurm has no PMIx plugin, mpirun starts the ranks."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import site_of
from clusterctl.scheduler.sites.checks import check_pmix
from clusterctl.scheduler.sites.script import with_launcher
from clusterctl.scheduler.slurm.conf import render_files
from clusterctl.spec.job import JobSpec
from clusterctl.spec.names import Launcher
from tests.support.inventories import inventory_with
from tests.support.messages import condition
from tests.unit.scheduler.test_slurm_config import make_inventory, make_spec


@pytest.mark.parametrize("has_pmix", [True, False])
def test_launcher_without_pmix_is_mpirun(has_pmix: bool) -> None:
    job = JobSpec(name="a", bundled="train")
    torch = job.model_copy(update={"launcher": Launcher.TORCHRUN})
    started_by = Launcher.SRUN if has_pmix else Launcher.MPIRUN
    assert with_launcher(job, has_pmix=has_pmix).launcher is started_by
    assert with_launcher(torch, has_pmix=has_pmix).launcher is Launcher.TORCHRUN


WITHOUT_PMIX = site_of(inventory_with(pmix=False))


@pytest.mark.parametrize("asks", ["srun --mpi=pmix ./solver", "export SLURM_MPI_TYPE=pmix"])
def test_script_with_mpi_pmix_is_rejected_without_pmix(tmp_path: Path, asks: str) -> None:
    script = tmp_path / "job.sh"
    job = JobSpec(name="job", script=script)
    script.write_text(f"#!/bin/bash\n{asks}\n")
    (fault,) = check_pmix(WITHOUT_PMIX, Request.read(job))
    assert (condition(fault), fault.where) == ("job-unfit/pmix", str(script))
    assert "`mpirun PROGRAM`" in fault.fix
    assert [*check_pmix(site_of(inventory_with()), Request.read(job))] == []
    script.write_text(f"#!/bin/bash\n# not {asks}\nmpirun ./solver\nsrun --mpi=none hostname\n")
    for other in (job, JobSpec(name="a", bundled="train")):
        assert [*check_pmix(WITHOUT_PMIX, Request.read(other))] == []


@pytest.mark.parametrize(("release", "disabled"), [("debian-12", False), ("debian-13", True)])
def test_slurmd_needs_no_control_groups_if_unused(release: str, disabled: bool) -> None:
    spec = make_spec()
    given = make_inventory(spec, cpus=1, memory_mib=900)
    controller = replace(given.controller, distribution=release)
    nodes = [replace(node, cgroups=False) for node in given.compute]
    files = render_files(spec, replace(given, hosts=(controller, *nodes)), {})
    assert ("CgroupPlugin=disabled" in files["cgroup.conf"]) == disabled
