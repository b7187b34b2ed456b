"""What a provider does: make the hosts of a spec, and remove them again.

A machine that left a cluster before it could be released to its owner is a pending release. Each has a
small workspace of its own inside the cluster's: its host entry, how to log in, the admin key. By that it is
released later, once it answers again; no spec is needed.
"""

# ruff: noqa: ARG002 - what a provider need not do is here in full

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

from pydantic import ValidationError

from clusterctl.errors import Failure, HostKeyError, ProvisionError
from clusterctl.providers.node_class import NodeClass
from clusterctl.spec.hosts import OnpremHost
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import format_size, shown_memory
from clusterctl.state.inventory import COMPUTE, Host, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util.progress import SILENT, Reporter

if TYPE_CHECKING:
    from clusterctl.hosts.checks import DoctorReport
    from clusterctl.providers.storage import KeptStorage

Bake = Callable[[Host], None]  # runs ``install.yml`` on an image under construction that answers SSH
BakeClass = Callable[[Inventory], None]  # likewise ``class.yml``, after ``install.yml`` if that is not done

REPLACED: Final = "another machine takes its place"
_NOTE: Final = "pending.json"


@dataclass(frozen=True, slots=True)
class Size:
    """What a compute host has, where the provider decides that."""

    cpus: int
    memory_mib: int
    disk_mib: int | None = None  # None: no limit of its own

    @classmethod
    def of(cls, host: Host | None) -> Size | None:
        """That of a host whose provider decides it."""
        if host is None or host.cpus is None or host.memory_mib is None:
            return None
        return cls(host.cpus, host.memory_mib, host.disk_mib)

    @property
    def parts(self) -> tuple[str, ...]:
        """``2 CPUs`` and ``4GiB of memory``, and its disk."""
        cpus = f"{self.cpus} CPU{'s' if self.cpus > 1 else ''}"
        disk = () if self.disk_mib is None else (f"{format_size(self.disk_mib)} of disk",)
        return (cpus, f"{shown_memory(self.memory_mib)} of memory", *disk)

    def __str__(self) -> str:
        return ", ".join(self.parts)


Sizes = Mapping[str, Size]  # by host


@dataclass(frozen=True, slots=True)
class Provisioned:
    """Hosts that exist, and what the user should know about how.

    ``made`` ones are new; ``started`` ones were there, but did not run. ``classed`` are those of ``made``
    that came with the files of a class and their own.
    """

    inventory: Inventory
    notes: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    classed: tuple[str, ...] = ()


Action = Literal["make", "change", "replace", "remove", "keep"]


@dataclass(frozen=True, slots=True)
class HostChange:
    """What becomes of one host, in the user's words: ``what`` it is, and ``why`` it does not stay as it is.

    ``change`` leaves it what it is in the main, ``replace`` makes it anew: what was on it is gone.
    ``usd_per_hour`` is what it will cost, of one that is removed what it does cost; ``was_usd_per_hour``
    what it costs now, where that is something else. None: not known, or nothing.
    """

    name: str
    action: Action
    what: str
    why: str = ""
    usd_per_hour: float | None = None
    was_usd_per_hour: float | None = None
    restarts: bool = False  # a ``change`` for which it is stopped, and its jobs with it
    off: bool = False  # it does not run as it is
    released: bool = False  # one that is replaced or removed goes to its owner, as it was

    @property
    def destroys(self) -> bool:
        """Whether what is on the host is lost."""
        return self.action in {"replace", "remove"} and not self.released


