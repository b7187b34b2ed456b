"""The commands list, cache list and cache prune: clusters and node images."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

from clusterctl.cli.options import option
from clusterctl.cli.output import Screen
from clusterctl.errors import ClusterctlError, MachineError, Notice, UsageError, unaccompanied
from clusterctl.providers.base import Prompts
from clusterctl.providers.registry import provider_of
from clusterctl.providers.templates import KeptImage
from clusterctl.spec.models import DEFAULT_PROVIDER
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.inventory import Inventory, applied_if_known
from clusterctl.state.workspace import Workspace, state_home
from clusterctl.util.progress import MessageLines


@dataclass(frozen=True, slots=True)
class _Listed:
    """A cluster in the output of `list`. ``fix``: the command that removes an orphan, else ""."""

    cluster: str
    provider: str
    state: str
    workspace: str
    nodes: int | None = None
    id: str | None = None
    usd_per_hour: float | None = None
    fix: str = ""


def list_(screen: Screen) -> None:
    """List your clusters, and orphans on this machine.

    States: `up`; `unfinished` and `damaged` (finish or repair it with `clusterctl up`, or remove it with
    `clusterctl down`); `leaving` (its `down` did not finish: run it again); `elsewhere` (created
    with another CLUSTERCTL_HOME); `orphaned` (without records; remove it with `clusterctl orphans
    remove`).
    """
    recorded = list(_recorded_clusters())
    listed = recorded + list(_unrecorded_clusters({entry.id for entry in recorded}))
    lines = _table(screen, listed) if listed else ["no clusters"]
    screen.result({"clusters": [asdict(entry) for entry in listed]}, *lines)


def _table(screen: Screen, clusters: Sequence[_Listed]) -> list[str]:
    head = ["CLUSTER", "PROVIDER", "STATE", "NODES", "WORKSPACE"]
    rows = [
        [c.cluster, c.provider, c.state, "-" if c.nodes is None else c.nodes, c.workspace]
        for c in clusters
    ]
    if any(c.usd_per_hour is not None for c in clusters):
        head.insert(-1, "USD AN HOUR")
        for row, cluster in zip(rows, clusters, strict=True):
            row.insert(-1, "-" if cluster.usd_per_hour is None else f"{cluster.usd_per_hour:.2f}")
    fixes = (
        ("", f"cluster {cluster.cluster!r} is orphaned; remove it: {cluster.fix}")
        for cluster in clusters
        if cluster.fix
    )
    return [*screen.table(head, rows), *itertools.chain(*fixes)]


def _recorded_clusters() -> Iterator[_Listed]:
    """Yield the clusters of this user: each workspace with an inventory, or with an id alone."""
    for folder in sorted(state_home().glob("[!.]*/")):
        workspace = Workspace(folder)
        if workspace.inventory.exists():
            yield _with_hosts(workspace)
        elif workspace.has_id:
            yield _without_hosts(workspace)


def _without_hosts(workspace: Workspace) -> _Listed:
    """Return a cluster of which no `up` has found the hosts yet, or of which `down` has removed them."""
    spec = applied_if_known(workspace)
    provider = "-"
    cost = None
    if spec is not None:
        provider = spec.provider.type
        cost = provider_of(spec.provider).recorded_cost(spec, workspace)
    cluster_id = None
    with suppress(MachineError):
        cluster_id = workspace.known_id()
    state = "leaving" if workspace.removing.exists() else "unfinished"
    return _Listed(
        workspace.root.name,
        provider,
        state,
        str(workspace.root),
        id=cluster_id,
        usd_per_hour=cost,
    )


def _with_hosts(workspace: Workspace) -> _Listed:
    where = str(workspace.root)
    try:
        inventory = Inventory.read(workspace.inventory.read_bytes())
    except (OSError, ValueError):
        return _Listed(workspace.root.name, "-", "damaged", where)
    return _Listed(
        inventory.cluster,
        inventory.provider,
        _state_of(workspace),
        where,
        # An attached cluster has no hosts but its login.
        len({node for partition in inventory.partitions for node in partition.nodes}),
        inventory.cluster_id,
        inventory.usd_per_hour,
    )


def _state_of(workspace: Workspace) -> str:
    if workspace.removing.exists():
        return "leaving"
    return "up" if workspace.is_configured else "unfinished"


def _unrecorded_clusters(recorded_ids: set[str | None]) -> Iterator[_Listed]:
    """Yield the clusters that run on this machine, except those with an ID in ``recorded_ids``."""
    try:
        clusters = provider_of(DEFAULT_PROVIDER).clusters_here()
    except ClusterctlError:
        # This machine or this user can't have local clusters.
        return
    for cluster in clusters:
        if cluster.id in recorded_ids:
            continue
        state = "unfinished" if Path(cluster.workspace).parent == state_home() else "elsewhere"
        yield _Listed(
            cluster.name,
            cluster.provider,
            "orphaned" if cluster.is_orphan else state,
            cluster.workspace,
            cluster.nodes,
            cluster.id,
            fix=f"clusterctl orphans remove {cluster.name}" if cluster.is_orphan else "",
        )


def cache_prune(
    screen: Screen,
    images: Annotated[
        bool, option("Also delete all images of clusterctl in the spec's project.")
    ] = False,
) -> None:
    """Remove cached node images that no cluster uses; with --images, also the images in a cloud
    project.

    Container images that `submit` has fetched to this machine are also removed. Other clusters in
    that cloud project may still need the images.
    """
    kept: Sequence[KeptImage] = ()
    if not images:
        for flag_name, value in (("-f", screen.file), ("--cluster", screen.cluster)):
            if value is not None:
                raise unaccompanied(flag_name, "--images")
    else:
        provider = spec_of(screen.chosen()).provider
        if not provider.is_cloud:
            raise UsageError(
                f"--images needs a cloud provider, but the spec's provider is {provider.type}",
                code="unsupported",
                about="images",
                fix="remove --images, or name a cloud spec with -f FILE",
            )
        kept = provider_of(provider).kept_images(prune=True)
    _show_cache(screen, kept, prune=True)


def cache_list(screen: Screen) -> None:
    """List the cached node images; for a cloud spec, also the images in its project, with their
    cost.

    Container images that `submit` has fetched to this machine have one row.
    """
    kept: Sequence[KeptImage] = ()
    chosen = screen.chosen()
    if chosen.is_given or chosen.spec_file is not None:
        try:
            kept = provider_of(spec_of(chosen).provider).kept_images()
        except ClusterctlError as exc:
            if chosen.is_given and isinstance(exc, UsageError):
                raise
            # The local cache needs neither a spec nor a login.
            unlisted = f"the images of the cloud project can't be listed: {exc.cause}"
            screen.note(Notice("project-images-unlisted", unlisted))
    _show_cache(screen, kept, prune=False)


def _show_cache(screen: Screen, kept: Sequence[KeptImage], *, prune: bool) -> None:
    from clusterctl.jobs import images as job_images

    of_jobs = job_images.prune(screen.note) if prune else job_images.cached_bytes()
    of_jobs_mib = -(-of_jobs >> 20)
    prompts = Prompts(reporter=MessageLines(screen.note))
    images = provider_of(DEFAULT_PROVIDER, prompts).cached_images(prune=prune)
    rows = [[i.key, i.size_mib, ", ".join(i.used_by) or "-"] for i in images]
    if of_jobs_mib:
        rows.append(["container images", of_jobs_mib, "-"])
    empty = ["nothing to remove" if prune else Notice("cache-empty", "the image cache is empty")]
    lines = (
        screen.table(["REMOVED" if prune else "IMAGE", "MIB", "USED BY"], rows) if rows else empty
    )
    lines += [f"{'removed' if prune else 'kept'}: {image}" for image in kept]
    answer = {
        "images": [asdict(image) for image in images],
        "container_images_mib": of_jobs_mib,
        "kept_images": [asdict(image) for image in kept],
    }
    screen.result(answer, *lines)
