"""Tests of the choice of the cluster for a command."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import ClusterctlError, NotUpError, SlurmError
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.workspace import Workspace
from tests.support.messages import refused


@pytest.mark.parametrize(
    ("file", "text", "code"),
    [
        ("", "", "unfinished"),
        ("configured", "", "unfinished"),
        ("configured", "inputs", "slurm-refused"),
        ("login", "", "slurm-refused"),
    ],
)
def test_command_that_fails_before_an_up_has_finished_names_that(
    tmp_path: Path, file: str, text: str, code: str
) -> None:
    """A cluster that other people operate has no `up`."""
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    if file:
        getattr(workspace, file).write_text(text)
    kind: type[ClusterctlError] = SlurmError if code == "slurm-refused" else NotUpError
    with refused(code, kind, "sinfo failed"), naming_lock_holder(workspace):
        raise SlurmError("sinfo failed")
