"""What only Google Cloud knows of a spec: `provider: {type: gcp, ...}`."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from ipaddress import IPv4Network
from typing import Annotated, ClassVar, Final, Literal, Self

from pydantic import Field

from clusterctl.errors import BadValueError, ProvisionError, UsageError
from clusterctl.spec import distributions
from clusterctl.spec.base import (
    PATTERNS,
    PRIVATE_NETWORKS,
    DurationS,
    Fault,
    Model,
    Network,
    SizeMib,
    Toggle,
    Usd,
    at_least,
    spelled,
)
from clusterctl.spec.common import OF_OWN_MACHINES, Cluster, Gpus, Partition, ProviderSettings
from clusterctl.spec.gcp_nodes import (
    GPU_IMAGE,
    PLAIN,
    PLAIN_IMAGE,
    GcpDisk,
    GcpNodes,
    Image,
    Machine,
    Nodes,
    Project,
    Resource,
    check,
    data,
    default_machine,
    disk_size,
    disk_type,
    gpu_type,
    image_of,
    machines,
    release_of,
    with_added,
)
from clusterctl.spec.names import did_you_mean
from clusterctl.spec.units import GIB_MIB, format_size, shown


class GcpNetwork(Model):
    """The network: a new one of the cluster's own, unless both names of one that is there are given."""

    cidr: Network = Field(
        IPv4Network("10.80.0.0/20"), description="addresses of a new subnetwork", examples=["10.80.0.0/20"]
    )
    network: Resource | None = Field(None, description="an existing network of the project")
    subnetwork: Resource | None = Field(None, description="its subnetwork, in the zone's region")


class Filestore(Model):
    """The shared folder on Filestore, instead of the controller's own disk over NFS."""

    tier: Literal["BASIC_HDD", "BASIC_SSD", "ZONAL", "REGIONAL"] = Field("BASIC_HDD", description="its tier")
    capacity: SizeMib = spelled("1TiB", "its size, in whole GiB")


class Bucket(Model):
    """A Cloud Storage bucket that every node sees as /bucket: datasets in, results out."""

    name: Annotated[str, PATTERNS["bucket"]] = Field(description="its name, which is global")
    create: Toggle = Field(
        False, description="create it with the cluster; `down` keeps it unless it is empty"
    )


class GcsState(Model):
    """Terraform's state in a bucket, where it outlives this machine; by default it is local."""

    bucket: Annotated[str, PATTERNS["bucket"]] = Field(description="an existing bucket")
    prefix: Annotated[str, PATTERNS["folder"]] = Field("clusterctl", description="folder in it")


class NodeImage(Model):
    """An image of the project that new nodes start from, with all that they have in common."""

    bake: Toggle = Field(
        False,
        description="`up` makes the image where there is none of this configuration; without it, every node "
        "is installed by itself",
    )


