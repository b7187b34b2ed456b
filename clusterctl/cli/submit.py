"""The command submit, which reads, prepares and submits jobs, and follows them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, cast

from clusterctl.cli.messages import Notify, telling
from clusterctl.cli.options import (
    Words,
    argument,
    flag,
    job_flags,
    offered,
    option,
    run_names,
    takes,
)
from clusterctl.cli.output import ENDINGS, Screen
from clusterctl.cli.stdin_script import script_of_stdin
from clusterctl.cli.waiting import Timeout, follow_job, timeout_of, wait_for
from clusterctl.errors import (
    ClusterctlError,
    Notice,
    UsageError,
    excluded,
    marking_side_effects,
    printable,
    unaccompanied,
)
from clusterctl.jobs.bundled import (
    ChosenModel,
    bundled_job_with_help,
    help_of,
    reject_invalid_arguments,
    run_on_this_machine,
)
from clusterctl.jobs.first import (
    FirstStartedJob,
    JobPlace,
    new_first,
    places_of,
    reject_unfit,
    submit_first,
    wait_for_first,
)
from clusterctl.jobs.messages import chosen_receivers
from clusterctl.jobs.plan import SubmitPlan, listed
from clusterctl.jobs.prepare import (
    Preparer,
    Submission,
    read_jobs,
    submit_prepared,
)
from clusterctl.jobs.submit import PreparedJob, SubmittedJob, Submitter
from clusterctl.jobs.watch import LogChunk
from clusterctl.scheduler.claims import WAIT_S, FirstGroup
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.session import Session, open_session
from clusterctl.spec.job import JobSpec
from clusterctl.spec.job_options import OPTIONS, options_set
from clusterctl.spec.names import LocalValue, Topic
from clusterctl.spec.program import BUNDLED_JOBS, MODULE_FLAG, Weights
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.run_names import full_name
from clusterctl.state.workspace import clusters_up
from clusterctl.util import formatting
from clusterctl.util.numbers import counted
from clusterctl.util.progress import SILENT
from clusterctl.util.receivers import Receiver

# A job as `-o json` shows it.
JobRow = dict[str, Any]
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})
# The name of the job for a script on stdin.
STDIN: Final = "-"
_PROGRAMS: Final = (".py", ".sh", ".bash", ".yaml", ".yml")

DryRun = Annotated[
    bool,
    option(
        "Print the script, and submit nothing. Also tells the most that the job can use.",
        "--dry-run",
        topic=Topic.WATCH,
        is_usual=True,
    ),
]
Follow = Annotated[
    bool,
    option(
        "Show the output until the job has ended.", "--follow", topic=Topic.WATCH, is_usual=True
    ),
]

Places = Annotated[
    str | None,
    option(
        "Submit to partitions (P), accounts (P@ACCOUNT) or clusters (C, C/P), or to the best "
        "places that `where` finds (best:3), and keep the job that starts first.",
        metavar="PLACE,PLACE...",
        topic=Topic.PLACE,
    ),
]

SCRIPT_FLAGS: Final[Mapping[str, Any]] = {
    "run_module": flag(
        str,
        "Run a module, as `python -m` does.",
        "-m",
        metavar="MODULE",
        topic=Topic.PROGRAM,
        is_usual=True,
    ),
    "set_": flag(
        list[str],
        "Set any key of a job file. Such as chain=7d or scaling.repeats=2; a list gets one more "
        "entry. Repeatable.",
        "--set",
        metavar="KEY=VALUE",
        topic=Topic.MORE,
        is_usual=True,
    ),
}


def jobs_to_submit(_: object, incomplete: str) -> list[str]:
    """Complete names of bundled jobs, and of scripts and job files in the current folder."""
    names: list[str] = []
    with suppress(OSError):
        names = [path.name for path in Path().iterdir()]
    return offered(
        (*BUNDLED_JOBS, *sorted(name for name in names if name.endswith(_PROGRAMS))), incomplete
    )


Target = Annotated[
    str,
    argument(
        "train, eval, sample, predict, export, bench, gemm, allreduce, probe, your own script, "
        "or a job file (.yaml).",
        metavar="JOB",
        tab=jobs_to_submit,
        local=LocalValue.NAME,
    ),
]
TrainedRun = Annotated[
    str | None,
    option(
        "For eval, sample, predict and export: the trained run, by folder, by name in ./runs, "
        "or by job ID.",
        tab=run_names,
        local=LocalValue.NAME,
        topic=Topic.BUNDLED,
    ),
]


@takes({**job_flags(option for option in OPTIONS.values() if option.in_submit), **SCRIPT_FLAGS})
def submit(
    screen: Screen,
    target: Target = "",
    args: Annotated[Words, argument("Arguments of the program, after --.")] = None,
    variant: Annotated[
        Words, option("Submit only this variant of the job file. Repeatable.", topic=Topic.MANY)
    ] = None,
    run: TrainedRun = None,
    weights: Annotated[
        Weights,
        option(
            "With --run: use the weights of the best evaluation, or of the end of training.",
            topic=Topic.BUNDLED,
        ),
    ] = Weights.BEST,
    local: Annotated[
        bool,
        option(
            "With --run: run on this machine, without a cluster. Needs the extra `local`.",
            topic=Topic.BUNDLED,
        ),
    ] = False,
    dry_run: DryRun = False,
    wait: Annotated[
        bool, option("Wait until the job has ended.", topic=Topic.WATCH, is_usual=True)
    ] = False,
    follow: Follow = False,
    timeout: Timeout = None,
    first: Places = None,
    notify: Notify = None,
    parsable: Annotated[
        bool,
        option("Print only the IDs of the jobs, each on a line.", "--parsable", topic=Topic.WATCH),
    ] = False,
    **given: object,
) -> None:
    """Submit a bundled job, your own script, or a job file.

    Arguments after -- are passed to the program. The JOB - is a script that is read from stdin.
    """
    if parsable:
        _reject_beside_parsable(
            {
                "-o json": screen.json,
                "--dry-run": dry_run,
                "--local": local,
                "--first": first is not None,
                "--wait": wait,
                "--follow": follow,
            }
        )
    if target == STDIN:
        target = script_of_stdin()
    jobs = read_jobs(*job_and_options(target, args or [], given), variant or ())
    if program := bundled_job_with_help(jobs):
        text = help_of(program)
        screen.document({"help": text}, text)
        return
    model = ChosenModel(run, weights) if run is not None else None
    if first is not None:
        _reject_beside_first(jobs, {"--partition": "partition" in given, "--local": local})
        if dry_run:
            raise UsageError(
                "--dry-run can't tell which job of --first will run",
                about="first-not-foreseen",
                why="each place gets its own job, and the one that starts first runs",
                fix="look at each place by itself: `clusterctl submit JOB --dry-run`, with "
                "--cluster, --partition and --account of the place; `clusterctl where JOB` shows the places "
                "and when the job would start there",
            )
    if local and dry_run:
        raise excluded("--local", "--dry-run")
    if local:
        _run_locally(screen, jobs, model, given)
        return
    reject_invalid_arguments(jobs, model)
    watching = WatchOptions.of(jobs, wait=wait, follow=follow, timeout=timeout, notify=notify or ())
    submission = Submission.of(jobs, model, chosen=screen.chosen())
    if first is not None:
        _submit_first(screen, submission, first, watching)
        return
    if dry_run:
        show_plan(screen, plan_of(screen, submission))
        return
    with telling_of_no_job(screen), open_session(screen.chosen()) as session:
        prepared = prepare(screen, session, submission)
        rows = submit_and_note(screen, session, prepared)
        if parsable:
            screen.result({}, *(row["job_id"] for row in rows))
            return
        show_or_watch(screen, session, rows, jobs, watching)


def _reject_beside_parsable(flags: Mapping[str, bool]) -> None:
    """Raise UsageError for flags (flag -> whether given) whose answer is more than an ID."""
    for flag_name, is_given in flags.items():
        if is_given:
            raise excluded("--parsable", flag_name)


def _reject_beside_first(jobs: Sequence[JobSpec], flags: Mapping[str, bool]) -> None:
    """Raise UsageError for flags (flag -> whether given) and jobs that --first does not allow."""
    for flag_name, is_given in flags.items():
        if is_given:
            raise excluded("--first", flag_name)
    if len(jobs) > 1:
        raise UsageError(
            f"--first needs a single job, but the job file has {len(jobs)}",
            about="first-one-job",
            fix="choose a single job with --variant",
        )


def _submit_first(
    screen: Screen, submission: Submission, text: str, watching: WatchOptions | None
) -> None:
    """Submit a job to several places. Show, and follow if asked for, the job that starts first."""
    from clusterctl.cli.ranking import BEST, best_places

    chosen = screen.chosen()
    (request,) = submission.requests
    job = request.job
    found: tuple[JobPlace, ...] = ()
    if best := BEST.fullmatch(text):
        found = best_places(screen, request, int(best[1]))
        screen.note(f"--first {','.join(place.shown for place in found)}")
        chosen = ChosenCluster(name=found[0].cluster, note=chosen.note)
    with ExitStack() as stack:
        session = stack.enter_context(open_session(chosen))
        places = found or places_of(text, session.inventory, clusters_up())
        sessions = {session.inventory.cluster: session}
        for cluster in {place.cluster for place in places} - {*sessions}:
            other = ChosenCluster(name=cluster, note=chosen.note)
            sessions[cluster] = stack.enter_context(open_session(other))
        sessions = {place.cluster: sessions[place.cluster] for place in places}
        for session in sessions.values():
            reject_unfit(session, job)
        prepared = []
        for place in places:
            of_place = replace(submission, requests=(place.of(request),))
            (ready,) = prepare(screen, sessions[place.cluster], of_place)
            prepared.append((place.cluster, ready))
        first = new_first([place.cluster for place in places])
        with screen.transfers() as progress:
            submitters = {
                name: Submitter(session, screen.note, progress)
                for name, session in sessions.items()
            }
            rows: list[JobRow] = []
            submissions = submit_first(submitters, prepared, first)
            for place, (_, submitted) in zip(places, submissions, strict=True):
                rows.append({**row_of(submitted), **asdict(place)})
                screen.partial_answer = answer_of(rows)
                screen.note(f"submitted job {submitted.job_id} to {place.shown}")
        winner = wait_first(screen, [*sessions.values()], first, watching)
        for cluster, job_id in winner.not_cancelled:
            text = (
                f"note: job {job_id} is not cancelled yet, because cluster {cluster} can't be "
                "reached"
            )
            screen.note(
                f"{text}; `clusterctl jobs --cluster {cluster}` cancels it; it does not run your "
                "program"
            )
        key = (winner.session.inventory.cluster, winner.entry.job_id)
        kept = [row for row in rows if (row["cluster"], row["job_id"]) == key]
        keys = ("cluster", "partition", "account", "job_id")
        kept[0]["cancelled"] = [{key: row[key] for key in keys} for row in rows if row not in kept]
        show_or_watch(screen, winner.session, kept, [job], watching)


def wait_first(
    screen: Screen, sessions: Sequence[Session], first: FirstGroup, watching: WatchOptions | None
) -> FirstStartedJob:
    try:
        with screen.working("waiting for the first job to start"):
            return wait_for_first(sessions, first, watching.timeout_s if watching else None)
    except ENDINGS:
        text = "detached; the first job that starts runs; `clusterctl jobs` cancels the other jobs"
        if first.is_across:
            minutes = WAIT_S // 60
            text = (
                f"detached; a job that starts waits {minutes} minutes for `clusterctl jobs` to "
                "choose it"
            )
        screen.note(Notice("first-detached", text))
        raise


def job_and_options(
    target: str, args: list[str], given: Mapping[str, object]
) -> tuple[str, Mapping[str, object]]:
    """Return the job that the user named, and option of a job -> value. given: all options."""
    options = dict(given)
    module = options.pop("run_module", None)
    entries = cast(Sequence[str], options.pop("set_", ()))
    if module is not None:
        # Without JOB, the first argument of the program takes its place.
        args = [*filter(None, [target]), *args]
        target = f"{MODULE_FLAG}{module}"
    return target, {**({"args": args} if args else {}), **options_set(entries, options)}


@dataclass(frozen=True, slots=True)
class WatchOptions:
    """The options --wait, --follow, --timeout and --notify."""

    follow: bool
    timeout_s: float | None
    receivers: tuple[Receiver, ...] = ()

    @classmethod
    def of(
        cls,
        jobs: Sequence[JobSpec],
        *,
        wait: bool,
        follow: bool,
        timeout: str | None,
        notify: Sequence[str] = (),
    ) -> WatchOptions | None:
        """Check the options of a command. Return ``None`` if they don't ask to wait for the jobs.

        Raises:
            UsageError: the options contradict each other, or a value is wrong.
            MachineError: see ``chosen_receivers``.
        """
        timeout_s = timeout_of(timeout)
        if timeout_s is not None and not (wait or follow):
            raise unaccompanied("--timeout", "--wait or --follow")
        if notify and not (wait or follow):
            raise unaccompanied("--notify", "--wait or --follow")
        if follow and len(jobs) > 1:
            raise UsageError(
                f"--follow needs a single job, but the job file has {len(jobs)}",
                about="follow-one-job",
                fix="use --wait, or choose a single job with --variant",
            )
        if not (wait or follow):
            return None
        return cls(follow, timeout_s, chosen_receivers(notify))


def preparer(screen: Screen) -> Preparer:
    """Return a Preparer, which shows notes on the screen and, with -v, pip's output."""
    return Preparer(screen.note, screen.note if screen.verbose else SILENT.note)


