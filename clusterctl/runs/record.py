"""The record of a run: what is added to a job's files, and the sums over all of them."""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from clusterctl.errors import SchedulerError, printable
from clusterctl.providers.registry import node_price
from clusterctl.runs.fetch import FROM_JOB, Manifest
from clusterctl.scheduler.base import Scheduler
from clusterctl.scheduler.models import JobInfo, JobState, Outcome, worst
from clusterctl.scheduler.session import Session
from clusterctl.spec.load import dump_spec
from clusterctl.state.ledger import (
    CLIENT_FACTS,
    RUN_FILE,
    SOURCE_FILE,
    SPEC_FILE,
    JobEntry,
    RunRecord,
    Skipped,
    TaskRecord,
    node_hours,
)

SUMS_FILE = "SHA256SUMS"
GOING_ON = frozenset(state.value for state in JobState if state.outcome is Outcome.GOES_ON)

_ACCOUNTING = "sacct.json"
_TELEMETRY = re.compile(rb"(^|/)telemetry/[^/]+\.jsonl\Z")
_MOST_HOSTS = 1000  # whose telemetry is looked at
_ACCOUNTING_LAG_S = 10.0


def assemble(
    session: Session, entry: JobEntry, jobs: Sequence[JobInfo], tree: Path, manifest: Manifest
) -> RunRecord:
    """Add to the job's files ours, and the sums over all."""
    ended = all(job.ended for job in jobs)
    kept = session.ledger.kept(entry.token) or {SPEC_FILE: dump_spec(session.spec).encode()}
    _write_kept(tree, kept)
    manifest = _with_accounting(session.scheduler, jobs, manifest, tree, ended=ended)
    facts = _json(kept.get(CLIENT_FACTS, b""))
    (tree / "environment.json").write_text(_environment(tree, manifest, facts, session.scheduler.version()))
    source = _json(kept.get(SOURCE_FILE, b""))
    record = _record(session, entry, jobs, manifest, source["hash"] if source else None)
    (tree / RUN_FILE).write_text(record.as_json())
    _write_sums(tree, manifest.sha256)
    return record


def _write_kept(tree: Path, kept: Mapping[str, bytes]) -> None:
    """Write our files as they were sent; what the job's folder has under their names stays if it differs."""
    for name, content in kept.items():
        theirs = tree / f"{name}{os.fsdecode(FROM_JOB)}"
        if theirs.is_file() and theirs.stat().st_size == len(content) and theirs.read_bytes() == content:
            theirs.unlink()
        if name != CLIENT_FACTS:  # its content is in environment.json
            (tree / name).write_bytes(content)


def _record(
    session: Session, entry: JobEntry, jobs: Sequence[JobInfo], manifest: Manifest, source: str | None
) -> RunRecord:
    head = worst(jobs)
    starts = [job.start_time for job in jobs if job.start_time is not None]
    ends = [job.end_time for job in jobs if job.end_time is not None]
    ended = all(job.ended for job in jobs)
    start, end = min(starts, default=None), max(ends, default=None) if ended else None
    price = node_price(session.spec, head.partition)
    tasks = tuple(TaskRecord.model_validate(job, from_attributes=True) for job in jobs)
    shown = head if ended else next(job for job in jobs if not job.ended)
    return RunRecord(
        token=entry.token,
        cluster=session.spec.name,
        scheduler=session.spec.scheduler,
        job_id=head.whole_id,
        name=entry.name,
        user=head.user,
        partition=head.partition,
        account=head.account,
        state=shown.state.value,
        final=ended,
        tasks=tasks,
        nodes=tuple(dict.fromkeys(node for job in jobs for node in job.nodes)),
        submit_time=head.submit_time,
        start_time=start,
        end_time=end,
        elapsed_s=end - start if start is not None and end is not None else None,
        price_per_hour=price,
        cost_usd=round(price * node_hours(tasks), 6) if price is not None and ended else None,
        collected_at=time.time(),
        remote_dir=entry.remote_dir or "",
        files=len(manifest.files),
        bytes=sum(manifest.files.values()),
        source=source,
        skipped=manifest.skipped,
    )


