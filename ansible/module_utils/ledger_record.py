"""Noting what a host is before the roles change it, and what they have left."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from ansible.module_utils import ledger_guard
from ansible.module_utils import ledger_host as host
from ansible.module_utils.ledger_packages import Dpkg, Rpm
from ansible.module_utils.ledger_paths import ABSENT, State, changed_ns, look, theirs
from ansible.module_utils.ledger_store import LedgerError, Store

Touches = Mapping[str, Mapping[str, Any]]


class Recorder:
    """Writes the ledger of this host. ``record`` comes before every change, ``seal`` after."""

    def __init__(
        self, run: Callable[..., Any], store: Store, ledger: dict[str, Any], packages: Dpkg | Rpm | None
    ) -> None:
        self._run = run
        self._store = store
        self._ledger = ledger
        self._packages = packages

    def record(self, touches: Touches) -> None:
        """Note what is there of what was not noted yet, and what others have changed since the last seal."""
        if not self._store.is_there:
            self._store.remove()  # of a first attempt that was killed, or of a ledger whose removal was
        self._record_packages()
        self._record_accounts()
        for role, names in touches.items():
            self._record_paths(role, names)
            self._record_units(role, names)
        self._record_etc()
        self._ledger["patterns"] = sorted({*self._ledger["patterns"], *_patterns(touches)})
        self._ledger["sealed"] = False
        self._store.write(self._ledger)

    def seal(self, touches: Touches) -> None:
        """Note what is there after the roles.

        Raises:
            LedgerError: nobody noted what was before.
        """
        if not self._store.is_there:
            raise LedgerError(f"{self._store.root} has nothing of what this host was before")
        for role, names in touches.items():
            for _, path in _paths(names):  # patterns match more by now
                entry = {"role": role, "before": dict(ABSENT), "after": None, "when_ns": None}
                self._ledger["paths"].setdefault(path, entry)
        for path, entry in self._ledger["paths"].items():
            entry["after"] = look(path, self._store.keep)
        self._seal_packages()
        self._seal_accounts({name for names in touches.values() for name in names.get("accounts", ())})
        self._ledger["etc"]["ours"] = sorted(new_in_etc(self._store, self._ledger))
        self._ledger["sealed"] = True
        self._store.write(self._ledger)

    def _record_paths(self, role: str, names: Mapping[str, Any]) -> None:
        for pattern, path in _paths(names):
            entry = self._ledger["paths"].get(path)
            if entry is None:
                # What a pattern finds only now, after a run that did not come to its end, is of that run.
                ours = pattern in self._ledger["patterns"] and not self._ledger["sealed"]
                before = dict(ABSENT) if ours else look(path, self._store.keep)
                when = changed_ns(path) if before["kind"] in ("file", "link") else None
                self._ledger["paths"][path] = {"role": role, "before": before, "after": None, "when_ns": when}
            else:
                self._rebase(path, entry)
        for path in names.get("trees", ()):
            self._ledger["trees"].setdefault(path, os.path.lexists(path))
        for path in names.get("mounts", ()):
            self._ledger["mounts"].setdefault(path, os.path.ismount(path))

    def _rebase(self, path: str, entry: dict[str, Any]) -> None:
        """Take note of what somebody else made of it since the last seal."""
        before, after = entry["before"], entry["after"]
        if not self._ledger["sealed"] or after is None:
            return
        now = look(path, self._store.keep)
        if now == after:
            return
        if after == before:  # we never changed it
            entry.update(before=now, when_ns=changed_ns(path))
        elif now["kind"] == "file" and now.get("content") != after.get("content"):
            kept = self._undone(path, before, after, now)
            if kept is not None:
                was = now if before == ABSENT else before
                entry.update(before={**was, "content": kept}, when_ns=changed_ns(path))
            elif now["content"] != before.get("content"):
                self._ledger["versions"].setdefault(path, []).append(now)

    def _undone(self, path: str, before: State, after: State, now: State) -> str | None:
        """The hash of a file of somebody's without our lines, None where that can't be told."""
        text = theirs(path, before, after, self._store.content(now["content"]), self._store.content)
        return None if text is None else self._store.keep(text)

    def _record_etc(self) -> None:
        noted = self._ledger["etc"]
        if not noted["before"] or self._ledger["sealed"]:
            theirs = sorted(set(ledger_guard.names()) - set(noted["ours"]))
            noted["before"] = self._store.keep("\n".join(theirs).encode())

    def _record_units(self, role: str, names: Mapping[str, Any]) -> None:
        units = host.Units(self._run)
        for unit in names.get("units", ()):
            if unit not in self._ledger["units"]:
                self._ledger["units"][unit] = {**units.look(unit), "role": role}
        self._ledger["reloads"] = sorted({*self._ledger["reloads"], *names.get("reloads", ())})

    def _record_packages(self) -> None:
        """What is installed and not ours is somebody's; while nothing is sealed, new ones may be ours."""
        if self._packages is None:
            return
        noted = self._ledger["packages"]
        if noted["before"] and not self._ledger["sealed"]:
            return
        now = self._packages.installed()
        if not noted["before"]:
            noted["settings"] = self._packages.settings()
        foreign = {name: version for name, version in now.items() if name not in noted["ours"]}
        noted["before"] = {**foreign, **{n: v for n, v in noted["before"].items() if n in now}}
        noted["automatic"] = self._packages.automatic()

    def _seal_packages(self) -> None:
        noted = self._ledger["packages"]
        if self._packages is None or not noted["before"]:
            return
        noted["ours"] = sorted(set(self._packages.installed()) - set(noted["before"]))
        marked = {*noted["marked"], *(set(noted["automatic"]) - set(self._packages.automatic()))}
        noted["marked"] = sorted(marked)

    def _record_accounts(self) -> None:
        for kind, names in (("users", host.users()), ("groups", host.groups())):
            noted = self._ledger[kind]
            if not noted["before"] or self._ledger["sealed"]:
                noted["before"] = sorted(set(names) - set(noted["ours"]))

    def _seal_accounts(self, named: set[str]) -> None:
        """New ones that the roles make, or that the packages which they installed did."""
        kinds = (
            ("users", host.users(), host.is_system_user),
            ("groups", host.groups(), host.is_system_group),
        )
        for kind, names, is_system in kinds:
            noted = self._ledger[kind]
            new = set(names) - set(noted["before"])
            noted["ours"] = sorted(name for name in new if name in named or is_system(name))


def new_in_etc(store: Store, ledger: dict[str, Any]) -> set[str]:
    """What is in /etc, and was not before."""
    before = ledger["etc"]["before"]
    return set(ledger_guard.names()) - set(store.content(before).decode().split("\n")) if before else set()


def _patterns(touches: Touches) -> Iterator[str]:
    for names in touches.values():
        yield from (*names.get("files", ()), *names.get("folders", ()))


def _paths(names: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """The files and folders of a role by pattern; `~user` counts where there is such an account."""
    spared = tuple(f"{folder}/" for folder in names.get("spared", ()))
    for pattern in (*names.get("files", ()), *names.get("folders", ())):
        path = os.path.expanduser(pattern)  # noqa: PTH111
        if path.startswith("~"):
            continue
        for one in sorted(glob.glob(path)) if glob.has_magic(path) else [path]:  # noqa: PTH207
            if not one.startswith(spared):
                yield pattern, one
