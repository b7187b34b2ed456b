"""The role shared_storage keeps existing folders and disks with data as they are."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import jinja2
import pytest

from clusterctl.util.assets import data_folder
from tests.support.plays import program, run_tasks
from tests.support.processes import as_root

pytestmark = pytest.mark.platform("rendered", "nfs")

# An entry of a table of partitions: Linux, from block 2048 on, 4096 blocks; then the table's end.
PARTITION = bytes([0, 0, 0, 0, 0x83, 0, 0, 0, 0, 8, 0, 0, 0, 16, 0, 0]) + bytes(48) + b"\x55\xaa"
ROLE = data_folder("ansible") / "roles/shared_storage"
SHARED = ROLE / "files/clusterctl-shared"


@pytest.mark.parametrize("mode", [0o2775, None])
def test_existing_shared_folder_keeps_its_mode(tmp_path: Path, mode: int | None) -> None:
    folder = tmp_path / "data"
    if mode is not None:
        folder.mkdir()
        folder.chmod(mode)
    variables = {"shared_storage_path": str(folder), "shared_storage_kind": "existing"}
    done = run_tasks(tmp_path, "shared_storage", "install", **variables)
    assert done.returncode == 0, done.stdout
    assert folder.stat().st_mode & 0o7777 == (mode or 0o755)


@pytest.mark.parametrize(
    ("name", "is_mounted"),
    [("mounted", True), ("with blank", True), ("bound", False), ("mount", False)],
)
def test_existing_folder_is_mounted_unless_the_kernel_has_it(
    tmp_path: Path, *, name: str, is_mounted: bool
) -> None:
    """Not if it is the root of another mount, such as a bind mount or a subvolume of btrfs."""
    table = tmp_path / "mountinfo"
    blank = f"{tmp_path}/with\\040blank"
    table.write_text(
        "22 1 8:1 / / rw - ext4 /dev/a rw\n"
        f"30 22 0:33 / {tmp_path}/mounted rw - nfs4 files:/a rw\n"
        f"31 22 0:34 / {blank} rw - nfs4 files:/b rw\n"
        f"32 22 8:1 {tmp_path}/bound /elsewhere rw - ext4 /dev/a rw\n"
    )
    (tmp_path / "bin").mkdir()
    real = shutil.which("findmnt")
    lists = f'shift; exec {real} --tab-file {table} "$@"'
    program(tmp_path, "findmnt", f"case $1 in --fstab) exit 0 ;; --kernel) {lists} ;; esac; exit 9")
    program(tmp_path, "systemctl", f'echo "$@" >>{tmp_path}/systemctl')
    variables = {"shared_storage_path": f"{tmp_path}/{name}", "shared_storage_kind": "existing"}
    done = run_tasks(tmp_path, "shared_storage", "mount_existing", **variables)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "systemctl").exists() != is_mounted


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A new, empty disk of the controller. Mounts are only recorded."""
    (tmp_path / "bin").mkdir()
    program(tmp_path, "mountpoint", "exit 1")
    program(tmp_path, "mount", f'echo "$@" >>{tmp_path}/mounted')
    disk = tmp_path / "google-shared"
    with disk.open("wb") as file:
        file.truncate(257 << 20)
    return disk


def mount(disk: Path) -> subprocess.CompletedProcess[str]:
    """Run the script of the role that mounts the disk at a boot of the controller."""
    env = {
        "PATH": f"{disk.parent}/bin:{os.environ['PATH']}:/usr/sbin",
        "CLUSTERCTL_DISKS": str(disk.parent),
    }
    argv = [SHARED, "shared", str(disk.parent / "shared")]
    return subprocess.run(argv, env=env, capture_output=True, text=True, check=False, timeout=60)


def uuid(disk: Path) -> str:
    argv = ["/usr/sbin/blkid", "-p", "-s", "UUID", "-o", "value", disk]
    return subprocess.run(argv, capture_output=True, text=True, check=True).stdout


def test_shared_storage_role_formats_an_empty_disk_once(disk: Path) -> None:
    done = mount(disk)
    assert done.returncode == 0, done.stderr
    made = uuid(disk)
    assert (
        disk.parent / "mounted"
    ).read_text() == f"-o noatime,discard {disk} {disk.parent}/shared\n"
    assert mount(disk).returncode == 0
    # An earlier cluster's files.
    assert uuid(disk) == made


