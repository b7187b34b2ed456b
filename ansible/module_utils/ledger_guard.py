"""Holds on to every file of /etc while packages are purged: some take whole folders with them.

The files are held by a second name in the ledger's folder, so holding them costs nothing, and what is put
back is the same file. What is held survives a crash, and is put back by the next attempt.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ansible.module_utils.ledger_paths import remove_empty

ETC = "/etc"


def names(root: str = ETC) -> list[str]:
    """Every path below it that is no folder."""
    return sorted(
        os.path.join(folder, name)  # noqa: PTH118
        for folder, folders, files in os.walk(root)
        for name in [*files, *(one for one in folders if Path(folder, one).is_symlink())]
    )


class Aside:
    """Folders out of the way of a purge, which would remove them: each under another name beside its place.

    What a crash has left aside comes back by ``put_back`` of the next attempt.
    """

    def __init__(self, folders: Collection[str]) -> None:
        self._folders = folders

    def move(self, paths: Collection[str]) -> list[str]:
        """Move these out of the way; those that can't be, mount points for one."""
        stay = []
        for path in paths:
            try:
                Path(path).rename(_aside(path))
            except OSError:
                stay.append(path)
        return stay

    def put_back(self) -> dict[str, str]:
        """Have all of them at their places again; where somebody has filled the place, where it stays."""
        stay = {}
        for path in self._folders:
            if _aside(path).is_dir():
                if remove_empty(path):  # that a package's removal made anew
                    _aside(path).rename(path)
                else:
                    stay[path] = str(_aside(path))
        return stay


def _aside(path: str) -> Path:
    return Path(path).with_name(f".{Path(path).name}.clusterctl-aside")


class Guard:
    """What was below ``root`` when it was first held."""

    def __init__(self, held: str, root: str = ETC) -> None:
        self._held = Path(held)
        self._root = root

    def hold(self) -> None:
        """Hold everything, unless an attempt before did."""
        if self._held.exists():
            return
        fresh = self._held.with_name(self._held.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        for folder, _, _ in os.walk(self._root):
            place = self._place(fresh, folder)
            place.mkdir(parents=True)
            _dress(folder, place)
        for name in names(self._root):
            with suppress(FileNotFoundError):  # somebody removed it meanwhile
                _second_name(name, self._place(fresh, name))
        fresh.rename(self._held)

    def put_back(self, but: Collection[str]) -> list[str]:
        """Put back what is missing by now, except these; what was."""
        back = []
        for name in names(str(self._held)):
            path = self._root + name[len(str(self._held)) :]
            if path in but or os.path.lexists(path):
                continue
            self._make_folders(Path(path).parent)
            _second_name(name, Path(path))
            back.append(path)
        return back

    def _make_folders(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folders(folder.parent)
            folder.mkdir()
            _dress(str(self._place(self._held, str(folder))), folder)

    def _place(self, held: Path, path: str) -> Path:
        return held / path[len(self._root) :].lstrip("/")


def _second_name(path: str, place: Path) -> None:
    """The same file under another name; on another file system a copy of it."""
    try:
        os.link(path, place, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        found = os.lstat(path)
        if stat.S_ISREG(found.st_mode) or stat.S_ISLNK(found.st_mode):
            shutil.copy2(path, place, follow_symlinks=False)
        else:  # pipes, sockets and devices: reading one would never end
            os.mknod(place, found.st_mode, found.st_rdev)
        os.chown(place, found.st_uid, found.st_gid, follow_symlinks=False)


def _dress(path: str, place: Path) -> None:
    shutil.copystat(path, place)
    found = Path(path).stat()
    os.chown(place, found.st_uid, found.st_gid)
