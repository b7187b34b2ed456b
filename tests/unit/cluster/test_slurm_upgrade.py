"""Upgrades of Slurm: what is asked for, and what is refused before anything is changed."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.cluster import slurm_upgrade_plan
from clusterctl.cluster.slurm_upgrade_plan import objections, planned_upgrade
from clusterctl.errors import UsageError
from clusterctl.packages.repository import installed_of
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.script import reject_pmix, render_script, with_launcher
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


SCRIPTS = {
    "7": "#!/bin/bash\nsrun --mpi=pmix ./solver\n",
    "8": "",
    "12": "",
    "9": "#!/bin/bash\n# not srun --mpi=pmix\nmpirun ./solver\nexec srun --overlap telemetry\n",
    "10": "#!/bin/bash\nsrun -n 2 ./solver\n",
    "11": "#!/bin/bash\nsrun --mpi=pmix ./ended\n",
}


class Here:
    """This machine in place of the controller, whose Slurm has the scripts of these jobs."""

    def run(self, argv: Sequence[str], **_: object) -> Result:
        scripts = "".join(f"{number}) printf %s {shlex.quote(text)} ;;\n" for number, text in SCRIPTS.items())
        scontrol = f'scontrol() {{ [ "$1 $2 $4" = "write batch_script -" ] && case $3 in {scripts} esac; }}\n'
        assert argv[:4] == ["sudo", "-n", "sh", "-c"]
        done = subprocess.run(
            ["sh", "-c", scontrol + argv[4], *argv[5:]], check=False, capture_output=True, text=True
        )
        return Result(done.returncode, done.stdout, done.stderr)


def jobs_of(folder: Path) -> tuple[JobInfo, ...]:
    """Those of SCRIPTS; two were sent by `submit`, which has them run a script of the user's."""
    known = {"7": JobState.RUNNING, "8": JobState.PENDING, "9": JobState.RUNNING, "10": JobState.PENDING}
    known["12"] = JobState.RUNNING
    for number, name in (("8", "plain.sh"), ("12", "with a space.sh")):
        own = folder / number / name
        own.parent.mkdir()
        own.write_text("#!/bin/bash\nexport SLURM_MPI_TYPE=pmix\nsrun ./solver\n")
        job = JobSpec(name="own", script=own)
        SCRIPTS[number] = render_script(job, payload_hash="0123456789abcdef", interval_s=1)
    return tuple(
        JobInfo(
            number=int(number),
            name=f"job{number}",
            user="a",
            state=known.get(number, JobState.COMPLETED),
            reason="",
            work_dir=str(folder / number),
        )
        for number in SCRIPTS
    )


def test_jobs_that_start_ranks_by_pmix_are_named_whether_they_wait_or_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = jobs_of(tmp_path)
    (refused,), notes = objected(tmp_path, monkeypatch, set(), "MpiDefault=pmix\n", lambda: jobs)
    assert (
        refused.what == "jobs start ranks by PMIx: 7 (job7, running), 8 (job8, waiting), 12 (job12, running)"
    )
    assert "`clusterctl up --force`" in refused.fix
    assert "a plain srun starts fails in MPI_Init" in notes[0]
    assert notes[1].endswith("fail if that starts MPI programs: 10 (job10, waiting)")
    none, notes = objected(tmp_path, monkeypatch, set(), "MpiDefault=pmix\n", lambda: jobs, force=True)
    assert none == []
    assert "from now on fail: 7 (job7, running), 8 (job8, waiting)" in notes[2]
    assert objected(tmp_path, monkeypatch, {"mpi_pmix"}, "MpiDefault=pmix\n", lambda: jobs) == ([], [])


def objected(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    plugins: set[str],
    conf: str,
    jobs: Callable[[], tuple[JobInfo, ...]] = tuple,
    *,
    force: bool = False,
) -> tuple[list[UsageError], list[str]]:
    """What speaks against 24.11 -> 26.05 with these plugins in its packages and this slurm.conf; notes."""
    monkeypatch.setattr(slurm_upgrade_plan, "hosts_to_exchange", lambda *_: [inventory().controller])
    monkeypatch.setattr(slurm_upgrade_plan, "fetch_packages", lambda *_: frozenset(plugins))
    (folder / "slurm.conf").write_text(conf)
    monkeypatch.setattr(slurm_upgrade_plan, "scheduler_of", lambda *_, **__: SimpleNamespace(all_jobs=jobs))
    session = session_of(spec(version="26.05"), Workspace(folder / "d"))
    monkeypatch.setattr(session.connections, "to", lambda _: Here())
    upgrade = planned_upgrade(session.spec, inventory(), TRIXIE)
    assert upgrade is not None
    return [*objections(session, upgrade, inventory(), folder, force=force)], session.notes


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


def test_a_script_that_asks_for_pmix_is_rejected_where_there_is_none(tmp_path: Path) -> None:
    script = tmp_path / "job.sh"
    job = JobSpec(name="job", script=script)
    script.write_text("#!/bin/bash\nsrun --mpi=pmix ./solver\n")
    with pytest.raises(UsageError, match="starts ranks by PMIx") as refused:
        reject_pmix(job)
    assert "write `mpirun PROGRAM`" in refused.value.fix
    script.write_text("#!/bin/bash\nsrun ./solver\n")
    assert "start them by mpirun" in reject_pmix(job)
    script.write_text("#!/bin/bash\nmpirun ./solver\nsrun --mpi=none hostname\n")
    assert reject_pmix(job) == reject_pmix(JobSpec(name="a", bundled="train")) == ""


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
