"""ClusterSpec and its parts: frozen, unknown keys refused, every field documented for the JSON Schema.

Provider types and fields that are not built do not exist here. What concerns one field stands at the field;
what concerns several, in ``checks`` and with each provider.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Final, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    ValidationInfo,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from clusterctl.spec.base import GPU_TYPE, URL, FileName, Gpus, Model, ProviderSettings, Toggle, Url, expand
from clusterctl.spec.checks import Raw, common_findings, mapping
from clusterctl.spec.gcp import GCP_PATTERN_TEXTS, GcpProvider, Usd
from clusterctl.spec.local import LocalProvider
from clusterctl.spec.messages import INCONSISTENT, Finding, shown
from clusterctl.spec.onprem import ONPREM_PATTERN_TEXTS, HostRange, OnpremProvider
from clusterctl.spec.units import DurationS, SizeMib, format_duration, format_size

LABEL = r"^[a-z][a-z0-9-]{0,19}$"
_UNIX_NAME = r"^[a-z_][a-z0-9_-]{0,30}$"
_ACCOUNT = r"^[a-z][a-z0-9_-]{0,30}$"
_TOOLKIT: Final = r"^1[1-9]\.[0-9]{1,2}$"
_BRANCH: Final = r"^[1-9][0-9]{2}$"

# What a pattern asks for, in the words of an error message.
PATTERN_TEXTS: Final[Mapping[str, str]] = {
    LABEL: "a lower-case letter, then at most 19 lower-case letters, digits or dashes",
    _UNIX_NAME: "at most 31 lower-case letters, digits, dashes or underscores, no digit first",
    _ACCOUNT: "a lower-case letter, then at most 30 lower-case letters, digits, dashes or underscores",
    URL: "an http:// or https:// address",
    GPU_TYPE: "a GPU's type in lower-case letters, digits and dashes, such as l4",
    **GCP_PATTERN_TEXTS,
    _TOOLKIT: 'a version of CUDA in quotes, such as "12.9"',
    _BRANCH: 'a branch of the driver in quotes, such as "580"',
    **ONPREM_PATTERN_TEXTS,
}

ClusterName = Annotated[str, StringConstraints(pattern=LABEL)]
PartitionName = Annotated[str, StringConstraints(pattern=LABEL)]
UnixName = Annotated[str, StringConstraints(pattern=_UNIX_NAME)]
AccountName = Annotated[str, StringConstraints(pattern=_ACCOUNT)]

SCHEMA_DIALECT: Final = "https://json-schema.org/draft/2020-12/schema"
MAX_CPUS = 65_533  # Slurm counts a node's CPUs in 16 bits
PROOF_PARTITION = "clusterctl-proof"
LEAST_DISK_MIB = 64
LEAST_MEMORY_MIB = 256  # less, and not even the proof job fits beside the daemons
ADMIN_USER = "clusterctl"
# Accounts and groups that a Debian node has, or that clusterctl puts there.
RESERVED_USERS = frozenset(
    "root daemon bin sys sync games man lp mail news uucp proxy www-data backup list irc gnats nobody "
    "nogroup _apt messagebus sshd systemd-network systemd-timesync systemd-resolve systemd-journal adm tty "
    "disk kmem dialout fax voice cdrom floppy tape sudo audio dip operator src shadow utmp video sasl "
    f"plugdev staff users input sgx kvm render crontab netdev slurm munge mysql {ADMIN_USER}".split()
)
RESERVED_ACCOUNTS = frozenset(
    {"root", ADMIN_USER}
)  # Slurm's own, and the one that may use the proof partition
# `ctl` is the controller's; Slurm takes a partition called DEFAULT, in any case, as defaults for the rest.
RESERVED_PARTITIONS = frozenset({"ctl", "default", PROOF_PARTITION})

# Raw slurm.conf lines may not touch what clusterctl renders from the spec and from facts.
OWNED_SLURM_KEYS = frozenset(
    key.lower()
    for key in (
        "ClusterName SlurmctldHost ControlMachine BackupController SlurmUser SlurmdUser AuthType CryptoType "
        "SlurmctldPort SlurmdPort SrunPortRange StateSaveLocation SlurmdSpoolDir SlurmctldPidFile "
        "SlurmdPidFile SlurmctldLogFile SlurmdLogFile SlurmctldParameters SlurmdParameters NodeName "
        "FrontendName PartitionName NodeSet AccountingStorageType AccountingStorageHost "
        "AccountingStoragePort AccountingStorageEnforce GresTypes SelectType SelectTypeParameters "
        "ProctrackType TaskPlugin MpiDefault ReturnToService Include"
    ).split()
)
# One setting a line: Slurm would take several, and so one hidden behind another.
_SLURM_LINE = r'^[A-Za-z0-9_.]+ *= *("[^"#\\]*"|[^ "#\\]+)$'


def _slurm_line(line: str) -> str:
    key = line.partition("=")[0].strip()
    if not line.isprintable() or re.search(_SLURM_LINE, line) is None:
        raise ValueError(f"{shown(line)} is not one Key=value line of slurm.conf")
    if key.lower() in OWNED_SLURM_KEYS:
        raise ValueError(f"{key} is rendered by clusterctl and can't be set here")
    return line


def _ordinary_account(name: str) -> str:
    if name in RESERVED_ACCOUNTS:
        raise ValueError(f"{name!r} is an account that clusterctl or Slurm uses itself")
    return name


SlurmLine = Annotated[
    str, AfterValidator(_slurm_line), WithJsonSchema({"type": "string", "pattern": _SLURM_LINE})
]
UserAccount = Annotated[AccountName, AfterValidator(_ordinary_account)]


Provider = Annotated[LocalProvider | GcpProvider | OnpremProvider, Discriminator("type")]
PROVIDERS: Final[Mapping[str, type[ProviderSettings]]] = {
    "local": LocalProvider,
    "gcp": GcpProvider,
    "onprem": OnpremProvider,
}
PROVIDER_TYPES: Final = tuple(PROVIDERS)
DEFAULT_PROVIDER: Final = LocalProvider()


def findings(spec: Raw) -> Iterator[Finding]:
    """Every cross-field fault of a spec given as plain values."""
    kind = mapping(spec, "provider").get("type", DEFAULT_PROVIDER.type)
    if isinstance(kind, str) and kind in PROVIDERS:
        yield from PROVIDERS[kind].findings(spec)
    yield from common_findings(spec)


class Nvidia(Model):
    """What hosts with NVIDIA's cards get; a driver that is there is left alone. See docs/gpus.md."""

    driver: Literal["present", "open", "proprietary"] = Field(
        "present",
        description="install a driver where there is none: NVIDIA's with open kernel modules (for Turing and "
        "newer: RTX 20, T4, A100, H100), or its proprietary one; present: install none",
    )
    branch: Annotated[str, StringConstraints(pattern=_BRANCH)] | None = Field(
        None, description="of that driver; by default NVIDIA's newest", examples=["580"]
    )
    toolkit: Annotated[str, StringConstraints(pattern=_TOOLKIT)] | None = Field(
        None,
        description="the CUDA toolkit of this version; by default none: CuPy brings CUDA's libraries",
        examples=["12.9"],
    )
    nccl: Toggle = Field(False, description="NCCL as a package, for programs that are not Python's")
    dcgm: Toggle = Field(False, description="NVIDIA's data center GPU manager, and run it")

    @model_validator(mode="after")
    def _of_a_driver(self) -> Self:
        if self.branch is not None and self.driver == "present":
            raise ValueError("a branch is of a driver that is to be installed: write driver: open, too")
        return self

    @property
    def has_driver(self) -> bool:
        """Whether a driver is installed where there is none."""
        return self.driver != "present"

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts of the role cuda whose packages a host may need; which of them, it decides itself."""
        chosen = {
            self.driver: self.has_driver,
            "fabric_manager": self.has_driver,
            "toolkit": self.toolkit is not None,
            "nccl": self.nccl,
            "dcgm": self.dcgm,
        }
        return tuple(part for part, is_wanted in chosen.items() if is_wanted)

    @property
    def installs(self) -> bool:
        """Whether anything is."""
        return self != Nvidia()


_SAMPLE_INTERVAL_S: Final = 2
_INTERVAL_S: Final = 60
_LEAST_INTERVAL_S: Final = 5  # checks that follow each other keep slurmctld from asking resumed nodes
_DISK_FREE_MIB: Final = 50
_CLOCK_OFFSET_S: Final = 5


class Health(Model):
    """The health check: a node that fails it is drained, and resumed once it passes. See docs/gpus.md."""

    interval: DurationS = Field(
        _INTERVAL_S,
        description="time between two checks of a node",
        json_schema_extra={"default": format_duration(_INTERVAL_S)},
    )
    gpu_temperature: Annotated[int, Field(ge=40, le=120, strict=True)] = Field(
        90, description="highest GPU temperature that passes, in °C"
    )
    disk_free: SizeMib = Field(
        _DISK_FREE_MIB,
        description="least free space on each local file system of a node",
        json_schema_extra={"default": format_size(_DISK_FREE_MIB)},
    )
    clock_offset: DurationS = Field(
        _CLOCK_OFFSET_S,
        description="largest clock offset, where chrony runs",
        json_schema_extra={"default": format_duration(_CLOCK_OFFSET_S)},
    )

    @field_validator("interval")
    @classmethod
    def _time_between(cls, value: int) -> int:
        if value < _LEAST_INTERVAL_S:
            raise ValueError(f"{format_duration(_LEAST_INTERVAL_S)} is the least between two checks")
        return value


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

    interval: DurationS = Field(
        _SAMPLE_INTERVAL_S,
        description="time between two samples of a node",
        json_schema_extra={"default": format_duration(_SAMPLE_INTERVAL_S)},
    )
    health: Health = Field(Health(), description="the limits and the interval of the nodes' health check")


class Partition(Model):
    """A Slurm partition of equal nodes, named ``<cluster>-<partition>-1`` and so on, or as ``hosts`` says."""

    # Whoever names the hosts need not count them.
    model_config = ConfigDict(
        json_schema_extra={"required": ["name"], "anyOf": [{"required": ["nodes"]}, {"required": ["hosts"]}]}
    )

    name: PartitionName = Field(description="the partition's name in Slurm and in its nodes' names")
    nodes: Annotated[
        int, Field(ge=1, strict=True, description="number of nodes; with hosts, the number of hosts")
    ]
    hosts: HostRange | None = Field(
        None, description="the machines of your own that are its nodes, such as gpu[01-08]"
    )
    cpus: Annotated[int, Field(ge=1, le=MAX_CPUS, strict=True)] | None = Field(
        None, description="cores of each local node; by default this machine's are divided"
    )
    memory: SizeMib | None = Field(
        None, description="memory of each local node; by default this machine's is divided"
    )
    disk: SizeMib | None = Field(
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
        """As many nodes as hosts, where only these are said."""
        if not isinstance(value, Mapping) or "nodes" in value or value.get("hosts") is None:
            return value
        try:
            return {**value, "nodes": len(expand(value["hosts"]))}
        except (TypeError, ValueError):  # the field itself says it
            return {**value, "nodes": 1}

    @field_validator("disk", "memory")
    @classmethod
    def _large_enough(cls, value: int | None, info: ValidationInfo) -> int | None:
        is_disk = info.field_name == "disk"
        what, least = ("a node's disk", LEAST_DISK_MIB) if is_disk else ("a node", LEAST_MEMORY_MIB)
        if value is not None and value < least:
            raise ValueError(f"{what} needs at least {format_size(least)}")
        return value

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, value: str) -> str:
        if value in RESERVED_PARTITIONS:
            raise ValueError(f"{value!r} is a name that clusterctl or Slurm uses itself")
        return value


class User(Model):
    """An ordinary account, the same on all nodes. The first one runs the jobs that clusterctl submits."""

    name: UnixName = Field(description="the account's name")
    uid: Annotated[int, Field(ge=1000, le=60000, strict=True)] = Field(
        description="the account's number, and its group's"
    )
    accounts: tuple[UserAccount, ...] = Field(
        ("default",), min_length=1, description="Slurm accounts; the first is the default"
    )

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, value: str) -> str:
        if value in RESERVED_USERS:
            raise ValueError(f"{value!r} is a system account")
        return value


class Qos(Model):
    """A Slurm quality of service that jobs may ask for with ``--qos``."""

    name: AccountName = Field(description="the name that jobs ask for")
    priority: Annotated[int, Field(ge=0, le=1_000_000, strict=True)] = Field(
        0, description="added to the priority of its jobs"
    )
    max_time: DurationS | None = Field(None, description="longest time a job may ask for; default unlimited")


class SlurmSettings(Model):
    """What Slurm gets beyond the defaults."""

    qos: tuple[Qos, ...] = Field((), description="qualities of service beside Slurm's own `normal`")
    extra: tuple[SlurmLine, ...] = Field((), description="raw slurm.conf lines, except those clusterctl owns")


class ClusterSpec(Model):
    """One cluster."""

    version: Literal[1] = Field(description="the version of this file's format")
    name: ClusterName = Field(description="the cluster's name, first part of its hosts' names")
    provider: Provider = Field(DEFAULT_PROVIDER, description="the provider of the hosts, with its settings")
    partitions: tuple[Partition, ...] = Field(min_length=1, description="the nodes, by Slurm partition")
    users: tuple[User, ...] = Field(
        (),
        description="accounts on all nodes; default: the current user, or hpc (uid 10000) for root",
    )
    software: Software = Field(Software(), description="software on the nodes beyond the defaults")
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

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        found = [f"{finding.key}: {finding.message}" for finding in findings(self.model_dump(mode="json"))]
        if found:
            raise PydanticCustomError(INCONSISTENT, "{found}", {"found": "; ".join(found)})
        return self

    @property
    def job_user(self) -> User:
        """The account that jobs run as. Only a resolved spec (see ``load_spec``) has one."""
        return self.users[0]

    @property
    def has_slurm(self) -> bool:
        """Whether Slurm runs the jobs; else they are plain mpirun over SSH."""
        return self.scheduler == "slurm"

    @property
    def controller_host(self) -> str:
        """Host name of the machine that runs slurmctld, slurmdbd and MariaDB."""
        return self.provider.controller_of(self.name)

    def node_names(self, partition: Partition) -> tuple[str, ...]:
        """Host names of a partition's nodes."""
        if partition.hosts is not None:
            return expand(partition.hosts)
        return tuple(f"{self.name}-{partition.name}-{i}" for i in range(1, partition.nodes + 1))
