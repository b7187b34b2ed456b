"""A node that shares no folder with the played controller: the same paths, in a place of its own."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from clusterctl.transport.base import Conversation, Result
from tests.support.played.cluster import Nearby, PlayedCluster


class ApartNode(Nearby):
    """What the controller has below its home, this node has below ``home``."""

    def __init__(self, cluster: PlayedCluster, home: Path) -> None:
        super().__init__(cluster.payload)
        self._controllers = str(cluster.home)
        self.home = home
        home.mkdir(parents=True)

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: bytes | None = None,
        timeout_s: float = 60.0,
        check: bool = True,
        env: Mapping[str, str] | None = None,
    ) -> Result:
        return super().run(self._there(argv), stdin=stdin, timeout_s=timeout_s, check=check, env=env)

    @contextmanager
    def converse(self, argv: Sequence[str], *, bulk: bool = False) -> Iterator[Conversation]:
        with super().converse(self._there(argv), bulk=bulk) as talk:
            yield talk

    def stream(self, argv: Sequence[str]) -> Generator[bytes, None, None]:
        return super().stream(self._there(argv))

    def _there(self, argv: Sequence[str]) -> list[str]:
        moved = (word.replace(self._controllers, str(self.home)) for word in argv)
        return ["env", f"HOME={self.home}", *moved]
