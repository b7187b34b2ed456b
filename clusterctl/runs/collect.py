"""Bring runs home: files, accounting and environment of a job become one folder, whole or not at all."""

from __future__ import annotations

import json
import os
import re
import string
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from clusterctl.errors import (
    ClusterctlError,
    CollectError,
    CommandError,
    Failure,
    NoAnswerError,
    SchedulerError,
)
from clusterctl.runs.fetch import (
    DEFAULT,
    Home,
    Manifest,
    Outputs,
    Selection,
    Source,
    fetch_from,
    sender,
)
from clusterctl.runs.folder import (
    ACCOUNTING,
    GOING_ON,
    files_of,
    link,
    place,
    put_in_place,
    working_folder,
    write_kept,
    write_sums,
)
from clusterctl.scheduler.base import (
    JobInfo,
    JobState,
    comment_of,
    unmanaged_job,
)
from clusterctl.scheduler.session import SHORT_PATIENCE_S, Session, resolve_submissions
from clusterctl.scheduler.session import session as session_of
from clusterctl.state.facts import facts_of, facts_of_spec
from clusterctl.state.ledger import RunRecord, note_runs_folder
from clusterctl.state.submissions import (
    OUTPUTS_FILE,
    RUN_FILE,
    RUNS,
    SOURCE_FILE,
    JobEntry,
    Ledger,
)
from clusterctl.state.workspace import Workspace
from clusterctl.transport.get import Sender
from clusterctl.transport.tree import Progress, titled
from clusterctl.util.disk import reason
from clusterctl.util.process import started

if TYPE_CHECKING:
    from clusterctl.runs.record import Recorder
    from clusterctl.spec.models import ClusterSpec


def collect(
    session: Session,
    ids: Sequence[str] | None = None,
    *,
    out: Path = RUNS,
    discard: Collection[str] = (),
    selection: Selection = DEFAULT,
) -> tuple[RunRecord, ...]:
    """Bring runs home, as ``collecting`` does, and return them all."""
    return tuple(collecting(session, ids, out=out, discard=discard, selection=selection))


def collecting(
    session: Session,
    ids: Sequence[str] | None = None,
    *,
    out: Path = RUNS,
    discard: Collection[str] = (),
    selection: Selection = DEFAULT,
    progress: Progress = lambda *_: None,
) -> Iterator[RunRecord]:
    """Bring the runs of these jobs home; by default all that were submitted from here and are not home yet,
    but for those of the jobs to ``discard``. Each is given once it is here. What the ``selection`` leaves on
    the cluster, the record names.

    A run that is home is left as it is, unless it is a snapshot: a job that still goes on is collected as it
    stands, and anew later; or unless the selection asks for more than the default, and something of it was
    left on the cluster. A task of an array stands for the whole array.

    Raises:
        UsageError: an id is not one.
        CollectError: some could not be brought home (``failures`` has one entry each); the others were.
        SchedulerError: one of them is unknown, or the scheduler does not answer.
        TransportError: the cluster can't be reached.
    """
    entries = _chosen(session, ids, discard, selection)
    home = 0
    failed: dict[str, CollectError | SchedulerError | CommandError] = {}
    with closing(_Collecting(session, out, selection)) as under_way:
        under_way.ask([entry.job_id for entry in entries if entry.job_id])
        for number, entry in enumerate(entries, 1):
            which = f"job {entry.job_id}" + (f" ({number} of {len(entries)})" if len(entries) > 1 else "")
            under_way.progress = titled(which, progress)
            try:
                run = under_way.one(entry)
            except (CollectError, SchedulerError, CommandError) as exc:
                if isinstance(exc, SchedulerError) and exc.retryable:
                    raise  # no answer, which no other job will get
                failed[entry.job_id or ""] = exc
                continue
            from clusterctl.runs.report import write_beside  # noqa: PLC0415 - only where a run has come home

            write_beside(run)
            home += 1
            yield run
    if failed:
        raise _not_home(failed, home)


def _chosen(
    session: Session, ids: Sequence[str] | None, discard: Collection[str], selection: Selection
) -> list[JobEntry]:
    resolve_submissions(session.scheduler, session.ledger)
    if ids:
        return list(dict.fromkeys(_entry(session, job_id) for job_id in ids))
    there = (e for e in session.ledger.entries() if _is_out(e) or _has_left(e, selection))
    return [e for e in there if e.job_id not in discard]


