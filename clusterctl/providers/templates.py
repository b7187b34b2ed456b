"""Node templates: images from which a new controller or compute nodes start. Each then gets a few
files.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clusterctl.state.inventory import Inventory
from clusterctl.util import formatting
from clusterctl.util.remote_wanted import content_mark, mark_of_file


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file of a node, or, with ``edges``, a block between two lines of a file. ``owner``: uid and
    gid.
    """

    data: bytes
    mode: int = 0o644
    owner: int = 0
    edges: tuple[str, str] | None = None

    @property
    def mark(self) -> str:
        """The content's checksum and, for a whole file, mode and owner, as a probe on the host
        prints it.
        """
        content = content_mark(self.data)
        if self.edges:
            return content
        return mark_of_file(content, self.mode, self.owner, self.owner)


# Host -> path of a file -> file.
NodeFiles = Mapping[str, Mapping[str, NodeFile]]


@dataclass(frozen=True, slots=True)
class KeptImage:
    """A node template that is stored in the cloud. ``usd_per_month``: the price of storing it, if
    known.
    """

    name: str
    size_mib: int
    usd_per_month: float | None

    def __str__(self) -> str:
        price = (
            "" if self.usd_per_month is None else f", {formatting.cost(self.usd_per_month)} a month"
        )
        return f"image {self.name} ({formatting.size(self.size_mib << 20)}{price})"


@dataclass(frozen=True, slots=True)
class NodeTemplates:
    """The templates of new hosts. ``keys``: group -> template's key. ``files``: returns each host's
    files.
    """

    keys: Mapping[str, str]
    files: Callable[[Inventory], NodeFiles]