class GcpSettings(ProviderSettings):
    """GPU nodes on Google Cloud, made by Terraform. See docs/gcp.md."""

    is_cloud: ClassVar[bool] = True
    keeps_from_start: ClassVar[bool] = True
    default_uid: ClassVar[int | None] = 10_000

    type: Literal["gcp"] = Field(description="the provider's type")
    project: Project = Field(description="the project's id")
    zone: Annotated[str, PATTERNS["zone"]] = Field(description="where all nodes are")
    region: str | None = Field(None, description="the zone's region; by default derived from it")
    partitions: Mapping[str, GcpNodes] = Field({}, description="settings of the instances, by partition")
    controller: GcpNodes = Field(GcpNodes(), description="settings of the instance with Slurm's daemons")
    image: NodeImage = Field(NodeImage(), description="an image made for the nodes of the partitions")
    network: GcpNetwork = Field(GcpNetwork(), description="the network of the nodes")
    filestore: Filestore | None = Field(
        None, description="a managed shared folder, instead of the controller's"
    )
    shared_disk: GcpDisk | None = Field(
        None,
        description="the controller's disk for the shared folder, with storage.keep and without filestore; "
        "by default 100GiB",
    )
    bucket: Bucket | None = Field(None, description="a bucket that every node sees as /bucket")
    kms_key: Annotated[str, PATTERNS["kms_key"]] | None = Field(
        None, description="a customer-managed key (CMEK) that encrypts all disks"
    )
    labels: Mapping[
        Annotated[str, PATTERNS["label_key"]],
        Annotated[str, PATTERNS["label_value"]],
    ] = Field(
        {},
        description="labels of all resources, beside clusterctl's own",
        json_schema_extra={"additionalProperties": False},
    )
    enable_apis: Toggle = Field(True, description="enable the APIs that are needed; else they are only named")
    state: GcsState | None = Field(None, description="Terraform's state in a bucket")
    auto_down: Annotated[DurationS, at_least("10m")] | None = Field(
        None, description="an idle cluster deletes its nodes and stops its controller after this time"
    )
    secure_boot: Toggle = Field(False, description="only signed drivers; NVIDIA's often are not")
    prices: Mapping[str, Usd] = Field(
        {}, description="your own prices, USD an hour, by machine type; over those of the built-in table"
    )

    @property
    def region_name(self) -> str:
        return self.zone.rsplit("-", 1)[0]

    @property
    def bakes(self) -> bool:
        return self.image.bake

    def baking(self) -> Self:
        return self.model_copy(update={"image": NodeImage(bake=True)})

    @property
    def location(self) -> Mapping[str, str]:
        return {"project": self.project, "zone": self.zone}

    @property
    def idle_timeout_s(self) -> int | None:
        return self.auto_down

    def expected_release(self, spec: Cluster) -> str | None:
        releases = {release_of(image) for _, image in _images(spec)}
        return releases.pop() if len(releases) == 1 else None

    def with_images(self, spec: Cluster, raised: Cluster | None) -> Self:
        before = _nodes_by_name(raised) if raised else {}
        images = {}
        for name, (said, has_gpus) in _nodes_by_name(spec).items():
            was, had_gpus = before.get(name, (said, has_gpus))
            kept = was.image if had_gpus == has_gpus else None  # another one's would lack the driver
            images[name] = said.image or kept or (GPU_IMAGE if has_gpus else PLAIN_IMAGE)
        controller = self.controller.model_copy(update={"image": images.pop("")})
        partitions = {
            name: self.nodes_of(name).model_copy(update={"image": image}) for name, image in images.items()
        }
        return self.model_copy(update={"controller": controller, "partitions": partitions})

    def faults(self, spec: Cluster) -> Iterator[Fault]:
        yield from _partitions(self, spec)
        yield from _nodes(self, spec)
        yield from _place(self)
        yield from _network(self.network, 1 + spec.node_count)
        yield from _storage(self)
        yield from _kept_storage(self, spec)
        yield from _users(spec)
        yield from _rest(self, spec)
        yield from spec.refused((*_OF_LOCAL_NODES, *OF_OWN_MACHINES))

    def nodes_of(self, partition: str) -> GcpNodes:
        return self.partitions.get(partition, GcpNodes())


def whole_project(project: str) -> GcpSettings:
    """Settings to search a project for orphans: its zone does not matter."""
    return GcpSettings(type="gcp", project=project, zone="us-central1-a")


def machine_of(spec: Cluster, partition: Partition) -> Machine:
    """The machine type of a partition's nodes, with its GPUs. The spec's provider must be Google Cloud."""
    gpus = partition.gpus
    known = Gpus(type=gpu_type(gpus.type) or gpus.type, count=gpus.count) if gpus else None
    name = settings_of(spec).nodes_of(partition.name).machine_type
    if name is None:
        return default_machine(known)
    named = machines()[name]
    return with_added(named, known) if known and named.gpu is None else named


def controller_machine(spec: Cluster) -> Machine:
    """The machine type of the controller. The spec's provider must be Google Cloud."""
    return machines()[settings_of(spec).controller.machine_type or PLAIN]