def _not_home(failed: Mapping[str, ClusterctlError], others: int) -> CollectError:
    """The error for these jobs' runs, beside ``others`` that are home."""
    (first, *more) = failed.values()
    if isinstance(first, CollectError) and not more and not others:
        error = first
    else:
        said = {job_id: f"job {job_id}: {exc.cause}" for job_id, exc in failed.items()}
        error = CollectError(
            f"{len(failed)} of {len(failed) + others} runs could not be brought home",
            code="runs-not-collected",
            why="; ".join(said.values()),
            fix="collect again; what has arrived is kept",
            failures=tuple(
                Failure(exc.code, said[job_id], fix=exc.fix, retryable=True) for job_id, exc in failed.items()
            ),
        )
    error.jobs = tuple(failed)
    return error


def collect_all(
    spec: ClusterSpec, workspace: Workspace, *, out: Path | None = None, discard: Collection[str] = ()
) -> Iterator[RunRecord]:
    """Collect, as ``collecting`` does, all that is not home, but for the runs of the jobs to ``discard``."""
    facts = facts_of(workspace) if workspace.inventory.exists() else facts_of_spec(spec)
    with session_of(facts, workspace, patience_s=SHORT_PATIENCE_S) as opened:
        yield from collecting(opened, out=out or RUNS, discard=discard)


def uncollected(workspace: Workspace) -> tuple[JobEntry, ...]:
    """The submissions from here whose run is not home, or only as a snapshot."""
    entries = Ledger(workspace.jobs).entries()
    return tuple(e for e in entries if _is_out(e) or (e.job_id is None and not e.refused))


def _is_out(entry: JobEntry) -> bool:
    return entry.job_id is not None and (entry.run_dir is None or entry.run_state in GOING_ON)


def _has_left(entry: JobEntry, selection: Selection) -> bool:
    """Whether the run is home, but more of it is asked for; if it is gone here, that is all of it."""
    if not selection.asks_more or entry.run_dir is None:
        return False
    try:
        return any(one.only_there for one in RunRecord.load(Path(entry.run_dir)).skipped)
    except CollectError:
        return selection.everything


def _entry(session: Session, job_id: str) -> JobEntry:
    session.scheduler.check_id(job_id)
    entry = session.ledger.find(job_id)
    if entry is not None:
        return entry
    jobs = session.scheduler.jobs([job_id.partition("_")[0]])
    if not jobs:
        raise session.scheduler.unknown([job_id])
    # Every user may give a job the comment of another one, which would take its place in the ledger.
    known = {entry.token for entry in session.ledger.entries()}
    token = jobs[0].token
    if token in ("", *known) or jobs[0].user != session.facts.job_user:
        raise unmanaged_job(jobs[0])
    entry = JobEntry(
        token=token,
        name=re.sub(r"[^A-Za-z0-9._-]", "_", jobs[0].name)[:64],
        user=jobs[0].user,
        submitted_at=float(jobs[0].submit_time or 0),
        job_id=jobs[0].whole_id,
        remote_dir=jobs[0].work_dir,
    )
    return session.ledger.add(entry)  # submitted from elsewhere; from now on it is known here too


