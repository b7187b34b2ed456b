"""Looks at the hosts of a cluster, up or not: what keeps them from working, and how to mend it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from clusterctl.errors import NotUpError
from clusterctl.hosts import checks
from clusterctl.hosts.checks import DoctorReport, Finding
from clusterctl.hosts.cluster_checks import expected, host_facts_request, reject_unknown_hosts
from clusterctl.providers.base import Provider
from clusterctl.providers.onprem import left_behind
from clusterctl.scheduler.session import inventory_of
from clusterctl.spec import ClusterSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.connections import Connections

_TIMEOUT_S = 60.0
_OF_DRIVER = frozenset({"no-driver", "reboot-needed", "secure-boot", "fabric-manager"})


def checkup(
    spec: ClusterSpec, workspace: Workspace, provider: Provider, *, hosts: Collection[str] = ()
) -> DoctorReport:
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
        return _with_left(before, workspace, hosts)
    with Connections(workspace.ssh_config) as connections:
        return _with_left(_of_cluster(spec, inventory, connections, hosts), workspace, hosts)


def _with_left(report: DoctorReport, workspace: Workspace, hosts: Collection[str]) -> DoctorReport:
    """With the machines that the cluster has left behind."""
    found = tuple(
        Finding(one.host.name, "warning", "left-behind", f"{one.place} was left behind", one.why, one.fix)
        for one in left_behind.found(workspace)
        if not hosts or one.host.name in hosts
    )
    return replace(report, findings=(*report.findings, *found))


def driver_findings(spec: ClusterSpec, inventory: Inventory, connections: Connections) -> tuple[Finding, ...]:
    """What a driver of NVIDIA that the spec asks for still needs on some nodes, such as a reboot."""
    if not spec.software.nvidia.has_driver:
        return ()
    report = _of_cluster(spec, inventory, connections, [host.name for host in inventory.compute])
    return tuple(finding for finding in report.findings if finding.code in _OF_DRIVER)


def _of_cluster(
    spec: ClusterSpec, inventory: Inventory, connections: Connections, hosts: Collection[str]
) -> DoctorReport:
    """Through the account that every host of a cluster has."""
    reject_unknown_hosts(hosts, inventory.hosts)

    def root(host: str, argv: Sequence[str], stdin: bytes) -> str:
        return connections.to(host).run(("sudo", "-n", *argv), stdin=stdin, timeout_s=_TIMEOUT_S).stdout

    return checks.examine(
        host_facts_request(spec, inventory.hosts),
        expected(spec, inventory.hosts, installed=[host.name for host in inventory.hosts]),
        root,
        leader=inventory.controller.name,
        only=hosts,
    )
