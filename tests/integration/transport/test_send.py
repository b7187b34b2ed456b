"""Tests of uploads: files are sent once, appear complete or not at all, and are resumed."""

from __future__ import annotations

import _thread
import errno
import fcntl
import hashlib
import io
import json
import os
import shutil
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import (
    TransferError,
    TransportError,
    UnreachableError,
    UsageError,
)
from clusterctl.spec.names import FOLDER
from clusterctl.transport import remote_content, remote_incoming, remote_open, remote_receive, tree
from clusterctl.transport.base import remote_argv
from clusterctl.transport.put import (
    Upload,
    UploadResult,
    archive_of,
    archives_of,
    store_of,
)
from clusterctl.transport.remote_content import HEADER, line_of
from clusterctl.transport.remote_incoming import Incoming, IncomingEntry, make_folder, receive
from clusterctl.transport.remote_receive import SWEEP_EVERY_S, UNUSED_S
from clusterctl.transport.tree import Item, ItemKind, hash_items, list_items
from clusterctl.util.assets import tree_files
from tests.support.disks import small_disk
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused as rejected
from tests.support.transfers import Cutting, content

STORE = store_of(FOLDER)
MIB = 1 << 20


def send(data: Path, transport: LocalTransport | None = None) -> object:
    return Upload(transport or LocalTransport()).into(list_items([data])[0], "in to")


def test_upload_keeps_names_links_modes_times_and_holes(home, data):
    sent = Upload(LocalTransport()).into(list_items([data])[0], "in to")
    assert sent.folder == str(home / "in to")
    assert content(home / "in to" / "data") == content(data)
    assert sent.sent_bytes == sent.bytes > 3 * MIB


def test_upload_unchanged_content_transfers_no_bytes(home, data):
    send(data)
    (home / "in to" / "data" / "sub" / "nothing").write_text("other")
    (home / "in to" / "data" / "large").chmod(0o600)
    (home / "in to" / "data" / "theirs").write_text("kept")
    sent = Upload(LocalTransport()).into(list_items([data])[0], "in to")
    assert sent.sent_bytes == 0
    (home / "in to" / "data" / "theirs").unlink()
    os.utime(home / "in to" / "data", ns=(1, data.stat().st_mtime_ns))
    assert content(home / "in to" / "data") == content(data)


def test_put_unchanged_files_are_not_read(home, data):
    send(data)
    target = home / "in to" / "data" / "large"
    os.utime(target, ns=(1, target.stat().st_mtime_ns))
    steps: list[tuple[str, int, int]] = []
    items = list_items([data])[0]
    sent = Upload(LocalTransport(), lambda *args: steps.append(args)).into(items, "in to")
    assert sent.sent_bytes == 0
    assert "hashing" not in {activity for activity, _, _ in steps}
    # Sites remove files that nobody has used for long.
    assert target.stat().st_atime > 1
    assert content(home / "in to" / "data") == content(data)


@pytest.mark.parametrize("side", ["here", "there"])
def test_put_touched_file_is_compared_by_its_hash(home, data, side):
    send(data)
    os.utime((data if side == "here" else home / "in to" / "data") / "large", (1, 1))
    assert Upload(LocalTransport()).into(list_items([data])[0], "in to").sent_bytes == 0
    assert content(home / "in to" / "data") == content(data)


def test_upload_replaces_a_file_of_the_same_size(home, data):
    send(data)
    target = home / "in to" / "data" / "large"
    target.write_bytes(bytes(3 * MIB))
    assert Upload(LocalTransport()).into(list_items([data])[0], "in to").sent_bytes == 3 * MIB
    assert target.read_bytes() == (data / "large").read_bytes()


def test_upload_resumes_after_a_broken_connection(home, data):
    with pytest.raises(UnreachableError):
        send(data, Cutting(2 * MIB))
    assert not (home / "in to" / "data" / "large").exists()
    sent = Upload(LocalTransport()).into(list_items([data])[0], "in to")
    assert 0 < sent.sent_bytes < 3 * MIB // 2
    assert content(home / "in to" / "data") == content(data)


