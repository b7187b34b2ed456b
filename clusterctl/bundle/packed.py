"""What packing the packages of one distribution takes and gives."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Packer:
    """For which distribution (`id-version`), and in which folder downloads are kept.

    ``archive`` names the repositories to take packages from, instead of the distribution's public ones.
    """

    distribution: str
    architecture: str
    folder: Path
    archive: Path | None = None


@dataclass(frozen=True, slots=True)
class Packed:
    """A repository: path in it -> file or content; and (name, version, SHA-256) of each package."""

    files: Mapping[str, Path | bytes]
    versions: tuple[tuple[str, str, str], ...]
