"""A Slurm that has no plugin for PMIx, as Debian's 26.05: mpirun starts ranks, and scripts are looked at."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.scheduler.script import reject_pmix, with_launcher
from clusterctl.scheduler.slurm import SlurmClient
from clusterctl.scheduler.slurm_conf import render_files
from clusterctl.spec.job import JobSpec, Launcher
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory
from clusterctl.util.process import Result
from tests.support.messages import refused


def spec() -> ClusterSpec:
    values = {"version": 1, "name": "d", "partitions": [{"name": "train", "nodes": 1}]}
    return ClusterSpec.model_validate({**values, "users": [{"name": "a", "uid": 2000}]})


def inventory(**values: Any) -> Inventory:
    hosts = (
        Host(name="d-ctl", address="10.0.0.1", roles=(CONTROLLER,), host_key="k", distribution="debian-13"),
        Host(
            name="d-1",
            address="10.0.0.2",
            roles=(COMPUTE,),
            host_key="k",
            partition="train",
            cpus=1,
            memory_mib=900,
        ),
    )
    place = {"cluster": "d", "cluster_id": "a", "provider": "local", "network": "10.0.0.0/24", "shared": "/s"}
    return Inventory.model_validate({**place, "hosts": hosts, "baked": True, **values})


@pytest.mark.parametrize(("has_pmix", "default"), [(True, "MpiDefault=pmix"), (False, "MpiDefault=none")])
def test_without_the_plugin_for_pmix_mpirun_starts_ranks(has_pmix: bool, default: str) -> None:
    files = render_files(spec(), inventory(pmix=has_pmix), {})
    assert default in files["slurm.conf"].splitlines()
    assert ("TaskProlog=/opt/clusterctl/task-prolog" in files["slurm.conf"].splitlines()) is not has_pmix

    job = JobSpec(name="a", bundled="train")
    torch = job.model_copy(update={"launcher": Launcher.TORCHRUN})
    started_by = Launcher.SRUN if has_pmix else Launcher.MPIRUN
    assert with_launcher(job, has_pmix=has_pmix).launcher is started_by
    assert with_launcher(torch, has_pmix=has_pmix).launcher is Launcher.TORCHRUN


class Recorder:
    host = "d-ctl"

    def __init__(self) -> None:
        self.argv: tuple[str, ...] = ()

    def run(self, argv: tuple[str, ...], **_: object) -> Result:
        self.argv = tuple(argv)
        return Result(0, "", "")


@pytest.mark.parametrize("asks", ["srun --mpi=pmix ./solver", "export SLURM_MPI_TYPE=pmix"])
def test_a_script_that_asks_for_pmix_is_rejected_where_there_is_none(tmp_path: Path, asks: str) -> None:
    script = tmp_path / "job.sh"
    job = JobSpec(name="job", script=script)
    script.write_text(f"#!/bin/bash\n{asks}\n")
    with refused("no-pmix", UsageError, "`mpirun PROGRAM`", where=str(script)):
        reject_pmix(job)
    script.write_text("#!/bin/bash\nsrun ./solver\n")
    assert "mpirun" in reject_pmix(job)
    script.write_text(f"#!/bin/bash\n# not {asks}\nmpirun ./solver\nsrun --mpi=none hostname\n")
    assert reject_pmix(job) == reject_pmix(JobSpec(name="a", bundled="train")) == ""


def test_the_proof_of_the_cluster_does_too(tmp_path: Path) -> None:
    said = Recorder()
    SlurmClient(said, has_pmix=False).run_verification_job(("d-1", "d-2"), str(tmp_path))  # type: ignore[arg-type]
    assert "srun" not in said.argv
    assert said.argv.index("salloc") < said.argv.index("mpirun") < said.argv.index("payload.probe")


@pytest.mark.parametrize(
    ("release", "slurm", "disabled"),
    [("debian-12", "", False), ("debian-13", "", True), ("debian-13", "26.05", True)],
)
def test_slurmd_looks_for_no_control_groups_where_nothing_uses_them(
    release: str, slurm: str, disabled: bool
) -> None:
    given = inventory(slurm=slurm)
    controller = given.controller.model_copy(update={"distribution": release})
    files = render_files(spec(), given.model_copy(update={"hosts": (controller, *given.compute)}), {})
    assert ("CgroupPlugin=disabled" in files["cgroup.conf"]) == disabled
