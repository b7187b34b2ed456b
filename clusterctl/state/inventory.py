"""The inventory of a cluster: its hosts, in the same form for all providers, and the settings of the
cluster that commands for jobs need.

The file `hosts.json` stores the inventory. Files for other tools are derived from it:
`inventory.yml` (``ansible-playbook -i``), `ssh_config` (``ssh -F``) and `known_hosts`.

This module does not import pydantic or the models of the spec, because that takes 0.1 s, and all
verbs about jobs read the inventory.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Final, Literal

from clusterctl.errors import NotUpError, SpecError, UsageError
from clusterctl.spec import distributions
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.names import (
    ADMIN_USER,
    FOLDER,
    MAX_ARRAY_SIZE,
    ROOT,
    did_you_mean,
)
from clusterctl.spec.scheduler import DEFAULT, NEEDS, SchedulerName, SchedulerNeeds
from clusterctl.state.workspace import Workspace, clusters_up
from clusterctl.util.assets import digest, render
from clusterctl.util.typed_json import from_json

if TYPE_CHECKING:
    from clusterctl.spec.common import ProviderSettings
    from clusterctl.spec.models import ClusterSpec

CONTROLLER = "controller"
COMPUTE = "compute"
LOGIN = "login"
# The architecture of all nodes, as `uname -m` prints it.
ARCHITECTURE = "x86_64"
# ssh and Ansible ask a silent host every `interval` seconds whether it is still there. After `count`
# questions without an answer, the connection has failed.
KEEPALIVE: Final = MappingProxyType({"interval": 15, "count": 3})
# Seconds after which a shared connection to a node ends without a command. What a job has left in a
# node's memory is removed at its end only if its user is not logged in there.
_NODE_IDLE_S: Final = 3
HEALTH_PROGRAM: Final = "/opt/clusterctl/health"
# Above the ephemeral ports of the kernel. The role firewall opens the same range.
SRUN_PORTS = "61000-64999"
# A tunnel may need this long to open.
PROXIED_TIMEOUT_S = 60
# A jump host may need this long to reach a host behind it, with the time of gcloud to open the
# tunnel.
JUMP_TIMEOUT_S = 30


@dataclass(frozen=True, kw_only=True)
class Host:
    """A machine of the cluster.

    address: the address that Slurm, MPI and the other hosts use.
    user: the account with which clusterctl becomes root. key_file: its private key. Default: on a
        machine of the user's own any of the user's keys, otherwise the cluster's.
    ssh_address: the address for SSH, if it is not ``address``.
    roles: a subset of CONTROLLER, COMPUTE and LOGIN.
    host_key: its public host key, as `ssh-ed25519 AAAA...`.
    distribution: ID and VERSION_ID of its os-release, or UNSEEN.
    cgroups: whether Slurm can use control groups on this host.
    cpus, memory_mib: the node's share of a machine, if several nodes share a machine. Slurm is
        configured with this share instead of the detected hardware (``config_overrides``).
    hostname: the machine's short hostname, if it is not ``name``.
    instance_id: id of the machine; a recreated host has another.
    proxy_command: program whose standard streams carry the SSH connection if there is no route to
        the host; `%p` stands for the port.
    jump: name of the host that SSH connects through, if there is no other way to the host.
    job_environment: variables for every job on the host, unless the job sets them; `{interface}` in
        a value stands for the host's interface on the cluster's network.
    local_ssds: number of local disks that form /scratch.
    """

    name: str
    address: str
    ssh_address: str | None = None
    port: int = 22
    user: str = ADMIN_USER
    key_file: str | None = None
    roles: tuple[str, ...]
    partition: str | None = None
    host_key: str
    distribution: str = distributions.BEFORE
    cgroups: bool = True
    cpus: int | None = None
    memory_mib: int | None = None
    hostname: str | None = None
    instance_id: str | None = None
    proxy_command: tuple[str, ...] = ()
    jump: str | None = None
    job_environment: Mapping[str, str] = field(default_factory=dict)
    local_ssds: int = 0

    @property
    def own_name(self) -> str:
        """The machine's own hostname, as `hostname -s` prints it."""
        return self.hostname or self.name

    @property
    def is_controller(self) -> bool:
        return CONTROLLER in self.roles

    @property
    def is_compute(self) -> bool:
        return COMPUTE in self.roles


@dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """The source of the folder that all hosts share.

    kind: `existing`: hosts have the folder mounted already. `nfs`: the controller exports the
        folder. `filestore`: a Filestore instance exports it. `server`: the user's NFS server
        exports it. `none`: no shared folder.
    server: address of the server that exports the folder.
    path: the exported path, unless it is mounted already.
    disk: device name of the controller's disk for the folder.
    """

    kind: Literal["existing", "nfs", "filestore", "server", "none"] = "existing"
    server: str | None = None
    path: str | None = None
    disk: str | None = None


@dataclass(frozen=True, slots=True)
class PartitionFacts:
    """A Slurm partition of the cluster.

    nodes: the names of its nodes, in order.
    max_time: the time limit of jobs in seconds. None: the spec sets no limit.
    gpus: number of GPUs of each node. None: the spec does not set it.
    """

    name: str
    nodes: tuple[str, ...]
    max_time: int | None = None
    gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Inventory:
    """The hosts of a cluster, the controller first, and facts about the cluster that tools and jobs
    need.

    network: CIDR that MPI and Slurm traffic uses. shared: path of the shared folder on every host.
    bucket: Cloud Storage bucket mounted at /bucket on every host.
    oversubscribed: whether the compute nodes share cores with each other.
    usd_per_hour: cost of the cluster at the prices of its last `up`.
    job_user: the account that jobs run as. "": not known yet.
    interval_s: seconds between two samples of telemetry.
    requirements: the pip requirements file for the Python of all jobs. None: the spec has no such
        file.
    max_array: Slurm's MaxArraySize; indices of job arrays are lower.
    max_submit: how many jobs of ``account`` Slurm's queue takes. None: unknown, or any number.
    root: the folder on the hosts with the software of jobs, such as their Python.
    folder: the folder with the job user's files of clusterctl: `SHARED/home/USER/clusterctl` on
        hosts that `up` configures, wherever the home is. A relative path starts at the home.
    python, glibc_minor: release of the Python of jobs, such as 3.11, and glibc
        2.``glibc_minor`` of the nodes. "": those of the hosts' distribution.
    no_accounting: why Slurm has no accounting that the job user may read. "": it has.
    account, qos: of jobs that name none. "": Slurm's defaults.
    is_foreign: whether other people run the cluster.
    slurm_path: the folder of Slurm's commands, if PATH may lack it. "": PATH has it.
    variables: the environment variables that Slurm's commands need beside those of any login.
    slurm_options: options of sbatch for jobs that do not set the same.
    is_routed: whether the site chooses the partition of each job itself, and refuses jobs that name
        one.
    pmix: whether Slurm itself starts the ranks of MPI programs.
    baked: whether the hosts' image has the install part of every role.
    """

    cluster: str
    cluster_id: str
    provider: str
    hosts: tuple[Host, ...]
    network: str
    shared: str
    shared_folder: SharedFolder = SharedFolder()
    bucket: str | None = None
    oversubscribed: bool = False
    usd_per_hour: float | None = None
    scheduler: SchedulerName = DEFAULT
    job_user: str = ""
    partitions: tuple[PartitionFacts, ...] = ()
    interval_s: int = 1
    requirements: str | None = None
    max_array: int = MAX_ARRAY_SIZE
    max_submit: int | None = None
    root: str = ROOT
    folder: str = FOLDER
    python: str = ""
    glibc_minor: int = 0
    no_accounting: str = ""
    account: str = ""
    qos: str = ""
    is_foreign: bool = False
    slurm_path: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    slurm_options: tuple[str, ...] = ()
    is_routed: bool = False
    pmix: bool = True
    baked: bool

    @classmethod
    def read(cls, content: bytes | str) -> Inventory:
        """Read the content of hosts.json. Raise ValueError if it is damaged."""
        record = json.loads(content)
        # Earlier versions wrote null until they knew the account.
        if isinstance(record, dict) and record.get("job_user", "") is None:
            del record["job_user"]
        return from_json(cls, record)

    @property
    def text(self) -> str:
        """The content of hosts.json."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    @property
    def traits(self) -> type[ProviderSettings]:
        from clusterctl.spec.models import traits_of  # noqa: PLC0415

        return traits_of(self.provider)

    @property
    def controller(self) -> Host:
        return next(h for h in self.hosts if h.is_controller)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(host.name for host in self.hosts)

    @property
    def compute(self) -> tuple[Host, ...]:
        """The hosts that run slurmd, in the order of the partitions."""
        return tuple(h for h in self.hosts if h.is_compute)

    @property
    def is_shared(self) -> bool:
        """Whether the hosts have a shared folder, with the home folders."""
        return self.shared_folder.kind != "none"

    @property
    def path(self) -> str:
        """The folders that PATH on the controller may lack: Slurm's, and that of the Python of
        jobs.
        """
        # On hosts that `up` configures, PATH has the Python of jobs.
        return self.slurm_path if self.root == ROOT else f"{self.slurm_path}:{self.root}/env/bin"

    @property
    def distribution(self) -> Distribution:
        return distributions.distribution_of(self.controller.distribution)

    @property
    def cgroups(self) -> bool:
        """Whether Slurm can confine jobs by control groups, which most containers don't allow."""
        return all(host.cgroups for host in self.compute)

    @property
    def constrains_devices(self) -> bool:
        """Whether Slurm hides a job's GPUs from other jobs. It can't if several nodes share a
        machine.
        """
        shares = any(host.cpus is not None and host.memory_mib is not None for host in self.compute)
        return self.scheduler_needs.has_daemons and self.cgroups and not shares

    @property
    def scheduler_needs(self) -> SchedulerNeeds:
        """The software that the hosts need for the scheduler."""
        return NEEDS[self.scheduler]

    @property
    def has_task_prolog(self) -> bool:
        """Whether jobs need a TaskProlog: hosts set variables in jobs."""
        return any(host.job_environment for host in self.hosts)

    def host(self, name: str) -> Host | None:
        return next((h for h in self.hosts if h.name == name), None)

    def ssh_config(self, workspace: Workspace, *, key: Path, idle_s: int) -> str:
        """Return the ssh_config of a workspace for all hosts.

        With it, ssh uses only the key and the workspace's known_hosts, and never prompts. Hosts
        behind a proxy command or a jump host get a longer connection timeout. Paths are quoted,
        because paths may contain spaces.

        idle_s: seconds after which a shared connection to the controller ends without a command.
        """
        timeouts = {
            host.name: JUMP_TIMEOUT_S if host.jump else PROXIED_TIMEOUT_S for host in self.hosts
        }
        # ssh fills in the user.
        names = {host.name: connection_name(host.name, host.host_key, "%r") for host in self.hosts}
        return render(
            "ssh_config.j2",
            hosts=self.hosts,
            names=names,
            workspace=workspace,
            key=key,
            idle_s=idle_s,
            node_idle_s=_NODE_IDLE_S,
            timeouts=timeouts,
            keepalive=KEEPALIVE,
            is_own=bool(self.provider) and self.traits.adopts_hosts,
        )

    def known_hosts(self) -> str:
        """Return the content of known_hosts: a line per host, under the host's name (see
        HostKeyAlias).
        """
        return "".join(f"{host.name} {host.host_key}\n" for host in self.hosts)


