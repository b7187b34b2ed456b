"""The settings of Google Cloud in a spec, `provider: {type: gcp, ...}`, and checks between its
fields.
"""

from __future__ import annotations

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
    Network,
    SizeMib,
    SpecFault,
    SpecModel,
    Toggle,
    at_least,
    spelled,
)
from clusterctl.spec.common import (
    OF_OWN_MACHINES,
    ClusterBase,
    Gpus,
    MachineType,
    Partition,
    ProviderSettings,
    Refusal,
    RentedMachines,
)
from clusterctl.spec.names import did_you_mean
from clusterctl.spec.providers.gcp_machines import (
    PLAIN,
    GcpMachineType,
    MachineFacts,
    default_machine,
    gpu_type,
    unknown_gpu,
    with_added,
    with_stated,
)
from clusterctl.spec.providers.gcp_nodes import (
    GPU_IMAGE,
    PLAIN_IMAGE,
    GcpDisk,
    GcpNodes,
    Image,
    LocatedNodes,
    Project,
    Resource,
    check,
    disk_size,
    disk_type,
    image_of,
    release_of,
)
from clusterctl.spec.units import GIB_MIB, shown

_OF_LOCAL_NODES: Final = tuple(
    (
        f"partitions.{key}",
        f"{key} is only for local nodes",
        "set machine_type in provider.partitions instead",
    )
    for key in ("cpus", "memory")
)


class GcpNetwork(SpecModel):
    """A new network for this cluster, or an existing network if both of its names are given."""

    cidr: Network = Field(
        IPv4Network("10.80.0.0/20"),
        description="addresses of a new subnetwork",
        examples=["10.80.0.0/20"],
    )
    network: Resource | None = Field(None, description="an existing network of the project")
    subnetwork: Resource | None = Field(
        None, description="a subnetwork of it, in the zone's region"
    )
    host_project: Project | None = Field(
        None,
        description="the host project of a Shared VPC, if the network is in it instead of the "
        "project",
    )
    firewall: Toggle = Field(
        True,
        description="create firewall rules for the hosts in the network's project; if false, rules "
        "of the existing network must admit them",
    )


class Filestore(SpecModel):
    """The shared folder on Filestore, instead of the controller's own disk over NFS."""

    tier: Literal["BASIC_HDD", "BASIC_SSD", "ZONAL", "REGIONAL"] = Field(
        "BASIC_HDD", description="its tier"
    )
    capacity: SizeMib = spelled("1TiB", "its size, in whole GiB")


class GcsBucket(SpecModel):
    """A Cloud Storage bucket that every node mounts as /bucket, for datasets and results."""

    name: Annotated[str, PATTERNS["bucket"]] = Field(description="its globally unique name")
    create: Toggle = Field(
        False, description="create it with the cluster; `down` only deletes it if empty"
    )


class NodeImage(SpecModel):
    """An image in the project, with the software that all nodes share, which new nodes start
    from.
    """

    bake: Toggle = Field(
        False,
        description="`up` builds the image unless the project has an image of this configuration; "
        "false: the software is installed on each node",
    )


