"""Restores the state of a host before clusterctl changed it, and reports items that can't be
restored.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils import snapshot_host as host
from ansible.module_utils.snapshot_guard import FolderMover, Guard
from ansible.module_utils.snapshot_mounts import Mounts, answers
from ansible.module_utils.snapshot_packages import RPM_SAVED, Dpkg, Rpm
from ansible.module_utils.snapshot_paths import (
    ABSENT,
    State,
    owner_version,
    read,
    read_state,
    remove,
    remove_empty,
    remove_tree,
    save_beside,
    write_state,
)
from ansible.module_utils.snapshot_record import is_elsewhere, new_in_etc
from ansible.module_utils.snapshot_store import SnapshotError, Store
from ansible.module_utils.user_rights import owner_above, rights_for

_OWN_DATABASES = frozenset(
    {"mysql", "performance_schema", "sys", "test", "lost+found", "slurm_acct_db"}
)
# How the names of MariaDB's packages, unit, account and folders begin.
_MARIADB = ("mariadb", "mysql", "my.cnf.d")
_SHOWN = 10


class Restorer:
    """Undoes all recorded changes to this host. Every step can be repeated, such as after a
    crash.
    """

    def __init__(
        self,
        module: AnsibleModule,
        store: Store,
        snapshot: dict[str, Any],
        packages: Dpkg | Rpm | None,
        paths: host.HostPaths,
    ) -> None:
        self._module = module
        self._run = module.run_command
        self._store = store
        self._snapshot = snapshot
        self._packages = packages
        self._paths = paths
        self._units = host.Units(self._run)
        self._done: list[str] = []
        self._left: list[str] = []
        # Reason -> paths that are not restored.
        self._failed: dict[str, list[str]] = {}
        # Home -> account that was removed, and folders in `_left`.
        self._homes: dict[str, str] = {}
        self._reported: set[str] = set()
        self._spared: tuple[str, ...] = ()
        self._mounts = Mounts(paths.mounts)
        self._guard = Guard(str(store.root / "etc"), paths.etc)
        self._mover = FolderMover([path for path, was in snapshot["trees"].items() if was])

    def restore(self) -> dict[str, object]:
        """Restore the host. Return the module's result, with notes about items that were not
        restored.
        """
        if not self._store.is_there:
            # A run may have been killed before it wrote the snapshot, or while it deleted the snapshot.
            leftover = self._store.root.exists()
            if leftover and not self._module.check_mode:
                self._store.remove()
            return {"changed": leftover, "done": [], "clusterctl_notes": []}
        if self._module.check_mode:
            return {"changed": True, "done": [], "clusterctl_notes": []}
        self._check_contents()
        self._leave_silent_servers()
        self._spare_foreign_databases()
        self._put_folders_back()
        self._keep_foreign_versions()
        for unit, before in self._snapshot["units"].items():
            if not self._is_spared(unit):
                self._done += self._units.stop(unit, before)
        self._unmount()
        self._report_elsewhere()
        # The purge of munge fails on an account whose uid is not a system uid, so accounts go
        # first.
        self._remove_accounts()
        self._remove_packages()
        self._remove_saved()
        self._restore_files()
        self._remove_generated()
        for path, state in self._versions():
            if self._is_elsewhere(path):
                continue
            with self._tolerate_errors(path):
                place = save_beside(path, state, self._store.content(state["content"]))
                self._left.append(
                    f"{path} was changed by someone else: the changed version is now {place}"
                )
        self._remove_trees()
        self._restore_folders()
        self._units.reload()
        self._units.forget_removed()
        for unit, before in self._snapshot["units"].items():
            changed = before["role"] in self._snapshot["changed"]
            reload = unit in self._snapshot["reloads"]
            self._done += self._units.start(unit, before, changed=changed, reload=reload)
        self._store.remove()
        # The folder of a daemon's account may have been removed with its package.
        homes = [
            f"{home}: the home of {name}" for home, name in self._homes.items() if _is_folder(home)
        ]
        failed = [f"{_shorten(paths)}: {reason}" for reason, paths in self._failed.items()]
        notes = [*homes, *self._left, *failed]
        return {"changed": True, "done": self._done, "clusterctl_notes": notes}

    def _check_contents(self) -> None:
        # Raises SnapshotError if the earlier content of a file is missing, before anything is
        # removed.
        for entry in self._snapshot["paths"].values():
            if entry["before"]["kind"] == "file" and entry["after"] != entry["before"]:
                self._store.content(entry["before"]["content"])

    def _leave_silent_servers(self) -> None:
        """Unmount the folders that `up` mounted and whose file servers do not answer: systemd and
        package managers would wait for them. Raise SnapshotError for such a folder of the owner,
        before anything is changed.
        """
        was_mounted = self._snapshot["mounts"]
        used = {entry.get("mount", "") for entry in self._snapshot["paths"].values()}
        mounted = [m for m in sorted(used.union(was_mounted)) if self._mounts.is_mount_point(m)]
        silent = [path for path in mounted if not answers(path)]
        if foreign := [path for path in silent if was_mounted.get(path, True)]:
            raise SnapshotError(
                f"the file server of {', '.join(foreign)} does not answer, and systemd would wait for "
                "it; nothing was changed\n"
                f"fix: repair the server, or run `umount -l {foreign[0]}` on this host"
            )
        for path in silent:
            self._run(["umount", "-f", "-l", path], check_rc=True)
            self._done.append(f"unmounted {path}, whose file server does not answer")

    def _spare_foreign_databases(self) -> None:
        """Keep MariaDB, although clusterctl installed it, if it has databases of other programs."""
        folder = self._paths.databases
        is_own = not self._snapshot["trees"].get(folder, True)
        if is_own and (foreign := _foreign_databases(folder)):
            self._spared = _MARIADB
            self._left.append(
                f"MariaDB was kept because it has other databases: {_shorten(foreign)}"
            )

    def _is_spared(self, name: str) -> bool:
        """Return whether a package, unit or folder belongs to MariaDB, and MariaDB is kept."""
        return Path(name).name.startswith(self._spared)

    def _keep_foreign_versions(self) -> None:
        """Before anything is removed, store clusterctl's files that someone else has changed
        since.
        """
        for path, entry, now in self._entries():
            before = entry["before"]
            after = entry["after"]
            if after is None or after == before or now["kind"] != "file" or now == after:
                continue
            if now.get("content") in (after.get("content"), before.get("content")):
                continue
            try:
                content = read(path)
            except OSError:
                # A job has replaced the file meanwhile.
                continue
            text = owner_version(path, before, after, content, self._store.content)
            if text is None:
                self._keep(path, read_state(path, self._store.keep))
            else:
                # The owner's lines can be separated from the cluster's, and stay in the file.
                base = now if before == ABSENT else before
                entry.update(before={**base, "content": self._store.keep(text)}, when_ns=None)

    def _keep(self, path: str, state: State) -> None:
        versions = self._snapshot["versions"].setdefault(path, [])
        if state not in versions:
            versions.append(state)

    def _unmount(self) -> None:
        for path, was_mounted in self._snapshot["mounts"].items():
            if not was_mounted and self._mounts.is_mount_point(path):
                self._run(["umount", path], check_rc=True)
                self._done.append(f"unmounted {path}")

    def _remove_packages(self) -> None:
        """Remove clusterctl's packages that no package of the owner needs, and restore /etc."""
        packages = self._packages
        record = self._snapshot["packages"]
        if packages is None or not record["before"]:
            return
        installed = packages.installed()
        ours = self._own_packages(packages, installed)
        removable = packages.removable(ours)
        if removable:
            self._guard.hold()
            for path in packages.changed_settings(removable):
                if path not in self._snapshot["paths"]:
                    self._keep(path, read_state(path, self._store.keep))
            # The foreign versions must be recorded before the packages and their files are removed.
            self._store.write(self._snapshot)
            self._remove_but_settings(packages, removable)
            self._done.append(f"removed {len(removable)} packages")
        self._guard.put_back(exclude=self._cluster_files_in_etc())
        if needed := sorted(ours - set(removable)):
            self._left.append(f"packages that other packages now need: {', '.join(needed)}")
        newer = sorted(
            name
            for name, version in record["before"].items()
            if name in installed and installed[name] != version
        )
        if newer:
            self._left.append(f"packages that are newer than before: {_shorten(newer)}")
        if record["marked"]:
            packages.mark_automatic(record["marked"])

    def _own_packages(self, packages: Dpkg | Rpm, installed: Mapping[str, str]) -> set[str]:
        """Return the packages that clusterctl installed, or of which it left the settings."""
        record = self._snapshot["packages"]
        names = set(installed)
        ours = set(record["ours"]) if self._snapshot["sealed"] else names - set(record["before"])
        # An earlier attempt may have removed packages without their settings. Settings that were
        # here before clusterctl are the owner's.
        with_settings = {*names, *packages.settings()}
        present = with_settings - (set(record["settings"]) - names)
        return {name for name in ours & present if not self._is_spared(name)}

    def _remove_but_settings(self, packages: Dpkg | Rpm, removable: list[str]) -> None:
        """Remove packages, but not settings and folders that were here before clusterctl."""
        trees = self._snapshot["trees"].items()
        existing_folders = [path for path, existed in trees if existed and Path(path).is_dir()]
        try:
            kept = self._keep_settings(removable, existing_folders)
            packages.remove(removable, [*self._snapshot["packages"]["settings"], *kept])
        finally:
            self._put_folders_back()

    def _keep_settings(self, names: list[str], existing_folders: list[str]) -> list[str]:
        """Rename folders that the purge of these packages would empty, but that existed before
        clusterctl.

        Returns the packages that must not be purged, because such a folder can't be renamed.
        """
        packages = self._packages
        unmovable = self._mover.move(packages.purged(names, existing_folders)) if packages else []
        if not packages or not unmovable:
            return []
        kept = [name for name in names if packages.purged([name], unmovable)]
        self._left.append(
            f"the settings of {_shorten(kept)}: their purge would empty {_shorten(unmovable)}"
        )
        return kept

    def _put_folders_back(self) -> None:
        for path, place in self._mover.put_back().items():
            note = f"{path}: the folder has been recreated; its earlier content is now in {place}"
            if note not in self._left:
                self._left.append(note)

    def _restore_files(self) -> None:
        wrong = {}
        for path, entry, now in self._entries():
            before = entry["before"]
            if (
                entry["after"] == before
                or now == before
                or "folder" in (before["kind"], now["kind"])
            ):
                continue
            if "other" in (before["kind"], now["kind"]):
                self._left.append(f"{path}: it is not a regular file")
                continue
            wrong[path] = entry
        roles = (entry["role"] for entry in wrong.values())
        self._snapshot["changed"] = sorted({*self._snapshot["changed"], *roles})
        self._store.write(self._snapshot)
        for path, entry in wrong.items():
            before = entry["before"]
            with self._tolerate_errors(path):
                if before["kind"] == "absent":
                    remove(path)
                else:
                    content = (
                        self._store.content(before["content"]) if before["kind"] == "file" else b""
                    )
                    write_state(path, before, content, entry["when_ns"])
                self._done.append(f"{'removed' if before == ABSENT else 'put back'} {path}")

    @contextmanager
    def _tolerate_errors(self, path: str) -> Iterator[None]:
        """Report an error of a file server, or in a person's home, instead of raising it, so that the
        restoration continues: an NFS server with root_squash lets root remove nothing.
        """
        try:
            yield
        except OSError as exc:
            # The owner of the path itself counts, too.
            if not self._mounts.is_servers_error(path, exc) and not owner_above(f"{path}/-"):
                raise
            self._report_failure(path, exc.strerror or str(exc))

    def _report_failure(self, path: str, reason: str) -> None:
        paths = self._failed.setdefault(reason, [])
        if path not in paths:
            paths.append(path)

    def _entries(self, *, reverse: bool = False) -> Iterator[tuple[str, dict[str, Any], State]]:
        """Yield (path, entry, present state) of the recorded paths that are where they were, as far
        as they can be read. Errors of file servers are reported.

        reverse: sorted, subfolders first.
        """
        recorded = self._snapshot["paths"].items()
        for path, entry in sorted(recorded, reverse=True) if reverse else recorded:
            if self._is_elsewhere(path):
                continue
            state = None
            with self._tolerate_errors(path):
                state = read_state(path)
            if state is not None:
                yield path, entry, state

    def _is_elsewhere(self, path: str) -> bool:
        return is_elsewhere(self._mounts, path, self._snapshot["paths"].get(path, {}))

    def _report_elsewhere(self) -> None:
        """Report the paths that `up` changed and that are not where they were, such as those of a
        folder that is not mounted.
        """
        for path, entry in self._snapshot["paths"].items():
            if entry["after"] != entry["before"] and self._is_elsewhere(path):
                mount = entry["mount"] or self._mounts.server_mount(path)
                self._report_failure(path, f"{mount} is not mounted as it was before `up`")

    def _remove_saved(self) -> None:
        """Remove .rpmsave files of changed configuration files, if clusterctl has changed these
        files.
        """
        for path, entry, _ in self._entries():
            saved = f"{path}{RPM_SAVED}"
            after = entry["after"]
            if entry["before"] != ABSENT or (now := read_state(saved))["kind"] != "file":
                continue
            own_contents = [after["content"]] if after and after["kind"] == "file" else []
            # Foreign versions are saved beside the file later.
            versions = (
                version for version_path, version in self._versions() if version_path == path
            )
            own_contents += [version["content"] for version in versions]
            if now["content"] in own_contents:
                Path(saved).unlink()
                self._done.append(f"removed {saved}")

    def _versions(self) -> Iterator[tuple[str, State]]:
        for path, states in self._snapshot["versions"].items():
            yield from ((path, state) for state in states)

    def _cluster_files_in_etc(self) -> set[str]:
        snapshot = self._snapshot
        return (
            set(snapshot["etc"]["ours"])
            if snapshot["sealed"]
            else new_in_etc(self._store, snapshot, self._paths.etc)
        )

    def _remove_generated(self) -> None:
        """Remove new files in /etc that are in folders that clusterctl's packages created, and other
        versions of the owner's files that these packages brought.
        """
        new = [path for path, entry in self._snapshot["paths"].items() if entry["before"] == ABSENT]
        folders = [path for path in new if os.path.isdir(path) and not self._is_spared(path)]
        for path in sorted(self._cluster_files_in_etc()):
            is_inside = any(path.startswith(f"{folder}/") for folder in folders)
            if os.path.lexists(path) and (is_inside or path.endswith(_PACKAGED_VERSIONS)):
                Path(path).unlink()
                self._done.append(f"removed {path}")

    def _remove_trees(self) -> None:
        for path, was_there in sorted(self._snapshot["trees"].items(), reverse=True):
            if was_there or self._is_spared(path) or not os.path.lexists(path):
                continue
            with self._tolerate_errors(path):
                if remaining := remove_tree(path):
                    self._left.append(f"files of users, or mounted: {_shorten(remaining)}")
                self._done.append(f"removed {path}")

    def _restore_folders(self) -> None:
        """Restore or remove folders: subfolders first, because only empty folders can be
        removed.
        """
        for path, entry, now in self._entries(reverse=True):
            before = entry["before"]
            # Jobs create folders, too, which the last `up` has not seen.
            is_new = before == ABSENT
            if (
                now["kind"] != "folder"
                or now == before
                or (entry["after"] == before and not is_new)
                or self._is_spared(path)
                or not self._reported.isdisjoint((path, *map(str, Path(path).parents)))
            ):
                continue
            with self._tolerate_errors(path):
                if before["kind"] == "folder":
                    write_state(path, before)
                    self._done.append(f"put back {path}")
                elif remove_empty(path):
                    self._done.append(f"removed {path}")
                elif foreign := [
                    name for name in _list_folder(path) if f"{path}/{name}" not in self._reported
                ]:
                    self._reported.add(path)
                    self._left.append(f"{path}: it contains {_shorten(foreign)}")

    def _remove_accounts(self) -> None:
        for name in self._cluster_accounts(
            "users", host.users(self._paths.etc), host.is_system_user
        ):
            home = host.remove_user(self._run, name)
            self._done.append(f"removed the account {name}")
            # Folders of a role are removed later, such as MariaDB's, or were here before clusterctl.
            is_of_role = home in self._snapshot["trees"]
            if _is_folder(home) and home != "/" and not is_of_role:
                self._homes[home] = name
                self._reported.add(home)
        for name in self._cluster_accounts(
            "groups", host.groups(self._paths.etc), host.is_system_group
        ):
            if host.remove_group(self._run, name):
                self._done.append(f"removed the group {name}")

    def _cluster_accounts(self, kind: str, names: list[str], is_system: Any) -> Iterator[str]:
        """Yield the names that clusterctl created. kind: "users" or "groups". names: all that
        exist.

        If the record of the last run is incomplete, every new system account counts as created by
        clusterctl.
        """
        record = self._snapshot[kind]
        for name in names:
            is_new = name not in record["before"]
            is_own = name in record["ours"] or (
                is_new and not self._snapshot["sealed"] and is_system(name)
            )
            if is_own and name not in self._spared:
                yield name


# A package's version of a file in /etc that was there before: ucf's, dpkg's and rpm's.
_PACKAGED_VERSIONS = (".ucf-dist", ".dpkg-dist", ".rpmnew")


def _foreign_databases(folder: str) -> list[str]:
    """Return the databases in a folder that are neither MariaDB's own nor Slurm's."""
    names = {path.name for path in Path(folder).glob("*") if path.is_dir()}
    return sorted(name for name in names - _OWN_DATABASES if not name.startswith(("#", ".")))


def _is_folder(path: str) -> bool:
    """Return whether a path is a folder, or may be one: its file server does not say."""
    try:
        return stat.S_ISDIR(os.stat(path).st_mode)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return True


def _list_folder(path: str) -> list[str]:
    with rights_for(path):
        return sorted(entry.name for entry in os.scandir(path))


def _shorten(names: list[str]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
