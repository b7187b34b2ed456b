"""`up` with a bundle in place of the internet: its two phases, before and after the hosts are reached."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.cluster.phases import Run
from clusterctl.configure import inventory_file, ship
from clusterctl.errors import UsageError
from clusterctl.hosts.report import HostReport
from clusterctl.packages import bundle
from clusterctl.spec import ClusterSpec, OnpremProvider
from clusterctl.spec.models import Software
from clusterctl.state.inventory import Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.connections import Connections


@dataclass(frozen=True, slots=True)
class Packages:
    """Where hosts get their packages from: a ``bundle``, or ``own`` repositories; else as before."""

    bundle: Path | None = None
    own: bool = False


AS_BEFORE: Final = Packages()


def refuse_made_hosts(spec: ClusterSpec, *, fix: str) -> None:
    """That a spec's hosts are those that are installed from bundles.

    Raises:
        UsageError: its provider makes them.
    """
    if not isinstance(spec.provider, OnpremProvider):
        raise UsageError(
            f"a bundle is for machines of your own, and the provider is {spec.provider.type}", fix=fix
        )


def take_bundle(
    packages: Packages, spec: ClusterSpec, workspace: Workspace, run: Run
) -> bundle.Bundle | None:
    """The bundle that is given, or that was; a phase only where there is one.

    Raises:
        BundleError: it is damaged, or not for this.
        UsageError: the provider's hosts are not installed from bundles.
    """
    if packages.bundle is not None:
        refuse_made_hosts(spec, fix="leave --bundle out")
    if packages.own:
        bundle.forget(workspace)
    known = bundle.remembered(workspace)
    file = packages.bundle or (known.file if known else None)
    if file is None or (packages.bundle is None and not file.exists()):
        return None
    with run.phase("bundle") as (step, report):
        taken = bundle.take(file, spec, workspace, report=report)
        step.note = f"{file.name}, for {', '.join(taken.manifest.systems)}"
    return taken


def bring_packages(
    packed: bundle.Bundle | None,
    inventory: Inventory,
    workspace: Workspace,
    connections: Connections,
    run: Run,
    *,
    software: Software,
    views: Mapping[str, HostReport],
) -> None:
    """Have the bundle's repository on the hosts that have something to install.

    Raises:
        BundleError: the bundle is gone, or has nothing for some host's distribution.
        TransportError: it could not be sent to some hosts.
    """
    if not workspace.bundle.exists() or inventory.baked:
        return
    with run.phase("packages") as (step, report):
        counted = inventory.compute if software.nvidia.installs else ()
        with_cards = [host.name for host in counted if views[host.name].cards]
        mark = inventory_file.install_mark(inventory, software)
        hosts = ship.lacking(inventory, mark, connections.to, with_cards=with_cards)
        if hosts and packed is None:
            raise bundle.gone(workspace)
        sent = ship.ship(packed, hosts, connections.to, report=report) if packed and hosts else ()
        step.note = f"sent to {len(sent)} hosts" if sent else "nothing to send"
