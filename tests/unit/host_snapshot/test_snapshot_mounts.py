"""The host snapshot with folders of a file server, which may refuse, or be away."""

from __future__ import annotations

import errno
import json
import os
import pwd
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from clusterctl.providers.existing import prove
from clusterctl.providers.onprem import remote_account
from clusterctl.transport import remote_copies
from tests.unit.host_snapshot.conftest import Machine, Refuses

Snapshot = Callable[..., dict[str, Any]]
Util = Callable[[str], ModuleType]
PERSON = 54321  # a uid without an account
REFUSALS = (errno.EACCES, errno.EPERM, errno.EROFS)
AWAY = (errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.ENOTCONN, errno.EHOSTDOWN)


class Server:
    """A file server whose folder a host can mount at ``point``, on top of a folder of its own."""

    def __init__(self, folder: Path) -> None:
        self.point = folder / "shared"
        self.point.mkdir()
        self.table = folder / "mountinfo"
        self._hidden = folder / "hidden"
        self._hidden.mkdir()
        self.unmount()

    def mount(self, kind: str = "nfs4") -> None:
        self._swap()
        self._write(kind)

    def unmount(self) -> None:
        if self.table.exists():
            self._swap()
        self._write()

    def _swap(self) -> None:
        other = self.point.with_name("other")
        self.point.rename(other)
        self._hidden.rename(self.point)
        other.rename(self._hidden)

    def _write(self, kind: str = "") -> None:
        point = str(self.point).replace(" ", "\\040")
        lines = ["22 1 8:1 / / rw - ext4 /dev/sda1 rw"]
        lines += [f"40 22 0:50 / {point} rw shared:7 - {kind} files:/srv rw"] if kind else []
        self.table.write_text("".join(f"{line}\n" for line in lines))


@pytest.fixture
def server(tmp_path: Path) -> Server:
    return Server(tmp_path)


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    """The host's /etc."""
    folder = tmp_path / "etc"
    folder.mkdir()
    for name in ("passwd", "group"):
        (folder / name).touch()
    return folder


@pytest.fixture
def paths(etc: Path, server: Server, util: Util) -> Any:
    return util("snapshot_host").HostPaths(etc=str(etc), mounts=str(server.table))


@pytest.fixture(autouse=True)
def silent(util: Util, monkeypatch: pytest.MonkeyPatch) -> set[str]:
    """The mount points whose file servers do not answer."""
    paths: set[str] = set()
    monkeypatch.setattr(util("snapshot_restore"), "answers", lambda path: path not in paths)
    return paths


def failing(
    monkeypatch: pytest.MonkeyPatch, name: str, path: Path, number: int, *, below: bool = False
) -> None:
    """Let a function of the module os fail for a path. below: also for paths below."""
    function = getattr(os, name)

    def fail(given: Any, *args: Any, **more: Any) -> Any:
        asked = Path(os.fsdecode(given))
        if asked == path or (below and asked.is_relative_to(path)):
            raise OSError(number, os.strerror(number), str(given))
        return function(given, *args, **more)

    monkeypatch.setattr(os, name, fail)


def left_by_up(snapshot: Snapshot, folder: Path, conf: Path) -> None:
    """Run an `up` that makes a folder and a file."""
    touches = {"folders": [str(folder)], "files": [str(conf)]}
    snapshot("recorded", **touches)
    folder.mkdir()
    conf.write_text("ours\n")
    snapshot("sealed", **touches)