def test_upload_rejects_a_partial_file_with_other_content(home, data):
    with pytest.raises(UnreachableError):
        send(data, Cutting(2 * MIB))
    (partial,) = (home / "in to").rglob(".clusterctl-*")
    partial.write_bytes(b"x" * MIB)
    with rejected("transfer-failed/changed", TransferError, "data/large"):
        send(data)
    send(data)
    assert content(home / "in to" / "data") == content(data)


def test_upload_of_a_file_that_changes_is_files_changed(home, data):
    items, _ = list_items([data])
    (data / "large").write_bytes(b"shorter now")
    with (data / "sub" / "run.sh").open("a") as file:  # its beginning is what it was
        file.write("more\n")
    with rejected("transfer-failed/changed", TransferError, "data/large", "1 more"):
        Upload(LocalTransport()).into(items, "in to")
    assert not (home / "in to" / "data" / "sub" / "run.sh").exists()


def new_folder(items: Sequence[Item]) -> UploadResult:
    files = [item for item in items if item.kind is ItemKind.FILE]
    return Upload(LocalTransport()).new_folder(
        items, hash_items(files), "jobs/x", store=STORE, ours={}
    )


@pytest.mark.parametrize("moment", ["before it is hashed", "before it is sent"])
@pytest.mark.parametrize("size", [0, 10, 3 * MIB])
def test_job_has_the_listed_part_of_a_file_that_grows(home, tmp_path, moment, size):
    log = tmp_path / "project" / "submit.log"
    log.parent.mkdir()
    listed = os.urandom(size)
    log.write_bytes(listed)
    items, _ = list_items([log.parent])

    def grow(*_: object) -> None:
        with log.open("ab") as file:
            file.write(b"submitted job 7\n")

    if moment == "before it is hashed":
        grow()
        sent = new_folder(items)
    else:
        hashes = hash_items([item for item in items if item.kind is ItemKind.FILE])
        grow()
        sent = Upload(LocalTransport()).new_folder(items, hashes, "jobs/x", store=STORE, ours={})
    assert (home / "jobs" / "x" / "project" / "submit.log").read_bytes() == listed
    assert sent.grown == ("project/submit.log",)


@pytest.mark.parametrize("change", ["rewritten", "shorter"])
def test_job_has_no_part_of_a_file_that_is_rewritten(home, tmp_path, change):
    data = tmp_path / "project" / "data"
    data.parent.mkdir()
    data.write_bytes(b"a" * 100)
    items, _ = list_items([data.parent])
    hashes = hash_items([item for item in items if item.kind is ItemKind.FILE])
    data.write_bytes(b"b" * (100 if change == "rewritten" else 10))
    with rejected("transfer-failed/changed", TransferError, "project/data"):
        Upload(LocalTransport()).new_folder(items, hashes, "jobs/x", store=STORE, ours={})
    assert not (home / "jobs" / "x").exists()


def test_upload_keeps_holes_of_sparse_files(home, tmp_path):
    sparse = tmp_path / "sparse"
    with sparse.open("wb") as file:
        file.seek(64 * MIB)
        file.write(b"end")
        file.truncate(80 * MIB)
    send(sparse)
    arrived = home / "in to" / "sparse"
    assert (
        hashlib.sha256(arrived.read_bytes()).digest()
        == hashlib.sha256(sparse.read_bytes()).digest()
    )
    assert arrived.stat().st_blocks * 512 < 8 * MIB


def test_upload_to_an_unwritable_place_has_the_systems_message(home, data):
    (home / "in to").write_text("a file")
    with pytest.raises(TransferError) as caught:
        send(data)
    assert "in to" in caught.value.why
    assert "File exists" in caught.value.why


