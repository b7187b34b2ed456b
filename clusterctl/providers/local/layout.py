"""Paths, names of kernel objects, and the messages between the local provider and its root helper.

All kernel names derive from the random cluster id, so that clusters of the same name of two users
do not collide. The names fit in the 15 characters that Linux allows for a network link.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from ipaddress import IPv4Network
from itertools import count
from pathlib import Path
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from clusterctl.spec.base import PATTERNS, UnixName, Url
from clusterctl.spec.names import MAX_LOCAL_HOSTS

STATE = Path("/var/lib/clusterctl")
CACHE = Path("/var/cache/clusterctl")
# Lock files.
RUN = Path("/run/clusterctl")
# In the folder of a cluster.
STATE_FILE = "cluster.json"

ClusterId = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{6}$")]
StorageName = Annotated[str, PATTERNS["label"]]
HostName = Annotated[str, StringConstraints(pattern=r"^[a-z][a-z0-9-]{0,62}$")]
ImageKey = Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{16}$")]
Release = Annotated[str, StringConstraints(pattern=r"^[a-z]{1,20}-[0-9]{1,3}$")]
Package = Annotated[str, PATTERNS["package"]]
AdminKey = Annotated[str, StringConstraints(pattern=r"^ssh-ed25519 [A-Za-z0-9+/=]+( [\w@.-]+)?$")]


def make_private(folder: Path) -> None:
    """Create a folder that only root may enter, because nodes' file systems contain setuid
    programs.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    folder.chmod(0o700)


def cluster_dir(cluster_id: str) -> Path:
    return STATE / cluster_id


def state_file(cluster_id: str) -> Path:
    return cluster_dir(cluster_id) / STATE_FILE


# Where nodes mount the shared folder.
SHARED = "/shared"


def storages_folder(owner: int) -> Path:
    """Return the folder of an account's storages, each a folder of its own that outlives clusters."""
    return STATE / "storage" / str(owner)


def class_folder(key: str) -> Path:
    """Return the cache folder of a node template."""
    return CACHE / f"class-{key}"


def class_note(node: Path) -> Path:
    """Return the path of the file, in a node's folder, with the key of its template, if it has a
    template.
    """
    return node / "class"


def netns_name(cluster_id: str) -> str:
    """Return the name of the cluster's network namespace. The veth link on this machine has the
    same name.
    """
    return f"cc{cluster_id}"


def bridge_name(cluster_id: str) -> str:
    return f"cc{cluster_id}br"


def machine_name(cluster_id: str, number: int) -> str:
    """Return the node's name in systemd-nspawn, so short that its link ``vb-NAME`` fits in 15
    characters.
    """
    return f"c{cluster_id}-{number:03d}"