class GcpSettings(ProviderSettings):
    """GPU nodes on Google Cloud, created by Terraform. See docs/gcp.md."""

    refuses: ClassVar[tuple[Refusal, ...]] = (*_OF_LOCAL_NODES, OF_OWN_MACHINES)
    foreign: ClassVar[bool] = False
    adopts_hosts: ClassVar[bool] = False
    may_have_fabric: ClassVar[bool] = False
    shares_kernel: ClassVar[bool] = False
    is_cloud: ClassVar[bool] = True
    late_account_fix: ClassVar[str] = (
        "see the host's boot log: the host creates the account itself (docs/gcp.md, OS Login)"
    )
    first_verb: ClassVar[str] = "up"
    default_uid: ClassVar[int | None] = 10_000

    type: Literal["gcp"] = Field(description="the provider's type")
    project: Project = Field(description="the project's ID")
    zone: Annotated[str, PATTERNS["zone"]] = Field(description="the zone of all nodes")
    partitions: Mapping[str, GcpNodes] = Field(
        {}, description="settings of the instances, by partition"
    )
    controller: GcpNodes = Field(
        GcpNodes(), description="settings of the instance with Slurm's daemons"
    )
    image: NodeImage = Field(
        NodeImage(), description="an image built for the nodes of the partitions"
    )
    network: GcpNetwork = Field(GcpNetwork(), description="the network of the nodes")
    filestore: Filestore | None = Field(
        None,
        description="a managed file server for the shared folder, instead of the controller's disk",
    )
    shared_disk: GcpDisk | None = Field(
        None,
        description="the disk of a new `storage.name`, without filestore; by default 100GiB",
    )
    bucket: GcsBucket | None = Field(None, description="a bucket that every node mounts as /bucket")
    kms_key: Annotated[str, PATTERNS["kms_key"]] | None = Field(
        None, description="a customer-managed key (CMEK) that encrypts all disks"
    )
    labels: Mapping[
        Annotated[str, PATTERNS["label_key"]], Annotated[str, PATTERNS["label_value"]]
    ] = Field(
        {},
        description="labels of all resources, in addition to clusterctl's",
        json_schema_extra={"additionalProperties": False},
    )
    enable_apis: Toggle = Field(
        True, description="enable the required APIs; if false, `up` only lists them"
    )
    auto_down: Annotated[DurationS, at_least("10m")] | None = Field(
        None,
        description="idle time after which the cluster deletes its nodes and stops its controller",
    )
    secure_boot: Toggle = Field(
        False, description="load only signed drivers; NVIDIA's often are unsigned"
    )
    machine_types: Mapping[str, MachineFacts] = Field(
        {}, description="machine types that clusterctl does not know, by name"
    )

    @classmethod
    def of_project(cls, project: str) -> GcpSettings:
        # The search ignores the zone.
        return cls(type="gcp", project=project, zone="us-central1-a")

    @property
    def known_machines(self) -> Mapping[str, GcpMachineType]:
        return with_stated(self.machine_types)

    @property
    def region_name(self) -> str:
        return self.zone.rsplit("-", 1)[0]

    @property
    def network_project(self) -> str:
        """The project of the network and its firewall rules: of a Shared VPC, the host project."""
        return self.network.host_project or self.project

    @property
    def subnetwork_path(self) -> str:
        """The REST path of the existing subnetwork."""
        name = self.network.subnetwork
        return f"projects/{self.network_project}/regions/{self.region_name}/subnetworks/{name}"

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

    def expected_release(self, spec: ClusterBase) -> str | None:
        releases = {release_of(image) for _, image in _images(spec)}
        return releases.pop() if len(releases) == 1 else None

    def with_images(self, spec: ClusterBase, raised: ClusterBase | None) -> Self:
        previous_nodes = _nodes_by_name(raised) if raised else {}
        images = {}
        for name, (nodes, has_gpus) in _nodes_by_name(spec).items():
            previous, had_gpus_before = previous_nodes.get(name, (nodes, has_gpus))
            # After a change between nodes with and without GPUs, the previous image has the wrong
            # driver.
            kept_image = previous.image if had_gpus_before == has_gpus else None
            images[name] = nodes.image or kept_image or (GPU_IMAGE if has_gpus else PLAIN_IMAGE)
        controller = self.controller.model_copy(update={"image": images.pop("")})
        partitions = {
            name: self.nodes_of(name).model_copy(update={"image": image})
            for name, image in images.items()
        }
        return self.model_copy(update={"controller": controller, "partitions": partitions})

    def rented_machines(self, spec: ClusterBase) -> RentedMachines:
        machines = {partition.name: machine_of(spec, partition) for partition in spec.partitions}
        return RentedMachines(
            MachineType(controller_machine(spec).name),
            {
                name: MachineType(machine.name, str(machine.gpu) if machine.gpu else "")
                for name, machine in machines.items()
            },
        )

    def rejection(self, spec: ClusterBase) -> UsageError | None:
        return image_error(spec)

    def faults(self, spec: ClusterBase) -> Iterator[SpecFault]:
        yield from _partition_faults(self, spec)
        yield from _node_faults(self, spec)
        yield from _network_faults(self.network, 1 + spec.node_count)
        yield from _kept_storage_faults(self, spec)
        yield from _uid_faults(spec)
        yield from _other_faults(self, spec)

    def nodes_of(self, partition: str) -> GcpNodes:
        return self.partitions.get(partition, GcpNodes())


