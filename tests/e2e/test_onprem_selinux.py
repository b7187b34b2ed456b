"""The role selinux on machines with Debian's reference policy.

The kernel here has no SELinux: a policy is written, read and built as on any host, and never in
    force.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml

from clusterctl.scheduler.slurm.conf import TASK_PROLOG
from clusterctl.spec.names import ROOT
from clusterctl.state.inventory import HEALTH_PROGRAM
from clusterctl.util.assets import data_folder
from tests.support.lab import Lab, lab

pytestmark = pytest.mark.platform("stand-in", "selinux")

ANSIBLE = data_folder("ansible")
HOMES = "/shared/home"
TOOLS = "policycoreutils-python-utils python3-selinux python3-semanage"
APT = (
    "export DEBIAN_FRONTEND=noninteractive; apt-get -q update; apt-get -q -y "
    "--no-install-recommends install"
)
# Where the policy keeps what somebody has set.
OWN = (
    "/etc/selinux/default/contexts/files/file_contexts.{local,subs} "
    "/var/lib/selinux/default/active/*.local"
)
# One machine has the policy alone. On the other somebody has labelled, also where the role does.
THEIRS = f"""\
semanage fcontext --add --type etc_t '/srv/theirs(/.*)?'
semanage fcontext --add --equal /home {HOMES}
semanage boolean --modify --on use_nfs_home_dirs
"""
LABELS = {
    TASK_PROLOG: "bin_t",
    f"{ROOT}/watcher": "bin_t",
    f"{ROOT}/fence": "bin_t",
    HEALTH_PROGRAM: "bin_t",
    f"{ROOT}/env/bin/python": "bin_t",
    f"{ROOT}/env/pyvenv.cfg": "usr_t",
    f"{HOMES}/hpc/.ssh": "ssh_home_t",
}


def furnish(machines: Lab, name: str, packages: str, script: str) -> None:
    """Install these packages of Debian, and the settings of the machine's owner."""
    machines.host(name).inside.sh(
        f"{APT} selinux-policy-default selinux-utils {packages}\n{script}", timeout_s=600
    )


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    with lab("debian", 2, internet=True) as one, ThreadPoolExecutor() as pool:
        bare = pool.submit(furnish, one, "node1", "", "")
        furnishing = pool.submit(furnish, one, "node2", TOOLS, THEIRS)
        bare.result()
        furnishing.result()
        yield one


def play(machines: Lab) -> dict[str, str]:
    """Run the role on both machines. Return how many tasks changed each."""
    playbook = machines.folder / "play.yml"
    inventory = machines.folder / "inventory.yml"
    parts = ("install", "configure")
    tasks = [
        {"ansible.builtin.include_role": {"name": "selinux", "tasks_from": part}} for part in parts
    ]
    head = {"hosts": "all", "gather_facts": True, "become": True}
    playbook.write_text(yaml.safe_dump([{**head, "tasks": tasks}]))
    variables = {
        "ansible_ssh_common_args": f"-F {machines.ssh_config}",
        "ansible_user": machines.user,
        "selinux_kernel": "/proc/filesystems",  # which is there, as the file of SELinux's kernel would be
        "selinux_homes": HOMES,
        "selinux_homes_are": "exported",
    }
    hosts = {"controller": {"hosts": {host.name: {} for host in machines.hosts}}}
    inventory.write_text(yaml.safe_dump({"all": {"vars": variables, "children": hosts}}))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
        "ANSIBLE_HOME": str(machines.folder / "ansible"),
        "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
    }
    argv = [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, playbook]
    done = subprocess.run(
        argv, env=environment, capture_output=True, text=True, timeout=500, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    recap = done.stdout.rsplit("PLAY RECAP", 1)[1].splitlines()
    rows = [line.replace(":", " ").split() for line in recap if "changed=" in line]
    return {row[0]: next(word for word in row if word.startswith("changed=")) for row in rows}


def local_labels(machines: Lab, name: str) -> list[str]:
    """Return the local file contexts of a machine."""
    output = machines.enter(name, ["bash", "-c", f"cat {OWN}"]).stdout
    return sorted(line for line in output.splitlines() if line and not line.startswith("#"))


def labels(machines: Lab, name: str) -> dict[str, str]:
    """Return the types of the paths of LABELS in the policy."""
    output = machines.host(name).inside.sh(f"matchpathcon {' '.join(LABELS)}")
    return {
        path: context.split(":")[2]
        for path, context in (line.split() for line in output.splitlines())
    }


def test_selinux_labels_are_set_once_and_existing_ones_kept(machines: Lab) -> None:
    before = {host.name: local_labels(machines, host.name) for host in machines.hosts}
    assert before["node1"] == []
    play(machines)
    for name in before:
        assert labels(machines, name) == LABELS
        output = machines.host(name).inside.sh("semanage boolean --list --locallist --noheading")
        assert output.split()[:4] == ["use_nfs_home_dirs", "(on", ",", "on)"]
    assert set(before["node2"]) < set(local_labels(machines, "node2"))
    assert play(machines) == dict.fromkeys(before, "changed=0")