DEFAULT_SHARED_DISK: Final = GcpDisk.model_validate({"size": "100GiB"})


def shared_disk(spec: Cluster) -> tuple[int, str] | None:
    """Size in GiB and type of the disk that the shared folder is kept on; None where it is on none."""
    settings = settings_of(spec)
    if not spec.storage.keep or settings.filestore:
        return None
    disk = settings.shared_disk or DEFAULT_SHARED_DISK
    return disk.size // GIB_MIB, disk_type(disk, controller_machine(spec).extra_disks)


def settings_of(spec: Cluster) -> GcpSettings:
    if not isinstance(spec.provider, GcpSettings):
        raise BadValueError("needs-cloud", "only Google Cloud has machine types")
    return spec.provider


def _nodes_by_name(spec: Cluster) -> dict[str, tuple[GcpNodes, bool]]:
    """What is said of the controller ("") and of each partition, and whether it has GPUs."""
    if not isinstance(spec.provider, GcpSettings):
        return {}

    def has_gpus(nodes: GcpNodes) -> bool:
        machine = machines().get(nodes.machine_type or PLAIN)
        return machine is not None and machine.gpu is not None

    controller = spec.provider.controller
    named = ((one, spec.provider.nodes_of(one.name)) for one in spec.partitions)
    return {"": (controller, has_gpus(controller))} | {
        one.name: (nodes, one.gpus is not None or has_gpus(nodes)) for one, nodes in named
    }


def refusal(spec: Cluster) -> UsageError | None:
    """Why no cluster comes of this spec: the names of its images say what can't be configured, or differs.

    Or they don't say it, and an image is to be made of them, before any host runs.
    """
    named = {where: release for where, image in _images(spec) if (release := release_of(image))}
    try:
        if named:
            distributions.common(named)
    except ProvisionError as exc:
        where = ", ".join(str(failure.host) for failure in exc.failures)
        return UsageError(
            "clusterctl can't make a cluster of hosts with these images",
            code="image-distribution",
            where=where,
            why=exc.why,
            fix=f"name images of one release there, of one of {', '.join(distributions.supported())}; "
            "without any, all hosts start from Rocky Linux 9",
        )
    if spec.provider.expected_release(spec) is not None:
        return None
    for where, what in (
        ("provider.image.bake", "no image of the nodes can be made" if settings_of(spec).bakes else ""),
        ("slurm.version", f"Slurm {spec.slurm.version} can't be promised" if spec.slurm.version else ""),
    ):
        if what:
            return UsageError(
                f"{what}: which distribution they have is known only once they run",
                code="image-distribution-unknown",
                where=where,
                fix=f"name images of Google's own projects, or remove {where.rpartition('.')[2]}",
            )
    return None


def _images(spec: Cluster) -> Iterator[tuple[str, Image]]:
    if not isinstance(spec.provider, GcpSettings):
        return
    yield "provider.controller.image", image_of(spec.provider.controller, controller_machine(spec))
    for partition in spec.partitions:
        image = image_of(spec.provider.nodes_of(partition.name), machine_of(spec, partition))
        yield f"provider.partitions.{partition.name}.image", image


MAX_HOSTS: Final = 1000
# Google's guest agent runs `groupadd google-sudoers` and `useradd -m -s /bin/bash -p * NAME` (cfg/cfg.go and
# non_windows_accounts.go, 2026-07), which count from 1000; some images have an account of their own before.
_GIVEN_OUT: Final = range(1000, 1010)
_LARGEST_PREFIX: Final = 29
_TAKEN_ADDRESSES: Final = 4  # of every subnetwork: the network, the gateway, one of Google's, the broadcast
_REGION: Final = re.compile(r"[a-z]+-[a-z]+[0-9]+")
_KEY_LOCATION: Final = re.compile(r"/locations/([^/]+)/")
_OF_LOCAL_NODES: Final = tuple(
    (f"partitions.{key}", f"{key} is for local nodes", f"remove it; {word} under provider.partitions decides")
    for key, word in (("cpus", "machine_type"), ("memory", "machine_type"), ("disk", "boot_disk"))
)


