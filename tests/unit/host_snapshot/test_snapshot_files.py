"""`down` restores a host's files to their state before `up`, and keeps files and changes of others."""

from __future__ import annotations

import grp
import json
import os
import pwd
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests.unit.host_snapshot.conftest import Machine, Refuses

Snapshot = Callable[..., dict[str, Any]]
PERSON = 54321  # a uid without an account


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    return folder


def tree(folder: Path) -> dict[str, tuple[int, int, str | bytes | None]]:
    """Return path -> (mode, mtime of files and links, content or target) for all below a folder."""
    return {
        path.relative_to(folder).as_posix(): (
            path.lstat().st_mode,
            0 if path.is_dir() else path.lstat().st_mtime_ns,
            str(path.readlink())
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None,
        )
        for path in sorted(folder.rglob("*"))
    }


def test_restore_recreates_files_links_and_folders(snapshot: Snapshot, etc: Path) -> None:
    (etc / "chrony.conf").write_text("server theirs\n")
    (etc / "chrony.conf").chmod(0o640)
    (etc / "link").symlink_to("chrony.conf")
    (etc / "slurm").mkdir(mode=0o700)
    before = tree(etc)
    names = ["chrony.conf", "link", "new.conf", "fresh/in.conf"]
    touches = {
        "files": [str(etc / n) for n in names],
        "folders": [str(etc / "slurm"), str(etc / "fresh")],
        "trees": [str(etc / "opt")],
    }
    assert snapshot("recorded", **touches)["changed"]
    (etc / "chrony.conf").write_text("server ours\n")
    (etc / "chrony.conf").chmod(0o644)
    (etc / "link").unlink()
    (etc / "link").write_text("no link any more")
    (etc / "fresh").mkdir()
    for name in ("new.conf", "fresh/in.conf"):
        (etc / name).write_text("ours\n")
    (etc / "slurm").chmod(0o755)
    (etc / "opt/env/bin").mkdir(parents=True)
    (etc / "opt/env/bin/python").write_text("")
    snapshot("sealed", **touches)
    result = snapshot("restored")
    assert result["changed"]
    assert result["clusterctl_notes"] == []
    assert tree(etc) == before
    assert not (etc.parent / "snapshot").exists()
    assert not snapshot("restored")["changed"]


@pytest.mark.parametrize(
    ("uid", "is_person"),
    [(999, False), (1000, True), (64030, False), (65534, False), (70000, True)],
)
def test_is_person_is_false_for_system_accounts(
    util: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    is_person: bool,
) -> None:
    paths = util("snapshot_paths")
    monkeypatch.setattr(paths.pwd, "getpwuid", lambda _: "an account")
    assert paths._is_person(uid) is is_person


def test_accounts_of_a_directory_service_are_not_the_hosts(
    util: Callable[[str], ModuleType], tmp_path: Path
) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0::/root:/bin/sh\n+@staff::::::\n")
    assert util("snapshot_host").users(str(tmp_path)) == ["root"]


def test_second_record_changes_nothing(snapshot: Snapshot, etc: Path) -> None:
    conf = etc / "a.conf"
    conf.write_text("theirs\n")
    snapshot("recorded", files=[str(conf)])
    conf.write_text("ours\n")
    snapshot("sealed", files=[str(conf)])
    assert not snapshot("recorded", files=[str(conf)])["changed"]
    conf.write_text("ours, of the second up\n")
    snapshot("sealed", files=[str(conf)])
    snapshot("restored")
    assert conf.read_text() == "theirs\n"


def test_restore_keeps_an_edited_file_of_clusterctl_beside(snapshot: Snapshot, etc: Path) -> None:
    conf = etc / "slurm.conf"
    snapshot("recorded", files=[str(conf)])
    conf.write_text("ours\n")
    snapshot("sealed", files=[str(conf)])
    conf.write_text("ours, bettered\n")
    result = snapshot("restored")
    assert not conf.exists()
    assert (etc / "slurm.conf.clusterctl-kept").read_text() == "ours, bettered\n"
    assert "slurm.conf.clusterctl-kept" in result["clusterctl_notes"][0]


