"""Machines go back to their owners: what was is put back, our account goes, and a look proves that it has."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Final

from pydantic import ValidationError

from clusterctl.errors import ClusterctlError, CommandError, ConfigureError, UnreachableError
from clusterctl.providers.base import Leftover
from clusterctl.providers.onprem.access import Access, each, refuse
from clusterctl.providers.onprem.account import Claim, join, leave, told
from clusterctl.providers.onprem.hands import Hands
from clusterctl.providers.onprem.look import admin, known_hosts
from clusterctl.providers.onprem.this_machine import is_installation
from clusterctl.providers.onprem.way_in import WayIn, place
from clusterctl.spec import OnpremProvider as Settings
from clusterctl.spec.models import ADMIN_USER
from clusterctl.state.inventory import Host, Inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.ssh_files import write_ssh_files
from clusterctl.util.progress import HostStep, Reporter

CLAIM: Final = "/etc/clusterctl/cluster.json"
NOT_GIVEN_BACK: Final = "could not be given back"
THEN: Final = (
    "then run `clusterctl down` again: what is done stays done; one that is gone for good: --forget HOST"
)
_THEN_UP: Final = "then run `clusterctl up` again: what is done stays done"
# As an ordinary user, and without our programs or records. Local clusters have a folder of their own there.
_LOOK: Final = r"""
getent passwd USER >/dev/null && echo "the account USER"
find /etc /opt /usr/local /var/lib /var/log -xdev -name '*clusterctl*' ! -name '*.clusterctl-kept*' \
    ! -path /var/lib/clusterctl -prune -print 2>/dev/null
