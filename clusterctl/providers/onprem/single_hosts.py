"""Specs with which `up` adds, changes or removes only single machines of a cluster."""

from __future__ import annotations

import itertools
from collections.abc import Collection

from clusterctl.errors import UsageError
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import reject_unknown
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import applied_spec, inventory_of
from clusterctl.state.workspace import Workspace


def limited(
    spec: ClusterSpec, provider: OnpremSettings, workspace: Workspace, limit: Collection[str]
) -> ClusterSpec:
    """Return the spec, changed so that only the hosts in ``limit`` change. All other hosts stay as
    they are.

    Raise UsageError if the spec lacks such a host.
    """
    nodes_of_spec = {p.name: spec.node_names(p) for p in spec.partitions}
    known_names = (*provider.machines, *itertools.chain(*nodes_of_spec.values()))
    hint = "add it to provider.hosts and to a partition"
    reject_unknown(limit, known_names, "the spec has no host", hint, where="--limit")
    partition_of: dict[str, str | None] = {}
    if workspace.inventory.exists():
        partition_of = {host.name: host.partition for host in inventory_of(workspace).compute}
        # Hosts that stay may be missing in the new spec.
        machines = applied_spec(workspace).provider.machines
        staying = {
            name: machines[name]
            for name in partition_of
            if name in machines and name not in provider.machines
        }
        provider = provider.model_copy(update={"hosts": {**provider.hosts, **staying}})
    elif provider.controller not in limit:
        raise UsageError(
            f"the controller {provider.controller} must be configured first",
            code="not-ready",
            about="controller",
            where="--limit",
            why="no host of the cluster is up yet",
            fix=f"include the controller: --limit {provider.controller},{','.join(limit)}",
        )
    nodes = {}
    for partition, names in nodes_of_spec.items():
        kept = [name for name in names if name in limit or partition_of.get(name) == partition]
        staying_nodes = [
            name
            for name, former_partition in partition_of.items()
            if former_partition == partition and name not in (*limit, *names)
        ]
        nodes[partition] = [*kept, *staying_nodes]
    return _with_nodes(spec.model_copy(update={"provider": provider}), nodes)


def without(spec: ClusterSpec, provider: OnpremSettings, names: Collection[str]) -> ClusterSpec:
    """Return the spec without these nodes. UsageError: a node is the controller, or no node is
    left.
    """
    if provider.controller in names:
        raise UsageError(
            f"{provider.controller} can't be removed: it is the controller",
            code="unsupported",
            about="controller-removal",
            fix="take the cluster down, and create it again with another controller",
        )
    remaining = {p.name: [n for n in spec.node_names(p) if n not in names] for p in spec.partitions}
    login = tuple(name for name in provider.login if name not in names)
    return _with_nodes(
        spec.model_copy(update={"provider": provider.model_copy(update={"login": login})}),
        remaining,
    )


def _with_nodes(spec: ClusterSpec, nodes: dict[str, list[str]]) -> ClusterSpec:
    """Return the spec with these nodes in its partitions (partition -> nodes), without empty
    partitions. A partition that has these nodes already stays as it is written.
    """
    partitions = tuple(
        p
        if [*spec.node_names(p)] == nodes[p.name]
        else p.model_copy(update={"hosts": ",".join(nodes[p.name]), "nodes": len(nodes[p.name])})
        for p in spec.partitions
        if nodes[p.name]
    )
    if not partitions:
        fix = "keep a node in a partition, or take the whole cluster down: `clusterctl down`"
        raise UsageError(
            "the cluster would have no nodes left",
            code="unsupported",
            about="last-node",
            fix=fix,
        )
    return spec.model_copy(update={"partitions": partitions})
