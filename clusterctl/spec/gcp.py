"""What only Google Cloud knows of a spec: `provider: {type: gcp, ...}`.

What a machine type is (processors, memory, GPUs, what may be combined with it) is data: see ``machines``.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib import resources
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal

from pydantic import Field, StringConstraints

from clusterctl.errors import ProvisionError, UsageError
from clusterctl.spec import distributions
from clusterctl.spec.base import Gpus, Model, Network, ProviderSettings, Toggle
from clusterctl.spec.checks import Raw, debian_findings
from clusterctl.spec.messages import Finding
from clusterctl.spec.units import GIB_MIB, DurationS, SizeMib

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec, Partition


PROJECT = r"^[a-z][a-z0-9-]{4,28}[a-z0-9]$"
ZONE = r"^[a-z]+-[a-z]+[0-9]+-[a-z]$"
MACHINE_TYPE = r"^[a-z][a-z0-9]*-[a-z0-9-]+$"
RESOURCE = r"^[a-z]([a-z0-9-]{0,61}[a-z0-9])?$"
BUCKET = r"^[a-z0-9][a-z0-9._-]{1,61}[a-z0-9]$"
KMS_KEY = r"^projects/[a-z0-9.:-]+/locations/[a-z0-9-]+/keyRings/[A-Za-z0-9_-]+/cryptoKeys/[A-Za-z0-9_-]+$"
FOLDER = r"^[A-Za-z0-9_/-]{1,200}$"
LABEL_KEY = r"^[a-z][a-z0-9_-]{0,62}$"
LABEL_VALUE = r"^[a-z0-9_-]{0,63}$"

GCP_PATTERN_TEXTS: Final[Mapping[str, str]] = {
    PROJECT: "a project's id: 6 to 30 lower-case letters, digits or dashes, a letter first",
    ZONE: "a zone, such as us-central1-a",
    MACHINE_TYPE: "a machine type, such as g2-standard-8",
    RESOURCE: "at most 63 lower-case letters, digits or dashes, a letter first",
    BUCKET: "a bucket's name: 3 to 63 lower-case letters, digits, dots, dashes or underscores",
    KMS_KEY: "projects/PROJECT/locations/REGION/keyRings/RING/cryptoKeys/KEY",
    FOLDER: "at most 200 letters, digits, dashes, underscores or slashes",
    LABEL_KEY: "a label's key: at most 63 lower-case letters, digits, dashes or underscores, a letter first",
    LABEL_VALUE: "a label's value: at most 63 lower-case letters, digits, dashes or underscores",
}


Resource = Annotated[str, StringConstraints(pattern=RESOURCE)]
Usd = Annotated[float, Field(ge=0, strict=True, allow_inf_nan=False)]


class Image(Model):
    """The image of a boot disk: the newest of a family, or one by its name."""

    project: Annotated[str, StringConstraints(pattern=PROJECT)] = Field(
        description="the project of the image"
    )
    family: Resource | None = Field(None, description="the newest image of this family")
    name: Resource | None = Field(None, description="the image of this name")


class GcpDisk(Model):
    """A persistent disk."""

    size: SizeMib = Field(description="its size, in whole GiB")
    type: Literal["pd-standard", "pd-balanced", "pd-ssd", "hyperdisk-balanced"] | None = Field(
        None,
        description="by default pd-balanced, or hyperdisk-balanced where the machine type takes no other",
    )


class GcpNodes(Model):
    """The instances of one partition, or of the controller, on Google Cloud."""

    machine_type: Annotated[str, StringConstraints(pattern=MACHINE_TYPE)] | None = Field(
        None, description="by default the smallest that has the partition's GPUs, or 4 processors"
    )
    image: Image | None = Field(
        None,
        description="by default Rocky Linux 9, with NVIDIA's driver where there is a GPU",
    )
    boot_disk: GcpDisk = Field(GcpDisk.model_validate({"size": "50GiB"}), description="their boot disk")
    extra_disks: tuple[GcpDisk, ...] = Field((), description="more persistent disks for each")
    local_ssds: Annotated[int, Field(ge=0, le=32, strict=True)] = Field(
        0, description="local NVMe disks of 375 GiB for each, as /scratch; gone with the node"
    )
    spot: Toggle = Field(False, description="cheaper, and preempted by Google at any time")
    termination_action: Literal["STOP", "DELETE"] = Field(
        "STOP", description="what happens to a spot node that is preempted"
    )
    compact_placement: Toggle = Field(False, description="a compact placement policy, for low latency")
    tier_1: Toggle = Field(False, description="TIER_1 networking, on large machine types; needs gvnic")
    gvnic: Toggle = Field(True, description="Google's own network interface, instead of virtio")
    reservation: Resource | None = Field(None, description="a reservation of yours that they consume")


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
    capacity: SizeMib = Field(
        1024 * 1024, description="its size, in whole GiB", json_schema_extra={"default": "1TiB"}
    )


class Bucket(Model):
    """A Cloud Storage bucket that every node sees as /bucket: datasets in, results out."""

    name: Annotated[str, StringConstraints(pattern=BUCKET)] = Field(description="its name, which is global")
    create: Toggle = Field(
        False, description="create it with the cluster; `down` keeps it unless it is empty"
    )


class GcsState(Model):
    """Terraform's state in a bucket, where it outlives this machine; by default it is local."""

    bucket: Annotated[str, StringConstraints(pattern=BUCKET)] = Field(description="an existing bucket")
    prefix: Annotated[str, StringConstraints(pattern=FOLDER)] = Field(
        "clusterctl", description="folder in it"
    )


