"""The registered providers: the only way to one from outside this subpackage.

Each is found by its type: `provider: {type: local}` is ``LocalProvider`` of ``local/provider.py``, and the
prices of a cloud are in its ``costs.py``. A provider is imported when it is needed: most commands are about
one, and Google's libraries load slowly.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.spec.common import ProviderSettings
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.onprem import own_machines
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import Workspace

if TYPE_CHECKING:
    from clusterctl.providers.base import PendingRelease
    from clusterctl.providers.local.layout import CachedImage, ClusterState
    from clusterctl.providers.node_class import KeptImage
    from clusterctl.util.progress import ProgressReporter


def provider_of(settings: ProviderSettings, prompts: Prompts = NO_PROMPTS) -> Provider:
    """The provider with these settings; ``prompts`` are for hosts that the user owns."""
    kind = getattr(_module(settings, "provider"), f"{settings.type.title()}Provider")
    provider: Provider = kind(settings, prompts)
    return provider


def record_pending(
    host: Host, inventory: Inventory, spec: ClusterSpec, workspace: Workspace, *, why: str
) -> PendingRelease:
    """Record a host of the cluster, whose applied spec is ``spec``, as one that is still to be released."""
    from clusterctl.providers.onprem import release  # noqa: PLC0415

    return release.record_pending(host, inventory, own_machines(spec.provider), workspace, why=why)


def node_price(spec: ClusterSpec, partition: str) -> float | None:
    """A node of that partition with its disks, in USD an hour; None where it is not known.

    The partition's `price_per_hour` comes before what a cloud asks for.
    """
    found = next((p for p in spec.partitions if p.name == partition), None)
    if found is None or found.price_per_hour is not None:
        return found.price_per_hour if found else None
    if not spec.provider.is_cloud:
        return None
    price: float | None = _module(spec.provider, "costs").node_price(spec, found)
    return price


def recorded_cost(spec: ClusterSpec, workspace: Workspace) -> float | None:
    """What is recorded of a cluster that is not finished, in USD an hour; None where it is not known."""
    if not spec.provider.is_cloud:
        return None
    cost: float | None = _module(spec.provider, "costs").recorded(spec, workspace.terraform)
    return cost


def kept_images(settings: ProviderSettings, *, prune: bool = False) -> tuple[KeptImage, ...]:
    """The images of nodes that are kept where they cost, or those that were removed; none where none are."""
    if not settings.is_cloud:
        return ()
    kept: tuple[KeptImage, ...] = _module(settings, "images").kept(settings, prune=prune)
    return kept


def cached_images(*, prune: bool = False, report: ProgressReporter) -> tuple[CachedImage, ...]:
    """The cache of node images on this machine, or what was removed from it."""
    from clusterctl.providers.local import provider  # noqa: PLC0415

    return provider.cached_images(prune=prune, report=report)


def clusters_on_this_machine() -> tuple[tuple[ClusterState, bool], ...]:
    """The caller's local clusters on this machine, each with whether it is an orphan."""
    from clusterctl.providers.local import provider  # noqa: PLC0415

    # Another account's workspace can't be read, so nothing is known of its clusters.
    mine = (one for one in provider.clusters() if one.owner == os.getuid())
    return tuple((one, provider.is_orphan(one)) for one in mine)


def _module(settings: ProviderSettings, name: str) -> Any:
    return import_module(f"{__package__}.{settings.type}.{name}")
