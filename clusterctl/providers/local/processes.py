"""One look at all processes of this machine, in the kernel's table."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

Found = TypeVar("Found")


def look(read: Callable[[Path], Found | None]) -> Iterator[tuple[int, Found]]:
    """The pid of each process with what ``read`` finds in its folder below /proc, if anything.

    One that ends meanwhile, or that we may not look into, is passed over.
    """
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            with suppress(OSError):
                found = read(folder)
                if found is not None:
                    yield int(folder.name), found
