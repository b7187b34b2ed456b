"""The EL-shaped machine (tests/support/el) is to Ansible and dnf what Rocky Linux is."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.lab import Lab, lab

pytestmark = pytest.mark.sweep  # what the labs of other modules are made of
ANSIBLE = Path(sys.executable).with_name("ansible")
# A package of the repository, once more without its signature.
UNSIGNED = """\
dnf -q -y install createrepo_c
mkdir /srv/unsigned
cd /srv/unsigned
curl -sSfO http://dl.rockylinux.org/pub/rocky/9/AppStream/x86_64/os/Packages/make-4.3-8.el9.x86_64.rpm
rpmsign --delsign *.rpm
createrepo_c -q .
cd /etc/yum.repos.d
printf "[unsigned]\\nname=Unsigned\\nbaseurl=file:///srv/unsigned\\ngpgcheck=1\\n" >unsigned.repo
"""


@pytest.fixture(scope="module")
def rocky(no_residue: None) -> Iterator[Lab]:
    with lab("el", 1) as one:
        yield one


def facts(one: Lab) -> dict[str, Any]:
    """What Ansible learns of the machine."""
    argv = [ANSIBLE, "node1", "-i", "node1,", "-m", "setup", "-t", one.folder, "-u", one.user]
    argv += ["--ssh-common-args", f"-F {one.ssh_config}", "-e", "ansible_python_interpreter=/usr/bin/python3"]
    subprocess.run(argv, check=True, capture_output=True, timeout=60, cwd=one.folder)
    found: dict[str, Any] = json.loads((one.folder / "node1").read_text())["ansible_facts"]
    return found


def test_ansible_takes_it_for_rocky_linux(rocky: Lab) -> None:
    found = facts(rocky)
    told = {name: found[f"ansible_{name}"] for name in ("distribution", "distribution_version", "os_family")}
    assert told == {"distribution": "Rocky", "distribution_version": "9.6", "os_family": "RedHat"}
    assert (found["ansible_pkg_mgr"], found["ansible_service_mgr"]) == ("dnf", "systemd")


def test_nothing_of_a_cluster_nor_of_debian_is_there(rocky: Lab) -> None:
    names = "apt apt-get dpkg slurmd slurmctld munged mpirun mariadbd python3.11 firewalld chronyd ps"
    assert rocky.ssh("node1", f"command -v {names}", rc=None).stdout == ""
    assert rocky.ssh("node1", "systemctl is-system-running").stdout.strip() == "running"


def test_a_signed_package_is_installed_with_what_it_needs(rocky: Lab) -> None:
    rocky.ssh("node1", "sudo dnf -q -y install epel-release && sudo dnf -q -y install slurm-slurmd openmpi")
    assert rocky.ssh("node1", "rpm -q --qf '%{name} ' slurm munge pmix").stdout == "slurm munge pmix "
    module = "bash -lc 'module load mpi/openmpi-x86_64 && mpirun --version'"
    assert "Open MPI" in rocky.ssh("node1", module).stdout
    assert rocky.ssh("node1", "slurmd -V").stdout.startswith("slurm")


def test_an_unsigned_package_is_refused(rocky: Lab) -> None:
    rocky.host("node1").inside.sh(UNSIGNED)
    ran = rocky.ssh("node1", "sudo dnf -y --disablerepo=* --enablerepo=unsigned install make", rc=None)
    assert ran.rc != 0
    assert "is not signed" in ran.stdout + ran.stderr, ran
    assert rocky.ssh("node1", "rpm -q make", rc=None).rc != 0
