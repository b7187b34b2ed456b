"""Finds a provider's code by its name in the spec. Other packages use providers only through this
module.

The provider of `provider: {type: local}` is ``LocalProvider`` in ``local/provider.py``. A cloud
also has ``costs.py`` with its prices. Modules are imported on demand, because most commands need a
single provider.
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
    from clusterctl.providers.existing.attach import Attached as Attached  # noqa: PLC0414 - for other packages
    from clusterctl.providers.existing.detach import AttachedFolder as AttachedFolder  # noqa: PLC0414
    from clusterctl.providers.existing.detach import Entry as Entry  # noqa: PLC0414
    from clusterctl.providers.existing.site import Fact
    from clusterctl.providers.local.layout import CachedImage, ClusterState
    from clusterctl.providers.node_template import KeptImage
    from clusterctl.transport.base import Transport
    from clusterctl.util.progress import ProgressReporter


def provider_of(settings: ProviderSettings, prompts: Prompts = NO_PROMPTS) -> Provider:
    """Return the provider for these settings. ``prompts``: callbacks that ask the user."""
    kind = getattr(_module(settings.type, "provider"), f"{settings.type.title()}Provider")
    provider: Provider = kind(settings, prompts)
    return provider


def attach(**request: Any) -> Attached:
    """Make a Slurm cluster of other people ready for jobs. ``request``: the fields of
    existing.Request.
    """
    module = _module("existing", "attach")
    attached: Attached = module.attach(module.Request(**request))
    return attached


def examine_site(workspace: Workspace) -> tuple[Fact, ...]:
    """Return facts about a cluster that other people operate, and how each was learned."""
    facts: tuple[Fact, ...] = _module("existing", "provider").examine_site(workspace)
    return facts


def attached_folder(transport: Transport, folder: str, cluster_id: str) -> AttachedFolder:
    """Return clusterctl's folder on a cluster that other people operate."""
    attached: AttachedFolder = _module("existing", "detach").AttachedFolder(
        transport, folder, cluster_id
    )
    return attached


def record_pending(
    host: Host, inventory: Inventory, spec: ClusterSpec, workspace: Workspace, *, why: str
) -> PendingRelease:
    """Record that an on-prem host left the cluster but is not restored. ``spec``: that of the last
    `up`.
    """
    machines = own_machines(spec.provider)
    release = _module("onprem", "release")
    pending: PendingRelease = release.record_pending(host, inventory, machines, workspace, why=why)
    return pending


def node_price(spec: ClusterSpec, partition: str) -> float | None:
    """Return the price of a partition's node in USD an hour: `price_per_hour`, or else the cloud's
    price.
    """
    partition_spec = next((p for p in spec.partitions if p.name == partition), None)
    if partition_spec is None or partition_spec.price_per_hour is not None:
        return partition_spec.price_per_hour if partition_spec else None
    if not spec.provider.is_cloud:
        return None
    price: float | None = _module(spec.provider.type, "costs").node_price(spec, partition_spec)
    return price


def recorded_cost(spec: ClusterSpec, workspace: Workspace) -> float | None:
    """Return the cost in USD an hour of the resources that an unfinished `up` created, if known."""
    if not spec.provider.is_cloud:
        return None
    cost: float | None = _module(spec.provider.type, "costs").recorded_cost(
        spec, workspace.terraform
    )
    return cost


def kept_images(settings: ProviderSettings, *, prune: bool = False) -> tuple[KeptImage, ...]:
    """Return the node templates that are stored in the cloud. With ``prune``, also delete them."""
    if not settings.is_cloud:
        return ()
    kept: tuple[KeptImage, ...] = _module(settings.type, "images").kept(settings, prune=prune)
    return kept


def cached_images(*, prune: bool = False, report: ProgressReporter) -> tuple[CachedImage, ...]:
    """Return the cached node images on this machine. With ``prune``, delete and return only unused
    images.
    """
    images: tuple[CachedImage, ...] = _module("local", "provider").cached_images(
        prune=prune, report=report
    )
    return images


def clusters_on_this_machine() -> tuple[tuple[ClusterState, bool], ...]:
    """Return (cluster, whether its workspace folder was lost) for each local cluster of the
    caller.
    """
    local = _module("local", "provider")
    # Workspaces of other accounts can't be read, so it is unknown whether their clusters are
    # orphans.
    clusters = (cluster for cluster in local.clusters() if cluster.owner == os.getuid())
    return tuple((cluster, local.is_orphan(cluster)) for cluster in clusters)


def _module(provider: str, name: str) -> Any:
    return import_module(f"{__package__}.{provider}.{name}")
