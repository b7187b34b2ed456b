"""The interface of providers, which create and delete the hosts of a cluster, and the types that
they share.

A pending release is an on-prem machine that left the cluster but could not be released yet.
clusterctl keeps a small workspace folder with the machine's inventory entry, login settings and
admin key, so that a later `up` or `down` can release the machine even if the spec no longer
contains it.
"""

# ruff: noqa: ARG002 - the defaults of optional methods ignore their arguments

from __future__ import annotations

import hashlib
import json
import re
import shutil
from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Literal, NoReturn

from clusterctl.errors import Failure, HostKeyError, ProvisionError, UsageError
from clusterctl.providers.attached import (
    AttachedCluster,
    AttachedPlace,
    AttachRequest,
    MpiProof,
    SiteFact,
    SiteFolder,
    not_attached,
)
from clusterctl.providers.templates import KeptImage, NodeTemplates
from clusterctl.spec.common import Partition, ProviderSettings
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.hosts import OnpremHost
from clusterctl.spec.models import ClusterSpec
from clusterctl.state.inventory import COMPUTE, Host, Inventory
from clusterctl.state.workspace import Workspace, write_atomic
from clusterctl.util import formatting
from clusterctl.util.numbers import counted
from clusterctl.util.progress import SILENT, Reporter

if TYPE_CHECKING:
    from clusterctl.hosts.checks import DoctorReport
    from clusterctl.providers.storage import KeptStorage
    from clusterctl.transport.base import Transport

# Called when an image under construction answers SSH. Runs ``install.yml`` on it.
Bake = Callable[[Host], None]
# Called like ``Bake``. Runs ``class.yml``, and before it ``install.yml`` unless that was run.
BakeTemplates = Callable[[Inventory], None]

REPLACED: Final = "another machine takes its place"
_NOTE: Final = "pending.json"


@dataclass(frozen=True, slots=True)
class HostSize:
    """CPUs and memory that a provider gives a compute host."""

    cpus: int
    memory_mib: int

    @classmethod
    def of(cls, host: Host | None) -> HostSize | None:
        """Return the size in a host's inventory entry. None: no host, or the entry has no CPUs or
        memory.
        """
        if host is None or host.cpus is None or host.memory_mib is None:
            return None
        return cls(host.cpus, host.memory_mib)

    @property
    def parts(self) -> tuple[str, ...]:
        """The size as texts: `2 CPUs` and `4 GiB of memory`."""
        memory = formatting.size(self.memory_mib << 20)
        return (counted(self.cpus, "CPU"), f"{memory} of memory")

    def __str__(self) -> str:
        return ", ".join(self.parts)


@dataclass(frozen=True, slots=True)
class FoundCluster:
    """A cluster that this machine runs, found without its workspace.

    workspace: the folder where its workspace was. nodes: their number, without the controller.
    is_orphan: the workspace is missing, or belongs to another cluster.
    """

    id: str
    name: str
    provider: str
    workspace: str
    nodes: int
    is_orphan: bool


@dataclass(frozen=True, slots=True)
class CachedImage:
    """A node image in the cache of this machine. used_by: the ids of clusters that need it."""

    key: str
    size_mib: int
    used_by: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Provisioned:
    """The result of ``Provider.apply``: the hosts of the cluster (``inventory``), and notes for the
    user.

    made: names of new hosts. started: names of existing hosts that were off.
    from_template: names of the new hosts that started from a node template and already have all
        their files.
    """

    inventory: Inventory
    notes: tuple[str, ...] = ()
    made: tuple[str, ...] = ()
    started: tuple[str, ...] = ()
    from_template: tuple[str, ...] = ()


Action = Literal["make", "change", "replace", "remove", "keep"]


