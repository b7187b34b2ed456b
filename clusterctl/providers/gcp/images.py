"""Images of the project that nodes start from, with all that they have in common installed and configured.

An image is made of a machine that exists for it alone, and named by a hash of all that went in: another
configuration is another image. Images belong to no cluster, and stay when one goes down: they are a cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from clusterctl.errors import CloudError, ProvisionError
from clusterctl.providers.gcp import costs
from clusterctl.providers.gcp.api import Api, Json, iap_tunnel
from clusterctl.providers.node_class import KeptImage
from clusterctl.spec import gcp
from clusterctl.spec.distributions import UNSEEN
from clusterctl.spec.gcp_nodes import GcpNodes, Image, Machine, image_of, machines
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.units import GIB_MIB
from clusterctl.state.inventory import COMPUTE, CONTROLLER, Host, Inventory, SharedFolder
from clusterctl.util.assets import digest, install_inputs

SHARED: Final = "/shared"
LABEL: Final = "clusterctl-image"
_MINUTES: Final = "5 to 20 minutes"  # packages of the distribution by NAT, then the copy of the disk
_SMALL: Final = "e2-standard-2"  # installs packages, and has no job to run
_WAIT_S: Final = 1800.0
_LONGEST_NAME: Final = 63
_BYTES_A_GIB: Final = 1 << 30


@dataclass(frozen=True, slots=True)
class HostGroup:
    """Hosts that are made alike: the controller, or the nodes of a partition that do not exist yet."""

    name: str
    nodes: GcpNodes
    machine: Machine
    image: Image
    count: int

    @property
    def who(self) -> str:
        return f"partition {self.name}" if self.name else "controller"


@dataclass(frozen=True, slots=True)
class NodeImage:
    """An image by its name, and the machine that it is made of: ``nodes`` on ``machine`` from ``base``.

    By the ``family`` people find it; its name alone decides whether it is used.
    """

    name: str
    family: str
    base: Image
    nodes: GcpNodes
    machine: Machine


def machine_name(spec: ClusterSpec) -> str:
    """The machine that an image is made of. No node is called so: theirs end with a number."""
    return f"{spec.name}-image"


def machines_of(spec: ClusterSpec) -> Iterator[HostGroup]:
    """What the image of each partition is made of: a small one, but for a driver's installation."""
    settings = gcp.settings_of(spec)
    for partition in spec.partitions:
        nodes, machine = settings.nodes_of(partition.name), gcp.machine_of(spec, partition)
        disk = nodes.boot_disk.model_copy(update={"type": None})
        own = GcpNodes(boot_disk=disk, gvnic=nodes.gvnic)
        small = machines()[_SMALL]
        if spec.software.nvidia.has_driver and machine.gpu:
            small, same = machine, {"spot": nodes.spot, "reservation": nodes.reservation}
            own = own.model_copy(update=same)
        yield HostGroup(partition.name, own, small, image_of(nodes, machine), 1)


def images_of(api: Api, spec: ClusterSpec, inputs: str) -> dict[str, NodeImage]:
    """Partition -> the image of its nodes, made of ``inputs``; a family counts as its newest image.

    Left out are partitions whose family has no image any more: nodes that are there need none.

    Raises:
        CloudError: a family can't be looked at.
    """
    disks, settings = _local_disks(spec), gcp.settings_of(spec)
    kinds = (settings.filestore is not None, settings.bucket is not None, any(disks.values()))
    installed = digest(*install_inputs(), spec.software.model_dump_json(), *map(str, kinds))
    return {
        one.name: _named(one, newest, inputs, installed, str(disks[one.name] > 0))
        for one in machines_of(spec)
        if (newest := _newest(api, one.image))
    }


def without_base(spec: ClusterSpec, chosen: Mapping[str, NodeImage]) -> Iterator[str]:
    """The partitions without an image to make one of, each in a sentence."""
    for one in machines_of(spec):
        if one.name not in chosen:
            yield (
                f"{one.image.project} has no image {one.image.family} any more: new nodes of the partition "
                f"{one.name} need another provider.partitions.{one.name}.image"
            )


def _local_disks(spec: ClusterSpec) -> dict[str, int]:
    """Partition -> the local disks of its nodes."""
    settings = gcp.settings_of(spec)
    return {
        one.name: settings.nodes_of(one.name).local_ssds + gcp.machine_of(spec, one).bundled_ssds
        for one in spec.partitions
    }


def _newest(api: Api, image: Image) -> str | None:
    """The name of an image; None for a family all of whose images are deleted or deprecated."""
    if image.family is None:
        return image.name
    found = api.find("compute", f"projects/{image.project}/global/images/family/{image.family}")
    return str(found["name"]) if found else None


def _named(group: HostGroup, newest: str, *inputs: str) -> NodeImage:
    size = str(group.nodes.boot_disk.size)  # no node's disk may be smaller than its image
    key = digest(*inputs, group.image.project, newest, size, group.machine.name)
    family = f"clusterctl-{group.image.family or newest}"[:_LONGEST_NAME].rstrip("-")
    base = Image(project=group.image.project, name=newest)
    return NodeImage(f"clusterctl-{key}", family, base, group.nodes, group.machine)


