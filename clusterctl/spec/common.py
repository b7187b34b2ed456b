"""What a spec says whichever its provider: hosts, partitions, users, software, Slurm's settings.

Frozen, unknown keys refused, every field documented for the JSON Schema. What concerns one field stands at
the field; what concerns several, in ``models`` and with each provider.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from ipaddress import IPv4Network
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
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
    Fault,
    FileName,
    Model,
    SizeMib,
    Toggle,
    Url,
    Usd,
    at_least,
    spelled,
)
from clusterctl.spec.hosts import HostRange, OnpremHost, Switch, expand
from clusterctl.spec.names import ADMIN_USER, DATA, MAX_COUNT, PROOF_PARTITION
from clusterctl.spec.units import format_size, shown
from clusterctl.util.assets import table

ClusterName = Annotated[str, PATTERNS["label"]]
PartitionName = Annotated[str, PATTERNS["label"]]
UnixName = Annotated[str, PATTERNS["unix_name"]]
AccountName = Annotated[str, PATTERNS["account"]]

LEAST_DISK_MIB: Final = 64
LEAST_MEMORY_MIB: Final = 256  # less, and not even the proof job fits beside the daemons
# Our account's uid and gid where we make it: outside the ranges of Debian and EL for people, and of `users`.
ADMIN_ID = 64100
_RESERVED: Final = table(DATA / "reserved.toml", dict[str, tuple[str, ...]])
RESERVED_USERS = frozenset(" ".join(_RESERVED["users"]).split())
RESERVED_ACCOUNTS = frozenset({"root", ADMIN_USER})  # Slurm's own, and that of the proof partition
# `ctl` is the controller's; Slurm takes a partition called DEFAULT, in any case, as defaults for the rest.
RESERVED_PARTITIONS = frozenset({"ctl", "default", PROOF_PARTITION})

OWNED_SLURM_KEYS = frozenset(" ".join(_RESERVED["slurm_keys"]).lower().split())
# One setting a line: Slurm would take several, and so one hidden behind another.
_SLURM_LINE = r'^[A-Za-z0-9_.]+ *= *("[^"#\\]*"|[^ "#\\]+)$'


def _slurm_line(line: str) -> str:
    key = line.partition("=")[0].strip()
    if not line.isprintable() or re.search(_SLURM_LINE, line) is None:
        raise BadValueError("not-a-setting", f"{shown(line)} is not one Key=value line of slurm.conf")
    if key.lower() in OWNED_SLURM_KEYS:
        raise BadValueError("setting-reserved", f"{key} is rendered by clusterctl and can't be set here")
    return line


def _other_than(reserved: Collection[str], what: str) -> AfterValidator:
    def check(name: str) -> str:
        if name in reserved:
            raise BadValueError("name-reserved", f"{name!r} is {what}")
        return name

    return AfterValidator(check)


SlurmLine = Annotated[
    str, AfterValidator(_slurm_line), WithJsonSchema({"type": "string", "pattern": _SLURM_LINE})
]
UserAccount = Annotated[
    AccountName, _other_than(RESERVED_ACCOUNTS, "an account that clusterctl or Slurm uses itself")
]


MOST_GPUS: Final = 16


class Gpus(Model):
    """The GPUs of a node."""

    type: Annotated[str, PATTERNS["gpu_type"]] = Field(description="their type, such as l4, t4, a100, h100")
    count: Annotated[int, Field(ge=1, le=MOST_GPUS, strict=True)] = Field(
        1, description="how many on each node"
    )

    def __str__(self) -> str:
        """``2 x l4``."""
        return f"{self.count} x {self.type}"


# The last branch for Maxwell, Pascal and Volta, which need proprietary modules; the first without these.
LAST_FOR_VOLTA: Final = 580
_OPEN_ALONE: Final = 620


class Nvidia(Model):
    """What hosts with NVIDIA's cards get; a driver that is there is left alone. See docs/gpus.md."""

    driver: Literal["present", "open", "proprietary"] = Field(
        "present",
        description="install a driver where there is none: NVIDIA's with open kernel modules (for Turing and "
        "newer: RTX 20, T4, A100, H100), or its proprietary one; present: install none",
    )
    branch: Annotated[str, PATTERNS["branch"]] | None = Field(
        None,
        description="of that driver; by default NVIDIA's newest, and 580 of the proprietary one",
        examples=["580"],
    )
    toolkit: Annotated[str, PATTERNS["toolkit"]] | None = Field(
        None,
        description="the CUDA toolkit of this version; by default none: CuPy brings CUDA's libraries",
        examples=["12.9"],
    )
    nccl: Toggle = Field(False, description="NCCL as a package, for programs that are not Python's")
    dcgm: Toggle = Field(False, description="NVIDIA's data center GPU manager, and run it")

    @model_validator(mode="after")
    def _of_a_driver(self) -> Self:
        if self.branch and self.driver == "present":
            raise BadValueError("driver-branch", "branch is for an installed driver: write driver: open, too")
        if self.driver == "proprietary" and int(self.branch or 0) >= _OPEN_ALONE:
            raise BadValueError(
                "driver-branch",
                f"from branch {_OPEN_ALONE} on there is no proprietary driver: write driver: open",
            )
        return self

    @property
    def of_branch(self) -> str | None:
        """The branch of a driver that is installed; None: the newest."""
        return self.branch or (str(LAST_FOR_VOLTA) if self.driver == "proprietary" else None)

    @property
    def has_driver(self) -> bool:
        """Whether a driver is installed where there is none."""
        return self.driver != "present"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the role cuda whose packages a host may need; which of them, it decides itself."""
        chosen = {
            self.driver: self.has_driver,
            "toolkit": self.toolkit is not None,
            "nccl": self.nccl,
            "dcgm": self.dcgm,
        }
        return tuple(part for part, is_wanted in chosen.items() if is_wanted)

    @property
    def installs(self) -> bool:
        return self != Nvidia()


# Checks that follow each other sooner keep slurmctld from asking resumed nodes.
_Interval = Annotated[DurationS, at_least("5s")]


class Health(Model):
    """The health check: a node that fails it is drained, and resumed once it passes. See docs/gpus.md."""

    interval: _Interval = spelled("1m", "time between two checks of a node")
    gpu_temperature: Annotated[int, Field(ge=40, le=120, strict=True)] = Field(
        90, description="highest GPU temperature that passes, in °C"
    )
    disk_free: SizeMib = spelled("50MiB", "least free space on each local file system of a node")
    clock_offset: DurationS = spelled("5s", "largest clock offset, where chrony runs")


class PythonSettings(Model):
    """The Python environment of jobs."""

    requirements: FileName | None = Field(
        None,
        description="a requirements file, as pip reads it; relative to this file; "
        "jobs find these packages beside those that every cluster has",
    )


class Repository(Model):
    """A mirror of a project's package repository."""

    url: Url = Field(description="where it is")
    key: Url | None = Field(
        None, description="its signing key, where the key or its URL is not the project's"
    )


