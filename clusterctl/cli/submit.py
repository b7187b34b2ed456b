"""submit: the flags that describe a job, and what becomes of it."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Protocol

import typer

from clusterctl.cli.options import Options, jobs_to_submit, launchers, partitions, run_names
from clusterctl.cli.output import Screen, showing_progress
from clusterctl.errors import ClusterctlError, CollectError, Notice, UsageError
from clusterctl.jobs.arguments import help_of, help_wanted, reject_wrong_arguments
from clusterctl.scheduler.base import worst
from clusterctl.scheduler.session import open_session
from clusterctl.spec.job import MODEL_JOBS, JobSpec, Weights, is_job_file, job_spec
from clusterctl.state.chosen_spec import spec_of_existing

if TYPE_CHECKING:
    from clusterctl.jobs.replay import Replay
    from clusterctl.jobs.source import Source
    from clusterctl.jobs.trained import ChosenModel
    from clusterctl.scheduler.script import Environment
    from clusterctl.scheduler.session import Session
    from clusterctl.spec.distributions import Distribution
    from clusterctl.spec.job_options import JobOptions
    from clusterctl.spec.models import ClusterSpec
    from clusterctl.state.brief import SpecBrief
    from clusterctl.state.submissions import JobEntry

_Row = dict[str, Any]  # of one job, as `-o json` shows it
DryRun = Annotated[bool, typer.Option("--dry-run", help="Print the sbatch script; submit nothing.")]
Follow = Annotated[bool, typer.Option("--follow", help="Show its output until it has ended.")]
Timeout = Annotated[str | None, typer.Option(help="Longest wait, such as 10m; the job goes on after it.")]


def _flag(kind: Any, text: str, *names: str, **settings: Any) -> Any:
    """An option that is None unless it is given."""
    return Annotated[kind | None, typer.Option(*names, help=text, **settings)]


# Each is a field of JobOptions, which says what it may be.
JOB_FLAGS: Final[Mapping[str, Any]] = {
    "nodes": _flag(int, "Nodes. Default: 1.", "--nodes", "-N"),
    "tasks_per_node": _flag(int, "Tasks (ranks) per node. Default: 1; bundled jobs: one per GPU."),
    "cpus": _flag(int, "CPU cores per task."),
    "gpus": _flag(int, "GPUs per node. Default for bundled jobs: all; probe, export: none."),
    "mem": _flag(str, "Memory per node, such as 4GiB."),
    "time": _flag(str, "Time limit, such as 30m or 1:30:00."),
    "name": _flag(str, "Job name. Default: the job's or the script's."),
    "partition": _flag(str, "Partition. Default: the first.", "--partition", "-p", autocompletion=partitions),
    "account": _flag(str, "Slurm account.", "--account", "-A"),
    "qos": _flag(str, "Quality of service.", "--qos", "-q"),
    "constraint": _flag(str, "Node features.", "--constraint", "-C"),
    "array": _flag(str, "Array of jobs, such as 1-10%2.", "--array", "-a"),
    "sweep": _flag(
        list[str],
        "An array whose tasks try all values of an option of the program. Repeatable: all combinations.",
        metavar="KEY=V,V|A..B",
    ),
    "signal": _flag(str, "Signal sent before the time limit, such as USR1@120 (seconds)."),
    "requeue": _flag(bool, "Requeue, in the same folder, when the program exits with 75.", "--requeue"),
    "launcher": _flag(
        str, "Launcher of the ranks: srun (PMIx, the default), mpirun or torchrun.", autocompletion=launchers
    ),
    "include": _flag(
        list[str], "Also copy this, even if .gitignore excludes it. Repeatable.", metavar="PATTERN"
    ),
    "exclude": _flag(list[str], "Do not copy this from the script's folder. Repeatable.", metavar="PATTERN"),
    "folder": _flag(bool, "Copy the script's folder to the cluster. Default: yes.", "--folder/--no-folder"),
    "outputs": _flag(list[str], "Pattern of files for `collect`, such as 'results/**'. Repeatable."),
    "env": _flag(list[str], "Environment variable K=V; K alone takes its value from here. Repeatable."),
    "requirements": _flag(Path, "Requirements file for the program's Python environment."),
    "container": _flag(str, "Run in this Apptainer image (.sif), on the cluster or here."),
    "tag": _flag(list[str], "A word to find the run by, see `clusterctl runs`. Repeatable."),
    "note": _flag(str, "A remark about the run."),
}
# Slurm's names of flags that mean the same; the help does not list them. Those of `submit` are in JOB_FLAGS.
_SLURMS: Final[Mapping[str, Any]] = {
    "slurms_tasks_per_node": _flag(int, "--tasks-per-node.", "--ntasks-per-node", hidden=True),
    "slurms_cpus": _flag(int, "--cpus.", "--cpus-per-task", "-c", hidden=True),
    "slurms_gpus": _flag(int, "--gpus.", "--gpus-per-node", hidden=True),
    "slurms_time": _flag(str, "--time.", "-t", hidden=True),
    "slurms_name": _flag(str, "--name.", "--job-name", "-J", hidden=True),
}
# cli/run.py reads it: verb -> its further options, which its function gets as **flags.
FLAGS: Final = {"submit": {**JOB_FLAGS, **_SLURMS}}


def submit(
    screen: Screen,
    options: Options,
    target: Annotated[
        str,
        typer.Argument(
            metavar="JOB",
            help="train, eval, sample, predict, export, bench, gemm, allreduce, probe, your own script, "
            "or a job file (.yaml).",
            autocompletion=jobs_to_submit,
        ),
    ],
    args: Annotated[list[str] | None, typer.Argument(help="Arguments of the program, after --.")] = None,
    variant: Annotated[
        list[str] | None, typer.Option(help="Only this variant of the job file. Repeatable.")
    ] = None,
    run: Annotated[
        str | None,
        typer.Option(
            help="Of eval, sample, predict, export: a trained run's folder, its name below ./runs, or its "
            "job's id.",
            autocompletion=run_names,
        ),
    ] = None,
    weights: Annotated[
        Weights, typer.Option(help="With --run: the weights at the best evaluation, or at the end.")
    ] = Weights.BEST,
    local: Annotated[
        bool, typer.Option("--local", help="With --run: compute on this machine, without a cluster.")
    ] = False,
    dry_run: DryRun = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    follow: Follow = False,
    timeout: Timeout = None,
    **flags: object,
) -> None:
    """Submit a bundled job, your own script, or a job file.

    Arguments after -- are passed to the program.
    """
    said = {field.removeprefix("slurms_"): value for field, value in flags.items() if value not in (None, [])}
    given = {"args": args, **said} if args else said
    chosen = None
    if run is not None:
        from clusterctl.jobs.trained import ChosenModel

        chosen = ChosenModel(run, weights)
    wanted = _wanted(screen, target, given, variant or [])
    if program := help_wanted(wanted):
        text = help_of(program)
        screen.document({"help": text}, text)
        return
    if local:
        _use_here(screen, options, wanted, chosen, given)
        return
    submit_all(
        screen, options, Wanted(wanted, chosen), dry_run=dry_run, wait=wait, follow=follow, timeout=timeout
    )


@dataclass(frozen=True, slots=True)
class Wanted:
    """What is to be submitted. ``chosen`` is the model that the one job uses; ``replay``: it is one."""

    jobs: Sequence[JobSpec]
    chosen: ChosenModel | None = None
    replay: Replaying | None = None


class Replaying(Protocol):
    """A replay, and what is to be said of it."""

    @property
    def replay(self) -> Replay: ...

    def before(self, spec: ClusterSpec, job: JobSpec, session: Session | None = None) -> _Row:
        """Say what differs from the original, before anything is sent; what the answer has of it."""

    def after(self, session: Session, job_id: str) -> tuple[_Row, list[str]]:
        """What is to be said of a job that completed: in the answer, and for people."""


def submit_all(
    screen: Screen,
    options: Options,
    wanted: Wanted,
    *,
    dry_run: bool,
    wait: bool,
    follow: bool,
    timeout: str | None,
) -> list[_Row]:
    """Submit jobs, or show their scripts; wait for them as was said, and answer. The jobs, each a row."""
    _reject_wrong(wanted.jobs, wanted.chosen)
    timeout_s = None
    if timeout is not None:
        from clusterctl.cli.job import timeout_of

        timeout_s = timeout_of(timeout)
    _refuse_contradictions(wanted.jobs, follow=follow, waits=wait or follow, timeout_s=timeout_s)
    if dry_run:
        _dry_run(screen, options, wanted)
        return []
    with open_session(options.chosen(screen.note)) as session:
        rows = _submitted(screen, options, session, wanted)
        ids = [row["job_id"] for row in rows]
        if not (wait or follow):
            *lines, last = (f"submitted job {row['job_id']} ({row['name']})" for row in rows)
            screen.result(_answer(rows), *lines, f"{last}; see `clusterctl logs {ids[0]} -f`")
            return rows
        from clusterctl.cli.job import follow_job

        for row in rows:
            screen.note(f"submitted job {row['job_id']} ({row['name']})")
        with _once(rows):
            if follow and not screen.json:
                with screen.logs() as show:
                    follow_job(screen, session, ids[0], timeout_s, show=show)
                if wanted.replay is not None:
                    screen.note(*wanted.replay.after(session, ids[0])[1])
            else:
                _await(screen, session, rows, timeout_s, wanted)
    return rows


def _wanted(
    screen: Screen, target: str, flags: Mapping[str, object], variants: Sequence[str]
) -> tuple[JobSpec, ...]:
    if is_job_file(target):
        from clusterctl.spec.job_file import jobs_of_file

        jobs = jobs_of_file(Path(target), flags, variants)
        others = {field: value for field, value in flags.items() if field != "args"}
        for job in jobs_of_file(Path(target), others, variants) if "args" in flags else ():
            if job.args:
                replaced = f"note: {job.name}: the file's args are replaced: {shlex.join(job.args)}"
                screen.note(Notice("args-replaced", replaced))
        return jobs
    if variants:
        raise UsageError(
            f"{target} has no variants",
            code="no-variants",
            why="only a job file has",
            fix="leave out --variant",
        )
    return (job_spec(target, flags),)


def _reject_wrong(wanted: Sequence[JobSpec], chosen: ChosenModel | None) -> None:
    """Refuse jobs without the model that they need, and arguments that a bundled job's program refuses."""
    before: Sequence[str] = ()
    if chosen or any(job.bundled in MODEL_JOBS for job in wanted):
        from clusterctl.jobs.trained import MODEL, model_arguments, reject_unless_fitting

        reject_unless_fitting(wanted, chosen)
        before = model_arguments(MODEL, chosen) if chosen else ()
    reject_wrong_arguments(wanted, before)


