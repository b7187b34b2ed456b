"""`up` refuses images that the roles can't install on before it makes anything; `plan` only says so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.spec import ClusterSpec
from clusterctl.spec.gcp_images import refusal
from tests.support.google import gcloud
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.google.world import World
from tests.support.verbs import Clusterctl

DEBIAN = {"project": "debian-cloud", "family": "debian-12"}
SPEC = f"""\
version: 1
name: demo
provider: {{type: gcp, project: {PROJECT}, zone: us-central1-a}}
partitions: [{{name: train, nodes: 1}}]
"""


def spec_of(controller: dict[str, str] | None, train: dict[str, str] | None) -> ClusterSpec:
    provider: dict[str, Any] = {"type": "gcp", "project": PROJECT, "zone": "us-central1-a"}
    provider["controller"] = {"image": controller} if controller else {}
    provider["partitions"] = {"train": {"image": train}} if train else {}
    return ClusterSpec.model_validate(
        {"version": 1, "name": "demo", "provider": provider, "partitions": [{"name": "train", "nodes": 1}]}
    )


@pytest.mark.parametrize(
    ("controller", "train", "where"),
    [
        (None, None, "provider.controller.image, provider.partitions.train.image"),
        (DEBIAN, None, "provider.partitions.train.image"),
        (None, DEBIAN, "provider.controller.image"),
        (DEBIAN, {"project": "cloud-hpc-image-public", "family": "hpc-rocky-linux-9"}, "train.image"),
        (DEBIAN, {"project": "my-images", "name": "rocky-9-cuda"}, "train.image"),
    ],
)
def test_every_image_of_rocky_linux_is_refused(controller: Any, train: Any, where: str) -> None:
    refused = refusal(spec_of(controller, train))
    assert refused is not None
    assert refused.where.endswith(where)
    assert "debian-cloud" in refused.fix


def test_debian_is_not(tmp_path: Path) -> None:
    assert refusal(spec_of(DEBIAN, DEBIAN)) is None
    local = ClusterSpec.model_validate({"version": 1, "name": "d", "partitions": [{"name": "x", "nodes": 1}]})
    assert refusal(local) is None


def test_up_refuses_at_once_and_plan_and_validate_say_so(tmp_path: Path) -> None:
    cloud = GoogleCloud(tmp_path)
    (tmp_path / "cwd").mkdir()
    (tmp_path / "cwd/cluster.yaml").write_text(SPEC)
    path = f"{gcloud.install(tmp_path, cloud.store.path)}:/usr/local/bin:/usr/bin:/bin"
    with Google(World(cloud.store.path)) as google:
        environ = {**cloud.env, **google.environment, "PATH": path}
        cli = Clusterctl(tmp_path / "home", tmp_path / "cwd", environ)
        refused = cli("up", "--yes", rc=2).stderr
        assert "can't configure hosts with Rocky Linux yet" in refused
        assert "debian-12" in refused
        assert not cloud.resources()
        assert not cli.home.exists()
        assert "`up` refuses this: clusterctl can't configure" in cli("validate").stderr
        (note,) = (one for one in cli("-o", "json", "plan").json["notes"] if "refuses" in one)
        assert "debian-12" in note
    assert not cloud.resources()