@dataclass(frozen=True, slots=True)
class HostChange:
    """The planned change of a host, as it is shown to the user.

    action: ``change`` keeps the host and its data; ``replace`` deletes both and recreates the host.
    what: the kind of machine, such as `g2-standard-8, spot`. why: the reason for the change.
    usd_per_hour: the cost after the change; for ``remove``, the present cost. None if zero or
        unknown.
    was_usd_per_hour: the present cost. None if the cost does not change.
    ends_jobs: the change ends the jobs of the host, which otherwise stays. stops: it stops the host
        for a while, so that local SSDs lose their files. off: the host is not running now.
    detached_disks: disks that were attached by hand, and that the change detaches.
    released: the host is an on-prem machine that is released instead of deleted.
    """

    name: str
    action: Action
    what: str
    why: str = ""
    usd_per_hour: float | None = None
    was_usd_per_hour: float | None = None
    ends_jobs: bool = False
    stops: bool = False
    off: bool = False
    released: bool = False
    detached_disks: tuple[str, ...] = ()

    @property
    def destroys(self) -> bool:
        return self.action in {"replace", "remove"} and not self.released


@dataclass(frozen=True, slots=True)
class Cost:
    """A cluster's USD an hour, ``now`` and after the plan (``then``), without the ``unpriced``
    resources.
    """

    now: float
    then: float
    unpriced: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class HostPlan:
    """The changes that ``Provider.apply`` would make.

    hosts: the change of each host; its action is ``keep`` if nothing changes.
    other: descriptions of the changes of other resources, such as networks.
    priced_on: the date of the price table. None: the provider has no price table.
    other_usd_per_hour: (cost now, cost after the plan) of other resources, without
        ``other_unpriced``.
    images: for each node template that must be built, a text with its machine, cost and time.
    distribution: the distribution of the hosts, if the provider has asked them.
    """

    hosts: tuple[HostChange, ...]
    other: tuple[str, ...] = ()
    priced_on: str | None = None
    other_usd_per_hour: tuple[float, float] = (0.0, 0.0)
    other_unpriced: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    images: tuple[str, ...] = ()
    distribution: Distribution | None = None

    @property
    def changes(self) -> tuple[HostChange, ...]:
        return tuple(host for host in self.hosts if host.action != "keep")

    @property
    def usd_per_hour(self) -> float | None:
        """The cluster's cost in USD an hour after the plan. None: a price is unknown."""
        return self.cost.then if self.cost and not self.cost.unpriced else None

    @property
    def may_cost_more(self) -> bool:
        """Whether the plan raises the cost, or creates a resource with an unknown price."""
        if self.cost is None:
            return False
        unknown = any(host.usd_per_hour is None for host in self.changes if host.action != "remove")
        more = self.cost.then > self.cost.now or bool(self.other and self.other_unpriced)
        return more or (unknown and self.priced_on is not None)

    @property
    def cost(self) -> Cost | None:
        """The cost of the cluster. None: no resource has a price, and the provider has no price
        table.
        """
        now, then = self.other_usd_per_hour
        unpriced = [host.name for host in self.hosts if host.usd_per_hour is None]
        for host in self.hosts:
            if (price := host.usd_per_hour) is not None:
                was = price if host.was_usd_per_hour is None else host.was_usd_per_hour
                if host.action != "make":
                    now += was
                if host.action != "remove":
                    then += price
        if (
            len(unpriced) == len(self.hosts)
            and not any(self.other_usd_per_hour)
            and self.priced_on is None
        ):
            return None
        return Cost(now, then, (*unpriced, *self.other_unpriced))


@dataclass(frozen=True, slots=True)
class Leftover:
    """A resource of a cluster that still exists, with its cost if known."""

    what: str
    usd_per_hour: float | None = None

    def __str__(self) -> str:
        cost = f" ({formatting.cost(self.usd_per_hour)} an hour)" if self.usd_per_hour else ""
        return self.what + cost


