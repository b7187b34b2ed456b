"""Collect runs: copy a job's files, accounting and environment to a local folder, all or
nothing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import string
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypedDict, Unpack

from clusterctl.errors import (
    ClusterctlError,
    CollectError,
    CommandError,
    Failure,
    NoAnswerError,
    SchedulerError,
    UsageError,
)
from clusterctl.runs.fetch import (
    ALL,
    CHECKPOINTS,
    DEFAULT,
    MAX_CHECKPOINT,
    MAX_FILE,
    CollectedFiles,
    Outputs,
    RunManifest,
    RunSource,
    Selection,
    fetch_from_hosts,
    sender,
    shown_path,
)
from clusterctl.runs.folder import (
    ACCOUNTING,
    choose_run_folder,
    collected_files,
    damaged_files,
    install_tree,
    link,
    working_folder,
    write_kept,
    write_sums,
)
from clusterctl.runs.known_to_slurm import AskedJobs
from clusterctl.scheduler.base import (
    JobInfo,
    JobState,
    comment_of,
    has_final_run,
    unknown_or_task,
    unmanaged_job_error,
)
from clusterctl.scheduler.claims import settle
from clusterctl.scheduler.request.job_secrets import remove_old_secrets
from clusterctl.scheduler.session import SHORT_PATIENCE_S, Session, resolve_submissions
from clusterctl.scheduler.session import connect_session as session_of
from clusterctl.scheduler.slurm.records import final_states
from clusterctl.spec.names import first_few
from clusterctl.spec.remote_folders import JOBS
from clusterctl.spec.units import parse_size_mib
from clusterctl.state.inventory import job_inventory, planned_inventory
from clusterctl.state.ledger import (
    CLIENT_FACTS,
    ENVIRONMENT_FILE,
    OUTPUTS_FILE,
    PROGRAM_FOLDER,
    RUN_FILE,
    RUNS,
    SOURCE_FILE,
    SUMS_FILE,
    TABLE_FILE,
    JobEntry,
    Ledger,
    is_of_project,
    is_run,
    note_runs_folder,
    runs_folder_of,
)
from clusterctl.state.run_names import job_id_of
from clusterctl.state.run_record import RunRecord
from clusterctl.state.workspace import WAIT_S, Workspace
from clusterctl.transport.copies import clock_of
from clusterctl.transport.get import RemoteSender
from clusterctl.transport.tree import Progress, with_title
from clusterctl.util.disk import write_error_fix, write_error_reason
from clusterctl.util.numbers import counted
from clusterctl.util.process import start_in_thread

if TYPE_CHECKING:
    from clusterctl.runs.known_to_slurm import KnownToSlurm
    from clusterctl.runs.record import Recorder
    from clusterctl.spec.models import ClusterSpec


_PAUSE_S = 0.5
_CHUNK = 1 << 20  # bytes
# Files that clusterctl writes again itself.
_GENERATED = frozenset(name.encode() for name in (ACCOUNTING, ENVIRONMENT_FILE, SUMS_FILE))


class SelectionKeywords(TypedDict, total=False):
    """The options of `collect` that select files.

    checkpoints: which checkpoints of each run. Default: latest.
    max_checkpoint, max_file: sizes such as 4GiB. Larger files stay on the cluster and are listed.
    everything: copy all files of any size.
    """

    checkpoints: Literal["latest", "all", "none"]
    max_checkpoint: str
    max_file: str
    everything: bool


def selection_of(**options: Unpack[SelectionKeywords]) -> Selection:
    """Return the selection for the options of `collect`.

    Raises:
        UsageError: a value is wrong, or contradicts ``everything``.
    """
    checkpoints = options.get("checkpoints")
    sizes = (options.get("max_checkpoint"), options.get("max_file"))
    if options.get("everything"):
        if any(option is not None for option in (checkpoints, *sizes)):
            raise UsageError(
                "--all copies all files, so it can't be combined with limits",
                code="options-exclusive",
                fix="leave out --all, or leave out --checkpoints, --max-checkpoint and --max-file",
            )
        return ALL
    if checkpoints not in {None, *CHECKPOINTS}:
        raise UsageError(
            f"--checkpoints: {checkpoints!r} is not a valid value",
            about="value-unknown",
            fix=f"use {', '.join(CHECKPOINTS[:-1])} or {CHECKPOINTS[-1]}",
        )
    return Selection(
        checkpoints or "latest",
        _bytes("--max-checkpoint", sizes[0], MAX_CHECKPOINT),
        _bytes("--max-file", sizes[1], MAX_FILE),
    )


def _bytes(flag: str, size: str | None, default: int) -> int:
    try:
        return default if size is None else parse_size_mib(size) << 20
    except ValueError as exc:
        message = f"{flag}: {size!r} is not a valid size"
        raise UsageError(
            message,
            about="value",
            why=str(exc),
            fix=f"for example, {flag} 4GiB",
        ) from exc


def collect(
    session: Session,
    ids: Sequence[str] | None = None,
    *,
    out: Path | None = None,
    everywhere: bool = False,
    discard: Collection[str] = (),
    selection: Selection = DEFAULT,
    listed: bool = True,
) -> tuple[RunRecord, ...]:
    """Collect the runs of jobs. Return the runs' records. For arguments and errors, see
    ``collect_runs``.
    """
    runs = collect_runs(
        session,
        ids,
        out=out,
        everywhere=everywhere,
        discard=discard,
        selection=selection,
        listed=listed,
    )
    return tuple(runs)


def collect_runs(
    session: Session,
    ids: Sequence[str] | None = None,
    *,
    out: Path | None = None,
    everywhere: bool = False,
    discard: Collection[str] = (),
    selection: Selection = DEFAULT,
    listed: bool = True,
    progress: Progress = lambda *_: None,
) -> Iterator[RunRecord]:
    """Collect the runs of jobs. Yield the record of each run once the run's files are on this
    machine.

    A run that was collected before is not copied again, with two exceptions: the copy of a then
    running job is replaced, and files that stayed on the cluster are fetched if ``selection``
    exceeds the default.

    ids: job ids, or names of runs; a task's id selects its whole array. None: the uncollected jobs
        that were submitted from the current folder, or from its project.
    out: the folder for the runs. None: ./runs.
    everywhere: if ``ids`` is None, all uncollected jobs from this machine. Unless ``out`` is given,
        a run of another project gets into the folder `runs` of the job's folder.
    discard: job ids to leave out if ``ids`` is None.
    selection: the files to copy. The record's ``skipped`` lists the files that stay on the cluster.
    listed: whether the runs in the folder are the user's own, which `runs list` and others show.

    Raises:
        UsageError: an id is malformed.
        CollectError: some runs could not be collected and are in ``failures``. All other runs were
            collected.
        SchedulerError: a job is unknown, or the scheduler does not answer.
        TransportError: the cluster can't be reached.
    """
    entries = _entries_of(session, ids, discard, everywhere=everywhere)
    newer = _newer_there(session, entries)
    if ids is None:
        entries = [
            entry
            for entry in entries
            if _is_uncollected(entry) or _needs_more(entry, selection) or entry.token in newer
        ]
    verified = ids is not None
    home = 0
    failed: dict[str, CollectError | SchedulerError | CommandError] = {}
    with closing(
        _Collection(
            session,
            out,
            selection,
            everywhere=everywhere,
            verified=verified,
            listed=listed,
            newer=newer,
        ),
    ) as collection:
        collection.ask([e.job_id for e in entries if e.job_id and not has_final_run(e)])
        for number, entry in enumerate(entries, 1):
            title = f"job {entry.job_id}" + (
                f" ({number} of {len(entries)})" if len(entries) > 1 else ""
            )
            collection.progress = with_title(title, progress)
            try:
                run = collection.collect_run(entry)
            except (CollectError, SchedulerError, CommandError) as exc:
                # A scheduler that does not answer would not answer for the next job either.
                if isinstance(exc, SchedulerError) and exc.retryable:
                    raise
                failed[entry.job_id or ""] = exc
                continue
            from clusterctl.runs.report import write_report_beside  # noqa: PLC0415 - only after a run was collected

            write_report_beside(run)
            home += 1
            yield run
    if failed:
        raise _uncollected_error(failed, home)


def _entries_of(
    session: Session, ids: Sequence[str] | None, discard: Collection[str], *, everywhere: bool
) -> list[JobEntry]:
    """Return the jobs with these ids; or, for None, those that were submitted from this folder's project
    (``everywhere``: from this machine), without those in ``discard``.
    """
    resolve_submissions(session.scheduler, session.ledger)
    remove_old_secrets(session)
    if ids:
        job_ids = [job_id_of(name, session.ledger) for name in ids]
        return list(dict.fromkeys(_find_or_add_entry(session, job_id) for job_id in job_ids))
    here = Path.cwd()
    return [
        entry
        for entry in session.ledger.entries()
        if entry.job_id not in discard and (everywhere or is_of_project(entry.folder, here))
    ]


def _newer_there(session: Session, entries: Iterable[JobEntry]) -> Collection[str]:
    """Return the tokens of those collected jobs whose folder on the cluster has newer files.

    A job may have submitted other jobs, which write into its folder after its end.
    """
    collected = [
        entry
        for entry in entries
        if has_final_run(entry)
        and Path(entry.remote_dir or "").parent.name == JOBS
        and entry.user == session.inventory.job_user
        and os.path.isdir(entry.run_dir or "")
    ]
    if not collected or not session.site.folders.are_one:
        return ()
    # A slow import, which the first `collect` does not need.
    from clusterctl.runs.only_copies import newer_than_runs  # noqa: PLC0415

    return newer_than_runs(session, collected)


def _uncollected_error(failed: Mapping[str, ClusterctlError], collected_count: int) -> CollectError:
    (first, *more) = failed.values()
    folders = {
        os.path.dirname(exc.where) for exc in failed.values() if exc.code == "file-unwritable"
    }
    is_unusable = len(folders) == 1 and not all(
        # Unlike Path.is_dir, this never raises.
        os.path.isdir(path) and os.access(path, os.W_OK | os.X_OK)
        for path in folders
    )
    if isinstance(first, CollectError) and not more and not collected_count:
        error = first
    elif is_unusable and {exc.code for exc in failed.values()} == {"file-unwritable"}:
        error = CollectError(
            f"{counted(len(failed), 'run')} can't be written to this machine's disk",
            code="file-unwritable",
            about="run",
            where=folders.pop(),
            why=first.why,
            fix=first.fix,
        )
    else:
        lines = {job_id: f"job {job_id}: {exc.cause}" for job_id, exc in failed.items()}
        error = CollectError(
            f"{len(failed)} of {len(failed) + collected_count} runs could not be collected",
            about="runs",
            why="; ".join(lines.values()),
            fix="run `clusterctl collect` again; files that have arrived are kept",
            failures=tuple(
                Failure(exc.code, lines[job_id], fix=exc.fix, retryable=True, about=exc.about)
                for job_id, exc in failed.items()
            ),
        )
    error.jobs = tuple(failed)
    return error


def collect_all(
    spec: ClusterSpec,
    workspace: Workspace,
    *,
    out: Path | None = None,
    discard: Collection[str] = (),
) -> Iterator[RunRecord]:
    """Collect all runs that are not on this machine, except those of the job ids in ``discard``."""
    inventory = (
        job_inventory(workspace) if workspace.inventory.exists() else planned_inventory(spec)
    )
    with session_of(inventory, workspace, patience_s=SHORT_PATIENCE_S) as opened:
        yield from collect_runs(opened, out=out, everywhere=True, discard=discard)


def uncollected_elsewhere(session: Session) -> Mapping[str, int]:
    """Return folder -> number of its uncollected jobs, of folders that `collect` without ids leaves
    out.
    """
    here = Path.cwd()
    entries = session.ledger.entries()
    folders = [
        entry.folder for entry in entries if _is_uncollected(entry) and entry.folder is not None
    ]
    return Counter(folder for folder in folders if not is_of_project(folder, here))


def collected_before(ledger: Ledger, runs: Collection[RunRecord]) -> Iterator[RunRecord]:
    """Yield the runs of this folder's project that are on this machine, without ``runs`` and without
    those with a damaged record.
    """
    known = {run.directory for run in runs}
    for entry in ledger.entries():
        folder = Path(entry.run_dir or "")
        is_here = entry.run_dir is not None and is_of_project(entry.folder, Path.cwd())
        if is_here and folder not in known:
            with suppress(CollectError):
                yield RunRecord.load(folder)


def uncollected(workspace: Workspace) -> tuple[JobEntry, ...]:
    """Return the jobs submitted from this machine that were not collected since they ended."""
    entries = Ledger(workspace.jobs).entries()
    return tuple(e for e in entries if _is_uncollected(e) or (e.job_id is None and not e.refused))


def _is_uncollected(entry: JobEntry) -> bool:
    return entry.job_id is not None and not entry.refused and not has_final_run(entry)


def _needs_more(entry: JobEntry, selection: Selection) -> bool:
    """Return whether ``selection`` may include files that an earlier collect left on the
    cluster.
    """
    if not selection.exceeds_default or entry.run_dir is None:
        return False
    try:
        return any(skipped.only_there for skipped in RunRecord.load(Path(entry.run_dir)).skipped)
    except CollectError:
        return selection.everything


def _find_or_add_entry(session: Session, job_id: str) -> JobEntry:
    session.scheduler.check_id(job_id)
    entry = session.ledger.find(job_id)
    if entry is not None:
        return entry
    jobs = session.scheduler.jobs([job_id.partition("_")[0]])
    if not jobs:
        raise session.scheduler.unknown([job_id])
    # Any user can copy another job's comment. A job with a known token would replace the real
    # ledger entry.
    ledger_tokens = {entry.token for entry in session.ledger.entries()}
    token = jobs[0].token
    user = session.inventory.job_user
    if token in ("", *ledger_tokens) or jobs[0].user != user:
        raise unknown_or_task(job_id, jobs, unmanaged_job_error(jobs[0], user))
    entry = JobEntry(
        token=token,
        name=re.sub(r"[^A-Za-z0-9._-]", "_", jobs[0].name)[:64],
        user=jobs[0].user,
        submitted_at=float(jobs[0].submit_time or 0),
        job_id=jobs[0].whole_id,
        remote_dir=jobs[0].work_dir,
        files=_program_folder(session, jobs[0].work_dir),
    )
    # The job was submitted from another machine. The ledger of this machine lists it from now on.
    return session.ledger.add(entry)


def _program_folder(session: Session, folder: str) -> str | None:
    """Return the folder in a job's folder with the program's files, as the job's script names
    it.
    """
    script = f"{folder}/{session.scheduler.script_name}"
    argv = ["sh", "-c", 'grep -qx "$1" <"$2"', "sh", f"files=$PWD/{PROGRAM_FOLDER}", script]
    named = session.transport.run(argv, check=False)
    return PROGRAM_FOLDER if named.rc == 0 else None


class _Collection:
    """Collects the runs of several jobs in turn, over one connection to each host.

    everywhere, listed: see ``collect_runs``. verified: whether files of collected runs are compared with
        SHA256SUMS. newer: the tokens of collected jobs of which the cluster has newer files.
    """

    def __init__(
        self,
        session: Session,
        out: Path | None,
        selection: Selection,
        *,
        everywhere: bool,
        verified: bool,
        listed: bool,
        newer: Collection[str],
    ) -> None:
        self.session = session
        self.out = out
        self.selection = selection
        self.everywhere = everywhere
        self.verified = verified
        self.listed = listed
        self.progress: Progress = lambda *_: None
        self.asked: dict[str, AskedJobs] = {}  # by the ID of a job that was asked for
        self.senders: dict[str, dict[str, RemoteSender]] = {}  # by user and host
        # When the collection began, in nanoseconds by the cluster's clock.
        self.now_ns = clock_of(session.transport)
        self.newer = newer

    def close(self) -> None:
        for senders in self.senders.values():
            for open_sender in senders.values():
                open_sender.close()

    def ask(self, ids: Sequence[str]) -> None:
        """Ask the scheduler about jobs, all together."""
        if not ids:
            return
        try:
            self.asked = dict.fromkeys(ids, AskedJobs.ask(self.session, ids))
        except SchedulerError as exc:
            # If the scheduler rejected the request, each job is asked for separately later.
            if exc.retryable:
                raise

    def asked_of(self, entry: JobEntry) -> AskedJobs:
        job_id = entry.job_id or ""
        if job_id not in self.asked:
            self.asked[job_id] = AskedJobs.ask(self.session, [job_id])
        return self.asked[job_id]

    def jobs_of(self, entry: JobEntry) -> Sequence[JobInfo]:
        asked = self.asked_of(entry)
        if jobs := self.own_jobs(entry, asked.jobs.get(entry.job_id or "", ())):
            return jobs
        purged = _purged(entry)
        if not asked.missing:
            return (purged,)
        # The job has left the queue, so it has ended. A later collect completes the record.
        return (replace(purged, state=JobState.UNKNOWN, reason=asked.missing),)

    def own_jobs(self, entry: JobEntry, jobs: Sequence[JobInfo]) -> Sequence[JobInfo]:
        """Return the jobs of this submission: another job has its id if Slurm's numbers have begun
        again.
        """
        is_superseded = self.session.ledger.is_superseded(entry)
        return [
            job for job in jobs if (job.token == entry.token if job.token else not is_superseded)
        ]

    def collect_run(self, entry: JobEntry) -> RunRecord:
        """Collect the run of a job, or return its record if the run is already on this machine."""
        deadline = time.monotonic() + WAIT_S
        while True:
            try:
                return self._collect_run(entry)
            except CollectError as exc:
                # Another clusterctl holds the lock of the run's folder.
                if exc.code != "in-use" or time.monotonic() > deadline:
                    raise
            self.progress("waiting for another clusterctl that collects it", 0, 0)
            time.sleep(_PAUSE_S)
            # The other process has recorded where the run is.
            entries = self.session.ledger.entries()
            entry = next((other for other in entries if other.token == entry.token), entry)

    def _collect_run(self, entry: JobEntry) -> RunRecord:
        run = None
        if has_final_run(entry):
            with suppress(CollectError):
                run = RunRecord.load(Path(entry.run_dir or ""))
        if run is not None:
            damaged = damaged_files(run.directory) if self.verified else []
            is_newer = entry.token in self.newer
            if damaged or is_newer or _needs_more(entry, self.selection):
                return self.collect_skipped(entry, run, damaged)
            return run
        job_id = entry.job_id or ""
        name = f"{self.session.inventory.cluster}-{job_id}-{entry.name}"
        out = (self.out or (runs_folder_of(entry) if self.everywhere else RUNS)).absolute()
        final = choose_run_folder(out, name, entry.token)
        changed: Sequence[bytes] = ()
        if has_final_run(entry) and is_run(Path(entry.run_dir or "")):
            # A run with an intact record was returned above, so the record of this run is damaged.
            final = Path(entry.run_dir or "")
            changed = damaged_files(final)
        jobs = self.jobs_of(entry)
        self.session.site.await_ends(self.session.scheduler, jobs)
        with self.reporting_write_errors(job_id, final), working_folder(final) as work:
            hosts = tuple(dict.fromkeys(node for job in jobs for node in job.nodes))
            known = self.asked_of(entry).known
            recorder = start_in_thread(partial(_recorder, self.session, entry, jobs, known))
            manifest = self.fetch(
                entry, hosts, work, still_changing=not all(job.ended for job in jobs)
            )
            writer = recorder()
            record = writer.write(work / "tree", manifest)
            for name_of_file in changed:
                _keep_changed(final, name_of_file, work / "tree")
            install_tree(work, final, manifest.links)
        # Without the accounting, the next collect completes the record, also that of an array.
        run_state = JobState.UNKNOWN.value if writer.accounting_away else record.state
        states = final_states(writer.jobs) if record.final else {"state": record.state}
        self.session.ledger.update(
            entry, run_dir=str(final), run_state=run_state, compared_ns=self.now_ns, **states
        )
        if entry.kept:
            with suppress(ClusterctlError):
                settle(self.session.scheduler, self.session.ledger, str(entry.first))
        if self.listed:
            note_runs_folder(out)
        return record.model_copy(update={"directory": final})

    def collect_skipped(
        self, entry: JobEntry, run: RunRecord, damaged: Sequence[bytes] = ()
    ) -> RunRecord:
        """Fetch the files that an earlier collect left on the cluster, and those that were changed since.
        Return the run's new record.

        damaged: files of the run to fetch again. Their present content stays beside them, as
        NAME.changed. Raises CollectError if the cluster does not have all of these.
        """
        final = run.directory
        known = collected_files(run.directory)
        with self.reporting_write_errors(run.job_id, final), working_folder(final) as work:
            tree = work / "tree"
            home = {name: facts for name, facts in known.items() if name not in damaged}
            # A job that this one submitted may still be writing.
            is_newer = entry.token in self.newer
            manifest = self.fetch(entry, run.nodes, work, home, still_changing=is_newer)
            kept = self.session.ledger.kept(entry.token)
            write_kept(tree, kept)
            lost = self._mend(entry, run, tree, manifest, damaged)
            arrived = {
                name: size
                for name, size in manifest.files.items()
                if (name not in home or home[name][1] != manifest.sha256[name])
                and name not in damaged
                and (tree / os.fsdecode(name)).is_file()
            }
            replaced = [name for name in arrived if name in home]
            for name in replaced:
                # A log that has grown has the former content, too.
                if not _begins_with(tree / os.fsdecode(name), final / os.fsdecode(name)):
                    _keep_changed(final, name, tree)
            record = run.model_copy(
                update={
                    "files": run.files + len(arrived) - len(replaced),
                    "bytes": run.bytes
                    + sum(arrived.values())
                    - sum(home[name][0] for name in replaced),
                    "skipped": (
                        *manifest.skipped,
                        *(s for s in run.skipped if s.path == ACCOUNTING),
                    ),
                    "collected_at": time.time(),
                }
            )
            if arrived:
                # The table is of the files that were here before.
                home.pop(TABLE_FILE.encode(), None)
            sums = {name: sha256 for name, (_, sha256) in home.items()} | {**manifest.sha256}
            sums |= {name: known[name][1] for name in lost if name in known}
            link(final, [name for name, (_, sha256) in home.items() if sums[name] == sha256], tree)
            if arrived:
                from clusterctl.runs.record import with_programs  # noqa: PLC0415 - slow, and rarely needed

                record = with_programs(record, tree, kept)
            # RUN_FILE is a hard link here. Writing through it would change the run that is still in
            # place.
            (tree / RUN_FILE).unlink(missing_ok=True)
            (tree / RUN_FILE).write_text(record.as_json())
            write_sums(
                tree, {name: sha256 for name, sha256 in sums.items() if name != RUN_FILE.encode()}
            )
            install_tree(work, final, manifest.links)
        if lost:
            raise CollectError(
                f"{counted(len(lost), 'file')} of a collected run, missing or damaged here, can't be "
                "fetched again",
                code="not-found",
                about="run-original",
                where=str(final),
                why=first_few([shown_path(name) for name in lost]),
                fix=f"`clusterctl collect {run.full_id} --all` also fetches files that are "
                "otherwise left out; restore other files from a backup",
            )
        self.session.ledger.update(entry, compared_ns=self.now_ns)
        return record

    def _mend(
        self,
        entry: JobEntry,
        run: RunRecord,
        tree: Path,
        manifest: RunManifest,
        damaged: Sequence[bytes],
    ) -> list[bytes]:
        """Add damaged files to ``tree`` as far as possible. Return those that the cluster does not
        have.
        """
        from clusterctl.runs.record import environment_text  # noqa: PLC0415 - slow, and rarely needed

        lost = []
        # Without the table, readers parse the files of the run again.
        for name in (name for name in damaged if name != TABLE_FILE.encode()):
            path = tree / os.fsdecode(name)
            old = run.directory / os.fsdecode(name)
            if name == ACCOUNTING.encode() and self.jobs_of(entry)[0].state is not JobState.PURGED:
                if text := self.asked_of(entry).known().accounting.get(entry.job_id or ""):
                    path.write_text(text)
            elif name == ENVIRONMENT_FILE.encode():
                facts = json.loads(
                    self.session.ledger.kept_file(entry.token, CLIENT_FACTS) or b"null"
                )
                version = self.asked_of(entry).known().version
                path.write_text(environment_text(tree, manifest, facts, version))
            if name != SUMS_FILE.encode() and not path.is_file():
                lost.append(name)
                link(run.directory, [name] if old.is_file() else [], tree)
            else:
                _keep_changed(run.directory, name, tree)
        return lost

    def fetch(
        self,
        entry: JobEntry,
        nodes: Sequence[str],
        work: Path,
        home: CollectedFiles = MappingProxyType({}),
        *,
        still_changing: bool = False,
    ) -> RunManifest:
        """Copy a job's files from ``nodes`` to ``work/tree``, except files copied earlier
        (``home``).
        """
        job_id = entry.job_id or ""
        if entry.remote_dir is None:
            reason = "the submission's record on this machine does not name the folder"
            message = f"the folder of job {job_id} on the cluster is unknown"
            raise CollectError(message, code="not-found", about="job-folder-path", why=reason)
        outputs = _outputs(self.session.ledger.kept(entry.token))
        options = (job_id, still_changing, self.selection, outputs, home, self.progress)
        source = RunSource(
            entry.remote_dir, *options, files=entry.files or "", since_ns=entry.compared_ns
        )
        hosts = self.session.hosts_with_files_of(entry.user, nodes)
        senders = self.senders.setdefault(entry.user, {})
        for host, transport in hosts:
            senders.setdefault(host, sender(transport))
        try:
            return fetch_from_hosts([(host, senders[host]) for host, _ in hosts], source, work)
        except (NoAnswerError, CommandError) as exc:
            raise CollectError(
                f"the files of job {job_id} can't be read",
                code="file-unreadable",
                about="job-files",
                where=f"{entry.remote_dir} on the cluster",
                why=exc.cause,
                fix="check the folder with `clusterctl ssh`, then collect again; arrived files "
                "are kept",
            ) from exc

    @contextmanager
    def reporting_write_errors(self, job_id: str, final: Path) -> Iterator[None]:
        try:
            yield
        except OSError as exc:
            raise CollectError(
                f"the files of job {job_id} can't be written to this machine's disk",
                code="file-unwritable",
                about="run",
                where=str(final),
                why=write_error_reason(exc, final),
                fix=f"{write_error_fix(exc, final)}, or pass another folder with --out",
            ) from exc


def _keep_changed(run: Path, name: bytes, tree: Path) -> None:
    """Copy a changed file of a run beside the file in ``tree`` that replaces it, as NAME.changed, or
    NAME.changed-2 if there is such a file.
    """
    old = run / os.fsdecode(name)
    new = tree / os.fsdecode(name)
    if old.is_file() and old.stat().st_size > 0 and name not in _GENERATED and new.is_file():
        names = (
            f"{old.name}.changed" + (f"-{number}" if number > 1 else "") for number in count(1)
        )
        kept = next(name for name in names if not os.path.lexists(old.with_name(name)))
        shutil.copy2(old, new.with_name(kept))


def _begins_with(new: Path, old: Path) -> bool:
    """Return whether a file begins with the content of another, or that is missing."""
    if not old.is_file():
        return True
    with old.open("rb") as former, new.open("rb") as latter:
        while content := former.read(_CHUNK):
            if latter.read(len(content)) != content:
                return False
    return True


def _recorder(
    session: Session, entry: JobEntry, jobs: Sequence[JobInfo], known: Callable[[], KnownToSlurm]
) -> Recorder:
    from clusterctl.runs.record import Recorder  # noqa: PLC0415 - takes 0.1 s, while files are copied

    return Recorder.of(session, entry, jobs, known())


def _outputs(kept: Mapping[str, bytes]) -> Outputs | None:
    """Return a job's output patterns and submitted files; None if the job has no patterns
    (outputs.json).
    """
    if OUTPUTS_FILE not in kept:
        return None
    source = json.loads(kept[SOURCE_FILE]) if SOURCE_FILE in kept else {"files": [], "links": []}
    listed = (*source["files"], *source["links"])
    sent = {os.fsencode(entry["path"]): entry.get("size") for entry in listed}
    return Outputs(json.loads(kept[OUTPUTS_FILE])["patterns"], sent)


def _purged(entry: JobEntry) -> JobInfo:
    """Return a JobInfo with the state PURGED, for a job that the scheduler no longer knows."""
    number = (entry.job_id or "").lstrip(string.ascii_letters)
    return JobInfo(
        number=int(number),
        name=entry.name,
        user=entry.user,
        state=JobState.PURGED,
        reason="the scheduler no longer has a record of the job",
        submit_time=int(entry.submitted_at),
        work_dir=entry.remote_dir or "",
        comment=comment_of(entry.token),
        prefix=(entry.job_id or "").removesuffix(number),
    )
