"""The program that asks a login node, run here with commands that answer as on a cluster with Slurm 22.05."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from clusterctl.errors import SlurmError
from clusterctl.providers.existing.probe import Choices, probe
from tests.support.here import LocalTransport
from tests.support.messages import refused
from tests.unit.existing.conftest import Commands


def test_named_folder_of_slurm_comes_first(commands: Commands, tmp_path: Path) -> None:
    commands("short")
    other = tmp_path / "opt/slurm"
    other.mkdir(parents=True)
    (other / "sbatch").symlink_to(tmp_path / "slurm+bin/sbatch")
    assert probe(LocalTransport(), Choices()).site.slurm_path == str(tmp_path / "slurm+bin")
    assert probe(LocalTransport(), Choices(slurm_path=str(other))).site.slurm_path == str(other)


def test_named_python_is_found_first(commands: Commands, tmp_path: Path) -> None:
    commands("short")
    python = tmp_path / "own python"
    python.symlink_to(sys.executable)
    pythons = probe(LocalTransport(), Choices(python=str(python))).site.pythons
    assert next(iter(pythons.items())) == (str(python), ".".join(map(str, sys.version_info[:3])))


def test_python_of_a_named_module_is_found_first(
    commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands("short")
    (tmp_path / "python/3.12").mkdir(parents=True)
    (tmp_path / "python/3.12/python3").symlink_to(sys.executable)
    # bash reads this file as a site's shells read the definition of the command `module`.
    (tmp_path / "modules").write_text(f'module() {{ PATH={tmp_path}/$3:$PATH; echo "loading $*"; }}\n')
    monkeypatch.setenv("BASH_ENV", str(tmp_path / "modules"))
    found = probe(LocalTransport(), Choices(modules=("gcc/12", "python/3.12"))).site.pythons
    assert next(iter(found)) == f"{tmp_path}/python/3.12/python3"


def test_other_partitions_are_tried_if_the_default_refuses(commands: Commands) -> None:
    commands("short", "gpuq", accepted="*--partition=gpuq*")
    assert probe(LocalTransport(), Choices()).partition == "gpuq"
    with refused("no-partition-accepts", SlurmError, "--account"):
        probe(LocalTransport(), Choices(partition="short"))


def test_sbatch_is_called_a_limited_number_of_times(commands: Commands) -> None:
    calls = commands(*(f"p{number}" for number in range(30)), default=False, accepted="nothing", accounts=12)
    with refused("no-partition-accepts", SlurmError, "--partition"):
        probe(LocalTransport(), Choices())
    assert len(calls.read_text().splitlines()) == 40
