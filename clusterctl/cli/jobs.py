"""The commands status and jobs, which show the state of nodes and jobs, or a single job in full."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from datetime import datetime
from itertools import groupby
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

from clusterctl.cli.all_clusters import all_clusters, are_all, ask_all
from clusterctl.cli.options import Words, argument, job_ids, option
from clusterctl.cli.output import Screen
from clusterctl.cluster.status import Status, status_of
from clusterctl.errors import Notice, TransportError
from clusterctl.jobs.events import restarts_of_job
from clusterctl.jobs.kept_files import summary
from clusterctl.jobs.queue import JobList, find_or_list, packed_task
from clusterctl.jobs.watch import failures_of, first_of, judge
from clusterctl.scheduler.base import (
    GOING_ON,
    JobInfo,
    JobState,
    NodeInfo,
    elapsed_of,
    state_counts,
    worst_job,
)
from clusterctl.scheduler.ends.diagnosis import Diagnosis, cause_column, lines_of_tasks, notices_of
from clusterctl.scheduler.ends.ending import Ending, summary_of
from clusterctl.scheduler.session import SHOWN_PATIENCE_S, Session, open_session
from clusterctl.scheduler.slurm.availability import kept_out, out_text
from clusterctl.scheduler.slurm.parse import PartitionInfo
from clusterctl.scheduler.slurm.values import fold_nodes
from clusterctl.state.ledger import SWEEP_FILE
from clusterctl.state.run_names import cluster_of_jobs
from clusterctl.util import formatting
from clusterctl.util.formatting import Fact
from clusterctl.util.numbers import counted

if TYPE_CHECKING:
    from clusterctl.providers.base import PendingRelease
    from clusterctl.state.ledger import JobEntry

_NONE: Final = "-"
# Reasons are shown for at most this many pending jobs. JSON has the reasons of all pending jobs.
_MOST_WAITING: Final = 10
# The number of ended jobs in the list, in addition to active jobs.
_RECENT: Final = 20
_MOST_FILES: Final = 100
# Of more nodes, those that are alike share a line.
_MOST_NODES: Final = 16
# It has the messages of clusterctl's own telemetry.
_TELEMETRY_LOG: Final = "telemetry.log"
# The logs in the folder itself come before the many files that a program may have.
_LIST: Final = (
    'cd -- "$1" && for depth in "-maxdepth 1" "-mindepth 2 -maxdepth 3"; do '
    f'find . $depth -type f -printf "%s %P\\0"; done | head -z -n {_MOST_FILES}'
)


def status(screen: Screen) -> None:
    """Show the state of nodes and jobs. With `--cluster all`, those of all your clusters."""
    if are_all(screen, ()):
        _status_of_all(screen)
        return
    workspace = screen.chosen().workspace()
    cluster_status = status_of(workspace)
    waits: list[Diagnosis] = []
    if any(job.state is JobState.PENDING for job in cluster_status.jobs):
        from clusterctl.scheduler.ends.diagnose import diagnose_waiting

        waits = [
            *diagnose_waiting(
                cluster_status.jobs,
                advice=cluster_status.advice,
                nodes=cluster_status.nodes,
                required=cluster_status.required_nodes,
            )
        ]
    releases: tuple[PendingRelease, ...] = ()
    if workspace.releases.exists():
        from clusterctl.providers.base import pending_releases

        releases = pending_releases(workspace)
    answer = {
        **_answer_of(cluster_status),
        "waiting": [diagnosis.as_dict() for diagnosis in waits],
        "pending_releases": [release.as_dict() for release in releases],
    }
    lines = [] if screen.json else _lines(screen, cluster_status, waits, releases)
    screen.result(answer, *lines)


def _answer_of(cluster_status: Status) -> dict[str, Any]:
    return {
        "cluster": cluster_status.cluster,
        "provider": cluster_status.provider,
        "ready": cluster_status.ready,
        "nodes": _node_dicts(cluster_status.nodes),
        "partitions": [asdict(partition) for partition in cluster_status.partitions],
        "out_of_service": _node_dicts(cluster_status.out_of_service),
        "jobs": [job.as_dict() for job in cluster_status.jobs],
        "counts": counts_of(cluster_status.jobs),
        "accounting_failure": cluster_status.accounting_failure,
        "controller_lacks": [asdict(lack) for lack in cluster_status.controller_lacks],
        "trial": cluster_status.trial and asdict(cluster_status.trial),
        "auto_down": cluster_status.auto_down,
        "kept": {name: asdict(kept) for name, kept in cluster_status.kept.items()},
    }


def _node_dicts(nodes: Sequence[NodeInfo]) -> list[dict[str, Any]]:
    keys = ("name", "cpus", "memory_mib", "reason")
    return [{key: getattr(node, key) for key in keys} | {"state": node.shown} for node in nodes]


def counts_of(jobs: Iterable[JobInfo]) -> dict[str, int]:
    """Return state -> number of jobs in it, where each listed task of an array counts."""
    return dict(Counter(job.state.value for job in jobs))


def _status_of_all(screen: Screen) -> None:
    """Show a line for each cluster, and the pending and running jobs of all."""
    clusters = all_clusters(screen)
    answers = ask_all([*clusters], lambda name: status_of(clusters[name].workspace()))
    answers.note_errors(screen)
    found = [*answers.found.values()]
    if screen.json:
        listed = [_answer_of(each) for each in found]
        screen.result({"clusters": listed, "unanswered": answers.unanswered()})
        return
    head = ["CLUSTER", "PROVIDER", "STATE", "NODES", "USABLE", "IDLE", "RUNNING", "PENDING"]
    lines = screen.table(head, [_cluster_row(each) for each in found])
    jobs_of = {each.cluster: each.jobs for each in found if each.jobs}
    screen.result({}, *lines, *(["", *job_table_of_all(screen, jobs_of)] if jobs_of else []))


def _cluster_row(each: Status) -> list[object]:
    nodes = len(each.nodes)
    usable: int | None = sum(node.usable for node in each.nodes)
    idle: int | None = sum(node.usable and node.state == "IDLE" for node in each.nodes)
    if each.partitions:
        # Partitions may share nodes, so their numbers can't be added.
        largest = max(each.partitions, key=lambda partition: partition.nodes)
        nodes = largest.nodes
        usable = largest.in_service
        idle = largest.idle
    states = [job.state for job in each.jobs]
    return [
        each.cluster,
        each.provider,
        "ready" if each.ready else "NOT ready",
        nodes,
        "unknown" if usable is None else usable,
        "unknown" if idle is None else idle,
        states.count(JobState.RUNNING),
        states.count(JobState.PENDING),
    ]


def _lines(
    screen: Screen,
    cluster_status: Status,
    waits: Sequence[Diagnosis],
    releases: Sequence[PendingRelease],
) -> list[str]:
    lines = [
        f"cluster {cluster_status.cluster} ({cluster_status.provider}): "
        f"{'ready' if cluster_status.ready else 'NOT ready'}"
        f"{out_text(kept_out(cluster_status.nodes))}",
        "",
    ]
    head = ["NODE", "STATE", "CPUS", "MEMORY", "REASON"]
    if not cluster_status.partitions:
        lines += screen.table(head, node_rows(cluster_status.nodes))
    else:
        lines += partition_table(screen, cluster_status.partitions)
        if out := node_rows(cluster_status.out_of_service):
            lines += ["", *screen.table(head, out)]
    if cluster_status.jobs:
        lines += ["", *job_table(screen, cluster_status.jobs, users=True)]
        lines += ["", *_reasons(waits)[:_MOST_WAITING]] if waits else []
    if reason := cluster_status.accounting_failure:
        text = (
            "Slurm's accounting (slurmdbd) does not answer, but jobs run: "
            f"{cluster_status.advice.repair}"
        )
        lines += ["", Notice("no-accounting", text), f"  {reason.splitlines()[-1]}"]
    for lack in cluster_status.controller_lacks:
        lines += ["", Notice(lack.code, f"the controller: {lack.why}"), f"  {lack.fix}"]
    if trial := cluster_status.trial:
        lines += ["", f"last trial: {trial}"]
    if auto_down := cluster_status.auto_down:
        state = (
            ""
            if auto_down["armed"]
            else ", but its timer is stopped; start it with `clusterctl up`"
        )
        lines += [
            "",
            f"the cluster shuts itself down after {auto_down['after']} without jobs{state}",
        ]
    for release in releases:
        lines += ["", str(release), f"  {release.fix}"]
    if kept := summary(cluster_status.kept):
        lines += ["", f"kept for later jobs: {kept}"]
    return lines


def node_rows(nodes: Sequence[NodeInfo]) -> list[list[str]]:
    """Return a row for each node. Of many nodes, those that are alike share a row, and those that
    can't be used come first.
    """
    listed = [*nodes]
    if len(nodes) > _MOST_NODES:
        listed.sort(key=lambda node: node.usable)
    names: dict[tuple[str, ...], list[str]] = {}
    for node in listed:
        own = node.name if len(nodes) <= _MOST_NODES else ""
        memory = formatting.size(node.memory_mib << 20)
        key = (own, node.shown, str(node.cpus), memory, node.reason)
        names.setdefault(key, []).append(node.name)
    return [[fold_nodes(same), *cells] for (_, *cells), same in names.items()]


def _reasons(waits: Sequence[Diagnosis]) -> list[str]:
    """Return a line for each waiting job, and one for all tasks of an array that wait for the same
    reason.
    """
    tasks: dict[tuple[str, str], list[Diagnosis]] = {}
    for wait in waits:
        tasks.setdefault((wait.job_id.partition("_")[0], wait.cause), []).append(wait)
    return [
        summary_of(
            array_id if len(waiting) > 1 else waiting[0].job_id,
            waiting[0].name,
            waiting[0].state,
            cause,
        )
        for (array_id, cause), waiting in tasks.items()
    ]


def partition_table(screen: Screen, partitions: Sequence[PartitionInfo]) -> list[str]:
    head = ["PARTITION", "STATE", "LIMIT", "NODES", "IDLE", "ALLOCATED", "OTHER"]
    rows = [
        (
            f"{p.name}{' (default)' if p.is_default else ''}",
            "up" if p.is_up else "down",
            p.max_time,
            p.nodes,
            *("unknown" if count is None else count for count in (p.idle, p.allocated, p.other)),
        )
        for p in partitions
    ]
    return screen.table(head, rows)


def jobs(
    screen: Screen,
    ids: Annotated[
        Words,
        argument(
            "Show only these jobs; a single job is shown in full.", metavar="[ID...]", tab=job_ids
        ),
    ] = None,
    everything: Annotated[
        bool,
        option(
            f"List all jobs, not just the last {_RECENT} and those still active, and all tasks "
            "of an array.",
            "--all",
        ),
    ] = False,
) -> None:
    """List your jobs, newest first, or show a single job in full.

    Lists pending and running jobs, and jobs submitted from this machine; an array has a single
    line. With a single ID: also the job's resources, its folder and files on the cluster, the folder
    of its collected run, and of a failure the facts and hints. With `--cluster all`: the jobs of all
    your clusters.
    """
    ids = ids or []
    most = None if everything else _RECENT
    if are_all(screen, ids):
        _list_all(screen, most)
        return
    chosen = cluster_of_jobs(ids, screen.chosen())
    with open_session(chosen, patience_s=SHOWN_PATIENCE_S) as session:
        if len(ids) == 1 and (inside := packed_task(session, ids[0])):
            _show_in_full(screen, session, inside, most)
            return
        listing = find_or_list(session, ids, most)
        if ids and len({job.whole_id for job in listing.jobs}) == 1:
            _show_in_full(screen, session, listing.jobs, most)
            return
    answer = {
        "jobs": [job.as_dict() for job in listing.jobs],
        "counts": counts_of(listing.jobs),
        "older": listing.older,
        "unlisted": listing.unlisted,
    }
    screen.result(answer, *job_table(screen, listing.jobs))
    if older := listing.older:
        screen.note(
            Notice(
                "older-jobs",
                f"{counted(older, 'older job')} not shown: `clusterctl jobs --all` shows all",
            )
        )
    if listing.unlisted:
        screen.note(listing.unlisted_notice)


def _list_all(screen: Screen, most: int | None) -> None:
    """List the jobs of all clusters, newest first."""
    clusters = all_clusters(screen)

    def ask(name: str) -> JobList:
        with open_session(clusters[name], patience_s=SHOWN_PATIENCE_S) as session:
            return find_or_list(session, [], most)

    answers = ask_all([*clusters], ask)
    answers.note_errors(screen)
    jobs_of = {name: listing.jobs for name, listing in answers.found.items()}
    older = sum(listing.older for listing in answers.found.values())
    answer = {
        "jobs": [
            {"cluster": name, **job.as_dict()} for name, listed in jobs_of.items() for job in listed
        ],
        "counts": counts_of(job for listed in jobs_of.values() for job in listed),
        "older": older,
        "unlisted": sum(listing.unlisted for listing in answers.found.values()),
        "unanswered": answers.unanswered(),
    }
    screen.result(answer, *job_table_of_all(screen, jobs_of))
    if older:
        command = "`clusterctl jobs --all --cluster all`"
        text = f"{counted(older, 'older job')} not shown: {command} shows all"
        screen.note(Notice("older-jobs", text))
    for listing in answers.found.values():
        if listing.unlisted:
            screen.note(listing.unlisted_notice)


def _show_in_full(
    screen: Screen, session: Session, tasks: Sequence[JobInfo], most: int | None
) -> None:
    """Show a job or array. most: the longest array of which each task has a line. None: any."""
    # All tasks of an array share a folder.
    job = tasks[0]
    entry = session.ledger.find(job.whole_id)
    # Usually nobody can read the files of another user's job.
    is_own = job.token and job.user == session.inventory.job_user
    script = f"{job.work_dir}/{session.scheduler.script_name}" if is_own else None
    files = _files(session, job) if is_own else []
    run_dir = entry.run_dir if entry is not None else None
    # Unlike Path.is_dir, this never raises.
    is_here = run_dir is not None and os.path.isdir(run_dir)
    inside: Sequence[JobInfo] = ()
    if len(tasks) == 1 and job.task is None and entry is not None:
        from clusterctl.scheduler.ends.judge import tasks_inside

        inside = tasks_inside(session, job)
    found = judge(session, [*tasks, *inside])
    diagnosis = first_of(tasks, found)
    options = _options(session, entry)
    # A job that the queue has forgotten may have been restarted.
    restarts = restarts_of_job(session, job) if len(tasks) == 1 and job.restarts != 0 else ()
    told = [restart.as_dict() for restart in restarts]
    more = {
        "script": script,
        "files": files,
        "run_dir": run_dir,
        "restarts": told,
    }
    ending = Ending.of(tasks, diagnosis)
    facts = [*ending.facts, *_facts_of_live(job)] if len(tasks) == 1 else []
    facts.append(Fact("folder", job.work_dir))
    if script:
        facts += [
            Fact("script", script),
            Fact("files", _shown_files(files)),
            Fact("collected", _collected(entry, job, is_here=is_here)),
        ]
    rows = tasks if len(tasks) > 1 else inside
    lines = [*_task_table(screen, rows, most, found, options), ""] if rows else []
    lines += [f"{fact.label:<10} {fact.text}" for fact in facts if fact.is_known]
    lines += ["", *map(str, restarts)] if restarts else []
    if ending.cause:
        lines += ["", ending.summary, *ending.details(), f"fix: {ending.fix}"]
    lines += notices_of(found.values())
    shown = [_with_end(task, found, options) for task in tasks]
    # All tasks of an array share a folder, so only the first has the list of its files.
    answer = {"jobs": [{**shown[0], **more}, *shown[1:]]}
    if inside:
        answer["packed"] = [_with_end(task, found, options) for task in inside]
    screen.result(answer, *lines)


def _with_end(
    job: JobInfo, found: Mapping[str, Diagnosis], options: Sequence[Mapping[str, str]]
) -> dict[str, Any]:
    """Return a job or task in its JSON form, with its options of a sweep and how it ended."""
    own = found.get(job.id)
    shown = {**job.as_dict(), "diagnosis": own and own.as_dict()}
    return {**shown, "options": _of_task(job, options)} if options else shown


def _options(session: Session, entry: JobEntry | None) -> Sequence[Mapping[str, str]]:
    """Return the options of each task of a sweep; [] for another job."""
    if entry is None:
        return []
    with suppress(ValueError):
        return [*json.loads(session.ledger.kept_file(entry.token, SWEEP_FILE))["tasks"]]
    return []


def _of_task(job: JobInfo, options: Sequence[Mapping[str, str]]) -> Mapping[str, str]:
    return options[job.task] if job.task is not None and job.task < len(options) else {}


def _collected(entry: JobEntry | None, job: JobInfo, *, is_here: bool) -> str:
    """Return where the job's run is, and whether it must be collected. is_here: the run exists."""
    if entry is None or entry.run_dir is None:
        state = "not yet"
    elif not is_here:
        state = "no longer on disk"
    elif entry.run_state in GOING_ON and job.ended:
        state = f"{entry.run_dir}, but only until the job was {entry.run_state}"
    else:
        return entry.run_dir
    return f"{state}; run `clusterctl collect {job.whole_id}`"


