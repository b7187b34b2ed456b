"""The Ansible module host_snapshot as plain Python: its record is in a temporary folder, and its
programs are answered by ``Machine``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import ansible.module_utils
from clusterctl.util.assets import data_folder
from tests.support.plays import load_module

Answers = dict[tuple[str, ...], tuple[int, str, str]]
Refuses = Callable[[str], AbstractContextManager[None]]


@dataclass
class Machine:
    """A host that answers commands.

    answers: first words of a command -> (exit code, stdout, stderr). Other commands succeed without
        output.
    does: command -> what it changes.
    killed_at: the module is killed at the command with these first words. Empty: it is not.
    """

    answers: Answers = field(default_factory=dict)
    does: dict[tuple[str, ...], Callable[[], None]] = field(default_factory=dict)
    killed_at: tuple[str, ...] = ()
    ran: list[list[str]] = field(default_factory=list)

    def run(self, argv: list[str], check_rc: bool = False, **_: Any) -> tuple[int, str, str]:
        if self.killed_at and tuple(argv[: len(self.killed_at)]) == self.killed_at:
            raise KeyboardInterrupt
        self.ran.append(argv)
        self.does.get(tuple(argv), lambda: None)()
        for length in range(len(argv), 0, -1):
            if (answer := self.answers.get(tuple(argv[:length]))) is not None:
                assert not (check_rc and answer[0]), argv
                return answer
        return 0, "", ""


@dataclass
class Module:
    """The part of AnsibleModule that the snapshot uses."""

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
def refuses(util: Callable[[str], ModuleType]) -> Refuses:
    """Expect a SnapshotError whose text contains a word."""

    @contextmanager
    def expect(word: str) -> Iterator[None]:
        with pytest.raises(util("snapshot_store").SnapshotError) as caught:
            yield
        assert word in str(caught.value)

    return expect


@pytest.fixture
def machine() -> Machine:
    return Machine()


@pytest.fixture
def paths(util: Callable[[str], ModuleType]) -> Any:
    """The ``HostPaths`` of the host."""
    return util("snapshot_host").HostPaths()


@pytest.fixture
def snapshot(tmp_path: Path, machine: Machine, paths: Any) -> Callable[..., dict[str, Any]]:
    """Run the module with a ``state``, and return its result.

    packages: the package manager. Default: the host has none. on: other ``HostPaths``. touches: what
    a role changes.
    """
    library = load_module("host_snapshot")

    def act(
        state: str,
        *,
        cluster: str = "abc",
        check: bool = False,
        packages: Any = None,
        on: Any = None,
        **touches: Any,
    ) -> Any:
        params = {"state": state, "cluster": cluster, "path": str(tmp_path / "snapshot")}
        module = Module({**params, "touches": {"role": touches} if touches else {}}, machine, check)
        return library.act(module, packages, on or paths)

    return act
