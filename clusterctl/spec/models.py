"""ClusterSpec and its parts: frozen, unknown keys refused, every field documented for the JSON Schema.

Provider types and fields that are not built do not exist here.
"""

from __future__ import annotations

import re
from ipaddress import IPv4Network
from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, field_validator, model_validator

from clusterctl.spec.units import DurationS, SizeMib

ClusterName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,19}$")]
PartitionName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,19}$")]
UnixName = Annotated[str, StringConstraints(pattern=r"^[a-z_][a-z0-9_-]{0,30}$")]
AccountName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9_-]{0,30}$")]

MAX_LOCAL_HOSTS = 250  # addresses of a /24, less the network, the broadcast, this machine and a few spare
PROOF_PARTITION = "clusterctl-proof"
ADMIN_USER = "clusterctl"
RESERVED_USERS = frozenset({"root", ADMIN_USER, "slurm", "munge", "mysql", "daemon", "nobody"})

# Raw slurm.conf lines may not touch what clusterctl renders from the spec and from facts.
OWNED_SLURM_KEYS = frozenset(
    key.lower()
    for key in (
        "ClusterName SlurmctldHost SlurmUser SlurmdUser AuthType CryptoType StateSaveLocation SlurmdSpoolDir "
        "SlurmctldPidFile SlurmdPidFile SlurmctldParameters SlurmdParameters NodeName PartitionName NodeSet "
        "AccountingStorageType AccountingStorageHost AccountingStorageEnforce GresTypes SelectType "
        "SelectTypeParameters ProctrackType TaskPlugin MpiDefault ReturnToService Include"
    ).split()
)


class Model(BaseModel):
    """Base of all spec models."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class LocalProvider(Model):
    """A real Slurm cluster of systemd-nspawn machines on this Linux machine."""

    type: Literal["local"] = "local"
    subnet: IPv4Network | None = Field(
        None, description="private /24 for the nodes; by default a free one is chosen"
    )
    mirror: str = Field(
        "http://deb.debian.org/debian",
        pattern=r"^https?://\S+$",
        description="Debian mirror that the node image is built from",
    )

    @field_validator("subnet")
    @classmethod
    def _private_24(cls, value: IPv4Network | None) -> IPv4Network | None:
        if value is not None and (value.prefixlen != 24 or not value.is_private):  # noqa: PLR2004
            raise ValueError(f"{value} is not a private /24, such as 10.77.0.0/24")
        return value


# A union discriminated on `type` as soon as there is a second provider.
Provider = LocalProvider


class Partition(Model):
    """A Slurm partition of equal nodes, named ``<cluster>-<partition>-1`` and so on."""

    name: PartitionName
    nodes: Annotated[int, Field(ge=1, strict=True, description="how many nodes")]
    cpus: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        None, description="cores of each node; by default this machine's cores are divided"
    )
    memory: SizeMib | None = Field(
        None, description="memory of each node; by default this machine's memory is divided"
    )
    max_time: DurationS | None = Field(None, description="longest time a job may ask for; default unlimited")

    @field_validator("name")
    @classmethod
    def _not_reserved(cls, value: str) -> str:
        if value in {"ctl", PROOF_PARTITION}:
            raise ValueError(f"{value!r} is a name that clusterctl uses itself")
        return value


class User(Model):
    """An ordinary account, the same on all nodes. The first one runs the jobs that clusterctl submits."""

    name: UnixName
    uid: Annotated[int, Field(ge=1000, le=60000, strict=True)]
    accounts: tuple[AccountName, ...] = Field(
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

    name: AccountName
    priority: Annotated[int, Field(ge=0, le=1_000_000, strict=True)] = 0
    max_time: DurationS | None = None


class SlurmSettings(Model):
    """What Slurm gets beyond the defaults."""

    qos: tuple[Qos, ...] = ()
    extra: tuple[str, ...] = Field((), description="raw slurm.conf lines, except those clusterctl owns")

    @field_validator("extra")
    @classmethod
    def _raw_lines(cls, lines: tuple[str, ...]) -> tuple[str, ...]:
        for line in lines:
            match = re.match(r"\s*([A-Za-z]+)\s*=", line)
            if "\n" in line or match is None:
                raise ValueError(f"{line!r} is not one Key=value line of slurm.conf")
            if match.group(1).lower() in OWNED_SLURM_KEYS:
                raise ValueError(f"{match.group(1)} is rendered by clusterctl and can't be set here")
        return lines


class Monitoring(Model):
    """The telemetry step that runs beside every job."""

    interval: DurationS = Field(2, description="time between two samples of a node")


class ClusterSpec(Model):
    """One cluster."""

    version: Literal[1]
    name: ClusterName
    provider: Provider = LocalProvider()
    partitions: tuple[Partition, ...] = Field(min_length=1)
    users: tuple[User, ...] = Field(
        (), description="default: the caller, or hpc (uid 10000) when the caller is root"
    )
    slurm: SlurmSettings = SlurmSettings()
    monitoring: Monitoring = Monitoring()

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        hosts = 1 + sum(p.nodes for p in self.partitions)
        if hosts > MAX_LOCAL_HOSTS:
            raise ValueError(f"{hosts} hosts do not fit a local cluster; at most {MAX_LOCAL_HOSTS} do")
        for kind, names in (
            ("partitions", [p.name for p in self.partitions]),
            ("users", [u.name for u in self.users]),
            ("users", [u.uid for u in self.users]),
            ("slurm.qos", [q.name for q in self.slurm.qos]),
        ):
            if len(set(names)) != len(names):
                twice = next(n for n in names if names.count(n) > 1)  # type: ignore[arg-type]
                raise ValueError(f"{kind}: {twice!r} stands there twice")
        return self

    @property
    def job_user(self) -> User:
        """The account that jobs run as. Only a resolved spec (see ``load_spec``) has one."""
        return self.users[0]

    @property
    def controller_host(self) -> str:
        """Host name of the machine that runs slurmctld, slurmdbd and MariaDB."""
        return f"{self.name}-ctl"

    def node_names(self, partition: Partition) -> tuple[str, ...]:
        """Host names of a partition's nodes."""
        return tuple(f"{self.name}-{partition.name}-{i}" for i in range(1, partition.nodes + 1))
