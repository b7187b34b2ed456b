"""Looks at the hosts of a cluster, up or not: what keeps them from working, and how to mend it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from clusterctl import doctor
from clusterctl.access import inventory_of
from clusterctl.doctor import Report
from clusterctl.doctor.cluster import asked, expected
from clusterctl.errors import NotUpError, UsageError
from clusterctl.inventory import Inventory
from clusterctl.providers.base import Provider
from clusterctl.spec import ClusterSpec
from clusterctl.transport.connections import Connections
from clusterctl.workspace import Workspace

_TIMEOUT_S = 60.0


def checkup(
    spec: ClusterSpec, workspace: Workspace, provider: Provider, *, hosts: Collection[str] = ()
) -> Report:
    """What is wrong with the hosts, or with those of ``hosts``; nothing is changed.

    Raises:
        NotUpError: there is nothing to look at yet.
        UsageError: the cluster has no such host.
    """
    try:
        inventory = inventory_of(workspace)
    except NotUpError:
        before = provider.examine(spec, workspace, hosts=hosts)
        if before is None:
            raise
        return before
    with Connections(workspace.ssh_config) as connections:
        return _of_cluster(spec, inventory, connections, hosts)


def _of_cluster(
    spec: ClusterSpec, inventory: Inventory, connections: Connections, hosts: Collection[str]
) -> Report:
    """Through the account that every host of a cluster has."""
    refuse_strangers(hosts, [host.name for host in inventory.hosts])

    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        return connections.to(host).run(("sudo", "-n", *argv), stdin=stdin, timeout_s=_TIMEOUT_S).stdout

    return doctor.examine(
        asked(spec, inventory.hosts),
        expected(spec, inventory.hosts, installed=True),
        root,
        leader=inventory.controller.name,
        only=hosts,
    )


def refuse_strangers(asked_for: Collection[str], known: Sequence[str]) -> None:
    """That every host that is asked for is one of the cluster's.

    Raises:
        UsageError: one is not.
    """
    if strangers := [host for host in asked_for if host not in known]:
        raise UsageError(
            f"the cluster has no host {', '.join(strangers)}",
            why=f"its hosts are {', '.join(known)}",
            fix="name some of these, or none for all",
        )
