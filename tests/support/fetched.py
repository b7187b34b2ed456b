"""For tests of collecting: folders brought home, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from clusterctl.runs.fetch import Manifest, fetch_tree
from clusterctl.transport.base import Conversation
from clusterctl.transport.local import LocalTransport

LOCAL = LocalTransport()


def fetch(
    remote: Path, tree: Path, transport: LocalTransport = LOCAL, *, still_changing: bool = False
) -> Manifest:
    """Bring a folder home."""
    return fetch_tree(transport, str(remote), tree, still_changing=still_changing)


def content(folder: Path) -> dict[bytes, bytes]:
    """Relative path -> content of all that is below, links included as what they are."""
    found = {}
    for path in folder.rglob("*"):
        name = os.fsencode(path.relative_to(folder))
        if path.is_symlink():
            found[name] = b"link"
        elif path.is_file():
            found[name] = path.read_bytes()
    return found


class Talk:
    """A conversation whose receiving is another."""

    def __init__(self, talk: Conversation, receive: Callable[[Conversation], bytes]) -> None:
        self.send, self.finish = talk.send, talk.finish
        self.receive = lambda: receive(talk)