@dataclass(frozen=True, slots=True)
class Orphan:
    """A cluster without a workspace here.

    origin: the creator of the cluster, and where and when it was created. Empty: unknown. running:
        its daemons and jobs, a line for each. Empty: no daemon or job was seen, or the provider
        can't see them.
    """

    id: str
    origin: str = ""
    running: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class OrphanSearch:
    """The result of a search for orphans. ``failures``: a failure for each host that could not be
    searched.
    """

    found: tuple[Orphan, ...] = ()
    failures: tuple[Failure, ...] = ()


@dataclass(frozen=True, slots=True)
class HostOptions:
    """Options of ``Provider.plan`` and ``Provider.apply``.

    recreated: hosts that are deleted and created again.
    inputs: for ``plan``, hash of the configuration in the template of new compute nodes. "": no
        template.
    templates: for ``apply``, the templates of new hosts. None: new hosts start from the base
        image.
    """

    recreated: Collection[str] = ()
    inputs: str = ""
    templates: NodeTemplates | None = None


DEFAULTS: Final = HostOptions()


class Provider(ABC):
    """Creates and deletes hosts of clusters. Constructed from a spec's `provider` and ``Prompts``.

    A provider has all abstract methods, ``takes_single_hosts`` and ``recreates_hosts``. The other
    methods have defaults for a provider without the ability in question.

    known_shared: where hosts mount the shared folder. None: the provider has no node templates.
    template_groups: the groups of hosts (controller, compute) that can start from a node template.
    takes_single_hosts: whether single hosts can join, leave, and be configured alone. Otherwise the
        provider creates all hosts that the spec counts.
    recreates_hosts: whether a replaced host is deleted and created again. Otherwise its machine
        leaves the cluster, and another machine gets its name.
    """

    _settings: ProviderSettings
    known_shared: str | None = None
    template_groups: tuple[str, ...] = (COMPUTE,)
    takes_single_hosts: bool
    recreates_hosts: bool

    def start_ahead(self) -> None:
        """Start slow helper processes early, so that later method calls need not wait for them."""
        return

    @abstractmethod
    def check(self, spec: ClusterSpec) -> None:
        """Raise a UsageError for unsupported settings, a MachineError for missing tools. Contact no
        host.
        """

    def preflight(self, spec: ClusterSpec, workspace: Workspace) -> DoctorReport | None:
        """Return all problems that would make ``apply`` fail. None: ``check`` already finds all of
        them.
        """
        return None

    def prepare(self, spec: ClusterSpec, workspace: Workspace, *, bake: Bake) -> None:
        """Raise a MachineError if this machine can't run hosts. Build the node image unless it is
        cached.
        """
        return

    def prepare_templates(
        self,
        spec: ClusterSpec,
        workspace: Workspace,
        inputs: Mapping[str, str],
        *,
        bake: BakeTemplates,
    ) -> Mapping[str, str]:
        """Build missing node templates for new hosts. Return group of hosts -> key of its template.

        inputs: group -> hash of the configuration that its template contains.
        bake: called to configure the temporary machine of each missing template. May raise to
            abort.
        """
        return {}

    @abstractmethod
    def plan(
        self, spec: ClusterSpec, workspace: Workspace, options: HostOptions = DEFAULTS
    ) -> HostPlan:
        """Return the changes that ``apply`` would make, without making them.

        workspace: an empty workspace if the cluster is not up.

        Raise a MachineError if this machine can't run the hosts, a ProvisionError for any other
        failure.
        """

    @abstractmethod
    def apply(
        self, spec: ClusterSpec, workspace: Workspace, options: HostOptions = DEFAULTS
    ) -> Provisioned:
        """Create missing hosts and remove hosts that are not in the spec. A repeated call changes
        nothing.

        After a ``plan``, make only the planned changes. Raise a ProvisionError if a change fails.
        """

    def kill_host(self, cluster_id: str, host: str) -> None:
        """Kill a host at once. Only for hosts that share this machine's kernel."""
        raise TypeError("the provider's hosts have their own kernels")

    def signal_ranks(
        self, cluster_id: str, job: str, number: int, *, last: bool
    ) -> tuple[str, ...]:
        """Send a signal to a job's ranks. Only for hosts that share this machine's kernel.

        last: only to the rank with the highest number. Return the hosts of the ranks that got the
            signal.
        """
        raise TypeError("the provider's hosts have their own kernels")

    @abstractmethod
    def alive(self, cluster_id: str) -> bool:
        """Return whether a host of the cluster is running. A host that does not answer counts as
        running.
        """

    def require_rights(self) -> None:
        """Raise MachineError if the user lacks rights on this machine that `up` needs."""
        return

    @staticmethod
    def may_have_hosts(workspace: Workspace) -> bool:  # noqa: ARG004
        """Return whether the provider's own files in a workspace say that it may have made or taken
        hosts, for a cluster whose recorded spec is missing or damaged.
        """
        return False

    @abstractmethod
    def destroy(self, cluster_id: str, *, workspace: Workspace | None) -> None:
        """Delete a cluster's resources. Without a ``workspace``, find the resources by
        ``cluster_id``.
        """

    @abstractmethod
    def leftovers(self, cluster_id: str, *, workspace: Workspace | None) -> tuple[Leftover, ...]:
        """Find the existing resources of a cluster by ``cluster_id``.

        workspace: where the cluster was: its region, its machines. None: the workspace was lost.
        """

    @abstractmethod
    def orphans(self, name: str) -> OrphanSearch:
        """Find the caller's clusters that are called ``name`` and have no workspace any more.

        On machines that other people may also use for clusters, find the clusters of everybody.
        """

    def storages(self) -> tuple[KeptStorage, ...]:
        """Return the storages that exist: the caller's on this machine, or the project's."""
        return ()

    def remove_storage(self, storage: KeptStorage) -> None:
        """Delete a storage with all its files, if it exists. Raise a UsageError if it is in use."""
        raise TypeError("the provider has no storages")

    # Prices and images

    def node_price(self, spec: ClusterSpec, partition: str) -> float | None:
        """Return the price of a partition's node in USD an hour: that of the spec, or else that of
        the provider. None: unknown.
        """
        for candidate in spec.partitions:
            if candidate.name == partition:
                own_price = candidate.price_per_hour
                return self.price(spec, candidate) if own_price is None else own_price
        return None

    def price(self, spec: ClusterSpec, partition: Partition) -> float | None:
        """Return the provider's price of a partition's node in USD an hour, if it has one."""
        return None

    def recorded_cost(self, spec: ClusterSpec, workspace: Workspace) -> float | None:
        """Return the cost in USD an hour of the resources that an unfinished `up` created, if
        known.
        """
        return None

    def kept_images(self, *, prune: bool = False) -> tuple[KeptImage, ...]:
        """Return the node templates that the provider stores for a fee. With ``prune``, also delete
        them.
        """
        return ()

    def cached_images(self, *, prune: bool = False) -> tuple[CachedImage, ...]:
        """Return the node images in the cache of this machine. With ``prune``, delete and return
        only unused images.
        """
        return ()

    def clusters_here(self) -> tuple[FoundCluster, ...]:
        """Return the caller's clusters that run on this machine, with or without a workspace."""
        return ()

    # Single hosts, if `takes_single_hosts`

    def check_single_hosts(self) -> None:
        """Raise a UsageError unless ``takes_single_hosts``."""
        if not self.takes_single_hosts:
            self._reject_single_hosts()

    def check_replacement(self) -> None:
        """Raise a UsageError if single hosts can't be replaced."""
        self.check_single_hosts()

    def limited(
        self, spec: ClusterSpec, workspace: Workspace, limit: Collection[str]
    ) -> ClusterSpec:
        """Return the spec, changed so that only the hosts in ``limit`` change. All other hosts stay
        as they are. Raise a UsageError if the spec lacks such a host.
        """
        self._reject_single_hosts()

    def without(self, spec: ClusterSpec, names: Collection[str]) -> ClusterSpec:
        """Return the spec without these nodes. Raise a UsageError if a node is the controller, or
        no node is left.
        """
        self._reject_single_hosts()

    def _reject_single_hosts(self) -> NoReturn:
        raise UsageError(
            f"nodes of a {self._settings.type} cluster can only be changed in its spec",
            code="unsupported",
            about="nodes",
            where="provider.type",
            fix="change `nodes` of its partitions and run `clusterctl up`",
        )

    def record_pending(
        self, host: Host, inventory: Inventory, workspace: Workspace, *, why: str
    ) -> PendingRelease:
        """Record that a host of ``inventory`` left the cluster but is not released yet."""
        raise TypeError("the provider releases no hosts")

    # Clusters that other people operate

    def attach(self, request: AttachRequest) -> AttachedCluster:
        """Make a cluster that other people operate ready for jobs, or check it again. No job is
        submitted.

        Raises:
            UsageError: the site lacks something that jobs need, or the provider can't attach.
            SlurmError: Slurm accepts no job of this account.
            MachineError: the machine has no Slurm.
            TransferError: files can't be written there.
            TransportError: it can't be reached. LockedError: another `attach` is at work.
        """
        raise not_attached(self._settings.type)

    def record_proof(self, attached: AttachedCluster, proof: MpiProof) -> AttachedCluster:
        """Record the result of the job that proves MPI. Return the cluster with the job's facts."""
        raise not_attached(self._settings.type)

    def examine_site(self, workspace: Workspace) -> tuple[SiteFact, ...] | None:
        """Return facts about an attached cluster, and how each was learned. None: the provider's
        hosts can be examined instead.
        """
        return None

    def attached_place(self) -> AttachedPlace:
        """Return where the cluster of the settings is attached."""
        raise not_attached(self._settings.type)

    def attached_folder(self, transport: Transport, path: str, cluster_id: str) -> SiteFolder:
        """Return clusterctl's folder on an attached cluster, which has the mark ``cluster_id``."""
        raise not_attached(self._settings.type)


