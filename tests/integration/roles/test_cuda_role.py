"""The role cuda: the packages that it installs on each kind of host, and its spec settings."""

from __future__ import annotations

import fnmatch
import json
import os
import platform
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from clusterctl.errors import SpecError
from clusterctl.hosts.roles import spec_variables
from clusterctl.packages.os_packages import nvidia_preference, nvidia_stream, package_names
from clusterctl.packages.repository import RepositoryRequest
from clusterctl.spec.distributions import distribution_of, releases
from clusterctl.spec.load import parse_spec
from clusterctl.spec.models import ClusterSpec
from tests.support.forks import ansible
from tests.support.messages import refused
from tests.support.plays import changes, program, run_play, run_tasks

pytestmark = pytest.mark.platform("rendered", "nvidia-packages")

RELEASES = {
    "rocky-9": {"os_family": "RedHat", "distribution": "Rocky", "distribution_major_version": "9"},
    "rocky-10": {
        "os_family": "RedHat",
        "distribution": "Rocky",
        "distribution_major_version": "10",
    },
    "debian-12": {
        "os_family": "Debian",
        "distribution": "Debian",
        "distribution_version": "12.9",
        "distribution_major_version": "12",
        "distribution_release": "bookworm",
    },
    "debian-13": {
        "os_family": "Debian",
        "distribution": "Debian",
        "distribution_version": "13.2",
        "distribution_major_version": "13",
        "distribution_release": "trixie",
    },
    "ubuntu-24.04": {
        "os_family": "Debian",
        "distribution": "Ubuntu",
        "distribution_version": "24.04",
    },
}
FACTS = tomllib.loads((Path(__file__).parents[2] / "unit/packages/facts/nvidia.toml").read_text())
SOURCES = {release: row for row in FACTS["repository"] for release in row["of"]}
KERNEL = "6.1.0-test"
NEW = "580.95.05"  # the version of the driver once it is installed
HEADERS = ["kernel-devel-matched", "kernel-headers"]


class Case(NamedTuple):
    """A host, its packages and its spec, and the packages that the role installs there."""

    release: str
    found: dict[str, Any]
    asked: dict[str, Any]
    names: list[str]


NEW_FABRIC = "the fabric manager of a new one"
CASES = {
    "no driver is asked for": Case("rocky-9", {}, {"cuda_driver": "present"}, []),
    "a new one": Case(
        "rocky-9", {}, {"cuda_driver": "open"}, [*HEADERS, "nvidia-open", "nvidia-persistenced"]
    ),
    "a branch without modules": Case(
        "rocky-10",
        {},
        {"cuda_driver": "proprietary", "cuda_branch": "580"},
        [*HEADERS, "cuda-drivers-580.*", "nvidia-persistenced-580.*"],
    ),
    "a branch on Debian": Case(
        "debian-12",
        {},
        {"cuda_driver": "open", "cuda_branch": "580"},
        ["nvidia-open", "nvidia-persistenced"],
    ),
    "a new one on Ubuntu": Case("ubuntu-24.04", {}, {"cuda_driver": "open"}, ["nvidia-open"]),
    "one that is there stays": Case(
        "rocky-9", {"installed": "575.57.08"}, {"cuda_driver": "open"}, []
    ),
    "the fabric manager of one that is there": Case(
        "rocky-9",
        {"installed": "575.57.08", "switches": 4},
        {"cuda_driver": "open"},
        ["nvidia-fabric-manager-575.57.08"],
    ),
    "the same on Debian": Case(
        "debian-12",
        {"installed": "575.57.08", "switches": 4},
        {"cuda_driver": "open"},
        ["nvidia-fabricmanager-575=575.57.08*"],
    ),
    "its new name": Case(
        "rocky-9",
        {"installed": "580.95.05", "switches": 4},
        {"cuda_driver": "open"},
        ["nvidia-fabricmanager-580.95.05"],
    ),
    "its new name on Debian": Case(
        "debian-12",
        {"installed": "590.48.01", "switches": 4},
        {"cuda_driver": "open"},
        ["nvidia-fabricmanager=590.48.01*"],
    ),
    NEW_FABRIC: Case(
        "rocky-9",
        {"switches": 4},
        {"cuda_driver": "open"},
        [*HEADERS, "nvidia-open", "nvidia-persistenced", f"nvidia-fabricmanager-{NEW}"],
    ),
    "the same on Ubuntu": Case(
        "ubuntu-24.04",
        {"switches": 4},
        {"cuda_driver": "open", "cuda_branch": "580"},
        ["nvidia-open", f"nvidia-fabricmanager={NEW}*"],
    ),
    "no fabric manager without a driver": Case(
        "rocky-9", {"switches": 4}, {"cuda_dcgm": True}, ["datacenter-gpu-manager-4-cuda12"]
    ),
    "another CUDA": Case(
        "rocky-9",
        {"installed": "580.95.05"},
        {"cuda_toolkit": "13.0", "cuda_nccl": True},
        ["cuda-toolkit-13-0", "libnccl-[0-9]*+cuda13.*"],
    ),
    "that of CuPy": Case(
        "debian-12", {"installed": "580.95.05"}, {"cuda_nccl": True}, ["libnccl2=*+cuda12.*"]
    ),
    "the oldest that the repository has": Case(
        "rocky-10",
        {"installed": "580.95.05"},
        {"cuda_nccl": True, "cuda_dcgm": True},
        ["libnccl-[0-9]*+cuda13.*", "datacenter-gpu-manager-4-cuda13"],
    ),
}