@dataclass(frozen=True, slots=True)
class Cost:
    """USD an hour, ``now`` and ``then``; what is ``unpriced`` is not in it."""

    now: float
    then: float
    unpriced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostPlan:
    """What an ``apply`` would do: to each host of before and after, and to what is no host (``other``).

    priced_on: the date of the prices, if a table has them.
    other_usd_per_hour: the cost of all that is no host, now and then; without ``other_unpriced``.
    other_lost: what goes, or is made anew, with all that it holds.
    images: those to be made before new nodes, whether or not there are any, with what each takes.
    """

    hosts: tuple[HostChange, ...]
    other: tuple[str, ...] = ()
    priced_on: str | None = None
    other_usd_per_hour: tuple[float, float] = (0.0, 0.0)
    other_unpriced: tuple[str, ...] = ()
    other_lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    images: tuple[str, ...] = ()

    @property
    def changes(self) -> tuple[HostChange, ...]:
        return tuple(host for host in self.hosts if host.action != "keep")

    @property
    def destroyed(self) -> tuple[HostChange, ...]:
        return tuple(host for host in self.hosts if host.destroys)

    @property
    def released(self) -> tuple[HostChange, ...]:
        return tuple(host for host in self.hosts if host.released)

    @property
    def usd_per_hour(self) -> float | None:
        """What all of it will cost; None where the price of something is not known."""
        return self.cost.then if self.cost and not self.cost.unpriced else None

    @property
    def may_cost_more(self) -> bool:
        """Whether it is dearer than what is there, or makes what nobody knows the price of."""
        if self.cost is None:
            return False
        unknown = any(host.usd_per_hour is None for host in self.changes if host.action != "remove")
        more = self.cost.then > self.cost.now or bool(self.other and self.other_unpriced)
        return more or (unknown and self.priced_on is not None)

    @property
    def cost(self) -> Cost | None:
        """What all of it costs; None where nothing has a price, and no table says that it has none."""
        now, then = self.other_usd_per_hour
        unpriced = [host.name for host in self.hosts if host.usd_per_hour is None]
        for host in self.hosts:
            if (price := host.usd_per_hour) is not None:
                was = price if host.was_usd_per_hour is None else host.was_usd_per_hour
                now += 0.0 if host.action == "make" else was
                then += 0.0 if host.action == "remove" else price
        if len(unpriced) == len(self.hosts) and not any(self.other_usd_per_hour) and self.priced_on is None:
            return None
        return Cost(now, then, (*unpriced, *self.other_unpriced))


@dataclass(frozen=True, slots=True)
class Leftover:
    """Something of a cluster that is still there, and what it costs an hour, if that is known."""

    what: str
    usd_per_hour: float | None = None

    def __str__(self) -> str:
        cost = f" ({self.usd_per_hour:.4f} USD an hour)" if self.usd_per_hour else ""
        return self.what + cost


