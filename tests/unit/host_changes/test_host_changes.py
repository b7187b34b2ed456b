"""`down` removes clusterctl's files, lines and accounts from a machine, and moves the owner's files back."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.unit.host_changes.conftest import Machine

Changes = Callable[..., dict[str, Any]]
Util = Callable[[str], ModuleType]
BLOCK = "# BEGIN hosts of this cluster (clusterctl)\n10.0.0.4 n2\n# END hosts of this cluster (clusterctl)\n"


def tree(folder: Path) -> dict[str, str]:
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}


def test_replaced_file_is_kept_and_moved_back(changes: Changes, etc: Path) -> None:
    conf = etc / "slurm.conf"
    conf.write_text("theirs\n")
    conf.chmod(0o640)
    os.utime(conf, (1, 1))
    files = [str(conf), str(etc / "gres.conf")]
    changes("begun", files=files)
    assert (etc / "slurm.conf.before-clusterctl").read_text() == "theirs\n"
    for path in files:
        Path(path).write_text("ours\n")
    changes("ended")
    result = changes("removed")
    assert tree(etc) == {"slurm.conf": "theirs\n"}
    assert (conf.stat().st_mode & 0o777, conf.stat().st_mtime) == (0o640, 1)
    assert result["clusterctl_notes"] == []


def test_file_of_a_killed_up_is_set_aside_because_it_may_be_the_owners(
    changes: Changes, etc: Path
) -> None:
    names = ("slurm.conf", "gres.conf", "topology.conf", "cgroup.conf")
    paths = [etc / name for name in names]
    for path in paths[:3]:
        path.write_text("theirs\n")
    files = [str(path) for path in paths]
    changes("begun", files=files[:1])
    paths[0].write_text("ours\n")
    changes("ended")
    changes("begun", files=files)
    for path in (paths[1], paths[3]):
        path.write_text("ours, or edited since\n")
    (etc / "gres.conf.after-clusterctl").write_text("older\n")
    notes = changes("removed")["clusterctl_notes"]
    unsure = [f"{name}.after-clusterctl" for name in ("gres.conf", "cgroup.conf")]
    assert tree(etc) == {
        **dict.fromkeys(names[:3], "theirs\n"),
        **dict.fromkeys(unsure, "ours, or edited since\n"),
        "gres.conf.after-clusterctl.1": "older\n",
    }
    assert all(any(name in note for note in notes) for name in unsure)


def test_file_that_matches_a_pattern_only_after_up_is_the_clusters(
    changes: Changes, etc: Path
) -> None:
    """Such as parameters in the folder of a package that `up` installs. Repositories stay."""
    files = [str(etc / "openmpi-*/prte.conf"), str(etc / "*.repo")]
    made = etc / "openmpi-5/prte.conf"
    theirs = etc / "openmpi-4/prte.conf"
    for _ in range(2):
        changes("begun", files=files)
        made.parent.mkdir(exist_ok=True)
        made.write_text("ours\n")
        (etc / "epel.repo").write_text("ours\n")
        changes("ended")
    theirs.parent.mkdir()
    theirs.write_text("theirs\n")
    changes("removed")
    assert tree(etc) == {"openmpi-4/prte.conf": "theirs\n", "epel.repo": "ours\n"}


@pytest.mark.parametrize("changed", [True, False])
def test_file_of_a_package_stays_or_its_lack_is_named(
    changes: Changes, etc: Path, machine: Machine, *, changed: bool
) -> None:
    conf = etc / "chrony.conf"
    changes("begun", files=[str(conf)])
    conf.write_text("pool\n")
    changes("ended")
    machine.owns("chrony", *([str(conf)] if changed else []))
    notes = changes("removed")["clusterctl_notes"]
    assert conf.exists() is not changed
    assert [str(conf) in note and note.endswith(" chrony") for note in notes] == [True] * changed


@pytest.mark.parametrize("kept", [True, False])
def test_file_that_someone_has_changed_since_stays_and_is_named(
    changes: Changes, etc: Path, kept: bool
) -> None:
    conf = etc / "slurm.conf"
    if kept:
        conf.write_text("theirs\n")
    changes("begun", files=[str(conf)])
    conf.write_text("ours\n")
    changes("ended")
    conf.write_text("ours, bettered\n")
    (note,) = changes("removed")["clusterctl_notes"]
    assert str(conf) in note
    assert ("slurm.conf.before-clusterctl" in note) == kept
    before = {"slurm.conf.before-clusterctl": "theirs\n"} if kept else {}
    assert tree(etc) == {"slurm.conf": "ours, bettered\n", **before}


@pytest.mark.parametrize("written", ["ours\n", "theirs\n"])
def test_file_whose_kept_copy_is_gone_stays_and_is_named_if_the_roles_changed_it(
    changes: Changes, etc: Path, written: str
) -> None:
    """It may have settings of its owner, such as a repository in which a role changes one line."""
    conf = etc / "slurm.conf"
    conf.write_text("theirs\n")
    changes("begun", files=[str(conf)])
    conf.write_text(written)
    changes("ended")
    (etc / "slurm.conf.before-clusterctl").unlink()
    notes = changes("removed")["clusterctl_notes"]
    assert tree(etc) == {"slurm.conf": written}
    named = ["slurm.conf.before-clusterctl" in note for note in notes]
    assert named == [True] * (written == "ours\n")


@pytest.mark.parametrize("first", ["ours\n", "theirs\n"], ids=["changed", "left alone"])
@pytest.mark.parametrize("killed", [True, False])
def test_file_whose_owner_took_the_copy_is_kept_again_before_the_next_up(
    changes: Changes, etc: Path, first: str, *, killed: bool
) -> None:
    conf = etc / "munge.key"
    conf.write_text("theirs\n")
    changes("begun", files=[str(conf)])
    conf.write_text(first)
    if not killed:
        changes("ended")
    (etc / "munge.key.before-clusterctl").rename(conf)
    changes("begun", files=[str(conf)])
    conf.write_text("ours\n")
    changes("ended")
    assert changes("removed")["clusterctl_notes"] == []
    assert tree(etc) == {"munge.key": "theirs\n"}


def test_copy_that_its_owner_has_edited_is_not_replaced(changes: Changes, etc: Path) -> None:
    conf = etc / "theirs.repo"
    conf.write_text("old\n")
    changes("begun", files=[str(conf)])
    changes("ended")
    (etc / "theirs.repo.before-clusterctl").write_text("an idea\n")
    conf.write_text("new\n")
    changes("begun", files=[str(conf)])
    changes("ended")
    changes("removed")
    ideas = {"theirs.repo.before-clusterctl.1": "an idea\n"}
    assert tree(etc) == {"theirs.repo": "new\n", **ideas}


@pytest.mark.parametrize("behind", ["/dev/null", "."])
def test_file_that_its_owner_made_a_link_to_no_regular_file_stays(
    changes: Changes, etc: Path, behind: str
) -> None:
    conf = etc / "chrony"
    conf.write_text("theirs\n")
    changes("begun", files=[str(conf)], blocks=[str(conf)])
    conf.write_text("ours\n")
    changes("ended")
    conf.unlink()
    conf.symlink_to(behind)
    notes = changes("removed")["clusterctl_notes"]
    assert str(conf.readlink()) == behind
    assert any("chrony.before-clusterctl" in note for note in notes)


@pytest.mark.parametrize("when", ["before", "between"])
def test_file_that_an_owner_calls_like_a_kept_one_stays(
    changes: Changes, etc: Path, when: str
) -> None:
    conf = etc / "slurm.conf"
    theirs = {"slurm.conf.before-clusterctl": "theirs\n"}
    for moment in ("before", "between"):
        if moment == when:
            (etc / "slurm.conf.before-clusterctl").write_text("theirs\n")
        changes("begun", files=[str(conf)])
        conf.write_text("ours\n")
        changes("ended")
    changes("removed")
    assert tree(etc) == theirs


def test_next_cluster_keeps_a_file_that_someone_had_changed(
    changes: Changes, etc: Path, tmp_path: Path
) -> None:
    conf = etc / "slurm.conf"
    conf.write_text("theirs\n")
    for _ in range(2):
        changes("begun", files=[str(conf)])
        conf.write_text("ours\n")
        changes("ended")
        conf.write_text("ours, bettered\n")
        notes = changes("removed")["clusterctl_notes"]
        # As `down` does after that.
        (tmp_path / "record.json").unlink()
    older = {"slurm.conf.before-clusterctl.1": "theirs\n"}
    assert tree(etc) == {"slurm.conf": "ours, bettered\n", **older}
    assert sum("slurm.conf.before-clusterctl.1" in note for note in notes) == 1


def test_file_that_the_next_up_replaced_again_is_moved_back(changes: Changes, etc: Path) -> None:
    conf = etc / "slurm.conf"
    conf.write_text("theirs\n")
    for edit in ("an idea\n", ""):
        changes("begun", files=[str(conf)])
        conf.write_text("ours\n")
        changes("ended")
        if edit:
            conf.write_text(edit)
    changes("removed")
    assert tree(etc) == {"slurm.conf": "theirs\n"}


@pytest.mark.parametrize("ups", [1, 2])
@pytest.mark.parametrize("was", [None, "old\n"])
def test_file_that_roles_leave_alone_keeps_its_owners_changes(
    changes: Changes, etc: Path, was: str | None, ups: int
) -> None:
    conf = etc / "theirs.repo"
    if was is not None:
        conf.write_text(was)
    changes("begun", files=[str(conf), str(etc / "*.repo")])
    changes("ended")
    conf.write_text("new\n")
    for _ in range(1, ups):
        changes("begun", files=[str(conf), str(etc / "*.repo")])
        changes("ended")
    changes("removed")
    assert tree(etc).pop("theirs.repo") == "new\n"


def test_owners_edit_of_a_file_that_roles_changed_once_is_not_lost(
    changes: Changes, etc: Path
) -> None:
    """Such as the repository that `up` enables, and then leaves as it is."""
    conf = etc / "rocky.repo"
    conf.write_text("enabled=0\n")
    changes("begun", files=[str(conf)])
    conf.write_text("enabled=1\n")
    changes("ended")
    conf.write_text("enabled=1\nproxy=http://theirs\n")
    changes("begun", files=[str(conf)])
    changes("ended")
    (note,) = changes("removed")["clusterctl_notes"]
    assert str(conf) in note
    assert "proxy" in conf.read_text()
    assert (etc / "rocky.repo.before-clusterctl").exists()


OWNERS = "127.0.0.1 localhost\n10.0.0.4 n2\n"


@pytest.mark.parametrize(
    ("now", "after"),
    [
        (OWNERS + BLOCK, OWNERS),
        (OWNERS, OWNERS),
        (OWNERS + BLOCK.replace("n2", "n2 n2.example"), OWNERS),
        (
            "first\n" + BLOCK + OWNERS + "192.0.2.7 later\n",
            "first\n" + OWNERS + "192.0.2.7 later\n",
        ),
        (OWNERS + BLOCK.partition("# END")[0], OWNERS + "10.0.0.4 n2\n"),
    ],
    ids=["unchanged", "block gone", "block changed", "lines added", "end marker gone"],
)
def test_only_lines_between_markers_leave_an_owners_file(
    changes: Changes, etc: Path, now: str, after: str
) -> None:
    hosts = etc / "hosts"
    hosts.write_text(OWNERS)
    changes("begun", blocks=[str(hosts)])
    hosts.write_text(OWNERS + BLOCK)
    changes("ended")
    hosts.write_text(now)
    changes("removed")
    assert tree(etc) == {"hosts": after}


@pytest.mark.parametrize("lacking", ["BEGIN", "END"])
def test_file_with_a_single_marker_is_named(changes: Changes, etc: Path, lacking: str) -> None:
    hosts = etc / "hosts"
    hosts.write_text(OWNERS)
    changes("begun", blocks=[str(hosts)])
    lines = [line for line in BLOCK.splitlines(keepends=True) if lacking not in line]
    hosts.write_text(OWNERS + "".join(lines))
    changes("ended")
    (note,) = changes("removed")["clusterctl_notes"]
    assert str(hosts) in note
    assert tree(etc) == {"hosts": OWNERS + "10.0.0.4 n2\n"}


@pytest.mark.parametrize(
    ("before", "written", "then"),
    [(0o640, 0o644, 0o640), (0o664, 0o664, 0o664), (0o640, 0o600, 0o600)],
)
def test_file_with_a_block_has_its_mode_again_unless_someone_changed_it(
    changes: Changes, etc: Path, before: int, written: int, then: int
) -> None:
    hosts = etc / "hosts"
    hosts.write_text(OWNERS)
    hosts.chmod(before)
    for _ in range(2):
        changes("begun", blocks=[str(hosts)])
        hosts.write_text(OWNERS + BLOCK)
        hosts.chmod(written)
        changes("ended")
    changes("removed")
    assert tree(etc) == {"hosts": OWNERS}
    assert hosts.stat().st_mode & 0o777 == then


@pytest.mark.parametrize("mode", [0o640, 0o664])
def test_file_that_the_roles_left_with_its_content_has_its_mode_again(
    changes: Changes, etc: Path, mode: int
) -> None:
    conf = etc / "slurm.conf"
    conf.write_text(OWNERS)
    conf.chmod(mode)
    changes("begun", files=[str(conf)])
    conf.chmod(0o644)
    changes("ended")
    changes("removed")
    assert tree(etc) == {"slurm.conf": OWNERS}
    assert conf.stat().st_mode & 0o777 == mode


def test_block_leaves_a_file_behind_a_link(changes: Changes, etc: Path) -> None:
    """Ansible writes blocks through links."""
    hosts = etc / "hosts"
    (etc / "hosts.site").write_text(OWNERS)
    hosts.symlink_to("hosts.site")
    changes("begun", blocks=[str(hosts)])
    (etc / "hosts.site").write_text(OWNERS + BLOCK)
    changes("ended")
    changes("removed")
    assert (hosts.is_symlink(), hosts.read_text()) == (True, OWNERS)


@pytest.mark.parametrize("later", ["pool a\n", "pool b\n"])
def test_block_leaves_a_kept_file_and_the_copy_stays_if_it_differs(
    changes: Changes, etc: Path, later: str
) -> None:
    """Chrony's settings: a whole file where clusterctl installs it, a block where it ran before."""
    conf = etc / "chrony.conf"
    conf.write_text("pool a\n")
    for text in ("pool a\n", later):
        changes("begun", files=[str(conf)])
        conf.write_text(text + "# BEGIN of clusterctl\nserver ctl\n# END of clusterctl\n")
        changes("ended")
    notes = changes("removed")["clusterctl_notes"]
    copy = {"chrony.conf.before-clusterctl": "pool a\n"} if later == "pool b\n" else {}
    assert tree(etc) == {"chrony.conf": later, **copy}
    assert ["chrony.conf.before-clusterctl" in note for note in notes] == [True] * len(copy)


