"""Releasing machines: restore their configuration, remove the admin account, verify that nothing is left."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

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
    PendingRelease,
    address_of,
    hosts_as_raised,
    inventory_as_raised,
    pending_releases,
    refuse_unknown_keys,
)
from clusterctl.providers.onprem.access import raise_failures, ssh_host
from clusterctl.providers.onprem.login import (
    Claim,
    Login,
    check_sudo,
    create_account,
    is_installation,
    remove_account,
)
from clusterctl.providers.onprem.members import admin_login, log_in, parse_claim, shared_folder
from clusterctl.spec.hosts import OnpremHost, is_this_machine
from clusterctl.spec.names import ADMIN_USER
from clusterctl.spec.onprem import OnpremSettings
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.transport.openssh import write_ssh_files
from clusterctl.util.assets import digest
from clusterctl.util.process import on_each
from clusterctl.util.progress import HostStep

NOT_RELEASED: Final = "could not be released"
THEN: Final = (
    "then run `clusterctl down` again: what is done stays done; one that is gone for good: --forget HOST"
)
_THEN_UP: Final = "then run `clusterctl up` again: what is done stays done"
_LOOK: Final = (Path(__file__).with_name("data") / "look.sh").read_text()


def release_all(login: Login, cluster_id: str) -> None:
    inventory = inventory_as_raised(login.workspace)
    if inventory is None:
        return
    names = [host.name for host in inventory.hosts]
    write_ssh_files(inventory, login.workspace)
    claim = login.claim(cluster_id, inventory.cluster)
    login.prompts.reporter.progress(f"looking at {len(names)} machines")
    ours, failed = on_each(names, lambda host: _is_ours(host, login, claim))
    mine = [host for host, is_ours in ours.items() if is_ours]
    done, more = _release(mine, inventory, claim, login)
    for host in done:
        login.prompts.reporter.progress(HostStep(host, "released", len(names)))
    raise_failures({**failed, **more}, what=NOT_RELEASED, then=THEN)


def _release(
    hosts: Sequence[str], inventory: Inventory, claim: Claim, login: Login
) -> tuple[Collection[str], Mapping[str, ClusterctlError]]:
    """Restore these, then remove our account from them: those that are released, and how others failed."""
    failed = _restored(hosts, inventory, login)
    leaving = [host for host in hosts if host not in failed]
    done, more = on_each(leaving, lambda host: remove_account(host, claim, admin_login(login.workspace)))
    return done, {**failed, **more}


def release_removed(wanted: Inventory, login: Login) -> Mapping[str, str]:
    """Release the machines that are no longer part of the cluster; why nothing was done on some."""
    workspace = login.workspace
    before = inventory_as_raised(workspace)
    going = [host.name for host in before.hosts if wanted.host(host.name) is None] if before else []
    if before is None or not going:
        return {}
    login.prompts.reporter.progress(f"releasing {', '.join(going)}")
    write_ssh_files(before, workspace)
    claim = Claim(before.cluster_id, before.cluster, workspace.public_key.read_text().strip())
    there, failed = log_in(going, workspace)
    # A machine that an interrupted run released lets us in no more: nothing may wait for it.
    absent = {host: exc for host, exc in failed.items() if not isinstance(exc, CommandError)}
    _, more = _release(list(there), before, claim, login)
    refused = {host: exc for host, exc in failed.items() if host not in absent}
    raise_failures({**refused, **more}, what=NOT_RELEASED, then=_THEN_UP)
    return {
        host: "it does not answer" if isinstance(exc, UnreachableError) else exc.cause
        for host, exc in absent.items()
    }


def find_leftovers(login: Login, cluster_id: str) -> tuple[Leftover, ...]:
    """What an ordinary user sees of us on the machines, by their owner's access."""
    hosts = list(hosts_as_raised(login.workspace)) or list(login.hosts)
    hosts = [host for host in hosts if host in login.hosts]
    lost = login.trust(hosts)
    asked = [host for host in hosts if host not in lost]
    seen, failed = on_each(asked, lambda host: _left_on(host, login, cluster_id))
    found = [Leftover(f"{host}: {what}") for host, lines in seen.items() for what in lines]
    unseen = {host: exc.cause for host, exc in {**lost, **failed}.items()}
    return (*found, *(Leftover(f"{host}: it can't be checked: {why}") for host, why in unseen.items()))