def _refuse_contradictions(
    wanted: Sequence[JobSpec], *, follow: bool, waits: bool, timeout_s: float | None
) -> None:
    if timeout_s is not None and not waits:
        raise UsageError(
            "--timeout bounds a wait",
            code="option-needs-option",
            fix="say --wait or --follow too; --time limits the job",
        )
    if follow and len(wanted) > 1:
        raise UsageError(
            f"--follow shows the output of one job, and these are {len(wanted)}",
            code="follow-needs-one-job",
            fix="say --wait, or choose one with --variant",
        )


def _use_here(
    screen: Screen,
    options: Options,
    wanted: Sequence[JobSpec],
    chosen: ChosenModel | None,
    given: Mapping[str, object],
) -> None:
    """Use a model on this machine, and show what it says."""
    from clusterctl.jobs.trained import folder_of_run, use_here
    from clusterctl.jobs.watch import LogChunk
    from clusterctl.state.submissions import Ledger

    if chosen is None:
        raise UsageError(
            "--local uses a trained model", code="option-needs-option", fix="say which: --run RUN"
        )
    if others := sorted(set(given) - {"args"}):
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in others)
        raise UsageError(
            f"--local starts no job, which {flags} is about",
            code="options-exclusive",
            fix="leave out one or the other",
        )
    _reject_wrong(wanted, chosen)
    (job,) = wanted
    known = (
        () if folder_of_run(chosen.run) else Ledger(options.chosen(screen.note).workspace().jobs).entries()
    )
    if screen.json:
        said = bytearray()
        use_here(job, chosen, known, said.extend, as_json=True)
        try:
            answer = json.loads(said)
        except ValueError as exc:
            raise UsageError(
                "what the program printed is no JSON", code="no-json-answer", fix="leave out -o json"
            ) from exc
        screen.result(answer)
        return
    with screen.logs() as show:
        use_here(job, chosen, known, lambda data: show(LogChunk("stdout", None, data)))