class _Collecting:
    """Brings runs home, one after the other."""

    def __init__(self, session: Session, out: Path, selection: Selection) -> None:
        self.session, self.out, self.selection = session, out.absolute(), selection
        self.progress: Progress = lambda *_: None
        self.jobs: dict[str, list[JobInfo]] = {}
        self.senders: dict[str, Sender] = {}  # by host

    def close(self) -> None:
        for one in self.senders.values():
            one.close()

    def ask(self, ids: Sequence[str]) -> None:
        """Ask for all these jobs with one question; a SchedulerError where there is no answer."""
        try:
            for one in self.session.scheduler.jobs(ids):
                self.jobs.setdefault(one.whole_id, []).append(one)
        except SchedulerError as exc:
            if exc.retryable:
                raise
            # Refused: each is asked for again by itself.

    def one(self, entry: JobEntry) -> RunRecord:
        """Bring one run home, or find that it is there."""
        if entry.run_dir is not None and entry.run_state not in GOING_ON:
            with suppress(CollectError):  # moved or removed by the user, who asks for it again
                run = RunRecord.load(Path(entry.run_dir))
                if not _has_left(entry, self.selection):
                    return run
                return self.more(entry, run)
        job_id = entry.job_id or ""
        final = place(self.out, f"{self.session.facts.cluster}-{job_id}-{entry.name}", entry.token)
        jobs = self.jobs.get(job_id) or self.session.scheduler.jobs([job_id]) or (_purged(entry),)
        with self.writing(job_id, final), working_folder(final) as work:
            hosts = tuple(dict.fromkeys(node for job in jobs for node in job.nodes))
            recorder = started(partial(_recorder, self.session, entry, jobs))
            manifest = self.fetched(entry, hosts, work, still_changing=not all(job.ended for job in jobs))
            record = recorder().write(work / "tree", manifest)
            put_in_place(work, final)
        self.session.ledger.update(entry, run_dir=str(final), run_state=record.state, state=record.state)
        note_runs_folder(self.out)
        return record.model_copy(update={"directory": final})

    def more(self, entry: JobEntry, run: RunRecord) -> RunRecord:
        """Bring home what was left of a run on the cluster; what is at home stays as it is."""
        final = run.directory
        with self.writing(run.job_id, final), working_folder(final) as work:
            tree, home = work / "tree", files_of(final)
            manifest = self.fetched(entry, run.nodes, work, home)
            write_kept(tree, self.session.ledger.kept(entry.token))
            new = [
                size
                for name, size in manifest.files.items()
                if name not in home and (tree / os.fsdecode(name)).is_file()
            ]
            record = run.model_copy(
                update={
                    "files": run.files + len(new),
                    "bytes": run.bytes + sum(new),
                    "skipped": (*manifest.skipped, *(one for one in run.skipped if one.path == ACCOUNTING)),
                    "collected_at": time.time(),
                }
            )
            sums = {name: sha256 for name, (_, sha256) in home.items()} | {**manifest.sha256}
            link(final, [name for name, (_, sha256) in home.items() if sums[name] == sha256], tree)
            (tree / RUN_FILE).unlink(missing_ok=True)  # the link: the run's own stays until it is replaced
            (tree / RUN_FILE).write_text(record.as_json())
            write_sums(tree, {name: sha256 for name, sha256 in sums.items() if name != RUN_FILE.encode()})
            put_in_place(work, final)
        return record

    def fetched(
        self,
        entry: JobEntry,
        nodes: Sequence[str],
        work: Path,
        home: Home = MappingProxyType({}),
        *,
        still_changing: bool = False,
    ) -> Manifest:
        """Bring the job's files into ``work/tree``; that they can't be read concerns this job alone."""
        job_id = entry.job_id or ""
        if entry.remote_dir is None:
            raise CollectError(f"it is not known where job {job_id} has its files", code="job-folder-unknown")
        outputs = _outputs(self.session.ledger.kept(entry.token))
        source = Source(
            entry.remote_dir, job_id, still_changing, self.selection, outputs, home, self.progress
        )
        hosts = self.session.hosts_with_files(nodes)
        for host, transport in hosts:
            self.senders.setdefault(host, sender(transport))
        try:
            return fetch_from([(host, self.senders[host]) for host, _ in hosts], source, work)
        except (NoAnswerError, CommandError) as exc:
            raise CollectError(
                f"the files of job {job_id} can't be read",
                code="job-files-unreadable",
                where=f"{entry.remote_dir} on the cluster",
                why=exc.cause,
                fix="look at the folder with `clusterctl ssh`, then collect again; what has arrived is kept",
            ) from exc

    @contextmanager
    def writing(self, job_id: str, final: Path) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise CollectError(
                f"the run of job {job_id} can't be written",
                code="run-unwritable",
                where=str(final),
                why=reason(exc, final),
                fix="make room and rights there, or name another folder with --out",
            ) from exc


def _recorder(session: Session, entry: JobEntry, jobs: Sequence[JobInfo]) -> Recorder:
    from clusterctl.runs.record import Recorder  # noqa: PLC0415 - 0.1 s that pass while files come

    return Recorder.of(session, entry, jobs)


def _outputs(kept: Mapping[str, bytes]) -> Outputs | None:
    """The outputs that a job was submitted with; None of a job without, or submitted from elsewhere."""
    if OUTPUTS_FILE not in kept:
        return None
    source = json.loads(kept[SOURCE_FILE]) if SOURCE_FILE in kept else {"files": [], "links": []}
    sent = [os.fsencode(one["path"]) for one in (*source["files"], *source["links"])]
    return Outputs(json.loads(kept[OUTPUTS_FILE])["patterns"], sent)


def _purged(entry: JobEntry) -> JobInfo:
    """A job that the scheduler has no record of any more; its files may be there all the same."""
    number = (entry.job_id or "").lstrip(string.ascii_letters)
    return JobInfo(
        number=int(number),
        name=entry.name,
        user=entry.user,
        state=JobState.PURGED,
        reason="there is no record of the job any more",
        submit_time=int(entry.submitted_at),
        work_dir=entry.remote_dir or "",
        comment=comment_of(entry.token),
        prefix=(entry.job_id or "").removesuffix(number),
    )