def prepare(screen: Screen, session: Session, submission: Submission) -> tuple[PreparedJob, ...]:
    """Prepare jobs for a cluster."""
    with screen.working("preparing the job"):
        return preparer(screen).prepare(session, submission)


def plan_of(screen: Screen, submission: Submission) -> SubmitPlan:
    """Return the plan of a submission. Nothing is sent."""
    # A slow import, which only --dry-run needs.
    from clusterctl.state.chosen_spec import spec_of_existing

    spec = spec_of_existing(screen.chosen())
    with screen.working("preparing the job"):
        return preparer(screen).plan(submission, spec)


def show_plan(screen: Screen, plan: SubmitPlan, more: Mapping[str, Any] = NOTHING) -> None:
    """Print the batch scripts of jobs, with a heading for each script if there are several. Note
    the files that `submit` would send, and the most that the jobs can use.

    more: more fields of the JSON answer for each job.
    """
    rows: list[JobRow] = []
    jobs = plan.jobs
    for job in jobs:
        source = None
        if job.source:
            rows_of_files = listed(job.source)
            source = {
                "files": len(job.source.files),
                "bytes": job.source.bytes,
                "folder": str(job.source.folder),
                "listed": [asdict(row) for row in rows_of_files],
            }
            count = counted(len(job.source.files), "file")
            size = formatting.size(job.source.bytes)
            name = job.job.name
            screen.note(
                f"job {name} would send {count} ({size}) from {job.source.folder}",
                *(
                    f"  {formatting.size(row.bytes):>9}  {printable(row.path)}"
                    + (f" ({row.files} more)" if row.path.endswith("/") else "")
                    for row in rows_of_files
                ),
            )
        rows.append({"name": job.job.name, "script": job.script, "source": source, **more})
    screen.note(str(plan.at_most))
    sections = [f"### {job.job.name}\n{job.script}\n" for job in jobs]
    text = "".join(sections) if len(jobs) > 1 else jobs[0].script
    screen.document({**answer_of(rows), **plan.answer}, text)


