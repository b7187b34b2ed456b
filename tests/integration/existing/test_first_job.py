"""The proof in the first job of a user, if the job of `attach` had to wait too long."""

from __future__ import annotations

import os
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.packages.node_platform import NodePlatform
from clusterctl.providers.attached import SiteFact
from clusterctl.providers.existing.facts import facts_of_first_job
from clusterctl.providers.existing.place import Placed
from clusterctl.providers.existing.prove import ProofOptions, leave_proof, read_first_proof
from clusterctl.providers.existing.site_description import SiteDescription, load_site
from clusterctl.spec.load import parse_spec
from clusterctl.spec.names import Launcher
from clusterctl.spec.providers.existing import settings_of
from clusterctl.state.inventory import applied_spec
from clusterctl.state.inventory import inventory_of as recorded_inventory
from clusterctl.state.workspace import Workspace
from tests.support.inventories import inventory_of
from tests.support.local_transport import LocalTransport

SITE = SiteDescription(
    "24.11.5", "campus", "ada", "/bin/bash", "/home/ada", "/opt/slurm/bin", glibc="2.41"
)
SPEC = (
    "{version: 1, name: campus, provider: {type: existing, login: f1}, partitions: [{name: "
    "a, nodes: 2}]}"
)
FOLDER = SiteFact("folder", "/home/ada/clusterctl", "written there")
CAPTURES = Path(__file__).parents[2] / "unit/existing/captures"


def job(
    folder: Path, number: int, nodes: int, *, shell: str = "bash", path: str = "/usr/bin:/bin"
) -> str:
    """Run a job that sources the folder's script, prints "program" and calls `module`. Return its
    output.
    """
    script = f'module() {{ echo "$@"; }}; . {folder}/job-profile.sh; echo program; module'
    env = {"PATH": path, "SLURM_JOB_ID": str(number), "SLURM_JOB_NUM_NODES": str(nodes)}
    return subprocess.run(
        [shell, "-c", script], env=env, capture_output=True, text=True, check=True
    ).stdout


@pytest.fixture
def queued(tmp_path: Path) -> Path:
    """The folder of a proof that waits for the first job on two nodes."""
    (tmp_path / "job-profile.sh").write_text("# of attach\n")
    node = NodePlatform("3.13", 41)
    placed = Placed(str(tmp_path), "a12345", "/usr/bin/python3", "3.13.5", node, 1.0, built=True)
    leave_proof(LocalTransport(), SITE, placed, ProofOptions("a"), 2)
    return tmp_path / "proof.queued"


def test_first_large_job_runs_the_proof_once(tmp_path: Path, queued: Path) -> None:
    active = tmp_path / "proof.active"
    assert (queued / "proof.sh").read_bytes().startswith(b"#!/bin/bash")
    assert b"payload.commands.probe" in (queued / "probe.json").read_bytes()
    lines = "works\\tmpi/5\\tpmix\\n%s\\nend\\n"
    (queued / "proof.sh").write_text(
        f'cd "$SLURM_SUBMIT_DIR"; printf "{lines}" $SLURM_NTASKS >>facts; exit 3'
    )
    assert job(tmp_path, 11, 1) == "program\n\n"
    assert queued.exists()
    assert read_first_proof(LocalTransport(), str(tmp_path)) is None
    assert [job(tmp_path, number, 3) for number in (12, 13)] == ["load mpi/5\nprogram\n\n"] * 2
    assert (active / "facts").read_text() == "works\tmpi/5\tpmix\n3\nend\n"
    first = read_first_proof(LocalTransport(), str(tmp_path))
    assert first is not None
    assert first[0] == "12"


@pytest.mark.parametrize("shell", ["bash", "sh"])
def test_module_command_works_after_the_first_job(tmp_path: Path, queued: Path, shell: str) -> None:
    assert job(tmp_path, 11, 1, shell=shell) == "program\n\n"


def test_proof_that_hangs_is_ended(tmp_path: Path, queued: Path) -> None:
    """The program `timeout` in front of the real one makes the limit shorter."""
    (tmp_path / "timeout").write_text('#!/bin/sh\nshift 3\nexec /usr/bin/timeout 0.1 "$@"\n')
    (tmp_path / "timeout").chmod(0o755)
    (queued / "proof.sh").write_text(f"sleep 20; touch {tmp_path}/late")
    assert job(tmp_path, 12, 2, path=f"{tmp_path}:/usr/bin:/bin") == "program\n\n"
    assert not (tmp_path / "late").exists()


def test_proof_that_was_killed_is_a_problem(workspace: Workspace) -> None:
    active = Path(recorded_inventory(workspace).folder) / "proof.active"
    (active / "job").write_text("12\n")
    (running,) = facts(workspace, None)
    assert (running.fact, running.is_problem, running.is_known) == ("MPI", False, False)
    os.utime(active / "job", (0, 0))
    (killed,) = facts(workspace, None)
    assert (killed.learned, killed.is_problem) == ("job 12", True)


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    """The workspace of a cluster whose proof is pending. Its folder there is in ``tmp_path``."""
    workspace = Workspace(tmp_path / "campus")
    workspace.create()
    workspace.spec.write_text(SPEC)
    (tmp_path / "there/proof.active").mkdir(parents=True)
    inventory = inventory_of(
        folder=str(tmp_path / "there"), pmix=True, glibc_minor=42, is_foreign=True
    )
    workspace.inventory.write_text(inventory.text)
    replace(SITE, facts=(FOLDER,)).save(workspace)
    return workspace


def facts(workspace: Workspace, capture: str | None) -> list[SiteFact]:
    """Return the facts of `doctor` after job 12 has run the proof, unless ``capture`` is None."""
    inventory = recorded_inventory(workspace)
    active = Path(inventory.folder) / "proof.active"
    if capture is not None:
        (active / "job").write_text("12\n")
        (active / "facts").write_text((CAPTURES / capture).read_text() + "end\n")
    spec = parse_spec(SPEC, "spec")
    return [*facts_of_first_job(LocalTransport(), SITE, spec, inventory, workspace)]


def test_proof_of_the_first_job_is_recorded(workspace: Workspace) -> None:
    found = facts(workspace, "proof-24.11-mpirun.txt")
    assert {fact.learned.split()[1] for fact in found} == {"12"}
    assert load_site(workspace).facts == (FOLDER, *found)
    settings = settings_of(applied_spec(workspace))
    assert (settings.launcher, settings.modules) == (Launcher.MPIRUN, ("openmpi/5.0",))
    inventory = recorded_inventory(workspace)
    assert (inventory.pmix, inventory.glibc_minor) == (False, 41)
    assert "module load openmpi/5.0" in (Path(inventory.folder) / "job-profile.sh").read_text()


def test_first_job_without_mpi_is_a_problem(workspace: Workspace) -> None:
    (fact,) = facts(workspace, "proof-24.11-no-mpi.txt")
    assert (fact.fact, fact.learned, fact.is_problem) == ("MPI", "job 12", True)
    assert load_site(workspace).facts == (FOLDER,)


def test_mpi_fact_before_the_first_job_is_no_problem(workspace: Workspace) -> None:
    (fact,) = facts(workspace, None)
    assert (fact.fact, fact.is_problem) == ("MPI", False)
