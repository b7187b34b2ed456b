"""Make a job's folder on the cluster: what its script was given, and what we add."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clusterctl.assets import payload_hash
from clusterctl.errors import CommandError, UsageError
from clusterctl.jobs.script import PAYLOAD_ROOT
from clusterctl.jobs.source import Source, manifest, source_hash
from clusterctl.records import SOURCE_FILE
from clusterctl.transfer.hashes import hash_items
from clusterctl.transfer.remote.store import NO_REQUIRED
from clusterctl.transfer.send import send_new_folder
from clusterctl.transfer.tree import Progress
from clusterctl.transport.base import Transport

JOBS_FOLDER = "clusterctl/jobs"  # in the job user's home


@dataclass(frozen=True, slots=True)
class SentSource:
    """What of a script's folder a job was given; ``sent_bytes`` of it were not on the cluster yet."""

    files: int
    bytes: int
    sent_bytes: int
    hash: str


def stage(
    transport: Transport,
    name: str,
    source: Source | None,
    ours: Mapping[str, bytes],
    *,
    progress: Progress = lambda *_: None,
) -> tuple[str, SentSource | None]:
    """Make the folder, whole or not at all; returns where it is.

    Raises:
        UsageError: the cluster lacks our programs, or a file can't be read.
        TransferError: a file changed meanwhile, or the cluster can't write it.
        TransportError: the cluster can't be reached.
    """
    items = source.items if source is not None else ()
    hashes = hash_items(source.files if source is not None else (), progress=progress)
    if source is not None:
        ours = {**ours, SOURCE_FILE: manifest(items, hashes)}
    required = f"{PAYLOAD_ROOT}/{payload_hash()}/payload"
    try:
        sent = send_new_folder(
            transport,
            items,
            hashes,
            f"{JOBS_FOLDER}/{name}",
            ours=ours,
            required=required,
            progress=progress,
        )
    except CommandError as exc:
        if exc.rc != NO_REQUIRED:
            raise
        raise UsageError(
            "the cluster does not have this clusterctl's programs",
            where=transport.host,
            why=f"{required} is not there: the cluster was raised by another version, or not to the end",
            fix="run `clusterctl up` again",
        ) from exc
    if source is None:
        return sent.folder, None
    return sent.folder, SentSource(sent.files, sent.bytes, sent.sent_bytes, source_hash(items, hashes))
