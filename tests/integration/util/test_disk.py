"""Tests of state folders on full or unwritable disks: a clear error, no truncated files, and `down`
works.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.cluster.phases import PhaseResult, PhaseRunner
from clusterctl.errors import DiskError, LockedError, MachineError
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import ROOM, Workspace, write_atomic
from clusterctl.util.disk import disk_error, write_error_fix
from tests.support.disks import FAULTS, SmallDisk, small_disk
from tests.support.messages import codes, condition, refused, shows
from tests.support.verbs import Clusterctl

ROOT = str(Path(__file__).resolve().parents[3])


@pytest.fixture
def disk() -> Iterator[SmallDisk]:
    with small_disk() as one:
        yield one


@pytest.fixture
def workspace(disk: SmallDisk) -> Workspace:
    made = Workspace(disk.path / "demo")
    made.create()
    return made


def entry(number: int) -> JobEntry:
    return JobEntry(
        token=f"{number:08x}", name="j" * 60, user="hpc", submitted_at=1.0, remote_dir="/shared"
    )


@pytest.mark.parametrize("fault", FAULTS)
def test_create_and_write_on_a_full_disk_are_disk_errors(
    disk: SmallDisk, workspace: Workspace, fault: str
) -> None:
    workspace.spec.write_text("version: 1")
    disk.suffer(fault)
    with refused("disk-full/state", DiskError) as caught:
        workspace.create()
    assert caught.value.where == str(workspace.root)
    assert FAULTS[fault] in caught.value.why
    with refused("disk-full/state", DiskError) as caught:
        write_atomic(workspace.inventory, "{}")
    assert caught.value.where == str(workspace.inventory)
    assert FAULTS[fault] in caught.value.why


def test_begun_without_room_is_refused_at_the_start(disk: SmallDisk, workspace: Workspace) -> None:
    disk.fill(but=ROOM // 2)
    with refused("disk-full/state", DiskError), workspace.begun():
        pytest.fail("it would fail half-way")


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.EDQUOT, "quota"),
        (errno.EIO, "dmesg"),
        (errno.EROFS, "mount"),
        (errno.ENOSPC, "remove"),
    ],
)
def test_disk_error_has_the_fix_of_its_errno(number: int, fix: str, tmp_path: Path) -> None:
    for path in (tmp_path / "no" / "such" / "file", None):
        error = disk_error(OSError(number, os.strerror(number)), path)
        assert os.strerror(number) in error.why
        assert fix in error.fix


@pytest.mark.parametrize(
    ("number", "fix"),
    [
        (errno.ENOSPC, "remove"),
        (errno.EACCES, "permissions"),
        (errno.EPERM, "permissions"),
        (errno.ENOTDIR, "path"),
    ],
)
def test_write_error_has_the_fix_of_its_errno_alone(number: int, fix: str, tmp_path: Path) -> None:
    said = write_error_fix(OSError(number, os.strerror(number)), tmp_path / "file").partition("(")[
        0
    ]
    words = ["remove", "permissions", "path"]
    assert [word for word in words if word in said.replace(str(tmp_path), "")] == [fix]


def test_write_atomic_in_a_missing_folder_is_no_disk_error(tmp_path: Path) -> None:
    with refused("file-unwritable", MachineError) as caught:
        write_atomic(tmp_path / "missing" / "file", "text")
    assert not isinstance(caught.value, DiskError)


def test_write_atomic_on_a_full_disk_keeps_the_old_file(
    disk: SmallDisk, workspace: Workspace
) -> None:
    write_atomic(workspace.inventory, "old")
    before = sorted(os.listdir(workspace.root))
    disk.suffer("full")
    with pytest.raises(DiskError):
        write_atomic(workspace.inventory, "new" * 10000)
    assert workspace.inventory.read_text() == "old"
    assert sorted(os.listdir(workspace.root)) == before


def silent(_: str) -> None:
    return None


@pytest.mark.parametrize("fault", FAULTS)
def test_lock_of_a_cluster_works_on_a_full_disk(
    disk: SmallDisk, workspace: Workspace, fault: str
) -> None:
    with workspace.lock("up", wait_s=0, waiting=silent):
        pass
    disk.suffer(fault)
    with workspace.lock("down", wait_s=0, waiting=silent):
        for free in (False, True):
            if free:
                disk.recover()
            with pytest.raises(LockedError), workspace.lock("up", wait_s=0, waiting=silent):
                pytest.fail("it is held twice")


@pytest.mark.parametrize("fault", ["no-inodes", "read-only"])
def test_lock_of_a_new_cluster_on_a_full_disk_is_a_disk_error(disk: SmallDisk, fault: str) -> None:
    disk.suffer(fault)
    new = Workspace(disk.path / "new")
    with refused("disk-full/state", DiskError), new.lock("up", wait_s=0, waiting=silent):
        pass


def test_ledger_add_on_a_full_disk_writes_a_whole_line_or_none(
    disk: SmallDisk, workspace: Workspace
) -> None:
    """A disk accepts the part of a line that fits, and fails only at the next write."""
    ledger = Ledger(workspace.jobs)
    written = []
    disk.fill(but=8192)
    with refused("disk-full/state", DiskError):
        for number in range(1000):
            ledger.add(entry(number))
            written.append(entry(number))
    assert written
    assert Ledger(workspace.jobs).entries() == tuple(written)
    disk.recover()
    ledger.add(entry(1000))
    assert Ledger(workspace.jobs).entries() == (*written, entry(1000))


@pytest.mark.parametrize("fault", ["full", "read-only"])
def test_ledger_update_on_a_full_disk_keeps_the_value_in_memory(
    disk: SmallDisk, workspace: Workspace, fault: str
) -> None:
    ledger = Ledger(workspace.jobs)
    ledger.add(entry(1))
    disk.suffer(fault)
    for number in range(60):  # more than what is left of the file's last page
        ledger.update(entry(1), job_id="7", state=f"STATE-{number:0100}")
    assert ledger.refusal is not None
    assert FAULTS[fault] in ledger.refusal.why
    found = ledger.find("7")
    assert found is not None
    assert found.state is not None
    assert found.state.endswith("59")


@pytest.mark.parametrize("fault", FAULTS)
def test_phase_without_room_for_the_journal_is_done(
    disk: SmallDisk, workspace: Workspace, fault: str
) -> None:
    disk.suffer(fault)
    assert PhaseRunner(workspace=workspace).run("destroy", lambda _: PhaseResult("done")) == "done"


@pytest.mark.parametrize("fault", FAULTS)
def test_down_works_on_a_full_disk(
    disk: SmallDisk, workspace: Workspace, fault: str, tmp_path: Path
) -> None:
    workspace.lock_file.touch()  # `up` has held it
    disk.suffer(fault)
    on_full_disk = Clusterctl(disk.path, tmp_path)
    if fault == "read-only":
        failed = on_full_disk("-o", "json", "--cluster", "demo", "down", "-y", rc=1)
        assert codes(failed) == ["disk-full/state"]
        disk.recover()
    result = on_full_disk("--cluster", "demo", "down", "-y")
    assert shows(result.stderr, "works-on-a-copy") is (fault != "read-only")
    assert not workspace.root.exists()
    assert {path.name for path in disk.path.iterdir()} <= {".fill", ".demo.lock"}


@pytest.mark.parametrize("fault", FAULTS)
def test_up_on_a_full_disk_is_a_disk_error_and_list_works(
    disk: SmallDisk, fault: str, tmp_path: Path
) -> None:
    on_full_disk = Clusterctl(disk.path, tmp_path)
    disk.suffer(fault)
    failed = on_full_disk("-o", "json", "up", "-y", rc=1)
    (failure,) = failed.json["failures"]
    assert condition(failure) == "disk-full/state"
    assert FAULTS[fault] in failure["cause"]
    on_full_disk("list")
    assert {path.name for path in disk.path.iterdir()} <= {".fill", ".local.lock"}


@pytest.mark.parametrize("options", ["ro", "size=64k"])
def test_roomiest_temporary_folder_without_room_on_disk_is_in_memory(options: str) -> None:
    script = (
        "from clusterctl.util import process\n"
        "process.remove_stale_folders()\n"
        "with process.temporary_folder(process.roomiest_temporary_folder()) as folder: "
        "print(folder.parent)"
    )
    # This checkout may be in one of these folders.
    mount = (
        "[ -d $place ] || continue; mount -t tmpfs none $place\n"
        'case $here in $place/*) mkdir -p "$here"; mount -c --bind /proc/self/fd/9 "$here";; esac\n'
        f"mount -o remount,{options} $place"
    )
    mounts = (
        f"here=$1; shift; exec 9<$here; for place in /tmp /var/tmp /usr/tmp; do {mount}; done; "
        "cd /proc"
    )
    words = ["sh", "-ec", f'{mounts}; exec "$@"', "sh", ROOT, sys.executable, "-c", script]
    argv = ["unshare", "--mount", *words]
    env = {
        name: value for name, value in os.environ.items() if name not in {"TMPDIR", "TEMP", "TMP"}
    }
    result = subprocess.run(argv, capture_output=True, text=True, check=True, env=env)
    assert result.stdout == "/dev/shm\n"
