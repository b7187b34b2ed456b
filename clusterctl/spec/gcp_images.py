"""Which image a host on Google Cloud starts from, and what its name says of what is in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Final

from clusterctl.errors import ProvisionError, UsageError
from clusterctl.spec import distributions, machines
from clusterctl.spec.gcp import GcpNodes, GcpProvider, Image
from clusterctl.spec.machines import Machine
from clusterctl.spec.models import ClusterSpec

PLAIN_IMAGE: Final = Image(project="rocky-linux-cloud", family="rocky-linux-9-optimized-gcp")
GPU_IMAGE: Final = Image(
    project="rocky-linux-accelerator-cloud", family="rocky-linux-9-optimized-gcp-nvidia-latest"
)
# Whose images are what they are called: Google's own projects. Anybody else's are looked at once they run.
_PUBLIC: Final = frozenset(
    {
        *("debian-cloud", "ubuntu-os-cloud", "ubuntu-os-accelerator-images", "ubuntu-os-pro-cloud"),
        *(
            "rocky-linux-cloud",
            "rocky-linux-accelerator-cloud",
            "almalinux-cloud",
            "rhel-cloud",
            "centos-cloud",
        ),
        *("cloud-hpc-image-public", "deeplearning-platform-release"),
    }
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


def release_ahead(spec: ClusterSpec) -> str | None:
    """What all hosts will have, as far as the images' names say it."""
    releases = {release_of(image) for _, image in _images(spec)}
    return releases.pop() if len(releases) == 1 else None


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
    yield "provider.controller.image", image_of(spec.provider.controller, machines.of_controller(spec))
    for partition in spec.partitions:
        image = image_of(spec.provider.nodes_of(partition.name), machines.of(spec, partition))
        yield f"provider.partitions.{partition.name}.image", image
