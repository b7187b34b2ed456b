"""Files and folders of a user: put on the cluster, and got from it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import MachineError, UsageError
from clusterctl.scheduler.session import open_session
from clusterctl.state.chosen import ChosenCluster
from clusterctl.transport.copies import Copies, note
from clusterctl.transport.get import Fetched, fetch
from clusterctl.transport.put import Sent, send_into
from clusterctl.transport.tree import Progress, walk


@dataclass(frozen=True, slots=True)
class Put:
    """Files that are on the cluster. ``skipped`` were not sent, because they are no files."""

    sent: Sent
    skipped: tuple[Path, ...]


def put(chosen: ChosenCluster, paths: Sequence[str], *, progress: Progress = lambda *_: None) -> Put:
    """Copy files and folders to a folder on the cluster.

    paths: those here, then the folder there. If there is a single path, it goes to the home.

    Raises:
        UsageError: a path is empty, or the last one is a file here.
        TransferError: they can't be sent, or changed meanwhile.
        TransportError: the cluster can't be reached.
    """
    _reject_empty(paths)
    local, remote = _split(paths)
    items, others = walk([Path(path) for path in local])
    with open_session(chosen) as session:
        sent = send_into(session.transport, items, remote, progress=progress)
        copies = [
            Copies(
                session.transport.host, f"{sent.folder}/{item.path}", str(item.origin.absolute()), sent=True
            )
            for item in items
            if "/" not in item.path
        ]
        with suppress(MachineError):  # a full disk: then `down` takes them for the only copies
            note(session.ledger.workspace, copies)
    return Put(sent, tuple(others))


def get(chosen: ChosenCluster, paths: Sequence[str], *, progress: Progress = lambda *_: None) -> Fetched:
    """Copy files and folders from the cluster to a folder here.

    paths: those there, then the folder here. If there is a single path, it goes to the current folder.

    Raises:
        UsageError: a path is empty.
        TransferError: they can't be fetched.
        TransportError: the cluster can't be reached.
    """
    _reject_empty(paths)
    remote, local = (paths, ".") if len(paths) == 1 else (paths[:-1], paths[-1])
    with open_session(chosen) as session:
        return fetch(
            session.transport, [_below_home(path) for path in remote], Path(local), progress=progress
        )


def _reject_empty(paths: Sequence[str]) -> None:
    """Reject an empty path: it is a variable that was not set, and would name the whole folder."""
    if "" in paths:
        raise UsageError(
            "a path is empty", code="path-empty", fix="name a file or a folder; the whole folder is `.`"
        )


def _split(paths: Sequence[str]) -> tuple[Sequence[str], str]:
    """Return which paths go, and where they go to. A file here may well be meant to go, too."""
    if len(paths) == 1:
        return paths, "."
    *local, remote = paths
    if Path(remote).is_file() and not remote.endswith("/"):
        raise UsageError(
            f"{remote} is a file here, and the last argument names the folder on the cluster",
            code="target-is-local-file",
            fix=f"to send it, end with a folder (`.` is the home there); if {remote} is one, say {remote}/",
        )
    return local, _below_home(remote)


def _below_home(path: str) -> str:
    """Return a path as the cluster reads it: what begins with ~/ is below the home there."""
    return os.path.normpath(path.removeprefix("~/")) if path != "~" else "."
