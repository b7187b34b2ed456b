"""Tests of downloads: files are sent once, checked and resumed, and the cluster's list is not
trusted.
"""

from __future__ import annotations

import base64
import ctypes
import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from clusterctl.errors import TransferError, UnreachableError, UsageError
from clusterctl.transport.get import DownloadResult, fetch
from clusterctl.transport.remote_incoming import (
    IncomingEntry,
    link_into_place,
    make_places,
    open_unnamed,
)
from clusterctl.transport.remote_open import open_file
from clusterctl.util.confine import Confinement, LimitError
from tests.support.disks import FAULTS, small_disk
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused as rejected
from tests.support.transfers import Cutting, content

MIB = 1 << 20


@pytest.fixture
def remote_data(home: Path, data: Path) -> Path:
    """The folder of unusual files, on the cluster."""
    return data.rename(home / "data")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return tmp_path / "got it"


def get(target: Path, *paths: str, transport: LocalTransport | None = None) -> DownloadResult:
    return fetch(transport or LocalTransport(), paths or ("data",), target)


def test_get_keeps_names_links_modes_times_and_holes(remote_data, target):
    done = get(target)
    assert content(target / "data") == content(remote_data)
    assert done.sent_bytes == done.bytes > 3 * MIB


def test_get_unchanged_content_transfers_no_bytes(remote_data, target):
    get(target)
    (target / "data" / "large").chmod(0o600)
    (target / "data" / "sub" / "nothing").unlink()
    steps: list[tuple[str, int, int]] = []
    again = fetch(LocalTransport(), ("data",), target, progress=lambda *args: steps.append(args))
    assert again.sent_bytes == 0
    assert ("hashing", 3 * MIB, 3 * MIB) in steps
    assert content(target / "data") == content(remote_data)


def test_get_unchanged_files_are_not_read(remote_data, target):
    get(target)
    steps: list[tuple[str, int, int]] = []
    again = fetch(LocalTransport(), ("data",), target, progress=lambda *args: steps.append(args))
    assert (again.sent_bytes, steps) == (0, [])
    assert again.bytes > 3 * MIB
    assert content(target / "data") == content(remote_data)


@pytest.mark.parametrize("side", ["here", "there"])
def test_get_touched_file_is_compared_by_its_hash(remote_data, target, side):
    get(target)
    os.utime((target / "data" if side == "here" else remote_data) / "large", (1, 1))
    assert get(target).sent_bytes == 0
    assert content(target / "data") == content(remote_data)


def test_get_link_with_the_size_and_time_of_a_file_is_replaced(remote_data, target, tmp_path):
    get(target)
    (target / "data" / "large").rename(tmp_path / "large")
    (target / "data" / "large").symlink_to(tmp_path / "large")
    assert get(target).sent_bytes == 3 * MIB
    assert content(target / "data") == content(remote_data)


