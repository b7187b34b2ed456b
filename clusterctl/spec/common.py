"""The parts of a spec that all providers share: partitions, users, software, Slurm's settings.

Checks that compare several fields are in ``models`` and in the module of each provider.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from ipaddress import IPv4Network
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    ConfigDict,
    Field,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from clusterctl.errors import BadValueError, UsageError
from clusterctl.spec.base import (
    PATTERNS,
    UNKNOWN,
    DurationS,
    Loc,
    SizeMib,
    SlurmName,
    SpecFault,
    SpecModel,
    UnixName,
    Usd,
    at_least,
    spelled,
)
from clusterctl.spec.hosts import HostRange, OnpremHost, PublicKey, Switch, expand
from clusterctl.spec.names import (
    ADMIN_USER,
    DATA,
    MAX_ARRAY_SIZE,
    MAX_COUNT,
    PROOF_PARTITION,
    key_mark,
)
from clusterctl.spec.scheduler import NEEDS, SchedulerNeeds
from clusterctl.spec.slurm_lines import SLURM_LINE, SlurmLine, nodes_of, parse_line
from clusterctl.spec.software import Software
from clusterctl.util import formatting
from clusterctl.util.assets import read_table

ClusterName = Annotated[str, PATTERNS["label"]]
# The names that Slurm accepts, for clusters that other people operate.
AccountName = Annotated[str, PATTERNS["account"]]

# With less memory, not even the verification job fits beside Slurm's daemons.
LEAST_MEMORY_MIB: Final = 256
_RESERVED: Final = read_table(DATA / "reserved.toml", dict[str, tuple[str, ...]])
RESERVED_USERS = frozenset(" ".join(_RESERVED["users"]).split())
# Slurm's own account, and the account of the verification partition.
RESERVED_ACCOUNTS = frozenset({"root", ADMIN_USER})
# The controller's host name ends in -ctl. Slurm reads a partition DEFAULT as defaults of all
# partitions.
RESERVED_PARTITIONS = frozenset({"ctl", "default", PROOF_PARTITION})


def _slurm_line(line: str) -> str:
    parse_line(line)
    return line


def _other_than(reserved: Collection[str], description: str) -> AfterValidator:
    def check(name: str) -> str:
        if name in reserved:
            raise BadValueError("name-reserved", f"{name!r} is reserved: it is {description}")
        return name

    return AfterValidator(check)


_SlurmText = Annotated[
    str, AfterValidator(_slurm_line), WithJsonSchema({"type": "string", "pattern": SLURM_LINE})
]
UserAccount = Annotated[
    AccountName, _other_than(RESERVED_ACCOUNTS, "an account of clusterctl or Slurm")
]

Limits = Mapping[
    Annotated[str, PATTERNS["limit_name"]],
    # Not of a bool, which is an int.
    Annotated[
        str,
        BeforeValidator(lambda raw: str(raw) if type(raw) is int else raw),
        PATTERNS["limit_value"],
        WithJsonSchema(
            {"type": ["string", "integer"], "minimum": 0, "pattern": PATTERNS["limit_value"].regex}
        ),
    ],
]

MOST_GPUS: Final = 16


class Gpus(SpecModel):
    """The GPUs of a node."""

    type: Annotated[str, PATTERNS["gpu_type"]] = Field(
        description="their type, such as l4, t4, a100, h100"
    )
    count: Annotated[int, Field(ge=1, le=MOST_GPUS, strict=True)] = Field(
        1, description="number per node"
    )

    def __str__(self) -> str:
        return f"{self.count} x {self.type}"


# With shorter intervals, slurmctld would never ask resumed nodes for their health.
_Interval = Annotated[DurationS, at_least("5s")]


class Health(SpecModel):
    """The health check. It drains nodes that fail, and resumes nodes once they pass. See
    docs/gpus.md.
    """

    interval: _Interval = spelled("1m", "time between two checks of a node")
    gpu_temperature: Annotated[int, Field(ge=40, le=120, strict=True)] = Field(
        90, description="highest GPU temperature that passes, in °C"
    )
    disk_free: SizeMib = spelled("50MiB", "least free space on each local file system of a node")
    clock_offset: DurationS = spelled("5s", "largest clock offset, where chrony runs")


class Monitoring(SpecModel):
    """The telemetry step that runs beside every job, and the health of nodes."""

    interval: DurationS = spelled("2s", "time between two samples of a node")
    missed_checks: Annotated[int, Field(ge=0, le=600, strict=True)] = Field(
        3,
        description="checks (each second) that a node may miss before its jobs start elsewhere, if all "
        "have `--requeue`; large clusters allow more. 0: Slurm decides, after a minute",
    )
    health: Health = Field(
        Health(), description="the limits and the interval of the nodes' health check"
    )


class Storage(SpecModel):
    """The shared folder, /shared on the hosts: home folders, datasets, output of jobs. See
    docs/data.md.
    """

    name: ClusterName | None = Field(
        None,
        description="a storage that outlives clusters: `up` creates it if it is missing, `down` never "
        "touches it, `storage remove` deletes it; default: the folder goes with the cluster",
    )


class Partition(SpecModel):
    """A Slurm partition of equal nodes, named ``<cluster>-<partition>-1`` and so on, or as in
    ``hosts``.
    """

    # `nodes` may be left out if `hosts` is given.
    model_config = ConfigDict(
        json_schema_extra={
            "required": ["name"],
            "anyOf": [{"required": ["nodes"]}, {"required": ["hosts"]}],
        }
    )

    name: SlurmName = Field(description="the partition's name in Slurm and in its nodes' names")
    nodes: Annotated[
        int, Field(ge=1, strict=True, description="number of nodes; with hosts, their number")
    ]
    hosts: HostRange | None = Field(
        None, description="its nodes, on your own machines, such as gpu[01-08]"
    )
    cpus: Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)] | None = Field(
        None,
        description="cores of each local node; by default this machine's, divided among the nodes",
    )
    memory: Annotated[SizeMib, at_least(formatting.exact_size(LEAST_MEMORY_MIB))] | None = Field(
        None,
        description="memory of each local node; by default this machine's, divided among the nodes",
    )
    gpus: Gpus | None = Field(
        None,
        description="GPUs of each node; they select a cloud's machine type; local nodes have no GPUs",
    )
    price_per_hour: Usd | None = Field(
        None,
        description="price of a node in USD per hour; by default the built-in price of the cloud",
    )
    max_time: DurationS | None = Field(
        None, description="longest time limit of a job; default: unlimited"
    )

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, value: object) -> object:
        if not isinstance(value, Mapping) or "nodes" in value or value.get("hosts") is None:
            return value
        try:
            return {**value, "nodes": len(expand(value["hosts"]))}
        except (TypeError, ValueError):
            # The field `hosts` reports this mistake.
            return {**value, "nodes": 1}


class User(SpecModel):
    """An ordinary account, the same on all nodes. The first user runs the jobs that clusterctl
    submits.
    """

    name: Annotated[UnixName, _other_than(RESERVED_USERS, "a system account")] = Field(
        description="the account's name"
    )
    uid: Annotated[int, Field(ge=1000, le=60000, strict=True)] = Field(
        description="the account's uid, which is also its group's gid"
    )
    accounts: tuple[UserAccount, ...] = Field(
        ("default",), min_length=1, description="Slurm accounts; the first is the default"
    )
    limits: Limits = Field(
        {},
        description="Slurm's limits of this user in each of these accounts, by the names of sacctmgr, such "
        "as MaxJobs: 4",
    )
    ssh_keys: tuple[PublicKey, ...] = Field(
        (),
        description="SSH public keys that may log in as this account, each as text or as the name of a "
        "file, relative to this file or to ~",
    )


class Qos(SpecModel):
    """A Slurm quality of service that jobs may request with ``--qos``."""

    name: AccountName = Field(description="its name, as jobs request it")
    priority: Annotated[int, Field(ge=0, le=1_000_000, strict=True)] = Field(
        0, description="added to the priority of its jobs"
    )
    limits: Limits = Field(
        {},
        description="Slurm's limits of its jobs, by the names of sacctmgr, such as MaxWall: 60",
    )


class SlurmAccount(SpecModel):
    """A Slurm account that users may charge. An account without limits need not be listed."""

    name: UserAccount = Field(description="its name, as in `users[].accounts`")
    limits: Limits = Field(
        {},
        description="Slurm's limits of the account, by the names of sacctmgr, such as "
        "GrpTRESMins: gres/gpu=6000",
    )


class SlurmSettings(SpecModel):
    """Slurm's settings beyond the defaults."""

    accounts: tuple[SlurmAccount, ...] = Field(
        (), description="accounts with limits; default: those of `users[].accounts`, without limits"
    )
    qos: tuple[Qos, ...] = Field(
        (), description="qualities of service in addition to Slurm's `normal`"
    )
    extra: tuple[_SlurmText, ...] = Field(
        (),
        description="slurm.conf lines, except keys that clusterctl sets; also more partitions and node "
        "sets",
    )

    @property
    def lines(self) -> tuple[SlurmLine, ...]:
        """The lines of ``extra``."""
        return tuple(parse_line(line) for line in self.extra)

    @property
    def max_array(self) -> int:
        """Slurm's MaxArraySize: indices of job arrays are lower."""
        values = (line.value for line in self.lines if line.key.lower() == "maxarraysize")
        return next((int(value) for value in values if value.isdecimal()), MAX_ARRAY_SIZE)