def machine_of(spec: ClusterBase, partition: Partition) -> GcpMachineType:
    """Return the type and GPUs of a partition's machines. The spec's provider must be Google
    Cloud.
    """
    gpus = partition.gpus
    wanted_gpus = Gpus(type=gpu_type(gpus.type) or gpus.type, count=gpus.count) if gpus else None
    name = settings_of(spec).nodes_of(partition.name).machine_type
    if name is None:
        return default_machine(wanted_gpus)
    named = settings_of(spec).known_machines[name]
    return with_added(named, wanted_gpus) if wanted_gpus and named.gpu is None else named


def controller_machine(spec: ClusterBase) -> GcpMachineType:
    """Return the machine type of the controller. The spec's provider must be Google Cloud."""
    settings = settings_of(spec)
    return settings.known_machines[settings.controller.machine_type or PLAIN]


DEFAULT_SHARED_DISK: Final = GcpDisk.model_validate({"size": "100GiB"})


def shared_disk(spec: ClusterBase) -> tuple[int, str] | None:
    """Return (size in GiB, type) of the disk for `storage.name`, if it is to be a disk."""
    settings = settings_of(spec)
    if not spec.storage.name or settings.filestore:
        return None
    disk = settings.shared_disk or DEFAULT_SHARED_DISK
    return disk.size // GIB_MIB, disk_type(disk, controller_machine(spec).disk_types)


def settings_of(spec: ClusterBase) -> GcpSettings:
    if not isinstance(spec.provider, GcpSettings):
        raise BadValueError("needs-cloud", "only a cluster on Google Cloud has machine types")
    return spec.provider


def _nodes_by_name(spec: ClusterBase) -> dict[str, tuple[GcpNodes, bool]]:
    """Return partition name -> (settings, whether its instances have GPUs). Key "": the
    controller.
    """
    if not isinstance(spec.provider, GcpSettings):
        return {}

    machine_types = spec.provider.known_machines

    def has_gpus(nodes: GcpNodes) -> bool:
        machine = machine_types.get(nodes.machine_type or PLAIN)
        return machine is not None and machine.gpu is not None

    controller = spec.provider.controller
    named = ((partition, spec.provider.nodes_of(partition.name)) for partition in spec.partitions)
    return {"": (controller, has_gpus(controller))} | {
        partition.name: (nodes, partition.gpus is not None or has_gpus(nodes))
        for partition, nodes in named
    }


def image_error(spec: ClusterBase) -> UsageError | None:
    """Return an error if the names of the spec's images show an unsupported distribution, or
    several of them.

    If a name shows no distribution, this is an error only if clusterctl must know the distribution
    before any
    host runs: to build a node image, or because the spec sets Slurm's release.
    """
    named = {key: release for key, image in _images(spec) if (release := release_of(image))}
    try:
        if named:
            distributions.common_distribution(named)
    except ProvisionError as exc:
        key = ", ".join(str(failure.host) for failure in exc.failures)
        return UsageError(
            "hosts with these images can't form a cluster",
            code="host-unfit",
            about="image-distribution",
            where=key,
            why=exc.why,
            fix=f"use images of the same release: {', '.join(distributions.supported())}; "
            "without `image`, all hosts start from Rocky Linux 9",
        )
    if spec.provider.expected_release(spec) is not None:
        return None
    origin = spec.software.slurm.origin
    for key, problem in (
        (
            "provider.image.bake",
            "clusterctl can't build a node image" if settings_of(spec).bakes else "",
        ),
        (
            "software.slurm",
            f"Slurm from {origin} can't be guaranteed" if origin != "distribution" else "",
        ),
    ):
        if problem:
            return UsageError(
                f"{problem}: the distribution of the nodes is unknown until they run",
                code="host-unfit",
                about="image-unknown",
                where=key,
                fix=f"use images from Google's own projects, or remove {key.rpartition('.')[2]}",
            )
    return None