@contextmanager
def as_anybody() -> Iterator[None]:
    """Make file modes count for root as well, in this thread but not in the programs that it
    executes.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # capabilities(7), of this thread
    before = (ctypes.c_uint32 * 6)()
    assert libc.capget(header, before) == 0
    less = (ctypes.c_uint32 * 6)(*before)
    less[0] &= ~(1 << 1 | 1 << 2)  # effective: CAP_DAC_OVERRIDE, CAP_DAC_READ_SEARCH
    assert libc.capset(header, less) == 0
    try:
        yield
    finally:
        assert libc.capset(header, before) == 0


def test_fetch_local_file_without_permissions_is_replaced(remote_data, target):
    (remote_data / "sub").chmod(0o555)
    get(target)
    (remote_data / "sub" / "more").write_text("more")
    (target / "data" / "large").chmod(0)
    with as_anybody():
        assert get(target).sent_bytes == 3 * MIB + len("more")
    assert content(target / "data") == content(remote_data)


def test_get_does_not_read_parent_folders(remote_data):
    """Users may often enter the parent folder of all homes, but not list it."""
    remote_data.parent.chmod(0o300)
    with as_anybody():
        os.close(open_file(b"/", os.fsencode(remote_data / "large").lstrip(b"/")))


@pytest.fixture
def confined(target, monkeypatch):
    """This process gets files for an agent, which may write to the target."""
    for name, value in Confinement((str(target),)).environ.items():
        monkeypatch.setenv(name, value)


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize("name", [".git", "sub/.git", ".GIT", ".vscode"])
def test_get_of_an_agent_refuses_folders_that_programs_obey(home, target, name):
    config = home / "tree" / name / "config"
    config.parent.mkdir(parents=True)
    config.write_text("[core]\n")
    with rejected("agent-limit", LimitError):
        get(target, "tree")
    assert not (target / "tree").exists()


@pytest.mark.usefixtures("confined")
@pytest.mark.parametrize("name", [".mcp.json", ".envrc", "cluster.yaml"])
def test_get_of_an_agent_refuses_a_name_that_programs_obey(home, target, name):
    (home / "harmless").write_text("{}")
    with rejected("agent-limit", LimitError):
        fetch(LocalTransport(), ("harmless",), target / name, is_name=True)
    assert not (target / name).exists()


def test_get_takes_what_programs_obey_for_a_user(home, target):
    (home / "tree").mkdir()
    (home / "tree" / ".envrc").write_text("")
    assert get(target, "tree").files == 1


def test_get_replaces_a_file_of_the_same_size(remote_data, target):
    get(target)
    (target / "data" / "large").write_bytes(bytes(3 * MIB))
    assert get(target).sent_bytes == 3 * MIB
    assert content(target / "data") == content(remote_data)


def test_get_resumes_after_a_broken_connection(remote_data, target):
    with pytest.raises(UnreachableError):
        get(target, transport=Cutting(2 * MIB))
    assert not (target / "data" / "large").exists()
    assert 0 < get(target).sent_bytes < 3 * MIB // 2
    assert content(target / "data") == content(remote_data)


def test_fetch_partial_file_that_changed_starts_again(remote_data, target):
    with pytest.raises(UnreachableError):
        get(target, transport=Cutting(2 * MIB))
    (remote_data / "large").write_bytes(os.urandom(3 * MIB))
    assert get(target).sent_bytes > 3 * MIB
    assert (target / "data" / "large").read_bytes() == (remote_data / "large").read_bytes()


def test_get_detects_a_damaged_partial_file(remote_data, target):
    with pytest.raises(UnreachableError):
        get(target, transport=Cutting(2 * MIB))
    (partial,) = target.rglob(".clusterctl-*")
    partial.write_bytes(b"x" * MIB)
    with rejected("transfer-failed/changed", TransferError, "data/large"):
        get(target)
    get(target)
    assert content(target / "data") == content(remote_data)


def test_get_works_without_unnamed_temporary_files(remote_data, target, monkeypatch):
    """For example NFS."""
    opened = os.open
    refused = []

    def refuse(path, flags, *more, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(path)
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    get(target)
    assert refused
    assert content(target / "data") == content(remote_data)


def test_receive_file_that_appeared_meanwhile_is_replaced(tmp_path):
    entry = IncomingEntry(b"file b25l %d %d 3 3 " % (0o640, 10**18))
    make_places(os.fsencode(tmp_path), [entry], follow=False)
    fd = open_unnamed(entry)
    os.write(fd, b"new")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "one").write_text("another's")
    link_into_place(fd, entry)
    os.close(fd)
    assert content(tmp_path) == {"one": (b"new", 0o100640, 10**18)}


def test_get_leaves_the_partial_file_of_a_concurrent_transfer(remote_data, target):
    with pytest.raises(UnreachableError):
        get(target, transport=Cutting(2 * MIB))
    (partial,) = target.rglob(".clusterctl-*")
    with partial.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        get(target)
    assert content(target / "data") == content(remote_data) | {
        partial.name: content(target / "data")[partial.name]
    }


def test_get_keeps_holes_of_sparse_files(home, target):
    with (home / "sparse").open("wb") as file:
        file.seek(64 * MIB)
        file.write(b"in the middle")
        file.truncate(80 * MIB)
    get(target, "sparse")
    assert (target / "sparse").stat().st_blocks * 512 < MIB
    assert (target / "sparse").read_bytes() == (home / "sparse").read_bytes()


def test_get_follows_links_to_folders_and_skips_pipes(home, remote_data, target):
    os.mkfifo(remote_data / "pipe")
    (home / "shortcut").symlink_to("data/sub")
    done = get(target, "shortcut", str(remote_data / "sub" / "run.sh"), "data")
    assert done.skipped == ("data/pipe",)
    assert {path.name for path in target.iterdir()} == {"shortcut", "run.sh", "data"}
    assert (target / "shortcut" / "run.sh").read_bytes() == (
        remote_data / "sub" / "run.sh"
    ).read_bytes()


def test_get_missing_files_is_one_error(home, target):
    (home / "there").touch()
    with rejected("not-found/file", UsageError, "nope", "/neither"):
        get(target, "nope", "there", "/neither")
    assert not target.exists()


def test_get_keeps_a_symlink_to_itself(remote_data, target):
    (remote_data / "ring").symlink_to("ring")
    get(target)
    assert content(target / "data") == content(remote_data)


def test_get_to_an_unwritable_place_has_the_systems_message(remote_data, target):
    target.write_text("a file")
    with rejected("file-unwritable/here", TransferError) as caught:
        get(target)
    assert caught.value.why == "File exists"


class Claiming(LocalTransport):
    """A cluster that announces a file of 8 TiB."""

    def _local_command(self, argv):  # noqa: ARG002
        row = f"file {base64.b64encode(b'huge').decode()} {0o644} 0 {8 << 40} {8 << 40} "
        return ["sh", "-c", 'printf "%s\\n\\n" "$1"; exec cat >/dev/null', "sh", row]


@pytest.mark.parametrize("fault", ["no-inodes", "read-only"])
def test_get_to_a_full_or_read_only_disk_is_an_error(remote_data, fault):
    with small_disk(mib=40) as disk:
        disk.suffer(fault)
        with rejected("file-unwritable/here", TransferError, FAULTS[fault]):
            get(disk.path / "got")


def test_fetch_disk_too_small_fails_before_the_transfer(target):
    with rejected("disk-full/host", TransferError, "8388624"):
        get(target, "huge", transport=Claiming())


@pytest.mark.parametrize("name", ["sub", "large"])
def test_get_does_not_write_through_local_symlinks(remote_data, target, tmp_path, name):
    """A malicious cluster may have made the link in an earlier answer, to write through it."""
    (target / "data").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (target / "data" / name).symlink_to(tmp_path / "elsewhere" / ("" if name == "sub" else "x"))
    if name == "sub":
        with rejected("file-unwritable/here", TransferError):
            get(target)
    else:
        get(target)
        assert content(target / "data") == content(remote_data)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_get_fetches_files_of_other_owners(home, target):
    (home / "common").mkdir()
    (home / "common" / "data").write_text("theirs")
    os.chown(home / "common" / "data", 4711, 4711)
    os.chown(home / "common", 4712, 4712)
    get(target, "common")
    assert (target / "common" / "data").read_text() == "theirs"
