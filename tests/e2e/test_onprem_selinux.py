"""The role selinux on machines with Debian's reference policy, and what the ledger gives back of it.

The kernel here has no SELinux: a policy is written, read and built as on any host, and never in force.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from clusterctl.jobs.environment import BASE_ENVIRONMENT
from clusterctl.scheduler.slurm_conf import CONTROLLER_PROLOG, TASK_PROLOG
from clusterctl.state.inventory import HEALTH_PROGRAM
from clusterctl.util.assets import asset
from tests.support.lab import Lab, lab

# minutes: each change of a policy builds it anew
pytestmark = [pytest.mark.sweep, pytest.mark.platform("stand-in", "selinux")]

ANSIBLE = asset("ansible")
HOMES = "/shared/home"
TOOLS = "policycoreutils-python-utils python3-selinux python3-semanage"
APT = (
    "export DEBIAN_FRONTEND=noninteractive; apt-get -q update; apt-get -q -y --no-install-recommends install"
)
# What a kernel with this policy would say of a boolean after its next start.
GETSEBOOL = """\
#!/bin/sh
[ "$*" = use_nfs_home_dirs ] || exit 1
grep -q '^use_nfs_home_dirs=1' /var/lib/selinux/default/active/booleans.local 2>/dev/null && value=on
echo "use_nfs_home_dirs --> ${value:-off}"
"""
# Where the policy keeps what somebody has set.
OWN = "/etc/selinux/default/contexts/files/file_contexts.{local,subs} /var/lib/selinux/default/active/*.local"
# One machine has the policy alone. On the other somebody has labelled, also where the role does.
THEIRS = f"""\
semanage fcontext --add --type etc_t '/srv/theirs(/.*)?'
semanage fcontext --add --equal /home {HOMES}
semanage boolean --modify --on use_nfs_home_dirs
"""
UP = [
    {"host_ledger": {"state": "recorded", "cluster": "abc", "touches": {"selinux": "{{ selinux_touches }}"}}},
    {"ansible.builtin.include_role": {"name": "selinux"}},
    {"host_ledger": {"state": "sealed", "cluster": "abc", "touches": {"selinux": "{{ selinux_touches }}"}}},
]
DOWN = [{"host_ledger": {"state": "restored", "cluster": "abc"}}]
LABELS = {
    TASK_PROLOG: "bin_t",
    CONTROLLER_PROLOG: "bin_t",
    HEALTH_PROGRAM: "bin_t",
    f"{BASE_ENVIRONMENT}/bin/python": "bin_t",
    f"{BASE_ENVIRONMENT}/pyvenv.cfg": "usr_t",
    f"{HOMES}/hpc/.ssh": "ssh_home_t",
}


def furnish(machines: Lab, name: str, packages: str, script: str) -> None:
    """A machine with these packages of Debian's, and what its owner has set."""
    host = machines.host(name).inside
    host.sh(f"cat >/usr/local/bin/getsebool <<'END'\n{GETSEBOOL}END\nchmod 755 /usr/local/bin/getsebool")
    host.sh(f"{APT} selinux-policy-default selinux-utils {packages}\n{script}", timeout_s=600)


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    with lab("debian", 2, internet=True) as one, ThreadPoolExecutor() as pool:
        bare = pool.submit(furnish, one, "node1", "", "")
        theirs = pool.submit(furnish, one, "node2", TOOLS, THEIRS)
        bare.result()
        theirs.result()
        yield one


def play(machines: Lab, tasks: list[dict[str, Any]]) -> dict[str, str]:
    """Play them on both machines; how many tasks changed each."""
    playbook, inventory = machines.folder / "play.yml", machines.folder / "inventory.yml"
    touches = str(ANSIBLE / "roles/selinux/meta/touches.yml")
    head = {"hosts": "all", "gather_facts": True, "become": True, "vars_files": [touches]}
    playbook.write_text(yaml.safe_dump([{**head, "tasks": tasks}]))
    variables = {
        "ansible_ssh_common_args": f"-F {machines.ssh_config}",
        "ansible_user": machines.user,
        "selinux_kernel": "/proc/filesystems",  # which is there, as the file of SELinux's kernel would be
        "selinux_ignore_state": True,
        "selinux_homes": HOMES,
        "selinux_homes_are": "exported",
        "shared_storage_path": str(Path(HOMES).parent),
    }
    hosts = {"controller": {"hosts": {host.name: {} for host in machines.hosts}}}
    inventory.write_text(yaml.safe_dump({"all": {"vars": variables, "children": hosts}}))
    environment = {
        **os.environ,
        "ANSIBLE_CONFIG": str(ANSIBLE / "ansible.cfg"),
        "ANSIBLE_HOME": str(machines.folder / "ansible"),
        "ANSIBLE_ROLES_PATH": str(ANSIBLE / "roles"),
        "ANSIBLE_LIBRARY": str(ANSIBLE / "library"),
        "ANSIBLE_MODULE_UTILS": str(ANSIBLE / "module_utils"),
    }
    argv = [Path(sys.executable).with_name("ansible-playbook"), "-i", inventory, playbook]
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=500, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    recap = done.stdout.rsplit("PLAY RECAP", 1)[1].splitlines()
    rows = [line.replace(":", " ").split() for line in recap if "changed=" in line]
    return {row[0]: next(word for word in row if word.startswith("changed=")) for row in rows}


def own(machines: Lab, name: str) -> list[str]:
    """What somebody has set on a machine."""
    said = machines.enter(name, ["bash", "-c", f"cat {OWN}"]).stdout
    return sorted(line for line in said.splitlines() if line and not line.startswith("#"))


def packages(machines: Lab, name: str) -> str:
    return machines.host(name).inside.sh("dpkg-query -W | sort")


def labels(machines: Lab, name: str) -> dict[str, str]:
    """The types that the policy has for the paths of LABELS."""
    said = machines.host(name).inside.sh(f"matchpathcon {' '.join(LABELS)}")
    return {path: context.split(":")[2] for path, context in (line.split() for line in said.splitlines())}


def test_what_slurm_starts_is_labelled_once_and_all_of_it_is_given_back(machines: Lab) -> None:
    before = {host.name: (own(machines, host.name), packages(machines, host.name)) for host in machines.hosts}
    assert before["node1"][0] == []
    play(machines, UP)
    for name in before:
        assert labels(machines, name) == LABELS
        said = machines.host(name).inside.sh("semanage boolean --list --locallist --noheading")
        assert said.split()[:4] == ["use_nfs_home_dirs", "(on", ",", "on)"]
    assert set(before["node2"][0]) < set(own(machines, "node2"))
    again = play(machines, UP)
    assert again == dict.fromkeys(before, "changed=0")
    play(machines, DOWN)
    after = {name: (own(machines, name), packages(machines, name)) for name in before}
    # A boolean can be said to be off, but not be unsaid.
    assert after["node1"] == (["use_nfs_home_dirs=0"], before["node1"][1])
    assert after["node2"] == before["node2"]
