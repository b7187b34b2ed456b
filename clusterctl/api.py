"""The commands of the command line as functions for Python programs, with the same errors.

The functions neither print nor prompt. Progress lines go to ``report``. A function whose command
would prompt raises an error without ``yes=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Final, Literal, Unpack

from clusterctl.cluster import down, up
from clusterctl.cluster.context import ClusterContext
from clusterctl.cluster.nodes import expand_hosts
from clusterctl.cluster.phases import PhaseRunner
from clusterctl.cluster.plan import Plan, preview, prompt_about
from clusterctl.cluster.replayed_run import select_replay
from clusterctl.cluster.status import Status, status_of
from clusterctl.cluster.up import UpOptions, UpResult
from clusterctl.errors import ClusterctlError, Notice, UsageError, printable
from clusterctl.jobs import files, queue, watch
from clusterctl.jobs.bundled import ChosenModel, reject_invalid_arguments
from clusterctl.jobs.log_text import MOST_KEPT, KeptLogs, whole_lines
from clusterctl.jobs.prepare import Preparer, Submission, read_jobs, submit_prepared
from clusterctl.jobs.replay import ReplayCode, replay_job
from clusterctl.jobs.stacks import stacks_of
from clusterctl.jobs.submit import Submitter
from clusterctl.jobs.top import ClusterMoment, watching
from clusterctl.jobs.watch import LogChunk
from clusterctl.providers.base import Prompts
from clusterctl.rehearse.rehearsal import LIMIT_S, MTBF_S, Rehearsal, Rehearser, job_to_rehearse
from clusterctl.rehearse.verdict import Fault
from clusterctl.runs.collect import SelectionKeywords, collect, collected_before, selection_of
from clusterctl.runs.compare import compare
from clusterctl.runs.find import Row, named_run
from clusterctl.runs.only_copies import bring_all
from clusterctl.runs.page import Report
from clusterctl.runs.query import frame, list_runs
from clusterctl.runs.report import report_of
from clusterctl.runs.trackers import chosen_trackers, sync_error, sync_run
from clusterctl.runs.usage import usage_of_cluster
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.ends.diagnosis import Diagnosis
from clusterctl.scheduler.session import (
    PATIENCE_S,
    SHORT_PATIENCE_S,
    SHOWN_PATIENCE_S,
    Session,
    open_session,
)
from clusterctl.scheduler.slurm.usage import UsageReport, usage_keys
from clusterctl.spec.job_keywords import JobKeywords, ReplayKeywords
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import reject_unknown
from clusterctl.spec.program import Weights, is_job_file
from clusterctl.state.chosen import ChosenCluster, naming_lock_holder
from clusterctl.state.chosen_spec import reject_foreign, spec_of, spec_of_existing
from clusterctl.state.inventory import inventory_of
from clusterctl.state.ledger import RUNS
from clusterctl.state.run_names import cluster_of_jobs, full_name, job_id_of
from clusterctl.state.workspace import WAIT_S
from clusterctl.transport.openssh import OpenSSH, run_captured
from clusterctl.transport.ssh import Connections
from clusterctl.util.progress import SILENT, LineReporter, PhaseLines

__all__ = [
    "Cluster",
    "ClusterMoment",
    "ClusterctlError",
    "Job",
    "Rehearsal",
    "Report",
    "Row",
    "Status",
    "UsageReport",
    "compare",
    "frame",
    "list_runs",
    "named_run",
    "report",
]

_Names = str | int | Sequence[str | int]
_Paths = str | Path | Sequence[str | Path]
# The arguments of a program: words, or options by name.
_Args = str | Iterable[object] | Mapping[str, object]
# The fields of a sweep that are numbers. All other values are passed to the program as text.
_OF_SWEEP: Final = frozenset({"trials", "seed", "parallel"})


def _as_texts(value: object) -> object:
    """Convert values of a sweep to text, as in a job file: 0.1 and True become "0.1" and "true"."""
    if isinstance(value, Mapping):
        return {key: _as_texts(part) for key, part in value.items()}
    if isinstance(value, list | tuple | range):
        return [_as_texts(part) for part in value]
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


def _as_list(words: str | int | Path | Iterable[object]) -> list[str]:
    return [str(words)] if isinstance(words, str | int | Path) else [str(word) for word in words]


def _as_folder(path: str | Path) -> str:
    """Return a path that the commands take for a folder, not for the new name of a file."""
    text = str(path)
    return text if not text or text.endswith("/") else f"{text}/"


def _as_arguments(args: _Args) -> list[str]:
    """Return a program's arguments: words as they are, a mapping as options such as ``--lr
    0.1``.
    """
    if not isinstance(args, Mapping):
        return _as_list(args)
    words: list[str] = []
    for key, value in args.items():
        if value is not None and value is not False:
            texts = [] if value is True else _as_texts(value)
            words.append(key if key.startswith("-") else f"--{key}")
            words += texts if isinstance(texts, list) else [str(texts)]
    return words


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _confirm(prompt: str, *, yes: bool) -> None:
    """Raise UsageError with the question ``prompt``, unless ``yes`` is set or ``prompt`` is ""."""
    if prompt and not yes:
        reason = "Python programs are not prompted"
        raise UsageError(prompt, code="confirmation-needed", why=reason, fix="pass yes=True")


@dataclass(frozen=True)
class Cluster:
    """A cluster. Its methods raise ClusterctlError.

    spec: the spec file. name: the cluster's name, instead of a spec file. Default: ./cluster.yaml;
        if it does not exist, the only cluster that is up.
    report: called with each line of progress. ``report=print`` shows them.
    """

    spec: str | Path | None = None
    name: str | None = None
    report: LineReporter = field(default=SILENT.note, repr=False)

    def _note(self, line: str) -> None:
        self.report(printable(line))

    @property
    def _chosen(self) -> ChosenCluster:
        return ChosenCluster(_path(self.spec), self.name, self._note)

    @property
    def _prompts(self) -> Prompts:
        reporter = PhaseLines(self._note)
        return Prompts(reporter=reporter)

    def _session(
        self, patience_s: float = PATIENCE_S, ids: Sequence[str] = (), *, certain: bool = False
    ) -> AbstractContextManager[Session]:
        chosen = cluster_of_jobs(ids, self._chosen, certain=certain)
        return open_session(chosen, patience_s=patience_s)

    def _of(self, session: Session) -> Cluster:
        """Return the cluster of a session, for its jobs: another may be chosen later."""
        return self if self._chosen.is_given else replace(self, name=session.inventory.cluster)

    def validate(self) -> ClusterSpec:
        """Return the spec. Raise SpecError, with all mistakes, if it is wrong."""
        return spec_of(self._chosen)

    def plan(self) -> Plan:
        """Return the changes that `up` would make."""
        return preview(ClusterContext.of(self.validate(), prompts=self._prompts))

    def up(
        self,
        *,
        yes: bool = False,
        reconfigure: bool = False,
        discard: bool = False,
        limit: _Names = (),
        no_wait: bool = False,
    ) -> UpResult:
        """Create or repair the cluster. The arguments are the options of the command `up`.

        yes: agree to changes that the command asks about; otherwise they raise UsageError.
        reconfigure: configure all hosts, even unchanged hosts. limit: only these hosts. Empty: all.
        discard: delete data that exists only on hosts that are removed or recreated.
        no_wait: raise LockedError, instead of waiting, if another command has locked the cluster.
        """
        options = UpOptions(
            approve=lambda plan: _confirm(prompt_about(plan), yes=yes),
            reconfigure=reconfigure,
            discard=discard,
            limit=expand_hosts(_as_list(limit)) or None,
        )
        cluster = ClusterContext.of(
            self.validate(),
            reporter=PhaseLines(self._note),
            prompts=self._prompts,
            wait_s=0 if no_wait else WAIT_S,
        )
        return up.up(cluster, options)

    def down(
        self,
        *,
        yes: bool = False,
        discard: bool = False,
        discard_run: _Names = (),
        out: str | Path | None = None,
        forget: _Names = (),
        no_wait: bool = False,
    ) -> down.DownResult:
        """Collect runs, remove the cluster, and check that nothing is left. Arguments: options of
        `down`.

        yes: agree to the removal. out: folder for the collected runs. Default: ./runs.
        discard: delete everything on the cluster without collecting it. discard_run: only runs of
            these jobs.
        forget: hosts of your own that no longer exist.
        no_wait: raise LockedError, instead of waiting, if another command has locked the cluster.
        """
        reject_foreign(self._chosen)
        workspace = self._chosen.workspace(named=True)
        _confirm(f"removing cluster {workspace.root.name!r} needs confirmation", yes=yes)
        options = down.DownOptions(
            discard=discard,
            discard_runs=_as_list(discard_run),
            out=_path(out),
            on_run=lambda run: self._note(f"collected {run.directory}"),
            gone=expand_hosts(_as_list(forget)),
            prompts=self._prompts,
        )
        reporter = PhaseLines(self._note)
        wait_s = 0 if no_wait else WAIT_S
        return down.down(
            PhaseRunner(workspace=workspace, reporter=reporter, wait_s=wait_s), options
        )

    def status(self) -> Status:
        """Return the state of the nodes, and the pending and running jobs."""
        return status_of(self._chosen.workspace())

    def top(self, ids: _Names = ()) -> ClusterMoment:
        """Return the activity of the nodes and jobs now; with IDs, of these jobs."""
        ids = _as_list(ids)
        with watching(cluster_of_jobs(ids, self._chosen).workspace(), ids) as cluster:
            return cluster.look()

    def submit(
        self,
        target: str | Path,
        args: _Args = (),
        *,
        run: str | Path | None = None,
        weights: Literal["best", "final"] = "best",
        **options: Unpack[JobKeywords],
    ) -> Job:
        """Submit a bundled job or a script.

        args: the program's arguments: words, or options such as ``{"lr": 0.1}``, which is ``--lr
            0.1``. True is the option alone; False and None omit it.
        run: the job loads this run's model. weights: those of its best evaluation, or the final
            weights.
        options: those of ``JobKeywords``, as in a job file.
        """
        if is_job_file(str(target)) or options.get("scaling"):
            raise UsageError(
                f"{target} may be several jobs, because it is a job file or has the option scaling",
                about="job-file",
                fix="call submit_file instead",
            )
        model = None if run is None else ChosenModel(str(run), Weights(weights))
        (job,) = self._submit(self._submission(target, args, options, model=model))
        return job

    def submit_file(
        self,
        path: str | Path,
        args: _Args = (),
        *,
        variants: _Names = (),
        **options: Unpack[JobKeywords],
    ) -> tuple[Job, ...]:
        """Submit the jobs in a job file, or those of a scaling, such as ``scaling={"nodes": [1,
        2]}``.

        variants: names of the jobs to submit. Empty: all jobs.
        args, options: those of `submit`. They override those in the file.
        """
        return self._submit(self._submission(path, args, options, variants=_as_list(variants)))

    def render(
        self, target: str | Path, args: _Args = (), **options: Unpack[JobKeywords]
    ) -> tuple[str, ...]:
        """Return the scripts that `submit` would submit. args, options: those of `submit`."""
        submission = self._submission(target, args, options)
        spec = spec_of_existing(self._chosen)
        plan = Preparer(self._note).plan(submission, spec)
        return tuple(job.script for job in plan.jobs)

    def _submission(
        self,
        target: str | Path,
        args: _Args,
        options: JobKeywords,
        *,
        model: ChosenModel | None = None,
        variants: Sequence[str] = (),
    ) -> Submission:
        """Read the jobs in ``target``, and reject mistakes that are visible without a cluster."""
        jobs = read_jobs(str(target), self._given(args, options), variants)
        reject_invalid_arguments(jobs, model)
        return Submission.of(jobs, model, chosen=self._chosen)

    @staticmethod
    def _given(args: _Args, options: JobKeywords) -> dict[str, object]:
        """Return the options of a job that are set, and its arguments, as ``read_jobs`` takes
        them.
        """
        reject_unknown(options, JobKeywords.__annotations__, "jobs have no option")
        if isinstance(sweep := options.get("sweep"), Mapping):
            options["sweep"] = {k: v if k in _OF_SWEEP else _as_texts(v) for k, v in sweep.items()}
        given_options = {name: value for name, value in options.items() if value not in (None, [])}
        words = _as_arguments(args)
        return {"args": words, **given_options} if words else given_options

    def _submit(self, submission: Submission) -> tuple[Job, ...]:
        with self._session() as session:
            prepared = Preparer(self._note).prepare(session, submission)
            submitted = list(submit_prepared(Submitter(session, self._note), prepared))
            cluster = self._of(session)
        return tuple(Job(cluster, job.job_id, job.name, job.remote_dir) for job in submitted)

    def rehearse(
        self,
        target: str | Path,
        args: _Args = (),
        *,
        faults: _Names = (),
        mtbf_s: float = MTBF_S,
        limit_s: float = LIMIT_S,
        **options: Unpack[JobKeywords],
    ) -> Rehearsal:
        """Break a job on a local cluster in several ways, and judge whether it survives.

        faults: names of faults. Empty: all. limit_s: how long the undisturbed job may run.
        mtbf_s: the assumed mean time between failures. args, options: those of `submit`.
        """
        names = _as_list(faults)
        reject_unknown(names, list(Fault), "rehearse has no fault")
        job = job_to_rehearse(str(target), self._given(args, options))
        with self._session() as session:
            rehearser = Rehearser(session, self._note, limit_s, mtbf_s)
            chosen = [Fault(name) for name in names] or list(Fault)
            return rehearser.rehearse(Preparer(self._note), job, chosen)

    def replay(
        self,
        run: Row | str | Path,
        changes: Mapping[str, object] | None = None,
        *,
        failed: bool = False,
        code: Literal["sent", "current"] = "sent",
        **options: Unpack[ReplayKeywords],
    ) -> Job:
        """Submit the job of a collected run again.

        changes: the program's options with other values: name -> value.
        failed: submit only the tasks that did not complete. Raise UsageError if all tasks have
            completed.
        code: the program's files: as sent with the run, or as they are in its folder now.
        options: those of ``ReplayKeywords``. Default: those of the run.
        """
        reject_unknown(options, ReplayKeywords.__annotations__, "replay has no option")
        row = run if isinstance(run, Row) else named_run(full_name(str(run), self._chosen))
        texts = {
            key.removeprefix("--"): str(_as_texts(value)) for key, value in (changes or {}).items()
        }
        given_options = {name: value for name, value in options.items() if value not in (None, [])}
        again = select_replay(row, texts, failed=failed, flags=given_options, code=ReplayCode(code))
        if again is None:
            fix = "leave out failed=True, to replay the whole array"
            raise UsageError(
                f"all tasks of {row.shown} have completed",
                code="not-replayable",
                about="all-completed",
                fix=fix,
            )
        replay = replay_job(row.run.directory, again)
        reject_invalid_arguments((replay.job,))
        (job,) = self._submit(Submission.of((replay.job,), replay=replay))
        return job

    def job(self, job_id: str | int) -> Job:
        """Return a job of the cluster by its ID, even if it was submitted from another machine."""
        with self._session(ids=[str(job_id)]) as session:
            known_id = job_id_of(str(job_id), session.ledger)
            info = queue.known_jobs(session, [known_id])[0]
            cluster = self._of(session)
        return Job(cluster, known_id, info.name, info.work_dir)

    def jobs(self, ids: _Names = ()) -> tuple[JobInfo, ...]:
        """Return your jobs, newest first, or the jobs with these IDs. An array has an entry for
        each task.
        """
        ids = _as_list(ids)
        with self._session(SHOWN_PATIENCE_S, ids) as session:
            listing = queue.find_or_list(session, ids)
        if listing.unlisted:
            self._note(listing.unlisted_notice)
        return listing.jobs

    def usage(self, by: str | Sequence[str] = "user", since: str = "30d") -> UsageReport:
        """Return the hours and the cost of the jobs of all users.

        by: keys to group by: user, account, partition, month. since: such as 30d or 2026-01-31.
        """
        with self._session(SHOWN_PATIENCE_S) as session:
            return usage_of_cluster(session, usage_keys(_as_list(by)), since)

    def cancel(self, ids: _Names) -> tuple[JobInfo, ...]:
        """Cancel jobs. Return their state before the cancellation."""
        ids = _as_list(ids)
        with self._session(SHOWN_PATIENCE_S, ids, certain=True) as session:
            cancellation = queue.cancel(session, ids)
        cancellation.raise_errors()
        return cancellation.jobs

    def collect(
        self,
        ids: _Names = (),
        *,
        out: str | Path | None = None,
        everywhere: bool = False,
        sync: str | Sequence[str] = (),
        **options: Unpack[SelectionKeywords],
    ) -> tuple[Row, ...]:
        """Copy the results of jobs (runs) from the cluster. The arguments are the options of
        `collect`.

        ids: the jobs. Empty: all jobs of the current folder's project that are not collected yet.
        out: folder for the runs. Default: ./runs. everywhere: also jobs that were submitted from
            other folders; without ``out``, each run gets into the folder `runs` of its job's
            folder.
        checkpoints, max_checkpoint, max_file: as in `collect`; sizes such as ``4GiB``.
        everything: copy all that exists only on the cluster.
        sync: also send what programs have recorded offline for these tools, as in `collect --sync`:
            wandb, mlflow, trackio. Raise CollectError if something could not be sent.
        """
        reject_unknown(options, SelectionKeywords.__annotations__, "collect has no option")
        trackers = chosen_trackers(_as_list(sync))
        selection = selection_of(**options)
        folder = _path(out)
        everywhere = (everywhere or selection.everything) and not ids
        ids = _as_list(ids)
        with self._session(SHORT_PATIENCE_S, ids) as session:
            runs = collect(
                session,
                ids or None,
                out=folder,
                everywhere=everywhere,
                selection=selection,
            )
            earlier = [] if ids or not trackers else collected_before(session.ledger, runs)
            if selection.everything and not ids:
                bring_all(session.ledger.workspace, folder or RUNS)
        synced = [one for run in [*runs, *earlier] for one in sync_run(run, trackers, self._note)]
        if error := sync_error(synced):
            raise error
        return tuple(Row(run) for run in runs)

    def put(self, paths: _Paths, to: str = ".") -> str:
        """Copy files to a folder on the cluster, by default your home. Return the folder's full
        path.
        """
        return files.put(self._chosen, [*_as_list(paths), _as_folder(to)]).sent.folder

    def get(self, paths: _Names, to: str | Path = ".") -> Path:
        """Copy files from the cluster to a folder on this machine. Return the folder's full
        path.
        """
        files.get(self._chosen, [*_as_list(paths), _as_folder(to)])
        return Path(to).absolute()

    def ssh(
        self, command: _Names, host: str | None = None, *, admin: bool = False
    ) -> CompletedProcess[str]:
        """Run a command (a string: by the shell) on a host or the controller, as job user or
        ``admin``.
        """
        workspace = self._chosen.workspace()
        words = _as_list(command)
        with naming_lock_holder(workspace):
            inventory = inventory_of(workspace)
        if host is not None:
            reject_unknown(
                [host], [node.name for node in inventory.hosts], "the cluster has no host"
            )
        if not words:
            reason = "an interactive shell needs a terminal"
            raise UsageError(
                "no command is given", code="terminal-needed", why=reason, fix="pass a command"
            )
        host = host or inventory.controller.name
        ssh = OpenSSH(workspace.ssh_config, None if admin else inventory.job_user)
        with Connections(workspace.ssh_config) as connections:
            connections.prepare(host)
            result = run_captured(ssh.argv(host, words[0] if len(words) == 1 else words))
        return CompletedProcess(words, result.rc, result.stdout, result.stderr)


@dataclass(frozen=True)
class Job:
    """A submitted job or job array; ``dir`` is its folder on the cluster."""

    cluster: Cluster = field(repr=False)
    id: str
    name: str
    dir: str

    def info(self) -> tuple[JobInfo, ...]:
        """Return the state of the job. An array has an entry for each task."""
        return self.cluster.jobs([self.id])

    def wait(self, timeout_s: float | None = None) -> tuple[JobInfo, ...]:
        """Wait until the job has ended, at most ``timeout_s`` seconds if given.

        Raise JobFailedError or JobCancelledError, with the cause, if the job does not complete.
        Raise WaitTimeoutError after ``timeout_s``; the job is not cancelled.
        """
        with self.cluster._session() as session:
            notes = watch.ChangeNotes(session, self.cluster._note)
            ended = watch.wait(session, [self.id], timeout_s=timeout_s, on_change=notes)
            self._tell(watch.raise_unless_completed(session, ended))
        return ended

    def follow(
        self, show: Callable[[str], object] = print, *, timeout_s: float | None = None
    ) -> tuple[JobInfo, ...]:
        """Call ``show`` with each line of output until the job ends. Errors, ``timeout_s``: as for
        `wait`.
        """

        def show_lines(chunk: LogChunk) -> None:
            for line in chunk.data.removesuffix(b"\n").split(b"\n"):
                show(line.decode(errors="replace"))

        with self.cluster._session() as session, whole_lines(show_lines) as take:
            notes = watch.ChangeNotes(session, self.cluster._note, log_is_shown=True)
            ended = watch.follow(
                session, self.id, on_output=take, timeout_s=timeout_s, on_change=notes
            )
            self._tell(watch.raise_unless_completed(session, ended, log_is_shown=True))
            return ended

    def _tell(self, notices: Sequence[Notice]) -> None:
        for notice in notices:
            self.cluster._note(notice)

    def logs(
        self, *, stream: Literal["stdout", "stderr"] | None = None, rank: int | None = None
    ) -> str:
        """Return the last 8 MiB of the job's output so far. ``stream``, ``rank``: only this
        output.
        """
        kept = KeptLogs()
        with self.cluster._session() as session:
            rank_text = "" if rank is None else str(rank)
            watch.logs(session, self.id, on_output=kept.keep, rank=rank_text, most=MOST_KEPT)
        logs = [log for log in kept.texts() if stream in {None, log.stream}]
        logs.sort(key=lambda log: (log.task or 0, log.stream == "stderr", log.rank or 0))
        return "".join(log.text for log in logs)

    def stacks(self) -> dict[str, Any]:
        """Return where the ranks of the running job are, as `clusterctl logs --stacks -o json` prints
        it.
        """
        with self.cluster._session(SHOWN_PATIENCE_S) as session:
            return stacks_of(session, self.id).as_dict()

    def diagnosis(self) -> Diagnosis | None:
        """Return why the job (or an array's worst task) failed, was cancelled or is pending, or what
        may be wrong although it completed (``notes``). None: nothing is to be said.
        """
        with self.cluster._session(SHOWN_PATIENCE_S) as session:
            return watch.diagnosis_of(session, queue.known_jobs(session, [self.id]))

    def cancel(self) -> None:
        """Cancel the pending or running job."""
        self.cluster.cancel([self.id])

    def collect(
        self,
        *,
        out: str | Path | None = None,
        sync: str | Sequence[str] = (),
        **options: Unpack[SelectionKeywords],
    ) -> Row:
        """Copy the job's results (run) to ``out``, with the options of ``Cluster.collect``.

        sync: as in `Cluster.collect`.
        """
        (run,) = self.cluster.collect([self.id], out=out, sync=sync, **options)
        return run


def report(runs: Row | Sequence[Row]) -> Report:
    """Return the report about a run or a sweep, or the comparison of several runs.

    The report has the methods ``as_html()``, ``as_markdown()`` and ``as_dict()``. Raise UsageError
    if the tasks of a sweep have no metric to rank them.
    """
    return report_of([runs] if isinstance(runs, Row) else runs)