class Mirrors(Model):
    """Mirrors of the repositories that are not the distribution's own."""

    epel: Repository | None = Field(None, description="EPEL, which has Slurm for Rocky Linux and RHEL")
    openhpc: Repository | None = Field(
        None,
        description="OpenHPC for Rocky Linux and RHEL, up to its version: http://mirror.example.org/OpenHPC/3",
    )
    nvidia: Repository | None = Field(
        None, description="NVIDIA's for this distribution: http://mirror.example.org/cuda/repos/rhel9/x86_64"
    )


class Software(Model):
    """What is installed on the nodes."""

    slurm: Literal["distribution", "openhpc"] = Field(
        "distribution",
        description="whose packages of Slurm: the distribution's (on Rocky Linux EPEL's), or OpenHPC's, "
        "which are for Rocky Linux and RHEL",
    )
    mirrors: Mirrors = Field(Mirrors(), description="mirrors of package repositories")
    python: PythonSettings = Field(PythonSettings(), description="the Python environment of jobs")
    apptainer: Toggle = Field(
        False,
        description="install Apptainer on hosts that have none, for `submit --container`; not on local nodes",
    )
    cupy: Toggle = Field(
        True,
        description="CuPy and CUDA's libraries (2.1 GB) for jobs, on nodes that show NVIDIA GPUs",
    )
    nvidia: Nvidia = Field(
        Nvidia(), description="what is installed on hosts with NVIDIA's cards; not on local nodes"
    )


class Monitoring(Model):
    """The telemetry step that runs beside every job, and the health of nodes."""

    interval: DurationS = spelled("2s", "time between two samples of a node")
    health: Health = Field(Health(), description="the limits and the interval of the nodes' health check")


class Storage(Model):
    """The shared folder, /shared on the hosts: homes, data sets, what jobs write. See docs/data.md."""

    keep: Toggle = Field(
        False,
        description="`down` leaves it, with all that is on it, and the next `up` of this name takes it up; "
        "`storage remove` removes it",
    )