def submit_and_note(
    screen: Screen, session: Session, jobs: Sequence[PreparedJob], more: Mapping[str, Any] = NOTHING
) -> list[JobRow]:
    """Submit jobs. Return a dict per job for JSON, which shows submitted jobs even after an error.

    more: more fields of each dict.
    """
    rows: list[JobRow] = []
    try:
        with screen.transfers() as progress:
            for submitted in submit_prepared(Submitter(session, screen.note, progress), jobs):
                if submitted.source is not None:
                    screen.note(f"job {submitted.name}: {submitted.source.summary}")
                rows.append({**row_of(submitted), **more})
                screen.partial_answer = answer_of(rows)
    except ClusterctlError:
        for row in rows:
            job_id = row["job_id"]
            cancel = f"`clusterctl cancel {job_id}` cancels it"
            screen.note(f"submitted job {job_id} ({row['name']}) before the error; {cancel}")
        raise
    return rows


@contextmanager
def telling_of_no_job(screen: Screen) -> Iterator[None]:
    """If an error ends the `with` block, and it is known that no job was submitted, let the JSON
    answer have an empty list of jobs.
    """
    try:
        yield
    except ClusterctlError as exc:
        if not exc.had_side_effects:
            screen.partial_answer.setdefault("jobs", [])
        raise


