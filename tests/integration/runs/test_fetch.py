"""Collecting a folder: hostile names, links, lies, changes under way, and going on after a
break.
"""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from contextlib import contextmanager

import pytest

from clusterctl.errors import CollectError, UnreachableError
from clusterctl.runs.fetch import RunSource
from tests.support.hostile import HOSTILE_NAMES
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.transfers import Cutting
from tests.unit.runs.fetched import Talk, content, fetch, fetch_source


def test_hostile_names_survive(remote, tree):
    below = remote / "a folder" / "$x"
    below.mkdir(parents=True)
    for number, name in enumerate(HOSTILE_NAMES):
        (remote / os.fsdecode(name)).write_text(str(number))
        (below / os.fsdecode(name)).write_text(str(number))
    fetch(remote, tree)
    assert len(content(remote)) == 2 * len(HOSTILE_NAMES)
    assert content(tree) == content(remote)


def test_fetch_takes_regular_files_and_names_the_others(remote, tree, tmp_path, monkeypatch):
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "key").write_text("secret")
    (remote / "file-link").symlink_to(secret / "key")
    (remote / "folder-link").symlink_to(secret)
    (remote / "dangling").symlink_to("/nowhere")
    os.mkfifo(remote / "pipe")
    with socket.socket(socket.AF_UNIX) as sock:
        monkeypatch.chdir(remote)  # a socket's path may have at most 108 bytes
        sock.bind("socket")
    (remote / "plain").write_text("x")
    manifest = fetch(remote, tree)
    assert content(tree) == {b"plain": b"x"}
    links = dict.fromkeys(("file-link", "folder-link", "dangling"), "a symbolic link")
    skipped = {one.path: one.reason for one in manifest.skipped}
    assert skipped == links | {"pipe": "a named pipe", "socket": "a socket"}


def test_fetch_keeps_modes_of_the_program_within_the_umask(remote, tree):
    """Files of clusterctl itself and of Slurm get the mode of a new file of the user."""
    modes = {"files/key": 0o600, "files/run.sh": 0o775, "files/dir/data": 0o444, "files/dir": 0o550}
    (remote / "files" / "dir").mkdir(parents=True)
    for name in ("files/key", "files/run.sh", "files/dir/data", "job.sh"):
        (remote / name).write_text("x")
    for name, mode in modes.items():
        (remote / name).chmod(mode)
    (remote / "job.sh").chmod(0o600)
    umask = os.umask(0o027)
    try:
        fetch_source(RunSource(str(remote), files="files"), tree)
    finally:
        os.umask(umask)
    got = {str(p.relative_to(tree)): p.stat().st_mode & 0o777 for p in tree.rglob("*")}
    assert got == {"key": 0o600, "run.sh": 0o750, "dir": 0o750, "dir/data": 0o440, "job.sh": 0o640}


def test_fetch_ignores_special_modes_and_hard_links(remote, tree):
    (remote / "suid").write_text("x")
    (remote / "suid").chmod(0o6777)
    os.link(remote / "suid", remote / "b")
    fetch(remote, tree)
    assert content(tree) == {b"suid": b"x", b"b": b"x"}
    assert (tree / "suid").stat().st_mode & 0o7022 == 0
    assert (tree / "suid").stat().st_ino != (tree / "b").stat().st_ino


def test_names_that_clusterctl_writes_itself(remote, tree):
    """Also if the job already has the name that its file would be given."""
    for name in (
        "run.json",
        "run.json.from-job",
        "sacct.json",
        "SHA256SUMS",
        "sub/run.json",
        "sacct.json.from-job/x",
    ):
        (remote / name).parent.mkdir(exist_ok=True)
        (remote / name).write_text(name)
    fetch(remote, tree)
    assert content(tree) == {
        b"run.json.from-job.from-job": b"run.json",
        b"run.json.from-job": b"run.json.from-job",
        b"sacct.json.from-job.from-job": b"sacct.json",
        b"sacct.json.from-job/x": b"sacct.json.from-job/x",
        b"SHA256SUMS.from-job": b"SHA256SUMS",
        b"sub/run.json": b"sub/run.json",
    }


def test_fetch_of_more_files_than_a_command_takes(remote, tree):
    """Also empty and large ones."""
    (remote / "empty").touch()
    (remote / "large").write_bytes(os.urandom(5 << 20))
    for number in range(1500):
        (remote / f"{number:0200}").write_text(str(number))
    fetch(remote, tree)
    assert content(tree) == content(remote)


def test_fetch_after_a_break_transfers_the_rest(remote, tree):
    for name in ("one", "other"):
        (remote / name).write_bytes(os.urandom(4 << 20))
    with pytest.raises(UnreachableError):
        fetch(remote, tree, Cutting(6 << 20))
    arrived = {name: data for name, data in content(tree).items() if not name.endswith(b".part")}
    assert len(arrived) == 1
    assert arrived.items() <= content(remote).items()  # what is there is whole
    fetch(remote, tree, Cutting(3 << 20))  # else it breaks again
    assert content(tree) == content(remote)


