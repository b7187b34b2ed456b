"""`up` tells which hosts it waits for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from clusterctl.cluster import up
from clusterctl.errors import TransportError, UnreachableError
from clusterctl.hosts.probe import HostAnswer
from clusterctl.providers.base import Provisioned
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import PhaseLines
from tests.support.inventories import inventory_of
from tests.unit.cluster.specs import spec_of


def test_silent_host_is_named_once_while_up_waits_for_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def answers(*_: object) -> Iterator[HostAnswer | None]:
        yield from (None, None)
        for host in ("d-ctl", "d-train-1"):
            yield HostAnswer(host, UnreachableError("no route"), 2)

    monkeypatch.setattr(up, "ask_hosts", answers)
    workspace = Workspace(tmp_path / "d")
    workspace.create()
    workspace.create_secrets()
    inventory = inventory_of("d-train-1")
    lines: list[str] = []
    cluster = SimpleNamespace(
        spec=spec_of(),
        workspace=workspace,
        connections=SimpleNamespace(to=None),
        provider=SimpleNamespace(apply=lambda *_: Provisioned(inventory)),
        report_repairs=lambda _: None,
        reporter=PhaseLines(lines.append),
    )
    with pytest.raises(TransportError):
        up.probe(cluster, inventory)  # type: ignore[arg-type]
    waiting, *failed = lines
    assert "d-ctl, d-train-1" in waiting
    assert len(failed) == 2
