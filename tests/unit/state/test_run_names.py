"""What the name of a run means if its folder is a link."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.errors import UsageError
from clusterctl.state.run_names import find_run
from tests.support.messages import refused


def test_dangling_link_of_a_run_is_named_with_its_target(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    (tmp_path / "runs").mkdir()
    link = tmp_path / "runs" / "dangling"
    link.symlink_to("/nonexistent/run")
    with refused("run-link-dangles", UsageError, str(link), "/nonexistent/run"):
        find_run("dangling")
