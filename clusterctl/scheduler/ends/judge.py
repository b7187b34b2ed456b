"""Collection of the facts about a failed or waiting job: its logs, its steps, and the files sent
with it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from clusterctl.errors import SchedulerError, TransportError
from clusterctl.scheduler.base import (
    NO_LOG_SIGNAL,
    JobInfo,
    JobState,
    NodeInfo,
    Outcome,
    StepInfo,
)
from clusterctl.scheduler.ends import remote_logs
from clusterctl.scheduler.ends.completed import LastError, error_at_end
from clusterctl.scheduler.ends.diagnosis import Diagnosis, diagnose, diagnose_waiting
from clusterctl.scheduler.ends.facts import Evidence, is_shell
from clusterctl.scheduler.ends.local_files import LocalFiles
from clusterctl.scheduler.history import attempts_of
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.availability import waits_for_nodes
from clusterctl.scheduler.slurm.records import with_recorded_exit
from clusterctl.state.ledger import CLIENT_FACTS, SOURCE_FILE
from clusterctl.transport.base import remote_argv
from clusterctl.util.process import call_on_hosts

_MOST_READ = 8  # jobs
_MOST_HOSTS = 16  # hosts
_ACCOUNTING_LAG_S = 3.0
_Json = Mapping[str, Any]


def diagnose_job(session: Session, job: JobInfo, tree: Path | None = None) -> Diagnosis:
    """Return why a job failed, was cancelled or waits, from its logs if they can be read.

    tree: the local folder with the job's collected files. Its logs are read on the cluster only if
        they are empty here. None: on the cluster.
    """
    bare = Evidence(job=job, advice=session.site.advice)
    if not job.ended:
        return next(diagnose_waiting_jobs(session, [job]), diagnose(bare))
    try:
        logs = _collected_logs(tree, job) if tree else {}
        logs = logs or _read_logs(session, job)
    except (SchedulerError, TransportError) as exc:
        return diagnose(bare).with_note(f"the job's log can't be read: {exc.what}")
    diagnosis = diagnose(evidence_of(session, job, logs))
    if diagnosis.excerpt.lines:
        return diagnosis
    if not logs:
        return diagnosis.with_note("clusterctl reads only logs of jobs that it has submitted")
    if logs.get("unread"):
        return diagnosis.with_note(f"the job's log can't be read: {logs['unread']}")
    if logs.get("gone"):
        return diagnosis.with_note("the job's folder no longer exists")
    if logs.get("full"):
        return diagnosis.with_note(
            "the job's log is empty, and the file system of its folder is full"
        )
    rank = diagnosis.failed.rank
    writer = "the job" if rank is None else f"rank {rank}"
    return diagnosis.with_note(f"{writer} wrote nothing to its log")


def diagnose_jobs(
    session: Session, jobs: Sequence[JobInfo], *, waiting: bool = False
) -> tuple[Diagnosis, ...]:
    """Return diagnoses of failed jobs, then of cancelled jobs, then, if ``waiting`` is set, of
    pending jobs.

    Only the logs of the first ``_MOST_READ`` jobs are read: an array may have thousands of tasks.
    """
    failed = [job for job in jobs if job.outcome in (Outcome.FAILED, Outcome.CANCELLED)]
    failed.sort(key=lambda job: job.outcome is Outcome.CANCELLED)
    read = [diagnose_job(session, job) for job in failed[:_MOST_READ]]
    unread = [
        diagnose(Evidence(job=job, advice=session.site.advice)) for job in failed[_MOST_READ:]
    ]
    return (*read, *unread, *(diagnose_waiting_jobs(session, jobs) if waiting else ()))


def diagnose_waiting_jobs(session: Session, jobs: Sequence[JobInfo]) -> Iterator[Diagnosis]:
    """Yield why jobs are pending, from Slurm's reasons and the states of the nodes."""
    waits = [job for job in jobs if job.state is JobState.PENDING]
    nodes: Sequence[NodeInfo] = ()
    required: Mapping[int, Sequence[str]] = {}
    if any(waits_for_nodes(job) for job in waits):
        with suppress(SchedulerError, TransportError):
            nodes = session.scheduler.nodes()
            required = session.scheduler.required_nodes()
    return diagnose_waiting(waits, nodes=nodes, required=required, advice=session.site.advice)


def error_of_completed(session: Session, job: JobInfo) -> tuple[LastError | None, bool]:
    """Return the error with which the log of a completed job ends, and whether the job is a shell
    script.
    """
    logs: _Json = {}
    with suppress(SchedulerError, TransportError):
        logs = _read_logs(session, job)
    local_files, source, _ = _sent(session, job)
    is_of_shell = is_shell(local_files.script_text(source))
    stdout, stderr = (logs.get(name) or "" for name in ("stdout", "stderr"))
    return error_at_end(stdout, stderr, is_shell=is_of_shell), is_of_shell


