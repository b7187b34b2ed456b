"""The snapshot's module as plain Python, on a folder of its own, with a host that answers as it is
told.
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
    """What `run_command` meets: answers by the first words of a command, all else succeeds with
    nothing.
    """

    answers: Answers = field(default_factory=dict)
    ran: list[list[str]] = field(default_factory=list)

    def run(self, argv: list[str], check_rc: bool = False, **_: Any) -> tuple[int, str, str]:
        self.ran.append(argv)
        for length in range(len(argv), 0, -1):
            if (answer := self.answers.get(tuple(argv[:length]))) is not None:
                assert not (check_rc and answer[0]), argv
                return answer
        return 0, "", ""


@dataclass
class Module:
    """What the snapshot sees of Ansible."""

    params: dict[str, Any]
    machine: Machine
    check_mode: bool = False

    def run_command(self, argv: list[str], **options: Any) -> tuple[int, str, str]:
        return self.machine.run(argv, **options)


@pytest.fixture(autouse=True)
def utils(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ansible finds ansible/module_utils beside the playbook; here Python must."""
    paths = [*ansible.module_utils.__path__, str(data_folder("ansible") / "module_utils")]
    monkeypatch.setattr(ansible.module_utils, "__path__", paths)


@pytest.fixture
def util() -> Callable[[str], ModuleType]:
    """A part of the snapshot."""
    return lambda name: importlib.import_module(f"ansible.module_utils.{name}")


@pytest.fixture
def refuses(util: Callable[[str], ModuleType]) -> Refuses:
    """Expect the snapshot to refuse, with a word of why."""

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
def snapshot(
    tmp_path: Path, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, Any]]:
    """Runs the module with a state; a host without a package manager unless the test brings one."""
    library = load_module("host_snapshot")
    monkeypatch.setattr(library, "manager", lambda _: None)

    def act(
        state: str,
        *,
        cluster: str = "abc",
        check: bool = False,
        packages: Any = None,
        **touches: Any,
    ) -> Any:
        monkeypatch.setattr(library, "manager", lambda _: packages)
        params = {"state": state, "cluster": cluster, "path": str(tmp_path / "snapshot")}
        module = Module({**params, "touches": {"role": touches} if touches else {}}, machine, check)
        return library.act(module)

    return act
