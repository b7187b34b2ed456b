"""Releasing machines: remove the cluster and the record of it, check that no file remains."""

from __future__ import annotations

import getpass
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import (
    ClusterctlError,
    ConfigureError,
    Notice,
    ProvisionError,
)
from clusterctl.hosts.roles import own_paths
from clusterctl.providers.base import (
    REPLACED,
    Leftover,
    Orphan,
    OrphanSearch,
    PendingRelease,
    address_of,
    load_known_hosts,
    load_known_inventory,
    pending_releases,
    reject_unknown_keys,
)
from clusterctl.providers.onprem.access import raise_failures, ssh_host
from clusterctl.providers.onprem.login import Login
from clusterctl.providers.onprem.members import claim_on, is_silent, shared_folder
from clusterctl.providers.onprem.remote_claim import claim_origin
from clusterctl.spec.hosts import OnpremHost, is_this_machine
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory
from clusterctl.state.removal import record_machines
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.transport.sudo import SudoError
from clusterctl.util.assets import digest
from clusterctl.util.numbers import counted
from clusterctl.util.process import call_on_hosts
from clusterctl.util.progress import HostStep

NOT_RELEASED: Final = "could not be released"
THEN: Final = (
    "then run `clusterctl down` again: it skips released machines; for a machine that is gone "
    "for good, pass --forget HOST"
)
_THEN_UP: Final = "then run `clusterctl up` again: it skips the machines that are released"
_SCRIPTS: Final = Path(__file__).with_name("data")
_LIST_TRACES: Final = (_SCRIPTS / "look.sh").read_text()
_LIST_RUNNING: Final = (_SCRIPTS / "running.sh").read_text()


def release_all(login: Login) -> None:
    """Remove clusterctl from all machines of the cluster. Raise an error if any
    failed.
    """
    inventory = load_known_inventory(login.workspace)
    if inventory is None:
        return
    names = [host.name for host in inventory.hosts]
    login.prompts.reporter.progress(f"checking {counted(len(names), 'machine')}")
    released, unasked, failed = _release(names, inventory, login)
    for host in released:
        login.prompts.reporter.progress(HostStep(host, "released", len(names)))
    raise_failures({**unasked, **failed}, summary=NOT_RELEASED, then=THEN)


def _with_present_keys(inventory: Inventory, login: Login, trusted: Collection[str]) -> Inventory:
    """Return the inventory with the keys that the owner trusts now, of the hosts ``trusted``."""
    hosts = (
        replace(host, host_key=login.key_of(host.name)) if host.name in trusted else host
        for host in inventory.hosts
    )
    return replace(inventory, hosts=tuple(hosts))


def _release(
    names: Sequence[str], inventory: Inventory, login: Login
) -> tuple[Collection[str], Mapping[str, ClusterctlError], Mapping[str, ClusterctlError]]:
    """Remove the cluster and its claim from the machines that belong to it.

    Return the released machines, and two mappings of machines to errors: of those to which no login
    was possible, and of all others that were not released.
    """
    workspace = login.workspace
    lost = login.trust(names)
    reachable = [name for name in names if name not in lost]
    inventory = _with_present_keys(inventory, login, reachable)
    write_ssh_files(inventory, workspace)
    is_ours_by_host, failed = call_on_hosts(
        reachable, lambda host: _is_ours(host, login, inventory.cluster_id)
    )
    ours = [host for host, is_ours in is_ours_by_host.items() if is_ours]
    record_machines(workspace, changed=ours, released={*is_ours_by_host}.difference(ours))
    not_removed = _remove_cluster(ours, inventory, login)
    removed = [host for host in ours if host not in not_removed]
    released, still_claimed = call_on_hosts(
        removed, lambda host: login.leave(host, inventory.cluster_id)
    )
    record_machines(workspace, released=released)
    refused = {host: exc for host, exc in failed.items() if _has_logged_in(exc)}
    unasked = {host: exc for host, exc in {**lost, **failed}.items() if host not in refused}
    return released, unasked, {**refused, **not_removed, **still_claimed}


def release_removed(inventory: Inventory, login: Login) -> Mapping[str, str]:
    """Release machines of the last `up` that ``inventory`` lacks. Return unreachable machine ->
    reason.
    """
    previous = load_known_inventory(login.workspace)
    hosts = previous.hosts if previous else ()
    removed = [host.name for host in hosts if inventory.host(host.name) is None]
    if previous is None or not removed:
        return {}
    login.prompts.reporter.progress(f"releasing {', '.join(removed)}")
    _, absent, failed = _release(removed, previous, login)
    raise_failures(failed, summary=NOT_RELEASED, then=_THEN_UP)
    return {
        host: "it does not answer" if is_silent(exc) else exc.cause for host, exc in absent.items()
    }


def _has_logged_in(error: ClusterctlError) -> bool:
    return isinstance(error, SudoError) or error.about == "claim"


