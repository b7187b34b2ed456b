"""The verbs of the command line as functions for Python programs, with the same errors.

Nothing is printed and nobody is asked: lines of progress go to a ``report``, and what the command line asks
about needs ``yes=True``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any, Literal, Unpack

from clusterctl.cli import access, files, job, jobs, status, up
from clusterctl.cli import collect as cli_collect
from clusterctl.cli import replay as cli_replay
from clusterctl.cli import runs as cli_runs
from clusterctl.cli import submit as cli_submit
from clusterctl.cli.options import Options
from clusterctl.cli.output import Phases, Screen
from clusterctl.cli.status import Status as Status  # noqa: PLC0414 - a public name, as those below
from clusterctl.cluster import down
from clusterctl.cluster.context import ClusterContext, PhaseRunner
from clusterctl.cluster.nodes import names_of
from clusterctl.cluster.plan import Plan, preview
from clusterctl.cluster.up import UpOptions, UpResult
from clusterctl.errors import ClusterctlError as ClusterctlError  # noqa: PLC0414
from clusterctl.errors import UsageError, printable
from clusterctl.jobs import watch
from clusterctl.jobs.watch import LogChunk
from clusterctl.providers.base import Prompts
from clusterctl.runs.compare import compare as compare  # noqa: PLC0414
from clusterctl.runs.find import Row as Row  # noqa: PLC0414
from clusterctl.runs.find import named_run as named_run  # noqa: PLC0414
from clusterctl.runs.find import ranked
from clusterctl.runs.frame import frame as frame  # noqa: PLC0414
from clusterctl.runs.page import Report as Report  # noqa: PLC0414
from clusterctl.runs.report import report_of
from clusterctl.scheduler.base import JobInfo
from clusterctl.scheduler.diagnosis import Diagnosis
from clusterctl.scheduler.session import PATIENCE_S, SOON_S, Session, open_session
from clusterctl.spec.job import JobKeywords, Weights, is_job_file
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.names import reject_unknown
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.chosen_spec import spec_of
from clusterctl.state.ledger import RunRecord
from clusterctl.state.workspace import WAIT_S
from clusterctl.util.progress import LineReporter

_Names = str | Sequence[str]
_Paths = str | Path | Sequence[str | Path]


class _Silent(Screen):
    """Keeps a verb's answer, and passes its notes on; draws nothing, and asks nothing."""

    def __init__(self, report: LineReporter) -> None:
        super().__init__(json=True, color=False)
        self._report = report
        self.answer: dict[str, Any] = {}

    def result(self, answer: dict[str, Any], *_: str) -> None:
        self.answer = answer

    def note(self, *lines: str) -> None:
        for line in lines:
            self._report(printable(line))

    @contextmanager
    def working(self, _text: str) -> Iterator[None]:
        yield

    @contextmanager
    def moving(self) -> Iterator[None]:
        yield

    def confirm(self, prompt: str, *, yes: bool) -> None:
        if not yes:
            raise UsageError(
                prompt, code="needs-confirmation", why="Python programs are not prompted", fix="say yes=True"
            )


_OF_SWEEP = {"trials", "seed", "parallel"}  # its numbers; all others are values of the program's options


def _as_texts(value: object) -> object:
    """Values of a sweep as a job file has them: 0.1 and True are texts there."""
    if isinstance(value, Mapping):
        return {key: _as_texts(one) for key, one in value.items()}
    if isinstance(value, list | tuple | range):
        return [_as_texts(one) for one in value]
    return str(value).lower() if isinstance(value, bool) else None if value is None else str(value)


def _several(words: str | Path | Iterable[object]) -> list[str]:
    """Several words, or one alone."""
    return [str(words)] if isinstance(words, str | Path) else [str(one) for one in words]


def _path(path: str | Path | None) -> Path | None:
    return None if path is None else Path(path)


def _ignore(line: str) -> None:
    """No progress is wanted."""


