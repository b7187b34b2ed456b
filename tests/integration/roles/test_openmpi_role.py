"""The role openmpi finds each host's Open MPI in the package database."""

from __future__ import annotations

import shlex
import subprocess
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.support.plays import program, run_tasks

MODULE = "mpi/openmpi-x86_64"


class Package(NamedTuple):
    """A package of Open MPI: its prefix, the folder of its parameters, and other files that it
    lists.
    """

    prefix: str
    etc: str
    more: tuple[str, ...] = ()


# The files of Fedora's openmpi.spec, which EL builds, and of NVIDIA's package below its prefix.
EL = Package("usr/lib64/openmpi", "etc/openmpi-x86_64", (f"usr/share/modulefiles/{MODULE}",))
NVIDIA = Package("usr/mpi/gcc/openmpi-4.1.7rc1", "usr/mpi/gcc/openmpi-4.1.7rc1/etc")


def configure(root: Path, package: Package, **variables: object) -> None:
    """Play the role on a host with the package, whose files are in ``root``."""
    (root / package.etc).mkdir(parents=True)
    (root / package.prefix / "bin").mkdir(parents=True)
    listed = (
        f"{package.prefix}/bin/ompi_info",
        f"{package.etc}/openmpi-mca-params.conf",
        *package.more,
    )
    program(root, "dpkg-query", "exit 127")
    program(root, "rpm", "\n".join(f"echo {shlex.quote(str(root / path))}" for path in listed))
    (root / "params").write_text("btl_tcp_if_include = 10.0.0.0/24\n")
    known = {
        "openmpi_params_src": str(root / "params"),
        "openmpi_params_file": str(root / EL.etc / "openmpi-mca-params.conf"),
        "openmpi_module": MODULE,
        "openmpi_link": str(root / "link"),
        "openmpi_job_profile": str(root / "profile.sh"),
        "openmpi_launch_agent": str(root / "orted"),
    }
    done = run_tasks(root, "openmpi", "configure", **known | variables)
    assert done.returncode == 0, done.stdout


@pytest.fixture(scope="module")
def nvidia(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The files of a host with NVIDIA's package, whose mpirun reaches other hosts by SSH."""
    root = tmp_path_factory.mktemp("nvidia")
    configure(root, NVIDIA, openmpi_ssh="ssh -F config")
    return root


def follows_the_package(root: Path, package: Package) -> bool:
    """Assert where the parameters and the link are. Return whether jobs load the package's
    module.
    """
    params = root / package.etc / "openmpi-mca-params.conf"
    assert "btl_tcp_if_include = 10.0.0.0/24" in params.read_text().splitlines()
    assert (root / "link").readlink() == root / package.prefix
    return f"module load {MODULE}" in (root / "profile.sh").read_text()


def test_parameters_and_profile_follow_the_package_of_el(tmp_path: Path) -> None:
    configure(tmp_path, EL)
    assert follows_the_package(tmp_path, EL)


def test_parameters_and_profile_follow_the_package_of_nvidia(nvidia: Path) -> None:
    assert not follows_the_package(nvidia, NVIDIA)


def test_profile_puts_the_linked_prefix_before_the_users_paths(nvidia: Path) -> None:
    lines = [
        line
        for line in (nvidia / "profile.sh").read_text().splitlines()
        if "modules.sh" not in line
    ]
    script = "\n".join([*lines, 'echo "$PATH"', 'echo "$LD_LIBRARY_PATH"'])
    environment = {"PATH": "/mine/bin", "LD_LIBRARY_PATH": "/mine/lib"}
    done = subprocess.run(
        ["/bin/bash", "-c", script], env=environment, capture_output=True, text=True, check=True
    )
    link = nvidia / "link"
    assert done.stdout.splitlines() == [
        f"{link}/bin:/mine/bin",
        f"{link}/lib64:{link}/lib:/mine/lib",
    ]


def test_parameters_of_prrte_are_beside_those_of_the_package(nvidia: Path) -> None:
    params = (nvidia / NVIDIA.etc / "prte-mca-params.conf").read_text()
    assert f"prte_launch_agent = {nvidia}/orted" in params.splitlines()


@pytest.mark.parametrize(
    ("installed", "started"), [(("orted",), "orted"), (("orted", "prted"), "prted")]
)
def test_launch_agent_starts_the_daemon_of_the_installed_open_mpi(
    nvidia: Path, installed: tuple[str, ...], started: str
) -> None:
    """Open MPI 5 calls its daemon prted; older programs may lie beside it."""
    folder = nvidia / NVIDIA.prefix / "bin"
    for program_of_another_test in folder.iterdir():
        program_of_another_test.unlink()
    for name in installed:
        (folder / name).write_text(f'#!/bin/sh\necho {name} "$@"\n')
        (folder / name).chmod(0o755)
    argv = [nvidia / "orted", "--tree", "a b"]
    done = subprocess.run(
        argv, env={"PATH": "/usr/bin:/bin"}, capture_output=True, text=True, check=True
    )
    assert done.stdout == f"{started} --tree a b\n"