def _task_table(
    screen: Screen,
    tasks: Sequence[JobInfo],
    most: int | None,
    found: Mapping[str, Diagnosis],
    options: Sequence[Mapping[str, str]],
) -> list[str]:
    """Return a line for each task or, of a long array, a line for the array and its tasks by cause or
    state.
    """
    if screen.json:
        return []
    if most is None or len(tasks) <= most:
        causes = cause_column(found[task.id] for task in tasks if task.id in found)
        texts = [
            " ".join(f"{key}={value}" for key, value in _of_task(task, options).items())
            for task in tasks
        ]
        more = {"OPTIONS": texts, "CAUSE": [causes.get(task.id, "") for task in tasks]}
        return _table_of(screen, [[task] for task in tasks], users=False, more=more)
    states = {
        task.id: task.state.value
        for task in tasks
        if task.state is not JobState.COMPLETED and task.id not in found
    }
    lines = lines_of_tasks(states, failures_of(tasks, found))
    text = f"`clusterctl jobs {tasks[0].whole_id} --all` shows a line for each task"
    return [*job_table(screen, tasks), "", *lines, Notice("many-tasks", text)]


def _facts_of_live(job: JobInfo) -> list[Fact]:
    return [
        Fact("qos", job.qos),
        Fact("resources", job.tres),
        Fact("limit", job.time_limit_s, "duration"),
        Fact("hang", str(job.hang or "")),
        Fact("alarms", ", ".join(map(str, job.alarms))),
    ]


