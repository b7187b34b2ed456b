"""Judges how jobs and their tasks ended: once, from the jobs' logs, Slurm's accounting, and the
files that were sent. The judgement is kept in the job's folder.
"""

from __future__ import annotations

import json
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

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
from clusterctl.scheduler.ends.completed import diagnose_completed
from clusterctl.scheduler.ends.diagnose import diagnose, diagnose_waiting
from clusterctl.scheduler.ends.diagnosis import Diagnosis, lines_of_tasks
from clusterctl.scheduler.ends.facts import Evidence
from clusterctl.scheduler.ends.known import PACKED_TASKS
from clusterctl.scheduler.ends.local_files import LocalFiles
from clusterctl.scheduler.ends.packed import packed_tasks
from clusterctl.scheduler.history import attempts_of
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.availability import waits_for_nodes
from clusterctl.scheduler.slurm.records import with_accounted, with_recorded_exit
from clusterctl.state.ledger import CLIENT_FACTS, SOURCE_FILE
from clusterctl.transport.base import remote_argv
from clusterctl.util.process import call_on_hosts

_PROGRAM: Final = "clusterctl.scheduler.ends.remote_logs"
# The logs of so many tasks are read by one command, and those of few with what is kept.
_MOST_AT_ONCE: Final = 100
_FEW: Final = 8
_MOST_HOSTS: Final = 16
_ACCOUNTING_LAG_S: Final = 3.0
# So long after the end of a job, its logs are complete on all hosts, and Slurm has noticed lost nodes.
_SETTLED_S: Final = 120.0
_NOT_OURS: Final = "clusterctl reads only logs of jobs that it has submitted"
_Json = Mapping[str, Any]


def judge(
    session: Session,
    jobs: Sequence[JobInfo],
    tree: Path | None = None,
    facts: SlurmFacts | None = None,
) -> dict[str, Diagnosis]:
    """Return, by the IDs of jobs and tasks, why they failed, were cancelled or wait, and what may be
    wrong with those that completed. Others are left out.

    tree: the local folder with the collected files of the jobs' common folder, which are read if the
        cluster does not answer.
    facts: what Slurm knows of these jobs and maybe of others. None: Slurm is asked if the end of one
        is not kept.
    """
    found = {each.job_id: each for each in diagnose_waiting_jobs(session, jobs)}
    groups: dict[tuple[str, str, tuple[str, ...]], list[JobInfo]] = {}
    for job in jobs:
        if job.ended:
            hosts = tuple(host for host, _ in session.hosts_with_files(job.nodes)[:_MOST_HOSTS])
            groups.setdefault((_folder_of(session, job), job.whole_id, hosts), []).append(job)
    for (folder, _, _), own in groups.items():
        found |= _judge_tasks(session, folder, own, tree, facts)
    return {job.id: found[job.id] for job in jobs if job.id in found}


def tasks_inside(session: Session, job: JobInfo, tree: Path | None = None) -> tuple[JobInfo, ...]:
    """Return the tasks of `submit --pack` that ran inside a job; () for another job, and if its folder
    can't be read.
    """
    numbers = session.packed_numbers(job.id)
    if not numbers:
        return ()
    answer = _read(session, _folder_of(session, job), [job], tree, "kept")
    if "packed" not in answer:
        return ()
    return packed_tasks(str(answer["packed"]), job, numbers)


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


def _judge_tasks(
    session: Session,
    folder: str,
    jobs: Sequence[JobInfo],
    tree: Path | None,
    facts: SlurmFacts | None,
) -> dict[str, Diagnosis]:
    """Return what is found of a job, or of tasks of an array, whose logs are on the same hosts."""
    found: dict[str, Diagnosis | None] = {}
    logs: dict[str, _Json] = {}
    # Another user may write anything into that folder.
    if jobs[0].user == session.inventory.job_user:
        what = "kept or logs" if len(jobs) <= _FEW else "kept"
        answer = _read(session, folder, jobs, tree, what)
        found = _kept_in(answer, jobs)
        logs = {task: each for task, each in answer["tasks"].items() if "kept" not in each}
    if new := [job for job in jobs if job.id not in found]:
        facts = facts or SlurmFacts.of(session, new)
        found |= _judge_new(session, folder, new, tree, logs, facts=facts)
    return {job_id: each for job_id, each in found.items() if each is not None}