@pytest.mark.parametrize("fault", ["full", "read-only"])
@pytest.mark.parametrize("way", ["store", "folder"])
def test_upload_to_a_full_or_read_only_disk_is_an_error(fault, way, tmp_path, monkeypatch):
    (tmp_path / "file").write_bytes(os.urandom(MIB))
    with small_disk() as disk:
        monkeypatch.setenv("HOME", str(disk.path))
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
        disk.suffer(fault)
        ways = {
            "store": lambda: Upload(LocalTransport()).to_store([tmp_path / "file"], store=STORE),
            "folder": lambda: send(tmp_path / "file"),
        }
        with pytest.raises(TransferError) as caught:
            ways[way]()
        assert (
            os.strerror(errno.EROFS if fault == "read-only" else errno.ENOSPC) in caught.value.why
        )
        assert not caught.value.why.startswith("b'")


def test_upload_names_a_folder_in_the_place_of_a_file(home, data):
    (home / "in to" / "data" / "large").mkdir(parents=True)
    with pytest.raises(TransferError) as caught:
        send(data)
    assert "'in to/data/large': a folder has the name of this file" in caught.value.why


def test_list_items_refuses_two_paths_with_the_same_name(tmp_path):
    for name in "ab":
        (tmp_path / name / "x").mkdir(parents=True)
    with rejected("option-invalid/name-twice", UsageError):
        list_items([tmp_path / "a" / "x", tmp_path / "b" / "x"])


def test_list_items_names_missing_files(tmp_path):
    with pytest.raises(UsageError) as caught:
        list_items([tmp_path / "nope", tmp_path / "neither"])
    assert f"nope: {os.strerror(errno.ENOENT)}" in caught.value.why
    assert "neither" in caught.value.why


