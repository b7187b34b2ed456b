"""Removes clusterctl from a host, and gives the owner back what was kept."""

from __future__ import annotations

import errno
import glob
import os
import pwd
import shutil
import stat
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible.module_utils import host_units
from ansible.module_utils.host_mounts import Mounts, answers
from ansible.module_utils.host_record import (
    AFTER,
    BEFORE,
    EMPTY,
    FULL,
    UNREADABLE,
    Record,
    RecordError,
    Run,
    copy_whole,
    fingerprint,
    gid_of,
    installed,
    is_of_roles,
    key_file,
    mode_of,
    set_aside,
)
from ansible.module_utils.own_name import OWN
from ansible.module_utils.remote_rights import read_regular
from ansible.module_utils.user_rights import is_person_uid, owner_above, rights_for

# The comment of the accounts that the role `users` creates (roles/users/vars/main.yml).
ACCOUNT = "job user of clusterctl"
# The comment of the database that the role `mariadb` creates (roles/mariadb/tasks/configure.yml).
DATABASE = "created by clusterctl"
FSTAB = "/etc/fstab"
# A line of /etc/fstab of clusterctl has this mount option, which the kernel does not see.
_MOUNT_OPTION = "x-clusterctl"
# The ends of the markers around clusterctl's lines in files of the owner.
_MARKS = ("of clusterctl", "(clusterctl)")
_MARIADB = "mariadb.service"
_SHOWN = 10
# The mode that roles add to files of the owner which Slurm and jobs read (roles/common/tasks/configure.yml).
_READABLE = 0o444