grep -ls clusterctl /etc/hosts /etc/fstab /etc/exports /etc/slurm/*.conf 2>/dev/null |
    sed 's/$/: lines of ours/'
exit 0
""".replace("USER", ADMIN_USER)


def all_of_it(way: WayIn, cluster_id: str, workspace: Workspace, hands: Hands, *, report: Reporter) -> None:
    """Give back every machine of a cluster.

    Raises:
        ProvisionError: some could not be; one failure each. The others are.
    """
    inventory = as_raised(workspace)
    if inventory is None:
        return
    names = [host.name for host in inventory.hosts]
    write_ssh_files(inventory, workspace)
    claim = way.claim(cluster_id, inventory.cluster)
    report(f"looking at {len(names)} machines")
    ours, failed = each(names, lambda host: _is_ours(host, way.access, claim, workspace))
    failed |= _restored(
        [host for host, is_ours in ours.items() if is_ours], inventory, workspace, hands, report
    )
    leaving = [host for host, is_ours in ours.items() if is_ours and host not in failed]
    done, more = each(leaving, lambda host: leave(host, claim, admin(workspace)))
    for host in done:
        report(HostStep(host, "given back", len(names)))
    refuse({**failed, **more}, what=NOT_GIVEN_BACK, then=THEN)


def dismissed(
    wanted: Inventory, workspace: Workspace, hands: Hands, *, report: Reporter
) -> Mapping[str, str]:
    """Give back the machines that are no longer part of the cluster; why nothing was done on some.

    Raises:
        ProvisionError: one could not be given back, though it answers.
    """
    before = as_raised(workspace)
    going = [host.name for host in before.hosts if wanted.host(host.name) is None] if before else []
    if before is None or not going:
        return {}
    report(f"giving {', '.join(going)} back")
    write_ssh_files(before, workspace)
    claim = Claim(before.cluster_id, before.cluster, workspace.public_key.read_text().strip())
    _, failed = each(going, lambda host: _log_in(host, workspace))
    there = [host for host in going if host not in failed]
    absent = {host: exc for host, exc in failed.items() if not isinstance(exc, CommandError)}
    failed = {host: exc for host, exc in failed.items() if host not in absent}
    failed |= _restored(there, before, workspace, hands, report)
    _, more = each([h for h in there if h not in failed], lambda host: leave(host, claim, admin(workspace)))
    refuse({**failed, **more}, what=NOT_GIVEN_BACK, then=_THEN_UP)
    return {host: _absent(exc) for host, exc in absent.items()}


def _absent(exc: ClusterctlError) -> str:
    """Why nothing was done on a machine that goes.

    One that a run gave back which then ended too soon lets us in no more; nothing may wait for it.
    """
    return "it does not answer" if isinstance(exc, UnreachableError) else told(exc)


def any_alive(workspace: Workspace) -> bool:
    """Whether any machine of the cluster answers, whatever it says."""
    _, failed = each(list(known_hosts(workspace)), lambda host: _log_in(host, workspace))
    return not all(isinstance(exc, UnreachableError) for exc in failed.values()) or (
        len(failed) < len(known_hosts(workspace))
    )


def leftovers(
    settings: Settings, cluster_id: str, workspace: Workspace | None, hands: Hands
) -> tuple[Leftover, ...]:
    """What an ordinary user sees of us on the machines, by their owner's way in."""
    with place(workspace) as folder:
        way = WayIn(settings, folder, hands)
        hosts = list(known_hosts(folder)) or list(way.hosts)
        hosts = [host for host in hosts if host in way.hosts]
        lost = way.trust(hosts)
        asked = [host for host in hosts if host not in lost]
        seen, failed = each(asked, lambda host: _left_on(host, way.access, cluster_id))
    found = [Leftover(f"{host}: {what}") for host, lines in seen.items() for what in lines]
    unseen = [Leftover(f"{h}: nobody can look there: {told(e)}") for h, e in {**lost, **failed}.items()]
    return (*found, *unseen)


def _left_on(host: str, access: Access, cluster_id: str) -> Sequence[str]:
    """What is there of us, unless another cluster has the machine by now."""
    claim = claim_on(host, access)
    if claim and claim.get("id") != cluster_id:
        return ()
    lines = access.run(host, ("sh", "-c", _LOOK)).splitlines()
    return [line for line in lines if not (access.is_here(host) and is_installation(line))]


def claim_on(host: str, access: Access) -> Mapping[str, str]:
    """Whose the machine is, as it says itself; empty if it is nobody's."""
    try:
        found = json.loads(access.run(host, ("cat", CLAIM)))
    except (CommandError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _is_ours(host: str, access: Access, claim: Claim, workspace: Workspace) -> bool:
    """Whether there is something to give back, with our account able to do it.

    Raises:
        ClusterctlError: nobody can tell.
    """
    try:
        _log_in(host, workspace)
    except UnreachableError:
        raise
    except ClusterctlError:
        if claim_on(host, access).get("id") != claim.cluster_id:
            return False  # it has been given back, or never was ours
        join(host, access.root, claim, admin(workspace))
    return True


def _log_in(host: str, workspace: Workspace) -> None:
    transport = admin(workspace)(host)
    try:
        transport.run(("sudo", "-n", "true"))
    finally:
        transport.close()


def _restored(
    hosts: Sequence[str], inventory: Inventory, workspace: Workspace, hands: Hands, report: Reporter
) -> Mapping[str, ClusterctlError]:
    """Have what was put back on these; those where it failed."""
    if not hosts:
        return {}
    try:
        notes = hands.restore(inventory, hosts, workspace, report)
    except ConfigureError as exc:
        sick = {failure.host: failure for failure in exc.failures if failure.host in hosts}
        if not sick:
            raise
        return {
            str(host): ConfigureError(exc.what, why=f.cause, fix=f.fix, host=host, failures=(f,))
            for host, f in sick.items()
        }
    for host, lines in notes.items():
        for line in lines:
            hands.told(f"left on {host}: {line}")
    return {}


def as_raised(workspace: Workspace) -> Inventory | None:
    """The cluster as it was raised last, with the machines that an `up` was about to take."""
    found: Inventory | None = None
    for path in (workspace.joining, workspace.hosts):
        try:
            found = Inventory.model_validate_json(path.read_bytes())
        except (FileNotFoundError, ValidationError):
            continue
    if found is None:
        return None
    hosts: Mapping[str, Host] = {**known_hosts(workspace), **{host.name: host for host in found.hosts}}
    return found.model_copy(update={"hosts": tuple(hosts.values())})