def test_list_items_skips_pipes_and_devices(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    items, others = list_items([tmp_path])
    assert [item.kind for item in items] == [ItemKind.FOLDER]
    assert others == (tmp_path / "pipe",)


# a new folder, by way of the store:


def make(
    data: Path,
    name: str = "jobs/one",
    *,
    transport: LocalTransport | None = None,
    code: Path | None = None,
):
    items = [
        Item.of(str(path.relative_to(data)), path, path.lstat()) for path in sorted(data.rglob("*"))
    ]
    hashes = hash_items([item for item in items if item.kind is ItemKind.FILE])
    items.append(Item("v1", ItemKind.ARCHIVE, code or data / "sub", mode=0, mtime_ns=0))
    upload = Upload(transport or LocalTransport())
    return upload.new_folder(items, hashes, name, store=STORE, ours={"our own": b"\xff\n"})


def test_make_folder_copies_files_from_the_store(home, data):
    modes = {"sub": 0o550, "sub/run.sh": 0o555, "large": 0o640, "small": 0o600}
    (data / "small").write_text("x")
    for name in reversed(modes):
        (data / name).chmod(modes[name])
    sent = make(data)
    made = home / "jobs" / "one"
    assert sent.folder == str(made)
    assert (made / "our own").read_bytes() == b"\xff\n"
    # The job may write into its folders.
    assert {name: (made / name).stat().st_mode & 0o777 for name in modes} == modes | {"sub": 0o750}
    assert made.stat().st_mode & 0o777 == 0o700
    (made / "our own").unlink()
    assert {name: what for name, (what, *_) in content(made).items()} == {
        name: what for name, (what, *_) in content(data).items()
    }


def test_send_stored_files_again_sends_no_bytes(home, data):
    """Jobs that write to their copies do not change the store."""
    make(data)
    for path in (home / "jobs" / "one").rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.write_text("spoiled by a job")
    assert make(data, "jobs/two").sent_bytes == 0
    assert (home / "jobs" / "two" / "large").read_bytes() == (data / "large").read_bytes()
    assert all(path.stat().st_mode & 0o222 == 0 for path in stored(home))


def stored(home: Path) -> list[Path]:
    return [path for path in (home / STORE).rglob("*") if len(path.name) == 64]


def test_send_broken_connection_keeps_arrived_files_only(home, data):
    with pytest.raises(UnreachableError):
        make(data, transport=Cutting(2 * MIB))
    assert not (home / "jobs").exists()
    assert make(data).sent_bytes < 3 * MIB // 2


@pytest.mark.parametrize("size", [10, 3 * MIB])
def test_make_folder_of_a_changing_file_leaves_no_folder(home, data, size):
    """The record of a job names the content that its small files have, too."""
    (data / "large").write_bytes(os.urandom(size))
    items = [Item.of("large", data / "large", (data / "large").lstat())]
    hashes = hash_items(items)
    (data / "large").write_bytes(bytes(size))
    with rejected("transfer-failed/changed", TransferError):
        Upload(LocalTransport()).new_folder(items, hashes, "jobs/one", store=STORE, ours={})
    assert not (home / "jobs").exists()
    assert stored(home) == []


@pytest.mark.parametrize("end", ["kill -KILL $$", "kill -XCPU $$", "echo Killed >&2; exit 137"])
def test_send_to_program_that_is_killed_does_not_blame_the_disk(
    home, data, tmp_path, monkeypatch, end
):
    """A login node kills programs that use much CPU time. There may be a shell above, which says
    so.
    """
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python3").write_text(f"#!/bin/sh\nhead -c 1000 >/dev/null\n{end}\n")
    (tmp_path / "bin/python3").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    with rejected("transfer-failed/killed", TransferError) as caught:
        make(data)
    assert "disk space" not in caught.value.fix


def test_damaged_file_of_the_store_is_replaced(home, data):
    make(data)
    stored_before = stored(home)
    for path in stored_before:
        before = path.stat()
        path.chmod(0o600)
        path.write_bytes(b"#" * before.st_size if before.st_size < MIB else b"")
        path.chmod(before.st_mode)
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))  # nothing but the content tells
    with rejected("file-unwritable/remote", TransferError) as caught:
        make(data, "jobs/two")
    # The truncated large file is sent again at once; the empty file is unchanged.
    assert f"{len(stored_before) - 2}" in caught.value.why
    make(data, "jobs/two")
    assert not list((home / "jobs").glob(".*"))
    assert (home / "jobs" / "two" / "large").read_bytes() == (data / "large").read_bytes()


def large(home: Path) -> Path:
    (found,) = [path for path in stored(home) if path.stat().st_size == 3 * MIB]
    return found


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_changed_large_file_of_the_store_is_sent_again(home, data, mode):
    make(data)
    path = large(home)
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(2 * MIB)
        byte = file.read(1)
        file.seek(2 * MIB)
        file.write(bytes([byte[0] ^ 1]))
    path.chmod(mode)
    assert make(data, "jobs/two").sent_bytes == 3 * MIB
    for right in (path, home / "jobs" / "two" / "large"):
        assert right.read_bytes() == (data / "large").read_bytes()
    assert stat.S_IMODE(path.stat().st_mode) == 0o400


def test_send_stored_file_touched_is_not_sent_again(home, data):
    make(data)
    before = large(home).stat()
    large(home).chmod(0o644)
    large(home).touch()
    assert make(data, "jobs/two").sent_bytes == 0
    after = large(home).stat()
    assert (after.st_mode, after.st_mtime_ns) == (before.st_mode, before.st_mtime_ns)


# damage that jobs, which run as the same user, do to the store's files:


class Hasty(LocalTransport):
    def _local_command(self, argv: Sequence[str]) -> list[str]:
        *words, arguments = argv
        return [*words, json.dumps([*json.loads(arguments), 0])]


