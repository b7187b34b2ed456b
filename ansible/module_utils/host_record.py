"""The record of what a host had before a cluster: a JSON document that only root can read."""

from __future__ import annotations

import fcntl
import glob
import grp
import hashlib
import itertools
import json
import os
import pwd
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible.module_utils.host_mounts import Mounts
from ansible.module_utils.host_units import Units
from ansible.module_utils.own_name import OWN
from ansible.module_utils.remote_rights import read_regular
from ansible.module_utils.user_rights import rights_for

Touches = Mapping[str, Mapping[str, Any]]
# AnsibleModule.run_command
Run = Callable[..., Any]

BEFORE = ".before-clusterctl"
# A file that may be the roles' or someone else's.
AFTER = ".after-clusterctl"
# The fingerprint of a file that can't be read, which proves nothing.
UNREADABLE = "unreadable"
_EMPTY: dict[str, Any] = {
    # The number of this layout. Raise it with each change, because a record of another would be misread.
    "format": 4,
    "cluster": "",
    # Whether the roles have run to their end since `begin`, or a removal to its own.
    "ended": False,
    # Patterns of clusterctl's own files -> role
    "own": {},
    # Patterns of other files that the roles write -> role
    "patterns": {},
    # Path of a file that the roles replace -> role, and three fingerprints. `owners`: of the owner's file,
    # which is kept as a copy; `written`: of the file when the roles had run; `theirs`: of the file that
    # someone else last made of it
    "files": {},
    # Path of an owner's file with lines of clusterctl between markers -> role, and the file's mode before;
    # None: there was none
    "blocks": {},
    # Account -> lines in authorized_keys; path of authorized_keys -> whether it existed
    "keys": {},
    "key_files": {},
    # The end of the comments around these lines
    "key_mark": "",
    # Group of an account that the roles create -> its gid before; None: there was none
    "groups": {},
    # Folders whose files another host removes
    "spared": [],
    # Path -> whether it existed; tree -> ABSENT, EMPTY or FULL; path -> whether it was a mount point
    "folders": {},
    "trees": {},
    "mounts": {},
    # Those of the mount points that were mounted after the roles had run.
    "mounted": [],
    # Database that the roles create unless it is there -> the user that they add
    "databases": {},
    # Unit -> role; its load, file and active state before; its file state when the roles had run (`left`)
    "units": {},
    "reloads": [],
    # Packages, and the units that start at boot and that run: those of the last `begin`, and those that
    # came between a `begin` and its `end`.
    "packages": {"before": [], "ours": []},
    "enabled": {"before": [], "ours": []},
    "active": {"before": [], "ours": []},
    # Roles whose files were moved back or removed, so that the owner's units must read them again.
    "changed": [],
    # The sentences of a removal about what it could not see a second time.
    "notes": [],
    # Path of a file that a removal took away -> the package that lacks the file
    "lacking": {},
}
# How long to wait for another process on the host, such as one of a `down` that was killed.
PATIENCE_S = 300.0


# What a tree of Slurm or clusterctl was before. That of an earlier cluster is empty, if it is a package's.
ABSENT = "absent"
EMPTY = "empty"
FULL = "full"


class RecordError(Exception):
    """The record is damaged, of another cluster, or something on the host prevents the removal."""


@contextmanager
def lock_record(path: str) -> Iterator[None]:
    """Hold the lock of the host: of its record and of all that the record lists. path: the record.

    Raises:
        RecordError: another process holds the lock for longer than PATIENCE_S.
    """
    # The lock of a folder leaves no file, and ends with its process.
    folder = os.open(Path(path).parent, os.O_RDONLY | os.O_DIRECTORY)
    deadline = time.monotonic() + PATIENCE_S
    try:
        while True:
            try:
                fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise RecordError(
                        "another `up` or `down` works on this host\n"
                        "fix: wait until it has ended, then run the command again"
                    ) from None
            time.sleep(0.1)
        yield
    finally:
        os.close(folder)