@pytest.mark.parametrize("number", [*REFUSALS, *AWAY])
def test_restore_names_what_a_file_server_does_not_let_root_remove(
    snapshot: Snapshot, server: Server, etc: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.mount()
    mark = server.point / "mark"
    left_by_up(snapshot, mark, etc / "a.conf")
    failing(monkeypatch, "rmdir", mark, number)
    notes = snapshot("restored")["clusterctl_notes"]
    assert notes == [f"{mark}: {os.strerror(number)}"]
    assert not (etc / "a.conf").exists()
    assert not snapshot("restored")["changed"]


@pytest.mark.parametrize("kind", ["", "ext4", "fuseblk", "xfs"])
def test_restore_fails_at_errors_of_a_disk_of_the_host(
    snapshot: Snapshot, server: Server, etc: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind:
        server.mount(kind)
    mark = server.point / "mark"
    left_by_up(snapshot, mark, etc / "a.conf")
    with monkeypatch.context() as patch:
        failing(patch, "rmdir", mark, errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            snapshot("restored")
    snapshot("restored")
    assert not mark.exists()


def test_restore_fails_if_a_file_server_has_no_room(
    snapshot: Snapshot, server: Server, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its owner can make room, and `down` then restores the file."""
    server.mount("fuse.sshfs")
    keys = server.point / "keys"
    keys.write_text("theirs\n")
    snapshot("recorded", files=[str(keys)])
    keys.write_text("theirs\nours\n")
    snapshot("sealed", files=[str(keys)])
    with monkeypatch.context() as patch:
        failing(patch, "open", Path(f"{keys}.clusterctl-new"), errno.ENOSPC)
        with pytest.raises(OSError, match="No space"):
            snapshot("restored")
    snapshot("restored")
    assert keys.read_text() == "theirs\n"


@pytest.mark.parametrize("number", AWAY)
def test_restore_with_a_server_that_is_away_names_each_path(
    snapshot: Snapshot, server: Server, etc: Path, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.mount("fuse.sshfs")
    folder = server.point / "mark"
    left_by_up(snapshot, folder, server.point / "keys")
    for name in ("lstat", "stat"):
        failing(monkeypatch, name, server.point, number, below=True)
    (note,) = snapshot("restored")["clusterctl_notes"]
    named, _, reason = note.rpartition(": ")
    assert sorted(named.split(", ")) == [f"{server.point}/keys", str(folder)]
    assert reason == os.strerror(number)


def test_restore_writes_nothing_below_the_mount_point_of_a_folder_that_is_not_mounted(
    snapshot: Snapshot, server: Server, etc: Path
) -> None:
    server.mount()
    keys = server.point / "ada/keys"
    keys.parent.mkdir()
    keys.write_text("theirs\n")
    touches = {"files": [str(keys), str(etc / "a.conf")], "mounts": [str(server.point)]}
    snapshot("recorded", **touches)
    for path in (keys, etc / "a.conf"):
        path.write_text("ours\n")
    snapshot("sealed", **touches)
    server.unmount()
    (note,) = snapshot("restored")["clusterctl_notes"]
    assert note.startswith(f"{keys}: {server.point} ")
    assert list(server.point.iterdir()) == []
    assert not (etc / "a.conf").exists()


def test_restore_puts_no_foreign_version_below_a_bare_mount_point(
    snapshot: Snapshot, server: Server
) -> None:
    server.mount()
    keys = server.point / "keys"
    for _ in range(2):
        snapshot("recorded", files=[str(keys)])
        keys.write_text("ours\n")
        snapshot("sealed", files=[str(keys)])
        keys.write_text("theirs\n")
    server.unmount()
    snapshot("restored")
    assert list(server.point.iterdir()) == []


def test_restore_names_the_home_of_a_removed_account_on_a_server_that_is_away(
    snapshot: Snapshot, server: Server, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.mount()
    home = str(server.point / "ada")
    account = pwd.struct_passwd(("ada", "x", PERSON, PERSON, "", home, "/bin/sh"))
    monkeypatch.setattr(pwd, "getpwnam", lambda _: account)
    snapshot("recorded", accounts=["ada"])
    (etc / "passwd").write_text(f"ada:x:{PERSON}\n")
    snapshot("sealed", accounts=["ada"])
    for name in ("lstat", "stat"):
        failing(monkeypatch, name, server.point, errno.EIO, below=True)
    assert snapshot("restored")["clusterctl_notes"] == [f"{home}: the home of ada"]


def test_restore_names_a_tree_that_a_file_server_does_not_let_root_remove(
    snapshot: Snapshot, server: Server, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.mount()
    tree = server.point / "opt"
    snapshot("recorded", trees=[str(tree)])
    (tree / "bin").mkdir(parents=True)
    snapshot("sealed", trees=[str(tree)])
    failing(monkeypatch, "rmdir", tree, errno.EACCES)
    assert snapshot("restored")["clusterctl_notes"] == [f"{tree}: Permission denied"]


def test_restore_does_not_name_unchanged_paths_of_a_folder_that_is_not_mounted(
    snapshot: Snapshot, server: Server
) -> None:
    server.mount()
    (server.point / "mark").mkdir()
    for state in ("recorded", "sealed"):
        snapshot(state, folders=[str(server.point / "mark")])
    server.unmount()
    assert snapshot("restored")["clusterctl_notes"] == []


def test_seal_and_record_while_the_folder_is_not_mounted_keep_what_is_known_of_it(
    snapshot: Snapshot, server: Server
) -> None:
    """Its bare mount point is not the folder: neither do its files lack, nor are new ones theirs."""
    server.mount()
    mark = server.point / "mark"
    keys = server.point / "keys"
    mark.mkdir()
    keys.write_text("theirs\n")
    touches = {"folders": [str(mark)], "files": [str(keys)]}
    snapshot("recorded", **touches)
    keys.write_text("theirs\nours\n")
    snapshot("sealed", **touches)
    server.unmount()
    for state in ("recorded", "sealed"):
        snapshot(state, **touches)
    server.mount()
    for state in ("recorded", "sealed"):
        snapshot(state, **touches)
    assert snapshot("restored")["clusterctl_notes"] == []
    assert mark.is_dir()
    assert keys.read_text() == "theirs\n"
    assert sorted(path.name for path in server.point.iterdir()) == ["keys", "mark"]


def test_files_on_a_folder_that_up_mounts_are_not_the_files_of_its_mount_point(
    snapshot: Snapshot, server: Server, machine: Machine
) -> None:
    """A line that its user adds to a file there must not appear below the bare mount point."""
    keys = server.point / "keys"
    touches = {"files": [str(keys)], "mounts": [str(server.point)]}
    for line in ("", "more\n"):
        snapshot("recorded", **touches)
        if not line:
            server.mount()
        keys.write_text(f"theirs\nours\n{line}")
        snapshot("sealed", **touches)
        keys.write_text("theirs\nours\nmore\n")
    machine.does["umount", str(server.point)] = server.unmount
    assert snapshot("restored")["clusterctl_notes"] == []
    assert list(server.point.iterdir()) == []
    server.mount()
    assert keys.read_text() == "theirs\nours\nmore\n"


@pytest.mark.parametrize("was_mounted", [False, True])
def test_restore_unmounts_only_what_up_mounted_even_if_its_server_is_away(
    snapshot: Snapshot,
    server: Server,
    machine: Machine,
    was_mounted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if was_mounted:
        server.mount()
    snapshot("recorded", mounts=[str(server.point)])
    if not was_mounted:
        server.mount()
    snapshot("sealed", mounts=[str(server.point)])
    failing(monkeypatch, "lstat", server.point, errno.ENOTCONN, below=True)
    snapshot("restored")
    assert (["umount", str(server.point)] in machine.ran) is not was_mounted


def test_record_of_a_mount_whose_server_is_away_still_knows_the_mount(
    snapshot: Snapshot, server: Server, machine: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.mount()
    with monkeypatch.context() as patch:
        failing(patch, "lstat", server.point, errno.ENOTCONN, below=True)
        snapshot("recorded", mounts=[str(server.point)])
        snapshot("sealed", mounts=[str(server.point)])
    snapshot("restored")
    assert ["umount", str(server.point)] not in machine.ran


def test_ledger_of_an_earlier_release_is_restored(
    snapshot: Snapshot, server: Server, tmp_path: Path
) -> None:
    """It does not say on which file system a path was."""
    server.mount()
    keys = server.point / "keys"
    snapshot("recorded", files=[str(keys)])
    keys.write_text("ours\n")
    snapshot("sealed", files=[str(keys)])
    ledger = tmp_path / "snapshot/ledger.json"
    found = json.loads(ledger.read_text())
    del found["paths"][str(keys)]["mount"]
    ledger.write_text(json.dumps(found))
    snapshot("recorded", files=[str(keys)])
    snapshot("sealed", files=[str(keys)])
    snapshot("restored")
    assert not keys.exists()


@pytest.mark.parametrize(
    ("kind", "is_server"),
    [
        *((kind, True) for kind in ("nfs", "nfs4", "fuse.sshfs", "lustre", "cifs")),
        *((kind, False) for kind in ("ext4", "overlay", "tmpfs", "fuseblk")),
    ],
)
def test_server_mount_is_the_mount_point_of_a_file_servers_folder(
    server: Server, util: Util, tmp_path: Path, kind: str, is_server: bool
) -> None:
    server.mount(kind)
    mounts = util("snapshot_mounts").Mounts(str(server.table))
    (tmp_path / "link").symlink_to(server.point)
    point = str(server.point) if is_server else ""
    inside = [str(server.point), f"{server.point}/a/b", f"{tmp_path}/link/a"]
    assert [mounts.server_mount(path) for path in inside] == [point] * 3
    assert mounts.server_mount(f"{server.point}-not/a") == ""
    # The link itself is on the disk of the host.
    assert mounts.server_mount(f"{tmp_path}/link") == ""


def test_mount_on_top_of_another_and_blanks_in_its_name_are_understood(
    tmp_path: Path, util: Util
) -> None:
    folder = tmp_path / "my folder"
    folder.mkdir()
    server = Server(folder)
    server.mount("ext4")
    line = server.table.read_text().splitlines()[-1].replace("ext4", "nfs")
    server.table.write_text(f"{server.table.read_text()}{line}\n")
    mounts = util("snapshot_mounts").Mounts(str(server.table))
    assert mounts.server_mount(f"{server.point}/a") == str(server.point)
    assert mounts.is_mount_point(str(server.point))


@pytest.mark.parametrize("number", AWAY)
def test_file_of_a_home_whose_server_is_away_is_not_called_irregular(
    snapshot: Snapshot,
    server: Server,
    util: Util,
    monkeypatch: pytest.MonkeyPatch,
    number: int,
) -> None:
    paths = util("snapshot_paths")
    server.mount()
    monkeypatch.setattr(paths, "owner_above", lambda _: True)
    monkeypatch.setattr(util("user_rights"), "owner_above", lambda _: None)
    failing(monkeypatch, "lstat", server.point / "keys", number)
    with pytest.raises(OSError, match=os.strerror(number)):
        paths.read_state(str(server.point / "keys"))


def test_restore_unmounts_a_folder_of_clusterctl_whose_server_is_silent(
    snapshot: Snapshot, server: Server, machine: Machine, etc: Path, silent: set[str]
) -> None:
    """Before systemd is asked for anything."""
    silent.add(str(server.point))
    touches = {"files": [str(etc / "a.conf")], "units": ["a.service"]}
    snapshot("recorded", mounts=[str(server.point)], **touches)
    server.mount()
    snapshot("sealed", mounts=[str(server.point)], **touches)
    machine.ran.clear()
    machine.does["umount", "-f", "-l", str(server.point)] = server.unmount
    snapshot("restored")
    assert machine.ran[0] == ["umount", "-f", "-l", str(server.point)]
    assert ["umount", str(server.point)] not in machine.ran


@pytest.mark.parametrize("touched", ["mounts", "files"])
def test_restore_with_a_silent_server_of_the_owner_fails_before_any_change(
    snapshot: Snapshot, server: Server, silent: set[str], refuses: Refuses, touched: str
) -> None:
    conf = server.point.parent / "etc/a.conf"
    server.mount()
    silent.add(str(server.point))
    path = server.point if touched == "mounts" else server.point / "keys"
    touches = {"files": [str(conf)]}
    touches[touched] = [*touches.get(touched, []), str(path)]
    snapshot("recorded", **touches)
    conf.write_text("ours\n")
    snapshot("sealed", **touches)
    with refuses(f"umount -l {server.point}"):
        snapshot("restored")
    assert conf.exists()
    server.unmount()
    snapshot("restored")
    assert not conf.exists()


def test_programs_for_hosts_know_the_same_network_file_systems(util: Util) -> None:
    """They run alone on other machines, and so can't share a list."""
    servers = util("snapshot_mounts")._SERVERS
    assert {*remote_account.FOREIGN} == servers | {"autofs"}
    assert {kind.decode() for kind in remote_copies.NETWORK} == servers | {"autofs", "fuse"}
    assert [kind for kind in (*servers, "autofs") if not prove._SHARED.match(kind)] == []
