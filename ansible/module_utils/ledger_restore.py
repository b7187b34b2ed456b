"""Giving a host back: what was is put back, what is ours goes, and what stays is named."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ansible.module_utils.basic import AnsibleModule

from ansible.module_utils import ledger_host as host
from ansible.module_utils.ledger_guard import Aside, Guard
from ansible.module_utils.ledger_packages import RPM_SAVED, Dpkg, Rpm
from ansible.module_utils.ledger_paths import (
    ABSENT,
    State,
    beside,
    look,
    put,
    read,
    remove,
    remove_empty,
    remove_tree,
    theirs,
)
from ansible.module_utils.ledger_record import new_in_etc
from ansible.module_utils.ledger_store import Store
from ansible.module_utils.user_rights import person_above, rights_for

DATABASES = "/var/lib/mysql"

_OWN_DATABASES = frozenset({"mysql", "performance_schema", "sys", "test", "lost+found", "slurm_acct_db"})
# How the names of MariaDB's packages, unit, account and folders begin.
_MARIADB = ("mariadb", "mysql", "my.cnf.d")
_SHOWN = 10


class Restorer:
    """Undoes what the ledger of this host tells of. Every step looks first, so it can be run again."""

    def __init__(
        self, module: AnsibleModule, store: Store, ledger: dict[str, Any], packages: Dpkg | Rpm | None
    ) -> None:
        self._module = module
        self._run = module.run_command
        self._store = store
        self._ledger = ledger
        self._packages = packages
        self._units = host.Units(self._run)
        self._done: list[str] = []
        self._left: list[str] = []
        self._homes: set[str] = set()
        self._spared: tuple[str, ...] = ()
        self._guard = Guard(str(store.root / "etc"))
        self._aside = Aside([path for path, was in ledger["trees"].items() if was])

    def restore(self) -> dict[str, object]:
        """All of it; what the module returns."""
        if not self._store.is_there:
            left = (
                self._store.root.exists()
            )  # of a first attempt that noted nothing, or of a ledger that went
            if left and not self._module.check_mode:
                self._store.remove()
            return {"changed": left, "done": [], "clusterctl_notes": []}
        if self._module.check_mode:
            return {"changed": True, "done": [], "clusterctl_notes": []}
        self._check_contents()
        self._spare_databases_of_others()
        self._put_back_aside()
        self._keep_somebodys_versions()
        for unit, before in self._ledger["units"].items():
            if not self._is_spared(unit):
                self._done += self._units.stop(unit, before)
        self._unmount()
        self._remove_accounts()  # munge's own purge fails on one whose number is not a system account's
        self._remove_packages()
        self._remove_saved()
        self._restore_files()
        self._remove_generated()
        for path, state in self._versions():
            with self._sparing_others(path):
                place = beside(path, state, self._store.content(state["content"]))
                self._left.append(f"{path} was changed since by somebody else: that version is {place}")
        self._remove_trees()
        self._restore_folders()
        self._units.reload()
        for unit, before in self._ledger["units"].items():
            changed = before["role"] in self._ledger["changed"]
            reload = unit in self._ledger["reloads"]
            self._done += self._units.start(unit, before, changed=changed, reload=reload)
        self._store.remove()
        return {"changed": True, "done": self._done, "clusterctl_notes": self._left}

    def _check_contents(self) -> None:
        """What may be put back is there, before anything goes."""
        for entry in self._ledger["paths"].values():
            if entry["before"]["kind"] == "file" and entry["after"] != entry["before"]:
                self._store.content(entry["before"]["content"])

    def _spare_databases_of_others(self) -> None:
        """Have the MariaDB that came with the cluster stay as it is if others have databases in it."""
        if not self._ledger["trees"].get(DATABASES, True) and (others := _databases_of_others()):
            self._spared = _MARIADB
            self._left.append(f"MariaDB, which holds databases of others: {_few(others)}")

    def _is_spared(self, name: str) -> bool:
        """Return whether a package, a unit or a folder belongs to a MariaDB that stays."""
        return Path(name).name.startswith(self._spared)

    def _keep_somebodys_versions(self) -> None:
        """What others have made of our files, where it can't be told from ours: read before anything goes."""
        for path, entry in self._ledger["paths"].items():
            before, after, now = entry["before"], entry["after"], look(path)
            if after is None or after == before or now["kind"] != "file" or now == after:
                continue
            if now.get("content") in (after.get("content"), before.get("content")):
                continue
            try:
                content = read(path)
            except OSError:  # a job has made it something else since
                continue
            text = theirs(path, before, after, content, self._store.content)
            if text is None:
                self._keep(path, look(path, self._store.keep))
            else:  # theirs stays where it is
                was = now if before == ABSENT else before
                entry.update(before={**was, "content": self._store.keep(text)}, when_ns=None)

    def _keep(self, path: str, state: State) -> None:
        """Note a version of somebody's, to lie beside its place once all else is done; also after a crash."""
        versions = self._ledger["versions"].setdefault(path, [])
        if state not in versions:
            versions.append(state)

    def _unmount(self) -> None:
        for path, was in self._ledger["mounts"].items():
            if not was and os.path.ismount(path):
                self._run(["umount", path], check_rc=True)
                self._done.append(f"unmounted {path}")

    def _remove_packages(self) -> None:
        noted = self._ledger["packages"]
        if self._packages is None or not noted["before"]:
            return
        installed = self._packages.installed()
        ours = set(noted["ours"]) if self._ledger["sealed"] else set(installed) - set(noted["before"])
        left = {*installed, *self._packages.settings()} - set(noted["settings"]).difference(installed)
        # Also what an attempt before removed but for its settings.
        ours = {name for name in ours & left if not self._is_spared(name)}
        removable = self._packages.removable(ours)
        if removable:
            self._guard.hold()
            for path in self._packages.changed_settings(removable):
                if path not in self._ledger["paths"]:
                    self._keep(path, look(path, self._store.keep))
            self._store.write(self._ledger)  # with what somebody has made of ours, which may go now
            theirs = [path for path, was in self._ledger["trees"].items() if was and Path(path).is_dir()]
            try:
                kept = self._keep_settings(removable, theirs)
                self._packages.remove(removable, [*noted["settings"], *kept])
            finally:
                self._put_back_aside()
            self._done.append(f"removed {len(removable)} packages")
        self._guard.put_back(but=self._ours_in_etc())
        if still := sorted(ours - set(removable)):
            self._left.append(f"packages that something else needs by now: {', '.join(still)}")
        newer = sorted(n for n, v in noted["before"].items() if n in installed and installed[n] != v)
        if newer:
            self._left.append(f"packages that are newer than before: {_few(newer)}")
        if noted["marked"]:
            self._packages.mark_automatic(noted["marked"])

    def _keep_settings(self, names: list[str], theirs: list[str]) -> list[str]:
        """Move folders of before out of a purge's way; the packages whose purge would empty one still."""
        packages = self._packages
        stay = self._aside.move(packages.purged(names, theirs)) if packages else []
        kept = [name for name in names if packages and packages.purged([name], stay)] if stay else []
        if stay:
            self._left.append(f"the settings of {_few(kept)}: their purge would empty {_few(stay)}")
        return kept

    def _put_back_aside(self) -> None:
        for path, place in self._aside.put_back().items():
            note = f"{path}: somebody has written to it since; what it held before is {place}"
            if note not in self._left:
                self._left.append(note)

    def _restore_files(self) -> None:
        wrong = {}
        for path, entry in self._ledger["paths"].items():
            before, now = entry["before"], look(path)
            if entry["after"] == before or now == before or "folder" in (before["kind"], now["kind"]):
                continue
            if "other" in (before["kind"], now["kind"]):
                self._left.append(f"{path}: it is no plain file")
                continue
            wrong[path] = entry
        self._ledger["changed"] = sorted({*self._ledger["changed"], *(one["role"] for one in wrong.values())})
        self._store.write(self._ledger)
        for path, entry in wrong.items():
            before = entry["before"]
            with self._sparing_others(path):
                if before["kind"] == "absent":
                    remove(path)
                else:
                    content = self._store.content(before["content"]) if before["kind"] == "file" else b""
                    put(path, before, content, entry["when_ns"])
                self._done.append(f"{'removed' if before == ABSENT else 'put back'} {path}")

    @contextmanager
    def _sparing_others(self, path: str) -> Iterator[None]:
        """What a job made of its user's home keeps nothing else from being given back; it is named."""
        try:
            yield
        except OSError as exc:
            if not person_above(path):
                raise
            self._left.append(f"{path}: {exc.strerror or exc}")

    def _remove_saved(self) -> None:
        """What rpm kept of settings that are not as the package brought them: it was we who changed them."""
        for path, entry in self._ledger["paths"].items():
            saved = f"{path}{RPM_SAVED}"
            now, after = look(saved), entry["after"]
            if entry["before"] != ABSENT or now["kind"] != "file":
                continue
            ours = [after["content"]] if after and after["kind"] == "file" else []
            ours += [one["content"] for kept, one in self._versions() if kept == path]  # beside it soon
            if now["content"] in ours:
                Path(saved).unlink()
                self._done.append(f"removed {saved}")

    def _versions(self) -> Iterator[tuple[str, State]]:
        for path, states in self._ledger["versions"].items():
            yield from ((path, state) for state in states)

    def _ours_in_etc(self) -> set[str]:
        ledger = self._ledger
        return set(ledger["etc"]["ours"]) if ledger["sealed"] else new_in_etc(self._store, ledger)

    def _remove_generated(self) -> None:
        """What packages of ours made for themselves, in folders that they brought."""
        new = [path for path, entry in self._ledger["paths"].items() if entry["before"] == ABSENT]
        folders = [path for path in new if Path(path).is_dir() and not self._is_spared(path)]
        for path in sorted(self._ours_in_etc()):
            if os.path.lexists(path) and any(path.startswith(f"{folder}/") for folder in folders):
                Path(path).unlink()
                self._done.append(f"removed {path}")

    def _remove_trees(self) -> None:
        for path, was_there in sorted(self._ledger["trees"].items(), reverse=True):
            if was_there or self._is_spared(path) or not os.path.lexists(path):
                continue
            if stayed := remove_tree(path):
                self._left.append(f"what belongs to people or is mounted: {_few(stayed)}")
            self._done.append(f"removed {path}")

    def _restore_folders(self) -> None:
        """The deepest first: a folder can only go once it is empty."""
        for path, entry in sorted(self._ledger["paths"].items(), reverse=True):
            before, now = entry["before"], look(path)
            if now["kind"] != "folder" or now == before or entry["after"] == before or self._is_spared(path):
                continue
            with self._sparing_others(path):
                if before["kind"] == "folder":
                    put(path, before)
                    self._done.append(f"put back {path}")
                elif remove_empty(path):
                    self._done.append(f"removed {path}")
                elif others := [one for one in _inside(path) if f"{path}/{one}" not in self._homes]:
                    self._left.append(f"{path}: it holds {_few(others)}")

    def _remove_accounts(self) -> None:
        for name in self._made("users", host.users(), host.is_system_user):
            home = host.remove_user(self._run, name)
            self._done.append(f"removed the account {name}")
            if Path(home).is_dir() and home != "/":
                self._homes.add(home)
                self._left.append(f"{home}: the home of {name}")
        for name in self._made("groups", host.groups(), host.is_system_group):
            if host.remove_group(self._run, name):
                self._done.append(f"removed the group {name}")

    def _made(self, kind: str, names: list[str], is_system: Any) -> Iterator[str]:
        """Those that are ours; while nothing is sealed, the system's new ones are."""
        noted = self._ledger[kind]
        for name in names:
            new = name not in noted["before"]
            ours = name in noted["ours"] or (new and not self._ledger["sealed"] and is_system(name))
            if ours and name not in self._spared:
                yield name


def _databases_of_others() -> list[str]:
    """Return the databases that are neither MariaDB's own nor the cluster's."""
    names = {path.name for path in Path(DATABASES).glob("*") if path.is_dir()}
    return sorted(name for name in names - _OWN_DATABASES if not name.startswith(("#", ".")))


def _inside(path: str) -> list[str]:
    with rights_for(path):
        return sorted(entry.name for entry in os.scandir(path))


def _few(names: list[str]) -> str:
    """The names, or the first of very many."""
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(names[:_SHOWN]) + more