def _left_on(host: str, login: Login, cluster_id: str) -> Sequence[str]:
    """What is there of us, unless another cluster has the machine by now."""
    claim = claim_on(host, login)
    if claim and claim.get("id") != cluster_id:
        return ()
    lines = login.run(host, ("sh", "-c", _LOOK, "sh", ADMIN_USER)).splitlines()
    return [line for line in lines if not (login.is_here(host) and is_installation(line))]


def claim_on(host: str, login: Login) -> Mapping[str, str]:
    """Whose the machine is, as it says itself; empty if it is nobody's."""
    try:
        return parse_claim(login.run(host, ("cat", CLAIM)))
    except CommandError:
        return {}


def _is_ours(host: str, login: Login, claim: Claim) -> bool:
    """Whether there is something to release, with our account able to do it."""
    try:
        check_sudo(admin_login(login.workspace)(host))
    except UnreachableError:
        raise
    except ClusterctlError:
        if claim_on(host, login).get("id") != claim.cluster_id:
            return False  # it has been released, or never was ours
        create_account(host, login.root, claim, admin_login(login.workspace))
    return True


def _restored(hosts: Sequence[str], inventory: Inventory, login: Login) -> Mapping[str, ClusterctlError]:
    """Have what was put back on these; those where it failed."""
    if not hosts:
        return {}
    try:
        notes = login.prompts.restore(inventory, hosts, login.workspace, login.prompts.reporter)
    except ConfigureError as exc:
        failed: dict[str, ClusterctlError] = {
            str(one.host): ConfigureError(
                exc.what, code=one.code, why=one.cause, host=one.host, failures=(one,)
            )
            for one in exc.failures
            if one.host in hosts
        }
        if not failed:
            raise
        return failed
    for host, line in ((host, line) for host, lines in notes.items() for line in lines):
        login.prompts.reporter.note(f"left on {host}: {line}")
    return {}


def release_orphan(login: Login, settings: OnpremSettings, cluster_id: str) -> None:
    """Release the machines that say that they belong to it; ``login`` has a workspace for the moment."""
    mine = {host: c for host, c in claims(login).items() if c.get("id") == cluster_id}
    if not mine:
        return
    folder = login.workspace
    folder.create_secrets()
    inventory = Inventory(
        cluster=next(iter(mine.values())).get("name", ""),
        cluster_id=cluster_id,
        provider=settings.type,
        hosts=tuple(_claimed_host(host, settings, login) for host in mine),
        network="",
        shared=settings.shared.path,
        shared_folder=shared_folder(settings, {settings.controller: ""}, alone=len(mine) == 1),
        baked=False,
    )
    write_atomic(folder.joining, inventory.model_dump_json())
    write_ssh_files(inventory, folder)
    claim = login.claim(cluster_id, inventory.cluster)
    _, failed = on_each(list(mine), lambda host: create_account(host, login.root, claim, admin_login(folder)))
    if len(failed) == len(mine):
        why = str(next(iter(failed.values())))
        raise ProvisionError("none of its machines lets us in", code="all-hosts-unreachable", why=why)
    release_all(login, cluster_id)


def _claimed_host(name: str, settings: OnpremSettings, login: Login) -> Host:
    """A host of which no more is known than how to reach it, and whether the others wait for it."""
    to = ssh_host(name, settings.machines[name])
    return Host(
        name=name,
        address=to.host,
        port=to.port,
        roles=(CONTROLLER if name == settings.controller else COMPUTE,),
        host_key=login.key_of(name),
        proxy_command=login.proxies([name]).get(name, ()),
    )


def claims(login: Login) -> Mapping[str, Mapping[str, str]]:
    """Host -> whose it is, as it says itself."""
    lost = login.trust(login.hosts)
    asked = [host for host in login.hosts if host not in lost]
    found, _ = on_each(asked, lambda host: claim_on(host, login))
    return found


_OURS: Final = "the account clusterctl, what the cluster brought, and the notes by which that is undone"


