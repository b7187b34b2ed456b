"""Nodes on this Linux machine: `provider: {type: local, ...}`, and what must hold between its fields."""

from __future__ import annotations

from collections.abc import Iterator
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, ClassVar, Final, Literal

from pydantic import ConfigDict, Field, field_validator

from clusterctl.spec import checks, distributions
from clusterctl.spec.base import PRIVATE_NETWORKS, ProviderSettings, Url
from clusterctl.spec.checks import Raw
from clusterctl.spec.messages import Finding, Loc

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec

MAX_LOCAL_HOSTS: Final = 250  # of a /24, less the network, the broadcast, this machine and a few spare
_NO_NVIDIA: Final = ("present", False, None)  # the values of `software.nvidia` that install nothing


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
        if value.prefixlen != 24 or not any(value.subnet_of(net) for net in PRIVATE_NETWORKS):  # noqa: PLR2004
            raise ValueError(f"{value} is not a private /24, such as 10.77.0.0/24")
        return value

    def expected_release(self, spec: ClusterSpec) -> str:  # noqa: ARG002
        """The distribution of the node image."""
        return distributions.of_local_nodes()

    @classmethod
    def findings(cls, spec: Raw) -> Iterator[Finding]:
        """The limits of one machine, and what its nodes can't have."""
        if 1 + checks.node_count(spec) > MAX_LOCAL_HOSTS:
            limit = f"the {MAX_LOCAL_HOSTS} hosts of a local cluster"
            message = f"these nodes and the controller are more than {limit}"
            yield Finding(
                ("partitions",), message, f"ask for at most {MAX_LOCAL_HOSTS - 1} nodes", at_key=True
            )
        software = checks.mapping(spec, "software")
        nvidia = checks.mapping(software, "nvidia").values()
        unwanted: list[tuple[Loc, bool, str]] = [
            (("partitions", index, "gpus"), partition.get("gpus") is not None, "local nodes have no GPUs")
            for index, partition in enumerate(checks.entries(spec, "partitions"))
        ]
        unwanted += [
            (
                ("software", "apptainer"),
                checks.is_on(software, "apptainer"),
                "local nodes are air-gapped, and their image has no Apptainer",
            ),
            (
                ("software", "nvidia"),
                any(value not in _NO_NVIDIA for value in nvidia),
                "local nodes have no GPUs, and their kernel is this machine's",
            ),
        ]
        for at, is_wanted, message in unwanted:
            if is_wanted:
                yield Finding(at, message, f"remove {at[-1]}", at_key=True)
        yield from checks.debian_findings(spec)
