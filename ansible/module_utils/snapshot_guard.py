"""Protection of files in /etc while packages are purged, because some packages remove whole folders
there.

Each file gets a second hard link, in the folder that records the host's earlier state. So a
restored file is the same file, without the cost of a copy. After a crash, the next attempt finds
the links and restores files.
"""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from ansible.module_utils.snapshot_paths import remove_empty


def names(root: str) -> list[str]:
    """Return the paths of all files and links below ``root``."""
    return sorted(
        os.path.join(folder, name)
        for folder, folders, files in os.walk(root)
        for name in [
            *files,
            *(subfolder for subfolder in folders if Path(folder, subfolder).is_symlink()),
        ]
    )


class FolderMover:
    """Renames folders while packages are purged, so that the purge can't remove them.

    After a crash, ``put_back`` of the next attempt restores the names.
    """

    def __init__(self, folders: Collection[str]) -> None:
        self._folders = folders

    def move(self, paths: Collection[str]) -> list[str]:
        """Rename these folders. Return the folders that can't be renamed, such as mount points."""
        unmoved = []
        for path in paths:
            try:
                Path(path).rename(_moved_path(path))
            except OSError:
                unmoved.append(path)
        return unmoved

    def put_back(self) -> dict[str, str]:
        """Restore the names of all renamed folders, unless a package has put files into a new
        folder.

        Returns the folders that were not restored: original path -> path to which the folder was
        renamed.
        """
        unmoved = {}
        for path in self._folders:
            if _moved_path(path).is_dir():
                # The removal of a package may have recreated the folder, empty.
                if remove_empty(path):
                    _moved_path(path).rename(path)
                else:
                    unmoved[path] = str(_moved_path(path))
        return unmoved


def _moved_path(path: str) -> Path:
    return Path(path).with_name(f".{Path(path).name}.clusterctl-aside")


class Guard:
    """Protects all files below ``root`` by hard links in the folder ``held``."""

    def __init__(self, held: str, root: str) -> None:
        self._held = Path(held)
        self._root = root

    def hold(self) -> None:
        """Create a hard link to every file, unless an earlier attempt has created all links."""
        if self._held.exists():
            return
        fresh = self._held.with_name(self._held.name + ".new")
        shutil.rmtree(fresh, ignore_errors=True)
        for folder, _, _ in os.walk(self._root):
            place = self._place(fresh, folder)
            place.mkdir(parents=True)
            _copy_metadata(folder, place)
        for name in names(self._root):
            # The file may be removed meanwhile.
            with suppress(FileNotFoundError):
                _link_or_copy(name, self._place(fresh, name))
        fresh.rename(self._held)

    def put_back(self, exclude: Collection[str]) -> list[str]:
        """Restore the removed files, except paths in ``exclude``. Return the paths of the restored
        files.
        """
        restored = []
        for name in names(str(self._held)):
            path = self._root + name[len(str(self._held)) :]
            if path in exclude or os.path.lexists(path):
                continue
            self._make_folders(Path(path).parent)
            _link_or_copy(name, Path(path))
            restored.append(path)
        return restored

    def _make_folders(self, folder: Path) -> None:
        if not folder.is_dir():
            self._make_folders(folder.parent)
            folder.mkdir()
            _copy_metadata(str(self._place(self._held, str(folder))), folder)

    def _place(self, held: Path, path: str) -> Path:
        return held / path[len(self._root) :].lstrip("/")


def _link_or_copy(path: str, place: Path) -> None:
    """Create a hard link to a file, or a copy if the link is on another file system."""
    try:
        os.link(path, place, follow_symlinks=False)
    except FileNotFoundError:
        raise
    except OSError:
        status = os.lstat(path)
        if stat.S_ISREG(status.st_mode) or stat.S_ISLNK(status.st_mode):
            shutil.copy2(path, place, follow_symlinks=False)
        else:
            # Reading a pipe, socket or device would never end.
            os.mknod(place, status.st_mode, status.st_rdev)
        os.chown(place, status.st_uid, status.st_gid, follow_symlinks=False)


def _copy_metadata(path: str, place: Path) -> None:
    shutil.copystat(path, place)
    status = Path(path).stat()
    os.chown(place, status.st_uid, status.st_gid)
