"""Node images in the user's project, with the common software and configuration of nodes.

An image is built on a temporary machine, and named by a hash of its inputs, so that another
configuration gives another image. Images belong to no cluster and stay when a cluster goes down:
they are a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clusterctl.errors import CloudError, ProvisionError
from clusterctl.providers.gcp import costs
from clusterctl.providers.gcp.api import Api, Json, iap_tunnel
from clusterctl.providers.templates import KeptImage
from clusterctl.spec.distributions import UNSEEN
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers import gcp
from clusterctl.spec.providers.gcp_machines import GcpMachineType, machines
from clusterctl.spec.providers.gcp_nodes import GcpNodes, Image, image_of
from clusterctl.spec.units import GIB_MIB
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory, SharedFolder
from clusterctl.util import formatting
from clusterctl.util.assets import digest, install_inputs

SHARED: Final = "/shared"
LABEL: Final = "clusterctl-image"
# The time to install packages through Cloud NAT and to copy the disk.
_MINUTES: Final = "5 to 20 minutes"
# The machine type for a build: it installs packages and runs no jobs.
_SMALL: Final = "e2-standard-2"
_WAIT_S: Final = 1800.0
# Google deletes a flex-start machine after its time, so a build may need more than a node has.
_LEAST_FLEX_START_S: Final = 2 * 60 * 60
_LONGEST_NAME: Final = 63
_BYTES_A_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Equal hosts to create: the missing nodes of partition ``name``, or the controller if ``name``
    is "".
    """

    name: str
    nodes: GcpNodes
    machine: GcpMachineType
    image: Image
    count: int

    @property
    def title(self) -> str:
        return f"partition {self.name}" if self.name else "controller"


@dataclass(frozen=True, slots=True)
class ProjectImage:
    """A node image. ``name`` contains a hash of all inputs; ``family`` helps people to find the
    image.

    base, nodes, machine: image, settings and type of the temporary machine on which clusterctl
        builds it.
    """

    name: str
    family: str
    base: Image
    nodes: GcpNodes
    machine: GcpMachineType


def machine_name(spec: ClusterSpec) -> str:
    """Return the name of the temporary machine that builds images. Unlike a node's, it ends in no
    number.
    """
    return f"{spec.name}-image"


def image_machines(spec: ClusterSpec) -> Iterator[HostGroup]:
    """Yield, for each partition, the machine that builds its image: small unless a GPU driver is
    needed.
    """
    settings = gcp.settings_of(spec)
    for partition in spec.partitions:
        nodes = settings.nodes_of(partition.name)
        machine = gcp.machine_of(spec, partition)
        disk = nodes.boot_disk.model_copy(update={"type": None})
        nodes_of_builder = GcpNodes(boot_disk=disk, gvnic=nodes.gvnic)
        builder = machines()[_SMALL]
        if spec.software.nvidia.has_driver and machine.gpu:
            builder = machine
            options = {key: getattr(nodes, key) for key in ("spot", "flex_start", "reservation")}
            if nodes.flex_start:
                options["flex_start"] = max(nodes.flex_start, _LEAST_FLEX_START_S)
            nodes_of_builder = nodes_of_builder.model_copy(update=options)
        yield HostGroup(partition.name, nodes_of_builder, builder, image_of(nodes, machine), 1)


def images_of(api: Api, spec: ClusterSpec, inputs: str) -> dict[str, ProjectImage]:
    """Return partition -> image of its nodes. ``inputs``: hash of the nodes' configuration.

    Omit partitions if Google no longer offers their base image. Their existing nodes need no new
    image. Raise a CloudError if an image family can't be read.
    """
    disks = _local_disks(spec)
    settings = gcp.settings_of(spec)
    kinds = (settings.filestore is not None, settings.bucket is not None, any(disks.values()))
    installed = digest(*install_inputs(), spec.software.model_dump_json(), *map(str, kinds))
    return {
        group.name: _node_image(group, newest, inputs, installed, str(disks[group.name] > 0))
        for group in image_machines(spec)
        if (newest := _newest_image(api, group.image))
    }


