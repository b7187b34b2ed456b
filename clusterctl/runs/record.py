"""The record of a collected run (run.json), made from the scheduler's data, telemetry and
metrics.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError

from clusterctl.providers.registry import provider_of
from clusterctl.runs.fetch import RunManifest
from clusterctl.runs.folder import ACCOUNTING, write_kept, write_sums
from clusterctl.runs.known_to_slurm import KnownToSlurm
from clusterctl.runs.resources import used_by
from clusterctl.runs.series import (
    StepsAround,
    Summary,
    config_of_task,
    gpu_energy_j,
    history_in,
    restart_times,
    restarts_in,
    sample_times,
    summarize,
)
from clusterctl.runs.table import TableWriter
from clusterctl.runs.telemetry_files import NodeFile
from clusterctl.runs.time_use import Records, TimeEvidence, find_time_use
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.ends.diagnosis import Diagnosis
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.ends.judge import judge, tasks_inside
from clusterctl.scheduler.history import nodes_of
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.accounting import StepsUse, uses_by_job
from clusterctl.scheduler.slurm.records import with_all_attempts, with_recorded_exit
from clusterctl.state.inventory import applied_text
from clusterctl.state.ledger import (
    CLIENT_FACTS,
    ENVIRONMENT_FILE,
    RUN_FILE,
    SOURCE_FILE,
    SPEC_FILE,
    SWEEP_FILE,
    TABLE_FILE,
    JobEntry,
)
from clusterctl.state.run_record import (
    RunRecord,
    ScalingRecord,
    SkippedFile,
    TaskRecord,
)

_TELEMETRY = re.compile(rb"(^|/)telemetry/[^/]+\.jsonl\Z")


@dataclass(frozen=True, slots=True)
class Recorder:
    """Writes clusterctl's own files into the folder of a run.

    known: what Slurm knows of the job beside its state.
    accounting: sacct's record of the job as JSON; None if it is not available. missing: the reason,
        or "".
    """

    session: Session
    entry: JobEntry
    jobs: Sequence[JobInfo]
    known: KnownToSlurm
    accounting: str | None
    missing: str

    @classmethod
    def of(
        cls, session: Session, entry: JobEntry, jobs: Sequence[JobInfo], known: KnownToSlurm
    ) -> Recorder:
        if jobs[0].state is JobState.PURGED:
            # The accounting may have another job with the same id.
            return cls(session, entry, jobs, known, None, jobs[0].reason)
        accounting = known.accounting.get(jobs[0].whole_id)
        return cls(session, entry, jobs, known, accounting, known.missing)

    @property
    def accounting_away(self) -> bool:
        """Whether the job has no record because the accounting does not answer."""
        return self.known.is_accounting_away and self.jobs[0].state is not JobState.PURGED

    def write(self, tree: Path, manifest: RunManifest) -> RunRecord:
        """Write clusterctl's files and the checksums of all files into ``tree``. Return the run's
        record.
        """
        kept = self.session.ledger.kept(self.entry.token) or {
            SPEC_FILE: applied_text(self.session.workspace)
        }
        write_kept(tree, kept)
        if self.missing:
            missing = SkippedFile(path=ACCOUNTING, reason=self.missing, files=0, down="")
            manifest = replace(manifest, skipped=(*manifest.skipped, missing))
        elif self.accounting is not None:
            (tree / ACCOUNTING).write_text(self.accounting, encoding="utf-8")
        facts = _json(kept.get(CLIENT_FACTS, b""))
        (tree / ENVIRONMENT_FILE).write_text(
            environment_text(tree, manifest, facts, self.known.version)
        )
        source = _json(kept.get(SOURCE_FILE, b""))
        (tree / TABLE_FILE).unlink(missing_ok=True)
        self._parse_telemetry(tree)
        record = self._record(tree, manifest, source["hash"] if source else None)
        sweep = _json(kept.get(SWEEP_FILE, b""))
        inside = tasks_inside(self.session, self.jobs[0], tree)
        told = judge(self.session, inside, tree, self.known.facts)
        packed = [_recorded(task, told) for task in inside]
        record = _with_summary(record, tree, facts, sweep, packed)
        (tree / RUN_FILE).write_text(record.as_json())
        write_sums(tree, manifest.sha256)
        return record

    def _parse_telemetry(self, tree: Path) -> None:
        """Write the telemetry of all nodes into the table."""
        with TableWriter(tree) as table:
            for job in self.jobs:
                folder = _folder_of(job, tree)
                for node in dict.fromkeys((*nodes_of(history_in(folder)), *job.all_nodes)):
                    deque(table.blocks(NodeFile(folder, node)), maxlen=0)

    def _whole(self, job: JobInfo, tree: Path) -> JobInfo:
        """Return a job or an array's task with all its attempts."""
        folder = _folder_of(job, tree)
        history = history_in(folder)
        job = with_recorded_exit(job, history)
        # The accounting also has the end of an attempt that was killed.
        job = with_all_attempts(job, history, () if job.attempts else sample_times(folder, history))
        # A job that waits has no nodes.
        last = job.attempts[-1].nodes if job.attempts and job.ended else ()
        return replace(job, nodes=job.nodes or last)

    def _task(
        self, job: JobInfo, tree: Path, steps: StepsUse, told: Mapping[str, Diagnosis]
    ) -> TaskRecord:
        folder = _folder_of(job, tree)
        task = _recorded(job, told)
        joules = gpu_energy_j(folder, task.attempts)
        used = used_by(folder, task, steps)
        return task.model_copy(update={"gpu_energy_j": joules, "used": used})

    def _record(self, tree: Path, manifest: RunManifest, source: str | None) -> RunRecord:
        jobs = [self._whole(job, tree) for job in self.jobs]
        ending = Ending.of(jobs, job_id=jobs[0].whole_id)
        steps = uses_by_job(self.accounting or "")
        told = judge(self.session, self.jobs, tree, self.known.facts)
        tasks = tuple(self._task(job, tree, steps.get(job.id, StepsUse()), told) for job in jobs)
        ended = all(job.ended for job in jobs)
        spec = self.session.spec
        price = provider_of(spec.provider).node_price(spec, ending.partition)
        node_hours = sum(task.node_hours for task in tasks)
        return RunRecord(
            token=self.entry.token,
            cluster=self.session.inventory.cluster,
            scheduler=spec.scheduler,
            job_id=ending.job_id,
            name=self.entry.name,
            user=ending.user,
            partition=ending.partition,
            account=ending.account,
            qos=jobs[0].qos,
            state=ending.state,
            final=ended,
            tasks=tasks,
            nodes=tuple(dict.fromkeys(node for job in jobs for node in job.all_nodes)),
            submit_time=ending.submit_time,
            start_time=ending.start_time,
            end_time=ending.end_time,
            elapsed_s=ending.elapsed_s if ended else None,
            price_per_hour=price,
            cost_usd=round(price * node_hours, 6) if price is not None and ended else None,
            collected_at=time.time(),
            remote_dir=self.entry.remote_dir or "",
            files=len(manifest.files),
            bytes=sum(manifest.files.values()),
            source=source,
            shares_machine=spec.provider.shares_kernel,
            skipped=manifest.skipped,
        )