def load_known_inventory(workspace: Workspace) -> Inventory | None:
    """Return the inventory of the last `up`, with the hosts that an interrupted `up` was adding."""
    inventory: Inventory | None = None
    hosts: dict[str, Host] = {}
    for path in (workspace.joining, workspace.inventory):
        with suppress(FileNotFoundError, ValueError):
            inventory = Inventory.read(path.read_bytes())
            hosts |= {host.name: host for host in inventory.hosts}
    return inventory and replace(inventory, hosts=tuple(hosts.values()))


def load_known_hosts(workspace: Workspace) -> Mapping[str, Host]:
    inventory = load_known_inventory(workspace)
    return {host.name: host for host in inventory.hosts} if inventory else {}


@dataclass(frozen=True, slots=True)
class OfferedKey:
    """A machine's SSH host key that the user has not confirmed yet.

    title: the machine's name in known_hosts. key: `ssh-ed25519 AAAA...`.
    """

    title: str
    address: str
    key: str

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.key)

    @property
    def kind(self) -> str:
        return self.key.partition(" ")[0]

    @property
    def failure(self) -> Failure:
        file = f"/etc/ssh/ssh_host_{self.kind.removeprefix('ssh-').split('-')[0]}_key.pub"
        return Failure(
            HostKeyError.code,
            f"its host key is not confirmed yet: {self.kind} {self.fingerprint}",
            self.title,
            "plan",
            f"compare it with the output of `ssh-keygen -lf {file}` on that machine; if it is "
            "correct, log in there once with `ssh`, or run the command on a terminal, or write it "
            "into the spec as host_key",
        )


