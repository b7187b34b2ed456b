"""The record of a host's state before and after Ansible's roles change the host."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ansible.module_utils import snapshot_guard
from ansible.module_utils import snapshot_host as host
from ansible.module_utils.snapshot_mounts import Mounts
from ansible.module_utils.snapshot_packages import Dpkg, Rpm
from ansible.module_utils.snapshot_paths import ABSENT, State, changed_ns, owner_version, read_state
from ansible.module_utils.snapshot_store import SnapshotError, Store

Touches = Mapping[str, Mapping[str, Any]]


class Recorder:
    """Writer of the record of a host's state. Call ``record`` before the roles run, and ``seal``
    after.
    """

    def __init__(
        self,
        run: Callable[..., Any],
        store: Store,
        snapshot: dict[str, Any],
        packages: Dpkg | Rpm | None,
        paths: host.HostPaths,
    ) -> None:
        self._run = run
        self._store = store
        self._snapshot = snapshot
        self._packages = packages
        self._etc = paths.etc
        self._mounts = Mounts(paths.mounts)

    def record(self, touches: Touches) -> None:
        """Record the state of new paths and units in ``touches``, and changes that the host's owner
        has made.

        touches: for each role, the paths, units and accounts that it may change.
        """
        if not self._store.is_there:
            # A killed run may have left a folder without a snapshot.
            self._store.remove()
        self._record_packages()
        self._record_accounts()
        for role, names in touches.items():
            self._record_paths(role, names)
            self._record_units(role, names)
        self._record_etc()
        self._snapshot["patterns"] = sorted({*self._snapshot["patterns"], *_patterns(touches)})
        self._snapshot["sealed"] = False
        self._store.write(self._snapshot)

    def seal(self, touches: Touches) -> None:
        """Record the state after the roles have run. Raise SnapshotError if ``record`` has not run
        before.
        """
        if not self._store.is_there:
            raise SnapshotError(
                f"{self._store.root} on this host has no record of the host's earlier state"
            )
        for role, names in touches.items():
            # Patterns may match more paths now than before.
            for _, path in _paths(names):
                if path not in self._snapshot["paths"]:
                    self._snapshot["paths"][path] = self._entry(role, path, dict(ABSENT), None)
        for path, entry in self._snapshot["paths"].items():
            # The mount point of a file system that is away says nothing about its files.
            if not is_lost(self._mounts, entry):
                entry["after"] = read_state(path, self._store.keep)
        self._seal_packages()
        self._seal_accounts(
            {name for names in touches.values() for name in names.get("accounts", ())}
        )
        self._snapshot["etc"]["ours"] = sorted(new_in_etc(self._store, self._snapshot, self._etc))
        self._snapshot["sealed"] = True
        self._store.write(self._snapshot)

    def _record_paths(self, role: str, names: Mapping[str, Any]) -> None:
        for pattern, path in _paths(names):
            entry = self._snapshot["paths"].get(path)
            if entry is None:
                # After an unfinished run, a path that a recorded pattern matches only now is of
                # that run.
                is_own = pattern in self._snapshot["patterns"] and not self._snapshot["sealed"]
                before = dict(ABSENT) if is_own else read_state(path, self._store.keep)
                when = changed_ns(path) if before["kind"] in ("file", "link") else None
                self._snapshot["paths"][path] = self._entry(role, path, before, when)
            elif not is_elsewhere(self._mounts, path, entry):
                self._record_foreign_change(path, entry)
        for path in names.get("trees", ()):
            self._snapshot["trees"].setdefault(path, os.path.lexists(path))
        for path in names.get("mounts", ()):
            self._snapshot["mounts"].setdefault(path, self._mounts.is_mount_point(path))

    def _entry(self, role: str, path: str, before: State, when_ns: int | None) -> dict[str, Any]:
        return {
            "role": role,
            "before": before,
            "after": None,
            "when_ns": when_ns,
            # Of a file server; "" for the host's own disk.
            "mount": self._mounts.server_mount(path),
        }

    def _record_foreign_change(self, path: str, entry: dict[str, Any]) -> None:
        """Record a change to a path since the last ``seal``, which the roles can't have made."""
        before = entry["before"]
        after = entry["after"]
        if not self._snapshot["sealed"] or after is None:
            return
        now = read_state(path, self._store.keep)
        if now == after:
            return
        # The roles never changed the path. A new folder may be of jobs: it goes only if it is empty.
        if after == before:
            if (before["kind"], now["kind"]) != ("absent", "folder"):
                entry.update(before=now, when_ns=changed_ns(path))
        elif now["kind"] == "file" and now.get("content") != after.get("content"):
            owner_content = self._owner_content(path, before, after, now)
            if owner_content is not None:
                base = now if before == ABSENT else before
                entry.update(before={**base, "content": owner_content}, when_ns=changed_ns(path))
            elif now["content"] != before.get("content"):
                self._snapshot["versions"].setdefault(path, []).append(now)

    def _owner_content(self, path: str, before: State, after: State, now: State) -> str | None:
        text = owner_version(
            path, before, after, self._store.content(now["content"]), self._store.content
        )
        return None if text is None else self._store.keep(text)

    def _record_etc(self) -> None:
        record = self._snapshot["etc"]
        if not record["before"] or self._snapshot["sealed"]:
            foreign = sorted(set(snapshot_guard.names(self._etc)) - set(record["ours"]))
            record["before"] = self._store.keep("\n".join(foreign).encode())

    def _record_units(self, role: str, names: Mapping[str, Any]) -> None:
        units = host.Units(self._run)
        for unit in names.get("units", ()):
            if unit not in self._snapshot["units"]:
                self._snapshot["units"][unit] = {**units.read(unit), "role": role}
        self._snapshot["reloads"] = sorted({*self._snapshot["reloads"], *names.get("reloads", ())})

    def _record_packages(self) -> None:
        # After a run without ``seal``, new packages may be the roles' and are not recorded.
        if self._packages is None:
            return
        record = self._snapshot["packages"]
        if record["before"] and not self._snapshot["sealed"]:
            return
        now = self._packages.installed()
        if not record["before"]:
            record["settings"] = self._packages.settings()
        foreign = {name: version for name, version in now.items() if name not in record["ours"]}
        record["before"] = {**foreign, **{n: v for n, v in record["before"].items() if n in now}}
        record["automatic"] = self._packages.automatic()

    def _seal_packages(self) -> None:
        record = self._snapshot["packages"]
        if self._packages is None or not record["before"]:
            return
        record["ours"] = sorted(set(self._packages.installed()) - set(record["before"]))
        marked = {*record["marked"], *(set(record["automatic"]) - set(self._packages.automatic()))}
        record["marked"] = sorted(marked)

    def _record_accounts(self) -> None:
        for kind, names in (
            ("users", host.users(self._etc)),
            ("groups", host.groups(self._etc)),
        ):
            record = self._snapshot[kind]
            if not record["before"] or self._snapshot["sealed"]:
                record["before"] = sorted(set(names) - set(record["ours"]))

    def _seal_accounts(self, named: set[str]) -> None:
        # New system accounts belong to packages that the roles installed.
        kinds = (
            ("users", host.users(self._etc), host.is_system_user),
            ("groups", host.groups(self._etc), host.is_system_group),
        )
        for kind, names, is_system in kinds:
            record = self._snapshot[kind]
            new = set(names) - set(record["before"])
            # Accounts of earlier runs may have left the spec since.
            own = named.union(record["ours"])
            record["ours"] = sorted(name for name in new if name in own or is_system(name))


