"""put, get: data to the cluster and back."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Annotated

import typer

from clusterctl.cli.options import Options, verb
from clusterctl.cli.progress import showing_progress
from clusterctl.cli.show import Screen
from clusterctl.cli.watching import open_session


def put(
    screen: Screen,
    options: Options,
    paths: Annotated[
        list[str], typer.Argument(metavar="LOCAL... [REMOTE]", help="What goes, and to which folder there.")
    ],
) -> None:
    """Copy files and folders to the cluster, by default home."""
    from clusterctl.transport.put import send_into
    from clusterctl.transport.tree import shown_size, walk

    _refuse_empty(paths)
    local, remote = _split(paths)
    items, others = walk([Path(path) for path in local])
    for other in others:
        screen.note(f"note: not sent, being no file: {other}")
    begun = time.monotonic()
    with open_session(screen, options) as session, showing_progress(screen) as progress:
        sent = send_into(session.transport, items, remote, progress=progress)
    seconds = time.monotonic() - begun
    screen.result(
        {
            "folder": sent.folder,
            "files": sent.files,
            "bytes": sent.bytes,
            "sent_bytes": sent.sent_bytes,
            "seconds": round(seconds, 3),
            "skipped": [str(other) for other in others],
        },
        f"{_are(sent.files, sent.bytes)} in {sent.folder}: "
        f"{shown_size(sent.sent_bytes)} sent in {seconds:.1f} s",
    )


def get(
    screen: Screen,
    options: Options,
    paths: Annotated[
        list[str], typer.Argument(metavar="REMOTE... [LOCAL]", help="What comes, and into which folder here.")
    ],
) -> None:
    """Copy files and folders from the cluster, by default to here."""
    from clusterctl.transport.get import fetch
    from clusterctl.transport.tree import shown_size

    _refuse_empty(paths)
    remote, local = (paths, ".") if len(paths) == 1 else (paths[:-1], paths[-1])
    begun = time.monotonic()
    with open_session(screen, options) as session, showing_progress(screen) as progress:
        done = fetch(
            session.transport, [_below_home(path) for path in remote], Path(local), progress=progress
        )
    seconds = time.monotonic() - begun
    for path in done.skipped:
        screen.note(f"note: not fetched, being no file: {path}")
    screen.result(
        {
            "folder": str(Path(local).absolute()),
            "files": done.files,
            "bytes": done.bytes,
            "sent_bytes": done.sent_bytes,
            "seconds": round(seconds, 3),
            "skipped": list(done.skipped),
        },
        f"{_are(done.files, done.bytes)} in {local}: "
        f"{shown_size(done.sent_bytes)} fetched in {seconds:.1f} s",
    )


def _are(files: int, size: int) -> str:
    from clusterctl.transport.tree import shown_size

    return f"1 file, {shown_size(size)}, is" if files == 1 else f"{files} files, {shown_size(size)}, are"


def _refuse_empty(paths: list[str]) -> None:
    """An empty word is a variable that was not set, and would name the whole folder.

    Raises:
        UsageError: one is empty.
    """
    from clusterctl.errors import UsageError

    if "" in paths:
        raise UsageError("a path is empty", fix="name a file or a folder; the whole folder is `.`")


def _split(paths: list[str]) -> tuple[list[str], str]:
    """What goes, and where it goes to.

    Raises:
        UsageError: the last one is a file here, so it may well be meant to go, too.
    """
    from clusterctl.errors import UsageError

    if len(paths) == 1:
        return paths, "."
    *local, remote = paths
    if Path(remote).is_file() and not remote.endswith("/"):
        raise UsageError(
            f"{remote} is a file here, and the last argument names the folder on the cluster",
            fix=f"to send it, end with a folder (`.` is the home there); if {remote} is one, say {remote}/",
        )
    return local, _below_home(remote)


def _below_home(path: str) -> str:
    """A path as the cluster reads it: what begins with ~/ is below the home there."""
    return os.path.normpath(path.removeprefix("~/")) if path != "~" else "."


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    for function in (put, get):
        app.command()(verb(function))
