"""A class of hosts: what those share that a spec makes equal, and what each of them has for itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from clusterctl.state.inventory import Inventory


@dataclass(frozen=True, slots=True)
class NodeFile:
    """A file that a node has for itself."""

    data: bytes
    mode: int = 0o644
    owner: int = 0  # uid and gid
    edges: tuple[str, str] | None = None  # the lines around ``data``, if other lines of the file are not ours

    @property
    def mark(self) -> str:
        """As the probe of a host tells it."""
        content = hashlib.sha256(self.data).hexdigest()[:16]
        return content if self.edges else f"{content} {self.mode:o} {self.owner}:{self.owner}"


NodeFiles = Mapping[str, Mapping[str, NodeFile]]  # host -> path


@dataclass(frozen=True, slots=True)
class KeptImage:
    """An image of what nodes have in common that is kept where it costs; None: the price is not known."""

    name: str
    size_mib: int
    usd_per_month: float | None

    def __str__(self) -> str:
        price = "" if self.usd_per_month is None else f", {self.usd_per_month:.2f} USD a month"
        return f"image {self.name} ({self.size_mib / 1024:.1f} GiB{price})"


@dataclass(frozen=True, slots=True)
class NodeClass:
    """The key of what new hosts of each group share, and the ``files`` that each of them has besides.

    Which these are is known once all hosts have addresses.
    """

    keys: Mapping[str, str]
    files: Callable[[Inventory], NodeFiles]