def find_leftovers(login: Login, cluster_id: str) -> tuple[Leftover, ...]:
    """Return clusterctl's remaining files on the machines, as far as the owners can see them."""
    hosts = list(load_known_hosts(login.workspace)) or list(login.hosts)
    hosts = [host for host in hosts if host in login.hosts]
    lost = login.trust(hosts)
    reachable = [host for host in hosts if host not in lost]
    traces, failed = call_on_hosts(reachable, lambda host: _traces_on(host, login, cluster_id))
    leftovers = [Leftover(f"{host}: {trace}") for host, lines in traces.items() for trace in lines]
    failures = {host: exc.cause for host, exc in {**lost, **failed}.items()}
    return (
        *leftovers,
        *(Leftover(f"{host}: not checked: {reason}") for host, reason in failures.items()),
    )


def _traces_on(host: str, login: Login, cluster_id: str) -> Sequence[str]:
    """Return clusterctl's files on a host. Empty if the host now belongs to another cluster."""
    claim = claim_on(host, login)
    if claim and claim.get("id") != cluster_id:
        return ()
    return login.run(host, ("sh", "-c", _LIST_TRACES, "sh", *sorted(own_paths()))).splitlines()


def _is_ours(host: str, login: Login, cluster_id: str) -> bool:
    """Return whether a host belongs to the cluster. If so, the owner can become root there."""
    if claim_on(host, login).get("id") != cluster_id:
        # The host has been released already, or never joined.
        return False
    login.root(host, ("true",))
    return True


def _remove_cluster(
    hosts: Sequence[str], inventory: Inventory, login: Login
) -> Mapping[str, ClusterctlError]:
    if not hosts:
        return {}
    try:
        login.prompts.remove_cluster(inventory, hosts, login.workspace, login.prompts.reporter)
    except ConfigureError as exc:
        failed: dict[str, ClusterctlError] = {
            str(failure.host): ConfigureError(
                exc.what,
                code=failure.code,
                about=failure.about,
                why=failure.cause,
                host=failure.host,
                failures=(failure,),
            )
            for failure in exc.failures
            if failure.host in hosts
        }
        if not failed:
            raise
        return failed
    return {}


def release_orphan(login: Login, settings: OnpremSettings, cluster_id: str) -> None:
    """Release the machines of a cluster with a lost workspace. ``login`` has a temporary
    workspace.
    """
    # `find_leftovers` names the hosts that do not answer.
    claims, _ = _claims(login)
    claimed = {host: claim for host, claim in claims.items() if claim.get("id") == cluster_id}
    if not claimed:
        return
    workspace = login.workspace
    workspace.create_secrets()
    inventory = Inventory(
        cluster=next(iter(claimed.values())).get("name", ""),
        cluster_id=cluster_id,
        provider=settings.type,
        hosts=tuple(_claimed_host(host, settings, login) for host in claimed),
        network="",
        shared=settings.shared.path,
        shared_folder=shared_folder(settings, {settings.controller: ""}, alone=len(claimed) == 1),
        baked=False,
    )
    write_atomic(workspace.joining, inventory.text)
    write_ssh_files(inventory, workspace)
    release_all(login)


def _claimed_host(name: str, settings: OnpremSettings, login: Login) -> Host:
    target = ssh_host(name, settings.machines[name])
    host = Host(
        name=name,
        address=target.host,
        port=target.port,
        user=target.user or getpass.getuser(),
        key_file=target.key,
        roles=(CONTROLLER if name == settings.controller else COMPUTE,),
        host_key=login.key_of(name),
        proxy_command=login.proxies().get(name, ()),
    )
    return login.reached(host)


def find_orphans(login: Login, name: str) -> OrphanSearch:
    """Find the clusters called ``name`` that machines of ``login`` belong to, and what runs on
    them.
    """
    claims, failed = _claims(login)
    claimed = {host: claim for host, claim in claims.items() if claim.get("name") == name}
    running, not_asked = call_on_hosts(
        claimed, lambda host: login.run(host, ("sh", "-c", _LIST_RUNNING)).splitlines()
    )
    found: dict[str, Orphan] = {}
    for host, claim in claimed.items():
        if cluster_id := claim.get("id"):
            orphan = found.get(cluster_id) or Orphan(cluster_id, claim_origin(claim))
            lines = (f"{host}: {line}" for line in running.get(host, ()))
            found[cluster_id] = replace(orphan, running=(*orphan.running, *lines))
    failures = (
        replace(failure, host=host, phase="look")
        for host, exc in {**failed, **not_asked}.items()
        for failure in exc.failures
    )
    return OrphanSearch(tuple(found.values()), tuple(failures))


def _claims(
    login: Login,
) -> tuple[Mapping[str, Mapping[str, Any]], Mapping[str, ClusterctlError]]:
    """Return (host -> its claim, which is empty if the host belongs to no cluster; host -> error)."""
    lost = login.trust(login.hosts)
    reachable = [host for host in login.hosts if host not in lost]
    claims, failed = call_on_hosts(reachable, lambda host: claim_on(host, login))
    return claims, {**lost, **failed}