def with_programs(record: RunRecord, tree: Path, kept: Mapping[str, bytes]) -> RunRecord:
    """Return the record of a run with what its programs have written to ``tree`` by now.

    kept: name -> content of clusterctl's files of the job.
    """
    facts, sweep = (_json(kept.get(name, b"")) for name in (CLIENT_FACTS, SWEEP_FILE))
    return _with_summary(record, tree, facts, sweep, record.packed)


def _folder_of(job: JobInfo, tree: Path) -> Path:
    return tree if job.task is None else tree / f"task-{job.task}"


def _recorded(job: JobInfo, told: Mapping[str, Diagnosis]) -> TaskRecord:
    """Return the record of a job or task. told: diagnoses, by the IDs of jobs."""
    diagnosis = told[job.id].as_dict() if job.id in told else None
    record = TaskRecord.model_validate(job, from_attributes=True)
    return record.model_copy(update={"diagnosis": diagnosis})


def _with_summary(
    record: RunRecord, tree: Path, facts: Any, sweep: Any, packed: Sequence[TaskRecord]
) -> RunRecord:
    """Return the record with what the programs wrote. packed: the tasks that ran inside the job."""
    facts = facts if isinstance(facts, dict) else {}
    job = facts["job"] if isinstance(facts.get("job"), dict) else {}
    args = tuple(job.get("args") or ())
    submitted = {
        "args": args,
        "tags": tuple(dict.fromkeys(job.get("tag") or ())),
        "note": job.get("note"),
    }
    if isinstance(per_node := job.get("tasks_per_node"), int):
        submitted["tasks_per_node"] = per_node
    with suppress(ValidationError):
        submitted["scaling"] = TypeAdapter(ScalingRecord | None).validate_python(job.get("scaling"))
    submitted |= {key: facts[key] for key in ("replay_of", "of_failed") if key in facts}
    record = record.model_copy(update={"packed": tuple(packed)})
    values, form = (
        (sweep.pop("tasks"), sweep.get("form")) if isinstance(sweep, dict) else ([], None)
    )
    if isinstance(sweep, dict):
        # Older versions of clusterctl did not record them.
        sweep.pop("arguments", None)

    def told(task: TaskRecord) -> tuple[Summary, dict[str, Any]]:
        summary, more = _program_of(record, task, tree, args, table, evidence=evidence[task.id])
        if task.number.isdecimal() and int(task.number) < len(values):
            summary.config |= config_of_task(values[int(task.number)], form)
        return summary, more

    def all_told(tasks: Sequence[TaskRecord]) -> tuple[TaskRecord, ...]:
        return tuple(
            task.model_copy(update={**vars(summary), **more})
            for task in tasks
            for summary, more in (told(task),)
        )

    # Telemetry can't be read from the table while metrics are added to it.
    evidence = {
        task.id: TimeEvidence.of(task.folder_in(tree), task)
        for task in (*record.tasks, *record.packed)
    }
    with TableWriter(tree) as table:
        if record.is_array:
            submitted["tasks"] = all_told(record.tasks)
        else:
            (task,) = record.tasks
            summary, more = told(task)
            submitted |= {**vars(summary), "tasks": (task.model_copy(update=more),)}
        submitted["packed"] = all_told(record.packed)
    return record.model_copy(update={**submitted, "sweep": sweep})