def record_pending(
    host: Host, inventory: Inventory, settings: OnpremSettings, workspace: Workspace, *, why: str
) -> PendingRelease:
    """Record a machine of ``inventory`` as a pending release; ``settings`` say how to log in."""
    one = Workspace(workspace.releases / f"{host.name}-{digest(address_of(host), host.host_key)[:8]}")
    one.create()
    for path in (workspace.key, workspace.public_key, workspace.root / "id"):
        write_atomic(one.root / path.name, path.read_bytes())
    trusted = workspace.trusted_hosts.read_text() if workspace.trusted_hosts.exists() else ""
    others = [line for line in trusted.splitlines() if line.partition(" ")[0] != host.name]
    write_atomic(one.trusted_hosts, "\n".join([*others, f"{host.name} {host.host_key}", ""]))
    write_atomic(one.inventory, inventory.model_copy(update={"hosts": (host,)}).model_dump_json(indent=2))
    machine = _machine(host, settings)
    return PendingRelease(one, host, machine, time.time(), why).save()  # last: from here on it counts


def _machine(host: Host, settings: OnpremSettings) -> OnpremHost:
    """How its owner gets in: as the spec said, or as it says of all, if it names the machine no more."""
    address = host.ssh_address or host.address
    said = settings.machines.get(host.name)
    if said is not None and ssh_host(host.name, said).host == address:
        return said
    if is_this_machine(address):  # nobody logs in to it
        return OnpremHost(address=address)
    return OnpremHost(address=address, **{**settings.access.model_dump(), "port": host.port})


def retry_all(members: Collection[Host], login: Login, *, ending: bool = False) -> tuple[Notice, ...]:
    """Try every pending release again; what the user should know of it.

    One that is among the ``members`` again is none of these any more. What is in the way is recorded. One
    that may be a member, reached in another way, is left alone, unless members are released too (``ending``).
    """
    notes: list[Notice] = []
    for one in pending_releases(login.workspace):
        if (told := _taken_again(one, members)) is not None:
            notes += told
            one.remove()
            continue
        if not ending and (twins := [host for host in members if host.host_key == one.host.host_key]):
            names = ", ".join(f"{host.name} ({address_of(host)})" for host in twins)
            text = (
                f"{one}; it is not tried: {names} has the same host key, so it may be that machine; "
                f"if it is: `clusterctl node forget {one.host.name}`; if not: `clusterctl down` releases it"
            )
            notes.append(Notice("host-key-of-another", text))
            continue
        # Keys that are confirmed now are those of other machines.
        careful = replace(login.prompts, confirm=refuse_unknown_keys, accepted=())
        own = Login({one.host.name: one.machine}, one.workspace, careful)
        try:
            _release_pending(one, own)
        except ClusterctlError as exc:
            still = replace(one, why=_why(exc)).save()
            text = f"{still}; `clusterctl up` and `clusterctl down` try it again"
            notes.append(Notice("still-pending", text))
        else:
            notes.append(Notice("late-release", f"{one.title} was released"))
            one.remove()
    return tuple(notes)


def _taken_again(one: PendingRelease, members: Collection[Host]) -> tuple[Notice, ...] | None:
    """What to say of a machine that is in the cluster now, or whose place another has; None if neither."""
    at_address = [host for host in members if address_of(host) == one.address]
    by_name = [host for host in members if host.name == one.host.name and one.why != REPLACED]
    # The key alone says little: machines that were cloned from one image have the same.
    if any(host.host_key == one.host.host_key for host in (*at_address, *by_name)):
        return ()
    if at_address:
        text = f"what {one.title} had of ours can't be checked: another machine is at its address now"
        return (Notice("address-of-another", text),)
    return None


def _release_pending(one: PendingRelease, login: Login) -> None:
    name, cluster_id = one.host.name, one.workspace.cluster_id()
    if lost := login.trust([name]):
        raise lost[name]
    host = one.host.model_copy(update={"proxy_command": login.proxies([name]).get(name, ())})
    inventory = Inventory.model_validate_json(one.workspace.inventory.read_bytes())
    inventory = inventory.model_copy(update={"hosts": (host,)})
    write_atomic(one.workspace.inventory, inventory.model_dump_json(indent=2))
    release_all(login, cluster_id)
    if left := find_leftovers(login, cluster_id):
        raise ProvisionError(
            f"{name} has something of ours", code="host-not-clean", why="; ".join(map(str, left)), host=name
        )


def _why(exc: ClusterctlError) -> str:
    """Why something of ours is still there."""
    if any(failure.code == UnreachableError.code for failure in exc.failures):
        return f"it does not answer; there are {_OURS}"
    return f"{'; '.join(dict.fromkeys(failure.cause for failure in exc.failures))}; there are {_OURS}"
