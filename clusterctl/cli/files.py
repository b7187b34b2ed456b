"""put, get: files and folders, to the cluster and from it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from clusterctl.cli.options import argument
from clusterctl.cli.output import Screen
from clusterctl.jobs import files
from clusterctl.transport.get import Fetched
from clusterctl.transport.put import Sent
from clusterctl.transport.tree import shown_size


def put(
    screen: Screen,
    paths: Annotated[
        list[str], argument("Files and folders here, then the folder there.", metavar="LOCAL... [REMOTE]")
    ],
) -> None:
    """Copy files and folders to the cluster.

    They go to the home folder, unless the last argument names another.
    """
    begun = time.monotonic()
    with screen.transfers() as progress:
        done = files.put(screen.chosen(), paths, progress=progress)
    for path in done.skipped:
        screen.note(f"note: not sent, being no file: {path}")
    folder, skipped = done.sent.folder, [str(path) for path in done.skipped]
    _show_transfer(screen, done.sent, begun, "sent", folder=folder, where=folder, skipped=skipped)


def get(
    screen: Screen,
    paths: Annotated[
        list[str], argument("Files and folders there, then the folder here.", metavar="REMOTE... [LOCAL]")
    ],
) -> None:
    """Copy files and folders from the cluster.

    They go to this folder, unless the last argument names another.
    """
    begun = time.monotonic()
    with screen.transfers() as progress:
        done = files.get(screen.chosen(), paths, progress=progress)
    for path in done.skipped:
        screen.note(f"note: not fetched, being no file: {path}")
    local = paths[-1] if len(paths) > 1 else "."
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
    """Show how much was transferred, and how fast.

    begun: when it began, by the monotonic clock in seconds.
    verb: what was done to the files.
    folder, where: the whole path of their new folder, and the folder as it was named.
    skipped: paths that are no files.
    """
    seconds, size = time.monotonic() - begun, shown_size(done.bytes)
    are = f"1 file, {size}, is" if done.files == 1 else f"{done.files} files, {size}, are"
    answer = {"folder": folder, "files": done.files, "bytes": done.bytes, "sent_bytes": done.sent_bytes}
    screen.result(
        {**answer, "seconds": round(seconds, 3), "skipped": list(skipped)},
        f"{are} in {where}: {shown_size(done.sent_bytes)} {verb} in {seconds:.1f} s",
    )