def test_lock_that_a_job_holds_is_named(home, data):
    make(data)
    lock = home / STORE / "lock"
    with lock.open("a") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        with rejected("in-use/files", TransferError) as caught:
            make(data, "jobs/two", transport=Hasty())
        assert repr(str(lock)) in caught.value.why
        lock.unlink()  # as the fix says
        make(data, "jobs/two", transport=Hasty())
    make(data, "jobs/three")


def test_lock_sends_bytes_while_it_waits(home):
    path = home / "lock"
    held = remote_open.open_own(os.fsencode(path))
    fcntl.flock(held, fcntl.LOCK_EX)

    class Releasing(remote_open.KeepAlive):
        def __call__(self) -> None:
            if not self.sign:
                os.close(held)
            self.sign += b"."

    signs = Releasing(None, b"")
    lock = remote_open.lock(os.fsencode(path), fcntl.LOCK_SH, 60, signs)
    assert signs.sign
    assert remote_open.is_same_file(os.fsencode(path), lock)
    os.close(lock)


@pytest.mark.parametrize(
    ("name", "other"),
    [
        *(("lock", "pipe"), ("swept", "link"), ("partial", "folder")),
        *(("xx", "link"), ("partial/HASH", "pipe"), ("xx/HASH", "folder")),
    ],
)
def test_store_file_replaced_by_a_job_is_restored(home, data, tmp_path, name, other):
    victim = tmp_path / "victim"
    victim.write_text("theirs")
    make(data)
    content_hash = large(home).name
    os.utime(home / STORE / "swept", (1, 1))
    place = home / STORE / name.replace("HASH", content_hash).replace("xx", content_hash[:2])
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    if name == "partial/HASH":
        large(home).unlink()
    if other == "pipe":
        os.mkfifo(place)
    elif other == "link":
        place.symlink_to(victim)
    else:
        place.mkdir()
    os.utime(place, (1, 1), follow_symlinks=False)
    make(data, "jobs/two")
    assert (home / "jobs" / "two" / "large").read_bytes() == (data / "large").read_bytes()
    assert victim.read_text() == "theirs"
    assert not place.is_symlink()


def test_sweep_removes_foreign_entries_and_follows_no_link(home, data, tmp_path):
    make(data)
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (home / "jobs" / ".link.incomplete").symlink_to(tmp_path / "theirs")
    (home / "jobs" / ".file.incomplete").touch()
    folder = large(home).parent / "folder"
    (folder / "in it").mkdir(parents=True)
    for path in (folder, home / STORE / "swept"):
        os.utime(path, (1, 1))
    make(data, "jobs/two")
    assert not folder.exists()
    assert {path.name for path in (home / "jobs").iterdir()} == {"one", "two"}
    assert (tmp_path / "theirs" / "file").exists()


def test_archive_is_unpacked_once_and_kept_for_a_year(home, data, tmp_path):
    make(data, code=data)
    archive = home / archives_of(FOLDER) / "v1"
    whole = {str(path.relative_to(data.parent)): path.read_bytes() for path in tree_files(data)}
    assert {
        str(path.relative_to(archive)): path.read_bytes() for path in tree_files(archive)
    } == whole
    for days, stays in ((364, True), (366, False)):
        (archive / "mark").touch()
        for path, at in ((archive, time.time() - days * 86400), (home / STORE / "swept", 1)):
            os.utime(path, (at, at))
        make(data, f"jobs/{days}", code=data)
        assert (archive / "mark").exists() is stays
    # A file in the place of a folder is replaced.
    shutil.rmtree(archive)
    archive.symlink_to(tmp_path)
    make(data, "jobs/last", code=data)
    assert not archive.is_symlink()
    assert (archive / "data" / "large").read_bytes() == (data / "large").read_bytes()