class Removal:
    """The removal of clusterctl from this host. Every step can be repeated, such as after a crash.

    done: what was removed and moved back. What stays by design, and how to purge the packages, is in
        the notes of the record.
    """

    def __init__(self, run: Run, record: Record) -> None:
        self._run = run
        self._record = record
        self._content = record.content
        self._units = host_units.Units(run)
        self._mounts = Mounts()
        self.done: list[str] = []
        self._notes: list[str] = []
        # What could not be removed, each as "PATH stays: why".
        self._failures: list[str] = []
        # Of removed accounts, which are named once.
        self._homes: set[str] = set()
        # Path of authorized_keys -> whether it existed. Of the accounts as long as they are there.
        self._key_files = dict(self._content["key_files"])
        for account in self._content["keys"]:
            if path := key_file(f"~{account}", self._content["spared"]):
                self._key_files.setdefault(path, False)

    def run(self) -> None:
        """Remove everything that the record lists. The record keeps its notes alone, until `down` has
        said them. So a repeated removal leaves alone what the owner has made since then.

        Raises:
            RecordError: a file server of the owner does not answer, and nothing was changed; or something
                could not be removed, though all else was. The record stays then, for the next removal.
        """
        self._leave_silent_servers()
        self._keep_owners_choices()
        self._stop_units()
        self._drop_databases()
        self._remove_keys()
        self._remove_accounts()
        self._remove_own_files()
        self._cut_blocks()
        self._move_back()
        self._remove_trees()
        self._remove_folders(below_mounts=True)
        self._unmount()
        self._remove_folders(below_mounts=False)
        self._units.reload()
        self._units.forget_removed()
        for unit, before in self._content["units"].items():
            changed = before["role"] in self._content["changed"]
            reload = unit in self._content["reloads"]
            self.done += self._units.start(unit, before, changed=changed, reload=reload)
            # Somebody may have removed what it needs, such as the key of munge.
            if before["active"] == "active" and self._units.read(unit)["active"] != "active":
                self._notes.append(f"{unit} does not start again: see `systemctl status {unit}`")
        if self._failures:
            raise RecordError(
                "; ".join(self._failures)
                + "\nfix: let root of this host and the owner of the file read and "
                "write there, or remove what stays by hand; then run the command again"
            )
        self._name_packages()
        self._record.clear([*self._content["notes"], *self._notes])

    def _leave_silent_servers(self) -> None:
        """Unmount the folders that `up` mounted and whose file servers do not answer: systemd would
        wait for them.
        """
        mounted = [m for m in sorted(self._content["mounts"]) if self._mounts.is_mount_point(m)]
        silent = [path for path in mounted if not answers(path)]
        if foreign := [path for path in silent if self._content["mounts"][path]]:
            raise RecordError(
                f"the file server of {', '.join(foreign)} does not answer, and systemd would wait for "
                "it; nothing was changed\n"
                f"fix: repair the server, or run `umount -l {foreign[0]}` on this host"
            )
        for path in silent:
            self._run(["umount", "-f", "-l", path], check_rc=True)
            self.done.append(f"unmounted {path}, whose file server does not answer")

    def _keep_owners_choices(self) -> None:
        """Let units that someone else has enabled, disabled or masked since `up` be as they are now."""
        for unit, before in self._content["units"].items():
            left = before.pop("left", None)
            is_ours = OWN in unit or before["load"] == "not-found"
            if is_ours or not self._content["ended"] or left is None:
                continue
            now = self._units.read(unit)
            if now["file"] != left:
                # Someone who disables a unit that `up` has started does not want it to go on.
                if before["active"] != "active" and now["file"] != "enabled":
                    now["active"] = "inactive"
                before.update(now)
                self._record.note(
                    f"{unit} stays {now['file'] or 'away'}: someone else has changed that since"
                )
        self._record.write()

    def _stop_units(self) -> None:
        """Stop and disable the units that the roles started and enabled, and daemons that came with
        packages. Leave units that someone else has started since, and name those that may be theirs.
        """
        touched = self._content["units"]
        enabled, active = self._content["enabled"], self._content["active"]
        unsure = self._record.unsure("enabled", self._units.enabled())
        unsure |= self._record.unsure("active", self._units.active()).intersection(touched)
        # Without a file before, a unit came with the packages of a role.
        came = {unit for unit, before in touched.items() if before["load"] == "not-found"}
        ours = {*enabled["ours"], *active["ours"], *(unsure & came)}
        ours.update(unit for unit in touched if OWN in unit)
        ran = {*active["before"]} - {*active["ours"]}
        # The database last, for the daemons that write to it.
        for unit in sorted(ours, key=lambda unit: (unit == _MARIADB, unit)):
            if unit in touched or unit in enabled["ours"]:
                theirs = {"active": "active" if unit in ran else "inactive", "file": "disabled"}
                self.done += self._units.stop(unit, touched.get(unit, theirs))
        if unsure := unsure - ours:
            self._notes.append(
                f"{_shorten(sorted(unsure))} stay: started since the last `up` began, which did not end, "
                "so that they may be yours; if not: `systemctl disable --now UNIT`"
            )

    def _drop_databases(self) -> None:
        databases = self._content["databases"]
        if not databases or not shutil.which("mariadb"):
            return
        runs = self._units.read(_MARIADB)["active"] == "active"
        self._run(["systemctl", "start", _MARIADB])
        for name, user in databases.items():
            self._drop_database(name, user)
        if not runs:
            self._run(["systemctl", "stop", _MARIADB])

    def _drop_database(self, name: str, user: str) -> None:
        """Drop a database if the comment that the role gave it says that the role created it."""
        sql = "SELECT SCHEMA_NAME, SCHEMA_COMMENT FROM information_schema.SCHEMATA"
        rc, out, err = self._run(["mariadb", "--skip-column-names", "--batch", "--execute", sql])
        comments = dict(line.partition("\t")[::2] for line in out.splitlines())
        if rc == 0 and name not in comments:
            return
        if rc == 0 and comments[name] == DATABASE:
            sql = f"DROP DATABASE IF EXISTS {name}; DROP USER IF EXISTS {user}@localhost"
            rc, out, err = self._run(["mariadb", "--execute", sql])
            if rc == 0:
                self.done.append(f"removed the database {name}")
                return
        why = "it is not known to be the cluster's" if rc == 0 else (out + err).strip()[-300:]
        self._notes.append(f"MariaDB's database {name} stays: {why}")

    def _remove_keys(self) -> None:
        """Remove clusterctl's lines from the keys of accounts."""
        lines = {line for keys in self._content["keys"].values() for line in keys}
        for mount in self._content["mounted"]:
            away = [path for path in self._key_files if path.startswith(f"{mount}/")]
            if away and not self._mounts.is_mount_point(mount):
                self._notes.append(f"{mount} is not mounted: the cluster's keys in {away[0]} stay")
        for path, existed in self._key_files.items():
            with self._tolerate_errors(path), rights_for(path):
                target, text = _open_owners(path)
                mark = self._content["key_mark"]
                kept, _ = without_blocks(text, mark or _MARKS)
                rest = "".join(
                    line
                    for line in kept.splitlines(keepends=True)
                    if line.rstrip("\n") not in lines
                )
                if rest == text:
                    continue
                if existed or rest.strip():
                    _write(target, rest)
                else:
                    Path(target).unlink()
                self.done.append(f"removed the cluster's keys from {path}")

    def _remove_own_files(self) -> None:
        for pattern, role in self._content["own"].items():
            for path in sorted(glob.glob(pattern)):
                self._note_change(role)
                with self._tolerate_errors(path), rights_for(path):
                    if not stat.S_ISDIR(os.lstat(path).st_mode):
                        Path(path).unlink()
                        self.done.append(f"removed {path}")

    def _cut_blocks(self) -> None:
        """Remove the lines between clusterctl's markers from files of the owner, and the rights to read
        them that the roles gave.
        """
        for path, before in self._content["blocks"].items():
            self._cut_block(path, before["role"])
            mode = before["mode"]
            if mode is not None and mode_of(path) == mode | _READABLE:
                os.chmod(path, mode)

    def _cut_block(self, path: str, role: str) -> bool:
        """Remove clusterctl's lines from a file. Return whether it had any."""
        target, text = _open_owners(path)
        rest, stray = without_blocks(text)
        if rest == text:
            return False
        self._note_change(role)
        if stray:
            self._record.note(
                f"{path} may have lines of the cluster: of the markers around them, only {stray!r} was there"
            )
        _write(target, rest)
        self.done.append(f"removed the cluster's lines from {path}")
        return True

    def _move_back(self) -> None:
        """Move the kept files back. Leave and name a file that someone else has changed since."""
        lacking = self._content["lacking"]
        for path, entry in [*self._content["files"].items()]:
            older = sorted(glob.glob(f"{glob.escape(path + BEFORE)}.[0-9]*"))
            self._notes += [f"{copy} stays: of before an earlier cluster" for copy in older]
            self._give_back(path, entry)
        if lacking:
            again = (
                "apt-get install --reinstall -o Dpkg::Options::=--force-confmiss"
                if shutil.which("apt-get")
                else "dnf reinstall"
            )
            names = " ".join(sorted({*lacking.values()}))
            self._notes.append(
                f"packages lack {_shorten([*lacking])}, which the cluster had replaced; unless you purge "
                f"them: {again} {names}"
            )

    def _give_back(self, path: str, entry: Mapping[str, Any]) -> None:
        """Give a path its owner's file."""
        has_cut = self._cut_block(path, entry["role"])
        now = fingerprint(path)
        owners = entry["owners"]
        kept = path + BEFORE if owners is not None and os.path.lexists(path + BEFORE) else ""
        if kept and now == fingerprint(kept) != UNREADABLE:
            # The roles may have given it another mode or owner.
            _move(kept, path)
            self._forget(path)
            return
        if now is None and not kept:
            return
        is_ours = is_of_roles(entry, now)
        if owners is not None and not kept:
            # What is there may be the owner's file, or have parts of it.
            if is_ours:
                self._notes.append(
                    f"{path} stays, and is the cluster's: {path}{BEFORE}, your file, is gone"
                )
            return
        is_unsure = not self._content["ended"] and now not in (entry["theirs"], UNREADABLE)
        if has_cut or not (now is None or is_ours or is_unsure):
            also = f"; your file of before is {kept}" if kept else ""
            if also or (entry["written"] is not None and not has_cut):
                self._notes.append(f"{path} stays: someone else has changed it since{also}")
            return
        package = "" if kept else self._package(path)
        if package and not self._differs(path, package):
            return
        self._note_change(entry["role"])
        if now is not None and not is_ours:
            set_aside(path + AFTER)
            copy_whole(path, path + AFTER)
            for copy in sorted(glob.glob(f"{glob.escape(path + AFTER)}*")):
                self._record.note(f"{copy} stays: the last `up` did not end")
        if package:
            self._content["lacking"][path] = package
            self._record.write()
        if kept:
            _move(kept, path)
            self._forget(path)
            self.done.append(f"moved {path} back")
        else:
            Path(path).unlink()
            self.done.append(f"removed {path}")

    def _forget(self, path: str) -> None:
        """Record that a path is the owner's again, so that a repeated removal does not change it."""
        del self._content["files"][path]
        self._record.write()

    def _note_change(self, role: str) -> None:
        """Record, before the change, that units must read a role's files again."""
        if role not in self._content["changed"]:
            self._content["changed"].append(role)
            self._record.write()

    def _remove_trees(self) -> None:
        for path, before in sorted(self._content["trees"].items(), reverse=True):
            if before == FULL or not os.path.lexists(path):
                continue
            # Only a package's folder has folders of the package, and asking for each takes time.
            package_of = self._package if self._package(path) else None
            with self._tolerate_errors(path):
                if remaining := remove_tree(path, package_of, keep=before == EMPTY):
                    self._notes.append(f"files of users, or mounted: {_shorten(remaining)}")
                self.done.append(f"removed {path}")

    def _remove_folders(self, *, below_mounts: bool) -> None:
        """Remove the new folders that are empty, subfolders first.

        below_mounts: only those below mount points, without notes; else the others, and name those that
            have other content.
        """
        mounts = tuple(f"{path}/" for path in self._content["mounts"])
        named = [*self._homes]
        for path, existed in sorted(self._content["folders"].items(), reverse=True):
            if existed or path.startswith(mounts) != below_mounts or self._package(path):
                continue
            with self._tolerate_errors(path), rights_for(path):
                if not os.path.isdir(path) or os.path.islink(path):
                    continue
                if not (content := sorted(os.listdir(path))):
                    if not os.path.ismount(path):
                        Path(path).rmdir()
                        self.done.append(f"removed {path}")
                elif not any(f"{other}/".startswith(f"{path}/") for other in named):
                    named.append(path)
                    self._notes.append(f"{path} stays: it contains {_shorten(content)}")

    def _package(self, path: str) -> str:
        """Return the package that a path belongs to; "" if there is none."""
        if shutil.which("dpkg-query"):
            rc, out, _ = self._run(["dpkg-query", "-S", path])
            return str(out).partition(":")[0] if rc == 0 else ""
        rc, out, _ = self._run(["rpm", "-qf", "--qf", "%{NAME}\n", path])
        return str(out).partition("\n")[0] if rc == 0 else ""

    def _differs(self, path: str, package: str) -> bool:
        """Return whether a file has other content than its package, which stays, has brought."""
        argv = ["dpkg", "--verify"] if shutil.which("dpkg-query") else ["rpm", "-V"]
        _, out, _ = self._run([*argv, package])
        rows = (line.split() for line in out.splitlines())
        return any(row[-1:] == [path] and "5" in row[0] for row in rows)

    def _unmount(self) -> None:
        ours = [path for path, was_mounted in self._content["mounts"].items() if not was_mounted]
        text = _read(FSTAB)
        lines = text.splitlines(keepends=True)
        rest = "".join(line for line in lines if not _is_own_mount(line))
        if ours and rest != text:
            _write(FSTAB, rest)
            self.done.append(f"removed the cluster's line from {FSTAB}")
        for path in ours:
            if self._mounts.is_mount_point(path):
                self._run(["umount", path], check_rc=True)
                self.done.append(f"unmounted {path}")

    def _remove_accounts(self) -> None:
        for account in pwd.getpwall():
            if account.pw_gecos != ACCOUNT:
                continue
            home = account.pw_dir
            if home != "/" and os.path.isdir(home):
                self._record.note(f"{home} stays: the home of {account.pw_name}")
            host_units.remove_user(self._run, account)
            self.done.append(f"removed the account {account.pw_name}")
            self._homes.add(home)
        for name, gid in self._content["groups"].items():
            if gid is None:
                host_units.remove_group(self._run, name)
            elif gid_of(name) is None:
                # The account's end takes the group of its name with it.
                self._run(["groupadd", "--gid", str(gid), name], check_rc=True)

    def _name_packages(self) -> None:
        now = installed(self._run)
        unsure = self._record.unsure("packages", now)
        ours = unsure.union(self._content["packages"]["ours"]).intersection(now)
        if chosen := sorted(ours.intersection(_chosen_packages(self._run))):
            purge = "apt-get purge" if shutil.which("apt-get") else "dnf remove"
            since = " (also what you have installed since the last `up`)" if unsure else ""
            self._notes.append(f"packages stay; to purge them{since}: {purge} {' '.join(chosen)}")

    @contextmanager
    def _tolerate_errors(self, path: str) -> Iterator[None]:
        """Note a failure on a path because of a file server, or in a person's home, and continue: an NFS
        server with root_squash lets root remove nothing.
        """
        try:
            yield
        except FileNotFoundError:
            return
        except OSError as exc:
            # The owner of the path itself counts, too.
            if not self._mounts.is_servers_error(path, exc) and not owner_above(f"{path}/-"):
                raise
            self._failures.append(f"{path} stays: {exc.strerror or exc}")


