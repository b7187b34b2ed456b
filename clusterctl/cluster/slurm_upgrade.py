"""Upgrade Slurm in place, or take an upgrade back, as `slurm.version` of the spec asks for it.

On each host a program exchanges the packages and starts the daemons (the role slurm_upgrade): on the
controller first, slurmdbd before slurmctld, with a copy of the accounting and of slurmctld's state; then on
the nodes, which serve the newer controller meanwhile. Waiting and running jobs are kept. Where a step fails,
the former Slurm runs again. What must be known before, slurm_upgrade_plan.py finds out.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress
from typing import Final

from clusterctl.cluster.session import ClusterSession, write_inventory
from clusterctl.cluster.slurm_upgrade_plan import Upgrade, fetch_packages, going_on, hosts_to_exchange
from clusterctl.configure import ansible, inventory_file
from clusterctl.errors import ConfigureError, TransportError
from clusterctl.state.inventory import Host, Inventory

_RUN_AGAIN: Final = (
    "cd /var/lib/clusterctl-slurm || exit 0; "
    "[ ! -e restored/served ] || squeue -aht running,suspended -o %A | xargs -rn1 scontrol requeue; "
    "rm -rf restored"
)
_HAS_PMIX: Final = "ls /usr/lib*/slurm*/mpi_pmix*.so /usr/lib/*/slurm*/mpi_pmix*.so"


def upgrade_first(
    session: ClusterSession, upgrade: Upgrade | None, inventory: Inventory, limit: Collection[str]
) -> Inventory:
    """What is upgraded before hosts are configured: the controller, and on the way back all hosts.

    An older controller does not serve newer nodes.
    """
    if upgrade is None:
        return inventory
    inventory = session.phase(upgrade_controller, upgrade, inventory)
    if upgrade.is_back:
        return session.phase(upgrade_nodes, upgrade, inventory, limit)
    # Nothing can be configured where packages are half installed.
    cut_off = going_on(session, _others(inventory), limit)
    return session.phase(upgrade_nodes, upgrade, inventory, cut_off) if cut_off else inventory


def upgrade_then(
    session: ClusterSession, upgrade: Upgrade | None, inventory: Inventory, limit: Collection[str]
) -> Inventory:
    """What is upgraded once hosts are configured for what the newer Slurm lacks: the nodes.

    After a way back the state from before takes jobs for running that were ended: they run again.
    """
    if upgrade is None:
        return inventory
    if not upgrade.is_back:
        inventory = session.phase(upgrade_nodes, upgrade, inventory, limit)
    # Not before: a slurmctld that is restarted forgets to start what is in its prologue.
    argv = ["sudo", "-n", "sh", "-c", _RUN_AGAIN]
    session.connections.to(inventory.controller.name).run(argv, check=False)
    return _recorded(session, inventory, slurm=upgrade.new) if upgrade.is_back else inventory


def upgrade_controller(session: ClusterSession, upgrade: Upgrade, inventory: Inventory) -> Inventory:
    controller = inventory.controller
    if hosts_to_exchange(session, upgrade, [controller]):
        if not upgrade.is_back:  # killed from here on, it is upgraded, or about to be
            inventory = _recorded(session, inventory, slurm=upgrade.new)
        try:
            _exchange(session, upgrade, inventory, [controller])
        except ConfigureError:
            with suppress(TransportError):  # it is recorded as upgraded unless the former Slurm runs again
                if not going_on(session, [controller]):
                    goes_on = upgrade.old == upgrade.new
                    former = upgrade.distribution.slurm if goes_on else upgrade.old
                    _recorded(session, inventory, slurm=former or upgrade.old)
            raise
        session.note = f"{upgrade.new} on {controller.name}"
    else:
        session.note = "unchanged"
    plugins = session.connections.to(controller.name).run(["sh", "-c", _HAS_PMIX], check=False).stdout
    known = upgrade.old if upgrade.is_back else upgrade.new
    return _recorded(session, inventory, slurm=known, pmix=bool(plugins))


def upgrade_nodes(
    session: ClusterSession, upgrade: Upgrade, inventory: Inventory, limit: Collection[str]
) -> Inventory:
    if hosts := hosts_to_exchange(session, upgrade, _others(inventory), limit):
        _exchange(session, upgrade, inventory, hosts)
    session.note = f"{upgrade.new} on {len(hosts)} hosts" if hosts else "unchanged"
    # The end of the way back is recorded once jobs run again, too.
    return inventory if upgrade.is_back else _recorded(session, inventory, slurm=upgrade.new)


def _others(inventory: Inventory) -> list[Host]:
    return [host for host in inventory.hosts if not host.is_controller]


def _recorded(session: ClusterSession, inventory: Inventory, **values: object) -> Inventory:
    done = inventory.model_copy(update=values)
    write_inventory(session.spec, done, session.workspace)
    return done


def _exchange(
    session: ClusterSession, upgrade: Upgrade, inventory: Inventory, hosts: Collection[Host]
) -> None:
    has_packages = going_on(session, hosts)
    if not upgrade.is_back and (without := [host for host in hosts if host.name not in has_packages]):
        fetch_packages(session, upgrade, without)
    inventory_file.write_ansible_inventory(session.spec, inventory, session.workspace)
    ansible.run(
        "upgrade_slurm",
        inventory,
        session.workspace,
        limit=[host.name for host in hosts],
        progress=lambda task: session.report(task.step(len(hosts))),
    )