@dataclass(frozen=True)
class Cluster:
    """The cluster of a spec file, or of a ``name``; else the one that the command line takes without ``-f``.

    ``report`` gets lines of progress: ``report=print`` shows them. What fails raises ClusterctlError.
    ``accept_host_key`` and ``become_password`` are for machines of your own, as the flags of `up`.
    """

    spec: str | Path | None = None
    name: str | None = None
    report: LineReporter = field(default=_ignore, repr=False)
    accept_host_key: Sequence[str] = ()
    become_password: str | None = field(default=None, repr=False)

    @property
    def _options(self) -> Options:
        return Options(_path(self.spec), self.name, json=True)

    @property
    def _chosen(self) -> ChosenCluster:
        return ChosenCluster(_path(self.spec), self.name, self._screen.note)

    @property
    def _screen(self) -> _Silent:
        return _Silent(self.report)

    @property
    def _prompts(self) -> Prompts:
        accepted = tuple(self.accept_host_key)
        return Prompts(accepted=accepted, password=self.become_password, note=self._screen.note)

    def _session(self, patience_s: float = PATIENCE_S) -> AbstractContextManager[Session]:
        return open_session(self._chosen, patience_s=patience_s)

    def validate(self) -> ClusterSpec:
        """The spec; SpecError names all that is wrong with it."""
        return spec_of(self._chosen)

    def plan(self) -> Plan:
        """What `up` would change."""
        return preview(ClusterContext.of(self.validate(), prompts=Prompts(password=self.become_password)))

    def up(
        self,
        *,
        yes: bool = False,
        reconfigure: bool = False,
        force: bool = False,
        discard: bool = False,
        bundle: str | Path | None = None,
        no_bundle: bool = False,
        limit: _Names = (),
        no_wait: bool = False,
    ) -> UpResult:
        """Create the cluster, or repair it."""
        wanted = UpOptions(
            reconfigure=reconfigure,
            force=force,
            discard=discard,
            bundle=_path(bundle),
            own_repositories=no_bundle,
            limit=names_of(_several(limit)) or None,
        )
        return up.raise_cluster(
            self._screen, self.validate(), wanted, self._prompts, yes=yes, no_wait=no_wait
        )

    def down(
        self,
        *,
        yes: bool = False,
        discard: bool = False,
        discard_run: _Names = (),
        out: str | Path | None = None,
        storage: bool = False,
        forget: _Names = (),
        no_wait: bool = False,
    ) -> down.DownResult:
        """Collect runs, remove the cluster, and verify the cleanup."""
        screen = self._screen
        workspace = self._chosen.workspace(named=True)
        screen.confirm(f"take cluster {workspace.root.name!r} down?", yes=yes)
        wanted = down.DownOptions(
            discard=discard,
            discard_runs=_several(discard_run),
            out=_path(out),
            on_run=lambda run: screen.note(f"collected {run.directory}"),
            gone=names_of(_several(forget)),
            prompts=self._prompts,
            remove_storage=storage,
        )
        reporter, wait_s = Phases(screen, verbose=False), 0 if no_wait else WAIT_S
        return down.down(PhaseRunner(workspace=workspace, reporter=reporter, wait_s=wait_s), wanted)

    def status(self) -> Status:
        """The nodes, and the jobs that wait or run."""
        return status.status_of(self._chosen.workspace())

    def submit(
        self,
        target: str | Path,
        args: str | Iterable[object] = (),
        *,
        run: str | Path | None = None,
        weights: Literal["best", "final"] = "best",
        **options: Unpack[JobKeywords],
    ) -> Job:
        """Submit a bundled job or your own script."""
        if is_job_file(str(target)):
            raise UsageError(
                f"{target} is a job file, which may hold several jobs",
                code="job-file-given",
                fix="use submit_file",
            )
        (row,) = self._submit(target, args, options, run=run, weights=weights)
        return Job(self, row["job_id"], row["name"], row["dir"])

    def submit_file(
        self,
        path: str | Path,
        args: str | Iterable[object] = (),
        *,
        variants: _Names = (),
        **options: Unpack[JobKeywords],
    ) -> tuple[Job, ...]:
        """Submit the jobs of a job file, or some variants."""
        rows = self._submit(path, args, options, variants=variants)
        return tuple(Job(self, row["job_id"], row["name"], row["dir"]) for row in rows)

    def render(
        self, target: str | Path, args: str | Iterable[object] = (), **options: Unpack[JobKeywords]
    ) -> tuple[str, ...]:
        """The sbatch scripts that `submit` would submit, as with --dry-run."""
        return tuple(row["script"] for row in self._submit(target, args, options, dry_run=True))

    def _submit(
        self,
        target: str | Path,
        args: str | Iterable[object],
        options: JobKeywords,
        *,
        run: str | Path | None = None,
        weights: str = "best",
        variants: _Names = (),
        dry_run: bool = False,
    ) -> list[dict[str, Any]]:
        reject_unknown(options, JobKeywords.__annotations__, "jobs have no option")
        if isinstance(sweep := options.get("sweep"), Mapping):
            options["sweep"] = {k: v if k in _OF_SWEEP else _as_texts(v) for k, v in sweep.items()}
        screen = self._screen
        cli_submit.submit(
            screen,
            self._options,
            str(target),
            _several(args),
            _several(variants),
            None if run is None else str(run),
            Weights(weights),
            dry_run=dry_run,
            **options,
        )
        if "help" in screen.answer:
            raise UsageError(
                "--help starts no job",
                code="help-starts-no-job",
                fix=f"`clusterctl submit {target} -- --help` shows it",
            )
        return list(screen.answer["jobs"])

    def replay(
        self,
        run: Row | str | Path,
        changes: Mapping[str, object] | None = None,
        *,
        failed: bool = False,
        **flags: Any,
    ) -> Job | None:
        """Submit a collected run again, with changes of the program's options; None if no task had failed.

        ``flags`` are those of the command line's `replay`, such as ``partition`` and ``time``.
        """
        reject_unknown(flags, cli_replay.FLAGS["replay"], "replay has no option")
        screen, name = self._screen, str(run.folder if isinstance(run, Row) else run)
        said = [f"{key}={_as_texts(value)}" for key, value in (changes or {}).items()]
        cli_replay.replay(screen, self._options, name, said, failed=failed, **flags)
        jobs = [Job(self, row["job_id"], row["name"], row["dir"]) for row in screen.answer["jobs"]]
        return jobs[0] if jobs else None

    def job(self, job_id: str) -> Job:
        """A job that was submitted before, also from elsewhere."""
        with self._session() as session:
            info = watch.known_jobs(session, [job_id])[0]
        return Job(self, job_id, info.name, info.work_dir)

    def jobs(self, ids: _Names = ()) -> tuple[JobInfo, ...]:
        """Your jobs, newest first, or these; an array has one for each task."""
        with self._session(SOON_S) as session:
            return watch.known_jobs(session, _several(ids)) if ids else watch.list_jobs(session)[0]

    def cancel(self, ids: _Names) -> tuple[JobInfo, ...]:
        """Cancel jobs; they are returned as they were before."""
        with self._session(SOON_S) as session:
            return watch.cancel(session, _several(ids))

    def collect(
        self,
        ids: _Names = (),
        *,
        out: str | Path | None = None,
        checkpoints: Literal["latest", "all", "none"] | None = None,
        max_checkpoint: str | None = None,
        max_file: str | None = None,
        everything: bool = False,
    ) -> tuple[Row, ...]:
        """Copy runs from the cluster: those of these jobs, else all that are not collected yet."""
        screen, sizes = self._screen, (checkpoints, max_checkpoint, max_file)
        cli_collect.collect(screen, self._options, _several(ids), _path(out), *sizes, everything=everything)
        return tuple(Row(RunRecord.load(Path(run["dir"]))) for run in screen.answer["runs"])

    def put(self, paths: _Paths, to: str = ".") -> str:
        """Copy files and folders to a folder on the cluster, by default the home; its whole path."""
        screen = self._screen
        files.put(screen, self._options, [*_several(paths), to])
        return str(screen.answer["folder"])

    def get(self, paths: _Names, to: str | Path = ".") -> Path:
        """Copy files and folders from the cluster to a folder here; its whole path."""
        screen = self._screen
        files.get(screen, self._options, [*_several(paths), str(to)])
        return Path(screen.answer["folder"])

    def ssh(self, command: _Names, host: str | None = None, *, admin: bool = False) -> CompletedProcess[str]:
        """Run a command on a host, by default the controller; a text is for the shell there."""
        screen, words = self._screen, _several(command)
        code = access.ssh(screen, self._options, host, words, admin=admin)
        return CompletedProcess(words, code, screen.answer["stdout"], screen.answer["stderr"])


