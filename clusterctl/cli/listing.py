"""list: the clusters of this user, wherever what is known of them lies."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import typer

from clusterctl.cli.options import Options, verb
from clusterctl.cli.show import Screen


@dataclass(frozen=True, slots=True)
class _Listed:
    """One cluster. ``nodes`` is None where its record can't be read, ``usd_per_hour`` without prices.

    ``fix`` is what to type about one that was lost.
    """

    cluster: str
    provider: str
    state: str
    nodes: int | None
    workspace: str
    id: str | None
    usd_per_hour: float | None = None
    fix: str = ""


def list_(screen: Screen, options: Options) -> None:
    """Show your clusters, and local ones whose workspace was lost.

    `unfinished`: `clusterctl up` goes on. `elsewhere`: raised with another CLUSTERCTL_HOME. `lost`: nothing
    is known of it any more, `clusterctl down --orphans` removes it. `damaged`: `clusterctl up` mends it.
    """
    del options
    noted = list(_noted())
    found = noted + list(_on_this_machine({one.id for one in noted}))
    lines = _table(screen, found) if found else ["no clusters"]
    screen.result({"clusters": [asdict(one) for one in found]}, *lines)


def _table(screen: Screen, found: Sequence[_Listed]) -> list[str]:
    head = ["CLUSTER", "PROVIDER", "STATE", "NODES", "WORKSPACE"]
    rows = [[c.cluster, c.provider, c.state, "-" if c.nodes is None else c.nodes, c.workspace] for c in found]
    if any(c.usd_per_hour is not None for c in found):
        head.insert(-1, "USD AN HOUR")
        for row, one in zip(rows, found, strict=True):
            row.insert(-1, "-" if one.usd_per_hour is None else f"{one.usd_per_hour:.2f}")
    fixes = (("", f"cluster {one.cluster!r} was lost; remove it: {one.fix}") for one in found if one.fix)
    return [*screen.table(head, rows), *itertools.chain(*fixes)]


def _noted() -> Iterator[_Listed]:
    """Those of this state folder that `up` has raised."""
    from pydantic import ValidationError

    from clusterctl.state.inventory import Inventory
    from clusterctl.state.workspace import state_home

    for folder in sorted(state_home().glob("*/terraform")):
        if not (folder.parent / "hosts.json").exists():
            yield _Listed(folder.parent.name, "gcp", "unfinished", None, str(folder.parent), None)
    for path in sorted(state_home().glob("*/hosts.json")):
        where = str(path.parent)
        try:
            inventory = Inventory.model_validate_json(path.read_bytes())
        except ValidationError:
            yield _Listed(path.parent.name, "-", "damaged", None, where, None)
            continue
        nodes = len(inventory.compute)
        yield _Listed(
            inventory.cluster,
            inventory.provider,
            "up",
            nodes,
            where,
            inventory.cluster_id,
            inventory.usd_per_hour,
        )


def _on_this_machine(known: set[str | None]) -> Iterator[_Listed]:
    """Local ones that are not among those: half made, of another state folder, or with none any more."""
    from clusterctl.errors import ClusterctlError
    from clusterctl.providers.local.provider import clusters, is_lost
    from clusterctl.state.workspace import state_home

    try:
        here = clusters()
    except ClusterctlError:  # no right to look, or not Linux: then there are none of ours either
        return
    for one in here:
        if one.id in known or one.owner != os.getuid():
            continue
        fix = ""
        if is_lost(one):
            state, fix = "lost", f"clusterctl down --orphans --cluster {one.name}"
        else:
            state = "unfinished" if Path(one.workspace).parent == state_home() else "elsewhere"
        nodes = sum(not name.endswith("-ctl") for name in one.numbers)
        yield _Listed(one.name, "local", state, nodes, one.workspace, one.id, fix=fix)


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command("list")(verb(list_))