def _dry_run(screen: Screen, options: Options, wanted: Wanted) -> None:
    """Show the scripts; where they are several, each below a line with its job's name."""
    from clusterctl.scheduler.session import distribution_of_hosts, script_of
    from clusterctl.state.inventory import inventory_if_known
    from clusterctl.state.submissions import Ledger
    from clusterctl.state.workspace import Workspace
    from clusterctl.transport.tree import shown_size

    spec = spec_of_existing(options.chosen(screen.note))
    workspace = Workspace.of(spec.name)
    hosts = inventory_if_known(workspace)
    has_pmix = hosts is None or hosts.pmix
    rows: list[_Row] = []
    text = ""
    replaying, entries = wanted.replay, Ledger(workspace.jobs).entries()
    distribution = partial(distribution_of_hosts, spec, workspace)
    prepared = _prepared(screen, options, wanted, spec, distribution, entries, has_pmix=has_pmix)
    for job, source, environment in prepared:
        script = script_of(spec, job, environment)
        if source:
            size = shown_size(source.bytes)
            screen.note(f"with {job.name} go {len(source.files)} files, {size}, of {source.folder}")
        what_goes = {"files": len(source.files), "bytes": source.bytes} if source else None
        more = replaying.before(spec, job) if replaying is not None else {}
        rows.append({"name": job.name, "script": script, "source": what_goes, **more})
        text += f"### {job.name}\n{script}\n" if len(prepared) > 1 else script
    screen.document(_answer(rows), text)