def connection_name(host: str, host_key: str, user: str) -> str:
    """Return the file name of the socket for the shared connection of a user to a host. A host that is
    created again has another key, and so other connections.
    """
    return f"{digest(host, host_key)[:12]}-{user}"


def inventory_of(workspace: Workspace) -> Inventory:
    """Read hosts.json, which `clusterctl up` writes. UsageError: the file is missing or damaged."""
    try:
        return Inventory.read(workspace.inventory.read_bytes())
    except ValueError as exc:
        raise damaged(workspace) from exc
    except FileNotFoundError as exc:
        raise not_up(workspace) from exc


def job_inventory(workspace: Workspace) -> Inventory:
    """Read hosts.json like ``inventory_of``, for commands about jobs.

    UsageError: the inventory of an unfinished `up` lacks facts that jobs need.
    """
    inventory = inventory_of(workspace)
    has_controller = any(host.is_controller for host in inventory.hosts)
    if not (has_controller and inventory.partitions and inventory.job_user):
        raise damaged(workspace)
    return inventory


def inventory_if_known(workspace: Workspace) -> Inventory | None:
    """Read hosts.json like ``inventory_of``, but return None if the file is missing or damaged."""
    with suppress(UsageError):
        return inventory_of(workspace)
    return None


def applied_spec(workspace: Workspace) -> ClusterSpec:
    """Return the spec of the last `clusterctl up`. The user may have changed the spec file since
    then.

    Raise UsageError if the file is missing or damaged: clusterctl wrote it, so no user can correct
    its lines.
    """
    from clusterctl.spec.load import load_spec  # noqa: PLC0415 - as above

    try:
        return load_spec(workspace.spec, recorded=True)
    except SpecError as exc:
        raise no_spec(workspace, str(exc.problems[0])) from exc


def applied_if_known(workspace: Workspace) -> ClusterSpec | None:
    """Return the spec of the last `clusterctl up`; None if it is missing or damaged."""
    with suppress(UsageError):
        return applied_spec(workspace)
    return None