class GcpProvider(ProviderSettings):
    """GPU nodes on Google Cloud, made by Terraform. See docs/gcp.md."""

    is_cloud: ClassVar[bool] = True

    type: Literal["gcp"] = Field(description="the provider's type")
    project: Annotated[str, StringConstraints(pattern=PROJECT)] = Field(description="the project's id")
    zone: Annotated[str, StringConstraints(pattern=ZONE)] = Field(description="where all nodes are")
    region: str | None = Field(None, description="the zone's region; by default derived from it")
    partitions: Mapping[str, GcpNodes] = Field({}, description="settings of the instances, by partition")
    controller: GcpNodes = Field(GcpNodes(), description="settings of the instance with Slurm's daemons")
    network: GcpNetwork = Field(GcpNetwork(), description="the network of the nodes")
    filestore: Filestore | None = Field(
        None, description="a managed shared folder, instead of the controller's"
    )
    bucket: Bucket | None = Field(None, description="a bucket that every node sees as /bucket")
    kms_key: Annotated[str, StringConstraints(pattern=KMS_KEY)] | None = Field(
        None, description="a customer-managed key (CMEK) that encrypts all disks"
    )
    labels: Mapping[
        Annotated[str, StringConstraints(pattern=LABEL_KEY)],
        Annotated[str, StringConstraints(pattern=LABEL_VALUE)],
    ] = Field(
        {},
        description="labels of all resources, beside clusterctl's own",
        json_schema_extra={"additionalProperties": False},
    )
    enable_apis: Toggle = Field(True, description="enable the APIs that are needed; else they are only named")
    state: GcsState | None = Field(None, description="Terraform's state in a bucket")
    auto_down: DurationS | None = Field(
        None, description="an idle cluster deletes its nodes and stops its controller after this time"
    )
    secure_boot: Toggle = Field(False, description="only signed drivers; NVIDIA's often are not")
    prices: Mapping[str, Usd] = Field(
        {}, description="your own prices, USD an hour, by machine type; over those of the built-in table"
    )

    @property
    def region_name(self) -> str:
        """The region that the zone is in."""
        return self.zone.rsplit("-", 1)[0]

    @property
    def location(self) -> Mapping[str, str]:
        """The project and the zone."""
        return {"project": self.project, "zone": self.zone}

    @property
    def idle_timeout_s(self) -> int | None:
        """The time of ``auto_down``."""
        return self.auto_down

    def expected_release(self, spec: ClusterSpec) -> str | None:
        """The distribution of all images, as far as their names tell it."""
        releases = {release_of(image) for _, image in _images(spec)}
        return releases.pop() if len(releases) == 1 else None

    @classmethod
    def findings(cls, spec: Raw) -> Iterator[Finding]:
        """The cross-field faults of a spec for Google Cloud."""
        from clusterctl.spec.gcp_checks import findings  # noqa: PLC0415 - which imports this module

        yield from findings(spec)
        yield from debian_findings(spec)

    def nodes_of(self, partition: str) -> GcpNodes:
        """What the nodes of a partition are."""
        return self.partitions.get(partition, GcpNodes())


def whole_project(project: str) -> GcpProvider:
    """Settings to search a project for orphans: its zone does not matter."""
    return GcpProvider(type="gcp", project=project, zone="us-central1-a")