def test_second_fetch_repairs_the_copy_and_drops_what_is_gone(remote, tree):
    (remote / "a").write_text("right")
    (remote / "b").write_text("soon gone")
    fetch(remote, tree)
    (tree / "a").write_text("wrong")
    (tree / "sub").mkdir()
    (tree / "sub" / "stray").write_text("x")
    (tree / "stray-link").symlink_to("/etc")
    (remote / "b").unlink()
    fetch(remote, tree)
    assert content(tree) == {b"a": b"right"}
    assert not (tree / "sub").exists()


def test_fetch_replaces_a_link_in_the_target_folder(remote, tree, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (remote / "sub").mkdir()
    (remote / "sub" / "a").write_text("x")
    (remote / "b").write_text("y")
    tree.mkdir(parents=True)
    (tree / "sub").symlink_to(outside)
    (tree / "b").symlink_to(outside / "b")
    fetch(remote, tree)
    assert content(tree) == {b"sub/a": b"x", b"b": b"y"}
    assert not (tree / "sub").is_symlink()
    assert list(outside.iterdir()) == []


class Changing(LocalTransport):
    """Does something to the folder between the list and the files, a number of times.

    With ``late``, when the first bytes of its files are here, long before their end.
    """

    def __init__(self, change, times: int = 1, *, late: bool = False) -> None:
        self._change = change
        self._times = 100 if late else times
        self._late = late
        self._asked = False

    @contextmanager
    def converse(self, argv, **options):
        with super().converse(argv, **options) as talk:
            yield Talk(talk, self._receive, lambda request: self._send(talk, request))

    def _changes(self, *, late: bool) -> None:
        if self._asked and self._times and late is self._late:
            self._times -= 1
            self._asked = False
            self._change()

    def _send(self, talk, request: bytes) -> None:
        self._asked = not request.startswith(FOLDER)
        self._changes(late=False)
        talk.send(request)

    def _receive(self, talk) -> bytes:
        data = talk.receive()
        self._changes(late=True)
        return data


FOLDER = b'["'  # how the request to list one begins


def test_fetch_of_a_growing_log_takes_the_listed_length(remote, tree):
    log = remote / "stdout.log"
    log.write_text("one\n")
    fetch(
        remote, tree, Changing(lambda: log.write_text("one\ntwo\n"), times=100), still_changing=True
    )
    assert content(tree) == {b"stdout.log": b"one\n"}


@pytest.mark.parametrize("change", ["other", "sho", None])
def test_fetch_reads_a_changed_file_again(remote, tree, change):
    file = remote / "a"
    file.write_text("first")
    (remote / "b").write_text("stays")

    def alter() -> None:
        file.unlink()
        if change is not None:
            file.write_text(change)

    fetch(remote, tree, Changing(alter))
    assert content(tree) == content(remote)


MUCH = 4 << 20  # more than waits in pipes: the end of it is read after the beginning was received


def test_file_that_never_holds_still(remote, tree):
    file = remote / "a"
    file.write_bytes(bytes(MUCH))
    (remote / "b").write_text("stays")
    count = itertools.count(1)

    def alter() -> None:
        with file.open("r+b") as opened:
            opened.write(b"%d" % next(count))

    with refused("transfer-failed/changing", CollectError):
        fetch(remote, tree, Changing(alter, late=True))
    manifest = fetch(remote, tree, Changing(alter, late=True), still_changing=True)
    assert content(tree) == {b"b": b"stays"}
    ((path, reason),) = ((left.path, left.reason) for left in manifest.skipped)
    assert (path, "changed" in reason) == ("a", True)


@pytest.mark.parametrize(
    "change", [lambda file: os.truncate(file, 10), lambda file: os.truncate(file, MUCH + 4)]
)
def test_fetch_of_a_file_that_changes_its_length(remote, tree, change):
    file = remote / "stdout.log"
    file.write_bytes(bytes(MUCH))
    fetch(remote, tree, Changing(lambda: change(file), late=True))
    assert content(tree) == {b"stdout.log": bytes(min(file.stat().st_size, MUCH))}


def test_fetch_records_hashes_of_the_received_files(remote, tree):
    (remote / "a").write_text("one")
    (remote / "run.json").write_text("two")
    for _ in range(2):  # the second time it is all here
        manifest = fetch(remote, tree)
        assert manifest.sha256 == {
            b"a": hashlib.sha256(b"one").hexdigest(),
            b"run.json.from-job": hashlib.sha256(b"two").hexdigest(),
        }


def test_fetch_of_a_missing_folder(remote, tree):
    manifest = fetch(remote / "gone", tree)
    assert (manifest.files, [left.down for left in manifest.skipped]) == ({}, [""])
