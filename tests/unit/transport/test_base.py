"""Tests of errors that all transports raise."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import command_error, unreachable_error


@pytest.mark.parametrize("adopts", [False, True])
def test_host_that_is_off_is_started_by_up_only_if_clusterctl_made_it(
    tmp_path: Path, adopts: bool
) -> None:
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    if adopts:
        workspace.access_config.touch()
    error = unreachable_error("n1", workspace.ssh_config, "no SSH connection")
    assert ("`clusterctl up`" in error.fix) != adopts
    assert error.fix


def test_missing_python_is_named_and_no_other_program() -> None:
    errors = [command_error("login", [name], 127, "not found") for name in ("python3", "srun")]
    assert [error.about for error in errors] == ["python", "command"]
