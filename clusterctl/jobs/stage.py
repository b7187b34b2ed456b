"""The folder of a job on the cluster: made whole or not at all, where a job needs one."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from clusterctl.errors import ClusterctlError, UnreachableError
from clusterctl.state.submissions import SOURCE_FILE
from clusterctl.transport.base import Transport
from clusterctl.transport.put import Sent, begin_new_folder, send_new_folder
from clusterctl.transport.tree import Item, Kind, Progress, hash_items
from clusterctl.util.assets import asset, payload_hash
from clusterctl.util.process import parallel_map

if TYPE_CHECKING:
    from clusterctl.jobs.source import Source
    from clusterctl.scheduler.session import Session

JOBS_FOLDER = "clusterctl/jobs"  # in the job user's home


@dataclass(frozen=True, slots=True)
class SentSource:
    """What of a script's folder a job was given; ``sent_bytes`` of it were not on the cluster yet."""

    files: int
    bytes: int
    sent_bytes: int
    hash: str


def begin(session: Session, name: str) -> str:
    """Start what receives a job's folder on the cluster, which is prepared meanwhile. Its token."""
    token = secrets.token_hex(4)
    begin_new_folder(session.transport, f"{JOBS_FOLDER}/{name}-{token}")
    return token


def stage(
    transport: Transport,
    name: str,
    source: Source | None,
    ours: Mapping[str, bytes],
    *,
    others: Sequence[Transport] = (),
    progress: Progress = lambda *_: None,
) -> tuple[str, SentSource | None, Mapping[str, bytes]]:
    """Make the folder, whole or not at all. ``others`` are hosts that need one, too.

    Hosts that lack the payload get that before. Returns where the folder is, what of a script's folder was
    sent, and all files of ours in it.
    """
    items = source.items if source is not None else ()
    hashes = hash_items(source.files if source is not None else (), progress=progress)
    if source is not None:
        from clusterctl.jobs.source import manifest, source_hash  # noqa: PLC0415 - what `begin` needs comes first

        ours = {**ours, SOURCE_FILE: manifest(items, hashes)}
    sent_items = (*items, Item(payload_hash(), Kind.ARCHIVE, asset("payload"), mode=0, mtime_ns=0))
    folder = f"{JOBS_FOLDER}/{name}"

    def send(to: Transport, progress: Progress = lambda *_: None) -> Sent:
        return send_new_folder(to, sent_items, hashes, folder, ours=ours, progress=progress)

    sent = send(transport, progress)
    try:
        parallel_map(others, send)
    except ClusterctlError:
        remove_folder((transport, *others), sent.folder)
        raise
    if source is None:
        return sent.folder, None, ours
    what = SentSource(sent.files, sent.bytes, sent.sent_bytes, source_hash(items, hashes))
    return sent.folder, what, ours


def remove_folder(transports: Sequence[Transport], folder: str) -> None:
    """Remove a job's folder; from hosts that can't be reached it stays."""
    for transport in transports:
        with suppress(UnreachableError):
            transport.run(["rm", "-rf", "--", folder], check=False)