def _prepared(
    screen: Screen,
    options: Options,
    wanted: Wanted,
    spec: ClusterSpec | SpecBrief,
    distribution: Callable[[], Distribution],
    entries: Sequence[JobEntry],
    session: Session | None = None,
    *,
    has_pmix: bool = True,
) -> list[tuple[JobSpec, Source | None, Environment]]:
    """The jobs with what is sent of their scripts' folders, and the environments that they ask for.

    A job that uses a model is sent with it. In a replay, all of this is as it was.
    """
    from clusterctl.jobs.source import source_of
    from clusterctl.jobs.trained import with_model
    from clusterctl.scheduler.script import reject_pmix, with_gpus, with_launcher
    from clusterctl.scheduler.session import script_of

    jobs, model = with_model(wanted.jobs, wanted.chosen, entries, session)
    for job in jobs if not has_pmix else ():
        if "launcher" in job.model_fields_set and job.launcher == "srun":
            screen.note(f"note: {job.name}: mpirun starts the ranks, for Slurm has no plugin for PMIx here")
        if note := reject_pmix(job):
            screen.note(f"note: {note}")
    jobs = [with_launcher(with_gpus(spec, job), has_pmix=has_pmix) for job in jobs]
    for job in jobs:
        script_of(spec, job)  # none is sent, nor are its packages looked for, while another can't be
    replay = wanted.replay.replay if wanted.replay is not None else None
    sources = [replay.source] if replay is not None else [source_of(job) or model for job in jobs]
    for note in dict.fromkeys(note for source in sources if source for note in source.notes):
        screen.note(f"note: {note}")
    lock = replay.lock if replay is not None else None
    environments = resolve(screen, options, spec, jobs, distribution, lock)
    return list(zip(jobs, sources, environments, strict=True))