def partitions_without_base(spec: ClusterSpec, chosen: Mapping[str, ProjectImage]) -> Iterator[str]:
    """Yield a message for each partition that ``chosen`` lacks, because its base image no longer
    exists.
    """
    for group in image_machines(spec):
        if group.name not in chosen:
            name = group.name
            yield (
                f"project {group.image.project} no longer has an image of the family "
                f"{group.image.family}; for new nodes of partition {name}, set another "
                f"provider.partitions.{name}.image"
            )


def _local_disks(spec: ClusterSpec) -> dict[str, int]:
    settings = gcp.settings_of(spec)
    bundled = {nodes.name: gcp.machine_of(spec, nodes).bundled_ssds for nodes in spec.partitions}
    return {name: settings.nodes_of(name).local_ssds + count for name, count in bundled.items()}


def _newest_image(api: Api, image: Image) -> str | None:
    """Return the image's name, or the name of the newest image of its family. None: no such image
    exists.
    """
    if image.family is None:
        return image.name
    newest = api.find("compute", f"projects/{image.project}/global/images/family/{image.family}")
    return str(newest["name"]) if newest else None


def _node_image(group: HostGroup, newest: str, *inputs: str) -> ProjectImage:
    # A node's disk may not be smaller than its image, so the size is part of the key.
    size = str(group.nodes.boot_disk.size)
    key = digest(*inputs, group.image.project, newest, size, group.machine.name)
    family = f"clusterctl-{group.image.family or newest}"[:_LONGEST_NAME].rstrip("-")
    base = Image(project=group.image.project, name=newest)
    return ProjectImage(f"clusterctl-{key}", family, base, group.nodes, group.machine)


def describe_missing(
    api: Api, spec: ClusterSpec, chosen: Mapping[str, ProjectImage]
) -> Iterator[str]:
    """Yield a message for each image in ``chosen`` that must be built: the time, the machine, its
    price.
    """
    for image in {image.name: image for image in chosen.values()}.values():
        resource = api.find("compute", path_of(api, image.name)) or {}
        if resource.get("status") not in {"READY", "PENDING"}:
            gpu = image.machine.gpu if image.machine.guest_accelerator else None
            added = {str(image.machine.accelerator): gpu.count} if gpu else {}
            usd = costs.of_machine(image.machine.name, added, model=image.nodes.provisioning_model)
            price = f", {formatting.cost(usd)} an hour" if usd else ""
            yield (
                f"clusterctl first builds the node image {image.name}, once. This takes about "
                f"{_MINUTES} on {machine_name(spec)} ({image.machine.name}{price}), which is "
                "deleted afterwards"
            )


def machine_inventory(
    spec: ClusterSpec,
    cluster_id: str,
    image: ProjectImage,
    chosen: Mapping[str, ProjectImage],
    key: str,
) -> Inventory:
    """Return the inventory for configuring ``image``: its temporary machine, and the controller.

    chosen: partition -> image of its nodes. key: SSH host key of the temporary machine.
    """
    settings = gcp.settings_of(spec)
    disks = _local_disks(spec)

    def host(name: str, role: str, local_ssds: Iterable[int]) -> Host:
        return Host(
            name=name,
            address=name,
            roles=(role,),
            host_key=key,
            distribution=UNSEEN,
            proxy_command=iap_tunnel(name, project=settings.project, zone=settings.zone),
            local_ssds=max(local_ssds),
        )

    ssd_counts = (disks[name] for name, candidate in chosen.items() if candidate.name == image.name)
    return Inventory(
        cluster=spec.name,
        cluster_id=cluster_id,
        provider=settings.type,
        hosts=(
            host(spec.controller_host, CONTROLLER, disks.values()),
            host(machine_name(spec), COMPUTE, ssd_counts),
        ),
        network=str(settings.network.cidr),
        shared=SHARED,
        shared_folder=SharedFolder(kind="filestore" if settings.filestore else "nfs"),
        bucket=settings.bucket.name if settings.bucket else None,
        scheduler=spec.scheduler,
        baked=False,
    )


