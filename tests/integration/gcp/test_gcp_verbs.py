"""`plan` and `orphans remove` on Google Cloud as a user runs them, on the cloud double.

What docs/howto/first-day-gcp.md shows to be printed, and needs no machines, is compared here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.spec.load import parse_spec
from clusterctl.state.workspace import cache_home
from tests.support.google import discovery, gcloud
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.manual import ROOT, assert_shown, blocks, shown
from tests.support.messages import codes, shows
from tests.support.verbs import Clusterctl, CommandResult
from tests.unit.gcp import recorded
from tests.unit.gcp.clusters import provider_of, workspace_in

FIRST_DAY = ROOT / "docs" / "howto" / "first-day-gcp.md"

SPEC = f"""\
version: 1
name: demo
provider:
  type: gcp
  project: {PROJECT}
  zone: us-central1-a
  partitions: {{train: {{machine_type: g2-standard-8}}}}
partitions: [{{name: train, nodes: 2, gpus: {{type: l4}}}}]
"""


def runner(cloud: GoogleCloud, google: Google, folder: Path, spec: str = SPEC) -> Clusterctl:
    """Return clusterctl with this cloud, and a `gcloud` that is logged in."""
    discovery.methods("compute")  # which takes seconds to read, in which the double answers nobody
    cwd = folder / "cwd"
    cwd.mkdir()
    (cwd / "cluster.yaml").write_text(spec)
    path = f"{gcloud.install(folder, cloud.store.path)}:{cloud.env['PATH']}"
    environ = {
        **cloud.env,
        "PATH": path,
        **google.environment,
        "XDG_CACHE_HOME": str(cache_home().parent),
    }
    return Clusterctl(folder / "home", cwd, environ)


def spec_of_the_page() -> str:
    """Return the spec of docs/howto/first-day-gcp.md, for the project of the double."""
    (spec,) = (block.text for block in blocks(FIRST_DAY) if block.language == "yaml")
    return spec.replace("my-project", PROJECT)


def as_shown(ran: CommandResult, text: str, turn: int = 0) -> CommandResult:
    """Fails unless the page shows this."""
    assert_shown(FIRST_DAY, text, f"{ran.stderr}{ran.stdout}", {PROJECT: "my-project"}, turn)
    return ran


def test_up_lists_all_obstacles_and_creates_nothing(tmp_path: Path) -> None:
    cloud = GoogleCloud(tmp_path)
    with Google(cloud.store) as google:
        cli = runner(cloud, google, tmp_path, spec_of_the_page())
        as_shown(cli("validate"), "clusterctl validate")
        as_shown(cli("plan", "--preflight"), "clusterctl plan --preflight", 1)
        planned = as_shown(cli("plan"), "clusterctl plan").stdout.splitlines()
        # What it costs is right to the cent.
        assert not set(shown(FIRST_DAY, "clusterctl plan").prints) - set(planned)
        assert not cli.home.exists()
        google.project.quotas["NVIDIA_L4_GPUS"] = (0, 0)
        google.off.add("iap")
        as_shown(cli("plan", "--preflight", rc=1), "clusterctl plan --preflight")
        google.off.clear()
        google.project.has["machineTypes/g2-standard-4"] = None
        named = ["cloud-refused/machine-type", "quota"]
        assert sorted(codes(cli("-o", "json", "plan", "--preflight", rc=1))) == named
        ran = cli("-o", "json", "up", "--yes", rc=1)
        assert sorted(codes(ran)) == named
        assert cli("plan", "--preflight", "--check", rc=2).stderr
    assert not cloud.resources()
    assert not google.violations


def test_up_error_begins_with_the_refusal_of_google(tmp_path: Path) -> None:
    cloud = GoogleCloud(tmp_path)
    with Google(cloud.store) as google:
        cli = runner(cloud, google, tmp_path, spec_of_the_page())

        cloud.fail("stockout_plain", name="demo-train-*")
        as_shown(cli("up", "--yes", rc=1), "clusterctl up --yes")
        as_shown(cli("plan"), "clusterctl plan", 1)
        begun = next(
            one for one in cli("-o", "json", "list").json["clusters"] if one["cluster"] == "demo"
        )
        planned = cli("-o", "json", "plan", "--check", rc=3).json
        assert_costs_add_up(planned)
        assert begun["state"] == "unfinished"
        # The controller bills.
        assert begun["usd_per_hour"] == pytest.approx(planned["cost"]["now_per_hour"], abs=1e-4)
        assert begun["usd_per_hour"] > 0
        cloud.fail("protected", on="delete")
        google.refuse("compute.instances.delete", "protected")
        said = cli("down", "--yes", rc=1).stderr
        assert "error: 3 of 5" in said
        assert shows(said, "orphans-not-deleted")
        cloud.heal()
        google.faults.clear()
        cli("down", "--yes")
    assert not cloud.resources()
    assert not google.violations


def assert_costs_add_up(planned: Any) -> None:
    """Check the costs in a plan of a controller and two new nodes."""
    hosts = {one["name"]: one for one in planned["changes"] if one["kind"] == "host"}
    assert {name: (one["action"], one["what"]) for name, one in hosts.items()} == dict.fromkeys(
        ("demo-train-1", "demo-train-2"), ("make", "g2-standard-4, 1 x l4")
    )
    # Its disk is not for nothing.
    assert hosts["demo-train-1"]["usd_per_hour"] > 0.7069
    cost = planned["cost"]
    more = sum(host["usd_per_hour"] for host in hosts.values())
    assert cost["per_hour"] - cost["now_per_hour"] >= more
    assert cost["per_day"] == pytest.approx(24 * cost["per_hour"], abs=0.01)
    assert cost["priced_on"].startswith("20")


def test_orphans_lists_cost_and_removes_a_lost_cluster(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cluster has no workspace."""
    spec = parse_spec(SPEC, "cluster.yaml")
    workspace = workspace_in(tmp_path)
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=False) as (cloud, google):
        provider_of(spec).apply(spec, workspace)
        cli = runner(cloud, google, tmp_path)
        cluster_id = workspace.cluster_id()
        where = ("orphans", "remove", "demo", "--project", PROJECT)
        before = cloud.resources()
        shown = cli(*where, "--discard", rc=2).stderr
        assert f"cluster {cluster_id}, " in shown
        assert "USD an hour:" in shown
        assert f"these clusters ({cluster_id})?" in shown
        assert cloud.resources() == before

        assert codes(cli("-o", "json", *where, "--yes", rc=1)) == ["would-lose/files"]
        assert cloud.resources() == before
        answer = cli("-o", "json", *where, "--yes", "--discard").json
        (orphan,) = answer["orphans"]
        assert orphan["cluster_id"] == cluster_id
        assert any(one["usd_per_hour"] for one in orphan["left"])
        assert not cloud.instances
        assert cli(*where).stdout == "cluster 'demo' has no orphans\n"