def _files(session: Session, job: JobInfo) -> list[dict[str, Any]] | None:
    """Return a dict (path, bytes, host) per file in a job's folder, 3 levels deep; ``None``: an
    error.
    """
    files: list[dict[str, Any]] = []
    try:
        for host, transport in session.hosts_with_files(job.nodes):
            listing = transport.run(["sh", "-c", _LIST, "sh", job.work_dir], check=False).stdout
            for size, _, path in (line.partition(" ") for line in listing.split("\0")[:-1]):
                files.append({"path": path, "bytes": int(size), "host": host})
    except (TransportError, ValueError):
        # The state of the job can be shown without the files.
        return None
    return sorted(files, key=lambda file: (file["path"], file["host"]))


def _shown_files(files: Sequence[dict[str, Any]] | None) -> str:
    # An import that only a single job in full needs.

    if files is None:
        return "can't be listed now"
    several = len({file["host"] for file in files}) > 1
    logs = [
        f"{file['path']}{' of ' + file['host'] if several else ''} ({formatting.size(file['bytes'])})"
        for file in files
        if file["path"].endswith(".log") and (file["bytes"] or file["path"] != _TELEMETRY_LOG)
    ]
    other_count = len(files) - len(logs)
    shown = [*logs, *([f"{other_count} more"] if other_count else [])]
    return ", ".join(shown) or Notice(
        "job-folder-empty", "the job's folder is empty or was deleted"
    )