@dataclass(frozen=True)
class Job:
    """A submitted job; ``dir`` is its folder on the cluster. An array is one."""

    cluster: Cluster = field(repr=False)
    id: str
    name: str
    dir: str

    def info(self) -> tuple[JobInfo, ...]:
        """How it is; an array has one for each task."""
        return self.cluster.jobs([self.id])

    def wait(self, timeout_s: float | None = None) -> tuple[JobInfo, ...]:
        """Wait until it has ended.

        Raises:
            JobFailedError, JobCancelledError: it did not complete; the error says why.
            WaitTimeoutError: ``timeout_s`` has passed; the job goes on.
        """
        with self.cluster._session() as session:
            ended = job.wait_for(self.cluster._screen, session, [self.id], timeout_s)
            watch.raise_unless_completed(session, ended)
        return ended

    def follow(
        self, show: Callable[[str], object] = print, *, timeout_s: float | None = None
    ) -> tuple[JobInfo, ...]:
        """Pass on each line that it writes until it has ended; see ``wait``."""

        def show_lines(chunk: LogChunk) -> None:
            for line in chunk.data.removesuffix(b"\n").split(b"\n"):
                show(line.decode(errors="replace"))

        with self.cluster._session() as session, job.whole_lines(show_lines) as take:
            return job.follow_job(self.cluster._screen, session, self.id, timeout_s, show=take)

    def logs(self, *, stream: Literal["stdout", "stderr"] | None = None, rank: int | None = None) -> str:
        """What it wrote so far, to one stream or both, or what one rank wrote; the last 8 MiB."""
        kept = job.KeptLogs()
        with self.cluster._session() as session:
            watch.logs(session, self.id, on_output=kept.keep, rank="" if rank is None else str(rank))
        found = [one for one in kept.as_list() if stream in {None, one["stream"]}]
        found.sort(key=lambda one: (one["task"] or 0, one["stream"] == "stderr", one["rank"] or 0))
        return "".join(str(one["text"]) for one in found)

    def diagnosis(self) -> Diagnosis | None:
        """Why it failed, or what it waits for."""
        with self.cluster._session(SOON_S) as session:
            return jobs.diagnosis_of(session, watch.known_jobs(session, [self.id]))

    def cancel(self) -> None:
        """End it, or take it from the queue."""
        self.cluster.cancel([self.id])

    def collect(self, **options: Any) -> Row:
        """Copy its run from the cluster, with the options of ``Cluster.collect``."""
        (run,) = self.cluster.collect([self.id], **options)
        return run