@pytest.mark.parametrize("again", [False, True])
def test_restore_keeps_ssh_keys_added_by_users(snapshot: Snapshot, etc: Path, again: bool) -> None:
    keys = etc / ".ssh/authorized_keys"
    touches = {"files": [str(keys)], "folders": [str(keys.parent)]}
    snapshot("recorded", **touches)
    keys.parent.mkdir()
    keys.write_text("ours\n")
    snapshot("sealed", **touches)
    keys.write_text("theirs\nours\n")
    if again:
        snapshot("recorded", **touches)
        snapshot("sealed", **touches)
    snapshot("restored")
    assert keys.read_text() == "theirs\n"
    assert [path.name for path in keys.parent.iterdir()] == [keys.name]


def test_restore_leaves_folders_that_another_host_restores(snapshot: Snapshot, etc: Path) -> None:
    (etc / "home").mkdir()
    shared = etc / "home/key"
    own_key = etc / "key"
    touches = {"files": [str(shared), str(own_key)], "spared": [str(etc / "home")]}
    snapshot("recorded", **touches)
    shared.write_text("ours\n")
    own_key.write_text("ours\n")
    snapshot("sealed", **touches)
    snapshot("restored")
    assert shared.read_text() == "ours\n"
    assert not own_key.exists()


def test_restore_keeps_an_edited_file_that_the_next_up_replaced(
    snapshot: Snapshot, etc: Path
) -> None:
    conf = etc / "slurm.conf"
    for text in ("first", "second"):
        snapshot("recorded", files=[str(conf)])
        conf.write_text("ours\n")
        snapshot("sealed", files=[str(conf)])
        conf.write_text(f"{text} idea\n")
    snapshot("restored")
    kept = {path.read_text() for path in etc.glob("*.clusterctl-kept*")}
    assert kept == {"first idea\n", "second idea\n"}


@pytest.mark.parametrize("again", [False, True], ids=["one up", "another up after"])
def test_restore_keeps_foreign_lines_in_a_shared_file(
    snapshot: Snapshot, etc: Path, again: bool
) -> None:
    hosts = etc / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    snapshot("recorded", files=[str(hosts)])
    hosts.write_text("127.0.0.1 localhost\n# BEGIN\n10.0.0.1 ctl\n# END\n")
    snapshot("sealed", files=[str(hosts)])
    hosts.write_text("127.0.0.1 localhost box\n# BEGIN\n10.0.0.1 ctl\n# END\n10.9.9.9 printer\n")
    if again:
        snapshot("recorded", files=[str(hosts)])
        snapshot("sealed", files=[str(hosts)])
    result = snapshot("restored")
    assert hosts.read_text().splitlines() == ["127.0.0.1 localhost box", "10.9.9.9 printer"]
    assert result["clusterctl_notes"] == []


@pytest.mark.parametrize("block", ["", "# BEGIN\n10.0.0.3 ctl\n# END\n"])
def test_restore_keeps_an_owners_line_that_equals_one_of_the_cluster(
    snapshot: Snapshot, etc: Path, block: str
) -> None:
    """Someone else has removed or changed the cluster's block in the file."""
    hosts = etc / "hosts"
    owners = "127.0.0.1 localhost\n10.0.0.1 ctl\n"
    hosts.write_text(owners)
    snapshot("recorded", files=[str(hosts)])
    hosts.write_text(f"{owners}# BEGIN\n10.0.0.1 ctl\n# END\n")
    snapshot("sealed", files=[str(hosts)])
    hosts.write_text(f"{owners}{block}")
    snapshot("restored")
    assert hosts.read_text() == owners


@pytest.mark.parametrize("again", [False, True], ids=["one up", "another up after"])
def test_restore_leaves_files_that_up_did_not_change(
    snapshot: Snapshot, etc: Path, again: bool
) -> None:
    conf = etc / "theirs.conf"
    conf.write_text("old\n")
    files = [str(conf), str(etc / "later.conf")]
    snapshot("recorded", files=files)
    snapshot("sealed", files=files)
    conf.write_text("new\n")
    (etc / "later.conf").write_text("theirs\n")
    if again:
        snapshot("recorded", files=files)
        snapshot("sealed", files=files)
    snapshot("restored")
    assert conf.read_text() == "new\n"
    assert (etc / "later.conf").read_text() == "theirs\n"
    assert sorted(path.name for path in etc.iterdir()) == ["later.conf", "theirs.conf"]