def path_of(api: Api, name: str) -> str:
    return f"projects/{api.project}/global/images/{name}"


def wait_until_ready(api: Api, name: str) -> bool:
    """Wait while an image is being built. Return False if there is no image, or if its build
    failed.
    """
    for _ in api.clock.polls(_WAIT_S, first_s=2.0, longest_s=10.0):
        resource = api.find("compute", path_of(api, name))
        match resource and resource.get("status"):
            case "READY":
                return True
            case "FAILED":
                remove(api, name)
                continue
            case None:
                return False
        api.reporter.progress(f"waiting for the image {name}, which is being built or deleted")
    message = f"the image {name} is not ready after {_WAIT_S / 60:.0f} minutes"
    command = f"`gcloud compute images delete {name} --project {api.project}`"
    fix = f"delete it: {command}; then run the same clusterctl command again"
    raise ProvisionError(
        message, code="cloud-refused", about="image-not-ready", where=path_of(api, name), fix=fix
    )


def build(api: Api, image: ProjectImage, host: str, settings: gcp.GcpSettings) -> None:
    """Stop the temporary machine ``host`` and create the image from its disk. On failure:
    ProvisionError.
    """
    zone = f"zones/{settings.zone}"
    api.reporter.progress(f"stopping {host}")
    discard = {"discardLocalSsd": "true"} if image.machine.bundled_ssds else {}
    path = f"projects/{api.project}/{zone}/instances/{host}/stop"
    _wait(api, zone, api.post("compute", path, None, **discard))
    api.reporter.progress(f"creating the image {image.name}")
    body: Json = {
        "name": image.name,
        "family": image.family,
        "description": (
            "Common software and configuration of clusterctl's nodes. Can be deleted at any time."
        ),
        "labels": {**settings.labels, LABEL: image.name.removeprefix("clusterctl-")},
        "sourceDisk": f"projects/{api.project}/{zone}/disks/{host}",
        "storageLocations": [settings.region_name],
    }
    if settings.kms_key:
        body["imageEncryptionKey"] = {"kmsKeyName": settings.kms_key}
    try:
        _wait(api, "global", api.post("compute", f"projects/{api.project}/global/images", body))
    except CloudError as exc:
        if not any(failure.about == "cloud-name" for failure in exc.failures):
            raise
    # If the name is taken, another `up` creates the same image.
    if not wait_until_ready(api, image.name):
        message = f"the image {image.name} was not created"
        reason = "its build failed, or it was deleted"
        fix = "run the same command again"
        where = path_of(api, image.name)
        raise ProvisionError(
            message, code="cloud-refused", about="image", where=where, why=reason, fix=fix
        )


def _wait(api: Api, scope: str, operation: Json) -> None:
    api.finish("compute", f"projects/{api.project}/{scope}", operation, timeout_s=_WAIT_S)


def kept(settings: gcp.GcpSettings, *, prune: bool = False) -> tuple[KeptImage, ...]:
    """Return clusterctl's images in the project, for all clusters. With ``prune``, delete them."""
    api = Api(settings.project)
    pages = api.pages(
        "compute", f"projects/{api.project}/global/images", filter=f"labels.{LABEL}:*"
    )
    rows = (
        row for page in pages for row in page.get("items", ()) if LABEL in row.get("labels", {})
    )
    sizes = [(str(row["name"]), int(row.get("archiveSizeBytes", 0)) / _BYTES_A_GIB) for row in rows]
    for name, _ in sizes if prune else ():
        remove(api, name)
    return tuple(
        KeptImage(name, int(gib * GIB_MIB), gib * costs.table()["image"]) for name, gib in sizes
    )


def remove(api: Api, name: str) -> None:
    _wait(api, "global", api.delete("compute", path_of(api, name)) or {})
