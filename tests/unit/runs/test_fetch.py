"""Collecting a folder: hostile names, links, lies, changes under way, and going on after a break."""

from __future__ import annotations

import hashlib
import itertools
import os
import socket
from contextlib import contextmanager

import pytest

from clusterctl.errors import CollectError, UnreachableError
from tests.support.here import LocalTransport
from tests.support.hostile import HOSTILE_NAMES
from tests.support.messages import refused
from tests.unit.runs.fetched import Talk, content, fetch, get


@pytest.mark.parametrize("verb", [fetch, get])
def test_hostile_names_survive(remote, tree, verb):
    below = remote / "a folder" / "$x"
    below.mkdir(parents=True)
    for number, name in enumerate(HOSTILE_NAMES):
        (remote / os.fsdecode(name)).write_text(str(number))
        (below / os.fsdecode(name)).write_text(str(number))
    verb(remote, tree)
    there = content(remote)
    assert len(there) == 2 * len(HOSTILE_NAMES)
    assert content(tree if verb is fetch else tree / remote.name) == there


def test_nothing_but_files_is_fetched_and_all_else_is_named(remote, tree, tmp_path, monkeypatch):
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
    assert {skipped.path: skipped.reason for skipped in manifest.skipped} == {
        "file-link": "a symbolic link",
        "folder-link": "a symbolic link",
        "dangling": "a symbolic link",
        "pipe": "a named pipe",
        "socket": "a socket",
    }


def test_modes_are_not_taken_over(remote, tree):
    (remote / "suid").write_text("x")
    (remote / "suid").chmod(0o6777)
    fetch(remote, tree)
    assert (tree / "suid").stat().st_mode & 0o7133 == 0


def test_hard_links_become_two_files(remote, tree):
    (remote / "a").write_text("x")
    os.link(remote / "a", remote / "b")
    fetch(remote, tree)
    assert content(tree) == {b"a": b"x", b"b": b"x"}
    assert (tree / "a").stat().st_ino != (tree / "b").stat().st_ino


def test_names_that_clusterctl_writes_itself(remote, tree):
    for name in ("run.json", "SHA256SUMS", "sacct.json"):
        (remote / name).write_text("the job's")
    (remote / "sub").mkdir()
    (remote / "sub" / "run.json").write_text("below")
    fetch(remote, tree)
    assert content(tree) == {
        b"run.json.from-job": b"the job's",
        b"SHA256SUMS.from-job": b"the job's",
        b"sacct.json.from-job": b"the job's",
        b"sub/run.json": b"below",
    }


def test_a_name_that_would_be_given_is_the_jobs_already(remote, tree):
    for name in ("run.json", "run.json.from-job", "sacct.json"):
        (remote / name).write_text(name)
    (remote / "sacct.json.from-job").mkdir()
    (remote / "sacct.json.from-job" / "x").write_text("below")
    fetch(remote, tree)
    assert content(tree) == {
        b"run.json.from-job.from-job": b"run.json",
        b"run.json.from-job": b"run.json.from-job",
        b"sacct.json.from-job.from-job": b"sacct.json",
        b"sacct.json.from-job/x": b"below",
    }


def test_empty_and_large_files(remote, tree):
    (remote / "empty").touch()
    (remote / "large").write_bytes(os.urandom(5 << 20))
    fetch(remote, tree)
    assert content(tree) == content(remote)


def test_more_files_than_one_command_takes(remote, tree):
    for number in range(1500):
        (remote / f"{number:0200}").write_text(str(number))
    fetch(remote, tree)
    assert content(tree) == content(remote)


class Breaking(LocalTransport):
    """The connection breaks after some bytes, once; it counts the bytes that were received in all."""

    def __init__(self, after: int) -> None:
        self.after = after
        self.received = 0

    @contextmanager
    def converse(self, argv, **options):
        with super().converse(argv, **options) as talk:
            yield Talk(talk, self._receive)

    def _receive(self, talk) -> bytes:
        if self.after and self.received >= self.after:
            self.after = 0
            raise UnreachableError("the connection broke")
        data = talk.receive()
        self.received += len(data)
        return data


def test_after_a_break_only_the_rest_is_fetched(remote, tree):
    for number in range(10):
        (remote / f"{number}").write_bytes(os.urandom(100_000))
    transport = Breaking(750_000)
    with pytest.raises(UnreachableError):
        fetch(remote, tree, transport)
    arrived = {name: data for name, data in content(tree).items() if not name.endswith(b".part")}
    assert 0 < len(arrived) < 10
    assert arrived.items() <= content(remote).items()  # what is there is whole
    transport.received = 0
    fetch(remote, tree, transport)
    assert content(tree) == content(remote)
    assert transport.received < (10 - len(arrived) + 1) * 100_000


