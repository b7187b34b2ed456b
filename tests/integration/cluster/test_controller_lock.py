"""The lock on a controller, held by programs that run there."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from clusterctl.cluster.controller_lock import hold_controller
from clusterctl.errors import LockedError
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.scripted import ScriptedTransport, Step, without_sudo


class Controller(LocalTransport):
    """A controller with its own lock file."""

    def __init__(self, lock: Path) -> None:
        self.lock = lock

    def _local_command(self, argv: Sequence[str]) -> Sequence[str]:
        *words, texts, arguments = without_sudo(argv)
        return [*words, texts.replace("/run/clusterctl-up.lock", str(self.lock)), arguments]


@pytest.fixture
def controller(tmp_path: Path) -> Controller:
    return Controller(tmp_path / "lock")


def test_hold_controller_excludes_others_and_names_the_holder(controller: Controller) -> None:
    said: list[str] = []
    with (
        hold_controller(controller, "up", wait_s=0, waiting=said.append),
        refused("in-use/cluster", LockedError) as raised,
        hold_controller(controller, "down", wait_s=0, waiting=said.append),
    ):
        pytest.fail("two hold the lock")
    assert "clusterctl up" in raised.value.why
    assert raised.value.retryable


def test_hold_controller_waits_for_the_holder(controller: Controller) -> None:
    holder = hold_controller(controller, "up", wait_s=0, waiting=lambda _: None)
    holder.__enter__()

    def end(_: str) -> None:
        holder.__exit__(None, None, None)

    with hold_controller(controller, "down", wait_s=60, waiting=end):
        pass


def test_hold_controller_runs_without_a_controller_that_answers() -> None:
    ran = []
    silent = ScriptedTransport([Step(("...",), rc=1)])
    with hold_controller(silent, "up", wait_s=0, waiting=ran.append):
        ran.append("body")
    assert ran == ["body"]
