"""What `down` finds on a file server, which may refuse, or be away."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

Changes = Callable[..., dict[str, Any]]
Util = Callable[[str], ModuleType]
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


def left_by_up(
    changes: Changes, server: Server, util: Util, monkeypatch: pytest.MonkeyPatch
) -> Path:
    """Run an `up` that makes a folder on the server. Return the folder."""
    mounts = util("host_mounts").Mounts
    for name in ("host_record", "host_removal"):
        monkeypatch.setattr(util(name), "Mounts", lambda: mounts(str(server.table)))
    mark = server.point / "mark"
    changes("begun", folders=[str(mark)])
    mark.mkdir()
    changes("ended")
    return mark


@pytest.mark.parametrize("number", [*REFUSALS, *AWAY])
def test_removal_fails_at_what_a_file_server_does_not_let_root_remove_and_continues_later(
    changes: Changes, server: Server, util: Util, number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.mount()
    mark = left_by_up(changes, server, util, monkeypatch)
    with monkeypatch.context() as patch:
        failing(patch, "rmdir", mark, number)
        with pytest.raises(util("host_record").RecordError, match=str(mark)):
            changes("removed")
    changes("removed")
    assert not mark.exists()


@pytest.mark.parametrize("kind", ["", "ext4", "fuseblk"])
def test_removal_fails_at_errors_of_a_disk_of_the_host_and_continues_later(
    changes: Changes, server: Server, util: Util, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kind:
        server.mount(kind)
    mark = left_by_up(changes, server, util, monkeypatch)
    with monkeypatch.context() as patch:
        failing(patch, "rmdir", mark, errno.EIO)
        with pytest.raises(OSError, match="Input/output"):
            changes("removed")
    changes("removed")
    assert not mark.exists()


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
    mounts = util("host_mounts").Mounts(str(server.table))
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
    mounts = util("host_mounts").Mounts(str(server.table))
    assert mounts.server_mount(f"{server.point}/a") == str(server.point)
    assert mounts.is_mount_point(str(server.point))
