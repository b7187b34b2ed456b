"""Pending releases: machines that left the cluster before they could be released.

Each has a small workspace of its own inside the cluster's: its host entry, how to log in, the admin key. By
that it is released later, once it answers again.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from dataclasses import replace
from typing import Final

from clusterctl.errors import ClusterctlError, ProvisionError, UnreachableError, UsageError
from clusterctl.providers.onprem import release
from clusterctl.providers.onprem.login import Login
from clusterctl.providers.onprem.members import ALL_PARTITION, spec_of_machines
from clusterctl.providers.pending import FOLDER, REPLACED, PendingRelease, address_of, pending_releases
from clusterctl.providers.prompts import Prompts, refuse_unknown_keys
from clusterctl.spec.load import dump_spec, load_spec
from clusterctl.spec.onprem import OnpremHost, is_this_machine
from clusterctl.spec.onprem import OnpremProvider as Settings
from clusterctl.state.inventory import CONTROLLER, Host, Inventory
from clusterctl.state.journal import digest
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.progress import Reporter

_OURS: Final = "the account clusterctl, what the cluster brought, and the notes by which that is undone"


def record_pending(
    host: Host, inventory: Inventory, settings: Settings, workspace: Workspace, *, why: str
) -> PendingRelease:
    """Note a machine of the cluster of ``inventory`` as left behind; ``settings`` say how we get in."""
    one = Workspace(workspace.root / FOLDER / f"{host.name}-{digest(address_of(host), host.host_key)[:8]}")
    one.create()
    for path in (workspace.key, workspace.public_key, workspace.munge_key, workspace.root / "id"):
        write_atomic(one.root / path.name, path.read_bytes())
    trusted = workspace.trusted_hosts.read_text() if workspace.trusted_hosts.exists() else ""
    others = [line for line in trusted.splitlines() if line.partition(" ")[0] != host.name]
    write_atomic(one.trusted_hosts, "\n".join([*others, f"{host.name} {host.host_key}", ""]))
    alone = {host.name: _machine(host, settings)}
    write_atomic(one.spec, dump_spec(spec_of_machines(settings, alone, inventory.cluster)))
    roles = tuple(dict.fromkeys((CONTROLLER, *host.roles)))  # some host has to lead
    partition = ALL_PARTITION if host.is_compute else None
    host = host.model_copy(update={"roles": roles, "partition": partition})
    write_atomic(one.hosts, inventory.model_copy(update={"hosts": (host,)}).model_dump_json(indent=2))
    return PendingRelease(one, host, time.time(), why).save()  # last: from here on it counts


def _machine(host: Host, settings: Settings) -> OnpremHost:
    """How its owner gets in: as the spec said, or as it says of all, if it names the machine no more."""
    address = host.ssh_address or host.address
    said = settings.machines.get(host.name)
    if said is not None and (said.address or host.name).strip("[]") == address:
        return said
    if is_this_machine(address):  # nobody logs in to it
        return OnpremHost(address=address)
    return OnpremHost(address=address, **{**settings.access.model_dump(), "port": host.port})


def retry_all(
    workspace: Workspace, members: Iterable[Host], prompts: Prompts, *, report: Reporter, ending: bool = False
) -> tuple[str, ...]:
    """Try again to give back every machine that was left behind; what the user should know of it.

    One that is among the ``members`` again is none of these any more. What is in the way is noted. One that
    may be a member, reached in another way, is not touched, unless members are given back, too (``ending``).
    """
    members = tuple(members)
    notes = []
    for one in pending_releases(workspace):
        if (told := _taken_again(one, members)) is not None:
            notes += [told] if told else []
            one.remove()
            continue
        if not ending and (twins := [host for host in members if host.host_key == one.host.host_key]):
            notes.append(_of_twins(one, twins))
            continue
        try:
            _release(one, prompts, report)
        except ClusterctlError as exc:
            still = replace(one, why=_why(one, exc, prompts)).save()
            notes.append(f"{still}; `clusterctl up` and `clusterctl down` try it again")
        else:
            notes.append(f"{one.title} was released")
            one.remove()
    return tuple(notes)


def _taken_again(one: PendingRelease, members: Collection[Host]) -> str | None:
    """What to say of a machine that is in the cluster now, or whose place another has; None if neither."""
    if any(host.host_key == one.host.host_key and _is_where_it_was(host, one) for host in members):
        return ""
    if any(address_of(host) == one.address for host in members):
        return f"what {one.title} had of ours can't be checked: another machine is at its address now"
    return None


def _is_where_it_was(host: Host, one: PendingRelease) -> bool:
    """The key alone says little: machines that were cloned from one image have the same."""
    return address_of(host) == one.address or (host.name == one.host.name and one.why != REPLACED)


def _of_twins(one: PendingRelease, twins: Iterable[Host]) -> str:
    names = ", ".join(f"{host.name} ({address_of(host)})" for host in twins)
    return (
        f"{one}; it is not tried: {names} has the same host key, so it may be that machine; if it is: "
        f"`clusterctl node forget {one.host.name}`; if not: `clusterctl down` releases it"
    )


def _release(one: PendingRelease, prompts: Prompts, report: Reporter) -> None:
    """Give it back, and prove that.

    Raises:
        ClusterctlError: something of ours is still there, or nobody can tell.
    """
    settings, prompts = _settings(one.workspace), _without_keys(prompts)
    way, cluster_id, name = Login(settings, one.workspace, prompts), one.workspace.cluster_id(), one.host.name
    if lost := way.trust([name]):
        raise lost[name]
    host = one.host.model_copy(update={"proxy_command": way.proxies([name]).get(name, ())})
    inventory = Inventory.model_validate_json(one.workspace.hosts.read_bytes())
    inventory = inventory.model_copy(update={"hosts": (host,)})
    write_atomic(one.workspace.hosts, inventory.model_dump_json(indent=2))
    release.release_all(way, cluster_id, one.workspace, prompts, report=report)
    if left := release.find_leftovers(settings, cluster_id, one.workspace, prompts):
        raise ProvisionError(f"{name} has something of ours", why="; ".join(map(str, left)), host=name)


def _settings(workspace: Workspace) -> Settings:
    provider = load_spec(workspace.spec).provider
    if isinstance(provider, Settings):
        return provider
    raise UsageError("the note of a pending release is damaged", where=str(workspace.spec))


def _without_keys(prompts: Prompts) -> Prompts:
    """Keys that are confirmed now are those of other machines."""
    return replace(prompts, confirm=refuse_unknown_keys, accepted=())


def _why(one: PendingRelease, exc: ClusterctlError, prompts: Prompts) -> str:
    """Why something of ours is still there, and what, as far as it can be told."""
    if any(failure.code == UnreachableError.code for failure in exc.failures):
        return f"it does not answer; there are {_OURS}"
    cause = "; ".join(dict.fromkeys(failure.cause for failure in exc.failures))
    try:
        seen = release.find_leftovers(
            _settings(one.workspace), one.workspace.cluster_id(), one.workspace, _without_keys(prompts)
        )
    except ClusterctlError:
        seen = ()
    return f"{cause}; there are {', '.join(map(str, seen)) or _OURS}"
