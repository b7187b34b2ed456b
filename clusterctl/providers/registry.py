"""The registered providers: the only way to one from outside this subpackage.

Each is imported when it is needed: most commands are about one provider, and Google's libraries load slowly.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from clusterctl.providers.base import NO_PROMPTS, Prompts, Provider
from clusterctl.spec.gcp import GcpProvider as GcpSettings
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.models import LocalProvider as LocalSettings
from clusterctl.spec.models import Provider as ProviderSettings
from clusterctl.spec.onprem import OnpremProvider as OnpremSettings
from clusterctl.spec.onprem import own_machines
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import Workspace

if TYPE_CHECKING:
    from clusterctl.providers.base import PendingRelease
    from clusterctl.providers.local.layout import CachedImage, ClusterState
    from clusterctl.util.progress import Reporter


def provider_of(settings: ProviderSettings, prompts: Prompts = NO_PROMPTS) -> Provider:
    """The provider with these settings; ``prompts`` are for hosts that the user owns."""
    match settings:
        case LocalSettings():
            from clusterctl.providers.local.provider import LocalProvider  # noqa: PLC0415

            return LocalProvider(settings)
        case GcpSettings():
            from clusterctl.providers.gcp.provider import GcpProvider  # noqa: PLC0415

            return GcpProvider(settings)
        case OnpremSettings():
            from clusterctl.providers.onprem.provider import OnpremProvider  # noqa: PLC0415

            return OnpremProvider(settings, prompts)


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
    from clusterctl.providers.gcp import costs  # noqa: PLC0415

    return costs.node_price(spec, found)


def cached_images(*, prune: bool = False, report: Reporter) -> tuple[CachedImage, ...]:
    """The cache of node images on this machine, or what was removed from it."""
    from clusterctl.providers.local import provider  # noqa: PLC0415

    return provider.cached_images(prune=prune, report=report)


def clusters_on_this_machine() -> tuple[tuple[ClusterState, bool], ...]:
    """The caller's local clusters on this machine, each with whether it is an orphan."""
    from clusterctl.providers.local import provider  # noqa: PLC0415

    # Another account's workspace can't be read, so nothing is known of its clusters.
    mine = (one for one in provider.clusters() if one.owner == os.getuid())
    return tuple((one, provider.is_orphan(one)) for one in mine)