class Record:
    """The record of one host. ``content`` has the keys of ``_EMPTY``."""

    def __init__(self, path: str, content: dict[str, Any]) -> None:
        self._path = Path(path)
        self.content = content

    @classmethod
    def read(cls, path: str, cluster: str) -> Record:
        """Return the host's record; an empty record if there is none yet.

        Raises:
            RecordError: it is damaged, or of another cluster.
        """
        try:
            found = json.loads(Path(path).read_bytes())
            if found.get("format", 1) != _EMPTY["format"]:
                raise RecordError(
                    f"{path} is of another revision of clusterctl, nothing was changed\n"
                    "fix: run `clusterctl down` with the revision that ran the last `up`"
                )
            if any(not isinstance(found[key], type(value)) for key, value in _EMPTY.items()):
                raise ValueError("fields have other types")
        except FileNotFoundError:
            return cls(path, _empty(cluster))
        except (ValueError, KeyError, TypeError, AttributeError) as exc:
            raise RecordError(
                f"{path} is damaged ({exc}), nothing was changed\n"
                f"fix: move the files NAME{BEFORE} back by hand, and delete {path}"
            ) from exc
        if found["cluster"] != cluster:
            raise RecordError(
                f"this host belongs to another cluster (its id is {found['cluster']})\n"
                "fix: take that cluster down first"
            )
        return cls(path, found)

    @property
    def exists(self) -> bool:
        """Whether a run has begun to change the host."""
        return self._path.exists()

    def begin(self, touches: Touches, run: Run) -> None:
        """Keep the owner's files and note what exists. Call it before the roles run. It changes nothing
        that is noted already.
        """
        content = self.content
        if content["ended"] or not self.exists:
            for kind, now in _present(run).items():
                content[kind]["before"] = now
        units = Units(run)
        mounts = Mounts()
        for role, names in touches.items():
            for pattern in _spared(names, "files"):
                if OWN in pattern:
                    content["own"][pattern] = role
                else:
                    self._keep(role, pattern)
            for path in names.get("blocks", ()):
                content["blocks"].setdefault(path, {"role": role, "mode": mode_of(path)})
            for path in _spared(names, "folders"):
                content["folders"].setdefault(path, os.path.lexists(path))
            for path in names.get("trees", ()):
                content["trees"].setdefault(path, tree_state(path))
            for path in names.get("mounts", ()):
                content["mounts"].setdefault(path, mounts.is_mount_point(path))
            content["databases"].update(names.get("databases", {}))
            for unit in names.get("units", ()):
                if unit not in content["units"]:
                    content["units"][unit] = {**units.read(unit), "role": role}
            content["reloads"] = sorted({*content["reloads"], *names.get("reloads", ())})
            self._note_keys(names)
        content.update(ended=False, notes=[], lacking={})
        self.write()

    def end(self, run: Run) -> None:
        """Note what the roles have written and installed since `begin`. Without a `begin` they have not
        run, so that all changes are someone else's.
        """
        content = self.content
        if content["ended"] or not self.exists:
            return
        for pattern, role in content["patterns"].items():
            for path in glob.glob(pattern):
                if not path.endswith((BEFORE, AFTER)):
                    content["files"].setdefault(path, _new_entry(role))
        for path, entry in content["files"].items():
            entry["written"] = fingerprint(path)
        units = Units(run)
        for unit, before in content["units"].items():
            before["left"] = units.read(unit)["file"]
        mounts = Mounts()
        content["mounted"] = sorted(
            path for path in content["mounts"] if mounts.is_mount_point(path)
        )
        for kind, now in _present(run).items():
            noted = content[kind]
            noted["ours"] = sorted({*noted["ours"], *self.unsure(kind, now)}.intersection(now))
        content["ended"] = True
        self.write()

    def unsure(self, kind: str, now: Collection[str]) -> set[str]:
        """Return what came after a `begin` without an `end`: the roles or someone else brought it.

        kind: "packages", "enabled" or "active". now: all that are there.
        """
        noted = self.content[kind]
        return set() if self.content["ended"] else {*now} - {*noted["before"], *noted["ours"]}

    def write(self) -> None:
        """Replace the record. If nothing has changed, write nothing, so that this works on a full disk."""
        text = json.dumps(self.content, indent=1, sort_keys=True) + "\n"
        if self.exists and self._path.read_text() == text:
            return
        fresh = Path(f"{self._path}.new")
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(text)
            file.flush()
            os.fsync(descriptor)
        fresh.replace(self._path)

    def clear(self, notes: list[str]) -> None:
        """Keep only the notes of a removal. All that the host has from now on is its owner's."""
        self.content = {**_empty(self.content["cluster"]), "ended": True, "notes": notes}
        self.write()

    def note(self, text: str) -> None:
        """Record a sentence that a removal says, so that it is also said after a crash."""
        if text not in self.content["notes"]:
            self.content["notes"].append(text)
            self.write()

    def _keep(self, role: str, pattern: str) -> None:
        # Repositories stay, as the packages that come from them do.
        if glob.has_magic(pattern) and not pattern.endswith(".repo"):
            self.content["patterns"][pattern] = role
        for path in sorted(glob.glob(pattern)) if glob.has_magic(pattern) else [pattern]:
            self._keep_file(role, path)

    def _keep_file(self, role: str, path: str) -> None:
        """Keep a copy of a file that may be its owner's, before the roles write there."""
        now = fingerprint(path)
        if (entry := self.content["files"].get(path)) is None:
            entry = self.content["files"][path] = _new_entry(role)
            if now is not None:
                _copy_owners(path, entry, now)
            return
        is_lost = entry["owners"] is not None and not os.path.lexists(path + BEFORE)
        if is_lost and not is_of_roles(entry, now):
            # The owner has moved the copy back, or has removed it.
            _copy_owners(path, entry, now)
        elif self.content["ended"] and now != entry["written"]:
            if entry["written"] == entry["owners"]:
                # The roles had left it as it was, so this is the owner's file of before.
                _copy_owners(path, entry, now)
            else:
                entry["theirs"] = now

    def _note_keys(self, names: Mapping[str, Any]) -> None:
        for account, lines in names.get("keys", {}).items():
            noted = self.content["keys"].get(account, [])
            self.content["keys"][account] = sorted({*noted, *lines})
            if not has_account(account):
                self.content["groups"].setdefault(account, gid_of(account))
            for home in (f"~{account}", *(f"{folder}/{account}" for folder in names["homes"])):
                if path := key_file(home, names.get("spared", ())):
                    self.content["key_files"].setdefault(path, os.path.exists(path))
        self.content["key_mark"] = names.get("key_mark", self.content["key_mark"])
        self.content["spared"] = sorted({*self.content["spared"], *names.get("spared", ())})