class Partition(Model):
    """A Slurm partition of equal nodes, named ``<cluster>-<partition>-1`` and so on, or as ``hosts`` says."""

    # Whoever names the hosts need not count them.
    model_config = ConfigDict(
        json_schema_extra={"required": ["name"], "anyOf": [{"required": ["nodes"]}, {"required": ["hosts"]}]}
    )

    name: Annotated[
        PartitionName, _other_than(RESERVED_PARTITIONS, "a name that clusterctl or Slurm uses itself")
    ] = Field(description="the partition's name in Slurm and in its nodes' names")
    nodes: Annotated[
        int, Field(ge=1, strict=True, description="number of nodes; with hosts, the number of hosts")
    ]
    hosts: HostRange | None = Field(
        None, description="the machines of your own that are its nodes, such as gpu[01-08]"
    )
    cpus: Annotated[int, Field(ge=1, le=MAX_COUNT, strict=True)] | None = Field(
        None, description="cores of each local node; by default this machine's are divided"
    )
    memory: Annotated[SizeMib, at_least(format_size(LEAST_MEMORY_MIB))] | None = Field(
        None, description="memory of each local node; by default this machine's is divided"
    )
    disk: Annotated[SizeMib, at_least(format_size(LEAST_DISK_MIB))] | None = Field(
        None,
        description="limit of what each local node may write; by default as much as this machine can give",
    )
    gpus: Gpus | None = Field(
        None, description="GPUs of each node, which choose a cloud's machine type; local nodes have none"
    )
    price_per_hour: Usd | None = Field(
        None, description="what a node costs an hour, in USD; by default a cloud's built-in price"
    )
    max_time: DurationS | None = Field(None, description="longest time a job may ask for; default unlimited")

    @model_validator(mode="before")
    @classmethod
    def _counted(cls, value: object) -> object:
        if not isinstance(value, Mapping) or "nodes" in value or value.get("hosts") is None:
            return value
        try:
            return {**value, "nodes": len(expand(value["hosts"]))}
        except (TypeError, ValueError):  # the field itself says it
            return {**value, "nodes": 1}


class User(Model):
    """An ordinary account, the same on all nodes. The first one runs the jobs that clusterctl submits."""

    name: Annotated[UnixName, _other_than(RESERVED_USERS, "a system account")] = Field(
        description="the account's name"
    )
    uid: Annotated[int, Field(ge=1000, le=60000, strict=True)] = Field(
        description="the account's number, and its group's"
    )
    accounts: tuple[UserAccount, ...] = Field(
        ("default",), min_length=1, description="Slurm accounts; the first is the default"
    )


class Qos(Model):
    """A Slurm quality of service that jobs may ask for with ``--qos``."""

    name: AccountName = Field(description="the name that jobs ask for")
    priority: Annotated[int, Field(ge=0, le=1_000_000, strict=True)] = Field(
        0, description="added to the priority of its jobs"
    )
    max_time: DurationS | None = Field(None, description="longest time a job may ask for; default unlimited")


class SlurmSettings(Model):
    """What Slurm gets beyond the defaults."""

    version: Literal["24.11", "26.05"] | None = Field(
        None,
        description="release of Slurm, if nodes can have several: local ones of Debian 13 get 24.11, or "
        "26.05 of Debian testing; a cluster that is up keeps its release; by default the distribution's",
    )
    qos: tuple[Qos, ...] = Field((), description="qualities of service beside Slurm's own `normal`")
    extra: tuple[SlurmLine, ...] = Field((), description="raw slurm.conf lines, except those clusterctl owns")


class ProviderSettings(Model):
    """Settings of a provider, with the traits by which the rest of clusterctl tells one from another.

    The traits and properties below are the only questions about a provider that need no ``Provider``.
    """

    type: str
    user_owned: ClassVar[bool] = False  # hosts are the user's: joined, later released as they were
    shares_kernel: ClassVar[bool] = False  # hosts are parts of this machine: no reboot, no firewall
    is_cloud: ClassVar[bool] = False  # hosts are rented, by machine type
    keeps_from_start: ClassVar[bool] = False  # storage.keep can't be changed while the cluster is up
    default_uid: ClassVar[int | None] = None  # of the job user that no spec names; None: the caller's own

    @property
    def machines(self) -> Mapping[str, OnpremHost]:
        """Access to each host that the user owns, by name."""
        return {}

    @property
    def known_network(self) -> IPv4Network | None:
        """The cluster's network, where it is known before its hosts are probed."""
        return None

    @property
    def switches(self) -> Mapping[str, Switch]:
        """The switches of the fast network, by name."""
        return {}

    @property
    def location(self) -> Mapping[str, str]:
        """The project and the zone of rented hosts."""
        return {}

    def baking(self) -> Self:
        """Return the settings with an image that is made for the nodes.

        Raises:
            UsageError: no image can be made ahead with this provider.
        """
        raise UsageError(
            f"there is no image to make: the provider is {self.type}",
            code="no-image-to-bake",
            fix="run `clusterctl up`, which makes whatever its nodes need",
        )

    @property
    def debian_mirror(self) -> str | None:
        """Where Debian's packages are fetched from for the hosts; None: from Debian."""
        return None

    @property
    def idle_timeout_s(self) -> int | None:
        """The seconds without work after which the cluster takes itself down; None: it does not."""
        return None

    def faults(self, spec: Cluster) -> Iterator[Fault]:  # noqa: ARG002
        """What does not hold between the fields of a spec with this provider; the spec may be partial."""
        yield from ()

    def controller_of(self, cluster: str) -> str:
        """The name of the controller of a cluster with this name."""
        return f"{cluster}-ctl"

    def with_images(self, spec: Cluster, raised: Cluster | None) -> Self:  # noqa: ARG002
        """With the images written out that hosts are made of, where there are any; see ``resolve_spec``."""
        return self

    def expected_release(self, spec: Cluster) -> str | None:  # noqa: ARG002
        """The distribution that all hosts will have; None where they have to be probed for it."""
        return None


