"""Pending releases: machines that left the cluster before they could be released.

Each has a small workspace of its own inside the cluster's: its host entry, how to log in, the admin key. By
that it is released later, once it answers again.
"""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from pydantic import ValidationError

from clusterctl.errors import ClusterctlError, Failure, ProvisionError, UnreachableError, UsageError
from clusterctl.providers.onprem import access, release
from clusterctl.providers.onprem.login import Login
from clusterctl.providers.onprem.members import ALL_PARTITION, spec_of_machines
from clusterctl.providers.prompts import Prompts, refuse_unknown_keys
from clusterctl.spec import OnpremProvider as Settings
from clusterctl.spec.load import dump_spec, load_spec
from clusterctl.spec.onprem import OnpremHost, is_this_machine
from clusterctl.state.inventory import CONTROLLER, Host, Inventory
from clusterctl.state.journal import digest
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.progress import Reporter

_FOLDER: Final = "left-behind"
_NOTE: Final = "left.json"
_OURS: Final = "the account clusterctl, what the cluster brought, and the notes by which that is undone"
_FIX: Final = "have {name} answer; or, if it is gone for good: `clusterctl down --forget {name}`"
REPLACED: Final = "another machine takes its place"


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """One machine: its workspace, ``since`` when it is due (Unix time), and ``why`` it was not given back."""

    workspace: Workspace
    host: Host
    since: float
    why: str

    @property
    def place(self) -> str:
        """Where it is reached."""
        return address_of(self.host)

    @property
    def title(self) -> str:
        """Its name may be another machine's by now."""
        return f"{self.host.name} ({self.place})"

    @property
    def fix(self) -> str:
        """What to do about it while the cluster is up."""
        return (
            "have it answer: `clusterctl up` gives it back then; or, if it is gone for good: "
            f"`clusterctl node forget {self.host.name}`"
        )

    def __str__(self) -> str:
        return f"{self.title} was left behind: {self.why}"


def address_of(host: Host) -> str:
    """Where a host is reached, as known_hosts has it."""
    return access.host_port(host.ssh_address or host.address, host.port)


def pending_releases(workspace: Workspace) -> tuple[PendingRelease, ...]:
    """Every machine that the cluster has left behind."""
    each = []
    for note in sorted((workspace.root / _FOLDER).glob(f"*/{_NOTE}")):
        one = Workspace(note.parent)
        with suppress(FileNotFoundError, ValidationError, ValueError, KeyError):
            said = json.loads(note.read_bytes())
            host = Inventory.model_validate_json(one.hosts.read_bytes()).hosts[0]
            each.append(PendingRelease(one, host, float(said["since"]), str(said["why"])))
    return tuple(each)


def as_dict(one: PendingRelease) -> dict[str, Any]:
    """A machine as `-o json` shows it."""
    return {"host": one.host.name, "address": one.place, "since": one.since, "why": one.why}


def record_pending(
    host: Host, inventory: Inventory, settings: Settings, workspace: Workspace, *, why: str
) -> PendingRelease:
    """Note a machine of the cluster of ``inventory`` as left behind; ``settings`` say how we get in."""
    one = Workspace(workspace.root / _FOLDER / f"{host.name}-{digest(address_of(host), host.host_key)[:8]}")
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
    return _note(PendingRelease(one, host, time.time(), why))  # last: from here on it counts


def _note(one: PendingRelease) -> PendingRelease:
    write_atomic(one.workspace.root / _NOTE, json.dumps({"since": one.since, "why": one.why}) + "\n")
    return one


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
            _remove(one.workspace)
            continue
        if not ending and (twins := [host for host in members if host.host_key == one.host.host_key]):
            notes.append(_of_twins(one, twins))
            continue
        try:
            _release(one, prompts, report)
        except ClusterctlError as exc:
            still = _note(replace(one, why=_why(one, exc, prompts)))
            notes.append(f"{still}; `clusterctl up` and `clusterctl down` try it again")
        else:
            notes.append(f"{one.title} was given back")
            _remove(one.workspace)
    return tuple(notes)


def pending_failures(workspace: Workspace) -> tuple[Failure, ...]:
    """What is still left behind, one failure a machine."""
    return tuple(
        Failure("left-behind", str(one), one.host.name, "destroy", _FIX.format(name=one.host.name))
        for one in pending_releases(workspace)
    )


def forget(machines: Iterable[PendingRelease]) -> None:
    """Know these no more; what is ours on them stays there."""
    for one in machines:
        _remove(one.workspace)


def _taken_again(one: PendingRelease, members: Collection[Host]) -> str | None:
    """What to say of a machine that is in the cluster now, or whose place another has; None if neither."""
    if any(host.host_key == one.host.host_key and _is_where_it_was(host, one) for host in members):
        return ""
    if any(address_of(host) == one.place for host in members):
        return f"nobody can look for what {one.title} had of ours: another machine is at its address now"
    return None


def _is_where_it_was(host: Host, one: PendingRelease) -> bool:
    """The key alone says little: machines that were cloned from one image have the same."""
    return address_of(host) == one.place or (host.name == one.host.name and one.why != REPLACED)


def _of_twins(one: PendingRelease, twins: Iterable[Host]) -> str:
    names = ", ".join(f"{host.name} ({address_of(host)})" for host in twins)
    return (
        f"{one}; it is not tried: {names} has the same host key, so it may be that machine; if it is: "
        f"`clusterctl node forget {one.host.name}`; if not: `clusterctl down` gives it back"
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
    raise UsageError("the note of a machine that was left behind is damaged", where=str(workspace.spec))


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


def _remove(workspace: Workspace) -> None:
    (workspace.root / _NOTE).unlink(missing_ok=True)  # first: half of it counts for nothing
    shutil.rmtree(workspace.root, ignore_errors=True)
    with suppress(OSError):  # there are others
        Path(workspace.root).parent.rmdir()