class _Message(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class NspawnNode(_Message):
    name: HostName
    cores: tuple[int, ...] = Field(
        (), description="cores of this machine that the node may use; empty: all"
    )


class Home(_Message):
    """A user's home on the shared folder. ``keys``: lines for authorized_keys."""

    name: UnixName
    uid: Annotated[int, Field(gt=0)]
    keys: tuple[AdminKey, ...]


class _OfCluster(BaseModel):
    """A cluster's identity. ``owner``: uid of the account that may see and remove it. Root may do
    so too.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    id: ClusterId
    name: str
    owner: int
    workspace: str


class _Installed(_OfCluster):
    """A cluster with its image.

    storage: the owner's storage that is /shared. None: /shared goes with the cluster.
    packages: the spec's packages: those of the request, or those in the image that the nodes
        started from.
    """

    image: ImageKey
    packages: tuple[Package, ...] = ()
    storage: StorageName | None = None

    @property
    def shared(self) -> Path:
        """The folder that nodes mount as /shared."""
        if self.storage is None:
            return cluster_dir(self.id) / "shared"
        return storages_folder(self.owner) / self.storage


class ClusterRequest(_Installed):
    """A request to create a cluster's missing parts, and to remove its nodes that are not in
    ``nodes``.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    distribution: Release
    admin_key: AdminKey
    subnet: IPv4Network | None = None
    node_class: ImageKey | None = Field(None, description="the template of new compute nodes")
    controller_class: ImageKey | None = Field(None, description="the template of a new controller")
    homes: tuple[Home, ...] = Field(
        (), description="homes to create on a new /shared if there are templates"
    )
    nodes: Annotated[tuple[NspawnNode, ...], Field(max_length=MAX_LOCAL_HOSTS)]
    anew: tuple[HostName, ...] = Field(
        (), description="nodes to recreate: existing ones are removed first"
    )

    def class_of(self, node: NspawnNode) -> str | None:
        """Return the key of the template that a new node starts from. None: it starts from the
        image.
        """
        return self.node_class if node.cores else self.controller_class


class PlacedFile(_Message):
    """A file for a single new node. ``data``: in base64. ``owner``: its uid and gid.

    edges: the two lines around the block that ``data`` replaces. None: ``data`` is the whole file.
    """

    path: Annotated[str, StringConstraints(pattern=r"^/(etc|opt)(/[A-Za-z0-9][\w.-]*)+$")]
    data: str
    mode: Annotated[int, Field(ge=0, le=0o777)]
    owner: Annotated[int, Field(ge=0)]
    edges: tuple[str, str] | None = None


class ClassRequest(_Message):
    """The node templates to create, on the image that cluster ``id`` already uses, or else on
    ``image``.

    inputs: group of nodes -> hash of everything that the caller configures in the group's template.
    """

    id: ClusterId
    image: ImageKey
    inputs: dict[HostName, ImageKey]
    admin_key: AdminKey


class ClusterQuery(_Message):
    """A cluster to examine or remove."""

    id: ClusterId


class HostQuery(_Message):
    """A node to kill."""

    id: ClusterId
    host: HostName


class SignalRequest(_Message):
    """A signal for ranks of a job. last: only for the rank with the highest number."""

    id: ClusterId
    job: Annotated[str, StringConstraints(pattern=r"^[1-9][0-9]*$")]
    number: Annotated[int, Field(ge=1, le=64)]
    last: bool


class ClusterState(_Installed):
    """The content of a cluster's file `cluster.json`. Keys written by other versions are ignored.

    numbers: node name -> number, which determines the node's address and machine name and never
        changes.
    added: packages of the spec that all nodes have got since they started.
    """

    distribution: Release | None = None
    subnet: IPv4Network
    numbers: dict[HostName, int] = Field(default_factory=dict)
    added: tuple[Package, ...] = ()

    def with_packages(self, packages: tuple[str, ...]) -> Self:
        """Return this state, with these packages if an earlier version has not recorded its own."""
        return (
            self
            if "packages" in self.model_fields_set
            else self.model_copy(update={"packages": packages})
        )

    @property
    def hosts(self) -> dict[str, str]:
        """Map the name of each machine to the name of the node."""
        return {machine_name(self.id, number): name for name, number in self.numbers.items()}

    def notes_on_kept_settings(
        self, subnet: IPv4Network | None, image: str, distribution: str
    ) -> Iterator[str]:
        """Yield a note for each requested setting that differs from this state, because nodes keep
        it.
        """
        if subnet not in (None, self.subnet):
            yield f"the nodes keep the subnet {self.subnet}; `down` and `up` change it to {subnet}"
        if image != self.image and self.distribution in (None, distribution):
            yield (
                "the nodes keep the older image they started from; `down` and `up` switch to "
                "the new image"
            )


class StoredFolder(_Message):
    """A storage of an account.

    users: name and id of each cluster that uses it. homes: account -> uid of its home folder there.
    """

    name: str
    size_mib: int
    users: tuple[tuple[str, ClusterId], ...] = ()
    homes: dict[str, int] = Field(default_factory=dict)


class NoQuery(_Message):
    """A request without fields."""


class CacheQuery(_Message):
    """A request to list the cached images. ``prune``: delete the unused ones, and list these."""

    prune: bool = False


class StorageQuery(_Message):
    """A request to delete the storage ``remove`` of an account, and to list all that remain."""

    owner: int
    remove: StorageName | None = None


class ExistingMachines(_Message):
    """The state of a cluster on this machine.

    nodes: names of all nodes that have a folder, also of stopped nodes.
    machines: machine names of all running nodes, also of nodes that are missing in ``state``.
    """

    state: ClusterState | None = None
    nodes: frozenset[HostName] = frozenset()
    running: frozenset[HostName] = frozenset()
    machines: tuple[str, ...] = ()


class MadeNode(_Message):
    name: HostName
    address: str
    host_key: str
    started: bool = Field(description="False: it was already running")
    made: bool = Field(description="False: it existed before, with its configuration")


class MadeCluster(_Message):
    """The root helper's answer to a ClusterRequest. ``limits_memory``: the kernel can limit the
    memory of each job on a node.
    """

    subnet: IPv4Network
    limits_memory: bool
    distribution: Release | None
    nodes: tuple[MadeNode, ...]
    removed: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class BakeRequest(_Message):
    """The image to create: a base of Debian or this machine's distribution, plus the changes of
    install.yml.

    key: hash of all inputs. id: the cluster for which the image is built. subnet: that of the spec.
    """

    id: ClusterId | None = None
    subnet: IPv4Network | None = None
    key: ImageKey
    base_key: ImageKey
    distribution: Release
    mirror: Url
    admin_key: AdminKey


class ImageInCache(_Message):
    key: str
    size_mib: int
    used_by: tuple[str, ...]


def numbered(names: Iterable[str], kept: Mapping[str, int]) -> dict[str, int]:
    """Return node -> number (1, 2, ...): the node's number in ``kept``, or else the lowest unused
    number.
    """
    names = tuple(names)
    taken = {number for name, number in kept.items() if name in names}
    free = (number for number in count(1) if number not in taken)
    return {name: kept[name] if name in kept else next(free) for name in names}


def address(subnet: IPv4Network, number: int) -> str:
    """Return the address of node ``number``: .2 for number 1, the controller. This machine has
    .1.
    """
    return str(subnet[number + 1])