@pytest.mark.parametrize("there", ["partitions", "swap", "ext2", "damaged ext4", "unknown"])
def test_shared_storage_role_does_not_format_a_disk_with_data(disk: Path, there: str) -> None:
    if there == "swap":
        subprocess.run(["/usr/sbin/mkswap", disk], capture_output=True, check=True)
    elif there == "ext2":
        subprocess.run(["/usr/sbin/mkfs.ext2", "-q", disk], check=True)
    elif there == "damaged ext4":  # its backups are there
        subprocess.run(["/usr/sbin/mkfs.ext4", "-q", "-b4096", disk], check=True)
        with disk.open("r+b") as file:
            file.write(bytes(1 << 20))
    else:
        at, data = (446, PARTITION) if there == "partitions" else (70_000, b"weights")
        with disk.open("r+b") as file:
            file.seek(at)
            file.write(data)
    before = disk.read_bytes()
    done = mount(disk)
    assert done.returncode == 1
    assert "not changed" in done.stderr
    assert disk.read_bytes() == before
    assert not (disk.parent / "mounted").exists()


def test_shared_storage_role_without_the_disk_fails_and_mounts_nothing(disk: Path) -> None:
    disk.unlink()
    done = mount(disk)
    assert done.returncode == 1
    assert f"the disk {disk}" in done.stderr
    assert not (disk.parent / "shared").exists()


# LOOP SCRIPT BY_ID PATH: boots of the controller, whose mounts nobody else sees.
BOOTS = """
set -eu
export CLUSTERCTL_DISKS=$3
"$2" shared "$4"
findmnt --noheadings --output SOURCE,FSTYPE "$4"
echo 0.5 >"$4/weights"
"$2" shared "$4"
findmnt --noheadings --output TARGET --source "$1" | wc --lines
umount "$4"
"$2" shared "$4"
cat "$4/weights"
umount "$4"
"""


def test_real_disk_is_formatted_once_and_mounted_at_each_boot(tmp_path: Path) -> None:
    """The test uses the kernel, blkid, mkfs, and a block device behind a link of udev, as at
    Google.
    """
    image = tmp_path / "image"
    by_id = tmp_path / "by-id"
    path = tmp_path / "shared"
    by_id.mkdir()
    with image.open("wb") as file:
        file.truncate(300 << 20)
    made = subprocess.run(
        [*as_root(), "losetup", "--find", "--show", image],
        capture_output=True,
        text=True,
        check=True,
    )
    loop = made.stdout.strip()
    (by_id / "google-shared").symlink_to(loop)
    try:
        argv = [
            *as_root(),
            "unshare",
            "--mount",
            "sh",
            "-c",
            BOOTS,
            "sh",
            loop,
            SHARED,
            by_id,
            path,
        ]
        done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=120)
    finally:
        subprocess.run([*as_root(), "losetup", "--detach", loop], check=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [loop, "ext4", "1", "0.5"]


def test_shared_storage_mount_unit_is_valid_for_systemd(tmp_path: Path) -> None:
    """The unit waits for the disk, which appears late during a boot."""
    template = (ROLE / "templates/clusterctl-shared.service.j2").read_text()
    said = {
        "shared_storage_disk": "shared",
        "shared_storage_path": "/shared",
        "ansible_managed": "a test",
    }
    text = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(template)  # noqa: S701 - no HTML
    unit = tmp_path / "clusterctl-shared.service"
    unit.write_text(text.render(said).replace("/usr/local/sbin/clusterctl-shared", str(SHARED)))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    escaped = subprocess.run(
        ["systemd-escape", "--path", "--suffix=device", "/dev/disk/by-id/google-shared"],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    assert f"After={escaped}" in unit.read_text().splitlines()


def test_shared_storage_remount_unit_is_valid_for_systemd(tmp_path: Path) -> None:
    template = (ROLE / "templates/clusterctl-mount.service.j2").read_text()
    said = {"shared_storage_path": "/srv/a-b", "ansible_managed": "a test"}
    text = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(template)  # noqa: S701 - no HTML
    unit = tmp_path / "clusterctl-mount.service"
    unit.write_text(text.render(said))
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