def to_make(api: Api, spec: ClusterSpec, chosen: Mapping[str, NodeImage]) -> Iterator[str]:
    """The images that are not there yet, each with the machine and the time that it takes."""
    for image in {one.name: one for one in chosen.values()}.values():
        found = api.find("compute", path_of(api, image.name)) or {}
        if found.get("status") not in {"READY", "PENDING"}:
            gpu = image.machine.gpu if image.machine.guest_accelerator else None
            added = {str(image.machine.accelerator): gpu.count} if gpu else {}
            usd = costs.of_machine(image.machine.name, added, spot=image.nodes.spot)
            price = f", {usd:.2f} USD an hour" if usd else ""
            yield (
                f"clusterctl makes the image {image.name} of the nodes first, once: about {_MINUTES} more, "
                f"on {machine_name(spec)} ({image.machine.name}{price}), which is removed then"
            )


def machine_inventory(
    spec: ClusterSpec, cluster_id: str, image: NodeImage, chosen: Mapping[str, NodeImage], key: str
) -> Inventory:
    """The machine of an image, with its host ``key``, beside a controller, as of a cluster."""
    settings, disks = gcp.settings_of(spec), _local_disks(spec)

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

    of_image = (disks[partition] for partition, one in chosen.items() if one.name == image.name)
    return Inventory(
        cluster=spec.name,
        cluster_id=cluster_id,
        provider=settings.type,
        hosts=(
            host(spec.controller_host, CONTROLLER, disks.values()),
            host(machine_name(spec), COMPUTE, of_image),
        ),
        network=str(settings.network.cidr),
        shared=SHARED,
        shared_folder=SharedFolder(kind="filestore" if settings.filestore else "nfs"),
        bucket=settings.bucket and settings.bucket.name,
        scheduler=spec.scheduler,
        baked=False,
    )


def path_of(api: Api, name: str) -> str:
    return f"projects/{api.project}/global/images/{name}"


def ready(api: Api, name: str) -> bool:
    """Whether it is there and whole. One that is being made is waited for; one that failed is deleted."""
    for _ in api.clock.polls(_WAIT_S, first_s=2.0, longest_s=10.0):
        found = api.find("compute", path_of(api, name))
        match found and found.get("status"):
            case "READY":
                return True
            case "FAILED":
                remove(api, name)
                continue
            case None:
                return False
        api.reporter.progress(f"waiting for the image {name}, which is being made, or deleted")
    what = f"the image {name} is not ready after {_WAIT_S / 60:.0f} minutes"
    fix = f"delete it: `gcloud compute images delete {name} --project {api.project}`; then run it again"
    raise ProvisionError(what, code="image-not-ready", where=path_of(api, name), fix=fix)


def make(api: Api, image: NodeImage, host: str, settings: gcp.GcpSettings) -> None:
    """Stop the machine, and make the image of its disk.

    Raises:
        ProvisionError: Google refused.
    """
    zone = f"zones/{settings.zone}"
    api.reporter.progress(f"stopping {host}")
    discard = {"discardLocalSsd": "true"} if image.machine.bundled_ssds else {}
    path = f"projects/{api.project}/{zone}/instances/{host}/stop"
    _wait(api, zone, api.post("compute", path, None, **discard))
    api.reporter.progress(f"making the image {image.name}")
    body: Json = {
        "name": image.name,
        "family": image.family,
        "description": "What nodes of clusterctl have in common. It can be deleted at any time.",
        "labels": {**settings.labels, LABEL: image.name.removeprefix("clusterctl-")},
        "sourceDisk": f"projects/{api.project}/{zone}/disks/{host}",
        "storageLocations": [settings.region_name],
    }
    if settings.kms_key:
        body["imageEncryptionKey"] = {"kmsKeyName": settings.kms_key}
    try:
        _wait(api, "global", api.post("compute", f"projects/{api.project}/global/images", body))
    except CloudError as exc:
        if not any(failure.code == "name-taken" for failure in exc.failures):
            raise  # else another `up` has made the same, or is about to
    if not ready(api, image.name):
        raise ProvisionError(
            f"the image {image.name} was not made", code="image-not-made", where=path_of(api, image.name)
        )


def _wait(api: Api, scope: str, operation: Json) -> None:
    api.finish("compute", f"projects/{api.project}/{scope}", operation, timeout_s=_WAIT_S)


def kept(settings: gcp.GcpSettings, *, prune: bool = False) -> tuple[KeptImage, ...]:
    """The images of the project that clusterctl made, of whichever cluster; ``prune`` removes them."""
    api = Api(settings.project)
    pages = api.pages("compute", f"projects/{api.project}/global/images", filter=f"labels.{LABEL}:*")
    rows = (row for page in pages for row in page.get("items", ()) if LABEL in row.get("labels", {}))
    sizes = [(str(row["name"]), int(row.get("archiveSizeBytes", 0)) / _BYTES_A_GIB) for row in rows]
    for name, _ in sizes if prune else ():
        remove(api, name)
    return tuple(KeptImage(name, int(gib * GIB_MIB), gib * costs.table()["image"]) for name, gib in sizes)


def remove(api: Api, name: str) -> None:
    _wait(api, "global", api.delete("compute", path_of(api, name)) or {})
