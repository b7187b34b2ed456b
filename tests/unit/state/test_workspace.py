"""The state folder: private, locked, written whole or not at all."""

import errno
import os
import shutil
import stat
from contextlib import suppress
from pathlib import Path

import pytest

from clusterctl.errors import MachineError
from clusterctl.state.workspace import (
    Workspace,
    cache_home,
    clusters_up,
    config_file,
    open_private,
    state_home,
    write_atomic,
)
from tests.support.messages import refused


@pytest.fixture(name="workspace")
def workspace_fixture(tmp_path: Path) -> Workspace:
    return Workspace(tmp_path / "demo")


def test_folders_are_where_the_variables_say_or_below_the_home(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    variables = ("CLUSTERCTL_HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME")
    for variable in variables:
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("HOME", "/h")

    def named() -> list[str]:
        return [str(path()) for path in (state_home, cache_home, config_file)]

    assert named() == [
        "/h/.local/state/clusterctl",
        "/h/.cache/clusterctl",
        "/h/.config/clusterctl/config.yaml",
    ]
    for variable in variables[1:]:
        monkeypatch.setenv(variable, f"/{variable}")
    assert named() == [
        "/XDG_STATE_HOME/clusterctl",
        "/XDG_CACHE_HOME/clusterctl",
        "/XDG_CONFIG_HOME/clusterctl/config.yaml",
    ]
    monkeypatch.setenv("CLUSTERCTL_HOME", "/own")
    assert str(state_home()) == "/own"


def test_cluster_id_is_never_a_number(tmp_path: Path) -> None:
    for number in range(40):
        workspace = Workspace(tmp_path / str(number))
        workspace.create()
        assert workspace.cluster_id()[0] in "abcdef"


def test_create_makes_folders_and_files_private(workspace: Workspace) -> None:
    workspace.create()
    workspace.create_secrets()
    workspace.cluster_id()
    for path in [workspace.root, *workspace.root.rglob("*")]:
        assert stat.S_IMODE(path.stat().st_mode) & 0o077 == 0, path


def test_remove_killed_halfway_leaves_no_cluster(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    workspace.create()
    workspace.inventory.touch()
    assert clusters_up() == ["demo"]
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *_, **__: None)
        workspace.remove()
    assert clusters_up() == []
    assert [path.name for path in tmp_path.iterdir()] == [".demo.removed"]


@pytest.mark.parametrize("content", [b"", b"a1b", b"\xff\0{", b"a1b2c3d4e5\n", None])
def test_cluster_id_damaged_is_read_from_the_inventory(
    workspace: Workspace, content: bytes | None
) -> None:
    workspace.create()
    workspace.inventory.write_text('{"cluster_id": "a1b2c3"}')
    file = workspace.root / "id"
    if content is not None:
        file.write_bytes(content)
    assert workspace.known_id() == "a1b2c3"
    assert workspace.cluster_id() == "a1b2c3"
    assert file.read_text() == "a1b2c3\n"


@pytest.mark.parametrize(
    "inventory", ["", "{", "[]", '{"cluster_id": 7}', '{"cluster_id": "../x"}', None]
)
def test_cluster_id_damaged_without_inventory_is_refused(
    workspace: Workspace, inventory: str | None
) -> None:
    workspace.create()
    (workspace.root / "id").write_text("")
    if inventory is not None:
        workspace.inventory.write_text(inventory)
    for read in (workspace.known_id, workspace.cluster_id):
        with refused(
            "record-damaged/id",
            MachineError,
            str(workspace.root / "id"),
            "clusterctl orphans list demo",
        ):
            read()
    assert (workspace.root / "id").read_text() == ""


@pytest.mark.parametrize("size", [0, 1, 512, 1023, 2048])
def test_damaged_munge_key_is_refused_and_kept(workspace: Workspace, size: int) -> None:
    workspace.create()
    workspace.munge_key.write_bytes(bytes(size))
    with refused("record-damaged/munge-key", MachineError, str(workspace.munge_key)):
        workspace.create_secrets()
    assert workspace.munge_key.read_bytes() == bytes(size)


@pytest.mark.parametrize("content", [b"", b"half", b"\xff\0", None])
def test_public_key_is_derived_from_the_private_key(
    workspace: Workspace, content: bytes | None
) -> None:
    workspace.create()
    workspace.create_secrets()
    before = workspace.public_key.read_text()
    private = workspace.key.read_bytes()
    if content is None:
        workspace.public_key.unlink()
    else:
        workspace.public_key.write_bytes(content)
    assert workspace.read_admin_key() == before.strip()
    workspace.create_secrets()
    assert (workspace.public_key.read_text(), workspace.key.read_bytes()) == (before, private)


@pytest.mark.parametrize(
    "damage", ["empty", "half", "garbage", "missing", "zeros", "one line less"]
)
@pytest.mark.parametrize("with_public", [True, False])
def test_damaged_ssh_key_is_refused_and_not_replaced(
    workspace: Workspace, damage: str, *, with_public: bool
) -> None:
    workspace.create()
    workspace.create_secrets()
    intact = workspace.key.read_bytes()
    damaged = {
        "empty": b"",
        "half": intact[: len(intact) // 2],
        "garbage": os.urandom(400),
        "zeros": bytes(len(intact)),
        "one line less": b"".join(
            line for n, line in enumerate(intact.splitlines(keepends=True)) if n != 2
        ),
    }.get(damage)
    if damaged is None:
        workspace.key.unlink()
    else:
        workspace.key.write_bytes(damaged)
    if not with_public:
        workspace.public_key.unlink()
    if damaged is None and not with_public:
        # No host of a new cluster has a key yet.
        workspace.create_secrets()
        assert workspace.key.read_bytes() != intact
        return
    with refused("record-damaged/ssh-key", MachineError, str(workspace.key)):
        workspace.create_secrets()
    assert (workspace.key.read_bytes() if workspace.key.exists() else None) == damaged


def test_lock_file_is_private(tmp_path: Path) -> None:
    """Whoever can read a file can lock it."""
    old = tmp_path / "lock"
    old.touch(mode=0o644)
    for path in (old, tmp_path / "new"):
        os.close(open_private(path))
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
    (tmp_path / "link").symlink_to(old)
    with pytest.raises(OSError, check=lambda error: error.errno == errno.ELOOP):
        open_private(tmp_path / "link")


@pytest.mark.parametrize("failing", ["write", "fsync", "rename"])
def test_write_atomic_that_fails_keeps_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")

    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if failing == "rename":
            patch.setattr(Path, "replace", fail)
        else:
            patch.setattr(os, {"write": "fdopen"}.get(failing, failing), fail)
        with pytest.raises(MachineError):
            write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["file"]


def test_write_atomic_keeps_a_file_with_the_content(tmp_path: Path) -> None:
    path = tmp_path / "file"
    assert write_atomic(path, "old")
    known = path.stat()
    assert not write_atomic(path, b"old")
    # A change of the file, its mode or its name changes the inode or its ctime; a read changes only
    # atime.
    assert (path.stat().st_ino, path.stat().st_ctime_ns) == (known.st_ino, known.st_ctime_ns)
    assert write_atomic(path, "old", anew=True)
    assert path.stat().st_ino != known.st_ino or path.stat().st_mtime_ns != known.st_mtime_ns


def test_write_atomic_writes_a_file_removed_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    read_bytes = Path.read_bytes

    def read_removed(file: Path) -> bytes:
        file.unlink()
        return read_bytes(file)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", read_removed)
        assert write_atomic(path, "old")
    assert path.read_text() == "old"


def test_write_atomic_replaces_a_file_of_another_user(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    write_atomic(path, "old")
    assert not write_atomic(path, "old")
    another_user = os.geteuid() + 1
    monkeypatch.setattr(os, "geteuid", lambda: another_user)
    assert write_atomic(path, "old")


@pytest.mark.parametrize("other", ["content", "size", "mode", "link"])
def test_write_atomic_writes_a_file_that_differs(tmp_path: Path, other: str) -> None:
    path = tmp_path / "file"
    mine = tmp_path / "mine"
    write_atomic(path, {"content": "odd", "size": "older"}.get(other, "old"))
    if other == "mode":
        path.chmod(0o644)
    if other == "link":
        path.rename(mine)
        path.symlink_to(mine)
    assert write_atomic(path, "old")
    assert path.lstat().st_mode == stat.S_IFREG | 0o600
    assert path.read_text() == "old"


def test_create_below_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with refused("file-unwritable", MachineError):
        Workspace(tmp_path / "file" / "demo").create()


def test_begun_interrupted_removes_a_workspace_without_a_spec_only(workspace: Workspace) -> None:
    with suppress(KeyboardInterrupt), workspace.begun():
        workspace.create_secrets()
        raise KeyboardInterrupt
    assert not workspace.root.exists()
    for _ in range(2):
        with suppress(KeyboardInterrupt), workspace.begun():
            workspace.spec.touch()
            raise KeyboardInterrupt
        # The file is of this command, or of an earlier one.
        assert workspace.spec.exists()
