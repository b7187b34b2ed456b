"""`up` refuses an unsupported image before it creates anything; `plan` and `validate` note it."""

from __future__ import annotations

from pathlib import Path

from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.plan import preview
from clusterctl.spec.load import parse_spec
from clusterctl.state.workspace import Workspace
from tests.support.google import gcloud
from tests.support.google.api import PROJECT
from tests.support.google.cloud import GoogleCloud
from tests.support.messages import shows
from tests.support.verbs import Clusterctl

SPEC = f"""\
version: 1
name: demo
provider:
  type: gcp
  project: {PROJECT}
  zone: us-central1-a
  controller: {{image: {{project: debian-cloud, family: debian-12}}}}
partitions: [{{name: train, nodes: 1}}]
"""


def test_unsupported_image_is_refused_by_up_and_noted_by_plan(
    planned_cloud: GoogleCloud, tmp_path: Path
) -> None:
    (tmp_path / "cluster.yaml").write_text(SPEC)
    path = gcloud.install(tmp_path, planned_cloud.store.path)
    cli = Clusterctl(tmp_path / "home", tmp_path, {"PATH": f"{path}:/usr/bin:/bin"})
    for said in (cli("up", "--yes", rc=2).stderr, cli("validate").stderr):
        assert shows(said, "image-distribution")
        assert "Rocky Linux 9" in said
    assert not cli.home.exists()
    plan = preview(
        ClusterContext.of(
            parse_spec(SPEC, "cluster.yaml"), workspace=Workspace(tmp_path / "none" / "demo")
        )
    )
    (note,) = (note for note in plan.notes if "would fail" in note)
    assert "Debian 12" in note
    assert not planned_cloud.resources()