def _judge_new(
    session: Session,
    folder: str,
    jobs: Sequence[JobInfo],
    tree: Path | None,
    logs: Mapping[str, _Json],
    *,
    facts: SlurmFacts,
) -> dict[str, Diagnosis | None]:
    """Judge jobs by their logs, and keep what is settled. logs: those that are read already."""
    around = _Around(_Sent.of(session, jobs[0]), facts)
    found: dict[str, Diagnosis | None] = {}
    for at in range(0, len(jobs), _MOST_AT_ONCE):
        to_keep: dict[str, _Json] = {}
        part = jobs[at : at + _MOST_AT_ONCE]
        unread = [job for job in part if _task(job) not in logs]
        more = _read(session, folder, unread, tree, "logs")["tasks"] if unread else {}
        for job in part:
            own = logs.get(_task(job)) or more.get(_task(job), {})
            evidence = _evidence_of(session, job, own, around)
            found[job.id] = told = _judge_one(session, evidence, own, tree)
            if facts.is_complete and _is_settled(evidence, own):
                diagnosis = told and told.as_dict()
                to_keep[_task(job)] = {"judged": own["now"], "diagnosis": diagnosis}
        _keep(session, folder, part, to_keep)
    return found


def _kept_in(answer: _Json, jobs: Sequence[JobInfo]) -> dict[str, Diagnosis | None]:
    """Return what was judged before. What a job has damaged in its folder is left out, and what does not
    fit its present state, of which Slurm may have learned more.
    """
    found = {}
    for job in jobs:
        kept = answer["tasks"].get(_task(job), {}).get("kept")
        if isinstance(kept, dict):
            diagnosis = Diagnosis.read(kept.get("diagnosis"))
            state = job.state if diagnosis is None else diagnosis.state
            is_of_job = diagnosis is None or diagnosis.job_id == job.id
            says_enough = diagnosis is not None or job.outcome is Outcome.COMPLETED
            if is_of_job and says_enough and job.state in (state, JobState.PURGED):
                found[job.id] = diagnosis
    return found


def _judge_one(
    session: Session, evidence: Evidence, logs: _Json, tree: Path | None
) -> Diagnosis | None:
    job = evidence.job
    if job.outcome is Outcome.COMPLETED:
        return diagnose_completed(evidence, logs)
    diagnosis = diagnose(evidence)
    if diagnosis.code != PACKED_TASKS:
        return diagnosis
    inside = tasks_inside(session, job, tree)
    failed = [task for task in inside if task.outcome is Outcome.FAILED]
    causes = lines_of_tasks({}, judge(session, failed, tree).values())
    return replace(diagnosis, remarks=(*diagnosis.remarks, *causes))


def _is_settled(evidence: Evidence, logs: _Json) -> bool:
    """Return whether nothing more will be learned of the end of a job."""
    job = evidence.job
    now: float = logs.get("now", 0.0)
    is_seen = "events" in logs and not (logs.get("unread") or logs.get("gone"))
    if not is_seen or job.state is JobState.PURGED or (job.end_time or 0) > now:
        return False
    # The accounting tells the memory of a job, and lost nodes, a moment later.
    is_accounted = bool(evidence.steps) and len(job.nodes) == 1
    is_whole = job.outcome is Outcome.COMPLETED or is_accounted
    if job.end_time is None or (evidence.attempt.has_ended and is_whole):
        return True
    return now - job.end_time > _SETTLED_S


# --- The logs ---------------------------------------------------------------------------------------
def _task(job: JobInfo) -> str:
    return "" if job.task is None else str(job.task)


def _read_json(raw: bytes) -> _Json:
    with suppress(ValueError, RecursionError):
        value = json.loads(raw)
        return value if isinstance(value, dict) else {}
    return {}


def _folder_of(session: Session, job: JobInfo) -> str:
    """Return the folder of a job that clusterctl has submitted, else ""."""
    entry = session.ledger.find(job.id)
    # Slurm's numbers may have begun again.
    if entry is not None and entry.remote_dir and job.token in ("", entry.token):
        return entry.remote_dir
    return job.work_dir if job.token else ""


def _read(
    session: Session, folder: str, jobs: Sequence[JobInfo], tree: Path | None, what: str
) -> _Json:
    """Return the answer of ``remote_logs`` about jobs in a folder. If their logs can't be read,
    ``unread`` of each says why.

    what: "kept", "logs", or "kept or logs".
    """
    if not folder:
        return _unread(jobs, _NOT_OURS)
    try:
        answer = _ask(session, folder, jobs, what)
        if tree is None or not any(logs.get("gone") for logs in answer["tasks"].values()):
            return answer
    except (SchedulerError, TransportError) as exc:
        if tree is None:
            return _unread(jobs, f"the job's log can't be read: {exc.what}")
    answer = remote_logs.judged(str(tree), str(tree), "logs", _asked(jobs))
    # The file system and the clock of this machine tell nothing about the job's.
    tasks = {task: {**logs, "full": False, "now": 0.0} for task, logs in answer["tasks"].items()}
    return {**answer, "tasks": tasks}