def _sent(session: Session, job: JobInfo) -> tuple[LocalFiles, _Json, _Json]:
    """Return the files that were sent with a job, their list, and the facts of the submission."""
    entry = session.ledger.find(job.id)
    files = session.ledger.kept(entry.token) if entry is not None else {}
    facts, source = (_read(files.get(name, b"{}")) for name in (CLIENT_FACTS, SOURCE_FILE))
    program_dir = entry.program_dir if entry is not None else ""
    return LocalFiles.of(facts, source, program_dir), source, facts


def evidence_of(session: Session, job: JobInfo, logs: _Json) -> Evidence:
    """Return the facts about a job. logs: the ends of the job's logs, as ``remote_logs`` returns
    them.
    """
    history = attempts_of(logs.get("events") or "")
    job = with_recorded_exit(job, history)
    local_files, source, facts = _sent(session, job)
    request = facts.get("job") or {}
    steps, canceller = _accounted(session, job)
    lost: Mapping[str, str] = {}
    with suppress(SchedulerError, TransportError):
        lost = session.scheduler.lost_nodes(job) if job.outcome is Outcome.FAILED else {}
    unfit: Mapping[str, str] = {}
    # slurmd, which runs as root, cancels a job with --no-requeue if the Prolog fails.
    if job.signal == NO_LOG_SIGNAL or canceller == "root":
        with suppress(SchedulerError, TransportError):
            unfit = session.scheduler.unfit_nodes(job)
    return Evidence(
        job=job,
        log="\n".join(filter(None, (logs.get("stdout"), logs.get("stderr")))),
        stdout=logs.get("stdout") or "",
        ranks={int(rank): text for rank, text in (logs.get("ranks") or {}).items()},
        ends={int(rank): text for rank, text in (logs.get("ends") or {}).items()},
        tasks_per_node=request.get("tasks_per_node"),
        attempt=history[-1],
        lost=lost,
        unfit=unfit,
        steps=steps,
        cancelled_by=canceller,
        folder=local_files.remote,
        left_here=local_files.find,
        packages=local_files.packages,
        excluded=tuple(request.get("exclude") or ()),
        script=local_files.script_text(source),
        was_read=bool(logs) and not logs.get("gone") and not logs.get("unread"),
        is_full=bool(logs.get("full")),
        advice=session.site.advice,
    )


def _task(job: JobInfo) -> str:
    return "" if job.task is None else str(job.task)


def _read(raw: bytes) -> _Json:
    with suppress(ValueError, RecursionError):
        value = json.loads(raw)
        return value if isinstance(value, dict) else {}
    return {}


def _collected_logs(tree: Path, job: JobInfo) -> _Json:
    """Return the ends of the job's logs in a local folder; empty if nothing is written in them."""
    logs = remote_logs.ends(str(tree), _task(job))
    # The file system of this machine tells nothing about the job's.
    is_written = logs["stdout"] or logs["stderr"] or any(logs["ranks"].values())
    return {**logs, "full": False} if is_written else {}


def _read_logs(session: Session, job: JobInfo) -> _Json:
    """Return the ends of the job's logs, merged from its hosts; raise TransportError if no host
    answers.

    ``unread`` in the result: why the first host, which has the job's own log, can't be read, or "".
    """
    entry = session.ledger.find(job.id)
    folder = (
        entry.remote_dir
        if entry is not None and entry.remote_dir
        else job.work_dir
        if job.token
        else ""
    )
    if not folder:
        return {}
    hosts = dict(session.hosts_with_files(job.nodes)[:_MOST_HOSTS])
    argv = remote_argv("clusterctl.scheduler.ends.remote_logs", "ends", folder, _task(job))
    answers, failed = call_on_hosts(
        hosts, lambda host: _read(hosts[host].run(argv).stdout.encode())
    )
    if not answers:
        raise next(iter(failed.values()))
    logs = list(answers.values())
    first_failure = failed.get(next(iter(hosts)))
    merged = {
        key: {rank: text for log in reversed(logs) for rank, text in (log.get(key) or {}).items()}
        for key in ("ranks", "ends")
    }
    return {**logs[0], "unread": first_failure.what if first_failure else "", **merged}


def canceller_of(steps: Sequence[StepInfo]) -> str:
    """Return the uid of the user that cancelled a job, or "". The first step is the job itself.

    clusterctl cancels steps of jobs that go on, such as that of telemetry.
    """
    return steps[0].cancelled_by if steps else ""


def _accounted(session: Session, job: JobInfo) -> tuple[tuple[StepInfo, ...], str]:
    """Return the job's steps, and the name of the user that cancelled the job ("" if unknown)."""
    scheduler = session.scheduler
    with suppress(SchedulerError, TransportError):
        for _ in scheduler.clock.polls(_ACCOUNTING_LAG_S, first_s=0.3, longest_s=1.0):
            steps = scheduler.steps(job.id)
            if uid := canceller_of(steps):
                name = session.transport.run(["id", "-un", uid], check=False).stdout.strip()
                return steps, name or f"uid {uid}"
            if not steps or job.state is not JobState.CANCELLED:
                break
        return steps, ""
    return (), ""