@dataclass(frozen=True, slots=True)
class MachineType:
    """A type of rented machines, and the GPUs of each such as `1 x l4`, or empty."""

    name: str
    gpus: str = ""


@dataclass(frozen=True, slots=True)
class RentedMachines:
    """The machine types of a cluster. partitions: those of the nodes by partition."""

    controller: MachineType
    partitions: Mapping[str, MachineType]


# A key that a provider or a scheduler does not allow, such as `users` or `partitions.gpus`; the
# message; the fix.
Refusal = tuple[str, str, str]

OF_OWN_MACHINES: Final[Refusal] = (
    "partitions.hosts",
    "hosts is only for your own machines",
    "write nodes, or provider: {type: onprem}",
)


class ProviderSettings(SpecModel):
    """Settings of a provider. Class variables and properties tell how it differs from other
    providers. Each provider declares all class variables; the properties are optional.

    refuses: the keys of a spec that must keep their default.
    foreign: whether other people operate the cluster, and the user only has an account there.
    adopts_hosts: whether the hosts exist before the cluster: `up` takes them as they are, and
        `down` restores them, with their files.
    may_have_fabric: whether the hosts may have a fast network besides Ethernet, such as InfiniBand.
    shares_kernel: whether the hosts use this machine's kernel. Then they can't reboot and have no
        firewall.
    is_cloud: whether the hosts are rented, by machine type.
    late_account_fix: the fix if a new host keeps refusing the key, where hosts publish their host
        keys before they create the account of clusterctl. "": they have it from the start.
    first_verb: the verb of clusterctl that makes a cluster of a spec ready for jobs.
    default_uid: uid of the job user if the spec has no users. None: the uid that runs clusterctl.
    """

    type: str
    refuses: ClassVar[tuple[Refusal, ...]]
    foreign: ClassVar[bool]
    adopts_hosts: ClassVar[bool]
    may_have_fabric: ClassVar[bool]
    shares_kernel: ClassVar[bool]
    is_cloud: ClassVar[bool]
    late_account_fix: ClassVar[str]
    first_verb: ClassVar[str]
    default_uid: ClassVar[int | None]

    @classmethod
    def of_project(cls, project: str) -> ProviderSettings | None:  # noqa: ARG003
        """Return settings for a search of a whole project of this cloud. None: not a cloud with
        projects.
        """
        return None

    @classmethod
    def of_login(cls, login: str) -> ProviderSettings | None:  # noqa: ARG003
        """Return settings to attach a cluster by its login, which is not checked yet. None: the
        provider attaches no clusters.
        """
        return None

    @property
    def keys(self) -> frozenset[str]:
        """Paths of the private keys that the spec names, for the first login to hosts."""
        return frozenset()

    @property
    def machines(self) -> Mapping[str, OnpremHost]:
        """Host name -> address and login, for machines of the user. Empty if clusterctl creates the
        hosts.
        """
        return {}

    @property
    def known_network(self) -> IPv4Network | None:
        """The cluster's network if the spec names it. None: clusterctl must ask the hosts."""
        return None

    @property
    def switches(self) -> Mapping[str, Switch]:
        """Name -> switch of the fast network between hosts. Empty if the spec has no key
        `fabric`.
        """
        return {}

    @property
    def location(self) -> Mapping[str, str]:
        """The values of ``project`` and ``zone`` if the hosts are rented. Otherwise empty."""
        return {}

    def baking(self) -> Self:
        """Return a copy of these settings with `image.bake` enabled, so that `up` builds a node
        image.

        Raises:
            UsageError: the provider can't build images in advance.
        """
        raise UsageError(
            f"there is no image to build: the provider is {self.type}",
            code="unsupported",
            about="bake",
            fix="run `clusterctl up`, which builds everything that the nodes need",
        )

    @property
    def idle_timeout_s(self) -> int | None:
        """The idle time in seconds after which the cluster shuts itself down. None: it stays up."""
        return None

    @classmethod
    def reject_operation(cls, cluster: str) -> None:
        """Raise UsageError if users may not change the hosts of such a cluster."""

    def rented_machines(self, spec: ClusterBase) -> RentedMachines | None:  # noqa: ARG002
        """Return the machine types of all hosts if the hosts are rented."""
        return None

    def rejection(self, spec: ClusterBase) -> UsageError | None:  # noqa: ARG002
        """Return the error with which `up` would reject this valid spec. None: `up` accepts it."""
        return None

    def faults(self, spec: ClusterBase) -> Iterator[SpecFault]:  # noqa: ARG002
        """Yield contradictions between fields of a spec with this provider. A wrong field may be
        UNKNOWN.
        """
        yield from ()

    def controller_of(self, cluster: str) -> str:
        """Return the host name of the controller of the cluster with this name."""
        return f"{cluster}-ctl"

    def with_images(self, spec: ClusterBase, raised: ClusterBase | None) -> Self:  # noqa: ARG002
        """Return a copy of these settings with each host's image. ``raised``: the running cluster's
        spec.
        """
        return self

    def expected_release(self, spec: ClusterBase) -> str | None:  # noqa: ARG002
        """Return the distribution of all hosts. None: unknown until clusterctl connects to the
        hosts.
        """
        return None


