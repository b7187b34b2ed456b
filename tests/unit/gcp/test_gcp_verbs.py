"""`plan` and `down --orphans` on Google Cloud, as a user runs them: real Terraform, a stand-in of Google.

What docs/howto/first-day-gcp.md shows to be printed, and needs no machines, is compared here.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.state.workspace import cache_home
from tests.support.google import discovery, gcloud
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.google.module import CLUSTER_ID, Module, spec_of
from tests.support.google.world import World
from tests.support.manual import ROOT, assert_shown, blocks, shown
from tests.support.verbs import Clusterctl, Ran

FIRST_DAY = ROOT / "docs" / "howto" / "first-day-gcp.md"

SPEC = f"""\
version: 1
name: demo
provider:
  type: gcp
  project: {PROJECT}
  zone: us-central1-a
  partitions: {{train: {{machine_type: g2-standard-8}}}}
  prices: {{g2-standard-8: 0.75}}
partitions: [{{name: train, nodes: 2, gpus: {{type: l4}}}}]
"""


def runner(cloud: GoogleCloud, google: Google, folder: Path, spec: str = SPEC) -> Clusterctl:
    """clusterctl with that cloud, and a `gcloud` that is logged in."""
    discovery.methods("compute")  # which takes seconds to read, in which the double answers nobody
    cwd = folder / "cwd"
    cwd.mkdir()
    (cwd / "cluster.yaml").write_text(spec)
    path = f"{gcloud.install(folder, cloud.store.path)}:{cloud.env['PATH']}"
    environ = {**cloud.env, "PATH": path, **google.environment, "XDG_CACHE_HOME": str(cache_home().parent)}
    return Clusterctl(folder / "home", cwd, environ, forked=True)


def spec_of_the_page() -> str:
    """What the page of the first day has the reader write, of the stand-in's project."""
    (spec,) = (block.text for block in blocks(FIRST_DAY) if block.language == "yaml")
    return spec.replace("my-project", PROJECT)


def as_shown(ran: Ran, text: str, turn: int = 0) -> Ran:
    """Fails unless the page shows this."""
    assert_shown(FIRST_DAY, text, f"{ran.stderr}{ran.stdout}", {PROJECT: "my-project"}, turn)
    return ran


@pytest.fixture
def lost(tmp_path: Path) -> Iterator[tuple[Module, Google]]:
    """A cluster at Google that no workspace knows."""
    module = Module(tmp_path)
    module.ask(spec_of("placement"))
    module.apply()
    with Google(World(module.cloud.store.path)) as google:
        yield module, google
    assert not google.violations


def test_a_plan_of_a_new_cluster_says_what_it_costs_and_makes_nothing(tmp_path: Path) -> None:
    cloud = GoogleCloud(tmp_path)
    with Google(World(cloud.store.path)) as google:
        cli = runner(cloud, google, tmp_path)
        answer = cli("-o", "json", "plan", "--check", rc=3).json
    hosts = {one["name"]: one for one in answer["changes"] if one["kind"] == "host"}
    assert {name: one["action"] for name, one in hosts.items()} == dict.fromkeys(
        ("demo-ctl", "demo-train-1", "demo-train-2"), "make"
    )
    assert hosts["demo-train-1"]["usd_per_hour"] > 0.75  # its disk is not for nothing
    assert hosts["demo-train-1"]["what"] == "g2-standard-8, 1 x l4"
    assert [one["what"] for one in answer["changes"] if one["kind"] == "other"]
    cost = answer["cost"]
    assert cost["per_hour"] >= sum(one["usd_per_hour"] for one in hosts.values())
    assert cost["per_day"] == pytest.approx(24 * cost["per_hour"], abs=0.01)
    assert cost["now_per_hour"] == 0
    assert cost["priced_on"].startswith("20")
    assert not cloud.resources()
    assert not cli.home.exists()


