"""Node templates: images from which hosts of a group start. Such hosts differ only in a few files."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clusterctl.state.inventory import Inventory


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file of a single node. ``owner``: uid and gid. ``edges``: first and last line, if it is a block."""

    data: bytes
    mode: int = 0o644
    owner: int = 0
    edges: tuple[str, str] | None = None

    @property
    def mark(self) -> str:
        """The checksum of the file, in the format of the host probe."""
        content = hashlib.sha256(self.data).hexdigest()[:16]
        return content if self.edges else f"{content} {self.mode:o} {self.owner}:{self.owner}"


# Host -> path of a file -> file.
NodeFiles = Mapping[str, Mapping[str, NodeFile]]


@dataclass(frozen=True, slots=True)
class KeptImage:
    """A node template that is stored in the cloud. ``usd_per_month``: its price, if known."""

    name: str
    size_mib: int
    usd_per_month: float | None

    def __str__(self) -> str:
        price = "" if self.usd_per_month is None else f", {self.usd_per_month:.2f} USD a month"
        return f"image {self.name} ({self.size_mib / 1024:.1f} GiB{price})"


@dataclass(frozen=True, slots=True)
class NodeClass:
    """The templates of new hosts (group -> key), and a function that returns each host's other files."""

    keys: Mapping[str, str]
    files: Callable[[Inventory], NodeFiles]
