"""submit: jobs are read, prepared and submitted, and shown as they run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final

from clusterctl.cli.job import follow_job, timeout_of, wait_for
from clusterctl.cli.options import (
    Words,
    argument,
    flag,
    jobs_to_submit,
    option,
    partitions,
    run_names,
    takes,
)
from clusterctl.cli.output import Screen
from clusterctl.errors import UsageError, excluded, unaccompanied
from clusterctl.jobs.bundled import (
    ChosenModel,
    folder_of_run,
    help_of,
    help_wanted,
    reject_wrong,
    use_here,
)
from clusterctl.jobs.submission import (
    Preparer,
    Submission,
    jobs_are_submitted,
    read_jobs,
    submit_prepared,
)
from clusterctl.jobs.submit import PreparedJob, Submitter
from clusterctl.jobs.watch import LogChunk, raise_unless_completed
from clusterctl.scheduler.base import worst
from clusterctl.scheduler.session import Session, open_session
from clusterctl.spec.job import JobSpec, Weights
from clusterctl.state.submissions import Ledger
from clusterctl.transport.tree import shown_size
from clusterctl.util.progress import SILENT

if TYPE_CHECKING:
    from clusterctl.spec.models import ClusterSpec

JobRow = dict[str, Any]  # of one job, as `-o json` shows it
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


DryRun = Annotated[bool, option("Print the sbatch script; submit nothing.", "--dry-run")]
Follow = Annotated[bool, option("Show its output until it has ended.", "--follow")]
Timeout = Annotated[str | None, option("Longest wait, such as 10m; the job goes on after it.")]


# Each is a field of JobOptions, which says what it may be.
JOB_FLAGS: Final[Mapping[str, Any]] = {
    "nodes": flag(int, "Nodes. Default: 1.", "--nodes", "-N"),
    "tasks_per_node": flag(int, "Tasks (ranks) per node. Default: 1; bundled jobs: one per GPU."),
    "cpus": flag(int, "CPU cores per task."),
    "gpus": flag(int, "GPUs per node. Default for bundled jobs: all; probe, export: none."),
    "mem": flag(str, "Memory per node, such as 4GiB."),
    "time": flag(str, "Time limit, such as 30m or 1:30:00."),
    "name": flag(str, "Job name. Default: the job's or the script's."),
    "partition": flag(str, "Partition. Default: the first.", "--partition", "-p", tab=partitions),
    "account": flag(str, "Slurm account.", "--account", "-A"),
    "qos": flag(str, "Quality of service.", "--qos", "-q"),
    "constraint": flag(str, "Node features.", "--constraint", "-C"),
    "array": flag(str, "Array of jobs, such as 1-10%2.", "--array", "-a"),
    "sweep": flag(
        list[str],
        "An array whose tasks try all values of an option of the program. Repeatable: all combinations.",
        metavar="KEY=V,V|A..B",
    ),
    "signal": flag(str, "Signal sent before the time limit, such as USR1@120 (seconds)."),
    "requeue": flag(bool, "Requeue, in the same folder, when the program exits with 75.", "--requeue"),
    "launcher": flag(
        str,
        "Launcher of the ranks: srun (PMIx, the default), mpirun or torchrun.",
        tab=lambda: ["srun", "mpirun", "torchrun"],
    ),
    "include": flag(
        list[str], "Also copy this, even if .gitignore excludes it. Repeatable.", metavar="PATTERN"
    ),
    "exclude": flag(list[str], "Do not copy this from the script's folder. Repeatable.", metavar="PATTERN"),
    "folder": flag(bool, "Copy the script's folder to the cluster. Default: yes.", "--folder/--no-folder"),
    "outputs": flag(list[str], "Pattern of files for `collect`, such as 'results/**'. Repeatable."),
    "env": flag(list[str], "Environment variable K=V; K alone takes its value from here. Repeatable."),
    "requirements": flag(Path, "Requirements file for the program's Python environment."),
    "container": flag(str, "Run in this Apptainer image (.sif), on the cluster or here."),
    "tag": flag(list[str], "A word to find the run by, see `clusterctl runs`. Repeatable."),
    "note": flag(str, "A remark about the run."),
}
# Slurm's names of some of these options. The help does not list them.
SLURM_FLAGS: Final[Mapping[str, Any]] = {
    "tasks_per_node": flag(int, "--tasks-per-node.", "--ntasks-per-node", hidden=True),
    "cpus": flag(int, "--cpus.", "--cpus-per-task", "-c", hidden=True),
    "gpus": flag(int, "--gpus.", "--gpus-per-node", hidden=True),
    "time": flag(str, "--time.", "-t", hidden=True),
    "name": flag(str, "--name.", "--job-name", "-J", hidden=True),
}


def some_flags(names: str) -> Mapping[str, Any]:
    """Return the options of these names, which are separated by spaces."""
    return {name: JOB_FLAGS[name] for name in names.split()}


Target = Annotated[
    str,
    argument(
        "train, eval, sample, predict, export, bench, gemm, allreduce, probe, your own script, "
        "or a job file (.yaml).",
        metavar="JOB",
        tab=jobs_to_submit,
    ),
]
TrainedRun = Annotated[
    str | None,
    option(
        "Of eval, sample, predict, export: a trained run's folder, its name below ./runs, or its job's id.",
        tab=run_names,
    ),
]


@takes(JOB_FLAGS, **SLURM_FLAGS)
def submit(
    screen: Screen,
    target: Target,
    args: Annotated[Words, argument("Arguments of the program, after --.")] = None,
    variant: Annotated[Words, option("Only this variant of the job file. Repeatable.")] = None,
    run: TrainedRun = None,
    weights: Annotated[
        Weights, option("With --run: the weights at the best evaluation, or at the end.")
    ] = Weights.BEST,
    local: Annotated[bool, option("With --run: compute on this machine, without a cluster.")] = False,
    dry_run: DryRun = False,
    wait: Annotated[bool, option("Wait until the job has ended.")] = False,
    follow: Follow = False,
    timeout: Timeout = None,
    **given: object,
) -> None:
    """Submit a bundled job, your own script, or a job file.

    Arguments after -- are passed to the program.
    """
    said = {"args": args, **given} if args else given
    jobs = read_jobs(target, said, variant or ())
    if program := help_wanted(jobs):
        text = help_of(program)
        screen.document({"help": text}, text)
        return
    model = ChosenModel(run, weights) if run is not None else None
    if local:
        _use_here(screen, jobs, model, given)
        return
    reject_wrong(jobs, model)
    watching = Watching.of(jobs, wait=wait, follow=follow, timeout=timeout)
    submission = Submission(jobs, model)
    if dry_run:
        # `submit` itself needs no models of specs, whose import takes longer than all else that it does.
        from clusterctl.state.chosen_spec import spec_of_existing

        show_scripts(screen, rendered(screen, submission, spec_of_existing(screen.chosen())))
        return
    with open_session(screen.chosen()) as session:
        prepared = prepare(screen, session, submission)
        rows = submit_and_note(screen, session, prepared)
        if watching is None:
            show_submitted(screen, rows)
        elif not watch_jobs(screen, session, rows, jobs, watching):
            lines = [f"job {row['job_id']} {row['state']}" for row in rows]
            if not rows[-1].get("sweep"):  # else it is home
                lines[-1] += "; `clusterctl collect` brings it home"
            screen.result(answer_of(rows), *lines)


@dataclass(frozen=True, slots=True)
class Watching:
    """The wait for submitted jobs, in which the output of one may be followed."""

    follow: bool
    timeout_s: float | None

    @classmethod
    def of(cls, jobs: Sequence[JobSpec], *, wait: bool, follow: bool, timeout: str | None) -> Watching | None:
        """Read the options of a verb that submits. None: it does not wait.

        Raises:
            UsageError: the options contradict each other, or the timeout is wrong.
        """
        timeout_s = timeout_of(timeout)
        if timeout_s is not None and not (wait or follow):
            raise unaccompanied("--timeout", "--wait or --follow")
        if follow and len(jobs) > 1:
            raise UsageError(
                f"--follow shows the output of one job, and these are {len(jobs)}",
                code="follow-needs-one-job",
                fix="say --wait, or choose one with --variant",
            )
        return cls(follow, timeout_s) if wait or follow else None


def preparer(screen: Screen) -> Preparer:
    """Return what prepares jobs and tells of it on the screen: of pip's lines only under -v."""
    return Preparer(screen.note, screen.note if screen.verbose else SILENT.note)