# The form of ``fingerprint``.
FINGERPRINT: Final = re.compile(r"SHA256:[A-Za-z0-9+/]{43}")


def fingerprint(key: str) -> str:
    """Return the fingerprint of a host key `ssh-ed25519 AAAA...`, as ssh-keygen shows it."""
    sha = hashlib.sha256(b64decode(key.split()[1])).digest()
    return f"SHA256:{b64encode(sha).decode().rstrip('=')}"


# Called with unknown host keys. Returns if the user confirms all of them; raises otherwise.
Confirm = Callable[[Sequence[OfferedKey]], None]
# Removes the cluster from these hosts, and reports what stays there, with the reasons.
RemoveCluster = Callable[[Inventory, Collection[str], Workspace, Reporter], None]


def reject_unknown_keys(offered: Sequence[OfferedKey]) -> None:
    """Raise a ProvisionError that lists the keys, for commands that don't ask the user to confirm
    keys.
    """
    raise ProvisionError.of_hosts(
        "unknown host keys: {hosts}",
        [key.failure for key in offered],
        code="host-key",
        about="unknown",
    )


@dataclass(frozen=True, slots=True)
class Prompts:
    """Callbacks that ask the user, and answers that the user has already given on the command line.

    confirm: called with unknown host keys. Raises to reject the keys.
    remove_cluster: called to remove the cluster from hosts that leave it.
    reporter: receives progress and notes.
    """

    confirm: Confirm = reject_unknown_keys
    remove_cluster: RemoveCluster = lambda _i, _h, _w, _s: None
    reporter: Reporter = SILENT


