"""What packing the packages of one distribution takes and gives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from clusterctl.packages.os_packages import Upstream


@dataclass(frozen=True, slots=True)
class Packer:
    """For which distribution (`id-version`), and in which folder downloads are kept. ``called``: its name in
    messages, where it goes by another.

    ``archive`` names the repositories to take packages from, instead of the distribution's public ones, to
    which ``openhpc`` and ``nvidia`` add theirs. ``upstream``: packages that no repository has. ``stream``:
    that of the module with NVIDIA's driver, where dnf has one.
    """

    distribution: str
    architecture: str
    folder: Path
    archive: Path | None = None
    openhpc: bool = False
    upstream: tuple[Upstream, ...] = ()
    nvidia: bool = False
    stream: str | None = None
    called: str = ""

    @property
    def title(self) -> str:
        """What to call the distribution."""
        return self.called or self.distribution

    @property
    def added(self) -> tuple[str, ...]:
        """What is added to the distribution's repositories, by the names in the table of them."""
        return (*(["openhpc"] if self.openhpc else []), *(["nvidia"] if self.nvidia else []))


@dataclass(frozen=True, slots=True)
class Packed:
    """A repository: path in it -> file or content; and (name, version, SHA-256) of each package."""

    files: Mapping[str, Path | bytes]
    versions: tuple[tuple[str, str, str], ...]
