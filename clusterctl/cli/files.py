"""The commands put and get, which copy files and folders to and from the cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

from clusterctl.cli.options import argument
from clusterctl.cli.output import Screen
from clusterctl.jobs import files
from clusterctl.jobs.secret_files import left_out_notice
from clusterctl.spec.names import LocalValue
from clusterctl.transport.get import DownloadResult
from clusterctl.transport.put import UploadResult
from clusterctl.util import formatting


def put(
    screen: Screen,
    paths: Annotated[
        list[str],
        argument(
            "Files and folders here, then the folder on the cluster, or a file's new name.",
            metavar="LOCAL... [REMOTE]",
            local=LocalValue.HERE_FIRST,
        ),
    ],
) -> None:
    """Copy files and folders to the cluster.

    With a single argument, the target is your home folder, otherwise the last argument is the
    target folder. On a cluster that other people run, the target is the folder `files` in
    clusterctl's folder there.
    """
    started_at = time.monotonic()
    with screen.transfers() as progress:
        done = files.put(screen.chosen(), paths, progress=progress)
    for path in done.skipped:
        screen.note(f"note: not sent, because it is neither a file nor a folder: {path}")
    for path in done.own:
        screen.note(f"note: not sent, because clusterctl keeps its keys or caches there: {path}")
    if done.secrets:
        screen.note(f"note: {left_out_notice(done.secrets, 'put its own path')}")
    folder = done.sent.folder
    skipped = [str(path) for path in (*done.skipped, *done.own, *done.secrets)]
    _show_transfer(
        screen, done.sent, started_at, "sent", folder=folder, where=done.place, skipped=skipped
    )


def get(
    screen: Screen,
    paths: Annotated[
        list[str],
        argument(
            "Files and folders on the cluster, then the folder here, or a file's new name.",
            metavar="REMOTE... [LOCAL]",
            local=LocalValue.HERE_LAST,
        ),
    ],
) -> None:
    """Copy files and folders from the cluster.

    With a single argument, the target is the current folder, otherwise the last argument.
    """
    started_at = time.monotonic()
    with screen.transfers() as progress:
        done = files.get(screen.chosen(), paths, progress=progress)
    for path in done.skipped:
        screen.note(f"note: not fetched, because it is neither a file nor a folder: {path}")
    local = paths[-1] if len(paths) > 1 else "."
    folder = str(done.folder.absolute())
    _show_transfer(
        screen, done, started_at, "fetched", folder=folder, where=local, skipped=done.skipped
    )


def _show_transfer(
    screen: Screen,
    done: UploadResult | DownloadResult,
    started_at: float,
    verb: str,
    *,
    folder: str,
    where: str,
    skipped: Sequence[str],
) -> None:
    """Show the size and the duration of a transfer.

    started_at: start of the transfer by the monotonic clock, in seconds.
    verb: the word "sent" or "fetched".
    folder, where: the full path of the target folder, and the path to show.
    """
    seconds = time.monotonic() - started_at
    size = formatting.size(done.bytes)
    amount = f"1 file, {size}, is" if done.files == 1 else f"{done.files} files, {size}, are"
    answer = {
        "folder": folder,
        "files": done.files,
        "bytes": done.bytes,
        "sent_bytes": done.sent_bytes,
    }
    screen.result(
        {**answer, "seconds": round(seconds, 3), "skipped": list(skipped)},
        f"{amount} in {where}: {formatting.size(done.sent_bytes)} {verb} in {seconds:.1f} s",
    )