def job_table(screen: Screen, infos: Sequence[JobInfo], *, users: bool = False) -> list[str]:
    """Return the lines of the table that `jobs` and `status` show, with a line for each array. Empty if
    the user asked for JSON.

    users: whether to add a column with the user of each job.
    """
    if screen.json:
        return []
    groups = [list(group) for _, group in groupby(infos, key=lambda job: job.whole_id)]
    return _table_of(screen, groups, users=users)


def job_table_of_all(screen: Screen, jobs_of: Mapping[str, Sequence[JobInfo]]) -> list[str]:
    """Return the lines of a table of the jobs of several clusters, newest first, whose IDs name the
    cluster. jobs_of: cluster -> its jobs.
    """
    if screen.json:
        return []
    groups = [
        [replace(job, prefix=f"{name}/{job.prefix}") for job in group]
        for name, jobs in jobs_of.items()
        for _, group in groupby(jobs, key=lambda job: job.whole_id)
    ]
    groups.sort(key=lambda group: -(worst_job(group).submit_time or 0))
    return _table_of(screen, groups, users=True)


def _table_of(
    screen: Screen,
    groups: Sequence[Sequence[JobInfo]],
    *,
    users: bool,
    more: Mapping[str, list[str]] = MappingProxyType({}),
) -> list[str]:
    """Return the lines of a table with a line for each group: a job, or the tasks of an array. more:
    head -> cells of further columns.
    """
    if not groups:
        return ["no jobs"]
    columns = {head: [cell(group) for group in groups] for head, cell in COLUMNS.items()}
    if not users:
        del columns["USER"]
    columns = {**columns, **more}
    for head in ("REASON", *more):
        if not any(columns[head]):
            del columns[head]
    rows = list(zip(*columns.values(), strict=True))
    hangs = [f"job {job.id} hangs: {job.hang}" for group in groups for job in group if job.hang]
    alarms = [f"job {job.id}: {alarm}" for group in groups for job in group for alarm in job.alarms]
    below = [*hangs, *alarms]
    return [*screen.table([*columns], rows), *(["", *below] if below else [])]


