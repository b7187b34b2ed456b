"""What only Google Cloud knows of a spec: `provider: {type: gcp, ...}`.

What a machine type is (processors, memory, GPUs, what may be combined with it) is data: see ``machines``.
"""

from __future__ import annotations

from collections.abc import Mapping
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Annotated, ClassVar, Final, Literal

from pydantic import Field, StringConstraints

from clusterctl.spec.base import Model, Network, ProviderSettings, Toggle
from clusterctl.spec.units import DurationS, SizeMib

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec

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
        from clusterctl.spec.gcp_machines import release_ahead  # noqa: PLC0415 - which imports this module

        return release_ahead(spec)

    def nodes_of(self, partition: str) -> GcpNodes:
        """What the nodes of a partition are."""
        return self.partitions.get(partition, GcpNodes())


def whole_project(project: str) -> GcpProvider:
    """Settings to search a project for orphans: its zone does not matter."""
    return GcpProvider(type="gcp", project=project, zone="us-central1-a")