def test_send_archive_stored_meanwhile_is_accepted(home, tmp_path, monkeypatch):
    final, partial = (home / name for name in ("final", "partial"))
    entry = IncomingEntry(line_of("archive", b"v1").encode()[:-1])
    entry.final = bytes(final)
    entry.partial = bytes(partial)
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "a.py").write_text("new")
    archive = archive_of(tmp_path / "code")
    (final / "code").mkdir(parents=True)
    (final / "code" / "a.py").write_text("theirs")
    pieces = [HEADER.pack(len(archive)) + archive]
    remote_receive.receive_archive(entry, Incoming(iter(pieces)))
    assert (final / "code" / "a.py").read_text() == "theirs"
    assert [path.name for path in home.iterdir()] == ["final"]
    shutil.rmtree(final)
    monkeypatch.setattr(remote_receive.os, "spawnlp", lambda *_: (final / "no such").mkdir())
    with pytest.raises(FileNotFoundError):
        remote_receive.receive_archive(entry, Incoming(iter(pieces)))
    assert list(home.iterdir()) == []


def test_eight_concurrent_uploads_succeed(home, data):
    failed: list[BaseException] = []

    def one(number: int) -> None:
        try:
            make(data, f"jobs/{number}")
        except BaseException as exc:  # whatever it is, the test must see it
            failed.append(exc)

    threads = [threading.Thread(target=one, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    for number in range(8):
        assert (home / "jobs" / str(number) / "large").read_bytes() == (data / "large").read_bytes()
    assert list((home / STORE / "partial").iterdir()) == []


def test_open_partial_file_renamed_meanwhile_is_not_reused(home, monkeypatch):
    """Two transfers of equal content: the second opens the partial file just before the first
    renames it.
    """
    partial = home / "partial"
    final = home / "final"
    partial.write_bytes(b"whole and right")
    lock = fcntl.flock

    def rename_first(fd: int, how: int) -> None:
        partial.rename(final)
        lock(fd, how)

    monkeypatch.setattr(remote_incoming.fcntl, "flock", rename_first)
    assert remote_incoming.open_partial(os.fsencode(partial)) is None
    assert final.read_bytes() == b"whole and right"


def test_hash_of_file_shortened_meanwhile_does_not_match(tmp_path, monkeypatch):
    """A job rewrote the file while the cluster hashed it, and zeros filled the missing bytes."""
    path = tmp_path / "log"
    size = 4096
    real = remote_content.hash_of
    path.write_bytes(b"x" * size)

    def hash_and_shorten(*args: Any) -> Any:
        found = real(*args)
        path.write_bytes(b"short")
        return found

    monkeypatch.setattr(remote_content, "hash_of", hash_and_shorten)
    monkeypatch.setattr(remote_content, "SETTLED_S", -1e9)  # as if that were long ago
    out = io.BytesIO()
    with path.open("rb") as file:
        remote_content.send_file(out, file.fileno(), 0, size, "0" * 64)
    monkeypatch.undo()
    out.seek(0)
    coming = Incoming(iter([out.read()]))
    assert coming.read_header(size, has_hash=True) == size
    with (tmp_path / "here").open("w+b") as partial:
        assert not coming.is_complete(coming.receive_rest(partial.fileno(), 0, size))


@pytest.mark.parametrize("stored", [True, False])
def test_partial_file_can_be_opened_by_another_transfer(home, monkeypatch, stored):
    sha256 = hashlib.sha256(b"whole").hexdigest().encode()
    entry = IncomingEntry(b"file b25l %d 0 5 5 %s" % (0o444, sha256 if stored else b""))
    entry.final = os.fsencode(home / "final")
    entry.partial = os.fsencode(home / "partial")
    coming = Incoming(iter([HEADER.pack(5), HEADER.pack(5) + b"whole" + HEADER.pack(0)]))
    seen = []

    def move(partial: bytes, final: bytes) -> None:
        place = Path(os.fsdecode(partial))
        seen.append(place.stat().st_mode & stat.S_IRWXU)
        place.rename(os.fsdecode(final))

    monkeypatch.setattr(remote_incoming.os, "replace", move)
    assert receive(entry, coming, stored=stored, hashed=stored) is not None
    assert seen == [stat.S_IRUSR | stat.S_IWUSR]
    assert stat.S_IMODE((home / "final").stat().st_mode) == 0o444


def test_sweep_removes_unused_files_from_the_store(home, data):
    make(data)
    (home / "jobs" / ".died.incomplete").mkdir()
    long_ago = time.time() - UNUSED_S - 60
    for path in stored(home):
        os.utime(path, (long_ago, long_ago))
    make(data / "sub", "jobs/two")
    assert len(stored(home)) > 2  # not due yet
    os.utime(home / STORE / "swept", (1, time.time() - SWEEP_EVERY_S - 60))
    make(data / "sub", "jobs/three")
    kept = {
        hashlib.sha256((data / "sub" / name).read_bytes()).hexdigest()
        for name in ("nothing", "run.sh")
    }
    assert {path.name for path in stored(home)} == kept
    assert not (home / "jobs" / ".died.incomplete").exists()


def test_to_store_keeps_single_files(home, data):
    files = [data / "large", data / "link", data / "sub" / "run.sh"]
    at = Upload(LocalTransport()).to_store(files, store=STORE)
    assert Path(at[data / "large"]).read_bytes() == (data / "large").read_bytes()
    assert at[data / "link"] == at[data / "sub" / "run.sh"]
    with rejected("file-unreadable/here", UsageError):
        Upload(LocalTransport()).to_store([data / "sub"], store=STORE)


# hashes:


def test_hash_is_cached_until_the_file_changes(home, data, monkeypatch):
    large = data / "large"
    item = Item.of("large", large, large.lstat())

    def hashed() -> tuple[str, int]:
        """Return the hash, and in how many pieces the file was read: 1 if it was not read."""
        steps: list[tuple[str, int, int]] = []
        found = hash_items([item], progress=lambda *said: steps.append(said))
        assert steps[-1] == ("hashing", 3 * MIB, 3 * MIB)
        return found[large], len(steps)

    monkeypatch.setattr(tree, "_SETTLED_NS", -1)  # as if it were long ago that it changed
    first = hashlib.sha256(large.read_bytes()).hexdigest()
    assert hashed() == (first, 3)
    assert hashed() == (first, 1)
    status = large.stat()
    large.write_bytes(bytes(3 * MIB))
    os.utime(large, ns=(status.st_atime_ns, status.st_mtime_ns))  # only the ctime tells
    assert hashed() == (hashlib.sha256(bytes(3 * MIB)).hexdigest(), 3)


def test_hash_of_a_recently_changed_file_is_not_cached(home, data, monkeypatch):
    item = Item.of("large", data / "large", (data / "large").lstat())
    monkeypatch.setattr(tree, "_SETTLED_NS", 3600 * 10**9)
    steps: list[int] = []
    for _ in range(2):
        hash_items([item], progress=lambda _, done, __: steps.append(done))
    assert len(steps) == 6


@pytest.mark.parametrize("damaged", [b"no memory" * 1000, b"[]", b'{"a": 1}'])
def test_damaged_hash_cache_is_replaced(home, data, tmp_path, monkeypatch, damaged):
    monkeypatch.setattr(tree, "_SETTLED_NS", -1)
    memory = tmp_path / "cache" / "clusterctl" / "hashes.json"
    memory.parent.mkdir(parents=True)
    memory.write_bytes(damaged)
    item = Item.of("large", data / "large", (data / "large").lstat())
    ((path, (_, sha256)),) = hash_items([item]) and json.loads(memory.read_bytes()).items()
    assert (path, sha256) == (str(data / "large"), hash_items([item])[data / "large"])


def test_hash_items_names_a_file_that_vanished(home, data):
    item = Item.of("x", data / "vanished", (data / "large").lstat())
    with pytest.raises(UsageError) as caught:
        hash_items([item])
    assert f"vanished: {os.strerror(errno.ENOENT)}" in caught.value.why


def test_remote_programs_import_only_the_standard_library(home, data):
    """The remote programs may not need packages of this environment."""
    argv = remote_argv("clusterctl.transport.remote_receive", STORE, "")
    done = subprocess.run(
        [sys.executable, "-I", "-S", *argv[1:]], input=b"\n", capture_output=True, check=True
    )
    assert b'"wrong": []' in done.stdout


def test_hashing_can_be_interrupted(home, tmp_path):
    """Reading the files to their end would take hours.

    The interrupt does not wake the waiting thread, like a signal that arrives just before that
    thread blocks.
    """
    interrupted = threading.Event()

    def interrupt(*_: object) -> None:
        if not interrupted.is_set():
            interrupted.set()
            _thread.interrupt_main()

    with pytest.raises(KeyboardInterrupt):
        hash_items(
            [sparse(tmp_path / name, 4 << 40) for name in ("one", "other")], progress=interrupt
        )


def test_hash_items_error_stops_the_other_threads(home, tmp_path, monkeypatch):
    monkeypatch.setattr(tree, "_MAX_THREADS", 2)

    unnamable = replace(sparse(tmp_path / "other", 5), origin=tmp_path / "a\0b")
    with pytest.raises(ValueError, check=lambda error: "null byte" in str(error)):
        hash_items([sparse(tmp_path / "one", 4 << 40), unnamable])


def sparse(path: Path, size: int) -> Item:
    with path.open("wb") as file:
        file.truncate(size)
    return Item.of(path.name, path, path.lstat())


class Noisy(LocalTransport):
    def _local_command(self, argv: Sequence[str]) -> list[str]:
        return ["sh", "-c", 'echo "Welcome!"; exec "$@"', "sh", *argv]


def test_login_shell_with_a_greeting_is_answer_garbled(home, data):
    with rejected("internal/answer", TransportError) as caught:
        send(data, Noisy())
    assert caught.value.why == "Welcome!"


class Answering(LocalTransport):
    """A cluster that reads all input and prints this answer."""

    def __init__(self, said: str) -> None:
        self._said = said

    def _local_command(self, argv: Sequence[str]) -> list[str]:  # noqa: ARG002
        return ["sh", "-c", 'printf %s "$1"; cat >/dev/null', "sh", self._said]


@pytest.mark.parametrize(
    "answer",
    [
        *(
            "x\n",
            "0 0\n",
            f"99 0 {3 * MIB} -\n",
            f"-1 0 {3 * MIB} -\n",
            f"0 -1 {3 * MIB} -\n",
            "0 0 1 -\n",
        ),
        *(f"0 {4 * MIB} {3 * MIB} -\n", "\n{}\n", "\n[]\n"),
        '\n{"folder": 5, "wrong": [], "at": []}\n',
        '\n{"folder": "#", "wrong": [], "at": []}\n',
        '\n{"folder": "", "wrong": [99], "at": []}\n',
        '\n{"folder": "", "wrong": [], "at": 5}\n',
        '\n{"folder": "", "wrong": [], "at": []}\n',
    ],
)
def test_malformed_answer_is_answer_garbled(home, data, answer):
    with rejected("internal/answer", TransportError):
        Upload(Answering(answer)).to_store([data / "large"], store=STORE)


def test_upload_adds_files_to_a_read_only_folder(home, data):
    (data / "sub").chmod(0o555)
    send(data)
    sent = home / "in to" / "data" / "sub"
    assert stat.S_IMODE(sent.stat().st_mode) == 0o555
    make_folder(os.fsencode(sent), follow=True)  # by itself: nothing holds up root
    assert stat.S_IMODE(sent.stat().st_mode) == 0o755
    send(data)
    assert stat.S_IMODE(sent.stat().st_mode) == 0o555
