"""`up` replaces a damaged munge key of the workspace by the key of a host, or stops."""

from __future__ import annotations

import base64
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.cluster import up
from clusterctl.errors import MachineError, UnreachableError
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from tests.support.inventories import host_of, inventory_of
from tests.support.messages import refused

KEY = bytes(range(256)) * 4


def inventory_with(*names: str) -> Inventory:
    return inventory_of(hosts=tuple(host_of(name) for name in names))


def cluster_of(workspace: Workspace, answers: dict[str, bytes | None]) -> Any:
    """Return a cluster with hosts that have these munge keys. None: the host does not answer."""

    def to(host: str) -> SimpleNamespace:
        def run(argv: list[str], *, check: bool) -> SimpleNamespace:
            if (key := answers[host]) is None:
                raise UnreachableError(f"{host} does not answer", host=host)
            return SimpleNamespace(stdout=base64.encodebytes(key).decode())

        return SimpleNamespace(run=run)

    return SimpleNamespace(
        workspace=workspace,
        connections=SimpleNamespace(to=to),
        reporter=SimpleNamespace(note=lambda _: None),
    )


@pytest.mark.parametrize("local_key", [b"", KEY[:512], None])
@pytest.mark.parametrize("answers", [{"n1": KEY}, {"n1": None, "n2": b"", "n3": KEY}])
def test_up_restores_the_munge_key_from_a_host(
    tmp_path: Path,
    local_key: bytes | None,
    answers: dict[str, bytes | None],
) -> None:
    workspace = Workspace(tmp_path / "demo")
    workspace.create()
    if local_key is not None:
        workspace.munge_key.write_bytes(local_key)
    workspace.inventory.write_text(inventory_with(*answers).text)
    up.restore_munge_key(cluster_of(workspace, answers))
    workspace.create_secrets()
    assert workspace.munge_key.read_bytes() == KEY


def test_up_keeps_a_damaged_munge_key_that_no_host_can_replace(
    tmp_path: Path,
) -> None:
    workspace = Workspace(tmp_path / "demo")
    workspace.create()
    workspace.munge_key.write_bytes(b"")
    workspace.inventory.write_text(inventory_with("n1", "n2").text)
    up.restore_munge_key(cluster_of(workspace, {"n1": None, "n2": KEY[:100]}))
    with refused("record-damaged/munge-key", MachineError, str(workspace.munge_key)):
        workspace.create_secrets()
    assert workspace.munge_key.read_bytes() == b""
