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
from clusterctl.transport.get import Fetched, fetch
from clusterctl.transport.remote_incoming import Entry, link_into_place, make_places, open_unnamed
from clusterctl.transport.remote_open import open_file
from tests.support.disks import FAULTS, small_disk
from tests.support.here import LocalTransport
from tests.support.messages import refused as rejected
from tests.support.transfers import Cutting, content

MIB = 1 << 20


@pytest.fixture
def theirs(home: Path, data: Path) -> Path:
    """The folder of difficult files, on the cluster."""
    return data.rename(home / "data")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    return tmp_path / "got it"


def get(here: Path, *paths: str, transport: LocalTransport | None = None) -> Fetched:
    return fetch(transport or LocalTransport(), paths or ("data",), here)


def test_all_that_is_hard_arrives_as_it_is(theirs, here):
    done = get(here)
    assert content(here / "data") == content(theirs)
    assert done.sent_bytes == done.bytes > 3 * MIB


def test_what_is_here_is_not_fetched_again(theirs, here):
    get(here)
    (here / "data" / "large").chmod(0o600)
    (here / "data" / "sub" / "nothing").unlink()
    told: list[tuple[str, int, int]] = []
    again = fetch(LocalTransport(), ("data",), here, progress=lambda *args: told.append(args))
    assert again.sent_bytes == 0
    assert ("hashing", 3 * MIB, 3 * MIB) in told
    assert content(here / "data") == content(theirs)


def test_get_unchanged_files_are_not_read(theirs, here):
    get(here)
    told: list[tuple[str, int, int]] = []
    again = fetch(LocalTransport(), ("data",), here, progress=lambda *args: told.append(args))
    assert (again.sent_bytes, told) == (0, [])
    assert again.bytes > 3 * MIB
    assert content(here / "data") == content(theirs)


@pytest.mark.parametrize("side", ["here", "there"])
def test_get_touched_file_is_compared_by_its_hash(theirs, here, side):
    get(here)
    os.utime((here / "data" if side == "here" else theirs) / "large", (1, 1))
    assert get(here).sent_bytes == 0
    assert content(here / "data") == content(theirs)


def test_get_link_with_the_size_and_time_of_a_file_is_replaced(theirs, here, tmp_path):
    get(here)
    (here / "data" / "large").rename(tmp_path / "large")
    (here / "data" / "large").symlink_to(tmp_path / "large")
    assert get(here).sent_bytes == 3 * MIB
    assert content(here / "data") == content(theirs)


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


def test_fetch_local_file_without_permissions_is_replaced(theirs, here):
    (theirs / "sub").chmod(0o555)
    get(here)
    (theirs / "sub" / "more").write_text("more")
    (here / "data" / "large").chmod(0)
    with as_anybody():
        assert get(here).sent_bytes == 3 * MIB + len("more")
    assert content(here / "data") == content(theirs)


def test_folders_above_need_not_be_readable(theirs):
    """Users may often enter the parent folder of all homes, but not list it."""
    theirs.parent.chmod(0o300)
    with as_anybody():
        os.close(open_file(b"/", os.fsencode(theirs / "large").lstrip(b"/")))


def test_same_size_other_content_is_fetched(theirs, here):
    get(here)
    (here / "data" / "large").write_bytes(bytes(3 * MIB))
    assert get(here).sent_bytes == 3 * MIB
    assert content(here / "data") == content(theirs)


def test_a_broken_connection_is_gone_on_with(theirs, here):
    with pytest.raises(UnreachableError):
        get(here, transport=Cutting(2 * MIB))
    assert not (here / "data" / "large").exists()
    assert 0 < get(here).sent_bytes < 3 * MIB // 2
    assert content(here / "data") == content(theirs)


def test_fetch_partial_file_that_changed_starts_again(theirs, here):
    with pytest.raises(UnreachableError):
        get(here, transport=Cutting(2 * MIB))
    (theirs / "large").write_bytes(os.urandom(3 * MIB))
    assert get(here).sent_bytes > 3 * MIB
    assert (here / "data" / "large").read_bytes() == (theirs / "large").read_bytes()


def test_a_damaged_beginning_is_noticed(theirs, here):
    with pytest.raises(UnreachableError):
        get(here, transport=Cutting(2 * MIB))
    (partial,) = here.rglob(".clusterctl-*")
    partial.write_bytes(b"x" * MIB)
    with rejected("files-changed", TransferError, "data/large"):
        get(here)
    get(here)
    assert content(here / "data") == content(theirs)