def test_what_stands_in_the_way_is_named_at_once_and_up_makes_nothing(tmp_path: Path) -> None:
    cloud = GoogleCloud(tmp_path)
    with Google(World(cloud.store.path)) as google:
        cli = runner(cloud, google, tmp_path, spec_of_the_page())
        as_shown(cli("validate"), "clusterctl validate")
        as_shown(cli("plan", "--preflight"), "clusterctl plan --preflight", 1)
        planned = as_shown(cli("plan"), "clusterctl plan").stdout.splitlines()
        assert not set(shown(FIRST_DAY, "clusterctl plan").prints) - set(planned), "to the cent"
        google.project.quotas["NVIDIA_L4_GPUS"] = (0, 0)
        google.off.add("iap")
        as_shown(cli("plan", "--preflight", rc=1), "clusterctl plan --preflight")
        google.off.clear()
        google.project.denied.add("iam.serviceAccounts.actAs")
        google.project.enforced.add("compute.requireOsLogin")
        looked = cli("-o", "json", "plan", "--preflight", rc=1).json
        named = ["org-policy", "permission", "quota"]
        assert sorted(one["code"] for one in looked["failures"]) == named
        refused = cli("-o", "json", "up", "--yes", rc=1).json
        assert sorted(one["code"] for one in refused["failures"]) == named
        assert any("rejects instances with OS Login off" in one["cause"] for one in refused["failures"])
        assert cli("plan", "--preflight", "--check", rc=2).stderr
    assert not cloud.resources()
    assert not google.violations


def test_the_first_line_of_an_error_says_what_google_refused(tmp_path: Path) -> None:
    cloud = GoogleCloud(tmp_path)
    with Google(World(cloud.store.path)) as google:
        cli = runner(cloud, google, tmp_path, spec_of_the_page())

        def first_line(ran: Ran) -> str:
            return next(line for line in ran.stderr.splitlines() if "error" in line)

        cloud.fail("permission_required", of="google_service_account", times=2)
        cause = f"you lack the right iam.serviceAccounts.create in project {PROJECT}"
        said = f"error: not all could be made: {cause} (project {PROJECT}, us-central1-a)"
        assert first_line(cli("up", "--yes", rc=1)) == said
        cloud.fail("stockout_plain", name="demo-train-*")
        as_shown(cli("up", "--yes", rc=1), "clusterctl up --yes")
        as_shown(cli("plan"), "clusterctl plan", 1)
        begun = next(one for one in cli("-o", "json", "list").json["clusters"] if one["cluster"] == "demo")
        now = cli("-o", "json", "plan").json["cost"]["now_per_hour"]
        assert begun["state"] == "unfinished"
        assert round(begun["usd_per_hour"], 4) == round(now, 4) > 0, "the controller bills"
        as_shown(cli("doctor", "--bundle"), "clusterctl doctor --bundle")
        cloud.fail("protected", on="delete")
        google.refuse("compute.instances.delete", "protected")
        said = "error: 3 of 5 things of the cluster could not be deleted"
        assert first_line(cli("down", "--yes", rc=1)) == said
        cloud.heal()
        google.faults.clear()
        cli("down", "--yes")
    assert not cloud.resources()
    assert not google.violations


def test_a_lost_cluster_is_shown_with_its_cost_and_removed(
    lost: tuple[Module, Google], tmp_path: Path
) -> None:
    module, google = lost
    name = spec_of("placement").name
    cli = runner(module.cloud, google, tmp_path)
    where = ("--cluster", name, "down", "--orphans", "--project", PROJECT)
    before = module.cloud.resources()
    shown = cli(*where, "--discard", rc=2).stderr
    assert f"cluster {CLUSTER_ID}, " in shown
    assert "USD an hour:" in shown
    assert f"remove all of this ({CLUSTER_ID})?" in shown
    assert module.cloud.resources() == before

    (failure,) = cli("-o", "json", *where, "--yes", rc=1).json["failures"]
    assert failure["code"] == "only-copy"
    assert module.cloud.resources() == before
    answer = cli("-o", "json", *where, "--yes", "--discard").json
    (orphan,) = answer["orphans"]
    assert orphan["cluster_id"] == CLUSTER_ID
    assert any(one["usd_per_hour"] for one in orphan["left"])
    assert not module.cloud.instances
    assert cli(*where).stdout == f"cluster {name!r} has no orphans\n"
