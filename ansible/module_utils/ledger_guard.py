"""Holds on to every file of /etc while packages are purged: some take whole folders with them.

The files are held by a second name in the ledger's folder, so holding them costs nothing, and what is put
back is the same file. What is held survives a crash, and is put back by the next attempt.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

ETC = "/etc"


def names(root: str = ETC) -> list[str]:
    """Every path below it that is no folder."""
    return sorted(
        os.path.join(folder, name)  # noqa: PTH118
        for folder, _, files in os.walk(root)
        for name in [*files, *(one for one in os.listdir(folder) if _is_link_to_folder(folder, one))]  # noqa: PTH208
    )


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


def _is_link_to_folder(folder: str, name: str) -> bool:
    path = Path(folder, name)
    return path.is_symlink() and path.is_dir()


def _second_name(path: str, place: Path) -> None:
    """The same file under another name; on another file system a copy of it."""
    try:
        os.link(path, place, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        shutil.copy2(path, place, follow_symlinks=False)
        found = os.lstat(path)
        os.chown(place, found.st_uid, found.st_gid, follow_symlinks=False)


def _dress(path: str, place: Path) -> None:
    shutil.copystat(path, place)
    found = Path(path).stat()
    os.chown(place, found.st_uid, found.st_gid)