def _empty(cluster: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(json.dumps(_EMPTY))
    return {**content, "cluster": cluster}


def has_account(name: str) -> bool:
    try:
        pwd.getpwnam(name)
    except KeyError:
        return False
    return True


def gid_of(group: str) -> int | None:
    """Return the number of a group; None if there is none."""
    try:
        return grp.getgrnam(group).gr_gid
    except KeyError:
        return None


def is_of_roles(entry: Mapping[str, Any], now: str | None) -> bool:
    """Return whether the roles wrote the present file. now: its fingerprint."""
    others = (entry["owners"], entry["theirs"], UNREADABLE)
    return now == entry["written"] and now not in others


def _new_entry(role: str) -> dict[str, Any]:
    return {"role": role, "owners": None, "written": None, "theirs": None}


def _copy_owners(path: str, entry: dict[str, Any], now: str | None) -> None:
    """Keep the present file, with the fingerprint ``now``, instead of the copy."""
    if fingerprint(path + BEFORE) != entry["owners"]:
        set_aside(path + BEFORE)
    if now is None:
        Path(path + BEFORE).unlink(missing_ok=True)
    else:
        copy_whole(path, path + BEFORE)
    entry["owners"] = now


def mode_of(path: str) -> int | None:
    """Return the mode of a file, also behind a link; None if there is none."""
    try:
        return stat.S_IMODE(os.stat(path).st_mode)
    except FileNotFoundError:
        return None


def tree_state(path: str) -> str:
    """Return whether a path is absent, an empty folder, or something else."""
    if not os.path.lexists(path):
        return ABSENT
    if os.path.islink(path) or not os.path.isdir(path) or os.path.ismount(path):
        return FULL
    return FULL if os.listdir(path) else EMPTY


def set_aside(copy: str) -> None:
    """Rename a copy that an earlier cluster has left, by a number after its name."""
    if os.path.lexists(copy):
        number = next(n for n in itertools.count(1) if not os.path.lexists(f"{copy}.{n}"))
        os.replace(copy, f"{copy}.{number}")


def _present(run: Run) -> dict[str, list[str]]:
    units = Units(run)
    return {"packages": installed(run), "enabled": units.enabled(), "active": units.active()}


def installed(run: Run) -> list[str]:
    """Return the names of the host's packages."""
    if shutil.which("dpkg-query"):
        argv = ["dpkg-query", "-W", "-f", "${db:Status-Status} ${Package}\n"]
        _, out, _ = run(argv, check_rc=True)
        rows = (line.split(" ") for line in out.splitlines())
        return [name for status, name in rows if status not in ("not-installed", "config-files")]
    if shutil.which("rpm"):
        _, out, _ = run(["rpm", "-qa", "--qf", "%{NAME}.%{ARCH}\n"], check_rc=True)
        return sorted({*out.splitlines()})
    return []


def fingerprint(path: str) -> str | None:
    """Return what tells the content of a file or link from others; None if there is none."""
    if os.path.islink(path):
        return f"link to {os.readlink(path)}"
    try:
        with rights_for(path):
            return hashlib.sha256(read_regular(path, most=None, follow=False)).hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError:
        return UNREADABLE


def copy_whole(path: str, target: str) -> None:
    """Copy a file or link with its owner, mode, times, access list and label. The copy is there as a
    whole or not at all.
    """
    fresh = f"{target}.new"
    Path(fresh).unlink(missing_ok=True)
    shutil.copyfile(path, fresh, follow_symlinks=False)
    status = os.lstat(path)
    # Before the mode, because a change of the owner drops its set-id bits. In a home, the owner is the same.
    if os.geteuid() == 0:
        os.chown(fresh, status.st_uid, status.st_gid, follow_symlinks=False)
    shutil.copystat(path, fresh, follow_symlinks=False)
    os.replace(fresh, target)


def _spared(names: Mapping[str, Any], key: str) -> Iterator[str]:
    """Yield the paths of a role, without those that another host removes. `~user` is skipped if the
    account does not exist.
    """
    spared = tuple(f"{folder}/" for folder in names.get("spared", ()))
    for pattern in names.get(key, ()):
        path = os.path.expanduser(pattern)
        if not path.startswith(("~", *spared)):
            yield path


def key_file(home: str, spared: Collection[str]) -> str:
    """Return the path of authorized_keys in a home; "" if another host removes it, or there is no such
    account.

    home: may be `~user`.
    """
    path = f"{os.path.expanduser(home)}/.ssh/authorized_keys"
    return "" if path.startswith(("~", *(f"{folder}/" for folder in spared))) else path