def is_lost(mounts: Mounts, entry: Mapping[str, Any]) -> bool:
    """Return whether a recorded path was on a file system that is not mounted now."""
    mount = entry.get("mount", "")
    return mount != "" and not mounts.is_mount_point(mount)


def is_elsewhere(mounts: Mounts, path: str, entry: Mapping[str, Any]) -> bool:
    """Return whether a path is now on another file system than when it was recorded, which says
    nothing about the recorded path. Earlier releases did not record file systems.
    """
    return "mount" in entry and entry["mount"] != mounts.server_mount(path)


def new_in_etc(store: Store, snapshot: dict[str, Any], etc: str) -> set[str]:
    """Return the paths in ``etc`` that did not exist when ``Recorder.record`` listed the files
    there.
    """
    before = snapshot["etc"]["before"]
    return (
        set(snapshot_guard.names(etc)) - set(store.content(before).decode().split("\n"))
        if before
        else set()
    )


def _patterns(touches: Touches) -> Iterator[str]:
    for names in touches.values():
        yield from (*names.get("files", ()), *names.get("folders", ()))


def _paths(names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (pattern, path) for each path of a role. `~user` is skipped if the account does not
    exist.
    """
    spared = tuple(f"{folder}/" for folder in names.get("spared", ()))
    for pattern in (*names.get("files", ()), *names.get("folders", ())):
        path = os.path.expanduser(pattern)
        if path.startswith("~"):
            continue
        for match in sorted(glob.glob(path)) if glob.has_magic(path) else [path]:
            if not match.startswith(spared):
                yield pattern, match