def resolve(
    screen: Screen,
    options: Options,
    spec: ClusterSpec | SpecBrief,
    jobs: Sequence[JobOptions | JobSpec],
    distribution: Callable[[], Distribution],
    replayed: str | None = None,
) -> list[Environment]:
    """The Python environments that the spec and these jobs ask for; pip's words under -v.

    ``replayed`` is the text of a lock that takes their place, "" for no packages.
    """
    from clusterctl.jobs.environment import environment_of

    detail = screen.note if options.verbose else lambda _line: None
    with screen.working("resolving requirements"):
        return [
            environment_of(
                spec, job, distribution=distribution, report=screen.note, heard=detail, replayed=replayed
            )
            for job in jobs
        ]


def _submitted(
    screen: Screen,
    options: Options,
    session: Session,
    wanted: Wanted,
) -> list[_Row]:
    """Submit the jobs, one after the other; what is known of them is told also when something fails later."""
    from clusterctl.jobs.stage import begin

    token: str | None = begin(session, wanted.jobs[0].name)
    from clusterctl.jobs.submit import reject_files_of_here
    from clusterctl.jobs.submit import submit as submit_job

    reject_files_of_here(session, wanted.jobs, report=screen.note)
    entries, replaying = session.ledger.entries(), wanted.replay
    prepared = _prepared(
        screen,
        options,
        wanted,
        session.rules,
        lambda: session.distribution,
        entries,
        session,
        has_pmix=session.has_pmix,
    )
    more = replaying.before(session.spec, prepared[0][0], session) if replaying is not None else {}
    rows: list[_Row] = []
    with showing_progress(screen) as progress:
        for job, source, environment in prepared:
            with _once(rows):
                done = submit_job(
                    session,
                    job,
                    token=token,
                    source=source,
                    environment=environment,
                    known=replaying.replay.known if replaying is not None else {},
                    progress=progress,
                    report=screen.note,
                )
            token = None
            row = dataclasses.asdict(done)
            del row["token"]
            rows.append({"dir": row.pop("remote_dir"), **row, **more})
            screen.known = _answer(rows)
    return rows


@contextmanager
def _once(submitted: Sequence[_Row]) -> Iterator[None]:
    """What fails once a job is submitted is no reason to submit again."""
    try:
        yield
    except ClusterctlError as exc:
        exc.had_side_effects = exc.had_side_effects or bool(submitted)
        raise


def _await(
    screen: Screen, session: Session, rows: Sequence[_Row], timeout_s: float | None, wanted: Wanted
) -> None:
    """Wait for the jobs and show how they ended; raises unless all completed. Sweeps are ranked."""
    from clusterctl.cli.job import wait_for
    from clusterctl.jobs.watch import raise_unless_completed

    ended = wait_for(screen, session, [row["job_id"] for row in rows], timeout_s)
    for row, asked in zip(rows, wanted.jobs, strict=True):
        mine = [job for job in ended if job.whole_id == row["job_id"]]
        row["state"] = worst(mine).state.value
        if asked.sweep:
            row["sweep"] = _ranked(screen, session, row["job_id"])
    screen.known = _answer(rows)
    raise_unless_completed(session, ended)
    lines = [f"job {row['job_id']} {row['state']}" for row in rows]
    if not rows[-1].get("sweep"):  # else it is home
        lines[-1] += "; `clusterctl collect` brings it home"
    if wanted.replay is not None:
        more, lines = wanted.replay.after(session, rows[0]["job_id"])
        rows[0].update(more)
    screen.result(_answer(rows), *lines)


def _ranked(screen: Screen, session: Session, job_id: str) -> dict[str, Any] | None:
    """Collect a sweep and show its ranking; None where no task has a metric."""
    from clusterctl.cli.runs import ranking_of
    from clusterctl.runs.collect import collect
    from clusterctl.runs.find import Row

    try:
        (run,) = collect(session, [job_id])
        answer, lines = ranking_of(screen, Row(run))
    except (CollectError, UsageError) as exc:  # how the tasks ended is still to be shown
        screen.note(f"note: {exc.cause}")
        return None
    screen.note(*lines, "", f"job {job_id} ({run.name}) {run.state}: {run.directory}")
    return answer


def _answer(rows: Sequence[_Row]) -> dict[str, Any]:
    """All jobs under ``jobs``; one alone also as it is."""
    return {**(rows[0] if len(rows) == 1 else {}), "jobs": [dict(row) for row in rows]}