NO_PROMPTS: Final = Prompts()


@dataclass(frozen=True, slots=True)
class PendingRelease:
    """An on-prem machine that left the cluster and still has to be released.

    machine: login settings from the spec. since: when it left (Unix time). why: why it was not
        released.
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
        """The machine's name and address. The name alone may belong to another machine by now."""
        return f"{self.host.name} ({self.address})"

    @property
    def fix(self) -> str:
        return (
            "make the machine reachable: `clusterctl up` then releases it; or, if it is gone "
            f"for good: `clusterctl node forget {self.host.name}`"
        )

    @property
    def failure(self) -> Failure:
        command = f"`clusterctl down --forget {self.host.name}`"
        fix = f"make the machine reachable; or, if it is gone for good: {command}"
        return Failure(
            "leftovers", str(self), self.host.name, "destroy", fix, about="pending-release"
        )

    def __str__(self) -> str:
        return f"{self.title} is not released yet: {self.why}"

    def as_dict(self) -> dict[str, Any]:
        return {
            "host": self.host.name,
            "address": self.address,
            "since": self.since,
            "why": self.why,
        }

    def save(self) -> PendingRelease:
        """Write this object to a file in its ``workspace`` folder, and return it."""
        machine = self.machine.model_dump(mode="json")
        content = json.dumps({"since": self.since, "why": self.why, "machine": machine})
        write_atomic(self.workspace.root / _NOTE, f"{content}\n")
        return self

    def remove(self) -> None:
        root = Path(self.workspace.root)
        # Without its note, a half-deleted workspace is ignored.
        (root / _NOTE).unlink(missing_ok=True)
        shutil.rmtree(root, ignore_errors=True)
        # The parent is not empty if other releases are pending.
        with suppress(OSError):
            root.parent.rmdir()


def pending_releases(workspace: Workspace) -> tuple[PendingRelease, ...]:
    pending = []
    for path in sorted(workspace.releases.glob(f"*/{_NOTE}")):
        workspace_of_host = Workspace(path.parent)
        with suppress(FileNotFoundError, ValueError, KeyError):
            content = json.loads(path.read_bytes())
            host = Inventory.read(workspace_of_host.inventory.read_bytes()).hosts[0]
            machine = OnpremHost.model_validate(content["machine"])
            since = float(content["since"])
            reason = str(content["why"])
            pending.append(PendingRelease(workspace_of_host, host, machine, since, reason))
    return tuple(pending)


def address_of(host: Host) -> str:
    return host_port(host.ssh_address or host.address, host.port)


def host_port(host: str, port: int) -> str:
    """Return ``host``, or `[host]:port` unless the port is 22, as in known_hosts."""
    return host if port == 22 else f"[{host}]:{port}"  # noqa: PLR2004 - ssh's default port
