"""A host's files after `up` and `down`: as they were, and nothing of anybody else's lost."""

from __future__ import annotations

import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.support.hostile import deep_folder, nest
from tests.unit.host_ledger.conftest import Machine, Refuses

Ledger = Callable[..., dict[str, Any]]
PERSON = 54321  # a number of no account's


@pytest.fixture
def etc(tmp_path: Path) -> Path:
    folder = tmp_path / "etc"
    folder.mkdir()
    return folder


def tree(folder: Path) -> dict[str, tuple[int, int, str | bytes | None]]:
    """Every path below with its mode and its content, and when files and links were changed
    last.
    """
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


def test_files_links_and_folders_come_back_as_they_were(ledger: Ledger, etc: Path) -> None:
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
    assert ledger("recorded", **touches)["changed"]
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
    ledger("sealed", **touches)
    said = ledger("restored")
    assert said["changed"]
    assert said["clusterctl_notes"] == []
    assert tree(etc) == before
    assert not (etc.parent / "ledger").exists()
    assert not ledger("restored")["changed"]


@pytest.mark.parametrize(
    ("uid", "is_ones"), [(999, False), (1000, True), (64030, False), (65534, False), (70000, True)]
)
def test_what_a_service_has_belongs_to_no_person(
    util: Callable[[str], ModuleType],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    uid: int,
    is_ones: bool,
) -> None:
    paths = util("ledger_paths")
    monkeypatch.setattr(paths.pwd, "getpwuid", lambda _: "an account")
    assert paths._is_person(uid) is is_ones