class Provider(Protocol):
    """The hosts of one kind of cluster. It is made with its settings, and with ``Prompts``.

    ``known_shared`` is where hosts have the shared folder, of a provider whose new nodes can be of a class;
    ``class_groups`` are the groups of hosts for which there are such.
    """

    known_shared: str | None = None
    class_groups: tuple[str, ...] = (COMPUTE,)

    def start_ahead(self) -> None:
        """Start what takes a while to start: the other methods will need it. Calling none of them is fine."""
        return

    def check(self, spec: ClusterSpec) -> None:
        """Refuse what can't become a cluster, before anything is asked, ended or made.

        Raises:
            MachineError: this machine lacks something.
            UsageError: the spec asks for what can't be done.
        """

    def examine(
        self, spec: ClusterSpec, workspace: Workspace, *, hosts: Collection[str]
    ) -> DoctorReport | None:
        """Look at hosts that are there before the first `up`; None where the provider makes them.

        With ``hosts`` only at these.

        Raises:
            UsageError: the spec has no such host.
        """
        return None

    def preflight(self, spec: ClusterSpec, workspace: Workspace) -> DoctorReport | None:
        """Everything that keeps ``apply`` from making the hosts, found by looking alone; None: see ``check``.

        Raises:
            ClusterctlError: it can't be looked at.
        """
        return None

    def prepare(self, spec: ClusterSpec, workspace: Workspace, *, bake: Bake) -> None:
        """Check that it can be done here, and bake the image unless it is cached.

        Raises:
            MachineError: this machine can't do it.
            ProvisionError: the image could not be made.
        """
        return

    def prepare_class(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        inputs: Mapping[str, str],
        *,
        bake: BakeClass,
    ) -> Mapping[str, str]:
        """Have what new hosts of each group share, made of ``inputs`` (a hash each) and their image.

        ``bake`` makes one. Returns the key of each group's.

        Raises:
            ProvisionError: it could not be made.
        """
        return {}

    def sizes(self, spec: ClusterSpec) -> Sizes:
        """Compute host -> its size by this spec; without those whose own hardware decides."""
        return {}

    def plan(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        *,
        keep: Sizes,
        inputs: str = "",
        recreated: Collection[str] = (),
    ) -> HostPlan:
        """What ``apply`` would do. Nothing is made; where nothing is up, ``workspace`` may be a fresh one.

        inputs: those of the class of new compute nodes, if they are of one.
        recreated: hosts that are removed and created again.

        Raises:
            MachineError: this machine can't do it.
            ProvisionError: it can't be told.
        """

    def apply(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        *,
        keep: Sizes,
        node_class: NodeClass | None = None,
        recreated: Collection[str] = (),
    ) -> Provisioned:
        """Make what is missing, remove what is no longer named; doing it again changes nothing.

        Hosts in ``keep`` stay as large as they are said to be there. After a ``plan``, nothing is done that
        it did not show. New hosts are of the ``node_class``, if it has their group.
        Hosts in ``recreated`` are removed and created again.

        Raises:
            ProvisionError: it was tried and failed.
        """

    def alive(self, cluster_id: str) -> bool:
        """Whether any host of the cluster runs, whatever it answers."""

    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:
        """Remove everything of the cluster, also where its ``workspace`` was lost.

        Raises:
            ProvisionError: something could not be removed.
        """

    def leftovers(self, cluster_id: str) -> tuple[Leftover, ...]:
        """What an independent look at the world finds of the cluster; empty when it is gone."""

    def orphans(self, name: str) -> tuple[str, ...]:
        """Ids of the caller's clusters of that name whose workspace was lost."""

    def kept_storage(self, name: str, users: Sequence[str]) -> tuple[KeptStorage, ...]:
        """The shared folders that the caller's clusters of that name left when they went down.

        ``users`` are those of their spec; where nothing else says whose they are, the first of them does.
        """

    def refuse_used(self, kept: KeptStorage) -> None:  # only where others may have it
        """See that no cluster and no other machine has it.

        Raises:
            UsageError: one does.
        """
        return

    def remove_storage(self, kept: KeptStorage) -> None:
        """Remove kept storage with all that is on it; what is gone already is fine.

        Raises:
            ProvisionError: it could not be removed.
            UsageError: as of ``refuse_used``.
        """


def inventory_as_raised(workspace: Workspace) -> Inventory | None:
    """The cluster as the last `up` left it, with the hosts that an `up` was about to join."""
    found: Inventory | None = None
    hosts: dict[str, Host] = {}
    for path in (workspace.joining, workspace.inventory):
        with suppress(FileNotFoundError, ValidationError):
            found = Inventory.model_validate_json(path.read_bytes())
            hosts |= {host.name: host for host in found.hosts}
    return found and found.model_copy(update={"hosts": tuple(hosts.values())})


def hosts_as_raised(workspace: Workspace) -> Mapping[str, Host]:
    found = inventory_as_raised(workspace)
    return {host.name: host for host in found.hosts} if found else {}


@dataclass(frozen=True, slots=True)
class OfferedKey:
    """A host key that a machine shows and that is not confirmed yet. ``title`` is its name in known_hosts."""

    title: str
    address: str
    key: str  # as `ssh-ed25519 AAAA...`
    fingerprint: str  # as `SHA256:...`

    @property
    def kind(self) -> str:
        return self.key.partition(" ")[0]

    @property
    def failure(self) -> Failure:
        """The refusal of the machine until its key is confirmed."""
        file = f"/etc/ssh/ssh_host_{self.kind.removeprefix('ssh-').split('-')[0]}_key.pub"
        return Failure(
            HostKeyError.code,
            f"its host key is not confirmed yet: {self.kind} {self.fingerprint}",
            self.title,
            "plan",
            f"compare it with the output of `ssh-keygen -lf {file}` there",
        )