def _unread(jobs: Sequence[JobInfo], why: str) -> _Json:
    return {"tasks": {_task(job): {"unread": why} for job in jobs}}


def _asked(jobs: Sequence[JobInfo]) -> dict[str, list[Any]]:
    return {_task(job): [job.end_time, job.outcome is Outcome.COMPLETED] for job in jobs}


def _ask(session: Session, folder: str, jobs: Sequence[JobInfo], what: str) -> _Json:
    """Return the answer of ``remote_logs``, with the logs merged from the jobs' hosts. Raise
    TransportError if no host answers.

    ``unread`` of a task: why the first host, which has its own log, can't be read, or "".
    """
    hosts = dict(session.hosts_with_files(jobs[0].nodes)[:_MOST_HOSTS])
    entry = session.ledger.find(jobs[0].id)
    argv = remote_argv(_PROGRAM, "ends", folder, entry.program_dir if entry else "", what)
    asked = _asked(jobs)
    stdin = json.dumps(asked).encode()
    answers, failed = call_on_hosts(
        hosts, lambda host: _read_json(hosts[host].run(argv, stdin=stdin).stdout.encode())
    )
    if not answers:
        raise next(iter(failed.values()))
    first_failure = failed.get(next(iter(hosts)))
    unread = f"the job's log can't be read: {first_failure.what}" if first_failure else ""
    parts = [answer["tasks"] for answer in answers.values() if "tasks" in answer]
    if not parts:
        return _unread(jobs, "the job's log can't be read: its host gave no answer")
    tasks = {
        task: _merged([part[task] for part in parts if task in part], unread)
        for task in asked
        if task in parts[0]
    }
    packed = [answer["packed"] for answer in answers.values() if "packed" in answer]
    return {"tasks": tasks, **({"packed": max(packed, key=len)} if packed else {})}


def _merged(logs: Sequence[_Json], unread: str) -> _Json:
    """Return the logs of a task from its hosts as those of a single one."""
    if "kept" in logs[0]:
        return logs[0]
    merged = {
        key: {rank: text for log in reversed(logs) for rank, text in (log.get(key) or {}).items()}
        for key in ("ranks", "ends")
    }
    return {**logs[0], "unread": unread, **merged}


def _keep(session: Session, folder: str, jobs: Sequence[JobInfo], judgements: _Json) -> None:
    """Keep judgements in the job's folder, if that is possible."""
    if not judgements:
        return
    _, transport = session.hosts_with_files(jobs[0].nodes)[0]
    with suppress(SchedulerError, TransportError):
        argv = remote_argv(_PROGRAM, "keep", folder)
        transport.run(argv, stdin=json.dumps(judgements).encode(), check=False)


# --- What is around the logs ------------------------------------------------------------------------
@dataclass(frozen=True, slots=True)
class _Sent:
    """What this machine knows of a submission. request: the options of the job. script: its text as it
    was sent, or "".
    """

    files: LocalFiles
    script: str
    request: _Json

    @classmethod
    def of(cls, session: Session, job: JobInfo) -> _Sent:
        entry = session.ledger.find(job.id)
        kept = session.ledger.kept(entry.token) if entry is not None else {}
        facts = _read_json(kept.get(CLIENT_FACTS, b"{}"))
        source = _read_json(kept.get(SOURCE_FILE, b"{}"))
        files = LocalFiles.of(facts, source, entry.program_dir if entry is not None else "")
        return cls(files, files.script_text(source), facts.get("job") or {})


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """What Slurm knows of the ends of jobs beside their states: by the jobs' IDs, their steps, the
    nodes that were lost, and those that could not launch the job, with their unmet needs.

    cancellers: user ID -> name. is_complete: whether Slurm answered all questions.
    """

    steps: Mapping[str, Sequence[StepInfo]] = field(default_factory=dict)
    cancellers: Mapping[str, str] = field(default_factory=dict)
    lost: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    unfit: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    is_complete: bool = False

    @classmethod
    def of(cls, session: Session, jobs: Sequence[JobInfo]) -> SlurmFacts:
        """Ask Slurm about those of the jobs that failed or were cancelled."""
        bad = [job for job in jobs if job.outcome in (Outcome.FAILED, Outcome.CANCELLED)]
        # Slurm does not know the tasks inside a job.
        bad = [job for job in bad if job.task is None or not session.packed_job(job.id)]
        if not bad:
            return cls(is_complete=True)
        with suppress(SchedulerError, TransportError):
            steps = _steps_of(session, bad)
            cancellers = _names_of(session, {canceller_of(own) for own in steps.values()} - {""})
            lost = session.scheduler.lost_nodes(
                [job for job in bad if job.outcome is Outcome.FAILED]
            )
            # slurmd, which runs as root, cancels a job with --no-requeue if the Prolog fails.
            unlaunched = {
                job.id: job.nodes
                for job in bad
                if job.signal == NO_LOG_SIGNAL
                or cancellers.get(canceller_of(steps.get(job.id, ()))) == "root"
            }
            names = [*dict.fromkeys(node for nodes in unlaunched.values() for node in nodes)]
            lacks = session.scheduler.unfit_nodes(names) if names else {}
            unfit = {
                job_id: {node: lacks[node] for node in nodes if node in lacks}
                for job_id, nodes in unlaunched.items()
            }
            return cls(steps, cancellers, lost, unfit, is_complete=True)
        return cls()