def _partitions(provider: GcpSettings, spec: Cluster) -> Iterator[Fault]:
    for index, partition in enumerate(spec.partitions):
        if partition.name and partition.name.endswith("-"):
            message = f"{shown(partition.name)} ends with a dash, which a name on Google Cloud can't"
            yield Fault("name-ends-with-dash", ("partitions", index, "name"), message)
    names = [partition.name for partition in spec.partitions if partition.name]
    for name in provider.partitions:
        if name not in names:
            hint = did_you_mean(name, names) or f"the partitions are {', '.join(names) or 'missing'}"
            where = ("provider", "partitions", name)
            yield Fault("unknown-partition", where, f"there is no partition {shown(name)}", hint, at_key=True)


def _nodes(provider: GcpSettings, spec: Cluster) -> Iterator[Fault]:
    at, driver_for = ("provider", "controller"), ""
    for index, partition in enumerate(spec.partitions):
        if partition.name:
            name, said = partition.name, provider.nodes_of(partition.name)
            where = ("provider", "partitions", name)
            one, faults = check(Nodes(name, where, said, partition.gpus, ("partitions", index, "gpus")))
            yield from faults
            if one and one.gpu and not said.image:
                driver_for = driver_for or name
    controller = provider.controller
    nodes = Nodes("the controller", at, controller)
    machine, faults = check(nodes)
    yield from faults
    if controller.local_ssds or (machine and machine.bundled_ssds):
        message = "the controller can't have local disks: Terraform could not stop it to change it"
        place = (*at, "local_ssds") if controller.local_ssds else nodes.machine_at
        hint = "remove local_ssds" if controller.local_ssds else "take a machine type without local disks"
        yield Fault("controller-local-disks", place, message, f"{hint}; nodes can have them")
    if controller.spot:
        message = "the controller can't be a spot node: the cluster would be gone with it"
        yield Fault("controller-spot", (*at, "spot"), message, "remove spot")
    elif controller.compact_placement:
        message = "the controller is one machine: compact placement has no meaning"
        yield Fault("controller-placement", (*at, "compact_placement"), message, "remove compact_placement")
    if provider.secure_boot and driver_for:
        message = f"secure_boot keeps NVIDIA's driver of the default image from loading on {driver_for}"
        hint = f"remove it, or give {driver_for} an image whose driver is signed"
        yield Fault("secure-boot-driver", ("provider", "secure_boot"), message, hint)


def _users(spec: Cluster) -> Iterator[Fault]:
    """Numbers that a new host gives out by itself, before `up` comes: to Google's group, and accounts."""
    for index, user in enumerate(spec.users):
        if user.uid in _GIVEN_OUT:
            own = "Google's images give out those from 1000 on"
            message = f"uid {user.uid} may be taken on the hosts: {own}"
            hint = f"take one from {_GIVEN_OUT.stop} on, such as {GcpSettings.default_uid}"
            yield Fault("uid-maybe-taken", ("users", index, "uid"), message, hint)


def _place(provider: GcpSettings) -> Iterator[Fault]:
    if not provider.zone or not PATTERNS["zone"].matches(provider.zone):
        return
    zone, right = provider.zone, provider.region_name
    if provider.region is not None and provider.region != right:
        message = f"zone {zone} is in region {right}, not {shown(provider.region)}"
        yield Fault("zone-not-in-region", ("provider", "region"), message, "remove region")
    location = _KEY_LOCATION.search(provider.kms_key or "")
    if location and _REGION.fullmatch(location[1]) and location[1] != right:
        message = f"the key is in {location[1]}, but disks of zone {zone} need one in {right}"
        yield Fault("key-not-in-region", ("provider", "kms_key"), message, f"name a key in {right}")