def test_block_leaves_a_kept_file_behind_a_link(changes: Changes, etc: Path) -> None:
    conf = etc / "chrony.conf"
    (etc / "site.conf").write_text("pool a\n")
    conf.symlink_to("site.conf")
    changes("begun", files=[str(conf)])
    (etc / "site.conf").write_text("pool a\n" + BLOCK)
    changes("ended")
    changes("removed")
    assert conf.is_symlink()
    assert tree(etc) == dict.fromkeys(("chrony.conf", "site.conf"), "pool a\n")


def test_own_files_and_folders_are_removed_and_other_content_is_named(
    changes: Changes, etc: Path, machine: Machine
) -> None:
    own = etc / "clusterctl"
    folders = [str(own), str(etc / "exports.d"), str(etc / "shared")]
    changes("begun", files=[str(own / "*"), str(etc / "home/clusterctl")], folders=folders)
    for name in ("clusterctl", "exports.d", "shared/carl", "home/clusterctl/jobs"):
        (etc / name).mkdir(parents=True)
    (own / "fence").write_text("ours\n")
    changes("ended")
    (note,) = changes("removed")["clusterctl_notes"]
    assert f"{etc}/shared" in note
    assert sorted(path.name for path in etc.iterdir()) == ["home", "shared"]
    assert (etc / "home/clusterctl/jobs").is_dir()