def list_runs(
    where: _Names = (),
    *,
    sort: str | None = None,
    reverse: bool = False,
    since: str | None = None,
    tags: _Names = (),
    sweep: str | None = None,
    tasks: bool = False,
    folders: _Paths = (),
    everywhere: bool = False,
    cluster: str | None = None,
    report: LineReporter = _ignore,
) -> list[Row]:
    """Collected runs, newest first, as `runs list` has them; of a ``sweep`` its tasks, the best first."""
    if sweep is not None:
        if where or since or tags or tasks or folders or everywhere or cluster or reverse:
            raise UsageError(
                "sweep= names one sweep",
                code="options-exclusive",
                fix="leave out what chooses among runs, and reverse=",
            )
        return ranked(named_run(sweep), sort)[0]
    screen = _Silent(report)
    return cli_runs.selected(
        screen,
        cli_runs.folders_of(screen, [*map(Path, _several(folders))], everywhere=everywhere),
        where=_several(where),
        sort=sort,
        reverse=reverse,
        since=since,
        tags=_several(tags),
        tasks=tasks,
        cluster=cluster,
    )[0]


def report(runs: Row | Sequence[Row]) -> Report:
    """The report of a run, a sweep, or several runs in comparison.

    It has ``as_html()``, ``as_markdown()`` and ``as_dict()``.

    Raises:
        UsageError: the tasks of a sweep have no metric that ranks them.
    """
    return report_of([runs] if isinstance(runs, Row) else runs)
