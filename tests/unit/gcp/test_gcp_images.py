"""The distribution of an image is read from its name, and unsupported images are refused."""

from __future__ import annotations

from typing import Any

import pytest

from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.gcp import image_error
from clusterctl.spec.providers.gcp_nodes import Image, release_of
from tests.support.google.api import PROJECT
from tests.support.messages import condition

DEBIAN = {"project": "debian-cloud", "family": "debian-12"}
OLD = {"project": "cloud-hpc-image-public", "family": "hpc-rocky-linux-8"}
MINE = {"project": "my-images", "name": "with-everything"}


def spec_of(controller: dict[str, str] | None, train: dict[str, str] | None) -> ClusterSpec:
    provider: dict[str, Any] = {"type": "gcp", "project": PROJECT, "zone": "us-central1-a"}
    provider["controller"] = {"image": controller} if controller else {}
    provider["partitions"] = {"train": {"image": train}} if train else {}
    return ClusterSpec.model_validate(
        {
            "version": 1,
            "name": "demo",
            "provider": provider,
            "partitions": [{"name": "train", "nodes": 1}],
        }
    )


@pytest.mark.parametrize(
    ("project", "family", "release"),
    [
        ("rocky-linux-cloud", "rocky-linux-9-optimized-gcp", "rocky-9"),
        ("rocky-linux-accelerator-cloud", "rocky-linux-10-optimized-gcp-nvidia-580", "rocky-10"),
        ("cloud-hpc-image-public", "hpc-rocky-linux-8", "rocky-8"),
        ("debian-cloud", "debian-12", "debian-12"),
        ("ubuntu-os-cloud", "ubuntu-2204-lts", "ubuntu-22.04"),
        ("ubuntu-os-cloud", "ubuntu-minimal-2404-lts-amd64", "ubuntu-24.04"),
        ("deeplearning-platform-release", "common-cu129-ubuntu-2404-nvidia-580", "ubuntu-24.04"),
        ("rhel-cloud", "rhel-9", "rhel-9"),
        ("my-images", "debian-12", None),
        ("rocky-linux-cloud", "something-else", None),
    ],
)
def test_release_of_a_public_image_is_read_from_its_name(
    project: str, family: str, release: str | None
) -> None:
    assert release_of(Image(project=project, family=family, name=None)) == release
    assert release_of(Image(project=project, family=None, name=f"{family}-v20260101")) == release


@pytest.mark.parametrize(
    ("controller", "train", "ahead"),
    [
        (None, None, "rocky-9"),
        (DEBIAN, DEBIAN, "debian-12"),
        (MINE, MINE, None),
        (None, MINE, None),
    ],
)
def test_image_error_accepts_supported_images(
    controller: Any, train: Any, ahead: str | None
) -> None:
    spec = spec_of(controller, train)
    assert image_error(spec) is None
    assert spec.provider.expected_release(spec) == ahead


@pytest.mark.parametrize(
    ("controller", "train", "why", "where"),
    [
        (DEBIAN, None, ".controller.image has Debian 12", "provider.partitions.train.image"),
        (None, OLD, "Python is 3.6", "provider.partitions.train.image"),
        (OLD, OLD, "Python is 3.6", "provider.controller.image, provider.partitions.train.image"),
    ],
)
def test_image_error_refuses_other_or_unknown_distributions(
    controller: Any, train: Any, why: str, where: str
) -> None:
    found = image_error(spec_of(controller, train))
    assert found is not None
    assert (condition(found), found.where) == ("host-unfit/image-distribution", where)
    assert why in found.why
    assert "Rocky Linux 9" in found.fix
