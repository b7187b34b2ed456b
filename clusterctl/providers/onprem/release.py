"""Releasing machines: remove the cluster, remove the admin account, check that no file
remains.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import (
    ClusterctlError,
    CommandError,
    ConfigureError,
    Notice,
    ProvisionError,
    UnreachableError,
)
from clusterctl.hosts.roles import CLAIM
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
from clusterctl.providers.onprem.access import AccessError, raise_failures, ssh_host
from clusterctl.providers.onprem.login import (
    Claim,
    Login,
    check_sudo,
    create_account,
    is_installation,
    remove_account,
)
from clusterctl.providers.onprem.members import (
    admin_login,
    log_in,
    shared_folder,
)
from clusterctl.providers.onprem.remote_account import RefusedError, claim_origin, parse_claim
from clusterctl.spec.hosts import OnpremHost, is_this_machine
from clusterctl.spec.names import ADMIN_USER
from clusterctl.spec.providers.onprem import OnpremSettings
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory
from clusterctl.state.removal import record_released
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.base import Connect
from clusterctl.transport.openssh import write_ssh_files
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


def release_all(login: Login, cluster_id: str) -> None:
    """Remove clusterctl from all machines of the cluster. Raise an error if any
    failed.
    """
    inventory = load_known_inventory(login.workspace)
    if inventory is None:
        return
    names = [host.name for host in inventory.hosts]
    inventory = _with_accepted_keys(inventory, login)
    write_ssh_files(inventory, login.workspace)
    claim = login.claim(cluster_id, inventory.cluster)
    login.prompts.reporter.progress(f"checking {counted(len(names), 'machine')}")
    is_ours_by_host, failed = call_on_hosts(names, lambda host: _is_ours(host, login, claim))
    ours = [host for host, is_ours in is_ours_by_host.items() if is_ours]
    released, account_failures = _release(ours, inventory, claim, login)
    record_released(login.workspace, [*set(names).difference(failed, ours), *released])
    for host in released:
        login.prompts.reporter.progress(HostStep(host, "released", len(names)))
    raise_failures({**failed, **account_failures}, summary=NOT_RELEASED, then=THEN)


def _with_accepted_keys(inventory: Inventory, login: Login) -> Inventory:
    """Return the inventory with the host keys that changed and that the user accepts."""
    remote = [host for host in inventory.hosts if host.name in login.hosts]
    remote = [host for host in remote if not login.is_here(host.name)]
    if not login.prompts.accepted or not remote:
        return inventory
    lost = login.trust([host.name for host in remote])
    keys = {host.name: login.key_of(host.name) for host in remote if host.name not in lost}
    hosts = (replace(host, host_key=keys.get(host.name, host.host_key)) for host in inventory.hosts)
    return replace(inventory, hosts=tuple(hosts))


def _release(
    hosts: Sequence[str], inventory: Inventory, claim: Claim, login: Login
) -> tuple[Collection[str], Mapping[str, ClusterctlError]]:
    connect = admin_login(login.workspace)
    # Its claim says whether the machine had the account before.
    claimed, damaged = call_on_hosts(hosts, lambda host: _claim_seen_by(host, connect))
    failed = _remove_cluster(list(claimed), inventory, login)
    removed = [host for host in claimed if host not in failed]
    released, account_failures = call_on_hosts(
        removed, lambda host: remove_account(host, claim, connect)
    )
    return released, {**damaged, **failed, **account_failures}


def release_removed(inventory: Inventory, login: Login) -> Mapping[str, str]:
    """Release machines of the last `up` that ``inventory`` lacks. Return unreachable machine ->
    reason.
    """
    workspace = login.workspace
    previous = load_known_inventory(workspace)
    removed = (
        [host.name for host in previous.hosts if inventory.host(host.name) is None]
        if previous
        else []
    )
    if previous is None or not removed:
        return {}
    login.prompts.reporter.progress(f"releasing {', '.join(removed)}")
    write_ssh_files(previous, workspace)
    claim = Claim(previous.cluster_id, previous.cluster, workspace.public_key.read_text().strip())
    answering, failed = log_in(removed, workspace)
    # A machine that an interrupted run released refuses the login. It must not stop this run.
    absent = {host: exc for host, exc in failed.items() if not isinstance(exc, CommandError)}
    _, release_failures = _release(list(answering), previous, claim, login)
    refused = {host: exc for host, exc in failed.items() if host not in absent}
    raise_failures({**refused, **release_failures}, summary=NOT_RELEASED, then=_THEN_UP)
    return {
        host: "it does not answer" if isinstance(exc, UnreachableError) else exc.cause
        for host, exc in absent.items()
    }


def find_leftovers(login: Login, cluster_id: str) -> tuple[Leftover, ...]:
    """Return clusterctl's remaining files and accounts on the machines, as far as the owners can
    see them.
    """
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
    """Return clusterctl's files and accounts on a host. Empty if the host now belongs to another
    cluster.
    """
    claim = claim_on(host, login)
    if claim and claim.get("id") != cluster_id:
        return ()
    lines = login.run(host, ("sh", "-c", _LIST_TRACES, "sh", ADMIN_USER)).splitlines()
    return [line for line in lines if not (login.is_here(host) and is_installation(line))]


# Prints a new line after the file, so that an empty file differs from a missing one.
_READ_CLAIM: Final = ("sh", "-c", '[ ! -e "$1" ] || { cat "$1" && echo; }', "sh", CLAIM)


def claim_on(host: str, login: Login) -> Mapping[str, Any]:
    """Read a host's claim file, which names the host's cluster. Empty if the file does not exist.
    Raise an AccessError if it is damaged.
    """
    return _parse_claim(host, login.run(host, _READ_CLAIM))


def _claim_seen_by(host: str, connect: Connect) -> Mapping[str, Any]:
    """Read the claim as ``claim_on`` does, as the admin account."""
    with closing(connect(host)) as transport:
        return _parse_claim(host, transport.run(_READ_CLAIM).stdout)


def _parse_claim(host: str, text: str) -> Mapping[str, Any]:
    try:
        return parse_claim(text) if text else {}
    except RefusedError as exc:
        raise AccessError.of(host, exc.code, exc.cause, exc.fix) from exc


def _is_ours(host: str, login: Login, claim: Claim) -> bool:
    try:
        check_sudo(admin_login(login.workspace)(host))
    except UnreachableError:
        raise
    except ClusterctlError:
        if claim_on(host, login).get("id") != claim.cluster_id:
            # The host has been released already, or never joined.
            return False
        create_account(host, login.root, claim, admin_login(login.workspace))
    return True


def _remove_cluster(
    hosts: Sequence[str], inventory: Inventory, login: Login
) -> Mapping[str, ClusterctlError]:
    if not hosts:
        return {}
    try:
        notes = login.prompts.remove_cluster(
            inventory, hosts, login.workspace, login.prompts.reporter
        )
    except ConfigureError as exc:
        failed: dict[str, ClusterctlError] = {
            str(failure.host): ConfigureError(
                exc.what,
                code=failure.code,
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
    for host, line in ((host, line) for host, lines in notes.items() for line in lines):
        login.prompts.reporter.note(f"left on {host}: {line}")
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
    claim = login.claim(cluster_id, inventory.cluster)
    connect = admin_login(workspace)
    _, failed = call_on_hosts(
        list(claimed), lambda host: create_account(host, login.root, claim, connect)
    )
    if len(failed) == len(claimed):
        reason = str(next(iter(failed.values())))
        summary = "clusterctl can't log in to any machine of the cluster"
        raise ProvisionError(summary, code="all-hosts-unreachable", why=reason)
    release_all(login, cluster_id)


def _claimed_host(name: str, settings: OnpremSettings, login: Login) -> Host:
    target = ssh_host(name, settings.machines[name])
    return Host(
        name=name,
        address=target.host,
        port=target.port,
        roles=(CONTROLLER if name == settings.controller else COMPUTE,),
        host_key=login.key_of(name),
        proxy_command=login.proxies([name]).get(name, ()),
    )


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


_TRACES: Final = (
    "the machine still has the account clusterctl, the cluster's files and the records of them"
)


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
    trusted = workspace.trusted_hosts.read_text() if workspace.trusted_hosts.exists() else ""
    other_lines = [line for line in trusted.splitlines() if line.partition(" ")[0] != host.name]
    write_atomic(
        target.trusted_hosts, "\n".join([*other_lines, f"{host.name} {host.host_key}", ""])
    )
    write_atomic(target.inventory, replace(inventory, hosts=(host,)).text)
    machine = _machine(host, settings)
    # `save` makes the release pending, so it is the last step.
    return PendingRelease(target, host, machine, time.time(), why).save()


def _machine(host: Host, settings: OnpremSettings) -> OnpremHost:
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
        accepted = login.prompts.accepted if ending else ()
        careful = replace(login.prompts, confirm=reject_unknown_keys, accepted=accepted)
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
    host = replace(pending.host, proxy_command=login.proxies([name]).get(name, ()))
    inventory = Inventory.read(pending.workspace.inventory.read_bytes())
    inventory = replace(inventory, hosts=(host,))
    write_atomic(pending.workspace.inventory, inventory.text)
    release_all(login, cluster_id)
    if leftovers := find_leftovers(login, cluster_id):
        summary = f"clusterctl's files remain on {name}"
        reason = "; ".join(map(str, leftovers))
        raise ProvisionError(summary, code="host-not-clean", why=reason, host=name)


def _reason(exc: ClusterctlError) -> str:
    """Return why a machine could not be released, and which parts of clusterctl the machine still
    has.
    """
    if any(failure.code == UnreachableError.code for failure in exc.failures):
        return f"it does not answer; {_TRACES}"
    return f"{'; '.join(dict.fromkeys(failure.cause for failure in exc.failures))}; {_TRACES}"
