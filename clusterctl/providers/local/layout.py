"""Where the helper keeps things, what the kernel objects are called, and the requests the two sides exchange.

All kernel names derive from the random cluster id, so that two clusters of one name in two homes never meet,
and stay within the 15 characters that Linux allows for a link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network
from itertools import count
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from clusterctl.spec.base import Url
from clusterctl.spec.common import LEAST_DISK_MIB, UnixName
from clusterctl.spec.models import MAX_LOCAL_HOSTS

STATE = Path("/var/lib/clusterctl")
CACHE = Path("/var/cache/clusterctl")
RUN = Path("/run/clusterctl")  # lock files

ClusterId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{6}$")]
HostName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
ImageKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
SlurmRelease = Annotated[str, StringConstraints(pattern=r"^[0-9]{2}\.[0-9]{2}$")]
Release = Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}-[0-9]{1,3}$")]
AdminKey = Annotated[str, StringConstraints(pattern=r"^ssh-ed25519 [A-Za-z0-9+/=]+( [\w@.-]+)?$")]


def make_private(folder: Path) -> None:
    """Make a folder of root's that other accounts reach nothing in; one that they could read is closed.

    Nodes hold setuid programs, of which root of a node may make any: no other account may start one here.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def cluster_dir(cluster_id: str) -> Path:
    return STATE / cluster_id


def state_file(cluster_id: str) -> Path:
    """What root's side keeps of a cluster: there from before anything is made."""
    return cluster_dir(cluster_id) / "cluster.json"


def shared_folder(cluster_id: str) -> Path:
    """What nodes have as /shared; it stays there when the cluster is down and its storage is kept."""
    return cluster_dir(cluster_id) / "shared"


def class_folder(key: str) -> Path:
    """What nodes of a class have in common, in the cache."""
    return CACHE / f"class-{key}"


def class_note(node: Path) -> Path:
    """Which class a node is of: a file of its folder, with the key; there is none where it is of none."""
    return node / "class"


def storage_file(cluster_id: str) -> Path:
    """Whose a kept shared folder is."""
    return cluster_dir(cluster_id) / "storage.json"


def netns_name(cluster_id: str) -> str:
    """The network namespace that holds the cluster's bridge, and this machine's end of the cable into it."""
    return f"cc{cluster_id}"


def bridge_name(cluster_id: str) -> str:
    return f"cc{cluster_id}br"


def machine_name(cluster_id: str, number: int) -> str:
    """At most 12 characters, so that nspawn's ``vb-<machine>`` is not cut and hashed."""
    return f"c{cluster_id}-{number:03d}"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class Node(_Message):
    """One machine as the helper is asked to make it."""

    name: HostName
    cores: tuple[int, ...] = Field((), description="host cores it may run on; empty: all")
    disk_mib: Annotated[int, Field(ge=LEAST_DISK_MIB)] | None = Field(
        None, description="size of the file system that takes its changes; none: this machine's own"
    )


class Home(_Message):
    """A home on the shared folder. ``keys``: lines of the keys that may log in."""

    name: UnixName
    uid: Annotated[int, Field(gt=0)]
    keys: tuple[AdminKey, ...]


class _OfCluster(BaseModel):
    """What is known of a cluster: ``owner`` is the uid of the caller, who may see and remove it."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: ClusterId
    name: str
    owner: int
    workspace: str


class _Installed(_OfCluster):
    """A cluster with its image, and what is in that; ``keep_storage``: `down` leaves the shared folder."""

    image: ImageKey
    slurm: SlurmRelease | None = None
    keep_storage: bool = False


class ClusterRequest(_Installed):
    """The whole of a cluster: the helper makes what is missing and removes nodes that are not named."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    distribution: Release
    admin_key: AdminKey
    subnet: IPv4Network | None = None
    storage: ClusterId | None = Field(None, description="the cluster whose kept shared folder is taken up")
    node_class: ImageKey | None = Field(None, description="the class that new nodes with cores are of")
    controller_class: ImageKey | None = Field(None, description="the class that a new controller is of")
    homes: tuple[Home, ...] = Field((), description="those that a controller of a class finds on /shared")
    nodes: Annotated[tuple[Node, ...], Field(max_length=MAX_LOCAL_HOSTS)]
    anew: tuple[HostName, ...] = Field((), description="nodes that are removed first, if they are there")

    def class_of(self, node: Node) -> str | None:
        """The class that a node is of if it is new."""
        return self.node_class if node.cores else self.controller_class