PLAIN: Final = "e2-standard-4"  # where nothing is asked for
_VCPUS_BESIDE_A_GPU: Final = 4  # of the N1 machine that is chosen for GPUs that are added to it


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine type.

    ``gpu`` has our short name, ``accelerator`` is what Google calls it; ``guest_accelerator`` where it is
    added to the machine rather than a part of it. ``local_ssds`` are the numbers of disks that may be added,
    ``bundled_ssds`` those that are there already. ``only``: how to get it, where not on demand.
    """

    name: str
    family: str
    vcpus: int
    memory_mib: int
    gpu: Gpus | None = None
    accelerator: str | None = None
    guest_accelerator: bool = False
    compact_placement: bool = False
    tier_1: bool = False
    gvnic_only: bool = False
    local_ssds: tuple[int, ...] = ()
    bundled_ssds: int = 0
    boot_disks: tuple[str, ...] = ()
    extra_disks: tuple[str, ...] = ()
    only: tuple[str, ...] = ()


@cache
def data() -> Mapping[str, Any]:
    """Everything in data/google.toml."""
    return tomllib.loads(resources.files("clusterctl.spec").joinpath("data/google.toml").read_text("utf-8"))


@cache
def machines() -> Mapping[str, Machine]:
    """All machine types by name, those of a family from the smallest on."""
    rows: dict[str, Mapping[str, Any]] = {
        f"{series}-{vcpus}": {"vcpus": vcpus, "gib": facts["gib"] * vcpus}
        for series, facts in data()["series"].items()
        for vcpus in facts["vcpus"]
    }
    rows |= data()["special"] | data()["with_gpus"]
    return {name: _machine(name, row) for name, row in rows.items()}


def _machine(name: str, row: Mapping[str, Any]) -> Machine:
    """A machine type, of what its row and its family say."""
    family, vcpus = name.partition("-")[0], row["vcpus"]
    facts = {**data()["families"][family], **row}
    steps = facts.get("local_ssds_up_to", ())
    return Machine(
        name,
        family,
        vcpus,
        int(facts["gib"] * GIB_MIB),
        gpu=Gpus(type=row["gpu"], count=row["count"]) if "gpu" in row else None,
        accelerator=_google(row["gpu"]) if "gpu" in row else None,
        compact_placement=facts.get("compact_placement", False),
        tier_1=vcpus >= facts.get("tier_1_from", vcpus + 1),
        gvnic_only=facts.get("gvnic_only", False),
        local_ssds=tuple(facts.get("local_ssds") or next((n for most, n in steps if vcpus <= most), ())),
        bundled_ssds=facts.get("bundled_ssds", 0),
        boot_disks=tuple(facts["boot_disks"]),
        extra_disks=tuple(facts.get("extra_disks", facts["boot_disks"])),
        only=tuple(facts.get("only", ())),
    )


def machine(name: str) -> Machine | None:
    """The machine type of that name, as it is without GPUs added to it."""
    return machines().get(name)


def gpu_type(name: str) -> str | None:
    """Our short name of a GPU model, from that or from Google's name."""
    by_google = {facts["google"]: short for short, facts in data()["gpus"].items()}
    return name if name in data()["gpus"] else by_google.get(name)


def counts(gpu: str) -> tuple[int, ...]:
    """How many GPUs of a model, by its short name, a node can have."""
    attached = {int(count) for count in data()["attached"].get(gpu, {})}
    bundled = {one.gpu.count for one in machines().values() if one.gpu and one.gpu.type == gpu}
    return tuple(sorted(attached | bundled))


def most_vcpus(gpus: Gpus) -> int | None:
    """Processors that an N1 machine may have beside these GPUs; None where they are not added to N1."""
    limit: int | None = data()["attached"].get(gpus.type, {}).get(str(gpus.count))
    return limit


def default_machine(gpus: Gpus | None) -> Machine:
    """The smallest machine type with these GPUs; ``PLAIN`` without any.

    Raises:
        ValueError: no machine type has them. A checked spec does not ask for such.
    """
    if gpus is None:
        return machines()[PLAIN]
    if most_vcpus(gpus) is not None:
        return with_added(machines()[f"n1-standard-{_VCPUS_BESIDE_A_GPU * gpus.count}"], gpus)
    for one in machines().values():
        if one.gpu == gpus:
            return one
    raise ValueError(f"no machine type has {gpus}")


