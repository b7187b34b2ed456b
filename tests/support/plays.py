"""One file of a role's tasks, run on this machine as if it were a host of a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import yaml

from clusterctl.assets import asset

_BIN = Path(sys.executable).parent


def run_tasks(
    tmp_path: Path, role: str, tasks: str, *, leads: bool = False, **variables: object
) -> subprocess.CompletedProcess[str]:
    """Play `tasks` of a role; `leads`: the host is the controller, too. Programs in tmp_path/bin go first."""
    task = {"ansible.builtin.include_role": {"name": role, "tasks_from": tasks, "rolespec_validate": False}}
    playbook = tmp_path / "play.yml"
    playbook.write_text(yaml.safe_dump([{"hosts": "compute", "gather_facts": False, "tasks": [task]}]))
    hosts = {
        "controller": {"hosts": {"node" if leads else "ctl": {}}},
        "compute": {"hosts": {"node": {}}},
        "login": {"hosts": {}},
    }
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(yaml.safe_dump({"all": {"vars": {**local, **variables}, "children": hosts}}))
    env = {
        **os.environ,
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "ANSIBLE_HOME": str(tmp_path / "home"),
        "ANSIBLE_ROLES_PATH": str(asset("ansible") / "roles"),
        "ANSIBLE_LIBRARY": str(asset("ansible") / "library"),
        "LC_ALL": "C.UTF-8",
    }
    argv: list[str | Path] = [_BIN / "ansible-playbook", "-i", inventory, playbook]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, cwd=tmp_path)


def program(tmp_path: Path, name: str, script: str) -> None:
    """Put a shell script where `run_tasks` finds it first."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)