def prepare(screen: Screen, session: Session, submission: Submission) -> tuple[PreparedJob, ...]:
    with screen.working("preparing the job"):
        return preparer(screen).prepare(session, submission)


def rendered(screen: Screen, submission: Submission, spec: ClusterSpec) -> tuple[PreparedJob, ...]:
    """Return the scripts of jobs, and note what would be sent with each."""
    with screen.working("preparing the job"):
        jobs = preparer(screen).render(submission, spec)
    for one in jobs:
        if one.source:
            size, count = shown_size(one.source.bytes), len(one.source.files)
            screen.note(f"with {one.job.name} go {count} files, {size}, of {one.source.folder}")
    return jobs


def show_scripts(screen: Screen, jobs: Sequence[PreparedJob], more: Mapping[str, Any] = NOTHING) -> None:
    """Show scripts; several each below a line with the job's name.

    more: what else the answer has about each.
    """
    rows: list[JobRow] = []
    for one in jobs:
        source = {"files": len(one.source.files), "bytes": one.source.bytes} if one.source else None
        rows.append({"name": one.job.name, "script": one.script, "source": source, **more})
    several = [f"### {one.job.name}\n{one.script}\n" for one in jobs]
    screen.document(answer_of(rows), "".join(several) if len(jobs) > 1 else jobs[0].script)