def row_of(submitted: SubmittedJob) -> JobRow:
    """Return a submitted job as `-o json` shows it. `--dry-run` shows its script."""
    row = asdict(submitted)
    del row["token"], row["script"]
    return {"dir": row.pop("remote_dir"), **row}


def show_or_watch(
    screen: Screen,
    session: Session,
    rows: Sequence[JobRow],
    jobs: Sequence[JobSpec],
    watching: WatchOptions | None,
) -> None:
    """Show submitted jobs, or wait for them and show how they ended. rows: a dict per job."""
    if watching is None:
        show_submitted(screen, rows, jobs)
    elif ends := watch_jobs(screen, session, rows, jobs, watching):
        lines = [end.line for end in ends]
        if not rows[-1].keys() & {"sweep", "scaling"}:
            lines[-1] += "; `clusterctl collect` copies its run here"
        screen.result(answer_of(rows), *lines)


def show_submitted(screen: Screen, rows: Sequence[JobRow], jobs: Sequence[JobSpec]) -> None:
    *lines, last = (f"submitted job {row['job_id']} ({row['name']})" for row in rows)
    for name in dict.fromkeys(job.name for job in jobs if job.scaling):
        text = (
            "the jobs run one after the other. Once they have ended, run `clusterctl collect`, then"
        )
        screen.note(f"{name}: {text} `clusterctl runs show {name}` for the table")
    screen.result(
        answer_of(rows), *lines, f"{last}; follow it with `clusterctl logs {rows[0]['job_id']} -f`"
    )


