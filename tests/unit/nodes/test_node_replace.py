"""`node replace` goes on where it failed: what it has forgotten of a node does not stop it the next time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import node
from clusterctl.errors import UsageError
from clusterctl.inventory import Host, Inventory
from clusterctl.spec import ClusterSpec
from clusterctl.workspace import Workspace, write_atomic

SPEC = ClusterSpec.model_validate(
    {
        "version": 1,
        "name": "own",
        "provider": {"type": "onprem", "controller": "ctl", "hosts": {"ctl": None, "gpu[1-2]": None}},
        "partitions": [{"name": "train", "hosts": "gpu[1-2]"}],
    }
)
KEY = "ssh-ed25519 AAAA"


class Idle:
    """A scheduler without jobs that notes which nodes it drains."""

    def __init__(self) -> None:
        self.drained: list[str] = []

    def drain(self, names: Sequence[str], _: str) -> None:
        self.drained += names

    def nodes(self) -> tuple[()]:
        return ()


def test_a_replacement_that_failed_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace, scheduler, raised = Workspace(tmp_path / "own"), Idle(), list[tuple[str, ...]]()
    workspace.create()
    hosts = [Host(name="ctl", address="10.0.0.1", roles=("controller",), host_key=KEY)]
    for name in ("gpu1", "gpu2"):
        hosts.append(Host(name=name, address="10.0.0.2", roles=("compute",), partition="train", host_key=KEY))
    said = Inventory(
        cluster="own", cluster_id="a", provider="onprem", hosts=tuple(hosts), network="10.0.0.0/24",
        shared="/shared", baked=False,
    )  # fmt: skip
    write_atomic(workspace.hosts, said.model_dump_json())

    @contextmanager
    def cluster(*_: object) -> Iterator[tuple[Workspace, Inventory, Any]]:
        yield workspace, Inventory.model_validate_json(workspace.hosts.read_bytes()), scheduler

    def fails(*_: object, limit: tuple[str, ...], **__: object) -> int:
        raised.append(limit)
        raise UsageError("host keys must be confirmed")

    monkeypatch.setattr(node, "spec_of", lambda *_: SPEC)
    monkeypatch.setattr(node, "hands", lambda *_, **__: None)
    monkeypatch.setattr(node, "_cluster", cluster)
    monkeypatch.setattr(node, "raise_cluster", fails)
    monkeypatch.setattr("clusterctl.jobs.active", lambda _: ())
    for _ in range(2):
        with pytest.raises(UsageError, match="must be confirmed"):
            node.replace(None, None, ["gpu2"])  # type: ignore[arg-type]
    assert raised == [("gpu2",), ("gpu2",)]
    assert scheduler.drained == ["gpu2"]
