"""Make a job's folder on the cluster: what its script was given, and what we add."""

from __future__ import annotations

import json
import platform
import re
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl import __version__
from clusterctl.errors import ClusterctlError, CommandError, TransportError, UnreachableError, UsageError
from clusterctl.jobs.environment import PLAIN, Environment
from clusterctl.jobs.script import PAYLOAD_ROOT
from clusterctl.jobs.source import Source, manifest, patterns, source_hash
from clusterctl.spec.job import JobSpec
from clusterctl.state.ledger import SOURCE_FILE
from clusterctl.transport.base import Transport
from clusterctl.transport.put import Sent, send_new_folder
from clusterctl.transport.remote_store import NO_REQUIRED
from clusterctl.transport.tree import Item, Progress, hash_items
from clusterctl.util.assets import payload_hash

JOBS_FOLDER = "clusterctl/jobs"  # in the job user's home
_AT_ONCE = 8
MAX_DIFF = 1 << 20
PATIENCE_S = 15.0  # a submission does not wait long for what is good to know
OUTPUTS_FILE = "outputs.json"
_SPECIAL, _ESCAPED = re.compile(r"([\\*?\[\]!# ])"), r"\\\1"


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


def client_facts(
    job: JobSpec, environment: Environment = PLAIN, *, local: Transport, folder: Path
) -> dict[str, Any]:
    """The content of environment.client.json; ``folder`` is the one whose git state counts."""
    return {
        "clusterctl": __version__,
        "python": platform.python_version(),
        "system": platform.platform(),
        "job": json.loads(json.dumps(job.model_dump(), default=str)),  # a path may be no UTF-8
        "requirements": environment.lock.text if environment.lock else None,
        "git": _git(local, folder),
    }


def _git(local: Transport, folder: Path) -> dict[str, Any] | None:
    """Commit and uncommitted changes of the folder; None where git can't say."""
    git = ["git", "--no-optional-locks", "-C", str(folder)]
    try:
        commit = local.run([*git, "rev-parse", "HEAD"], timeout_s=PATIENCE_S).stdout.strip()
        root = local.run([*git, "rev-parse", "--show-toplevel"], timeout_s=PATIENCE_S).stdout.rstrip("\n")
        status = local.run([*git, "status", "--porcelain", "--", "."], timeout_s=PATIENCE_S).stdout
        # Neither the user's diff programs nor their colours: this is for a machine to apply again.
        diff = _bounded(
            local,
            [*git, "diff", "--no-ext-diff", "--no-textconv", "--no-color", "--binary", "HEAD", "--", "."],
        )
    except TransportError:  # no git, no repository, no commit yet, or too large to be looked through in time
        return None
    return {
        "commit": commit,
        "root": root,
        "status": status[:MAX_DIFF],
        "diff": diff[:MAX_DIFF].decode(errors="replace"),
        "diff_truncated": len(diff) > MAX_DIFF,
    }


def _bounded(local: Transport, argv: list[str]) -> bytes:
    """What a command says, up to a little more than MAX_DIFF bytes."""
    said = b""
    with closing(local.stream(argv)) as stream:
        for chunk in stream:
            said += chunk
            if len(said) > MAX_DIFF:
                break
    return said


def outputs_file(job: JobSpec) -> dict[str, bytes]:
    """outputs.json, if the job says what its outputs are: patterns, of which the last that matches counts.

    Our own files are always brought home, and so is the script. The job can change the file: it is read with
    care, and its patterns are matched as such (see runs/remote_files.py), never made into expressions.

    Raises:
        UsageError: a pattern can't be understood.
    """
    if not job.outputs:
        return {}
    script = [f"/{_SPECIAL.sub(_ESCAPED, job.script.name)}"] if job.script is not None else []
    patterns("--outputs", job.outputs, Path())  # says which can't be understood
    said = {"version": 2, "patterns": [*job.outputs, *script]}
    return {OUTPUTS_FILE: (json.dumps(said, indent=1) + "\n").encode()}