class ClusterBase(SpecModel):
    """The part of a cluster spec that all providers share."""

    # Only the subclass ClusterSpec is ever instantiated.
    model_config = ConfigDict(defer_build=True)

    version: Literal[1] = Field(description="the version of this file's format")
    name: ClusterName = Field(description="the cluster's name, first part of its hosts' names")
    provider: ProviderSettings
    partitions: tuple[Partition, ...] = Field(
        min_length=1, description="the nodes, by Slurm partition"
    )
    users: tuple[User, ...] = Field(
        (),
        description="accounts on all nodes; default: you (with uid 10000 on gcp), or hpc if you are root",
    )
    software: Software = Field(Software(), description="software on the nodes beyond the defaults")
    storage: Storage = Field(Storage(), description="the shared folder, if it outlives the cluster")
    scheduler: Literal["slurm", "none"] = Field(
        "slurm",
        description="the scheduler of jobs; none: plain mpirun over SSH, a single job at a time",
    )
    slurm: SlurmSettings = Field(
        SlurmSettings(), description="Slurm's settings beyond the defaults"
    )
    monitoring: Monitoring = Field(
        Monitoring(),
        description="the telemetry step that runs beside every job, and the health of nodes",
    )

    @field_validator("version", mode="before")
    @classmethod
    def _plain_one(cls, value: object) -> object:
        # Otherwise `true` and 1.0 would be accepted as 1.
        return str(value) if isinstance(value, bool | float) else value

    @property
    def job_user(self) -> User:
        """The account that jobs run as. Needs a spec from ``resolve_spec``, which fills in
        ``users``.
        """
        return self.users[0]

    @property
    def key_mark(self) -> str:
        """See ``names.key_mark``."""
        return key_mark(self.name)

    def key_lines(self, user: User) -> tuple[str, ...]:
        """Return the lines of authorized_keys for the keys that the spec lists for a user."""
        return tuple(f"{key}{self.key_mark}" for key in user.ssh_keys)

    @property
    def scheduler_needs(self) -> SchedulerNeeds:
        """The software that the hosts need for the scheduler."""
        return NEEDS[self.scheduler]

    @property
    def has_slurm(self) -> bool:
        """Whether Slurm runs the jobs. Otherwise plain mpirun runs the jobs over SSH."""
        return self.scheduler == "slurm"

    @property
    def node_count(self) -> int:
        """The number of nodes of all partitions, without the controller."""
        return sum(partition.nodes or 0 for partition in self.partitions)

    @property
    def controller_host(self) -> str:
        """The host name of the machine that runs slurmctld, slurmdbd and MariaDB."""
        return self.provider.controller_of(self.name)

    def node_names(self, partition: Partition) -> tuple[str, ...]:
        if partition.hosts is not None:
            return expand(partition.hosts)
        return tuple(f"{self.name}-{partition.name}-{i}" for i in range(1, partition.nodes + 1))

    @property
    def nodes_by_partition(self) -> dict[str, tuple[str, ...]]:
        """Name of a partition -> the names of its nodes."""
        return {partition.name: self.node_names(partition) for partition in self.partitions}

    @property
    def more_partitions(self) -> dict[SlurmLine, tuple[str, ...]]:
        """Line of ``slurm.extra`` that defines another partition -> the names of its nodes."""
        nodes = self.nodes_by_partition
        lines = self.slurm.lines
        defined = (
            line for line in lines if line.defines == "partitionname" and line.value not in nodes
        )
        return {line: nodes_of(line, lines, nodes) for line in defined}

    def refused(self, rows: Iterable[Refusal]) -> Iterator[SpecFault]:
        """Yield a fault for each key in ``rows`` that the spec sets. Ignore keys with the value
        UNKNOWN.
        """
        for key, message, fix in rows:
            for loc, settings, name in self._places(key):
                value = getattr(settings, name, UNKNOWN)
                if value is not UNKNOWN and value != type(settings).model_fields[name].default:
                    yield SpecFault("not-here", (*loc, name), message, fix, at_key=True)

    def _places(self, key: str) -> list[tuple[Loc, SpecModel, str]]:
        """Return the models that have a key such as `users`, `slurm.qos` or `partitions.gpus`, each
        with its place and the key's name there.
        """
        top, _, name = key.partition(".")
        if not name:
            return [((), self, top)]
        section = getattr(self, top)
        if isinstance(section, SpecModel):
            return [((top,), section, name)]
        return [((top, index), entry, name) for index, entry in enumerate(section)]