def test_after_a_break_a_file_goes_on_where_it_stopped(remote, tree):
    (remote / "large").write_bytes(os.urandom(8 << 20))
    transport = Breaking(6 << 20)
    with pytest.raises(UnreachableError):
        fetch(remote, tree, transport)
    transport.received = 0
    fetch(remote, tree, transport)
    assert content(tree) == content(remote)
    assert transport.received < 4 << 20


def test_what_was_damaged_or_is_gone_meanwhile(remote, tree):
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


def test_a_link_in_the_way_is_replaced_not_followed(remote, tree, tmp_path):
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
    """Does something to the folder between the list and the files, a number of times."""

    def __init__(self, change, times: int = 1) -> None:
        self._change = change
        self._times = times

    @contextmanager
    def converse(self, argv, **options):
        with super().converse(argv, **options) as talk:
            yield Talk(talk, lambda talk: talk.receive(), lambda request: self._send(talk, request))

    def _send(self, talk, request: bytes) -> None:
        if self._times and not request.startswith(FOLDER):
            self._times -= 1
            self._change()
        talk.send(request)


FOLDER = b'["'  # how the request to list one begins


class ChangingLater(LocalTransport):
    """Does something to the folder when the first bytes of its files are here, long before their end."""

    def __init__(self, change) -> None:
        self._change = change

    @contextmanager
    def converse(self, argv, **options):
        asked = False

        def send(request: bytes) -> None:
            nonlocal asked
            talk.send(request)
            asked = not request.startswith(FOLDER)

        def receive(talk) -> bytes:
            nonlocal asked
            data = talk.receive()
            if asked:
                self._change()
            asked = False
            return data

        with super().converse(argv, **options) as talk:
            yield Talk(talk, receive, send)


def test_a_log_that_grows_is_taken_as_long_as_it_was(remote, tree):
    log = remote / "stdout.log"
    log.write_text("one\n")

    def grow() -> None:
        with log.open("a") as file:
            file.write("two\n")

    fetch(remote, tree, Changing(grow, times=100), still_changing=True)
    assert content(tree) == {b"stdout.log": b"one\n"}


@pytest.mark.parametrize("change", ["other", "sho", None])
def test_a_file_that_changed_meanwhile_is_read_again(remote, tree, change):
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


def test_a_log_that_grows_while_it_is_read(remote, tree):
    log = remote / "stdout.log"
    log.write_bytes(bytes(MUCH))

    def grow() -> None:
        with log.open("ab") as file:
            file.write(b"more")

    fetch(remote, tree, ChangingLater(grow))
    assert content(tree) == {b"stdout.log": bytes(MUCH)}


def test_a_file_that_never_holds_still(remote, tree):
    file = remote / "a"
    file.write_bytes(bytes(MUCH))
    (remote / "b").write_text("stays")
    count = itertools.count(1)

    def alter() -> None:
        with file.open("r+b") as opened:
            opened.write(b"%d" % next(count))

    with refused("files-keep-changing", CollectError):
        fetch(remote, tree, ChangingLater(alter))
    manifest = fetch(remote, tree, ChangingLater(alter), still_changing=True)
    assert content(tree) == {b"b": b"stays"}
    ((path, reason),) = ((left.path, left.reason) for left in manifest.skipped)
    assert (path, "changed" in reason) == ("a", True)


def test_a_file_that_becomes_shorter_while_it_is_read(remote, tree):
    file = remote / "a"
    file.write_bytes(b"x" * MUCH)
    fetch(remote, tree, ChangingLater(lambda: os.truncate(file, 10)))
    assert content(tree) == {b"a": b"x" * 10}


def test_the_hashes_are_those_of_what_arrived(remote, tree):
    (remote / "a").write_text("one")
    (remote / "run.json").write_text("two")
    for _ in range(2):  # the second time it is all here
        manifest = fetch(remote, tree)
        assert manifest.sha256 == {
            b"a": hashlib.sha256(b"one").hexdigest(),
            b"run.json.from-job": hashlib.sha256(b"two").hexdigest(),
        }


def test_a_folder_that_is_not_there(remote, tree):
    manifest = fetch(remote / "gone", tree)
    assert (manifest.files, len(manifest.skipped)) == ({}, 1)
