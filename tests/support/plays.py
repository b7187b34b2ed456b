"""Ansible roles and modules alone: tasks run on this machine, role data and modules are loaded."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import yaml

from clusterctl.util.assets import data_folder
from tests.support.forks import ansible

# Mitogen runs a task in a third of the CPU time, but needs that of so many tasks to start.
_FEW = 3


def run_tasks(
    tmp_path: Path,
    role: str,
    tasks: str,
    *,
    leads: bool = False,
    check: bool = False,
    facts: dict[str, Any] | None = None,
    **variables: object,
) -> subprocess.CompletedProcess[str]:
    """Play `tasks` of a role; `leads`: the host is the controller, too; `check`: in check mode.
    Programs in tmp_path/bin go first.
    """
    task = {
        "ansible.builtin.include_role": {
            "name": role,
            "tasks_from": tasks,
            "rolespec_validate": False,
        }
    }
    known = [{"ansible.builtin.set_fact": {"ansible_facts": facts}}] if facts else []
    file = data_folder("ansible") / "roles" / role / "tasks" / f"{tasks}.yml"
    has_many = len(yaml.safe_load(file.read_text())) > _FEW
    play = {
        "hosts": "compute",
        "gather_facts": False,
        "strategy": "clusterctl_linear" if has_many else "linear",
        "tasks": [*known, task],
    }
    hosts = ("node" if leads else "ctl", "node")
    return run_play(tmp_path, play, hosts, check=check, known=variables)


def changes(
    tmp_path: Path,
    role: str,
    tasks: str,
    *,
    leads: bool = False,
    check: bool = False,
    **variables: Any,
) -> int:
    """Play `tasks` of a role as `run_tasks` does. Return how many of them changed something, or
    would.
    """
    done = run_tasks(tmp_path, role, tasks, leads=leads, check=check, **variables)
    assert done.returncode == 0, done.stdout + done.stderr
    return sum(map(int, re.findall(r" changed=(\d+) ", done.stdout)))


def run_play(
    tmp_path: Path,
    play: dict[str, Any],
    hosts: Sequence[str],
    *,
    known: dict[str, Any],
    check: bool = False,
    **extra: object,
) -> subprocess.CompletedProcess[str]:
    """Play it; every host is this machine, the first of them the controller.

    ``known`` are the inventory's variables; ``extra`` ones go before those of roles.
    """
    playbook = tmp_path / "play.yml"
    playbook.write_text(yaml.safe_dump([play]))
    controller, *compute = hosts
    groups = {
        "controller": {"hosts": {controller: {}}},
        "compute": {"hosts": {name: {} for name in compute}},
        "login": {"hosts": {}},
    }
    local = {"ansible_connection": "local", "ansible_python_interpreter": sys.executable}
    inventory = tmp_path / "inventory.yml"
    inventory.write_text(yaml.safe_dump({"all": {"vars": {**local, **known}, "children": groups}}))
    mode = ["--check"] if check else []
    argv: list[str | Path] = [*mode, "-i", inventory, "-e", json.dumps(extra), playbook]
    path = f"{tmp_path}/bin:{os.environ['PATH']}"
    return ansible("ansible-playbook", argv, cwd=tmp_path, environ={"PATH": path})


def program(tmp_path: Path, name: str, script: str) -> None:
    """Put a shell script where `run_tasks` finds it first."""
    folder = tmp_path / "bin"
    folder.mkdir(exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{script}\n")
    (folder / name).chmod(0o755)


def role_data(role: str, file: str = "vars/main.yml") -> dict[str, Any]:
    return dict(yaml.safe_load((data_folder("ansible") / "roles" / role / file).read_text()))


def load_module(name: str, folder: str = "library") -> ModuleType:
    """One of our Ansible modules, or a file of a role, as plain Python."""
    found = importlib.util.spec_from_file_location(
        name, data_folder("ansible") / folder / f"{name}.py"
    )
    assert found
    assert found.loader
    loaded = sys.modules[name] = importlib.util.module_from_spec(found)  # dataclasses look there
    found.loader.exec_module(loaded)
    return loaded
