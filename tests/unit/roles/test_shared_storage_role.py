"""The role shared_storage: a folder that people share already stays as they have it."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from clusterctl.util.assets import asset
from tests.support.plays import program, run_tasks

# An entry of a table of partitions: Linux, from block 2048 on, 4096 blocks; then the table's end.
PARTITION = bytes([0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0]) + bytes(48) + b"\x55\xaa"
SHARED = asset("ansible") / "roles/shared_storage/files/clusterctl-shared"


def mode_after_install(tmp_path: Path, folder: Path) -> int:
    done = run_tasks(
        tmp_path,
        "shared_storage",
        "install",
        shared_storage_path=str(folder),
        shared_storage_kind="existing",
    )
    assert done.returncode == 0, done.stdout
    return folder.stat().st_mode & 0o7777


def test_a_folder_that_is_there_keeps_its_mode(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o2775)
    assert mode_after_install(tmp_path, folder) == 0o2775


def test_one_that_is_missing_is_made(tmp_path: Path) -> None:
    assert mode_after_install(tmp_path, tmp_path / "shared") == 0o755


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A new disk of the controller, which is zero; to mount it is only written down."""
    (tmp_path / "bin").mkdir()
    program(tmp_path, "mountpoint", "exit 1")
    program(tmp_path, "mount", f'echo "$@" >>{tmp_path}/mounted')
    disk = tmp_path / "google-shared"
    with disk.open("wb") as file:
        file.truncate(16 << 20)
    return disk


def mount(disk: Path) -> subprocess.CompletedProcess[str]:
    """A boot of the controller."""
    env = {"PATH": f"{disk.parent}/bin:{os.environ['PATH']}:/usr/sbin", "CLUSTERCTL_DISKS": str(disk.parent)}
    argv = [SHARED, "shared", str(disk.parent / "shared")]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)


def uuid(disk: Path) -> str:
    argv = ["/usr/sbin/blkid", "-p", "-s", "UUID", "-o", "value", disk]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_a_new_disk_gets_a_file_system_once(disk: Path) -> None:
    done = mount(disk)
    assert done.returncode == 0, done.stderr
    made = uuid(disk)
    assert (disk.parent / "mounted").read_text() == f"-o noatime,discard {disk} {disk.parent}/shared\n"
    assert mount(disk).returncode == 0
    assert uuid(disk) == made, "an earlier cluster's files"


@pytest.mark.parametrize("there", ["partitions", "swap", "unknown"])
def test_a_disk_with_anything_else_is_left_alone(disk: Path, there: str) -> None:
    if there == "swap":
        subprocess.run(["/usr/sbin/mkswap", disk], capture_output=True, check=True)
    else:
        at, data = (446, PARTITION) if there == "partitions" else (70_000, b"weights")
        with disk.open("r+b") as file:
            file.seek(at)
            file.write(data)
    before = disk.read_bytes()
    done = mount(disk)
    assert done.returncode == 1
    assert "left as it is" in done.stderr
    assert disk.read_bytes() == before
    assert not (disk.parent / "mounted").exists()


def test_without_the_disk_nothing_is_mounted(disk: Path) -> None:
    disk.unlink()
    done = mount(disk)
    assert done.returncode == 1
    assert f"should have the disk {disk}" in done.stderr
    assert not (disk.parent / "shared").exists()
