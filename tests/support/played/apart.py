"""A node that shares no folder with the played controller: the same paths, in a place of its own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tests.support.played.cluster import Nearby, PlayedCluster


class ApartNode(Nearby):
    """What the controller has below its home, this node has below ``home``."""

    def __init__(self, cluster: PlayedCluster, home: Path) -> None:
        super().__init__(cluster.payload)
        self._controllers = str(cluster.home)
        self.home = home
        home.mkdir(parents=True)

    def _here(self, argv: Sequence[str]) -> list[str]:
        moved = (word.replace(self._controllers, str(self.home)) for word in argv)
        return super()._here(["env", f"HOME={self.home}", *moved])