@pytest.mark.parametrize("packaged", [False, True])
def test_content_of_a_new_tree_is_removed_and_the_folder_of_a_package_stays(
    changes: Changes, etc: Path, machine: Machine, packaged: bool
) -> None:
    state = etc / "slurmctld"
    (etc / "theirs").mkdir()
    (etc / "theirs/state").write_text("theirs\n")
    changes("begun", trees=[str(state), str(etc / "theirs")])
    (state / "hash.1").mkdir(parents=True)
    (state / "hash.1/job").write_text("ours\n")
    changes("ended")
    (state / "empty").mkdir()
    if packaged:
        for folder in (state, state / "empty"):
            machine.answers["dpkg-query", "-S", str(folder)] = (0, "slurm: PATH\n", "")
            machine.answers["rpm", "-qf", "--qf", "%{NAME}\n", str(folder)] = (0, "slurm\n", "")
    changes("removed")
    assert tree(etc) == {"theirs/state": "theirs\n"}
    assert [path.name for path in state.rglob("*")] == (["empty"] if packaged else [])
    assert state.exists() == packaged


@pytest.mark.parametrize("had", ["", "folder", "link"])
def test_state_of_a_second_cluster_is_removed_from_the_folder_that_was_empty(
    changes: Changes, etc: Path, had: str
) -> None:
    """Packages stay after the first, with their folders."""
    state = etc / "slurmctld"
    state.mkdir()
    if had == "folder":
        (state / "theirs").mkdir()
    elif had == "link":
        (state / "theirs").symlink_to(".")
    changes("begun", trees=[str(state)])
    (state / "clustername").write_text("ours\n")
    changes("ended")
    changes("removed")
    assert sorted(path.name for path in state.iterdir()) == ["clustername", "theirs"] * bool(had)


