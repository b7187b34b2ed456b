"""Two clusters side by side, one with two partitions, one of sixteen nodes."""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, raised

LIMIT = Path("/proc/sys/fs/inotify/max_user_instances")


SMALL = "name: small, nodes: 1, memory: 512MiB"


def spec(name: str, *partitions: str) -> str:
    lines = "".join(f"  - {{{partition}}}\n" for partition in partitions)
    return f"version: 1\nname: {name}\nprovider: {{type: local}}\npartitions:\n{lines}"


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Cluster, Cluster]]:
    """Two clusters of one name, in two homes, up at the same time."""
    name = f"p{secrets.token_hex(3)}"
    a, b, cwd = (tmp_path_factory.mktemp(part) for part in ("home-a", "home-b", "cwd"))
    (cwd / "b").mkdir()
    two = spec(name, "name: big, nodes: 2, max_time: 1h", SMALL)
    with raised(name, two, a, cwd) as first:
        with raised(name, spec(name, "name: big, nodes: 1"), b, cwd / "b") as second:
            yield first, second
        assert first.json("status")["ready"], "it went down with the other of its name"


def test_two_clusters_of_one_name_do_not_meet(pair: tuple[Cluster, Cluster]) -> None:
    networks = [json.loads((one.workspace / "hosts.json").read_text())["network"] for one in pair]
    assert networks[0] != networks[1]
    for one, nodes, big in zip(pair, (3, 1), (2, 1), strict=True):
        assert len(one.json("status")["nodes"]) == nodes
        done = one.json("submit", "probe", "--nodes", str(big), "--wait")
        answer = json.loads((one.run_of(done["job_id"]) / "stdout.log").read_text())
        assert answer["hosts"] == [f"{one.name}-big-{number + 1}" for number in range(big)]


def test_a_partition_is_what_the_spec_says(pair: tuple[Cluster, Cluster]) -> None:
    first, _ = pair
    shown = first.ssh(f"{first.name}-ctl", "sinfo -h -o '%R %D %l %m' | sort")
    rows = {line.split()[0]: line.split()[1:] for line in shown.splitlines()}
    assert rows["big"][:2] == ["2", "1:00:00"]
    assert rows["small"] == ["1", "infinite", "512"]
    done = first.json("submit", "probe", "--partition", "small", "--wait")
    answer = json.loads((first.run_of(done["job_id"]) / "stdout.log").read_text())
    assert answer["hosts"] == [f"{first.name}-small-1"]


def test_a_job_that_no_partition_can_run_is_refused(pair: tuple[Cluster, Cluster]) -> None:
    first, _ = pair
    assert "memory" in first("submit", "probe", "-p", "small", "--mem", "4GiB", rc=1).stderr.lower()
    assert "time" in first("submit", "probe", "-p", "big", "--time", "2h", rc=2).stderr.lower()


def test_a_partition_shrinks_beside_the_nodes_of_another_as_planned(pair: tuple[Cluster, Cluster]) -> None:
    """And once it is done, there is nothing to plan. How one grows: tests/e2e/test_drift.py."""
    first, _ = pair
    name, small, booted = (
        first.name,
        f"{first.name}-small-1",
        "systemctl show -p UserspaceTimestampMonotonic --value",
    )
    before = first.ssh(small, booted)
    assert first.json("plan", "--check")["changes"] == []
    fates = {3: {(f"{name}-big-3", "make")}, 1: {(f"{name}-big-2", "remove")}}
    for nodes, fate in fates.items():
        first.spec.write_text(spec(name, f"name: big, nodes: {nodes}, max_time: 1h", SMALL))
        known = content(first)
        plan = first.json("plan", "--check", rc=3)
        assert content(first) == known, "a plan only looks"
        hosts = {(one["name"], one["action"]) for one in plan["changes"] if one["kind"] == "host"}
        assert {host for host in hosts if host[1] != "change"} == fate
    assert first.json("up", "--yes")["probed"] == [f"{name}-big-1", small]
    assert first.json("plan", "--check")["changes"] == []
    assert first.ssh(small, booted) == before


def test_a_plan_names_what_drifted_and_the_jobs_in_its_way(pair: tuple[Cluster, Cluster]) -> None:
    first, _ = pair
    small = f"{first.name}-small-1"
    script = first.runner.cwd / "long.sh"
    script.write_text("#!/bin/bash\nsleep 600\n")
    job = first.json("submit", script, "-p", "small")["job_id"]
    deadline = time.monotonic() + 60
    while first.json("jobs", job)["jobs"][0]["state"] != "RUNNING":
        assert time.monotonic() < deadline
    first.ssh(f"{first.name}-big-1", "sudo rm /etc/munge/munge.key")
    text = first.spec.read_text()
    first.spec.write_text(text.replace(f"  - {{{SMALL}}}\n", "") + "users: [{name: bob, uid: 2002}]\n")
    plan = first.json("plan")
    (harm,) = plan["harms"]
    assert (harm["job_id"], harm["nodes"]) == (job, [small])
    assert {(one["kind"], one["name"]) for one in plan["changes"]} >= {
        ("host", small),
        ("setting", "users"),
        ("setting", "partitions"),
        ("drift", f"{first.name}-big-1"),
    }
    assert f"job {job} (long)" in first("up", "--yes", rc=2).stderr
    first("cancel", job)
    first("logs", job, "--follow", rc=5)
    assert "with all data" in first("up", rc=2).stderr, "nobody was there to be asked"
    assert len(first.json("status")["nodes"]) == 2
    first.spec.write_text(text)
    assert first.json("up")["mended"]
    assert first.json("plan", "--check")["changes"] == []


def content(cluster: Cluster) -> dict[Path, bytes]:
    """All that clusterctl keeps of a cluster on the user's side."""
    return {path: path.read_bytes() for path in cluster.runner.home.rglob("*") if path.is_file()}


@pytest.mark.sweep
def test_sixteen_nodes(tmp_path_factory: pytest.TempPathFactory) -> None:
    name = f"s{secrets.token_hex(3)}"
    home, cwd = tmp_path_factory.mktemp("home"), tmp_path_factory.mktemp("cwd")
    before = int(LIMIT.read_text())
    with raised(name, spec(name, "name: many, nodes: 16"), home, cwd) as many:
        assert len(many.raised["probed"]) == 16
        notes = " ".join(many.raised["notes"])
        assert "oversubscribed" in notes
        assert int(LIMIT.read_text()) >= 8192
        done = many.json("submit", "probe", "--nodes", "16", "--wait")
        answer = json.loads((many.run_of(done["job_id"]) / "stdout.log").read_text())
        assert answer["world_size"] == 16
        assert len(set(answer["hosts"])) == 16
    if not list(
        Path("/var/lib/clusterctl").glob("*/cluster.json")
    ):  # a cluster beside ours keeps them raised
        assert int(LIMIT.read_text()) == before
