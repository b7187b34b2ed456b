"""Machines without a route out become a cluster: all that is installed comes out of one file."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.support.bundled import DEBIAN, debian_bundle, unconnected
from tests.support.lab import Lab, lab
from tests.support.verbs import Clusterctl, Ran

OUTSIDE = "192.0.2.1"  # of nobody, by RFC 5737
HOSTS = ("node1", "node2")


@dataclass(frozen=True)
class Offline:
    """Machines, their spec, and a clusterctl that asks no index either."""

    lab: Lab
    spec: Path
    runner: Clusterctl

    def __call__(self, *argv: str | Path, rc: int = 0) -> Ran:
        return self.runner("-o", "json", "-f", self.spec, *argv, rc=rc)


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    with lab("debian", 2, shared="/shared") as one:
        yield one


@pytest.fixture(scope="module")
def offline(
    machines: Lab,
    cluster_name: str,
    clusterctl_home: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Offline:
    cwd = tmp_path_factory.mktemp("offline")
    spec = cwd / "cluster.yaml"
    partitions = {"train": "node[1-2]"}
    spec.write_text(machines.spec(cluster_name, controller="node1", partitions=partitions))
    runner = Clusterctl(clusterctl_home, cwd, unconnected(tmp_path_factory.mktemp("cache")))
    return Offline(machines, spec, runner)


def test_the_machines_have_no_route_out(machines: Lab) -> None:
    for host in HOSTS:
        assert machines.ssh(host, "ip route show default").stdout == ""
        tried = machines.ssh(host, f"timeout 5 bash -c 'echo > /dev/tcp/{OUTSIDE}/80'", rc=None)
        assert "Network is unreachable" in tried.stderr
        assert machines.ssh(host, "sudo apt-get update -qq; apt-cache policy munge", rc=None).stdout == ""


def test_a_corrupted_bundle_is_refused_before_anything_is_done(offline: Offline, tmp_path: Path) -> None:
    bad = tmp_path / "bad.tar"
    shutil.copy(debian_bundle(), bad)
    with bad.open("r+b") as file:
        file.seek(bad.stat().st_size // 2)
        (byte,) = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte ^ 1]))
    (failure,) = offline("up", "--yes", "--bundle", bad, rc=2).json["failures"]
    assert failure["cause"].startswith(f"corrupted: systems/{DEBIAN.release}/pool/")
    assert offline.lab.ssh("node1", "getent passwd clusterctl", rc=None).stdout == ""


def test_from_nothing_to_an_mpi_job(offline: Offline) -> None:
    before = {host: offline.lab.ssh(host, "sudo ls -R /etc/apt /var/lib/apt/lists").stdout for host in HOSTS}
    up = offline("up", "--yes", "--bundle", debian_bundle()).json
    assert up["probed"] == list(HOSTS)
    notes = {phase["phase"]: phase["note"] for phase in up["phases"]}
    assert DEBIAN.release in notes["bundle"]
    assert notes["packages"] == "sent to 2 hosts"
    job = offline("submit", "probe", "--nodes", "2", "--wait").json
    assert job["state"] == "COMPLETED"
    for host in HOSTS:
        left = offline.lab.ssh(host, "sudo ls /var/lib/clusterctl-bundle", rc=None)
        assert "No such file" in left.stderr
        assert offline.lab.ssh(host, "sudo ls -R /etc/apt /var/lib/apt/lists").stdout == before[host]
        assert "installed" in offline.lab.ssh(host, "dpkg-query -W -f '${db:Status-Status}' slurmd").stdout


def test_the_cluster_remembers_its_bundle(offline: Offline) -> None:
    again = offline("up", "--yes").json
    notes = {phase["phase"]: phase["note"] for phase in again["phases"]}
    assert (notes["packages"], "unchanged" in notes["configure"]) == ("nothing to send", True)


def test_down_gives_the_machines_back(offline: Offline) -> None:
    offline("down", "--yes", "--discard-runs")
    for host in HOSTS:
        assert offline.lab.ssh(host, "ls -d /opt/clusterctl /var/lib/clusterctl*", rc=None).stdout == ""
        assert offline.lab.ssh(host, "dpkg-query -W -f '${db:Status-Status}' slurmd", rc=None).stdout in (
            "",
            "not-installed",
        )
