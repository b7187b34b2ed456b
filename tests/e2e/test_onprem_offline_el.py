"""EL-shaped machines without a route out: a bundle of signed packages, created on Debian with dnf."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.packages import repository
from clusterctl.state.workspace import cache_home
from clusterctl.util.assets import digest
from tests.e2e.dnf_tools import dnf_tools
from tests.support.el.build import inputs
from tests.support.keeper import debian
from tests.support.lab import ROUTE_OUT, Lab, copy_folder, lab
from tests.support.messages import shows
from tests.support.verbs import Clusterctl
from tests.support.wheels import unconnected

pytestmark = [pytest.mark.sweep, pytest.mark.platform("stand-in", "offline", "rocky-9")]

HOSTS = ("node1", "node2")
BUNDLE = "/shared/el.bundle"
ROCKY = "dl.rockylinux.org/pub/rocky"
EPEL = "dl.fedoraproject.org/pub/epel"
PLACES = {
    **{name: f"{ROCKY}/9/{name}/x86_64/os" for name in ("BaseOS", "AppStream", "CRB", "extras")},
    "epel": f"{EPEL}/9/Everything/x86_64",
    "openhpc": "repos.openhpc.community/OpenHPC/3/EL_9",
}
KEYS = (
    f"{ROCKY}/RPM-GPG-KEY-Rocky-9",
    f"{EPEL}/RPM-GPG-KEY-EPEL-9",
    "github.com/openhpc/ohpc/raw/refs/heads/3.x/components/admin/ohpc-release/SOURCES/RPM-GPG-KEY-OpenHPC-3",
)


@pytest.fixture(scope="module")
def machines(no_residue: None) -> Iterator[Lab]:
    """Two machines that can resolve no name of the internet."""
    with lab("el", 2, shared="/shared") as one:
        for host in HOSTS:
            one.enter(
                host,
                [
                    "sed",
                    "-i",
                    "-E",
                    "/(rockylinux|fedoraproject|nvidia|openhpc|github)/d",
                    "/etc/hosts",
                ],
            )
        yield one


@pytest.fixture(scope="module")
def web(machines: Lab) -> Path:
    """The repositories, as files of this machine."""
    return cache_home() / f"test-el-{digest(str(debian()), *inputs())}" / "web"


@pytest.fixture(scope="module")
def connected(
    web: Path, clusterctl_home: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Clusterctl]:
    """Clusterctl on a machine that has dnf."""
    kept = tmp_path_factory.mktemp("connected")
    with dnf_tools(kept, web, Path(repository.__file__).with_name("data")) as tools:
        path = f"{tools}{os.pathsep}{os.environ['PATH']}"
        yield Clusterctl(clusterctl_home, kept, {"PATH": path})


@pytest.fixture(scope="module")
def spec(machines: Lab, cluster_name: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("spec") / "cluster.yaml"
    partitions = {"train": "node[1-2]"}
    mirrors = {"bundle": f"file://{BUNDLE}"}
    software = {"slurm": {"from": "openhpc"}, "apptainer": True, "mirrors": mirrors}
    path.write_text(
        machines.spec(cluster_name, controller="node1", partitions=partitions, software=software)
    )
    return path


@pytest.fixture(scope="module")
def bundle(connected: Clusterctl, spec: Path, web: Path) -> Path:
    (connected.cwd / "mine.repo").write_text(repositories(web, *KEYS))
    words = ("--os", "rocky-9", "--from", "rocky-9=mine.repo", "--out", "el.bundle")
    connected("bundle", "-f", spec, *words)
    return connected.cwd / "el.bundle"


def repositories(web: Path, *keys: str) -> str:
    named = " ".join(f"file://{web / key}" for key in keys)
    return "".join(
        f"[{name}]\nname={name}\nbaseurl=file://{web / place}\ngpgcheck=1\ngpgkey={named}\n"
        for name, place in PLACES.items()
    )


def test_bundle_has_dependencies_and_signing_keys(bundle: Path) -> None:
    packages = [path.name for path in (bundle / "rocky-9/Packages").iterdir()]
    for name in (
        "slurm-slurmd-ohpc-23",
        "apptainer-1",
        "munge-0",
        "munge-libs-0",
        "openmpi-4",
        "pmix-",
    ):
        assert any(path.startswith(name) for path in packages), name
    assert not any(path.startswith("slurm-slurmd-22") for path in packages)
    assert (bundle / "rocky-9/keys.asc").read_text().count("BEGIN PGP PUBLIC KEY") == len(KEYS)


def test_packages_signed_by_an_unknown_key_are_refused(
    connected: Clusterctl, spec: Path, web: Path
) -> None:
    (connected.cwd / "other.repo").write_text(repositories(web, KEYS[1]))
    words = ("--os", "rocky-9", "--from", "rocky-9=other.repo", "--out", "other.bundle")
    ran = connected("bundle", "-f", spec, *words, rc=1)
    assert shows(ran.stderr, "package-signature")
    assert not (connected.cwd / "other.bundle/rocky-9/repodata").exists()


def test_up_offline_on_el_runs_mpi_and_down_restores(
    machines: Lab, spec: Path, bundle: Path, clusterctl_home: Path, tmp_path: Path
) -> None:
    for host in HOSTS:
        asked = machines.ssh(host, "sudo dnf -q makecache", rc=None)
        assert asked.rc != 0
        assert machines.ssh(host, ROUTE_OUT).stdout == ""
    before = {host: machines.ssh(host, "ls /etc/yum.repos.d").stdout for host in HOSTS}
    copy_folder(bundle, machines, HOSTS[0], BUNDLE)
    runner = Clusterctl(clusterctl_home, tmp_path, unconnected(tmp_path / "cache", bundle))
    up = runner("-o", "json", "-f", spec, "up", "--yes").json
    assert up["probed"] == list(HOSTS)
    assert runner("-o", "json", "-f", spec, "submit", "probe", "--nodes", "2", "--wait").json["ok"]
    for host in HOSTS:
        packages = machines.ssh(host, "rpm -q --qf '%{name} ' slurm-slurmd-ohpc apptainer").stdout
        assert packages == "slurm-slurmd-ohpc apptainer "
    runner("-f", spec, "down", "--yes", "--discard")
    after = {host: machines.ssh(host, "ls /etc/yum.repos.d").stdout for host in HOSTS}
    assert after == before