def test_restore_undoes_a_killed_up(snapshot: Snapshot, etc: Path) -> None:
    conf = etc / "a.conf"
    conf.write_text("theirs\n")
    snapshot("recorded", files=[str(conf), str(etc / "b.conf")])
    conf.write_text("ours\n")
    (etc / "b.conf").write_text("ours\n")
    snapshot("recorded", files=[str(conf), str(etc / "b.conf")])  # killed there, and run again
    snapshot("restored")
    assert {path.name: path.read_text() for path in etc.iterdir()} == {"a.conf": "theirs\n"}


def test_restore_keeps_and_names_a_folder_that_is_not_empty(snapshot: Snapshot, etc: Path) -> None:
    folders = [str(etc / "shared"), str(etc / "shared/home")]
    snapshot("recorded", folders=folders)
    (etc / "shared/home/ada").mkdir(parents=True)
    snapshot("sealed", folders=folders)
    result = snapshot("restored")
    assert (etc / "shared/home/ada").is_dir()
    assert f"{etc}/shared/home: it" in str(result["clusterctl_notes"])


def test_restore_names_a_home_that_stays_once_and_no_home_that_is_removed(
    snapshot: Snapshot,
    etc: Path,
    util: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MariaDB's account has its home in the folder of the databases."""
    paths = util("snapshot_host").HostPaths(etc=str(etc), databases=str(etc / "mysql"))
    monkeypatch.setattr(
        pwd, "getpwnam", lambda name: SimpleNamespace(pw_uid=PERSON, pw_dir=str(etc / name))
    )
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_name=name, gr_gid=PERSON))
    touches = {
        "files": [str(etc / "ada/clusterctl")],
        "folders": [str(etc / "ada")],
        "trees": [str(etc / "mysql")],
        "accounts": ["ada", "mysql"],
    }
    for table in ("passwd", "group"):
        (etc / table).write_text("root:x:0\n")
    snapshot("recorded", on=paths, **touches)
    for table in ("passwd", "group"):
        (etc / table).write_text(f"root:x:0\nada:x:{PERSON}\nmysql:x:{PERSON}\n")
    for name in ("ada/clusterctl/jobs", "mysql/mysql"):
        (etc / name).mkdir(parents=True)
    snapshot("sealed", on=paths, **touches)
    result = snapshot("restored", on=paths)
    assert result["clusterctl_notes"] == [f"{etc}/ada: the home of ada"]
    assert not (etc / "mysql").exists()


@pytest.mark.parametrize("ups", [1, 2])
def test_restore_names_the_jobs_folder_in_the_home_of_an_existing_account(
    snapshot: Snapshot, etc: Path, ups: int
) -> None:
    """The roles touch it, but jobs create it, after the last `up` or between two."""
    files = [str(etc / name) for name in ("ada/clusterctl", "bob/clusterctl")]
    for _ in range(ups):
        snapshot("recorded", files=files)
        snapshot("sealed", files=files)
        (etc / "ada/clusterctl/jobs").mkdir(parents=True, exist_ok=True)
        (etc / "bob/clusterctl").mkdir(parents=True, exist_ok=True)
    result = snapshot("restored")
    assert result["clusterctl_notes"] == [f"{etc}/ada/clusterctl: it contains jobs"]
    assert not (etc / "bob/clusterctl").exists()


def test_restore_removes_later_files_that_match_a_pattern(snapshot: Snapshot, etc: Path) -> None:
    (etc / "mark-theirs").write_text("")
    snapshot("recorded", files=[f"{etc}/mark-*"])
    (etc / "mark-ours").write_text("")
    snapshot("sealed", files=[f"{etc}/mark-*"])
    snapshot("restored")
    assert [path.name for path in etc.iterdir()] == ["mark-theirs"]


def test_snapshot_of_another_cluster_is_refused(snapshot: Snapshot, refuses: Refuses) -> None:
    snapshot("recorded", files=[])
    for state in ("recorded", "sealed", "restored"):
        with refuses("another cluster"):
            snapshot(state, cluster="other")