Confirm = Callable[[Sequence[OfferedKey]], None]  # returns if all of them are right
# Restores the configuration of these hosts; what was left on each of them, and why.
Restore = Callable[[Inventory, Collection[str], Workspace, Reporter], Mapping[str, tuple[str, ...]]]


def refuse_unknown_keys(offered: Sequence[OfferedKey]) -> None:
    """Refuse all unknown keys, for verbs that change nothing.

    Raises:
        ProvisionError: one failure a key.
    """
    then = "`clusterctl up` shows them and asks"
    raise ProvisionError.of_hosts(
        "unknown host keys: {hosts}", [one.failure for one in offered], code="host-keys-unknown", then=then
    )


@dataclass(frozen=True, slots=True)
class Prompts:
    """``confirm`` is shown unknown host keys, ``accepted`` has fingerprints that were confirmed before.

    password: for sudo, on machines that want one; it is never shown.
    reporter: gets progress and notes.
    """

    confirm: Confirm = refuse_unknown_keys
    accepted: tuple[str, ...] = ()
    password: str | None = field(default=None, repr=False)
    restore: Restore = lambda _i, _h, _w, _s: {}
    reporter: Reporter = SILENT


NO_PROMPTS: Final = Prompts()


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """One machine: its workspace, ``since`` when it is due (Unix time), and ``why`` it was not released.

    ``machine`` says how its owner logs in.
    """

    workspace: Workspace
    host: Host
    machine: OnpremHost
    since: float
    why: str

    @property
    def address(self) -> str:
        return address_of(self.host)

    @property
    def title(self) -> str:
        """Its name and address: its name may be another machine's by now."""
        return f"{self.host.name} ({self.address})"

    @property
    def fix(self) -> str:
        """What to do about it while the cluster is up."""
        return (
            "have it answer: `clusterctl up` then releases it; or, if it is gone for good: "
            f"`clusterctl node forget {self.host.name}`"
        )

    @property
    def failure(self) -> Failure:
        """The failure of a `down` that could not release it."""
        fix = f"have it answer; or, if it is gone for good: `clusterctl down --forget {self.host.name}`"
        return Failure("pending-release", str(self), self.host.name, "destroy", fix)

    def __str__(self) -> str:
        return f"{self.title} is not released yet: {self.why}"

    def as_dict(self) -> dict[str, Any]:
        """The machine as `-o json` shows it."""
        return {"host": self.host.name, "address": self.address, "since": self.since, "why": self.why}

    def save(self) -> PendingRelease:
        """Write its note; from here on it counts."""
        machine = self.machine.model_dump(mode="json")
        note = json.dumps({"since": self.since, "why": self.why, "machine": machine})
        write_atomic(self.workspace.root / _NOTE, f"{note}\n")
        return self

    def remove(self) -> None:
        """Remove its workspace: it is released, or forgotten."""
        root = Path(self.workspace.root)
        (root / _NOTE).unlink(missing_ok=True)  # first: half of it counts for nothing
        shutil.rmtree(root, ignore_errors=True)
        with suppress(OSError):  # there are others
            root.parent.rmdir()


def pending_releases(workspace: Workspace) -> tuple[PendingRelease, ...]:
    found = []
    for note in sorted(workspace.releases.glob(f"*/{_NOTE}")):
        one = Workspace(note.parent)
        with suppress(FileNotFoundError, ValidationError, ValueError, KeyError):
            said = json.loads(note.read_bytes())
            host = Inventory.model_validate_json(one.inventory.read_bytes()).hosts[0]
            machine = OnpremHost.model_validate(said["machine"])
            found.append(PendingRelease(one, host, machine, float(said["since"]), str(said["why"])))
    return tuple(found)


def address_of(host: Host) -> str:
    return host_port(host.ssh_address or host.address, host.port)


def host_port(host: str, port: int) -> str:
    """An address and a port, as known_hosts has them."""
    return host if port == 22 else f"[{host}]:{port}"  # noqa: PLR2004 - ssh's own