def _with_accounting(
    scheduler: Scheduler, jobs: Sequence[JobInfo], manifest: Manifest, tree: Path, *, ended: bool
) -> Manifest:
    """Write what the accounting says; where it says nothing of this job, the manifest has that as skipped."""
    heard = ended and jobs[0].state is not JobState.PURGED
    try:
        accounting = _accounting(scheduler, jobs[0].whole_id, ended=heard)
    except SchedulerError as exc:
        if exc.retryable:
            raise
        lacks = Skipped(path=_ACCOUNTING, reason=printable(exc.cause))
        return replace(manifest, skipped=(*manifest.skipped, lacks))
    if accounting is not None:
        (tree / _ACCOUNTING).write_text(accounting, encoding="utf-8")
    return manifest


def _accounting(scheduler: Scheduler, job_id: str, *, ended: bool) -> str | None:
    """What the accounting says, as it is; of a job that has ended, once it has heard of that too."""
    give_up = scheduler.clock.now() + _ACCOUNTING_LAG_S
    while True:
        text = scheduler.accounting(job_id)
        if text is None or not ended or scheduler.clock.now() >= give_up or not _says_it_goes_on(text):
            return text
        scheduler.clock.sleep(0.5)


def _says_it_goes_on(accounting: str) -> bool:
    try:
        jobs = json.loads(accounting)["jobs"]
        return not jobs or any(job["state"]["current"] in GOING_ON for job in jobs)
    except (ValueError, KeyError, TypeError):  # another version's JSON; it is kept as it is
        return False


def _environment(tree: Path, manifest: Manifest, client: Any, slurm_version: str | None) -> str:
    """The client's facts, and what the telemetry of each host says about its versions and hardware."""
    hosts: dict[str, Any] = {}
    told = [local for local in manifest.files if _TELEMETRY.search(local)]
    for path in sorted(tree / os.fsdecode(local) for local in told[:_MOST_HOSTS]):
        if isinstance(facts := _first_line(path), dict) and facts.get("kind") == "host":
            hosts[path.stem] = {key: value for key, value in facts.items() if key not in {"kind", "time"}}
    environment = {"client": client, "slurm": slurm_version, "hosts": hosts}
    return json.dumps(environment, indent=2) + "\n"


def _first_line(path: Path) -> Any:
    with path.open("rb") as file:
        return _json(file.readline(1 << 16))


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):  # telemetry is the job's to write; the file itself is in the run
        return None


def _write_sums(tree: Path, known: Mapping[bytes, str]) -> None:
    """SHA256SUMS of all files below, as `sha256sum -c` reads it. What has just arrived is not read again."""
    root = os.fsencode(tree)
    found = (
        os.path.join(folder, name)[len(root) + 1 :]  # noqa: PTH118  # names are bytes
        for folder, _, names in os.walk(root)
        for name in names
    )
    lines = []
    for name in sorted(name for name in found if name != SUMS_FILE.encode()):
        sha256 = known.get(name) or _sha256(os.path.join(root, name))  # noqa: PTH118
        shown = escaped(name)
        mark = b"\\" if shown != name else b""
        lines.append(mark + sha256.encode() + b"  " + shown + b"\n")
    (tree / SUMS_FILE).write_bytes(b"".join(lines))


def _sha256(path: bytes) -> str:
    with open(path, "rb") as file:  # noqa: PTH123  # a path in bytes
        return hashlib.file_digest(file, "sha256").hexdigest()


def escaped(name: bytes) -> bytes:
    """A file's name as `sha256sum` writes it."""
    return name.replace(b"\\", b"\\\\").replace(b"\n", b"\\n").replace(b"\r", b"\\r")