class PlacedFile(_Message):
    """A file that a new node has for itself; ``data`` is base64. ``owner`` is its uid and gid.

    edges: the lines around ``data``, if it is a part of a file that the node has already.
    """

    path: Annotated[str, StringConstraints(pattern=r"^/(etc|opt)(/[A-Za-z0-9][\w.-]*)+$")]
    data: str
    mode: Annotated[int, Field(ge=0, le=0o777)]
    owner: Annotated[int, Field(ge=0)]
    edges: tuple[str, str] | None = None


class ClassRequest(_Message):
    """What hosts of each group have in common: layers over ``image``, or that of the cluster, if it is there.

    ``inputs`` is the hash of all that the caller configures in it, by group.
    """

    id: ClusterId
    image: ImageKey
    inputs: dict[HostName, ImageKey]
    admin_key: AdminKey


class ClusterQuery(_Message):
    """A cluster that is to be looked at, or removed; ``keep_storage``: but for the shared folder.

    None is for a caller that has not looked at what is in there: it stays if an `up` was to keep it.
    """

    id: ClusterId
    keep_storage: bool | None = None


class ClusterState(_Installed):
    """What the helper keeps of a cluster, as `cluster.json`; another version's keys are passed over.

    ``numbers`` (by node) fix addresses and machine names. A node keeps its own as long as it lives.
    """

    distribution: Release | None = None
    subnet: IPv4Network
    numbers: dict[HostName, int] = Field(default_factory=dict)

    def kept(
        self, subnet: IPv4Network | None, image: str, distribution: str, slurm: str | None
    ) -> Iterator[str]:
        """Yield what of a wish a cluster that is up does not get, in words for the user."""
        if subnet not in (None, self.subnet):
            yield f"the nodes stay in {self.subnet}; `down` and `up` moves them to {subnet}"
        is_alike = self.distribution in (None, distribution) and self.slurm in (None, slurm)
        if image != self.image and is_alike:
            yield "the nodes keep the older image they were made from; `down` and `up` gives them the new one"


class KeptFolder(_OfCluster):
    """The shared folder of a cluster that is down, as `storage.json`; ``homes``: account -> uid."""

    since: float
    size_mib: int
    homes: dict[str, int] = Field(default_factory=dict)


class StorageQuery(_Message):
    """Kept shared folders are asked for, after those that are to be removed are."""

    remove: tuple[ClusterId, ...] = ()


class Existing(_Message):
    """What this machine has of a cluster: its nodes with the sizes of their disks, and those that run.

    ``machines`` are all that run, known as nodes or not.
    """

    state: ClusterState | None = None
    nodes: dict[HostName, int | None] = Field(default_factory=dict)
    running: frozenset[HostName] = frozenset()
    machines: tuple[str, ...] = ()


class MadeNode(_Message):
    name: HostName
    address: str
    host_key: str
    started: bool = Field(description="False: it ran already")
    made: bool = Field(description="False: it has been there before, and has what was done to it")


class MadeCluster(_Message):
    """The answer to a ClusterRequest."""

    subnet: IPv4Network
    distribution: Release | None
    slurm: SlurmRelease | None = None
    nodes: tuple[MadeNode, ...]
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class BakeRequest(_Message):
    """An image: a base of Debian, or of this machine's own distribution, plus what ``install.yml`` adds.

    ``key`` is the hash of all that goes in, ``id`` the cluster whose nodes are to be made from it.
    """

    id: ClusterId | None = None
    key: ImageKey
    base_key: ImageKey
    distribution: Release
    mirror: Url
    admin_key: AdminKey


class CachedImage(_Message):
    key: str
    size_mib: int
    used_by: tuple[str, ...]


def numbered(names: Iterable[str], kept: Mapping[str, int]) -> dict[str, int]:
    """A number for each node, from 1: the one that it has, else the lowest that is free."""
    names = tuple(names)
    taken = {number for name, number in kept.items() if name in names}
    free = (number for number in count(1) if number not in taken)
    return {name: kept[name] if name in kept else next(free) for name in names}


def address(subnet: IPv4Network, number: int) -> str:
    """Address of a node: the host has .1, the controller (number 1) .2, and so on."""
    return str(subnet[number + 1])
