"""put, get: files and folders, to the cluster and from it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen, showing_progress
from clusterctl.errors import MachineError, UsageError
from clusterctl.scheduler.session import open_session
from clusterctl.transport.copies import Copies, note
from clusterctl.transport.get import Fetched, fetch
from clusterctl.transport.put import Sent, send_into
from clusterctl.transport.tree import shown_size, walk


def put(
    screen: Screen,
    options: Options,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="LOCAL... [REMOTE]", help="Files and folders here, then the folder there."),
    ],
) -> None:
    """Copy files and folders to the cluster.

    They go to the home folder, unless the last argument names another.
    """
    _refuse_empty(paths)
    local, remote = _split(paths)
    items, others = walk([Path(path) for path in local])
    for other in others:
        screen.note(f"note: not sent, being no file: {other}")
    begun = time.monotonic()
    with open_session(options.chosen(screen.note)) as session, showing_progress(screen) as progress:
        sent = send_into(session.transport, items, remote, progress=progress)
        copies = [
            Copies(session.transport.host, f"{sent.folder}/{it.path}", str(it.origin.absolute()), sent=True)
            for it in items
            if "/" not in it.path
        ]
        with suppress(MachineError):  # a full disk: then `down` takes them for the only copies
            note(session.ledger.workspace, copies)
    skipped = [str(other) for other in others]
    _show_transfer(screen, sent, begun, "sent", folder=sent.folder, where=sent.folder, skipped=skipped)


def get(
    screen: Screen,
    options: Options,
    paths: Annotated[
        list[str],
        typer.Argument(metavar="REMOTE... [LOCAL]", help="Files and folders there, then the folder here."),
    ],
) -> None:
    """Copy files and folders from the cluster.

    They go to this folder, unless the last argument names another.
    """
    _refuse_empty(paths)
    remote, local = (paths, ".") if len(paths) == 1 else (paths[:-1], paths[-1])
    begun = time.monotonic()
    with open_session(options.chosen(screen.note)) as session, showing_progress(screen) as progress:
        done = fetch(
            session.transport, [_below_home(path) for path in remote], Path(local), progress=progress
        )
    for path in done.skipped:
        screen.note(f"note: not fetched, being no file: {path}")
    folder = str(Path(local).absolute())
    _show_transfer(screen, done, begun, "fetched", folder=folder, where=local, skipped=done.skipped)


def _show_transfer(
    screen: Screen,
    done: Sent | Fetched,
    begun: float,
    verb: str,
    *,
    folder: str,
    where: str,
    skipped: Sequence[str],
) -> None:
    """``where``: the folder as it was named."""
    seconds, size = time.monotonic() - begun, shown_size(done.bytes)
    are = f"1 file, {size}, is" if done.files == 1 else f"{done.files} files, {size}, are"
    answer = {"folder": folder, "files": done.files, "bytes": done.bytes, "sent_bytes": done.sent_bytes}
    screen.result(
        {**answer, "seconds": round(seconds, 3), "skipped": list(skipped)},
        f"{are} in {where}: {shown_size(done.sent_bytes)} {verb} in {seconds:.1f} s",
    )


def _refuse_empty(paths: list[str]) -> None:
    """An empty word is a variable that was not set, and would name the whole folder."""
    if "" in paths:
        raise UsageError(
            "a path is empty", code="path-empty", fix="name a file or a folder; the whole folder is `.`"
        )


def _split(paths: list[str]) -> tuple[list[str], str]:
    """What goes, and where it goes to. If that is a file here, it may well be meant to go, too."""
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
    """A path as the cluster reads it: what begins with ~/ is below the home there."""
    return os.path.normpath(path.removeprefix("~/")) if path != "~" else "."