def with_added(one: Machine, gpus: Gpus) -> Machine:
    """An N1 machine with GPUs added to it."""
    return replace(one, gpu=gpus, accelerator=_google(gpus.type), guest_accelerator=True)


def machine_of(spec: ClusterSpec, partition: Partition) -> Machine:
    """The machine type of a partition's nodes, with its GPUs. The spec's provider must be Google Cloud."""
    gpus = partition.gpus
    known = Gpus(type=gpu_type(gpus.type) or gpus.type, count=gpus.count) if gpus else None
    name = settings_of(spec).nodes_of(partition.name).machine_type
    if name is None:
        return default_machine(known)
    named = machines()[name]
    return with_added(named, known) if known and named.gpu is None else named


def controller_machine(spec: ClusterSpec) -> Machine:
    """The machine type of the controller. The spec's provider must be Google Cloud."""
    return machines()[settings_of(spec).controller.machine_type or PLAIN]


def boot_disk_type(one: Machine, disk: GcpDisk) -> str:
    """The type of a boot disk of that machine: what is asked for, or the machine's default."""
    return disk.type or one.boot_disks[0]


def extra_disk_type(one: Machine, disk: GcpDisk) -> str:
    """The type of a further disk of that machine: what is asked for, or the machine's default."""
    return disk.type or one.extra_disks[0]


def settings_of(spec: ClusterSpec) -> GcpProvider:
    """What a spec whose provider is Google Cloud says of it."""
    if spec.provider.type != "gcp":
        raise ValueError("only Google Cloud has machine types")
    return spec.provider


def _google(gpu: str) -> str:
    return str(data()["gpus"][gpu]["google"])


PLAIN_IMAGE: Final = Image(project="rocky-linux-cloud", family="rocky-linux-9-optimized-gcp")
GPU_IMAGE: Final = Image(
    project="rocky-linux-accelerator-cloud", family="rocky-linux-9-optimized-gcp-nvidia-latest"
)
# Whose images are what they are called: Google's own projects. Anybody else's are looked at once they run.
_PUBLIC: Final = frozenset(
    "debian-cloud ubuntu-os-cloud ubuntu-os-accelerator-images ubuntu-os-pro-cloud rocky-linux-cloud "
    "rocky-linux-accelerator-cloud almalinux-cloud rhel-cloud centos-cloud cloud-hpc-image-public "
    "deeplearning-platform-release".split()
)
_NAMED: Final = re.compile(
    r"(?:^|-)(?P<id>debian|ubuntu|rocky|almalinux|rhel|centos)(?:-[a-z]+)*-(?P<number>\d+)"
)
_YEAR_AND_MONTH: Final = 4  # digits of Ubuntu's releases


def image_of(nodes: GcpNodes, machine: Machine) -> Image:
    """The image of these nodes: the spec's, else the default of their machine type."""
    return nodes.image or (GPU_IMAGE if machine.gpu else PLAIN_IMAGE)


def release_of(image: Image) -> str | None:
    """What is in an image of Google's own: ``rocky-9``. None: its name does not say it."""
    found = _NAMED.search(image.family or image.name or "") if image.project in _PUBLIC else None
    if found is None:
        return None
    number = found["number"]
    if found["id"] == "ubuntu" and len(number) == _YEAR_AND_MONTH:
        number = f"{number[:2]}.{number[2:]}"
    return f"{found['id']}-{number}"


def refusal(spec: ClusterSpec) -> UsageError | None:
    """Why no cluster comes of this spec: the names of its images say what can't be configured, or differs."""
    named = {where: release for where, image in _images(spec) if (release := release_of(image))}
    try:
        if named:
            distributions.common(named)
    except ProvisionError as exc:
        where = ", ".join(str(failure.host) for failure in exc.failures)
        return UsageError(
            "clusterctl can't make a cluster of hosts with these images",
            where=where,
            why=exc.why,
            fix=f"name images of one release there, of one of {', '.join(distributions.supported())}; "
            "without any, all hosts start from Rocky Linux 9",
        )
    return None


def _images(spec: ClusterSpec) -> Iterator[tuple[str, Image]]:
    if not isinstance(spec.provider, GcpProvider):
        return
    yield "provider.controller.image", image_of(spec.provider.controller, controller_machine(spec))
    for partition in spec.partitions:
        image = image_of(spec.provider.nodes_of(partition.name), machine_of(spec, partition))
        yield f"provider.partitions.{partition.name}.image", image