def without_blocks(text: str, marks: str | tuple[str, ...] = _MARKS) -> tuple[str, str]:
    """Return (a text without the lines between clusterctl's markers, and without the markers; a marker
    without its other one, which is removed alone; "" if there is none).

    marks: how the markers end.
    """
    rest: list[str] = []
    start: int | None = None
    begin = stray = ""
    for line in text.splitlines(keepends=True):
        is_marker = line.rstrip("\n").endswith(marks)
        if is_marker and line.startswith("# BEGIN "):
            stray = stray or begin
            start = len(rest)
            begin = line.rstrip("\n")
        elif is_marker and line.startswith("# END "):
            if start is None:
                stray = line.rstrip("\n")
            else:
                del rest[start:]
            start = None
            begin = ""
        else:
            rest.append(line)
    return "".join(rest), stray or begin


def remove_tree(
    path: str, package_of: Callable[[str], str] | None, *, keep: bool = False
) -> list[str]:
    """Remove a folder with its content. Keep files of people and mount points in it, and return their
    paths.

    package_of: returns the package of a folder, which then stays; "" if there is none. None: all
        folders may go. keep: the folder itself stays.
    """
    if os.path.islink(path) or not os.path.isdir(path):
        Path(path).unlink()
        return []
    if os.path.ismount(path):
        return [path]
    remaining = []
    walked = []
    for folder, folders, files in os.walk(path, topdown=True):
        walked.append(folder)
        mounted = [name for name in folders if os.path.ismount(f"{folder}/{name}")]
        folders[:] = [name for name in folders if name not in mounted]
        remaining += [f"{folder}/{name}" for name in mounted]
        for name in [*files, *(one for one in folders if os.path.islink(f"{folder}/{one}"))]:
            place = f"{folder}/{name}"
            if _is_person(os.lstat(place).st_uid):
                remaining.append(place)
            else:
                Path(place).unlink()
    for folder in reversed(walked):
        stays = (keep and folder == path) or (package_of and package_of(folder))
        if not stays and not os.listdir(folder):
            Path(folder).rmdir()
    return sorted(remaining)


