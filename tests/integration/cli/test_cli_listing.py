"""`list`: what is known of clusters here, with what they cost where that is known."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.cli import listing
from clusterctl.cli.output import Screen
from clusterctl.errors import CloudError, SpecError, UsageError
from clusterctl.providers.base import CachedImage
from clusterctl.providers.gcp import images
from clusterctl.providers.local.provider import LocalProvider
from clusterctl.providers.templates import KeptImage
from clusterctl.state.inventory import PartitionFacts
from clusterctl.state.workspace import Workspace
from tests.support.inventories import inventory_of
from tests.support.messages import refused as rejected
from tests.support.messages import shows
from tests.support.verbs import Clusterctl


def raise_cluster(home: Path, name: str, provider: str, usd_per_hour: float | None) -> None:
    inventory = inventory_of(
        "d-train-1", cluster=name, provider=provider, usd_per_hour=usd_per_hour
    )
    (home / name).mkdir(parents=True)
    (home / name / "hosts.json").write_text(inventory.text)


def test_list_shows_the_cost_of_each_cluster(cli: Clusterctl) -> None:
    raise_cluster(cli.home, "cloud", "gcp", 2.5)
    raise_cluster(cli.home, "here", "local", None)
    found = {one["cluster"]: one for one in cli("-o", "json", "list").json["clusters"]}
    assert (found["cloud"]["provider"], found["cloud"]["usd_per_hour"]) == ("gcp", 2.5)
    assert found["here"]["usd_per_hour"] is None
    shown = [line.split() for line in cli("list").stdout.splitlines()]
    assert "USD AN HOUR" in " ".join(shown[0])
    assert [line[4] for line in shown if {*line[:1]} & {"cloud", "here"}] == ["2.50", "-"]


def test_list_without_prices_has_no_cost_column(cli: Clusterctl) -> None:
    raise_cluster(cli.home, "here", "local", None)
    assert "USD" not in cli("list").stdout


def test_attached_cluster_has_the_nodes_of_its_partitions(cli: Clusterctl) -> None:
    partitions = (PartitionFacts("short", ("c1", "c2")), PartitionFacts("gpu", ("c2", "c3")))
    inventory = replace(inventory_of(cluster="campus"), partitions=partitions)
    (cli.home / "campus").mkdir(parents=True)
    (cli.home / "campus/hosts.json").write_text(inventory.text)
    (one,) = (c for c in cli("-o", "json", "list").json["clusters"] if c["cluster"] == "campus")
    assert one["nodes"] == 3


def test_list_knows_a_cluster_by_its_id_alone(cli: Clusterctl) -> None:
    """Whatever its provider has begun, and also if a machine has refused to join."""
    for name, text in (("cloud", CLOUD), ("own", OWN), ("lost", "")):
        (cli.home / name).mkdir(parents=True)
        (cli.home / name / "id").write_text("a1b2c3\n")
        if text:
            (cli.home / name / "spec.yaml").write_text(text)
    (cli.home / "own" / "joining.json").write_text("{}")
    (cli.home / "damaged").mkdir()
    (cli.home / "damaged" / "id").write_text("?")
    (cli.home / "jobs-only").mkdir()
    (cli.home / "jobs-only" / "jobs.jsonl").write_text("")
    clusters = cli("-o", "json", "list").json["clusters"]
    listed = {c["cluster"]: c for c in clusters if c["workspace"].startswith(str(cli.home))}
    assert {name: (one["provider"], one["state"], one["id"]) for name, one in listed.items()} == {
        "cloud": ("gcp", "unfinished", "a1b2c3"),
        "own": ("onprem", "unfinished", "a1b2c3"),
        "lost": ("-", "unfinished", "a1b2c3"),
        "damaged": ("-", "unfinished", None),
    }


def test_list_first_up_that_did_not_finish_is_unfinished(cli: Clusterctl) -> None:
    records = {"begun": None, "configuring": "", "ended": "inputs", "leaves": "inputs"}
    for name, inputs in records.items():
        raise_cluster(cli.home, name, "onprem", None)
        if inputs is not None:
            Workspace(cli.home / name).note_configuration(inputs)
    (cli.home / "leaves" / "removing").write_text('{"looked_at": null}')
    states = {c["cluster"]: c["state"] for c in cli("-o", "json", "list").json["clusters"]}
    assert [states[name] for name in records] == ["unfinished", "unfinished", "up", "leaving"]


OWN = """\
version: 1
name: own
provider: {type: onprem, controller: n1, hosts: {n1: {address: 192.0.2.1}}}
partitions: [{name: train, hosts: n1}]
"""
CLOUD = """\
version: 1
name: demo
provider: {type: gcp, project: my-project, zone: us-central1-a}
partitions: [{name: train, nodes: 2, gpus: {type: l4}}]
"""


@pytest.fixture
def cloud_calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """What was asked of a project, and removed here, in an empty folder with the spec of a
    cloud.
    """
    cloud_calls: list[str] = []

    def kept(settings: object, *, prune: bool = False) -> tuple[KeptImage, ...]:
        cloud_calls.append("delete" if prune else "look")
        return (KeptImage("clusterctl-0123", 2048, 0.1),)

    def cached_images(self: object, *, prune: bool = False) -> tuple[CachedImage, ...]:
        cloud_calls.extend(["prune"] if prune else [])
        return ()

    monkeypatch.setattr(LocalProvider, "cached_images", cached_images)
    monkeypatch.setattr(images, "kept", kept)
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    Path("cluster.yaml").write_text(CLOUD)
    return cloud_calls


PLAIN = Screen(json=False, color=False)


def test_cache_prune_deletes_project_images_with_its_flag_only(
    cloud_calls: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    """Other clusters of the project may start nodes from them."""
    listing.cache_list(PLAIN)
    assert "kept: " in capsys.readouterr().out
    listing.cache_prune(PLAIN)
    assert capsys.readouterr().out == "nothing to remove\n"
    assert cloud_calls == ["look", "prune"]
    listing.cache_prune(PLAIN, images=True)
    assert "removed: " in capsys.readouterr().out
    assert cloud_calls[2:] == ["delete", "prune"]


def test_cache_prune_removes_container_images(
    cloud_calls: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    blobs = tmp_path / "cache/clusterctl/images/blobs"
    blobs.mkdir(parents=True)
    (blobs / "layer").write_bytes(bytes(2 << 20))
    answers = []
    for command in (listing.cache_list, listing.cache_prune, listing.cache_list):
        command(Screen(json=True, color=False))
        answers.append(json.loads(capsys.readouterr().out)["container_images_mib"])
    assert answers == [2, 2, 0]
    assert not blobs.exists()


def test_orphans_without_a_cloud_deletes_no_images(cloud_calls: list[str]) -> None:
    local_spec = CLOUD.replace("gcp, project: my-project, zone: us-central1-a", "local")
    Path("cluster.yaml").write_text(local_spec.replace(", gpus: {type: l4}", ""))
    with rejected("unsupported/images", UsageError):
        listing.cache_prune(PLAIN, images=True)
    assert not cloud_calls


@pytest.mark.parametrize("why", ["noodles", "not logged in"])
def test_cache_list_needs_no_spec_and_no_login(
    cloud_calls: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    why: str,
) -> None:
    def refused(*_: object, **__: object) -> tuple[KeptImage, ...]:
        raise CloudError(why)

    Path("cluster.yaml").write_text(CLOUD.replace("nodes", why) if why == "noodles" else CLOUD)
    monkeypatch.setattr(images, "kept", refused)
    listing.cache_list(PLAIN)
    output = capsys.readouterr()
    assert shows(output.out, "cache-empty")
    assert shows(output.err, "project-images-unlisted")
    assert ("cluster.yaml" if why == "noodles" else why) in output.err
    listing.cache_prune(PLAIN)
    assert cloud_calls == ["prune"]
    with pytest.raises(SpecError if why == "noodles" else CloudError):
        listing.cache_prune(PLAIN, images=True)
    # Nothing is removed here either.
    assert cloud_calls == ["prune"]