def _program_of(
    record: RunRecord,
    task: TaskRecord,
    tree: Path,
    args: Sequence[str],
    table: TableWriter,
    *,
    evidence: TimeEvidence,
) -> tuple[Summary, dict[str, Any]]:
    """Return what the program of a job or task wrote, and its restarts and use of time. Its metrics
    are read once. evidence: without that of these.
    """
    folder = task.folder_in(tree)
    steps = StepsAround(restart_times(folder, task.attempts))
    records = Records()
    summary = summarize(folder, args, (steps.add, records.add), table)
    summary.left_out += records.left_out
    restarts = restarts_in(folder, task.attempts, steps)
    return summary, {
        "interruptions": tuple(attempt.as_dict() for attempt in restarts),
        "time_use": find_time_use(record, task, evidence.with_records(records)),
    }


def environment_text(
    tree: Path, manifest: RunManifest, client: Any, slurm_version: str | None
) -> str:
    """Return the text of environment.json: ``client`` (the submission), versions, and hardware by
    host.
    """
    hosts: dict[str, Any] = {}
    telemetry_files = [local for local in manifest.files if _TELEMETRY.search(local)]
    for path in sorted(tree / os.fsdecode(local) for local in telemetry_files):
        with path.open("rb") as file:
            facts = _json(file.readline(1 << 16))
        if isinstance(facts, dict) and facts.get("kind") == "host":
            hosts[path.stem] = {
                key: value for key, value in facts.items() if key not in {"kind", "time"}
            }
    environment = {"client": client, "slurm": slurm_version, "hosts": hosts}
    return json.dumps(environment, indent=2) + "\n"


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        # A job may write anything to its telemetry. The run contains the file itself.
        return None