def test_accounts_of_a_directory_service_are_not_the_hosts(
    util: Callable[[str], ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "passwd").write_text("root:x:0:0::/root:/bin/sh\n+@staff::::::\n")
    monkeypatch.setattr(util("ledger_host"), "_ETC", tmp_path)
    assert util("ledger_host").users() == ["root"]


def test_a_second_up_notes_nothing_new(ledger: Ledger, etc: Path) -> None:
    conf = etc / "a.conf"
    conf.write_text("theirs\n")
    ledger("recorded", files=[str(conf)])
    conf.write_text("ours\n")
    ledger("sealed", files=[str(conf)])
    assert not ledger("recorded", files=[str(conf)])["changed"]
    conf.write_text("ours, of the second up\n")
    ledger("sealed", files=[str(conf)])
    ledger("restored")
    assert conf.read_text() == "theirs\n"


def test_somebodys_version_of_our_file_is_kept_beside(ledger: Ledger, etc: Path) -> None:
    conf = etc / "slurm.conf"
    ledger("recorded", files=[str(conf)])
    conf.write_text("ours\n")
    ledger("sealed", files=[str(conf)])
    conf.write_text("ours, bettered\n")
    said = ledger("restored")
    assert not conf.exists()
    assert (etc / "slurm.conf.clusterctl-kept").read_text() == "ours, bettered\n"
    assert "slurm.conf.clusterctl-kept" in said["clusterctl_notes"][0]


@pytest.mark.parametrize("again", [False, True])
def test_keys_that_others_added_stay_authorized(ledger: Ledger, etc: Path, again: bool) -> None:
    keys = etc / ".ssh/authorized_keys"
    touches = {"files": [str(keys)], "folders": [str(keys.parent)]}
    ledger("recorded", **touches)
    keys.parent.mkdir()
    keys.write_text("ours\n")
    ledger("sealed", **touches)
    keys.write_text("theirs\nours\n")
    if again:
        ledger("recorded", **touches)
        ledger("sealed", **touches)
    ledger("restored")
    assert keys.read_text() == "theirs\n"
    assert [path.name for path in keys.parent.iterdir()] == [keys.name]


def test_what_another_host_gives_back_is_left_alone(ledger: Ledger, etc: Path) -> None:
    (etc / "home").mkdir()
    shared = etc / "home/key"
    own = etc / "key"
    touches = {"files": [str(shared), str(own)], "spared": [str(etc / "home")]}
    ledger("recorded", **touches)
    shared.write_text("ours\n")
    own.write_text("ours\n")
    ledger("sealed", **touches)
    ledger("restored")
    assert shared.exists()
    assert not own.exists()


def test_a_version_that_the_next_up_replaced_is_kept_too(ledger: Ledger, etc: Path) -> None:
    conf = etc / "slurm.conf"
    for text in ("first", "second"):
        ledger("recorded", files=[str(conf)])
        conf.write_text("ours\n")
        ledger("sealed", files=[str(conf)])
        conf.write_text(f"{text} idea\n")
    ledger("restored")
    kept = {path.read_text() for path in etc.glob("*.clusterctl-kept*")}
    assert kept == {"first idea\n", "second idea\n"}


@pytest.mark.parametrize("again", [False, True], ids=["one up", "another up after"])
def test_lines_of_others_stay_in_a_shared_file(ledger: Ledger, etc: Path, again: bool) -> None:
    hosts = etc / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    ledger("recorded", files=[str(hosts)])
    hosts.write_text("127.0.0.1 localhost\n# BEGIN\n10.0.0.1 ctl\n# END\n")
    ledger("sealed", files=[str(hosts)])
    hosts.write_text("127.0.0.1 localhost box\n# BEGIN\n10.0.0.1 ctl\n# END\n10.9.9.9 printer\n")
    if again:
        ledger("recorded", files=[str(hosts)])
        ledger("sealed", files=[str(hosts)])
    said = ledger("restored")
    assert hosts.read_text().splitlines() == ["127.0.0.1 localhost box", "10.9.9.9 printer"]
    assert said["clusterctl_notes"] == []


@pytest.mark.parametrize("again", [False, True], ids=["one up", "another up after"])
def test_what_we_never_changed_is_left_alone(ledger: Ledger, etc: Path, again: bool) -> None:
    conf = etc / "theirs.conf"
    conf.write_text("old\n")
    files = [str(conf), str(etc / "later.conf")]
    ledger("recorded", files=files)
    ledger("sealed", files=files)
    conf.write_text("new\n")
    (etc / "later.conf").write_text("theirs\n")
    if again:
        ledger("recorded", files=files)
        ledger("sealed", files=files)
    ledger("restored")
    assert conf.read_text() == "new\n"
    assert (etc / "later.conf").read_text() == "theirs\n"
    assert sorted(path.name for path in etc.iterdir()) == ["later.conf", "theirs.conf"]


def test_an_up_that_was_killed_is_undone(ledger: Ledger, etc: Path) -> None:
    conf = etc / "a.conf"
    conf.write_text("theirs\n")
    ledger("recorded", files=[str(conf), str(etc / "b.conf")])
    conf.write_text("ours\n")
    (etc / "b.conf").write_text("ours\n")
    ledger("recorded", files=[str(conf), str(etc / "b.conf")])  # killed there, and run again
    ledger("restored")
    assert {path.name: path.read_text() for path in etc.iterdir()} == {"a.conf": "theirs\n"}


def test_a_folder_with_something_in_it_stays_and_is_named(ledger: Ledger, etc: Path) -> None:
    folders = [str(etc / "shared"), str(etc / "shared/home")]
    ledger("recorded", folders=folders)
    (etc / "shared/home/ada").mkdir(parents=True)
    ledger("sealed", folders=folders)
    said = ledger("restored")
    assert (etc / "shared/home/ada").is_dir()
    assert f"{etc}/shared/home: it" in str(said["clusterctl_notes"])


def test_patterns_find_what_came_later(ledger: Ledger, etc: Path) -> None:
    (etc / "mark-theirs").write_text("")
    ledger("recorded", files=[f"{etc}/mark-*"])
    (etc / "mark-ours").write_text("")
    ledger("sealed", files=[f"{etc}/mark-*"])
    ledger("restored")
    assert [path.name for path in etc.iterdir()] == ["mark-theirs"]


def test_a_host_belongs_to_one_cluster(ledger: Ledger, refuses: Refuses) -> None:
    ledger("recorded", files=[])
    for state in ("recorded", "sealed", "restored"):
        with refuses("another cluster"):
            ledger(state, cluster="other")


def test_looking_changes_nothing(ledger: Ledger, etc: Path, tmp_path: Path) -> None:
    (etc / "a.conf").write_text("theirs\n")
    assert ledger("recorded", check=True, files=[str(etc / "a.conf")])["changed"]
    assert not (tmp_path / "ledger").exists()
    ledger("recorded", files=[str(etc / "a.conf")])
    (etc / "a.conf").write_text("ours\n")
    assert ledger("restored", check=True)["changed"]
    assert (etc / "a.conf").read_text() == "ours\n"


def test_newer_ledger_is_rejected_and_only_root_can_read(
    ledger: Ledger, tmp_path: Path, refuses: Refuses
) -> None:
    ledger("recorded", files=[])
    book = tmp_path / "ledger/ledger.json"
    assert book.stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "ledger").stat().st_mode & 0o777 == 0o700
    book.write_text(json.dumps({"version": 99}))
    with refuses("newer clusterctl"):
        ledger("restored")