def submit_and_note(
    screen: Screen, session: Session, jobs: Sequence[PreparedJob], more: Mapping[str, Any] = NOTHING
) -> list[JobRow]:
    """Submit jobs. The answer has those that were submitted also if a later one fails.

    more: what else the answer has about each.
    """
    rows: list[JobRow] = []
    with screen.transfers() as progress:
        for submitted in submit_prepared(Submitter(session, screen.note, progress), jobs):
            row = asdict(submitted)
            del row["token"]
            rows.append({"dir": row.pop("remote_dir"), **row, **more})
            screen.known = answer_of(rows)
    return rows


def show_submitted(screen: Screen, rows: Sequence[JobRow]) -> None:
    *lines, last = (f"submitted job {row['job_id']} ({row['name']})" for row in rows)
    screen.result(answer_of(rows), *lines, f"{last}; see `clusterctl logs {rows[0]['job_id']} -f`")


def watch_jobs(
    screen: Screen, session: Session, rows: Sequence[JobRow], jobs: Sequence[JobSpec], watching: Watching
) -> bool:
    """Wait for submitted jobs, or follow one. Return whether its output was shown, in place of an answer.

    How each job ended is added to its row, and the ranking of each sweep.

    Raises:
        JobFailedError, JobCancelledError: not all jobs have completed.
    """
    for row in rows:
        screen.note(f"submitted job {row['job_id']} ({row['name']})")
    with jobs_are_submitted():
        if watching.follow and not screen.json:
            with screen.logs() as show:
                follow_job(screen, session, rows[0]["job_id"], watching.timeout_s, show=show)
            return True
        ended = wait_for(screen, session, [row["job_id"] for row in rows], watching.timeout_s)
        for row, job in zip(rows, jobs, strict=True):
            row["state"] = worst([one for one in ended if one.whole_id == row["job_id"]]).state.value
            if job.sweep:
                # Only a sweep needs the models of runs, which take as long to import as those of specs.
                from clusterctl.cli.runs import note_ranking

                row["sweep"] = note_ranking(screen, session, row["job_id"])
        screen.known = answer_of(rows)
        raise_unless_completed(session, ended)
    return False


def answer_of(rows: Sequence[JobRow]) -> dict[str, Any]:
    """Return the answer about jobs: all under ``jobs``, and a single job also by itself."""
    return {**(rows[0] if len(rows) == 1 else {}), "jobs": [dict(row) for row in rows]}


def _use_here(
    screen: Screen,
    jobs: Sequence[JobSpec],
    model: ChosenModel | None,
    given: Mapping[str, object],
) -> None:
    if model is None:
        raise unaccompanied("--local", "--run RUN")
    if given:
        flags = ", ".join(f"--{name.replace('_', '-')}" for name in sorted(given))
        raise excluded("--local", flags)
    reject_wrong(jobs, model)
    (job,) = jobs
    is_here = folder_of_run(model.run) is not None
    known = () if is_here else Ledger(screen.chosen().workspace().jobs).entries()
    if not screen.json:
        with screen.logs() as show:
            use_here(job, model, known, lambda data: show(LogChunk("stdout", None, data)))
        return
    printed = bytearray()
    use_here(job, model, known, printed.extend, as_json=True)
    try:
        answer = json.loads(printed)
    except ValueError as exc:
        raise UsageError(
            "what the program printed is no JSON", code="no-json-answer", fix="leave out -o json"
        ) from exc
    screen.result(answer)
