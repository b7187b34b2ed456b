"""Upgrades of Slurm: what is asked for, and what is refused before anything is changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.cluster import slurm_upgrade_plan
from clusterctl.cluster.slurm_upgrade_plan import objections, planned_upgrade
from clusterctl.errors import UsageError
from clusterctl.packages.repository import installed_of
from clusterctl.scheduler.script import with_launcher
from clusterctl.scheduler.slurm import SlurmClient
from clusterctl.scheduler.slurm_conf import render_files
from clusterctl.spec.distributions import Distribution, distribution_of, releases
from clusterctl.spec.job import JobSpec, Launcher
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.onprem import OnpremSettings
from clusterctl.spec.slurm_releases import known_releases, taken_over
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.process import Result
from tests.support.cluster_session import session_of

TRIXIE = distribution_of("debian-13")


def spec(**slurm: Any) -> ClusterSpec:
    values = {"version": 1, "name": "d", "partitions": [{"name": "train", "nodes": 1}], "slurm": slurm}
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


@pytest.mark.parametrize(
    ("runs", "asked", "change"),
    [
        ("", None, None),
        ("", "24.11", None),
        ("", "26.05", ("24.11", "26.05")),
        ("26.05", "26.05", ("26.05", "26.05")),  # for hosts that join
        ("26.05", None, ("26.05", "26.05")),  # what runs stays
        ("26.05", "24.11", ("26.05", "24.11")),
    ],
)
def test_what_is_to_be_changed(runs: str, asked: str | None, change: tuple[str, str] | None) -> None:
    found = planned_upgrade(spec(version=asked), inventory(slurm=runs), TRIXIE)
    assert (found and (found.old, found.new)) == change
    assert bool(found and found.steps) == (change is not None and change[0] != change[1])
    assert bool(found and found.is_back) == (change == ("26.05", "24.11"))


@pytest.mark.parametrize(
    ("release", "asked", "why"),
    [
        (
            "debian-12",
            "24.11",
            "packages are of 22.05; 24.11 takes over jobs and accounting of 23.02, 23.11, 24.05",
        ),
        ("debian-12", "26.05", "26.05 takes over jobs and accounting of 24.11, 25.05, 25.11 alone"),
        ("ubuntu-24.04", "24.11", "its packages are of 23.11"),
        ("rocky-9", "26.05", "its packages are of another release"),
    ],
)
def test_a_release_that_can_not_be_had_is_refused(release: str, asked: str, why: str) -> None:
    for before in (None, inventory()):
        with pytest.raises(UsageError) as refused:
            planned_upgrade(spec(version=asked), before, distribution_of(release))
        assert refused.value.where == "slurm.version"
        assert why in refused.value.why
        assert "accounts come from the spec" in refused.value.fix


@pytest.mark.parametrize("distribution", releases(), ids=lambda one: one.release)
def test_the_releases_a_distribution_can_have_are_within_slurms_window(distribution: Distribution) -> None:
    for newer in distribution.newer_slurm:
        assert distribution.slurm in taken_over(newer)
    assert distribution.slurm is None or distribution.slurm in known_releases()


def test_keys_that_the_new_release_removed_are_refused() -> None:
    asked = spec(version="24.11", extra=["GetEnvTimeout=5", "MaxArraySize=5001"])
    asked = asked.model_copy(update={"slurm": asked.slurm.model_copy(update={"version": "26.05"})})
    with pytest.raises(UsageError, match="does not know GetEnvTimeout") as refused:
        planned_upgrade(asked, inventory(), TRIXIE)
    assert refused.value.where == "slurm.extra"
    assert planned_upgrade(spec(version="26.05", extra=["MaxArraySize=5001"]), inventory(), TRIXIE)


def objected(
    folder: Path, monkeypatch: pytest.MonkeyPatch, plugins: set[str], conf: str
) -> tuple[list[UsageError], list[str]]:
    """What speaks against 24.11 -> 26.05 with these plugins in its packages and this slurm.conf; notes."""
    monkeypatch.setattr(slurm_upgrade_plan, "hosts_to_exchange", lambda *_: [inventory().controller])
    monkeypatch.setattr(slurm_upgrade_plan, "fetch_packages", lambda *_: frozenset(plugins))
    (folder / "slurm.conf").write_text(conf)
    session = session_of(spec(version="26.05"), Workspace(folder / "d"))
    upgrade = planned_upgrade(session.spec, inventory(), TRIXIE)
    assert upgrade is not None
    return [*objections(session, upgrade, inventory(), folder)], session.notes


def test_all_that_speaks_against_an_upgrade_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    conf = "SelectType=select/cons_tres\nTaskPlugin=task/cgroup,task/affinity\nMpiDefault=pmix\n"
    plugins = {"select_cons_tres", "task_cgroup", "task_affinity", "mpi_pmix"}
    assert objected(tmp_path, monkeypatch, plugins, conf) == ([], [])
    found, _ = objected(tmp_path, monkeypatch, plugins - {"task_cgroup"}, f"{conf}GetEnvTimeout=5\n")
    assert [one.what for one in found] == [
        "Slurm 26.05 does not know GetEnvTimeout",
        "Slurm 26.05 lacks plugins that slurm.conf names: task_cgroup",
    ]
    assert all(one.where and one.why and one.fix for one in found)


def test_the_packages_of_slurm_are_found_in_dpkgs_status() -> None:
    status = """\
Package: slurmd
Status: install ok installed
Source: slurm-wlm
Version: 24.11.5-4

Package: slurmctld
Status: deinstall ok config-files
Source: slurm-wlm (24.11.5-3)

Package: slurm-client
Status: install ok installed
Source: slurm-wlm (24.11.5-3)

Package: slurm
Status: install ok installed
"""
    assert [*installed_of(status, "slurm-wlm")] == ["slurmd", "slurm-client"]


@pytest.mark.parametrize(("has_pmix", "default"), [(True, "MpiDefault=pmix"), (False, "MpiDefault=none")])
def test_without_the_plugin_for_pmix_mpirun_starts_ranks(has_pmix: bool, default: str) -> None:
    files = render_files(spec(), inventory(pmix=has_pmix), {})
    assert default in files["slurm.conf"].splitlines()

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


def test_the_proof_of_the_cluster_does_too(tmp_path: Path) -> None:
    said = Recorder()
    SlurmClient(said, has_pmix=False).run_verification_job(("d-1", "d-2"), str(tmp_path))  # type: ignore[arg-type]
    assert "srun" not in said.argv
    assert said.argv.index("salloc") < said.argv.index("mpirun") < said.argv.index("payload.probe")


@pytest.mark.parametrize(
    ("release", "upgraded", "disabled"),
    [("debian-12", "", False), ("debian-13", "", True), ("debian-13", "26.05", True)],
)
def test_slurmd_looks_for_no_control_groups_where_nothing_uses_them(
    release: str, upgraded: str, disabled: bool
) -> None:
    given = inventory(slurm=upgraded)
    controller = given.controller.model_copy(update={"distribution": release})
    files = render_files(spec(), given.model_copy(update={"hosts": (controller, *given.compute)}), {})
    assert ("CgroupPlugin=disabled" in files["cgroup.conf"]) == disabled


def test_machines_of_ones_own_are_not_upgraded() -> None:
    """Nobody has tried it: their packages would come from Debian testing."""
    theirs = spec(version="26.05").model_copy(update={"provider": OnpremSettings.model_construct()})
    with pytest.raises(UsageError, match="on local nodes alone"):
        planned_upgrade(theirs, None, TRIXIE)
