"""Commands that answer as on a cluster with Slurm 22.05, and a folder that ``place`` has built."""

from __future__ import annotations

import os
import shlex
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.wheelhouse import new_wheelhouse
from clusterctl.providers.existing.place import place
from clusterctl.providers.existing.site_description import SiteDescription
from clusterctl.util.assets import job_lock
from tests.support.local_transport import LocalTransport
from tests.support.wheels import a_wheel

VERSION = ".".join(map(str, sys.version_info[:3]))
# A login node whose own Python is too old, and which also has the Python of the tests.
SITE = SiteDescription(
    "24.11.5",
    "campus",
    "ada",
    "/home/ada",
    "/opt/slurm/bin",
    glibc="2.36",
    pythons={"/usr/bin/python3": "3.9.2", sys.executable: VERSION},
)

# The words of captures/slurm-22.05-no-accounting.txt.
SINFO = """\
case "$*" in
*-O*)
    for name in PARTITIONS; do
        echo "$name|30:00|10:00|1|fx1-c1|GRES|up|0/1/0/1|"
    done | sed '1s/|/DEFAULT|/'
    ;;
esac
"""
SBATCH = """\
echo "$*" >>CALLS
case "$*" in
ACCEPTED) echo "sbatch: Job 33 to start at 2026-11-27T06:59:54 using 1 processors on nodes c1" ;;
*) echo "allocation failure: Invalid account or account/partition combination specified" >&2; exit 1 ;;
esac
"""
Commands = Callable[..., Path]
Build = Callable[[Path], None]


@pytest.fixture
def commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Put commands first into PATH. Return the file of the arguments that sbatch was called
    with.
    """
    folder = tmp_path / "slurm+bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def write(
        *partitions: str,
        default: bool = True,
        accepted: str = "*",
        accounts: int = 0,
        gres: str = "(null)",
    ) -> Path:
        sinfo = SINFO.replace("PARTITIONS", " ".join(partitions)).replace("DEFAULT", "*" * default)
        sinfo = sinfo.replace("GRES", gres)
        associations = "".join(f"echo 'proj{number}||||'\n" for number in range(accounts))
        calls = tmp_path / "calls"
        sbatch = SBATCH.replace("CALLS", shlex.quote(str(calls))).replace("ACCEPTED", accepted)
        config = "echo 'ClusterName             = campus'\n"
        texts = {"sinfo": sinfo, "sbatch": sbatch, "sacctmgr": associations, "scontrol": config}
        texts["getconf"] = "echo glibc 2.36\n"
        for name in (*texts, "sacct", "srun"):
            (folder / name).write_text(f"#!/bin/sh\n{texts.get(name, 'exit 1')}")
            (folder / name).chmod(0o755)
        return calls

    return write


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "home").mkdir()
    return tmp_path / "home"


@pytest.fixture(scope="session")
def built_once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home whose folder `ours` ``place`` has built, and the cache with the wheel of it."""
    root = tmp_path_factory.mktemp("built")
    (root / "home").mkdir()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HOME", str(root / "home"))
        patch.setenv("XDG_CACHE_HOME", str(root / "cache"))
        node = NodePlatform(f"{sys.version_info[0]}.{sys.version_info[1]}", 28)
        with new_wheelhouse(job_lock(), node) as folder:
            a_wheel(folder, "first", "1.0")
        place(LocalTransport(), SITE, "~/ours", "a1b2c3")
    return root


@pytest.fixture
def wheel(built_once: Path, home: Path) -> None:
    """A wheel of a package `first`, instead of the packages of all jobs."""
    shutil.copytree(built_once / "cache", home.parent / "cache")


@pytest.fixture
def build(built_once: Path, wheel: None) -> Build:
    """`build(home / "ours")`: the folder as ``place`` would build it now, by a copy."""

    def copy(folder: Path) -> None:
        shutil.copytree(built_once / "home" / "ours", folder, symlinks=True)

    return copy