@dataclass(frozen=True, slots=True)
class _Around:
    """What is known of jobs of one submission beside their logs."""

    sent: _Sent
    facts: SlurmFacts


def _evidence_of(session: Session, job: JobInfo, logs: _Json, around: _Around) -> Evidence:
    sent = around.sent
    facts = around.facts
    history = attempts_of(logs.get("events") or "")
    steps = tuple(facts.steps.get(job.id, ()))
    unread = logs.get("unread") or ("the job's folder no longer exists" if logs.get("gone") else "")
    return Evidence(
        job=with_recorded_exit(job, history),
        log="\n".join(filter(None, (logs.get("stdout"), logs.get("stderr")))),
        stdout=logs.get("stdout") or "",
        ranks={int(rank): text for rank, text in (logs.get("ranks") or {}).items()},
        ends={int(rank): text for rank, text in (logs.get("ends") or {}).items()},
        tasks_per_node=sent.request.get("tasks_per_node"),
        attempt=history[-1],
        lost=facts.lost.get(job.id, {}),
        unfit=facts.unfit.get(job.id, {}),
        steps=steps,
        cancelled_by=facts.cancellers.get(canceller_of(steps), ""),
        folder=sent.files.remote,
        left_here=sent.files.find,
        packages=sent.files.packages,
        excluded=tuple(sent.request.get("exclude") or ()),
        script=sent.script,
        was_read=not unread,
        unread=unread,
        is_full=bool(logs.get("full")),
        advice=session.site.advice,
    )


def canceller_of(steps: Sequence[StepInfo]) -> str:
    """Return the uid of the user that cancelled a job, or "". The first step is the job itself.

    clusterctl cancels steps of jobs that go on, such as that of telemetry.
    """
    return steps[0].cancelled_by if steps else ""


def _steps_of(session: Session, jobs: Sequence[JobInfo]) -> Mapping[str, Sequence[StepInfo]]:
    """Return the steps of jobs and tasks, by their IDs. The accounting may tell who cancelled a job a
    moment later.
    """
    scheduler = session.scheduler
    for _ in scheduler.clock.polls(_ACCOUNTING_LAG_S, first_s=0.3, longest_s=1.0):
        if asked := [job for job in jobs if _lacks_steps(job)]:
            whole = [*dict.fromkeys(job.whole_id for job in asked)]
            accounted = scheduler.accounted([asked[0].id] if len(asked) == 1 else whole)
            known = [with_accounted(job, accounted) for job in jobs]
            jobs = [replace(job, steps=job.steps or ()) for job in known]
        if not asked or not any(job.steps for job in jobs):
            break
    return {job.id: job.steps or () for job in jobs}


def _lacks_steps(job: JobInfo) -> bool:
    """Return whether the accounting was not asked for a job's steps, or may soon tell who cancelled
    it.
    """
    if job.steps is None:
        return True
    is_new = time.time() - (job.end_time or 0) < _SETTLED_S
    return job.state is JobState.CANCELLED and is_new and not canceller_of(job.steps)


def _names_of(session: Session, uids: Collection[str]) -> dict[str, str]:
    """Return uid -> name of users."""
    names = {}
    for uid in uids:
        name = session.transport.run(["id", "-un", uid], check=False).stdout.strip()
        names[uid] = name or f"uid {uid}"
    return names