def watch_jobs(
    screen: Screen,
    session: Session,
    rows: Sequence[JobRow],
    jobs: Sequence[JobSpec],
    watching: WatchOptions,
) -> Sequence[Ending]:
    """Wait for submitted jobs, or follow a single job. Return how they ended; () if the job's output
    was shown.

    rows: a dict per job, as `-o json` shows it. How the job ended is added, and for a sweep its
        ranking, and to the last job of a scaling its table.

    Raises:
        JobFailedError, JobCancelledError: a job has not completed.
    """
    for row in rows:
        screen.note(f"submitted job {row['job_id']} ({row['name']})")
    ids = [row["job_id"] for row in rows]
    timeout_s = watching.timeout_s
    with marking_side_effects(), telling(screen, watching.receivers, submitted=True) as told:
        if watching.follow and not screen.json:
            with screen.logs() as show:
                follow_job(screen, session, ids[0], timeout_s, show=show, telling=told)
            return ()
        waited = wait_for(screen, session, ids, timeout_s, told)
        ends = [*waited.ends()]
        for row, end in zip(rows, ends, strict=True):
            # Jobs that were not seen before the wait timed out have no name.
            row.update({**end.as_dict(), "name": row["name"]})
        if waited.timeout is None and any(job.sweep or job.scaling for job in jobs):
            # A slow import, which most jobs do not need.
            from clusterctl.cli.runs import show_tables

            show_tables(screen, session, rows, jobs, waited.jobs)
        screen.partial_answer = answer_of(rows)
        waited.raise_errors()
    return ends


def answer_of(rows: Sequence[JobRow]) -> dict[str, Any]:
    """Return the JSON answer: ``rows`` (a dict per job) as ``jobs``, and a single job's keys."""
    return {**(rows[0] if len(rows) == 1 else {}), "jobs": [dict(row) for row in rows]}


def _run_locally(
    screen: Screen, jobs: Sequence[JobSpec], model: ChosenModel | None, given: Mapping[str, object]
) -> None:
    if model is None:
        raise unaccompanied("--local", "--run RUN")
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise excluded("--local", flags)
    reject_invalid_arguments(jobs, model)
    (job,) = jobs
    model = replace(model, run=full_name(model.run, screen.chosen()))
    if not screen.json:
        with screen.logs() as show, closing(run_on_this_machine(job, model)) as output:
            for data in output:
                show(LogChunk("stdout", None, data))
        return
    printed = b"".join(run_on_this_machine(job, model, as_json=True))
    try:
        answer = json.loads(printed)
    except ValueError as exc:
        message = f"the bundled job {job.name} did not print JSON"
        fix = "remove -o json"
        raise UsageError(message, about="output", fix=fix) from exc
    screen.result(answer)