def test_check_mode_changes_nothing(snapshot: Snapshot, etc: Path, tmp_path: Path) -> None:
    (etc / "a.conf").write_text("theirs\n")
    assert snapshot("recorded", check=True, files=[str(etc / "a.conf")])["changed"]
    assert not (tmp_path / "snapshot").exists()
    snapshot("recorded", files=[str(etc / "a.conf")])
    (etc / "a.conf").write_text("ours\n")
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    changes = {
        state: snapshot(state, check=True)["changed"]
        for state in ("recorded", "sealed", "restored")
    }
    assert changes == {"recorded": False, "sealed": False, "restored": True}
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_newer_snapshot_is_rejected_and_only_root_can_read(
    snapshot: Snapshot, tmp_path: Path, refuses: Refuses
) -> None:
    snapshot("recorded", files=[])
    book = tmp_path / "snapshot/ledger.json"
    assert book.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "snapshot").stat().st_mode & 0o777 == 0o700
    book.write_text(json.dumps({"version": 99}))
    with refuses("newer clusterctl"):
        snapshot("restored")


def test_seal_without_a_record_is_refused(snapshot: Snapshot, refuses: Refuses) -> None:
    """Otherwise, all installed packages would count as installed by clusterctl."""
    with refuses("has no record"):
        snapshot("sealed", files=[])


def test_restore_keeps_files_of_persons_in_a_folder_of_clusterctl(
    snapshot: Snapshot, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot("recorded", trees=[str(etc / "spool")])
    (etc / "spool/state").mkdir(parents=True)
    (etc / "spool/theirs").write_text("")
    (etc / "spool/ours").write_text("")
    snapshot("sealed", trees=[str(etc / "spool")])
    os.chown(etc / "spool/theirs", PERSON, PERSON)
    monkeypatch.setattr(pwd, "getpwuid", lambda _: "an account")
    result = snapshot("restored")
    assert [path.name for path in (etc / "spool").iterdir()] == ["theirs"]
    assert "spool/theirs" in result["clusterctl_notes"][0]


def account(name: str, home: str = "/") -> pwd.struct_passwd:
    return pwd.struct_passwd((name, "x", PERSON, PERSON, "", home, "/bin/sh"))


@pytest.mark.parametrize("others", [[], ["payroll"]])
def test_mariadb_with_foreign_databases_is_kept(
    snapshot: Snapshot,
    etc: Path,
    machine: Machine,
    util: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
    *,
    others: list[str],
) -> None:
    data = etc / "lib/mysql"
    settings = etc / "my.cnf.d"
    ours = etc / "my.cnf.d/60-clusterctl.cnf"
    made = settings / "debian.cnf"
    folders = [data, etc / "log/mysql", etc / "log/mariadb"]
    paths = util("snapshot_host").HostPaths(etc=str(etc), databases=str(data))
    # On EL, the data folder is the account's home.
    homes = {"mysql": str(data)}
    monkeypatch.setattr(pwd, "getpwnam", lambda name: account(name, homes.get(name, "/")))
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_name=name, gr_gid=PERSON))
    for table in ("passwd", "group"):
        (etc / table).write_text("root:x:0:0\n")
    units = ["mariadb.service", "slurmdbd.service"]
    touches = {"files": [str(ours)], "folders": [str(settings)], "units": units}
    touches["trees"] = [str(folder) for folder in folders]
    touches["accounts"] = ["mysql", "slurm"]
    snapshot("recorded", on=paths, **touches)
    # Of an `up` that was killed before MariaDB came.
    assert snapshot("restored", on=paths)["clusterctl_notes"] == []
    snapshot("recorded", on=paths, **touches)
    for table in ("passwd", "group"):
        (etc / table).write_text(f"root:x:0:0\nmysql:x:{PERSON}\nslurm:x:{PERSON}\n")
    databases = [data / name for name in ("mysql", "slurm_acct_db", "#innodb_redo", *others)]
    for folder in (*folders, settings, *databases):
        folder.mkdir(parents=True, exist_ok=True)
    for path in (ours, made):
        path.write_text("")
    machine.answers["systemctl", "show"] = 0, "LoadState=loaded\nActiveState=active\n", ""
    snapshot("sealed", on=paths, **touches)
    notes = snapshot("restored", on=paths)["clusterctl_notes"]
    assert [note.partition(": ")[2] for note in notes if note.startswith("MariaDB")] == others
    assert len(notes) == len(others)
    assert [path.exists() for path in (*folders, settings, made)] == [bool(others)] * 5
    assert not ours.exists()
    assert [argv[-1] for argv in machine.ran if argv[1] == "stop"] == units[len(others) :]
    removed = [argv[-1] for argv in machine.ran if argv[0] in {"userdel", "groupdel"}]
    assert removed == (["slurm", "slurm"] if others else ["mysql", "slurm"] * 2)