_TRACES: Final = "the machine still has the cluster's files and the records of them"


def record_pending(
    host: Host, inventory: Inventory, settings: OnpremSettings, workspace: Workspace, *, why: str
) -> PendingRelease:
    """Record that a host of ``inventory`` must be released later. ``settings``: for the login to
    the host.
    """
    target = Workspace(
        workspace.releases / f"{host.name}-{digest(address_of(host), host.host_key)[:8]}"
    )
    target.create()
    for path in (workspace.key, workspace.public_key, workspace.root / "id"):
        write_atomic(target.root / path.name, path.read_bytes())
    write_atomic(target.inventory, replace(inventory, hosts=(host,)).text)
    machine = machine_of(host, settings)
    # `save` makes the release pending, so it is the last step.
    return PendingRelease(target, host, machine, time.time(), why).save()


def machine_of(host: Host, settings: OnpremSettings) -> OnpremHost:
    """Return how to log in to a host: its entry in the spec if the address matches, or else
    `access`.
    """
    address = host.ssh_address or host.address
    machine = settings.machines.get(host.name)
    if machine is not None and ssh_host(host.name, machine).host == address:
        return machine
    # On this machine, no login is needed.
    if is_this_machine(address):
        return OnpremHost(address=address)
    return OnpremHost(address=address, **{**settings.access.model_dump(), "port": host.port})


def retry_all(hosts: Collection[Host], login: Login, *, ending: bool = False) -> tuple[Notice, ...]:
    """Try again to release machines that left the cluster but did not answer then. Return notes for
    the user.

    hosts: the cluster's hosts. A machine that is again among these hosts is not released. A machine
        with the host key of a host, but another address, may be that host, so clusterctl skips the
        machine.
    ending: whether clusterctl is also releasing ``hosts``. Then it skips no machine.
    """
    notes: list[Notice] = []
    for pending in pending_releases(login.workspace):
        if (outcome := _outcome_without_release(pending, hosts)) is not None:
            notes += outcome
            pending.remove()
            continue
        if not ending and (
            twins := [host for host in hosts if host.host_key == pending.host.host_key]
        ):
            names = ", ".join(f"{host.name} ({address_of(host)})" for host in twins)
            text = (
                f"{pending}; skipped, because {names} has the same host key and may be the same "
                f"machine; if so, run `clusterctl node forget {pending.host.name}`; if not, "
                "`clusterctl down` releases it"
            )
            notes.append(Notice("host-key-of-another", text))
            continue
        # Host keys that the user confirms for `up` belong to machines of the spec.
        careful = replace(login.prompts, confirm=reject_unknown_keys)
        login_for_release = Login({pending.host.name: pending.machine}, pending.workspace, careful)
        try:
            _release_pending(pending, login_for_release)
        except ClusterctlError as exc:
            updated = replace(pending, why=_reason(exc)).save()
            text = f"{updated}; `clusterctl up` and `clusterctl down` will try again"
            notes.append(Notice("still-pending", text))
        else:
            notes.append(Notice("late-release", f"{pending.title} was released from the cluster"))
            pending.remove()
    return tuple(notes)


def _outcome_without_release(
    pending: PendingRelease, hosts: Collection[Host]
) -> tuple[Notice, ...] | None:
    at_address = [host for host in hosts if address_of(host) == pending.address]
    by_name = [host for host in hosts if host.name == pending.host.name and pending.why != REPLACED]
    # The key alone is not enough: machines cloned from the same image share their host key.
    if any(host.host_key == pending.host.host_key for host in (*at_address, *by_name)):
        return ()
    if at_address:
        text = (
            f"{pending.title} could not be cleaned up, because another machine now has its address"
        )
        return (Notice("address-of-another", text),)
    return None


def _release_pending(pending: PendingRelease, login: Login) -> None:
    name = pending.host.name
    cluster_id = pending.workspace.cluster_id()
    if lost := login.trust([name]):
        raise lost[name]
    host = replace(pending.host, proxy_command=login.proxies().get(name, ()))
    inventory = Inventory.read(pending.workspace.inventory.read_bytes())
    inventory = replace(inventory, hosts=(host,))
    write_atomic(pending.workspace.inventory, inventory.text)
    release_all(login)
    if leftovers := find_leftovers(login, cluster_id):
        summary = f"clusterctl's files remain on {name}"
        reason = "; ".join(map(str, leftovers))
        raise ProvisionError(summary, code="leftovers", about="host", why=reason, host=name)


def _reason(exc: ClusterctlError) -> str:
    """Return why a machine could not be released, and which parts of clusterctl the machine still
    has.
    """
    if is_silent(exc):
        return f"it does not answer; {_TRACES}"
    return f"{'; '.join(dict.fromkeys(failure.cause for failure in exc.failures))}; {_TRACES}"
