"""Homes of jobs on the shared folder of released hosts are removed; homes of people are kept."""

from __future__ import annotations

import getpass
import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from clusterctl.errors import ClusterctlError
from clusterctl.providers.onprem.access import AccessError
from clusterctl.providers.onprem.provider import find_homes, remove_homes
from clusterctl.spec.providers.onprem import OnpremSettings

HERE = getpass.getuser()
UID = os.getuid()


class Here:
    """A login to this machine, as the account that runs the tests."""

    def trust(self, _: Sequence[str]) -> Mapping[str, ClusterctlError]:
        return {}

    def __init__(self, *, sudo: bool = True) -> None:
        self.sudo = sudo

    def run(self, host: str, argv: Sequence[str]) -> str:
        assert host == "head"
        return subprocess.run(argv, capture_output=True, text=True, check=True).stdout

    def root(self, host: str, argv: Sequence[str]) -> str:
        if not self.sudo:
            raise AccessError.of(host, "sudo-password", "sudo asks for a password", "use -K")
        return self.run(host, argv)


@pytest.fixture
def shared(tmp_path: Path) -> Path:
    """A shared folder with homes of a cluster user, of a local account, and of an unknown account."""
    for name in ("nobody-here", HERE, "stranger"):
        (tmp_path / "shared/home" / name / "clusterctl/jobs").mkdir(parents=True)
        (tmp_path / "shared/home" / name / "weights").write_text("0.5")
    (tmp_path / "shared/home/link").symlink_to(tmp_path / "shared/home/stranger")
    return tmp_path / "shared"


def settings(shared: Path, **more: str) -> OnpremSettings:
    said = {"type": "onprem", "controller": "head", "hosts": {"head": "10.0.0.1"}}
    return OnpremSettings.model_validate({**said, "shared": {"path": str(shared), **more}})


def test_find_homes_finds_homes_of_the_users(shared: Path) -> None:
    users = ["nobody-here", HERE, "link", "without-home"]
    (kept,) = find_homes(Here(), settings(shared), "lab", users)  # type: ignore[arg-type]
    assert kept.homes == {"nobody-here": UID, HERE: UID}
    assert f"{shared}/home on head" in kept.what
    assert kept.size_mib == 1
    without = find_homes(Here(sudo=False), settings(shared), "lab", users)  # type: ignore[arg-type]
    assert [(one.size_mib, one.homes) for one in without] == [(None, kept.homes)]
    assert find_homes(Here(), settings(shared), "lab", ["without-home"]) == ()  # type: ignore[arg-type]
    assert find_homes(Here(), settings(shared / "none"), "lab", users) == ()  # type: ignore[arg-type]


def test_find_homes_skips_an_nfs_server_of_the_user(shared: Path) -> None:
    on_nas = settings(shared, server="nas", export="/volume1")
    assert find_homes(Here(), on_nas, "lab", [HERE]) == ()  # type: ignore[arg-type]


def test_remove_homes_keeps_files_of_existing_accounts(shared: Path) -> None:
    """A local account existed before the cluster, so only a part of its home is from jobs."""
    (kept,) = find_homes(Here(), settings(shared), "lab", ["nobody-here", HERE])  # type: ignore[arg-type]
    remove_homes(Here(), settings(shared), kept)  # type: ignore[arg-type]
    assert {path.name for path in (shared / "home").iterdir()} == {HERE, "stranger", "link"}
    assert [path.name for path in (shared / "home" / HERE).iterdir()] == ["weights"]
    assert (shared / "home/stranger/weights").exists()
    remove_homes(Here(), settings(shared), kept)  # type: ignore[arg-type]  # done twice


def test_remove_homes_keeps_the_home_of_another_user(shared: Path) -> None:
    (kept,) = find_homes(Here(), settings(shared), "lab", ["nobody-here"])  # type: ignore[arg-type]
    other = kept.model_copy(update={"homes": {"nobody-here": UID + 1}})
    remove_homes(Here(), settings(shared), other)  # type: ignore[arg-type]
    assert (shared / "home/nobody-here/weights").exists()


def test_remove_homes_removes_an_empty_folder(tmp_path: Path) -> None:
    shared = tmp_path / "shared"
    (shared / "home/nobody-here").mkdir(parents=True)
    (kept,) = find_homes(Here(), settings(shared), "lab", ["nobody-here"])  # type: ignore[arg-type]
    remove_homes(Here(), settings(shared), kept)  # type: ignore[arg-type]
    assert not shared.exists()
