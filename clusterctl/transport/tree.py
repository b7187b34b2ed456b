"""Folders of this machine as lists of what is in them."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

from clusterctl.errors import UsageError, printable

Progress = Callable[[str, int, int], None]  # (what is done, bytes done, bytes in all)


class Kind(StrEnum):
    """What travels. Pipes, sockets and devices do not."""

    FOLDER = "folder"
    FILE = "file"
    LINK = "link"


@dataclass(frozen=True, slots=True)
class Item:
    """One thing to send. ``path`` is below the folder it goes to; ``origin`` is where it lies here.

    ``size`` is in bytes; ``target`` is a link's. Names that are not UTF-8 are as `os.fsdecode` has them.
    """

    path: str
    kind: Kind
    origin: Path
    mode: int
    mtime_ns: int
    size: int = 0
    target: str = ""

    @classmethod
    def of(cls, path: str, origin: Path, status: os.stat_result) -> Item | None:
        """The item with this status, or None if it is of no kind that travels.

        Raises:
            OSError: a link can't be read.
        """
        mode, mtime = stat.S_IMODE(status.st_mode), status.st_mtime_ns
        if stat.S_ISDIR(status.st_mode):
            return cls(path, Kind.FOLDER, origin, mode, mtime)
        if stat.S_ISLNK(status.st_mode):
            return cls(path, Kind.LINK, origin, mode, mtime, target=os.readlink(origin))  # noqa: PTH115  # as it stands
        if stat.S_ISREG(status.st_mode):
            return cls(path, Kind.FILE, origin, mode, mtime, status.st_size)
        return None


def walk(roots: Sequence[Path]) -> tuple[tuple[Item, ...], tuple[Path, ...]]:
    """All that is in these files and folders, each under its own name; and what is of no kind that travels.

    Links stay links, but a root that is one stands for what it leads to.

    Raises:
        UsageError: some can't be read (all are named), or two have one name.
    """
    items: list[Item] = []
    others: list[Path] = []
    unreadable: list[OSError] = []
    names: dict[str, Path] = {}
    for root in roots:
        name = root.resolve().name if root.name in {"", ".."} else root.name
        if not name or name in names:
            raise UsageError(
                f"{printable(str(root))} has no name of its own"
                if not name
                else f"two of them are called {printable(name)}",
                fix="send what is in it, or one after the other",
            )
        names[name] = root
        _walk(name, root, items, others, unreadable)
    if unreadable:
        raise not_readable(unreadable)
    return tuple(items), tuple(others)


def _walk(name: str, root: Path, items: list[Item], others: list[Path], unreadable: list[OSError]) -> None:
    left = [(name, root)]
    while left:
        path, origin = left.pop()
        try:
            item = Item.of(path, origin, origin.stat(follow_symlinks=origin is root))
            if item is None:
                others.append(origin)
                continue
            items.append(item)
            if item.kind is Kind.FOLDER:
                below = sorted(entry.name for entry in os.scandir(origin))
                left += [(f"{path}/{name}", origin / name) for name in reversed(below)]
        except OSError as exc:
            unreadable.append(exc)


def not_readable(errors: Sequence[OSError], *, fix: str = "") -> UsageError:
    """The one error for all that can't be read."""
    said = [f"{printable(os.fsdecode(exc.filename or ''))}: {exc.strerror or exc}" for exc in errors]
    more = f", and {len(said) - 3} more" if len(said) > 3 else ""  # noqa: PLR2004
    return UsageError(
        "can't read what is to be sent",
        why="; ".join(said[:3]) + more,
        fix=fix or "make it readable, or leave it out",
    )


def shown_size(size: float) -> str:
    """A number of bytes for people: ``3.2 MiB``."""
    for power, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if size >= 1 << power:
            return f"{size / (1 << power):.1f} {unit}"
    return f"{size:.0f} B"