def test_nothing_is_sealed_that_was_not_recorded(ledger: Ledger, refuses: Refuses) -> None:
    """All that is installed would look like ours."""
    with refuses("has no record"):
        ledger("sealed", files=[])


def test_what_belongs_to_people_stays_in_a_folder_of_ours(
    ledger: Ledger, etc: Path, util: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch
) -> None:
    ledger("recorded", trees=[str(etc / "spool")])
    (etc / "spool/state").mkdir(parents=True)
    (etc / "spool/theirs").write_text("")
    (etc / "spool/ours").write_text("")
    ledger("sealed", trees=[str(etc / "spool")])
    paths = util("ledger_paths")
    asked = iter([False, False, True])  # ours, state, theirs: by name
    monkeypatch.setattr(paths, "_is_person", lambda _: next(asked))
    said = ledger("restored")
    assert [path.name for path in (etc / "spool").iterdir()] == ["theirs"]
    assert "spool/theirs" in said["clusterctl_notes"][0]


@pytest.mark.parametrize("others", [[], ["payroll"]])
def test_mariadb_with_foreign_databases_is_kept(
    ledger: Ledger,
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
    monkeypatch.setattr(util("ledger_restore"), "DATABASES", str(data))
    monkeypatch.setattr(
        util("ledger_guard"), "names", lambda: [str(made)] if made.exists() else ["-"]
    )
    accounts = ["root"]
    machine.answers["del",] = 0, "/", ""
    for kind in ("user", "group"):
        monkeypatch.setattr(util("ledger_host"), f"{kind}s", lambda: accounts)
        monkeypatch.setattr(util("ledger_host"), f"is_system_{kind}", lambda _: True)
        monkeypatch.setattr(
            util("ledger_host"), f"remove_{kind}", lambda run, name: run(["del", name])[1]
        )
    units = ["mariadb.service", "slurmdbd.service"]
    touches = {"files": [str(ours)], "folders": [str(settings)], "units": units}
    touches["trees"] = [str(folder) for folder in folders]
    ledger("recorded", **touches)
    # Of an `up` that was killed before MariaDB came.
    assert ledger("restored")["clusterctl_notes"] == []
    ledger("recorded", **touches)
    accounts += ["mysql", "slurm"]
    databases = [data / name for name in ("mysql", "slurm_acct_db", "#innodb_redo", *others)]
    for folder in (*folders, settings, *databases):
        folder.mkdir(parents=True, exist_ok=True)
    for path in (ours, made):
        path.write_text("")
    machine.answers["systemctl", "show"] = 0, "LoadState=loaded\nActiveState=active\n", ""
    ledger("sealed", **touches)
    notes = ledger("restored")["clusterctl_notes"]
    assert [note.partition(": ")[2] for note in notes if note.startswith("MariaDB")] == others
    assert len(notes) == len(others)
    assert [path.exists() for path in (*folders, settings, made)] == [bool(others)] * 5
    assert not ours.exists()
    assert [argv[-1] for argv in machine.ran if argv[1] == "stop"] == units[len(others) :]
    gone = [argv[-1] for argv in machine.ran if argv[0] == "del"]
    assert gone == (["slurm", "slurm"] if others else ["mysql", "slurm"] * 2)


def test_what_a_pattern_finds_after_a_killed_run_is_ours(ledger: Ledger, etc: Path) -> None:
    ledger("recorded", files=[f"{etc}/mark-*"])
    (etc / "mark-ours").write_text("")
    ledger("recorded", files=[f"{etc}/mark-*"])
    ledger("sealed", files=[f"{etc}/mark-*"])
    (etc / "mark-theirs").write_text("")
    ledger("recorded", files=[f"{etc}/mark-*"])
    ledger("sealed", files=[f"{etc}/mark-*"])
    ledger("restored")
    assert [path.name for path in etc.iterdir()] == ["mark-theirs"]


def test_what_rpm_kept_of_ours_goes_and_somebodys_stays(ledger: Ledger, etc: Path) -> None:
    """It does so with settings that are not as the package brought them."""
    ours = etc / "slurm.conf"
    shared = etc / "my.cnf"
    shared.write_text("theirs\n")
    touches = {"files": [str(ours), str(shared)]}
    ledger("recorded", **touches)
    ours.write_text("ours\n")
    shared.write_text("theirs\nours\n")
    ledger("sealed", **touches)
    ours.rename(f"{ours}.rpmsave")
    other = etc / "my.cnf.rpmsave"
    other.write_text("of another time\n")
    ledger("restored", **touches)
    assert sorted(path.name for path in etc.glob("*.cnf*")) == ["my.cnf", "my.cnf.rpmsave"]
    assert not Path(f"{ours}.rpmsave").exists()


def test_a_folder_of_ours_goes_however_deep_it_is(util: Callable[[str], ModuleType]) -> None:
    """A job whose account is gone left folders deeper than Python's recursion and a path can be."""
    with deep_folder() as top:
        (top / "shared" / "a").mkdir(parents=True)
        (top / "shared" / "a" / "file").touch()
        nest(top / "shared" / "job")
        assert util("ledger_paths").remove_tree(str(top / "shared")) == []
        assert list(top.iterdir()) == []


@pytest.fixture
def home() -> Iterator[Path]:
    """A home of an account that is gone, where its number can go."""
    top = Path("/var/tmp", f"clusterctl-test-{secrets.token_hex(4)}")
    (top / "ada").mkdir(parents=True)
    os.chown(top / "ada", PERSON, PERSON)
    yield top / "ada"
    shutil.rmtree(top)


def make(home: Path, *lines: str) -> Path:
    """The keys that may log in, the account's own."""
    keys = home / ".ssh/authorized_keys"
    keys.parent.mkdir()
    keys.write_text("".join(f"{line}\n" for line in lines))
    for path in (keys.parent, keys):
        os.chown(path, PERSON, PERSON)
    return keys


@pytest.mark.parametrize("before", [[], ["theirs"]])
def test_ledger_does_not_follow_links_in_homes(
    ledger: Ledger, home: Path, before: list[str]
) -> None:
    keys = make(home, *before) if before else home / ".ssh/authorized_keys"
    touches = {"files": [str(keys)], "folders": [str(keys.parent)]}
    ledger("recorded", **touches)
    if before:
        keys.write_text("theirs\nours\n")
    else:
        make(home, "ours")
    ledger("sealed", **touches)
    roots = home.parent / "roots"
    roots.mkdir()
    (roots / "authorized_keys").write_text("root's\n")
    keys.parent.rename(home / "away")
    keys.parent.symlink_to(roots)
    said = ledger("restored")
    assert [path.name for path in roots.iterdir()] == ["authorized_keys"]
    assert (roots / "authorized_keys").read_text() == "root's\n"
    assert (roots.stat().st_uid, (roots / "authorized_keys").stat().st_uid) == (0, 0)
    assert not before or any(str(keys) in note for note in said["clusterctl_notes"])


@pytest.mark.parametrize("made", ["pipe", "terabyte", "closed"])
def test_keys_changed_by_a_job_do_not_stop_the_restore(
    ledger: Ledger, home: Path, etc: Path, made: str
) -> None:
    keys = make(home, "ours")
    conf = etc / "conf"
    touches = {"files": [str(keys), str(conf)], "folders": [str(keys.parent)]}
    ledger("recorded", **touches)
    keys.write_text("ours\nmore\n")
    conf.write_text("ours\n")
    ledger("sealed", **touches)
    if made == "pipe":
        keys.unlink()
        os.mkfifo(keys)
    elif made == "terabyte":
        os.truncate(keys, 1 << 40)
    else:
        keys.parent.chmod(0)
    said = ledger("restored")
    assert not conf.exists()
    assert any(str(keys) in note for note in said["clusterctl_notes"])


def test_keys_in_a_home_are_given_back_with_its_accounts_rights(ledger: Ledger, home: Path) -> None:
    keys = make(home, "theirs")
    touches = {"files": [str(keys)], "folders": [str(keys.parent)]}
    ledger("recorded", **touches)
    keys.write_text("theirs\nours\n")
    ledger("sealed", **touches)
    keys.write_text("theirs\nours\nmore\n")
    ledger("restored")
    assert (keys.read_text(), keys.stat().st_uid) == ("theirs\nmore\n", PERSON)