def _images(spec: ClusterBase) -> Iterator[tuple[str, Image]]:
    if not isinstance(spec.provider, GcpSettings):
        return
    yield "provider.controller.image", image_of(spec.provider.controller, controller_machine(spec))
    for partition in spec.partitions:
        image = image_of(spec.provider.nodes_of(partition.name), machine_of(spec, partition))
        yield f"provider.partitions.{partition.name}.image", image


MAX_HOSTS: Final = 1000
# The ids that Google's guest agent may use. It runs
# `groupadd google-sudoers` and `useradd -m -s /bin/bash -p * NAME` (cfg/cfg.go,
# non_windows_accounts.go, 2026-07). Some images already have accounts from 1000 on.
_GIVEN_OUT: Final = range(1000, 1010)
_LARGEST_PREFIX: Final = 29
# The reserved addresses of a subnetwork: network, gateway, broadcast, and one for Google.
_TAKEN_ADDRESSES: Final = 4


def _partition_faults(provider: GcpSettings, spec: ClusterBase) -> Iterator[SpecFault]:
    for index, partition in enumerate(spec.partitions):
        if partition.name and partition.name.endswith("-"):
            message = f"{shown(partition.name)} ends with a dash, but names on Google Cloud can't"
            yield SpecFault(
                "name-ends-with-dash", ("partitions", index, "name"), message, "remove the dash"
            )
    names = [partition.name for partition in spec.partitions if partition.name]
    for name in provider.partitions:
        if name not in names:
            hint = (
                did_you_mean(name, names) or f"the partitions are {', '.join(names) or 'missing'}"
            )
            where = ("provider", "partitions", name)
            yield SpecFault(
                "unknown-partition",
                where,
                f"there is no partition {shown(name)}",
                hint,
                at_key=True,
            )


def _node_faults(provider: GcpSettings, spec: ClusterBase) -> Iterator[SpecFault]:
    at = ("provider", "controller")
    driver_for = ""
    machine_types = provider.known_machines
    for index, partition in enumerate(spec.partitions):
        if partition.name:
            name = partition.name
            settings = provider.nodes_of(partition.name)
            where = ("provider", "partitions", name)
            gpus_at = ("partitions", index, "gpus")
            node_machine, faults = check(
                LocatedNodes(name, where, settings, machine_types, partition.gpus, gpus_at)
            )
            yield from faults
            if node_machine and node_machine.gpu and not settings.image:
                driver_for = driver_for or name
    controller = provider.controller
    nodes = LocatedNodes("the controller", at, controller, machine_types)
    machine, faults = check(nodes)
    yield from faults
    if controller.local_ssds or (machine and machine.bundled_ssds):
        message = (
            "the controller can't have local disks, because Terraform can't stop instances with "
            "them"
        )
        place = (*at, "local_ssds") if controller.local_ssds else nodes.machine_at
        hint = (
            "remove local_ssds"
            if controller.local_ssds
            else "use a machine type without local disks"
        )
        yield SpecFault(
            "controller-local-disks", place, message, f"{hint}; compute nodes can have local disks"
        )
    if controller.spot:
        message = "the controller can't be a spot node: if Google preempts it, the cluster stops"
        yield SpecFault("controller-spot", (*at, "spot"), message, "remove spot")
    elif controller.flex_start:
        message = (
            "the controller can't be a flex-start node, because Google deletes it after at most 7d"
        )
        yield SpecFault("controller-flex-start", (*at, "flex_start"), message, "remove flex_start")
    if controller.compact_placement:
        message = "compact placement has no effect on the controller, which is a single instance"
        yield SpecFault(
            "controller-placement", (*at, "compact_placement"), message, "remove compact_placement"
        )
    if provider.secure_boot and driver_for:
        message = (
            f"secure_boot blocks the NVIDIA driver of the default image on {shown(driver_for)}"
        )
        hint = f"remove secure_boot, or set an image with a signed driver for {shown(driver_for)}"
        yield SpecFault("secure-boot-driver", ("provider", "secure_boot"), message, hint)