def keeps_storage(workspace: Workspace) -> bool:
    """Return whether the shared folder of the last `up` outlives the cluster, as far as known."""
    spec = applied_if_known(workspace)
    return spec is not None and spec.storage.name is not None


def planned_distribution(spec: ClusterSpec, workspace: Workspace) -> Distribution | None:
    """Return the Linux distribution that the hosts have or will have; None before `up` has looked
    at them.
    """
    try:
        return inventory_of(workspace).distribution
    except UsageError:
        release = spec.provider.expected_release(spec)
        return distributions.distribution_of(release) if release else None


def not_up(workspace: Workspace) -> NotUpError:
    """Return the error for a cluster that is not up."""
    message = f"cluster {workspace.root.name!r} is not up"
    command = workspace.update
    if not workspace.root.exists():
        command += " (`clusterctl attach` if other people operate the cluster)"
    fix = f"run {command} first, or choose another cluster with --cluster"
    fix += " (`clusterctl list` shows all)"
    error = NotUpError(message, where=str(workspace.root), fix=fix)
    near = did_you_mean(workspace.root.name, clusters_up())
    error.fix = " Otherwise ".join(filter(None, (near, error.fix)))
    return error


def damaged(workspace: Workspace) -> UsageError:
    """Return the error for a cluster with a damaged hosts.json."""
    message = f"the record of cluster {workspace.root.name!r} is damaged"
    fix = f"run {workspace.update}, which writes the record again"
    return UsageError(
        message, code="record-damaged", about="cluster", where=str(workspace.inventory), fix=fix
    )


def applied_text(workspace: Workspace) -> bytes:
    """Return the text of the spec of the last `clusterctl up`. Raise UsageError if it can't be
    read.
    """
    try:
        return workspace.spec.read_bytes()
    except OSError as exc:
        raise no_spec(workspace, exc.strerror or str(exc)) from exc


def no_spec(workspace: Workspace, reason: str = "") -> UsageError:
    """Return the error for a cluster whose spec of the last `up` is missing or damaged."""
    name = workspace.root.name
    fix = (
        f"run {workspace.update}, which writes the record again"
        if workspace.login.exists()
        else "run `clusterctl up -f FILE` with the cluster's spec file, which records it again; "
        f"`clusterctl down --cluster {name}` removes the cluster without it"
    )
    return UsageError(
        f"clusterctl's own record of the spec of cluster {name!r} can't be read",
        code="record-damaged",
        about="spec",
        where=str(workspace.spec),
        why=reason,
        fix=fix,
    )


def planned_inventory(spec: ClusterSpec) -> Inventory:
    """Return the inventory that the cluster of a spec has or will have, as far as commands for jobs
    need it; the cluster need not be up.
    """
    settings = job_settings(spec)
    nodes = dict.fromkeys(node for part in settings["partitions"] for node in part.nodes)
    return Inventory(
        cluster=spec.name,
        cluster_id="",
        provider=spec.provider.type,
        hosts=tuple(
            Host(
                name=name,
                address="",
                roles=(
                    *((CONTROLLER,) if name == spec.controller_host else ()),
                    *((COMPUTE,) if name in nodes else ()),
                ),
                host_key="",
            )
            for name in dict.fromkeys((spec.controller_host, *nodes))
        ),
        network="",
        shared="",
        baked=False,
        **settings,
    )


def _partitions(spec: ClusterSpec) -> Iterator[PartitionFacts]:
    gpus: dict[str, int | None] = {}
    for partition in spec.partitions:
        count = partition.gpus.count if partition.gpus else None
        names = spec.node_names(partition)
        gpus |= dict.fromkeys(names, count)
        yield PartitionFacts(partition.name, names, partition.max_time, count)
    for line, names in spec.more_partitions.items():
        counts = {gpus[name] for name in names}
        yield PartitionFacts(
            line.value, names, line.max_time_s, counts.pop() if len(counts) == 1 else None
        )


def folder_of_jobs(shared: str, user: str) -> str:
    """Return ``Inventory.folder`` of a user on hosts that `up` configures. shared: their folder, which
    each has for itself if they share none.
    """
    return f"{shared}/home/{user}/{FOLDER}"


def job_settings(spec: ClusterSpec) -> dict[str, Any]:
    """Return the fields of ``Inventory`` that job commands need, from a spec: name of the field ->
    value.
    """
    requirements = spec.software.python.requirements
    return {
        "scheduler": spec.scheduler,
        "job_user": spec.users[0].name if spec.users else "",
        "partitions": tuple(_partitions(spec)),
        "interval_s": spec.monitoring.interval,
        "requirements": None if requirements is None else str(requirements),
        "max_array": spec.slurm.max_array,
    }