def _job_id(jobs: Sequence[JobInfo]) -> str:
    return f"{jobs[0].whole_id} ({len(jobs)} tasks)" if len(jobs) > 1 else jobs[0].id


def _state(jobs: Sequence[JobInfo]) -> str:
    return state_counts(jobs) if len(jobs) > 1 else jobs[0].state.value


def _nodes(jobs: Sequence[JobInfo]) -> str:
    return fold_nodes(list(dict.fromkeys(node for job in jobs for node in job.nodes)))


def _reason(jobs: Sequence[JobInfo]) -> str:
    """Return why the jobs wait."""
    job = worst_job(jobs)
    return "" if job.ended else job.reason


# Head of a column of the table of jobs -> its cell for a job, or for the tasks of an array, which
# share a line.
COLUMNS: Final[Mapping[str, Callable[[Sequence[JobInfo]], str]]] = {
    "JOB": _job_id,
    "NAME": lambda jobs: worst_job(jobs).name,
    "USER": lambda jobs: worst_job(jobs).user,
    "STATE": _state,
    "NODES": _nodes,
    "SUBMITTED": lambda jobs: _short_time(worst_job(jobs).submit_time),
    "ELAPSED": lambda jobs: formatting.duration(elapsed_of(jobs)),
    "EXIT": lambda jobs: worst_job(jobs).exit or _NONE,
    "REASON": _reason,
}


def _short_time(at: int | None) -> str:
    """Format a time of this year as ``11-27 22:13``, and another time as its date."""
    text = formatting.moment(at)
    year = f"{datetime.now().astimezone():%Y}-"
    return text.removeprefix(year)[:-3] if text.startswith(year) else text.partition(" ")[0]