def test_restored_host_has_no_accounts_of_users_that_left_the_spec(
    snapshot: Snapshot,
    etc: Path,
    machine: Machine,
    util: Callable[[str], ModuleType],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An account that the owner of the host has made since stays."""
    paths = util("snapshot_host").HostPaths(etc=str(etc))
    monkeypatch.setattr(pwd, "getpwnam", account)
    monkeypatch.setattr(grp, "getgrnam", lambda name: SimpleNamespace(gr_name=name, gr_gid=PERSON))
    accounts = ["root"]

    def write_accounts(*names: str) -> None:
        accounts.extend(name for name in names if name not in accounts)
        for table in ("passwd", "group"):
            (etc / table).write_text("".join(f"{name}:x:{PERSON}\n" for name in accounts))

    write_accounts()
    for user, others in (("bob", ["dora"]), ("carl", []), ("carl", [])):
        snapshot("recorded", on=paths, accounts=[user])
        write_accounts(user)
        snapshot("sealed", on=paths, accounts=[user])
        write_accounts(*others)
    snapshot("restored", on=paths)
    removed = [argv[-1] for argv in machine.ran if argv[0] in {"userdel", "groupdel"}]
    assert removed == ["bob", "carl"] * 2


def test_restored_host_has_no_failed_units_of_packages_and_accounts_that_are_gone(
    snapshot: Snapshot, machine: Machine, etc: Path
) -> None:
    machine.answers["systemctl", "list-units"] = (
        0,
        "rpcbind.service not-found failed failed rpcbind.service\n"
        "nginx.service loaded failed failed A web server\n"
        f"user@{PERSON}.service loaded failed failed User Manager for UID {PERSON}\n"
        "user@0.service loaded failed failed User Manager for UID 0\n",
        "",
    )
    snapshot("recorded", files=[f"{etc}/x"])
    snapshot("sealed", files=[f"{etc}/x"])
    snapshot("restored")
    forgotten = [argv[-1] for argv in machine.ran if argv[1] == "reset-failed"]
    assert forgotten == ["rpcbind.service", f"user@{PERSON}.service"]


def test_files_that_match_a_pattern_after_a_killed_up_are_removed(
    snapshot: Snapshot, etc: Path
) -> None:
    snapshot("recorded", files=[f"{etc}/mark-*"])
    (etc / "mark-ours").write_text("")
    snapshot("recorded", files=[f"{etc}/mark-*"])
    snapshot("sealed", files=[f"{etc}/mark-*"])
    (etc / "mark-theirs").write_text("")
    snapshot("recorded", files=[f"{etc}/mark-*"])
    snapshot("sealed", files=[f"{etc}/mark-*"])
    snapshot("restored")
    assert [path.name for path in etc.iterdir()] == ["mark-theirs"]


def test_restore_removes_rpmsave_files_of_clusterctl_only(snapshot: Snapshot, etc: Path) -> None:
    """rpm keeps a changed configuration file of a removed package as NAME.rpmsave."""
    ours = etc / "slurm.conf"
    shared = etc / "my.cnf"
    shared.write_text("theirs\n")
    touches = {"files": [str(ours), str(shared)]}
    snapshot("recorded", **touches)
    ours.write_text("ours\n")
    shared.write_text("theirs\nours\n")
    snapshot("sealed", **touches)
    ours.rename(f"{ours}.rpmsave")
    other = etc / "my.cnf.rpmsave"
    other.write_text("of another time\n")
    snapshot("restored", **touches)
    assert sorted(path.name for path in etc.glob("*.cnf*")) == ["my.cnf", "my.cnf.rpmsave"]
    assert not Path(f"{ours}.rpmsave").exists()


@pytest.fixture
def home() -> Iterator[Path]:
    """Return the home of an account that no longer exists, in a folder that its uid can reach."""
    top = Path("/var/tmp", f"clusterctl-test-{secrets.token_hex(4)}")
    (top / "ada").mkdir(parents=True)
    os.chown(top / "ada", PERSON, PERSON)
    yield top / "ada"
    shutil.rmtree(top)


def write_keys(home: Path, *lines: str) -> Path:
    """Write the authorized_keys of the account, which owns the file. Return its path."""
    keys = home / ".ssh/authorized_keys"
    keys.parent.mkdir()
    keys.write_text("".join(f"{line}\n" for line in lines))
    for path in (keys.parent, keys):
        os.chown(path, PERSON, PERSON)
    return keys


@pytest.mark.parametrize("before", [[], ["theirs"]])
def test_snapshot_does_not_follow_links_in_homes(
    snapshot: Snapshot, home: Path, before: list[str]
) -> None:
    keys = write_keys(home, *before) if before else home / ".ssh/authorized_keys"
    touches = {"files": [str(keys)], "folders": [str(keys.parent)]}
    snapshot("recorded", **touches)
    if before:
        keys.write_text("theirs\nours\n")
    else:
        write_keys(home, "ours")
    snapshot("sealed", **touches)
    roots = home.parent / "roots"
    roots.mkdir()
    (roots / "authorized_keys").write_text("root's\n")
    keys.parent.rename(home / "away")
    keys.parent.symlink_to(roots)
    result = snapshot("restored")
    assert [path.name for path in roots.iterdir()] == ["authorized_keys"]
    assert (roots / "authorized_keys").read_text() == "root's\n"
    assert (roots.stat().st_uid, (roots / "authorized_keys").stat().st_uid) == (0, 0)
    assert not before or any(str(keys) in note for note in result["clusterctl_notes"])


@pytest.mark.parametrize("made", ["pipe", "terabyte", "closed"])
def test_keys_changed_by_a_job_do_not_stop_the_restore(
    snapshot: Snapshot, home: Path, etc: Path, made: str
) -> None:
    keys = write_keys(home, "ours")
    conf = etc / "conf"
    touches = {"files": [str(keys), str(conf)], "folders": [str(keys.parent)]}
    snapshot("recorded", **touches)
    keys.write_text("ours\nmore\n")
    conf.write_text("ours\n")
    snapshot("sealed", **touches)
    if made == "pipe":
        keys.unlink()
        os.mkfifo(keys)
    elif made == "terabyte":
        os.truncate(keys, 1 << 40)
    else:
        keys.parent.chmod(0)
    result = snapshot("restored")
    assert not conf.exists()
    assert any(str(keys) in note for note in result["clusterctl_notes"])


def test_home_that_root_may_not_remove_does_not_stop_the_restore(
    snapshot: Snapshot, home: Path, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on an NFS server with root_squash."""
    conf = etc / "conf"
    owner = home.stat()
    home.rename(etc / "away")
    touches = {"files": [str(conf)], "folders": [str(home)]}
    snapshot("recorded", **touches)
    conf.write_text("ours\n")
    home.mkdir()
    os.chown(home, owner.st_uid, owner.st_gid)
    snapshot("sealed", **touches)
    remove = os.rmdir

    def refuse(path: Any, *args: Any, **more: Any) -> None:
        if Path(path) == home:
            raise PermissionError(13, "Permission denied", str(path))
        remove(path, *args, **more)

    monkeypatch.setattr(os, "rmdir", refuse)
    result = snapshot("restored")
    assert not conf.exists()
    assert f"{home}: Permission denied" in result["clusterctl_notes"]


def test_restore_writes_ssh_keys_with_the_rights_of_their_account(
    snapshot: Snapshot, home: Path
) -> None:
    keys = write_keys(home, "theirs")
    touches = {"files": [str(keys)], "folders": [str(keys.parent)]}
    snapshot("recorded", **touches)
    keys.write_text("theirs\nours\n")
    snapshot("sealed", **touches)
    keys.write_text("theirs\nours\nmore\n")
    snapshot("restored")
    assert (keys.read_text(), keys.stat().st_uid) == ("theirs\nmore\n", PERSON)
