"""The Ansible module host_changes as plain Python: its record is in a temporary folder, and its programs
are answered by ``Machine``.
"""

from __future__ import annotations

import grp
import importlib
import pwd
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import ansible.module_utils
from clusterctl.util.assets import data_folder
from tests.support.plays import load_module


@dataclass
class Machine:
    """A host that answers commands.

    answers: first words of a command -> (exit code, stdout, stderr). Other commands succeed without
        output.
    accounts: its accounts, beside root. groups: name -> number.
    """

    answers: dict[tuple[str, ...], tuple[int, str, str]] = field(
        default_factory=lambda: {("dpkg-query", "-S"): (1, "", ""), ("rpm", "-qf"): (1, "", "")}
    )
    ran: list[list[str]] = field(default_factory=list)
    accounts: list[SimpleNamespace] = field(default_factory=list)
    groups: dict[str, int] = field(default_factory=dict)

    def run(self, argv: list[str], check_rc: bool = False, **_: Any) -> tuple[int, str, str]:
        self.ran.append(argv)
        if argv[0] == "userdel":
            self.accounts = [one for one in self.accounts if one.pw_name != argv[-1]]
        if argv[0] in ("userdel", "groupdel"):
            del self.groups[argv[-1]]
        if argv[0] == "groupadd":
            self.groups[argv[-1]] = int(argv[-2])
        for length in range(len(argv), 0, -1):
            if (answer := self.answers.get(tuple(argv[:length]))) is not None:
                assert not (check_rc and answer[0]), argv
                return answer
        return 0, "", ""

    def has_account(self, name: str, gecos: str, home: str) -> None:
        """Add an account, with a uid that no process has, and a group of its name unless it is there."""
        gid = self.groups.setdefault(name, 2**31)
        more = {"pw_gecos": gecos, "pw_dir": home}
        account = SimpleNamespace(pw_name=name, pw_uid=2**31, pw_gid=gid, **more)
        self.accounts.append(account)

    def has_units(self, *names: str) -> None:
        """Let these units run, and start at boot."""
        self.answers["systemctl", "list-unit-files"] = (
            0,
            "".join(f"{n} enabled\n" for n in names),
            "",
        )
        self.answers["systemctl", "list-units"] = (0, "".join(f"{n} loaded\n" for n in names), "")

    def owns(self, package: str, *changed: str) -> None:
        """Let every path belong to a package; ``changed``: with other content than the package's."""
        self.answers["dpkg-query", "-S"] = (0, f"{package}: PATH\n", "")
        self.answers["rpm", "-qf"] = (0, f"{package}\n", "")
        told = "".join(f"??5?????? c {path}\n" for path in changed)
        self.answers["dpkg", "--verify"] = self.answers["rpm", "-V"] = (1, told, "")

    def has_packages(self, *names: str) -> None:
        self.answers["dpkg-query", "-W"] = (0, "".join(f"installed {n}\n" for n in names), "")
        self.answers["rpm", "-qa"] = (0, "".join(f"{n}.x86_64\n" for n in names), "")


@dataclass
class Module:
    """The part of AnsibleModule that host_changes uses."""

    params: dict[str, Any]
    machine: Machine
    check_mode: bool = False

    def run_command(self, argv: list[str], **options: Any) -> tuple[int, str, str]:
        return self.machine.run(argv, **options)


@pytest.fixture(autouse=True)
def utils(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let Python find ansible/module_utils, which Ansible finds beside the playbook."""
    paths = [*ansible.module_utils.__path__, str(data_folder("ansible") / "module_utils")]
    monkeypatch.setattr(ansible.module_utils, "__path__", paths)


@pytest.fixture
def util() -> Callable[[str], ModuleType]:
    """Import a module of ansible/module_utils by its name."""
    return lambda name: importlib.import_module(f"ansible.module_utils.{name}")


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A host with accounts and groups of its own, whatever this machine has."""
    machine = Machine()
    root = SimpleNamespace(pw_name="root", pw_uid=0, pw_gid=0, pw_gecos="", pw_dir="/root")

    def by(key: str) -> Callable[[object], SimpleNamespace]:
        return lambda value: {vars(one)[key]: one for one in [root, *machine.accounts]}[value]

    monkeypatch.setattr(pwd, "getpwall", lambda: [root, *machine.accounts])
    monkeypatch.setattr(pwd, "getpwnam", by("pw_name"))
    monkeypatch.setattr(pwd, "getpwuid", by("pw_uid"))
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_gid=machine.groups[name]))
    return machine


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    return folder


@pytest.fixture
def changes(tmp_path: Path, machine: Machine) -> Callable[..., dict[str, Any]]:
    """Run the module with a ``state``, and return its result. touches: what a role changes."""
    library = load_module("host_changes")

    def act(state: str, *, cluster: str = "abc", check: bool = False, **touches: Any) -> Any:
        params = {"state": state, "cluster": cluster, "path": str(tmp_path / "record.json")}
        module = Module({**params, "touches": {"role": touches} if touches else {}}, machine, check)
        return library.act(module)

    return act