def _network(network: GcpNetwork, hosts: int) -> Iterator[Fault]:
    at, cidr, default = ("provider", "network"), network.cidr, GcpNetwork().cidr
    if hosts > MAX_HOSTS:
        message = f"these nodes and the controller are more than {MAX_HOSTS} hosts"
        hint = f"ask for at most {MAX_HOSTS - 1} nodes"
        yield Fault("too-many-hosts", ("partitions",), message, hint, at_key=True)
        return
    given = [key for key in ("network", "subnetwork") if getattr(network, key) is not None]
    if len(given) == 1:
        (other,) = {"network", "subnetwork"} - set(given)
        message = f"{given[0]} needs {other} beside it"
        yield Fault("network-incomplete", (*at, given[0]), message, f"name the {other} too")
    elif given and cidr and cidr != default:
        message = "an existing subnetwork has its own addresses"
        yield Fault("network-has-addresses", (*at, "cidr"), message, "remove cidr")
    elif not given and cidr:
        yield from _addresses(cidr, hosts)


def _addresses(cidr: IPv4Network, hosts: int) -> Iterator[Fault]:
    at, room = ("provider", "network", "cidr"), cidr.num_addresses - _TAKEN_ADDRESSES
    if not any(cidr.subnet_of(private) for private in PRIVATE_NETWORKS):
        yield Fault("network-not-private", at, f"{cidr} is not private, such as 10.80.0.0/20")
    elif cidr.prefixlen > _LARGEST_PREFIX:
        hint = f"take a /{_LARGEST_PREFIX} or larger"
        yield Fault("network-too-small", at, f"{cidr} is smaller than a subnetwork can be", hint)
    elif room < hosts:
        message = f"{cidr} has room for {room} hosts, not for {hosts}"
        yield Fault("network-too-small", at, message, "take a larger network")


def _storage(provider: GcpSettings) -> Iterator[Fault]:
    filestore = provider.filestore
    if not filestore or not filestore.tier or not filestore.capacity:
        return
    limits, size_mib = data()["filestore"][filestore.tier], filestore.capacity
    is_large = size_mib >= limits.get("large_from", limits["most"] + 1) * GIB_MIB
    steps = "large_step" if is_large else "step"
    least, most, step = (limits[key] * GIB_MIB for key in ("least", "most", steps))
    if not least <= size_mib <= most or size_mib % step:
        range_ = f"{format_size(least)} to {format_size(most)}"
        hint = (
            f"write {format_size(least)} or more" if size_mib < least else f"by steps of {format_size(step)}"
        )
        message = f"{filestore.tier} has {range_}, not {format_size(size_mib)}"
        yield Fault("filestore-size", ("provider", "filestore", "capacity"), message, hint)


def _kept_storage(provider: GcpSettings, spec: Cluster) -> Iterator[Fault]:
    disk, at = provider.shared_disk, ("provider", "shared_disk")
    if spec.storage.keep and provider.filestore and provider.network.network is None:
        message = "a Filestore instance can't outlive its network, which goes with the cluster"
        fix = "name a network of yours: provider.network.network and subnetwork; or remove filestore"
        yield Fault("storage-goes-with-network", ("storage", "keep"), message, fix)
    if disk is None:
        return
    if disk.size:
        yield from disk_size((*at, "size"), disk.size)
    machine = machines().get(provider.controller.machine_type or PLAIN)
    if disk.type and machine and disk.type not in machine.extra_disks:
        message = f"the controller, {machine.name}, can't have a disk of {shown(disk.type)}"
        hint = f"write {' or '.join(machine.extra_disks)}, or nothing"
        yield Fault("disk-type", (*at, "type"), message, hint)


def _rest(provider: GcpSettings, spec: Cluster) -> Iterator[Fault]:
    if provider.image and provider.image.bake and spec.scheduler == "none":
        message = "without Slurm, nodes have each other's keys: there is little to share"
        yield Fault("bake-without-slurm", ("provider", "image", "bake"), message, "remove it")
    for name in provider.prices:
        if name not in machines():
            at, hint = ("provider", "prices", name), did_you_mean(name, machines())
            yield Fault(
                "unknown-machine-type", at, f"there is no machine type {shown(name)}", hint, at_key=True
            )