# A key that can't be said with a provider or a scheduler, such as `partitions.gpus`; why; what to do.
Refusal = tuple[str, str, str]

# Where the provider creates the hosts, which have Debian by default.
OF_OWN_MACHINES: Final[tuple[Refusal, ...]] = (
    ("partitions.hosts", "hosts are machines of your own", "write nodes: N, or type: onprem"),
    ("software.slurm", "OpenHPC has no packages for Debian, which the nodes are", "remove slurm"),
    ("software.mirrors", "these are for Rocky Linux and RHEL, and the nodes are Debian", "remove mirrors"),
)


class Cluster(Model):
    """What a spec says, whichever its provider."""

    model_config = ConfigDict(defer_build=True)  # nothing is made of it but ClusterSpec

    version: Literal[1] = Field(description="the version of this file's format")
    name: ClusterName = Field(description="the cluster's name, first part of its hosts' names")
    provider: ProviderSettings
    partitions: tuple[Partition, ...] = Field(min_length=1, description="the nodes, by Slurm partition")
    users: tuple[User, ...] = Field(
        (),
        description="accounts on all nodes; default: the current user (with uid 10000 on gcp), hpc for root",
    )
    software: Software = Field(Software(), description="software on the nodes beyond the defaults")
    storage: Storage = Field(Storage(), description="whether the shared folder outlives the cluster")
    scheduler: Literal["slurm", "none"] = Field(
        "slurm", description="the scheduler of jobs; none: plain mpirun over SSH, one job at a time"
    )
    slurm: SlurmSettings = Field(SlurmSettings(), description="what Slurm gets beyond the defaults")
    monitoring: Monitoring = Field(
        Monitoring(), description="the telemetry step that runs beside every job, and the health of nodes"
    )

    @field_validator("version", mode="before")
    @classmethod
    def _plain_one(cls, value: object) -> object:
        return str(value) if isinstance(value, bool | float) else value  # else `true` and 1.0 pass for 1

    @property
    def job_user(self) -> User:
        """The account that jobs run as. Only a resolved spec (see ``load_spec``) has one."""
        return self.users[0]

    @property
    def has_slurm(self) -> bool:
        """Whether Slurm runs the jobs; else they are plain mpirun over SSH."""
        return self.scheduler == "slurm"

    @property
    def node_count(self) -> int:
        """The nodes of all partitions, without the controller."""
        return sum(partition.nodes or 0 for partition in self.partitions)

    @property
    def controller_host(self) -> str:
        """Host name of the machine that runs slurmctld, slurmdbd and MariaDB."""
        return self.provider.controller_of(self.name)

    def node_names(self, partition: Partition) -> tuple[str, ...]:
        if partition.hosts is not None:
            return expand(partition.hosts)
        return tuple(f"{self.name}-{partition.name}-{i}" for i in range(1, partition.nodes + 1))

    def refused(self, rows: Iterable[Refusal]) -> Iterator[Fault]:
        """The faults of those keys that are said all the same; the spec may be partial."""
        for key, message, fix in rows:
            top, _, name = key.partition(".")
            found = getattr(self, top)
            is_one = isinstance(found, Model)
            places = [((top,), found)] if is_one else [((top, i), one) for i, one in enumerate(found)]
            for at, one in places:
                said = getattr(one, name, UNKNOWN)
                if said is not UNKNOWN and said != type(one).model_fields[name].default:
                    yield Fault("not-here", (*at, name), message, fix, at_key=True)