def _uid_faults(spec: ClusterBase) -> Iterator[SpecFault]:
    """Yield a fault for each uid that Google's software may already use for its own accounts on a
    host.
    """
    for index, user in enumerate(spec.users):
        if user.uid in _GIVEN_OUT:
            reason = "Google's images assign uids from 1000 on"
            message = f"uid {user.uid} may be in use on the hosts: {reason}"
            hint = f"use {_GIVEN_OUT.stop} or higher, such as {GcpSettings.default_uid}"
            yield SpecFault("uid-maybe-taken", ("users", index, "uid"), message, hint)


def _network_faults(network: GcpNetwork, hosts: int) -> Iterator[SpecFault]:
    at = ("provider", "network")
    cidr = network.cidr
    default = GcpNetwork().cidr
    if hosts > MAX_HOSTS:
        message = f"the nodes and the controller together are more than {MAX_HOSTS} hosts"
        hint = f"ask for at most {MAX_HOSTS - 1} nodes"
        yield SpecFault("too-many-hosts", ("partitions",), message, hint, at_key=True)
        return
    present = [key for key in ("network", "subnetwork") if getattr(network, key) is not None]
    if len(present) == 1:
        (other,) = {"network", "subnetwork"} - set(present)
        message = f"{present[0]} needs {other}: both must be set together"
        yield SpecFault("network-incomplete", (*at, present[0]), message, f"add {other}")
    elif not present and network.host_project:
        message = "host_project needs network and subnetwork, which must exist in that project"
        yield SpecFault("network-incomplete", (*at, "host_project"), message, "add both")
    elif not present and network.firewall is False:
        message = "a new network needs its firewall rules, without which nothing reaches the hosts"
        hint = "remove firewall, or name an existing network and subnetwork"
        yield SpecFault("network-incomplete", (*at, "firewall"), message, hint)
    elif present and cidr and cidr != default:
        message = "cidr can't be set for an existing subnetwork, which has its own addresses"
        yield SpecFault("network-has-addresses", (*at, "cidr"), message, "remove cidr")
    elif not present and cidr:
        yield from _address_faults(cidr, hosts)


def _address_faults(cidr: IPv4Network, hosts: int) -> Iterator[SpecFault]:
    at = ("provider", "network", "cidr")
    room = cidr.num_addresses - _TAKEN_ADDRESSES
    if not any(cidr.subnet_of(private) for private in PRIVATE_NETWORKS):
        yield SpecFault(
            "network-not-private", at, f"{cidr} is not a private network, such as 10.80.0.0/20"
        )
    elif cidr.prefixlen > _LARGEST_PREFIX:
        hint = f"use a /{_LARGEST_PREFIX} or a larger network"
        yield SpecFault("network-too-small", at, f"{cidr} is too small for a subnetwork", hint)
    elif room < hosts:
        message = f"{cidr} has room for {room} hosts, not for {hosts}"
        yield SpecFault("network-too-small", at, message, "use a larger network")


def _kept_storage_faults(provider: GcpSettings, spec: ClusterBase) -> Iterator[SpecFault]:
    if provider.filestore:
        yield from disk_size(("provider", "filestore", "capacity"), provider.filestore.capacity)
    disk = provider.shared_disk
    at = ("provider", "shared_disk")
    if spec.storage.name and provider.filestore and provider.network.network is None:
        message = (
            "a Filestore instance can't outlive its network, which `down` deletes with the cluster"
        )
        fix = (
            "use an existing network (provider.network.network and subnetwork), or remove filestore"
        )
        yield SpecFault("storage-goes-with-network", ("storage", "name"), message, fix)
    if disk is None:
        return
    if disk.size:
        yield from disk_size((*at, "size"), disk.size)


def _other_faults(provider: GcpSettings, spec: ClusterBase) -> Iterator[SpecFault]:
    if provider.image and provider.image.bake and spec.scheduler == "none":
        message = (
            "without Slurm, an image saves little time, because each node needs its own SSH keys"
        )
        yield SpecFault("bake-without-slurm", ("provider", "image", "bake"), message, "remove bake")
    for name, facts in provider.machine_types.items():
        if facts.gpus and facts.gpus.type and gpu_type(facts.gpus.type) is None:
            yield unknown_gpu(facts.gpus.type, ("provider", "machine_types", name, "gpus", "type"))