def test_keys_of_the_cluster_leave_peoples_authorized_keys(changes: Changes, etc: Path) -> None:
    names = {"keys": {"nobody-here": ["ssh-ed25519 AAAA clusterctl"]}, "homes": [str(etc)]}
    keys = etc / "nobody-here/.ssh/authorized_keys"
    other = etc / "ada/.ssh/authorized_keys"
    changes("begun", **names)
    changes("begun", keys={"ada": ["ssh-ed25519 AAAA clusterctl"]}, homes=[str(etc)])
    for path in (keys, other):
        path.parent.mkdir(parents=True)
        path.write_text("ssh-ed25519 AAAA clusterctl\n")
    other.write_text("ssh-ed25519 AAAA clusterctl\nssh-rsa CCCC ada@clusterctl\n")
    changes("ended")
    changes("removed")
    assert tree(etc) == {"ada/.ssh/authorized_keys": "ssh-rsa CCCC ada@clusterctl\n"}


@pytest.mark.parametrize("end", ["# END managed by clusterctl for demo\n", ""])
def test_block_of_keys_of_this_cluster_leaves_authorized_keys(
    changes: Changes, etc: Path, end: str
) -> None:
    """Another cluster, of a similar name, may have the same folder of homes."""
    keys = etc / "ada/.ssh/authorized_keys"
    keys.parent.mkdir(parents=True)
    others = (
        "ssh-rsa A ada\n# BEGIN managed by clusterctl for demo2\nssh-ed25519 BBBB clusterctl\n"
        "# END managed by clusterctl for demo2\n# BEGIN mpirun, managed by clusterctl for demo2\n"
        "ssh-ed25519 CCCC ada on the hosts of this cluster (clusterctl)\n"
        "# END mpirun, managed by clusterctl for demo2\n"
    )
    keys.write_text(others)
    ours = "ssh-ed25519 AAAA clusterctl"
    mark = " managed by clusterctl for demo"
    changes("begun", keys={"ada": [ours]}, key_mark=mark, homes=[str(etc)])
    keys.write_text(f"{others}# BEGIN managed by clusterctl for demo\n{ours}\n{end}")
    changes("ended")
    changes("removed")
    assert keys.read_text() == others


def test_keys_in_a_folder_that_hosts_share_are_removed_by_one_host(
    changes: Changes, etc: Path
) -> None:
    keys = etc / "home/ada/.ssh/authorized_keys"
    changes("begun", keys={"ada": ["ours"]}, homes=[str(etc / "home")], spared=[str(etc / "home")])
    keys.parent.mkdir(parents=True)
    keys.write_text("ours\n")
    changes("ended")
    changes("removed")
    assert keys.read_text() == "ours\n"


@pytest.mark.parametrize("others", ["", "ssh-rsa AAAA ada\n"])
def test_keys_leave_a_file_behind_a_link(changes: Changes, etc: Path, others: str) -> None:
    """`up` writes them through it. A file that held nothing else, and was not there before, goes."""
    keys = etc / "ada/.ssh/authorized_keys"
    keys.parent.mkdir(parents=True)
    file = etc / "ada/dotfiles"
    if others:
        file.write_text(others)
    keys.symlink_to("../dotfiles")
    changes("begun", keys={"ada": ["ours"]}, homes=[str(etc)])
    file.write_text(f"{others}ours\n")
    changes("ended")
    changes("removed")
    assert keys.is_symlink()
    assert tree(etc / "ada") == (
        {"dotfiles": others, ".ssh/authorized_keys": others} if others else {}
    )


