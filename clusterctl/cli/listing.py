"""list, storage list, cache: which clusters there are, what they left, and the images of their nodes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from pydantic import ValidationError

from clusterctl.cli.options import option
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, Notice, UsageError
from clusterctl.providers.node_class import KeptImage
from clusterctl.providers.registry import (
    cached_images,
    clusters_on_this_machine,
    kept_images,
    recorded_cost,
)
from clusterctl.providers.storage import REMOVE, KeptStorage, all_recorded, damaged_records
from clusterctl.spec.models import DEFAULT_PROVIDER, PROVIDERS
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.inventory import Inventory, applied_if_known
from clusterctl.state.workspace import Workspace, state_home


@dataclass(frozen=True, slots=True)
class _Listed:
    """One cluster. ``nodes`` is None where its record can't be read, ``usd_per_hour`` without prices.

    ``fix`` is the command that removes an orphan.
    """

    cluster: str
    provider: str
    state: str
    workspace: str
    nodes: int | None = None
    id: str | None = None
    usd_per_hour: float | None = None
    fix: str = ""


def list_(screen: Screen) -> None:
    """List your clusters, kept storage, and orphans on this machine.

    States: `up`; `unfinished` and `damaged`, which `clusterctl up` repairs; `elsewhere`, created with another
    CLUSTERCTL_HOME; `orphaned`, without a workspace, which `clusterctl orphans remove` removes.
    """
    noted = list(_noted())
    found = noted + list(_on_this_machine({one.id for one in noted}))
    kept, storage = _storage(screen)
    lines = [*(_table(screen, found) if found else ["no clusters"]), *([""] if kept else []), *storage]
    answer = {"clusters": [asdict(one) for one in found], "storage": [one.as_dict() for one in kept]}
    screen.result(answer, *lines)


def storage_list(screen: Screen) -> None:
    """List kept storage, of all names."""
    kept, lines = _storage(screen)
    screen.result({"storage": [one.as_dict() for one in kept]}, *(lines or ["no kept storage"]))


def _storage(screen: Screen) -> tuple[list[KeptStorage], list[str]]:
    """Return kept storage, and its lines. Note the records that can't be read."""
    for path in damaged_records():
        screen.note(
            f"note: the record of kept storage can't be read: {path}; what there is, "
            "`clusterctl storage remove -f SPEC` finds with the spec of that cluster"
        )
    kept, lines = list(all_recorded()), []
    for one in kept:
        remove = f"`{REMOVE.format(name=one.cluster)}` removes it"
        lines += [f"kept storage of {one.cluster!r}: {one}", f"  `clusterctl up` takes it up; {remove}"]
    return kept, lines


def _table(screen: Screen, found: Sequence[_Listed]) -> list[str]:
    head = ["CLUSTER", "PROVIDER", "STATE", "NODES", "WORKSPACE"]
    rows = [[c.cluster, c.provider, c.state, "-" if c.nodes is None else c.nodes, c.workspace] for c in found]
    if any(c.usd_per_hour is not None for c in found):
        head.insert(-1, "USD AN HOUR")
        for row, one in zip(rows, found, strict=True):
            row.insert(-1, "-" if one.usd_per_hour is None else f"{one.usd_per_hour:.2f}")
    fixes = (("", f"cluster {one.cluster!r} is orphaned; remove it: {one.fix}") for one in found if one.fix)
    return [*screen.table(head, rows), *itertools.chain(*fixes)]


def _noted() -> Iterator[_Listed]:
    """Those of this state folder that `up` has raised."""
    cloud = next(name for name, traits in PROVIDERS.items() if traits.is_cloud)
    for folder in sorted(state_home().glob("*/terraform")):
        if not (folder.parent / "hosts.json").exists():
            workspace = Workspace(folder.parent)
            spec = applied_if_known(workspace)
            cost = recorded_cost(spec, workspace) if spec else None
            yield _Listed(folder.parent.name, cloud, "unfinished", str(folder.parent), usd_per_hour=cost)
    for path in sorted(state_home().glob("*/hosts.json")):
        where = str(path.parent)
        try:
            of = Inventory.model_validate_json(path.read_bytes())
        except ValidationError:
            yield _Listed(path.parent.name, "-", "damaged", where)
            continue
        yield _Listed(of.cluster, of.provider, "up", where, len(of.compute), of.cluster_id, of.usd_per_hour)


def _on_this_machine(known: set[str | None]) -> Iterator[_Listed]:
    """Local ones that are not among those: half made, of another state folder, or with none any more."""
    try:
        here = clusters_on_this_machine()
    except ClusterctlError:  # no right to look, or not Linux: then there are none of ours either
        return
    for one, is_orphan in here:
        if one.id in known:
            continue
        state = "unfinished" if Path(one.workspace).parent == state_home() else "elsewhere"
        state = "orphaned" if is_orphan else state
        fix = f"clusterctl orphans remove {one.name}" if is_orphan else ""
        nodes = sum(not name.endswith("-ctl") for name in one.numbers)
        yield _Listed(one.name, DEFAULT_PROVIDER.type, state, one.workspace, nodes, one.id, fix=fix)


def cache_prune(
    screen: Screen,
    images: Annotated[
        bool, option("Delete also all images that clusterctl made in the spec's project.")
    ] = False,
) -> None:
    """Remove node images that no cluster uses; with --images also those in the project of a cloud.

    Other clusters of that project may start nodes from those.
    """
    kept: Sequence[KeptImage] = ()
    if images:
        provider = spec_of(screen.chosen()).provider
        if not provider.is_cloud:
            raise UsageError(
                f"there are no images to delete in a project: the provider is {provider.type}",
                code="no-project-images",
                fix="leave --images out, or name a spec of a cloud: -f FILE",
            )
        kept = kept_images(provider, prune=True)
    _show_cache(screen, kept, prune=True)


def cache_list(screen: Screen) -> None:
    """List the cached node images; with a spec of a cloud, also those in its project, with their cost."""
    kept: Sequence[KeptImage] = ()
    if screen.cluster is not None or screen.chosen().spec_file is not None:
        try:
            kept = kept_images(spec_of(screen.chosen()).provider)
        except ClusterctlError as exc:  # what is here needs neither a spec nor a login
            unlisted = f"note: images in a cloud project are not listed: {exc.cause}"
            screen.note(Notice("project-images-unlisted", unlisted))
    _show_cache(screen, kept, prune=False)


def _show_cache(screen: Screen, kept: Sequence[KeptImage], *, prune: bool) -> None:
    """Show, or ``prune``, the cache of this machine; then what was found, or deleted, in a project."""
    images = cached_images(prune=prune, report=lambda what: screen.note(str(what)))
    rows = [[i.key, i.size_mib, ", ".join(i.used_by) or "-"] for i in images]
    empty = ["nothing to remove" if prune else Notice("cache-empty", "the image cache is empty")]
    lines = screen.table(["REMOVED" if prune else "IMAGE", "MIB", "USED BY"], rows) if rows else empty
    lines += [f"{'removed' if prune else 'kept'}: {one}" for one in kept]
    answer = {"images": [i.model_dump() for i in images], "kept_images": [asdict(one) for one in kept]}
    screen.result(answer, *lines)
