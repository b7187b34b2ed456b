"""The settings of local nodes in a spec, `provider: {type: local}`, and their checks."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import ClassVar, Final, Literal

from pydantic import ConfigDict, Field, field_validator

from clusterctl.errors import BadValueError
from clusterctl.spec import distributions
from clusterctl.spec.base import PRIVATE_NETWORKS, SpecFault, Url
from clusterctl.spec.common import OF_OWN_MACHINES, ClusterBase, ProviderSettings, Refusal
from clusterctl.spec.names import MAX_LOCAL_HOSTS

_OF_OTHER_NODES: Final = (
    ("partitions.gpus", "local nodes have no GPUs", "remove gpus"),
    (
        "software.apptainer",
        "local nodes are air-gapped and their image has no Apptainer",
        "remove apptainer",
    ),
    ("software.slurm", "local nodes have their distribution's Slurm", "remove slurm"),
    ("software.mirrors", "local nodes use the repositories of this machine", "remove mirrors"),
    (
        "software.nvidia",
        "local nodes have no GPUs, and their kernel is this machine's",
        "remove nvidia",
    ),
)


class LocalSettings(ProviderSettings):
    """The settings of a Slurm cluster of systemd-nspawn machines on this Linux machine."""

    # Files must contain the type, because it selects the provider.
    model_config = ConfigDict(json_schema_extra={"required": ["type"]})
    refuses: ClassVar[tuple[Refusal, ...]] = (*_OF_OTHER_NODES, OF_OWN_MACHINES)
    foreign: ClassVar[bool] = False
    adopts_hosts: ClassVar[bool] = False
    may_have_fabric: ClassVar[bool] = False
    shares_kernel: ClassVar[bool] = True
    is_cloud: ClassVar[bool] = False
    late_account_fix: ClassVar[str] = ""
    first_verb: ClassVar[str] = "up"
    default_uid: ClassVar[int | None] = None

    type: Literal["local"] = Field("local", description="the provider's type")
    subnet: IPv4Network | None = Field(
        None,
        description="private /24 for the nodes; by default clusterctl chooses a free network",
        examples=["10.77.0.0/24"],
    )
    distribution: Literal["debian-12", "debian-13"] | None = Field(
        None,
        description="distribution of the nodes; by default debian-13; on Rocky Linux and AlmaLinux "
        "always this machine's",
    )
    mirror: Url = Field(
        "http://deb.debian.org/debian", description="Debian mirror to build the node image"
    )

    @field_validator("subnet")
    @classmethod
    def _private_24(cls, value: IPv4Network | None) -> IPv4Network | None:
        is_private = value is None or any(value.subnet_of(net) for net in PRIVATE_NETWORKS)
        if value is not None and (value.prefixlen != 24 or not is_private):  # noqa: PLR2004
            raise BadValueError(
                "network-not-private", f"{value} is not a private /24, such as 10.77.0.0/24"
            )
        return value

    @property
    def release(self) -> str:
        """The distribution of new nodes: from the spec, or else the default for this machine."""
        return self.distribution or distributions.of_local_nodes()

    def expected_release(self, spec: ClusterBase) -> str:  # noqa: ARG002
        return self.release

    def faults(self, spec: ClusterBase) -> Iterator[SpecFault]:
        if 1 + spec.node_count > MAX_LOCAL_HOSTS:
            message = (
                f"a local cluster can have at most {MAX_LOCAL_HOSTS} hosts, including the "
                "controller"
            )
            hint = f"request at most {MAX_LOCAL_HOSTS - 1} nodes"
            yield SpecFault("too-many-hosts", ("partitions",), message, hint, at_key=True)
