"""A cloud node downloads CuPy from the package index."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cluster.hardware import (
    mark_of_wheels,
)
from clusterctl.hosts.gpus import Driver
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Transport
from clusterctl.util.assets import gpu_lock
from clusterctl.util.process import Result
from tests.support.inventories import ONE
from tests.support.local_transport import LocalTransport
from tests.support.plays import program
from tests.unit.cluster.test_converge_gpus import (
    T4,
    fetched,
    plant,
    spec,
    views,
    workspace_fixture,  # noqa: F401
)


class Installs(LocalTransport):
    """This machine as a node: ``root`` is its /opt/clusterctl."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def run(self, argv: Sequence[str], **options: Any) -> Result:
        path = {"PATH": f"{self.root}/bin:{os.environ['PATH']}"}
        return super().run(
            [w.replace("/opt/clusterctl", str(self.root)) for w in argv], env=path, **options
        )


@pytest.mark.parametrize("index", ["exit", "exit 28", 'case "$*" in *files*) exit 7;; esac'])
def test_cloud_node_with_package_index_downloads_cupy_itself(
    workspace: Workspace, tmp_path: Path, index: str
) -> None:
    """2.1 GB through Identity-Aware Proxy would take hours per node."""
    program(tmp_path, "curl", index)
    rented = spec(rented=True)
    shown = views(T4, Driver())
    if index != "exit":
        plant()
    asked: list[str] = []

    def to(name: str) -> Transport:
        asked.append(name)
        return Installs(tmp_path)

    fetched(workspace, rented, shown, to)
    assert asked == [ONE]  # the one that shows a card
    assert workspace.gpu_wheels.is_dir() is (index != "exit")
    # The next `up`: it has them.
    workspace.gpu_wheels.unlink(missing_ok=True)
    (tmp_path / "env").mkdir()
    (tmp_path / "env" / mark_of_wheels(gpu_lock())).touch()
    program(tmp_path, "curl", "exit 28")
    fetched(workspace, rented, shown, to)
    assert not workspace.gpu_wheels.is_symlink()
