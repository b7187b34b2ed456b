"""Where the helper keeps things, what the kernel objects are called, and the requests the two sides exchange.

All kernel names derive from the random cluster id, so that two clusters of one name in two homes never meet,
and stay within the 15 characters that Linux allows for a link.
"""

from __future__ import annotations

from ipaddress import IPv4Network
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

STATE = Path("/var/lib/clusterctl")
CACHE = Path("/var/cache/clusterctl")

ClusterId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{6}$")]
HostName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
ImageKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]

ADMIN_ID = 64100  # uid and gid of the admin user on every node; outside Debian's and EL's ranges for people


def cluster_dir(cluster_id: str) -> Path:
    """Root's state of one cluster."""
    return STATE / cluster_id


def netns_name(cluster_id: str) -> str:
    """The network namespace that holds the cluster's bridge, away from the host's own rules."""
    return f"cc{cluster_id}"


def link_name(cluster_id: str) -> str:
    """This machine's end of the cable into the cluster's network."""
    return f"cc{cluster_id}"


def bridge_name(cluster_id: str) -> str:
    return f"cc{cluster_id}br"


def machine_name(cluster_id: str, number: int) -> str:
    """At most 12 characters, so that nspawn's ``vb-<machine>`` is not cut and hashed."""
    return f"c{cluster_id}-{number:03d}"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Node(_Message):
    """One machine as the helper is asked to make it. ``number`` fixes its address and machine name."""

    name: HostName
    number: Annotated[int, Field(ge=1, le=250)]
    cores: tuple[int, ...] = Field((), description="host cores it may run on; empty: all")


class ClusterRequest(_Message):
    """The whole of a cluster: the helper makes what is missing and removes nodes that are not named."""

    id: ClusterId
    name: str
    owner: int = Field(description="uid of the caller, who may see and remove it")
    workspace: str
    image: ImageKey
    admin_key: Annotated[str, StringConstraints(pattern=r"^ssh-ed25519 [A-Za-z0-9+/=]+( [\w@.-]+)?$")]
    subnet: IPv4Network | None = None
    nodes: tuple[Node, ...]


class Which(_Message):
    """A cluster that is to be looked at or removed."""

    id: ClusterId


class ClusterState(_Message):
    """What the helper keeps of a cluster, as `cluster.json`."""

    id: ClusterId
    name: str
    owner: int
    workspace: str
    image: ImageKey
    subnet: IPv4Network


class MadeNode(_Message):
    """A running machine."""

    name: HostName
    address: str
    host_key: str
    started: bool = Field(description="False: it ran already")


class MadeCluster(_Message):
    """The answer to a ClusterRequest."""

    subnet: IPv4Network
    shared: str
    nodes: tuple[MadeNode, ...]
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class BakeRequest(_Message):
    """An image: a Debian base plus what ``install.yml`` adds. ``key`` is the hash of all that goes in."""

    key: ImageKey
    base_key: ImageKey
    mirror: str
    admin_key: str


class CachedImage(_Message):
    """An image in the cache."""

    key: str
    size_mib: int
    used_by: tuple[str, ...]


def address(subnet: IPv4Network, number: int) -> str:
    """Address of a node: the host has .1, the controller (number 1) .2, and so on."""
    return str(subnet[number + 1])