def test_a_file_system_without_unnamed_files(theirs, here, monkeypatch):
    """For example NFS."""
    opened = os.open
    refused = []

    def refuse(path, flags, *more, **options):
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            refused.append(path)
            raise OSError(errno.EOPNOTSUPP, "Operation not supported")
        return opened(path, flags, *more, **options)

    monkeypatch.setattr(os, "open", refuse)
    get(here)
    assert refused
    assert content(here / "data") == content(theirs)


def test_receive_file_that_appeared_meanwhile_is_replaced(tmp_path):
    entry = Entry(b"file b25l %d %d 3 3 " % (0o640, 10**18))
    make_places(os.fsencode(tmp_path), [entry], follow=False)
    fd = open_unnamed(entry)
    os.write(fd, b"new")
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "one").write_text("another's")
    link_into_place(fd, entry)
    os.close(fd)
    assert content(tmp_path) == {"one": (b"new", 0o100640, 10**18)}


def test_two_at_once_to_one_place(theirs, here):
    with pytest.raises(UnreachableError):
        get(here, transport=Cutting(2 * MIB))
    (partial,) = here.rglob(".clusterctl-*")
    with partial.open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        get(here)
    assert content(here / "data") == content(theirs) | {
        partial.name: content(here / "data")[partial.name]
    }


def test_holes_stay_holes(home, here):
    with (home / "sparse").open("wb") as file:
        file.seek(64 * MIB)
        file.write(b"in the middle")
        file.truncate(80 * MIB)
    get(here, "sparse")
    assert (here / "sparse").stat().st_blocks * 512 < MIB
    assert (here / "sparse").read_bytes() == (home / "sparse").read_bytes()


def test_links_to_folders_pipes_and_several_at_once(home, theirs, here):
    os.mkfifo(theirs / "pipe")
    (home / "shortcut").symlink_to("data/sub")
    done = get(here, "shortcut", str(theirs / "sub" / "run.sh"), "data")
    assert done.skipped == ("data/pipe",)
    assert {path.name for path in here.iterdir()} == {"shortcut", "run.sh", "data"}
    assert (here / "shortcut" / "run.sh").read_bytes() == (theirs / "sub" / "run.sh").read_bytes()


def test_what_is_not_there_is_said(home, here):
    (home / "there").touch()
    with rejected("no-such-file", UsageError, "nope", "/neither"):
        get(here, "nope", "there", "/neither")
    assert not here.exists()


def test_a_ring_of_links_comes_as_it_is(theirs, here):
    (theirs / "ring").symlink_to("ring")
    get(here)
    assert content(here / "data") == content(theirs)


def test_what_can_not_be_written_is_said(theirs, here):
    here.write_text("a file")
    with rejected("files-unwritable", TransferError) as caught:
        get(here)
    assert caught.value.why == "File exists"


class Claiming(LocalTransport):
    """A cluster with one file, of 8 TiB."""

    def _here(self, argv):  # noqa: ARG002
        row = f"file {base64.b64encode(b'huge').decode()} {0o644} 0 {8 << 40} {8 << 40} "
        return ["sh", "-c", 'printf "%s\\n\\n" "$1"; exec cat >/dev/null', "sh", row]


@pytest.mark.parametrize("fault", ["no-inodes", "read-only"])
def test_a_disk_that_takes_nothing_is_said(theirs, fault):
    with small_disk(mib=40) as disk:
        disk.suffer(fault)
        with rejected("files-unwritable", TransferError, FAULTS[fault]):
            get(disk.path / "got")


def test_fetch_disk_too_small_fails_before_the_transfer(here):
    with rejected("no-room", TransferError, "8388624"):
        get(here, "huge", transport=Claiming())


@pytest.mark.parametrize("name", ["sub", "large"])
def test_a_link_of_ours_is_not_followed(theirs, here, tmp_path, name):
    """A malicious cluster may have made the link in an earlier answer, to write through it."""
    (here / "data").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (here / "data" / name).symlink_to(tmp_path / "elsewhere" / ("" if name == "sub" else "x"))
    if name == "sub":
        with rejected("files-unwritable", TransferError):
            get(here)
    else:
        get(here)
        assert content(here / "data") == content(theirs)
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_a_file_that_somebody_else_owns_is_fetched_too(home, here):
    (home / "common").mkdir()
    (home / "common" / "data").write_text("theirs")
    os.chown(home / "common" / "data", 4711, 4711)
    os.chown(home / "common", 4712, 4712)
    get(here, "common")
    assert (here / "common" / "data").read_text() == "theirs"
