"""For tests of `collect` and `get`: folders brought here, and what is in them."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from clusterctl.runs.fetch import RunManifest, RunSource, fetch_tree, sender
from clusterctl.transport.base import Conversation
from clusterctl.transport.get import DownloadResult
from clusterctl.transport.get import fetch as get_paths
from tests.support.local_transport import LocalTransport

LOCAL = LocalTransport()


def fetch(
    remote: Path, tree: Path, transport: LocalTransport = LOCAL, *, still_changing: bool = False
) -> RunManifest:
    """Bring a folder home."""
    return fetch_source(RunSource(str(remote), still_changing=still_changing), tree, transport)


def fetch_source(source: RunSource, tree: Path, transport: LocalTransport = LOCAL) -> RunManifest:
    """Bring what is wanted of a folder home."""
    with closing(sender(transport)) as one:
        return fetch_tree(one, source, tree)


def get(remote: Path, here: Path, transport: LocalTransport = LOCAL) -> DownloadResult:
    """Get the file or folder `a` of a folder."""
    return get_paths(transport, [str(remote / "a")], here)


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
    """A conversation whose receiving, and sending, is another."""

    def __init__(
        self,
        talk: Conversation,
        receive: Callable[[Conversation], bytes],
        send: Callable[[bytes], None] | None = None,
    ) -> None:
        self.send = send or talk.send
        self.finish = talk.finish
        self.receive = lambda: receive(talk)