def test_keys_that_cannot_be_removed_fail_the_removal_until_they_can(
    changes: Changes, etc: Path, util: Util, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All else is removed before. Root can read everything, so that the refusal is played."""

    def refuse(path: str) -> tuple[str, str]:
        raise PermissionError(13, "Permission denied", path)

    keys = etc / "ada/.ssh/authorized_keys"
    keys.parent.mkdir(parents=True)
    own = etc / "clusterctl"
    names = {"keys": {"ada": ["ours"]}, "homes": [str(etc)], "files": [str(own)]}
    changes("begun", **names)
    keys.write_text("ours\n")
    own.write_text("ours")
    changes("ended")
    removal = util("host_removal")
    with monkeypatch.context() as patch:
        patch.setattr(removal, "owner_above", lambda _: etc.stat())
        patch.setattr(removal, "_open_owners", refuse)
        with pytest.raises(util("host_record").RecordError, match=str(keys)):
            changes("removed")
    assert not own.exists()
    changes("removed")
    assert tree(etc) == {}


def test_only_accounts_that_clusterctl_made_are_removed(
    changes: Changes, util: Util, machine: Machine, tmp_path: Path
) -> None:
    """A group that was there before stays, with its number; userdel removes it if it has no members."""
    machine.has_account("bob", "Bob, job user", "/home/bob")
    machine.groups |= {"carl": 700, "users": 100}
    before = dict(machine.groups)
    home = tmp_path / "carl"
    changes("begun", folders=[str(home)], keys={"bob": [], "carl": [], "dan": []}, homes=[])
    for name in ("carl", "dan"):
        machine.has_account(name, util("host_removal").ACCOUNT, str(tmp_path / name))
    home.mkdir()
    (home / "thesis").write_text("theirs\n")
    changes("ended")
    (note,) = changes("removed")["clusterctl_notes"]
    assert [account.pw_name for account in machine.accounts] == ["bob"]
    assert machine.groups == before
    assert str(home) in note


def test_mount_line_of_the_cluster_leaves_fstab(
    changes: Changes, etc: Path, util: Util, monkeypatch: pytest.MonkeyPatch
) -> None:
    fstab = etc / "fstab"
    monkeypatch.setattr(util("host_removal"), "FSTAB", str(fstab))
    fstab.write_text("UUID=1 / ext4 defaults 0 1\n")
    changes("begun", mounts=["/shared"])
    theirs = "UUID=1 / ext4 defaults 0 1\nnas:/x /x nfs hard 0 0 # x-clusterctl\n"
    fstab.write_text(f"{theirs}head:/shared /shared nfs hard,x-clusterctl 0 0\n")
    changes("ended")
    changes("removed")
    assert fstab.read_text() == theirs


def test_packages_stay_and_the_command_to_purge_them_is_named(
    changes: Changes, machine: Machine
) -> None:
    suffix = "" if shutil.which("apt-mark") else ".x86_64"
    machine.has_packages("nginx")
    changes("begun")
    machine.has_packages("nginx", "munge", "libmunge")
    changes("ended")
    machine.has_packages("nginx", "munge", "libmunge", "htop")
    changes("begun")
    changes("ended")
    machine.answers["apt-mark", "showmanual"] = (0, "nginx\nmunge\nhtop\n", "")
    rows = [f"{name}.x86_64 user\n" for name in ("nginx", "munge", "htop")]
    machine.answers[("dnf",)] = (0, "".join([*rows, "libmunge.x86_64 dependency\n"]), "")
    (note,) = changes("removed")["clusterctl_notes"]
    assert note.endswith(f" munge{suffix}")
    assert not any(name in note for name in ("nginx", "htop", "libmunge"))


@pytest.mark.parametrize(
    ("comment", "named"), [("created by clusterctl", False), ("", True), (None, False)]
)
def test_accounting_database_is_dropped_if_the_role_created_it(
    changes: Changes, machine: Machine, monkeypatch: pytest.MonkeyPatch, comment: str, named: bool
) -> None:
    """It is dropped after the units that write to it have stopped, and MariaDB stops again."""
    monkeypatch.setattr(shutil, "which", lambda name: name)
    changes("begun", databases={"slurm_acct_db": "slurm"}, units=["slurmdbd.service"])
    machine.has_units("slurmdbd.service")
    changes("ended")
    row = "" if comment is None else f"slurm_acct_db\t{comment}\n"
    machine.answers["mariadb", "--skip-column-names"] = (0, f"payroll\t\n{row}", "")
    machine.answers["systemctl", "show", "slurmdbd.service"] = (0, "ActiveState=active\n", "")
    notes = changes("removed")["clusterctl_notes"]
    assert any("slurm_acct_db" in note for note in notes) is named
    drops = [argv for argv in machine.ran if "DROP DATABASE" in argv[-1]]
    assert len(drops) == (comment == "created by clusterctl")
    words = [
        argv[1:]
        for argv in machine.ran
        if argv[:2] in (["systemctl", "stop"], ["systemctl", "start"])
    ]
    assert words == [
        ["stop", "slurmdbd.service"],
        ["start", "mariadb.service"],
        ["stop", "mariadb.service"],
    ]


UNIT = ("systemctl", "show", "munge.service")


@pytest.mark.parametrize(
    ("before", "now", "commands"),
    [
        ("not-found", "enabled", ["stop", "disable"]),
        ("enabled", "enabled", ["restart"]),
        ("enabled", "disabled", ["enable", "restart"]),
    ],
)
def test_units_get_their_former_state_and_read_the_owners_files(
    changes: Changes, etc: Path, machine: Machine, *, before: str, now: str, commands: list[str]
) -> None:
    key = etc / "munge.key"
    key.write_text("theirs\n")
    states = {
        "not-found": "LoadState=not-found\nUnitFileState=\nActiveState=inactive\n",
        "enabled": "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n",
        "disabled": "LoadState=loaded\nUnitFileState=disabled\nActiveState=active\n",
    }
    machine.answers[UNIT] = (0, states[before], "")
    changes("begun", files=[str(key)], units=["munge.service"])
    key.write_text("ours\n")
    machine.has_units("munge.service")
    machine.answers[UNIT] = (0, states[now], "")
    changes("ended")
    changes("removed")
    ran = [argv[1] for argv in machine.ran if argv[0] == "systemctl" and argv[-1] == UNIT[-1]]
    assert [word for word in ran if word != "show"] == commands


def test_unit_that_does_not_start_again_is_named(changes: Changes, machine: Machine) -> None:
    shown = "LoadState=loaded\nUnitFileState=enabled\nActiveState={}\n"
    machine.answers[UNIT] = (0, shown.format("active"), "")
    changes("begun", units=["munge.service"])
    changes("ended")
    machine.answers[UNIT] = (0, shown.format("failed"), "")
    machine.answers["systemctl", "restart"] = (1, "", "Job for munge.service failed")
    result = changes("removed")
    (note,) = result["clusterctl_notes"]
    assert "munge.service" in note
    assert result["done"] == []


@pytest.mark.parametrize(("before", "choice"), [("enabled", "disabled"), ("disabled", "masked")])
def test_unit_that_its_owner_enables_or_disables_later_stays_so_and_is_named(
    changes: Changes, machine: Machine, before: str, choice: str
) -> None:
    shown = "LoadState=loaded\nUnitFileState={}\nActiveState={}\n"
    machine.answers[UNIT] = (0, shown.format(before, "active"), "")
    changes("begun", units=["munge.service"])
    machine.answers[UNIT] = (0, shown.format("enabled", "active"), "")
    changes("ended")
    machine.answers[UNIT] = (0, shown.format(choice, "inactive"), "")
    (note,) = changes("removed")["clusterctl_notes"]
    assert "munge.service" in note
    assert choice in note
    ran = [argv[1] for argv in machine.ran if argv[0] == "systemctl" and argv[-1] == UNIT[-1]]
    assert ran == []


@pytest.mark.parametrize("before", ["active", "inactive"])
def test_unit_that_its_owner_disables_without_stopping_it_gets_its_former_state(
    changes: Changes, machine: Machine, before: str
) -> None:
    shown = "LoadState=loaded\nUnitFileState={}\nActiveState={}\n"
    machine.answers[UNIT] = (0, shown.format("disabled", before), "")
    if before == "active":
        machine.has_units(UNIT[-1])
    changes("begun", units=["munge.service"])
    machine.has_units(UNIT[-1])
    machine.answers[UNIT] = (0, shown.format("enabled", "active"), "")
    changes("ended")
    machine.answers[UNIT] = (0, shown.format("disabled", "active"), "")
    changes("removed")
    ran = [argv[1] for argv in machine.ran if argv[0] == "systemctl" and argv[-1] == UNIT[-1]]
    assert [word for word in ran if word != "show"] == ["stop"] * (before == "inactive")


def test_daemons_that_came_with_packages_are_stopped(changes: Changes, machine: Machine) -> None:
    listed = ("systemctl", "list-unit-files")
    machine.answers["systemctl", "show"] = (0, "UnitFileState=enabled\nActiveState=active\n", "")
    for before, after in (
        ("cron.service", "rpcbind.socket"),
        ("theirs.service", "rpcbind.service"),
    ):
        lines = machine.answers.get(listed, (0, "", ""))[1]
        machine.answers[listed] = (0, f"{lines}{before} enabled enabled\n", "")
        changes("begun")
        lines = machine.answers[listed][1]
        machine.answers[listed] = (0, f"{lines}{after} enabled enabled\n", "")
        changes("ended")
    changes("removed")
    stopped = [argv[2] for argv in machine.ran if argv[:2] == ["systemctl", "stop"]]
    disabled = [argv[2] for argv in machine.ran if argv[:2] == ["systemctl", "disable"]]
    assert stopped == disabled == ["rpcbind.service", "rpcbind.socket"]


def test_unit_that_its_owner_starts_later_goes_on(changes: Changes, machine: Machine) -> None:
    """Such as a firewall, which no role starts, but which reads a file of a role."""
    machine.answers["systemctl", "show"] = (0, "UnitFileState=disabled\nActiveState=inactive\n", "")
    for _ in range(2):
        changes("begun", units=["firewalld.service", "clusterctl-watcher.service"])
        changes("ended")
        machine.has_units("firewalld.service")
    machine.answers["systemctl", "show"] = (0, "UnitFileState=enabled\nActiveState=active\n", "")
    changes("removed")
    acted = [argv[1:] for argv in machine.ran if argv[1] in ("stop", "disable")]
    assert acted == [[word, "clusterctl-watcher.service"] for word in ("stop", "disable")]


def test_units_of_a_killed_up_are_named_if_they_may_be_the_owners(
    changes: Changes, machine: Machine
) -> None:
    machine.answers["systemctl", "show"] = (0, "LoadState=loaded\nActiveState=inactive\n", "")
    machine.answers["systemctl", "show", "slurmd.service"] = (0, "LoadState=not-found\n", "")
    changes("begun", units=["slurmd.service", "mariadb.service"])
    machine.has_units("slurmd.service", "mariadb.service", "nginx.service")
    shown = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n"
    for unit in (("slurmd.service",), ()):
        machine.answers["systemctl", "show", *unit] = (0, shown, "")
    (note,) = changes("removed")["clusterctl_notes"]
    acted = [argv[1:] for argv in machine.ran if argv[1] in ("stop", "disable")]
    assert acted == [[word, "slurmd.service"] for word in ("stop", "disable")]
    assert all(unit in note for unit in ("mariadb.service", "nginx.service"))


def test_folder_that_is_mounted_in_a_tree_stays(
    changes: Changes, etc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    inside = etc / "spool/disk"
    disk = etc / "log"
    changes("begun", trees=[str(etc / "spool"), str(disk)])
    for folder in (inside / "empty", disk / "empty", etc / "spool/a/b"):
        folder.mkdir(parents=True)
    changes("ended")
    monkeypatch.setattr(os.path, "ismount", lambda path: path in (str(inside), str(disk)))
    notes = " ".join(changes("removed")["clusterctl_notes"])
    assert (inside / "empty").is_dir()
    assert (disk / "empty").is_dir()
    assert not (etc / "spool/a").exists()
    assert str(inside) in notes
    assert str(disk) in notes


def test_failure_before_the_roles_ran_makes_nothing_the_clusters(
    changes: Changes, etc: Path, machine: Machine
) -> None:
    """`ended` also runs after a failure of what precedes `begun`, and on hosts that did not answer then."""
    listed = ("systemctl", "list-unit-files")
    machine.answers["systemctl", "show"] = (0, "UnitFileState=enabled\nActiveState=active\n", "")
    machine.answers[listed] = (0, "sshd.service enabled enabled\n", "")
    machine.has_packages("openssh-server")
    conf = etc / "slurm.conf"
    changes("ended")
    assert not changes("removed")["changed"]
    changes("begun", files=[str(conf)])
    conf.write_text("ours\n")
    changes("ended")
    machine.answers[listed] = (0, "sshd.service enabled enabled\nnginx.service enabled -\n", "")
    conf.write_text("ours, bettered\n")
    changes("ended")
    machine.answers["apt-mark", "showmanual"] = (0, "openssh-server\n", "")
    machine.answers[("dnf",)] = (0, "openssh-server.x86_64 user\n", "")
    (note,) = changes("removed")["clusterctl_notes"]
    assert str(conf) in note
    assert [argv for argv in machine.ran if argv[1] in ("stop", "disable")] == []


def test_silent_file_server_of_the_owner_stops_the_removal_before_it_begins(
    changes: Changes, etc: Path, util: Util, monkeypatch: pytest.MonkeyPatch
) -> None:
    removal = util("host_removal")
    mounts = util("host_mounts").Mounts
    monkeypatch.setattr(mounts, "is_mount_point", lambda _, path: path == "/shared")
    conf = etc / "slurm.conf"
    changes("begun", files=[str(conf)], mounts=["/shared"])
    conf.write_text("ours\n")
    changes("ended")
    monkeypatch.setattr(removal, "answers", lambda _: False)
    with pytest.raises(util("host_record").RecordError) as caught:
        changes("removed")
    assert "/shared" in str(caught.value)
    assert conf.exists()


def test_unmounted_folder_is_named_because_keys_stay_there(
    changes: Changes, util: Util, monkeypatch: pytest.MonkeyPatch
) -> None:
    mounts = util("host_mounts").Mounts
    changes("begun", mounts=["/shared"], keys={"ada": []}, homes=["/shared/home"])
    monkeypatch.setattr(mounts, "is_mount_point", lambda *_: True)
    changes("ended")
    monkeypatch.setattr(mounts, "is_mount_point", lambda *_: False)
    (note,) = changes("removed")["clusterctl_notes"]
    assert "/shared" in note


@pytest.mark.parametrize("text", ["", "[]", '{"cluster": "abc"}'])
def test_damaged_record_changes_nothing(
    changes: Changes, util: Util, tmp_path: Path, text: str
) -> None:
    (tmp_path / "record.json").write_text(text)
    for state in ("begun", "removed"):
        with pytest.raises(util("host_record").RecordError):
            changes(state)
    assert (tmp_path / "record.json").read_text() == text


@pytest.mark.parametrize("number", [None, 1, 99])
def test_record_of_another_revision_is_refused_and_changes_nothing(
    changes: Changes, etc: Path, util: Util, tmp_path: Path, number: int | None
) -> None:
    changes("begun", trees=[str(etc / "spool")])
    record = tmp_path / "record.json"
    content = json.loads(record.read_text())
    content["format"] = number
    if number is None:
        del content["format"]
    text = json.dumps(content)
    record.write_text(text)
    (etc / "spool").mkdir()
    for state in ("begun", "ended", "removed"):
        with pytest.raises(util("host_record").RecordError) as caught:
            changes(state)
        assert "`clusterctl down`" in str(caught.value)
    assert record.read_text() == text
    assert (etc / "spool").is_dir()


def test_host_of_another_cluster_is_refused(changes: Changes, util: Util) -> None:
    changes("begun")
    for state in ("begun", "ended", "removed"):
        with pytest.raises(util("host_record").RecordError) as caught:
            changes(state, cluster="other")
        assert "abc" in str(caught.value)


def test_host_without_a_record_and_check_mode_change_nothing(
    changes: Changes, etc: Path, machine: Machine, tmp_path: Path
) -> None:
    (etc / "slurm.conf").write_text("theirs\n")
    assert not changes("removed")["changed"]
    assert changes("begun", check=True, files=[str(etc / "slurm.conf")])["changed"]
    assert tree(tmp_path) == {"etc/slurm.conf": "theirs\n"}


def test_second_run_is_refused_if_the_first_does_not_end_in_time(
    changes: Changes, util: Util, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the `down` after one whose control host was killed: its module goes on."""
    record = util("host_record")
    monkeypatch.setattr(record, "PATIENCE_S", 0.2)
    for state in ("begun", "ended", "removed"):
        with record.lock_record(str(tmp_path / "record.json")), pytest.raises(record.RecordError):
            changes(state)
        changes(state)


@pytest.mark.parametrize("again", [False, True], ids=["down", "up and down"])
def test_repeated_removal_leaves_what_the_owner_has_made_since(
    changes: Changes, etc: Path, machine: Machine, *, again: bool
) -> None:
    """Such as by a `down` after one that was killed before it removed the record."""
    state = etc / "slurmctld"
    names = {
        "trees": [str(state)],
        "units": ["slurmctld.service"],
        "files": [str(etc / "slurm.conf")],
        "folders": [str(etc / "slurm")],
    }
    machine.answers["systemctl", "show"] = (0, "LoadState=not-found\n", "")
    changes("begun", **names)
    (etc / "slurm").mkdir()
    for path in (state / "job_state", etc / "slurm/stays", etc / "slurm.conf"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("ours\n")
    machine.has_units("slurmctld.service")
    shown = "LoadState=loaded\nUnitFileState=enabled\nActiveState=active\n"
    machine.answers["systemctl", "show"] = (0, shown, "")
    changes("ended")
    notes = changes("removed")["clusterctl_notes"]
    assert any(str(etc / "slurm") in note for note in notes)

    state.mkdir()
    theirs = {"slurmctld/job_state": "theirs\n", "slurm.conf": "theirs\n"}
    for name, text in theirs.items():
        (etc / name).write_text(text)
    del machine.ran[:]
    if again:
        changes("begun", **names)
        changes("ended")
        assert changes("removed")["clusterctl_notes"] == []
    else:
        assert changes("removed") == {"changed": True, "done": [], "clusterctl_notes": notes}
    assert tree(etc) == {**theirs, "slurm/stays": "ours\n"}
    assert not [argv for argv in machine.ran if argv[1] in ("stop", "disable")]


class Killed(BaseException):
    """The end of a process at any moment."""


def test_killed_removal_continues_wherever_it_was(
    changes: Changes,
    etc: Path,
    util: Util,
    *,
    machine: Machine,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Killed before each change and each command, the next removal leaves the same machine, and says the
    same.
    """
    monkeypatch.setattr(util("host_removal"), "FSTAB", str(etc / "fstab"))
    theirs = {"hosts": OWNERS, "munge.key": "theirs\n", "fstab": "UUID=1 / ext4 defaults 0 1\n"}
    for name, text in theirs.items():
        (etc / name).write_text(text)
    changes(
        "begun",
        files=[
            str(etc / name) for name in ("munge.key", "chrony.conf", "slurm.conf", "clusterctl/*")
        ],
        blocks=[str(etc / "hosts")],
        folders=[str(etc / "clusterctl")],
        trees=[str(etc / "spool")],
        mounts=["/shared"],
        units=["munge.service", "chrony.service"],
        keys={"ada": ["ssh-ed25519 AAAA clusterctl"], "carl": []},
        homes=[str(etc)],
    )
    machine.has_account("carl", util("host_removal").ACCOUNT, str(etc / "carl"))
    (etc / "carl").mkdir()
    (etc / "hosts").write_text(f"{OWNERS}{BLOCK}# BEGIN more (clusterctl)\n")
    for name in (
        "munge.key",
        "chrony.conf",
        "slurm.conf",
        "clusterctl/fence",
        "spool/a/b",
        "ada/.ssh/authorized_keys",
    ):
        (etc / name).parent.mkdir(parents=True, exist_ok=True)
        (etc / name).write_text("ours\n")
    (etc / "ada/.ssh/authorized_keys").write_text("ssh-rsa A ada\nssh-ed25519 AAAA clusterctl\n")
    (etc / "fstab").write_text(theirs["fstab"] + "head:/shared /shared nfs x-clusterctl 0 0\n")
    machine.answers["systemctl", "show", "chrony.service"] = (0, "LoadState=loaded\n", "")
    changes("ended")
    disabled = "LoadState=loaded\nUnitFileState=disabled\n"
    machine.answers["systemctl", "show", "chrony.service"] = (0, disabled, "")
    packaged = str(etc / "chrony.conf")
    machine.answers["dpkg-query", "-S", packaged] = (0, "chrony: PATH\n", "")
    machine.answers["rpm", "-qf", "--qf", "%{NAME}\n", packaged] = (0, "chrony\n", "")
    told = f"??5?????? c {packaged}\n"
    machine.answers["dpkg", "--verify"] = machine.answers["rpm", "-V"] = (1, told, "")
    whole = tmp_path / "whole"
    shutil.copytree(etc, whole)
    record = (tmp_path / "record.json").read_text()
    accounts = machine.accounts
    groups = machine.groups

    left = [0]

    def counted(function: Any) -> Any:
        def call(*args: Any, **options: Any) -> Any:
            left[0] -= 1
            if left[0] == 0:
                raise Killed
            return function(*args, **options)

        return call

    monkeypatch.setattr(Machine, "run", counted(Machine.run))
    monkeypatch.setattr(os, "replace", counted(os.replace))
    for name in ("unlink", "rmdir", "write_text", "replace"):
        monkeypatch.setattr(Path, name, counted(getattr(Path, name)))
    moments = 0
    said = []
    while True:
        machine.accounts, machine.groups = [*accounts], {**groups}
        shutil.rmtree(etc)
        shutil.copytree(whole, etc)
        with (tmp_path / "record.json").open("w") as file:
            file.write(record)
        left[0] = moments = moments + 1
        try:
            changes("removed")
            is_whole = True
        except Killed:
            is_whole = False
        left[0] = 0
        said.append(sorted(changes("removed")["clusterctl_notes"]))
        assert tree(etc) == {**theirs, "ada/.ssh/authorized_keys": "ssh-rsa A ada\n"}, moments
        assert (machine.accounts, machine.groups) == ([], {}), moments
        if is_whole:
            break
    assert moments > 20
    for path in ("chrony.service", "chrony.conf", "carl", "hosts"):
        assert any(path in note for note in said[-1]), path
    assert all(notes == said[-1] for notes in said)


@pytest.mark.parametrize(
    ("tool", "command", "output"),
    [
        ("apt-mark", ("apt-mark",), "munge\nnginx\n"),
        (
            "dnf",
            ("dnf",),
            "munge.x86_64 user\n\nlibmunge.x86_64 dependency\n\nnginx.x86_64 group\n\n",
        ),
    ],
)
def test_packages_that_were_asked_for_are_told_from_dependencies(
    util: Util,
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    *,
    tool: str,
    command: tuple[str, ...],
    output: str,
) -> None:
    """dnf prints a blank line after each package."""
    monkeypatch.setattr(shutil, "which", lambda name: name if name == tool else None)
    machine.answers[command] = (0, output, "")
    chosen = util("host_removal")._chosen_packages(machine.run)
    assert [name.partition(".")[0] for name in chosen] == ["munge", "nginx"]


@pytest.mark.parametrize("packaged", [True, False])
def test_link_that_a_package_brought_stays(
    changes: Changes, etc: Path, machine: Machine, *, packaged: bool
) -> None:
    link = etc / "libpmix.so"
    changes("begun", files=[str(link)])
    link.symlink_to("libpmix.so.2")
    changes("ended")
    if packaged:
        machine.owns("slurm")
    changes("removed")
    assert link.is_symlink() == packaged