def _is_person(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return is_person_uid(uid)


def _is_own_mount(line: str) -> bool:
    options = line.split("#", maxsplit=1)[0].split()[3:4]
    return bool(options) and _MOUNT_OPTION in options[0].split(",")


def _read(path: str) -> str:
    """Return the text of a file; "" if there is none."""
    try:
        return read_regular(path, follow=False).decode(errors="surrogateescape")
    except FileNotFoundError:
        return ""


def _open_owners(path: str) -> tuple[str, str]:
    """Return (the file that a path of the owner leads to, its text), as Ansible's blockinfile opens it:
    through links. "": there is no regular file, so that nobody reads lines there.

    Raise OSError if it can't be read.
    """
    target = os.path.realpath(path)
    try:
        is_regular = stat.S_ISREG(os.stat(target).st_mode)
    except OSError as exc:
        if exc.errno not in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):
            raise
        is_regular = False
    return target, _read(target) if is_regular else ""


def _write(path: str, text: str) -> None:
    """Replace the text of a file, with the same owner, mode and label."""
    fresh = f"{path}.clusterctl-new"
    copy_whole(path, fresh)
    Path(fresh).write_text(text, encoding="utf-8", errors="surrogateescape")
    _move(fresh, path)


def _move(fresh: str, path: str) -> None:
    try:
        os.replace(fresh, path)
    except OSError:
        # /etc/hosts of a container is a mount point and can't be replaced.
        if not os.path.ismount(path):
            raise
        shutil.copyfile(fresh, path)
        Path(fresh).unlink()


def _chosen_packages(run: Run) -> list[str]:
    """Return the packages that are installed for themselves, not as dependencies, as ``installed`` names
    them.
    """
    if shutil.which("apt-mark"):
        _, out, _ = run(["apt-mark", "showmanual"])
        return str(out).split()
    query = "dnf --quiet --cacheonly repoquery --installed --qf".split()
    rc, out, _ = run([*query, "%{name}.%{arch} %{reason}\n"])
    # dnf ends each line itself, so that every other line is blank.
    rows = [line.split() for line in out.splitlines() if line.strip()] if rc == 0 else []
    return [row[0] for row in rows if row[1:] not in (["dependency"], ["weak-dependency"])]


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
