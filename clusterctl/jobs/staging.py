"""Make a job's folder on the cluster: what its script was given, and what we add."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from clusterctl.errors import ClusterctlError, CommandError, UnreachableError, UsageError
from clusterctl.jobs.script import PAYLOAD_ROOT
from clusterctl.jobs.source import Source, manifest, source_hash
from clusterctl.state.ledger import SOURCE_FILE
from clusterctl.transport.base import Transport
from clusterctl.transport.hashes import hash_items
from clusterctl.transport.remote_store import NO_REQUIRED
from clusterctl.transport.send import Sent, send_new_folder
from clusterctl.transport.tree import Item, Progress
from clusterctl.util.assets import payload_hash

JOBS_FOLDER = "clusterctl/jobs"  # in the job user's home
_AT_ONCE = 8


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
    others: Sequence[Transport] = (),
    progress: Progress = lambda *_: None,
) -> tuple[str, SentSource | None, Mapping[str, bytes]]:
    """Make the folder, whole or not at all. ``others`` are hosts that need one, too.

    Returns where it is, what of a script's folder was sent, and all files of ours in it.

    Raises:
        UsageError: the cluster lacks our programs, or a file can't be read.
        TransferError: a file changed meanwhile, or the cluster can't write it.
        TransportError: the cluster can't be reached.
    """
    items = source.items if source is not None else ()
    hashes = hash_items(source.files if source is not None else (), progress=progress)
    if source is not None:
        ours = {**ours, SOURCE_FILE: manifest(items, hashes)}
    content = _Content(items, hashes, f"{JOBS_FOLDER}/{name}", ours)
    sent = content.send(transport, progress)
    with ThreadPoolExecutor(max_workers=_AT_ONCE) as pool:
        sending = [pool.submit(content.send, other) for other in others]
    try:
        for one in sending:
            one.result()
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


@dataclass(frozen=True, slots=True)
class _Content:
    """What a job's folder holds, the same on every host that has one."""

    items: Sequence[Item]
    hashes: Mapping[Path, str]
    folder: str
    ours: Mapping[str, bytes]

    def send(self, transport: Transport, progress: Progress = lambda *_: None) -> Sent:
        """Make it on one host."""
        required = f"{PAYLOAD_ROOT}/{payload_hash()}/payload"
        try:
            return send_new_folder(
                transport,
                self.items,
                self.hashes,
                self.folder,
                ours=self.ours,
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