@pytest.fixture(scope="module")
def would_install(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Return host -> packages that check mode would install, without a repository."""
    folder = tmp_path_factory.mktemp("cuda")
    play = {
        "hosts": "all",
        "gather_facts": False,
        "tasks": [
            {"ansible.builtin.set_fact": {"ansible_facts": "{{ case_facts }}"}},
            {"ansible.builtin.include_role": {"name": "cuda", "tasks_from": "cards"}},
        ],
    }
    (folder / "play.yml").write_text(yaml.safe_dump([play]))
    hosts = {name.replace(" ", "_"): variables(case) for name, case in CASES.items()}
    (folder / "inventory.yml").write_text(yaml.safe_dump({"all": {"hosts": hosts}}))
    program(folder, "modinfo", f"echo {NEW}")
    argv = ["--check", "-v", "-i", "inventory.yml", "play.yml"]
    done = ansible(
        "ansible-playbook", argv, cwd=folder, environ={"PATH": f"{folder}/bin:{os.environ['PATH']}"}
    )
    assert done.returncode == 0, done.stdout + done.stderr
    would = r'^changed: \[(\w+)\] => \{\n(?: .*\n)*? +"msg": "would install ([^"]+)"'
    said = re.findall(would, done.stdout, re.MULTILINE)
    hosts = {name.replace(" ", "_"): name for name in CASES}
    return {
        name: [word for host, words in said if hosts[host] == name for word in words.split()]
        for name in CASES
    }


def variables(case: Case) -> dict[str, Any]:
    found = {"cards": 1, "switches": 0, "loaded": "", "installed": "", "units": []}
    return {
        "ansible_connection": "local",
        "ansible_python_interpreter": sys.executable,
        "case_facts": {**RELEASES[case.release], "kernel": KERNEL, "packages": {}},
        "cuda_found": found | case.found,
        "packages_bundle": "file:///b",
        "cuda_oldest": distribution_of(case.release).oldest_cuda,
        "clusterctl_release": case.release,
        **case.asked,
    }


@pytest.mark.parametrize("name", CASES)
def test_cuda_role_installs_only_missing_packages(
    would_install: dict[str, list[str]], name: str
) -> None:
    assert sorted(would_install[name]) == sorted(CASES[name].names)


def test_cuda_role_installs_fabric_manager_of_the_driver_version(
    would_install: dict[str, list[str]],
) -> None:
    assert would_install[NEW_FABRIC][-1] == f"nvidia-fabricmanager-{NEW}"


@pytest.mark.parametrize("name", ["another CUDA", "that of CuPy"])
def test_cuda_role_pattern_of_nccl_matches_nccl_only(
    would_install: dict[str, list[str]], name: str
) -> None:
    """dnf and apt match a pattern against names and versions, as a shell would."""
    (pattern,) = (package for package in would_install[name] if package.startswith("libnccl"))
    named, equals, version = pattern.partition("=")
    cuda = "cuda13.0" if name == "another CUDA" else "cuda12.9"
    built = {f"libnccl{more}" for more in ("", "-devel", "-static", "2", "-dev")}
    found = {
        one for one in built if fnmatch.fnmatchcase(f"{one}{equals or '-'}2.28.9-1+{cuda}", pattern)
    }
    assert found == {named if equals else "libnccl"}
    assert not equals or version


def played(tmp_path: Path, *tasks: dict[str, Any]) -> str:
    """Run these tasks. Return Ansible's output."""
    play = {"hosts": "compute", "gather_facts": False, "tasks": [*tasks]}
    done = run_play(tmp_path, play, ("ctl", "node"), known={})
    assert done.returncode == 0, done.stdout
    return done.stdout


@pytest.mark.parametrize(("status", "count"), [(0, 1), (1, 0)], ids=["loaded", "refused"])
def test_new_driver_is_loaded_if_the_kernel_takes_it(
    tmp_path: Path, status: int, count: int
) -> None:
    """A reboot does the rest, so a refusal is neither a failure nor a change. The same goes for a
    driver that is loaded already.
    """
    program(tmp_path, "modprobe", f'echo "$@" >{tmp_path}/arguments; exit {status}')
    assert changes(tmp_path, "cuda", "load") == count
    assert (tmp_path / "arguments").read_text() == "--first-time nvidia\n"


def test_repository_of_nvidia_is_recorded_for_each_distribution() -> None:
    assert sorted(SOURCES) == sorted(RELEASES) == sorted(release.release for release in releases())
    oldest = {release: row.get("oldest_cuda", 0) for release, row in SOURCES.items()}
    assert oldest == {release.release: release.oldest_cuda for release in releases()}


@pytest.mark.parametrize("release", RELEASES)
def test_packages_come_from_nvidias_repository_or_a_mirror(tmp_path: Path, release: str) -> None:
    """The URL of the repository, and of the key that its signatures are checked with."""
    message = "{{ cuda_repository }} {{ cuda_repository_key }}"
    mirror = {"url": "http://here/cuda", "key": "http://here/key"}
    mirrors = {"the_projects": {}, "ours": {"nvidia": mirror}}
    found = {"loaded": "", "switches": 0, "installed": "580"}
    text = played(
        tmp_path,
        {"set_fact": {"ansible_facts": RELEASES[release], "clusterctl_release": release}},
        {"include_role": {"name": "cuda", "tasks_from": "cards"}, "vars": {"cuda_found": found}},
        *(
            {"debug": {"msg": message}, "vars": {"repositories_mirrors": mirror}}
            for mirror in mirrors.values()
        ),
    )
    theirs, ours = re.findall(r'"msg": "(.*)"', text)
    home = f"https://developer.download.nvidia.com/compute/cuda/repos/{SOURCES[release]['folder']}/x86_64"
    assert theirs == f"{home} {home}/{SOURCES[release]['key']}"
    assert ours == "http://here/cuda http://here/key"


@pytest.mark.parametrize("release", [name for name in RELEASES if name.startswith("rocky")])
def test_bundle_takes_nvidias_packages_with_the_same_key(tmp_path: Path, release: str) -> None:
    request = RepositoryRequest(
        distribution_of(release), tmp_path, print, software=a_spec("{dcgm: true}").software
    )
    home = f"https://developer.download.nvidia.com/compute/cuda/repos/{SOURCES[release]['folder']}/x86_64"
    assert request.read_sources()[-1]["keys"] == [f"{home}/{SOURCES[release]['key']}"]
    assert request.read_sources()[-1]["repositories"] == {"cuda": f"{home}/"}


def a_bus(folder: Path, *devices: tuple[str, str]) -> Path:
    """Create a PCI bus in sysfs with these devices (vendor, class)."""
    for number, (vendor, kind) in enumerate(devices):
        device = folder / f"0000:0{number}:00.0"
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
    return folder


NVIDIA = "0x10de"
INTEL = "0x8086"
CARD = "0x030200"
SOUND = "0x040300"
SWITCH = "0x068000"
VGA = "0x030000"


def facts(tmp_path: Path, devices: Path, loaded: str = "") -> dict[str, Any]:
    (tmp_path / "version").write_text(loaded)
    looking = {
        "devices": str(devices),
        "driver": str(tmp_path / "version"),
        "units": [str(tmp_path)],
    }
    text = played(
        tmp_path, {"nvidia_facts": looking, "register": "seen"}, {"debug": {"var": "seen"}}
    )
    found: dict[str, Any] = json.loads(re.findall(r"=> (\{\n.*?\n\})", text, re.DOTALL)[-1])["seen"]
    return {key: found[key] for key in ("cards", "switches", "loaded", "installed", "units")}


def test_nvidia_facts_counts_only_cards_and_switches(tmp_path: Path) -> None:
    bus = a_bus(
        tmp_path / "bus",
        (NVIDIA, CARD),
        (NVIDIA, SOUND),
        (NVIDIA, SWITCH),
        (INTEL, VGA),
        (NVIDIA, VGA),
    )
    (tmp_path / "nvidia-dcgm.service").touch()
    program(
        tmp_path,
        "modinfo",
        f'[ "$*" = "-F version -k {platform.release()} nvidia" ] && echo 580.95.05',
    )
    assert facts(tmp_path, bus) == {
        "cards": 2,
        "switches": 1,
        "loaded": "",
        "installed": "580.95.05",
        "units": ["nvidia-dcgm.service"],
    }


@pytest.mark.parametrize("there", [True, False])
def test_cuda_role_refuses_a_kernel_without_headers(tmp_path: Path, there: bool) -> None:
    program(
        tmp_path,
        "apt-cache",
        f'[ "$*" = "--quiet show linux-headers-{KERNEL}" ] && exit {100 - 100 * there}',
    )
    done = run_tasks(tmp_path, "cuda", "headers", facts={"kernel": KERNEL})
    assert (done.returncode == 0) is there, done.stdout
    assert ("node reboot node" in done.stdout) is not there


def test_nvidia_facts_of_a_loaded_driver_without_a_package(tmp_path: Path) -> None:
    program(tmp_path, "modinfo", "exit 1")
    said = (
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build  "
        "(root@host)\n"
    )
    found = facts(tmp_path, a_bus(tmp_path / "bus", (NVIDIA, VGA)), said)
    assert (found["loaded"], found["installed"]) == ("575.57.08", "575.57.08")


def a_spec(nvidia: str) -> ClusterSpec:
    return parse_spec(
        "version: 1\nname: demo\nprovider: {type: onprem, controller: a, hosts: {a: 10.0.0.1}}\n"
        f"partitions: [{{name: train, hosts: a}}]\nsoftware: {{nvidia: {nvidia}}}\n",
        "cluster.yaml",
    )


@pytest.mark.parametrize(
    ("release", "nvidia", "names", "stream"),
    [
        ("rocky-9", "{}", set(), None),
        (
            "rocky-9",
            '{driver: open, toolkit: "12.9", dcgm: true}',
            {
                *HEADERS,
                "nvidia-open",
                "nvidia-persistenced",
                "nvidia-fabricmanager",
                "cuda-toolkit-12-9",
                "datacenter-gpu-manager-4-cuda12",
            },
            "open-dkms",
        ),
        ("rocky-9", '{driver: proprietary, branch: "580"}', {"cuda-drivers"}, "580-dkms"),
        ("rocky-9", "{driver: proprietary}", {"cuda-drivers"}, "580-dkms"),
        ("rocky-9", '{driver: open, branch: "570"}', {"nvidia-fabric-manager"}, "570-open"),
        (
            "rocky-10",
            '{driver: open, branch: "580"}',
            {"nvidia-open-580.*", "nvidia-persistenced-580.*"},
            None,
        ),
        ("rocky-10", "{nccl: true}", {"libnccl-[0-9]*+cuda13.*"}, None),
        ("debian-12", "{driver: open, nccl: true}", {"nvidia-open", "libnccl2=*+cuda12.*"}, None),
        ("debian-12", '{driver: open, branch: "570"}', {"nvidia-fabricmanager-570"}, None),
    ],
)
def test_bundle_has_every_package_of_the_cuda_role(
    release: str, nvidia: str, names: set[str], stream: str | None
) -> None:
    distribution = distribution_of(release)
    asked = a_spec(nvidia).software
    more = set(package_names(distribution, asked)) - set(package_names(distribution))
    assert names <= more
    assert bool(names) == bool(more)
    assert not [name for name in more if "@" in name]
    assert nvidia_stream(distribution, asked) == stream


def test_proprietary_driver_is_the_last_branch_with_volta(tmp_path: Path) -> None:
    """From 590 on none of its drivers knows Maxwell, Pascal or Volta, and from 620 on there is
    none.
    """
    assert spec_variables(a_spec("{driver: proprietary}"), ["cuda"])["cuda_branch"] == "580"
    assert (
        spec_variables(a_spec('{driver: proprietary, branch: "590"}'), ["cuda"])["cuda_branch"]
        == "590"
    )
    assert "cuda_branch" not in spec_variables(a_spec("{driver: open}"), ["cuda"])
    with refused("driver-branch", SpecError, "620"):
        a_spec('{driver: proprietary, branch: "620"}')


def test_apt_preferences_keep_the_driver_branch(tmp_path: Path) -> None:
    """Asked of apt itself: all that the driver is made of has this branch, and all else is the
    newest.
    """
    text = nvidia_preference(
        distribution_of("debian-12"), a_spec('{driver: open, branch: "580"}').software
    )
    (tmp_path / "preferences").write_text(text)
    (tmp_path / "status").touch()
    (tmp_path / "lists" / "partial").mkdir(parents=True)
    driver = "nvidia-open cuda-drivers libcuda1 nvidia-kernel-open-dkms libnvidia-cfg1 libnvoptix1".split()
    packages = {
        (name, version) for name in driver for version in ("580.95.05-1", "590.48.01-1", "610.10-1")
    }
    packages |= {
        ("cuda-toolkit-12-9", "12.9.0-1"),
        ("cuda-toolkit-12-9", "12.9.1-1"),
        ("slurmd", "24.11-1"),
    }
    records = (
        f"Package: {name}\nVersion: {version}\nArchitecture: all\nMaintainer: x\nDescription: x\n"
        f"Filename: ./{name}_{version}.deb\nSize: 1\nSHA256: {'0' * 64}\n"
        for name, version in sorted(packages)
    )
    (tmp_path / "Packages").write_text("\n".join(records))
    (tmp_path / "sources.list").write_text(f"deb [trusted=yes] file:{tmp_path} ./\n")
    places = {
        "Etc::SourceList": "sources.list",
        "Etc::Preferences": "preferences",
        "State::status": "status",
    }
    places |= {"State::lists": "lists", "Cache": "cache"}
    places |= dict.fromkeys(("Etc::SourceParts", "Etc::PreferencesParts"), "no")
    options = [f"--option=Dir::{key}={tmp_path / place}" for key, place in places.items()]
    subprocess.run(["apt-get", "--quiet=2", *options, "update"], check=True)
    names = sorted({name for name, _ in packages})
    said = subprocess.run(
        ["apt-cache", *options, "policy", *names], check=True, capture_output=True, text=True
    )
    chosen = dict(re.findall(r"^(\S+):\n.*\n  Candidate: (\S+)$", said.stdout, re.MULTILINE))
    others = {"cuda-toolkit-12-9": "12.9.1-1", "slurmd": "24.11-1"}
    assert chosen == dict.fromkeys(driver, "580.95.05-1") | others
