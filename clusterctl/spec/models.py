"""ClusterSpec and its parts: frozen, unknown keys refused, every field documented for the JSON Schema.

Provider types and fields that are not built do not exist here. What concerns one field stands at the field;
what concerns several stands in ``checks``, which also knows where in the file each finding belongs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from ipaddress import IPv4Network
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import (
    AfterValidator,
    ConfigDict,
    Discriminator,
    Field,
    StringConstraints,
    WithJsonSchema,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from clusterctl.spec import checks, distributions
from clusterctl.spec.base import GPU_TYPE, URL, Gpus, Model, ProviderSettings, Url, expand
from clusterctl.spec.gcp import GCP_PATTERN_TEXTS, GcpProvider, Usd
from clusterctl.spec.messages import INCONSISTENT, shown
from clusterctl.spec.onprem import ONPREM_PATTERN_TEXTS, HostRange, OnpremProvider
from clusterctl.spec.software import NVIDIA_PATTERN_TEXTS, Monitoring, Software
from clusterctl.spec.units import DurationS, SizeMib, format_size

LABEL = r"^[a-z][a-z0-9-]{0,19}$"
_UNIX_NAME = r"^[a-z_][a-z0-9_-]{0,30}$"
_ACCOUNT = r"^[a-z][a-z0-9_-]{0,30}$"

# What a pattern asks for, in the words of an error message.
PATTERN_TEXTS: Final[Mapping[str, str]] = {
    LABEL: "a lower-case letter, then at most 19 lower-case letters, digits or dashes",
    _UNIX_NAME: "at most 31 lower-case letters, digits, dashes or underscores, no digit first",
    _ACCOUNT: "a lower-case letter, then at most 30 lower-case letters, digits, dashes or underscores",
    URL: "an http:// or https:// address",
    GPU_TYPE: "a GPU's type in lower-case letters, digits and dashes, such as l4",
    **GCP_PATTERN_TEXTS,
    **NVIDIA_PATTERN_TEXTS,
    **ONPREM_PATTERN_TEXTS,
}

ClusterName = Annotated[str, StringConstraints(pattern=LABEL)]
PartitionName = Annotated[str, StringConstraints(pattern=LABEL)]
UnixName = Annotated[str, StringConstraints(pattern=_UNIX_NAME)]
AccountName = Annotated[str, StringConstraints(pattern=_ACCOUNT)]

MAX_LOCAL_HOSTS: Final = checks.MAX_LOCAL_HOSTS
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
_PRIVATE_NETWORKS = tuple(IPv4Network(n) for n in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16"))


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


class LocalProvider(ProviderSettings):
    """A real Slurm cluster of systemd-nspawn machines on this Linux machine."""

    # In a file the type must be written: it tells the providers apart.
    model_config = ConfigDict(json_schema_extra={"required": ["type"]})
    shares_kernel: ClassVar[bool] = True

    type: Literal["local"] = Field("local", description="the provider's type")
    subnet: IPv4Network | None = Field(
        None,
        description="private /24 for the nodes; by default a free one is chosen",
        examples=["10.77.0.0/24"],
    )
    mirror: Url = Field(
        "http://deb.debian.org/debian", description="Debian mirror that the node image is built from"
    )

    @field_validator("subnet")
    @classmethod
    def _private_24(cls, value: IPv4Network | None) -> IPv4Network | None:
        if value is None:
            return None
        if value.prefixlen != 24 or not any(value.subnet_of(net) for net in _PRIVATE_NETWORKS):  # noqa: PLR2004
            raise ValueError(f"{value} is not a private /24, such as 10.77.0.0/24")
        return value

    def expected_release(self, spec: ClusterSpec) -> str:  # noqa: ARG002
        """The distribution of the node image."""
        return distributions.of_local_nodes()


Provider = Annotated[LocalProvider | GcpProvider | OnpremProvider, Discriminator("type")]
PROVIDERS: Final[Mapping[str, type[LocalProvider] | type[GcpProvider] | type[OnpremProvider]]] = {
    "local": LocalProvider,
    "gcp": GcpProvider,
    "onprem": OnpremProvider,
}
PROVIDER_TYPES: Final = tuple(PROVIDERS)
DEFAULT_PROVIDER: Final = LocalProvider()


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

    @field_validator("disk")
    @classmethod
    def _room_to_write(cls, value: int | None) -> int | None:
        if value is not None and value < LEAST_DISK_MIB:
            raise ValueError(f"a node's disk needs at least {format_size(LEAST_DISK_MIB)}")
        return value

    @field_validator("memory")
    @classmethod
    def _room_to_run(cls, value: int | None) -> int | None:
        if value is not None and value < LEAST_MEMORY_MIB:
            raise ValueError(f"a node needs at least {format_size(LEAST_MEMORY_MIB)}")
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
        found = [
            f"{finding.key}: {finding.message}" for finding in checks.findings(self.model_dump(mode="json"))
        ]
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
        if isinstance(self.provider, OnpremProvider):
            return self.provider.controller
        return f"{self.name}-ctl"

    def node_names(self, partition: Partition) -> tuple[str, ...]:
        """Host names of a partition's nodes."""
        if partition.hosts is not None:
            return expand(partition.hosts)
        return tuple(f"{self.name}-{partition.name}-{i}" for i in range(1, partition.nodes + 1))
