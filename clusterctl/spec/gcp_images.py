"""Which image a host on Google Cloud starts from, and whether the Ansible roles can install on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from clusterctl.errors import UsageError
from clusterctl.spec import machines
from clusterctl.spec.gcp import GcpNodes, GcpProvider, Image
from clusterctl.spec.machines import Machine
from clusterctl.spec.models import ClusterSpec

PLAIN_IMAGE: Final = Image(project="rocky-linux-cloud", family="rocky-linux-9-optimized-gcp")
GPU_IMAGE: Final = Image(
    project="rocky-linux-accelerator-cloud", family="rocky-linux-9-optimized-gcp-nvidia-latest"
)
_NOT_INSTALLED_ON: Final = "rocky"  # the roles know Debian 12 alone


def image_of(nodes: GcpNodes, machine: Machine) -> Image:
    """The image of these nodes: the spec's, else the default of their machine type."""
    return nodes.image or (GPU_IMAGE if machine.gpu else PLAIN_IMAGE)


def refusal(spec: ClusterSpec) -> UsageError | None:
    """Why no cluster comes of this spec: the roles can't install on the image of some hosts."""
    hit = [where for where, image in _images(spec) if _NOT_INSTALLED_ON in _words(image)]
    if not hit:
        return None
    return UsageError(
        "clusterctl can't configure hosts with Rocky Linux yet",
        where=", ".join(hit),
        why="it installs Slurm on Debian 12 alone; the hosts would cost money and never be a cluster",
        fix=f"write {{project: debian-cloud, family: debian-12}} under {', '.join(hit)}; that one has no "
        "NVIDIA driver: where there are GPUs, name an image of yours with Debian 12 and the driver",
    )


def _images(spec: ClusterSpec) -> Iterator[tuple[str, Image]]:
    if not isinstance(spec.provider, GcpProvider):
        return
    yield "provider.controller.image", image_of(spec.provider.controller, machines.of_controller(spec))
    for partition in spec.partitions:
        image = image_of(spec.provider.nodes_of(partition.name), machines.of(spec, partition))
        yield f"provider.partitions.{partition.name}.image", image


def _words(image: Image) -> str:
    return f"{image.project} {image.family} {image.name}".lower()
