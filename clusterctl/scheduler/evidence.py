"""What is known of a job that failed or waits: its logs, its steps, and what was sent with it."""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from clusterctl.errors import SchedulerError, TransportError
from clusterctl.scheduler import remote_logs
from clusterctl.scheduler.base import JobInfo, JobState, Outcome, StepInfo
from clusterctl.scheduler.diagnosis import Diagnosis, Evidence, diagnose
from clusterctl.scheduler.diagnosis import waiting as diagnose_waiting
from clusterctl.scheduler.session import Session
from clusterctl.state.submissions import CLIENT_FACTS, SOURCE_FILE
from clusterctl.transport.base import remote_argv
from clusterctl.util.process import on_each

_MOST_READ = 8  # jobs whose logs are read
_MOST_HOSTS = 16  # whose logs are read where hosts share no folder
_ACCOUNTING_LAG_S = 3.0
_Json = Mapping[str, Any]


def diagnose_job(session: Session, job: JobInfo) -> Diagnosis:
    """Why a job failed, was cancelled or waits; its logs are read from the cluster.

    What can't be read is left out: how the job ended is what was asked for.
    """
    if not job.ended:
        return diagnose(Evidence(job=job))
    try:
        logs = _read_logs(session, job)
    except (SchedulerError, TransportError) as exc:
        return diagnose(Evidence(job=job)).with_lines(f"(its log can't be read: {exc.what})")
    found = diagnose(evidence_of(session, job, logs))
    if found.lines:
        return found
    if logs.get("unread"):
        return found.with_lines(f"(its log can't be read: {logs['unread']})")
    silent = "it" if found.rank is None else f"rank {found.rank}"
    return found.with_lines("(the job's folder is gone)" if logs.get("gone") else f"({silent} wrote nothing)")


def diagnose_jobs(
    session: Session, jobs: Sequence[JobInfo], *, waiting: bool = False
) -> tuple[Diagnosis, ...]:
    """Why each of these jobs failed, then why each was cancelled; with ``waiting``, what each waits for.

    Of many, such as an array's tasks, only the first ones' logs are read.
    """
    bad = [job for job in jobs if job.outcome in (Outcome.FAILED, Outcome.CANCELLED)]
    bad.sort(key=lambda job: job.outcome is Outcome.CANCELLED)
    read = [diagnose_job(session, job) for job in bad[:_MOST_READ]]
    unread = [diagnose(Evidence(job=job)) for job in bad[_MOST_READ:]]
    return (*read, *unread, *(diagnose_waiting(jobs) if waiting else ()))


def diagnose_run(session: Session, job: JobInfo, tree: Path) -> Diagnosis:
    """The same of a run that is collected into ``tree``."""
    return diagnose(evidence_of(session, job, remote_logs.ends(str(tree), _task(job))))


def evidence_of(session: Session, job: JobInfo, logs: _Json) -> Evidence:
    """All that is known of a job, with the ends of its logs as ``remote_logs`` gives them."""
    entry = session.ledger.find(job.id)
    kept = session.ledger.kept(entry.token) if entry is not None else {}
    facts, source = (_read(kept.get(name, b"{}")) for name in (CLIENT_FACTS, SOURCE_FILE))
    asked = facts.get("job") or {}
    steps, by = _accounted(session, job)
    return Evidence(
        job=job,
        log="\n".join(filter(None, (logs.get("stdout"), logs.get("stderr")))),
        ranks={int(rank): text for rank, text in (logs.get("ranks") or {}).items()},
        ends={int(rank): text for rank, text in (logs.get("ends") or {}).items()},
        tasks_per_node=asked.get("tasks_per_node"),
        steps=steps,
        cancelled_by=by,
        left_here=partial(_left_here, asked.get("script"), source, entry.remote_dir or "" if entry else ""),
        excluded=tuple(asked.get("exclude") or ()),
    )


def _task(job: JobInfo) -> str:
    return "" if job.task is None else str(job.task)


def _read(raw: bytes) -> _Json:
    with suppress(ValueError, RecursionError):
        found = json.loads(raw)
        return found if isinstance(found, dict) else {}
    return {}


def _read_logs(session: Session, job: JobInfo) -> _Json:
    """The logs on the hosts that have them: the first has the job's own, each those of its ranks.

    ``unread`` says why the first does not answer.

    Raises:
        TransportError: none of them answers.
    """
    entry = session.ledger.find(job.id)
    folder = entry.remote_dir if entry is not None and entry.remote_dir else job.work_dir if job.token else ""
    if not folder:
        return {}
    hosts = dict(session.hosts_with_files(job.nodes)[:_MOST_HOSTS])
    argv = remote_argv("clusterctl.scheduler.remote_logs", folder, _task(job))
    answers, failed = on_each(hosts, lambda host: _read(hosts[host].run(argv).stdout.encode()))
    if not answers:
        raise next(iter(failed.values()))
    found, first = list(answers.values()), failed.get(next(iter(hosts)))
    of_all = {
        key: {rank: text for one in reversed(found) for rank, text in (one.get(key) or {}).items()}
        for key in ("ranks", "ends")
    }
    return {**found[0], "unread": first.what if first else "", **of_all}


def _accounted(session: Session, job: JobInfo) -> tuple[tuple[StepInfo, ...], str]:
    """The job's steps, and the name of the user who cancelled it."""
    scheduler = session.scheduler
    with suppress(SchedulerError, TransportError):
        for _ in scheduler.clock.polls(_ACCOUNTING_LAG_S, first_s=0.3, longest_s=1.0):
            steps = scheduler.steps(job.id)
            uid = next((step.cancelled_by for step in steps if step.cancelled_by), "")
            if uid:
                name = session.transport.run(["id", "-un", uid], check=False).stdout.strip()
                return steps, name or f"uid {uid}"
            if not steps or job.state is not JobState.CANCELLED:
                break
        return steps, ""
    return (), ""


def _left_here(script: str | None, source: _Json, folder: str, name: str) -> str:
    """The path beside the script here of a file or module that the job lacks, if it was not sent; else ""."""
    here = Path(script).parent if script else None
    path = os.path.normpath(name.removeprefix(f"{folder}/") if folder else name)
    if here is None or os.path.isabs(path) or path.startswith(".."):  # noqa: PTH117
        return ""
    sent = [str(one.get("path")) for one in source.get("files", ())]
    for one in (path, f"{path}.py"):
        is_sent = any(other == one or other.startswith(f"{one}/") for other in sent)
        if not is_sent and os.path.exists(here / one):  # noqa: PTH110  # any name
            return shlex.quote(one)
    return ""
