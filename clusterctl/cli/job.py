"""submit, jobs, logs, cancel, collect: the verbs of a job's life."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli.options import Options, verb
from clusterctl.cli.show import Screen
from clusterctl.cli.spec import spec_of

if TYPE_CHECKING:
    from clusterctl.jobs import LogChunk, Session
    from clusterctl.records import RunRecord
    from clusterctl.slurm.models import JobInfo
    from clusterctl.workspace import Workspace

Out = Annotated[Path | None, typer.Option(help="Folder for collected runs. Default: ./runs.")]
Ids = Annotated[list[str], typer.Argument(metavar="ID...", help="Job ids, such as 12, or 12_3 of an array.")]


def submit(
    screen: Screen,
    options: Options,
    target: Annotated[str, typer.Argument(metavar="JOB", help="train, probe, or a script of yours.")],
    args: Annotated[list[str] | None, typer.Argument(help="What the program gets, after --.")] = None,
    nodes: Annotated[int | None, typer.Option("--nodes", "-N", help="Nodes. Default: 1.")] = None,
    tasks_per_node: Annotated[int | None, typer.Option(help="Ranks on each node. Default: 1.")] = None,
    cpus: Annotated[int | None, typer.Option("--cpus", help="Cores of each rank.")] = None,
    gpus: Annotated[int | None, typer.Option("--gpus", help="GPUs on each node.")] = None,
    mem: Annotated[str | None, typer.Option(help="Memory on each node, such as 4GiB.")] = None,
    time: Annotated[str | None, typer.Option(help="Time limit, such as 30m or 1:30:00.")] = None,
    name: Annotated[str | None, typer.Option(help="Job name. Default: the job's or the script's.")] = None,
    partition: Annotated[str | None, typer.Option("--partition", "-p", help="Default: the first.")] = None,
    account: Annotated[str | None, typer.Option("--account", "-A", help="Slurm account.")] = None,
    qos: Annotated[str | None, typer.Option("--qos", "-q", help="Quality of service.")] = None,
    constraint: Annotated[str | None, typer.Option("--constraint", "-C", help="Node features.")] = None,
    array: Annotated[str | None, typer.Option("--array", "-a", help="Array of jobs, such as 1-10%2.")] = None,
    launcher: Annotated[
        str | None, typer.Option(help="How ranks are started: srun (PMIx, the default) or mpirun.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the sbatch script; submit nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show its output until it has ended.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Longest wait, such as 10m; the job goes on.")] = None,
) -> None:
    """Submit a bundled job or a script of yours. What stands after -- goes to the program."""
    from clusterctl import jobs
    from clusterctl.errors import UsageError
    from clusterctl.spec import job_spec

    job = job_spec(
        target,
        args=tuple(args or ()),
        name=name,
        nodes=nodes,
        tasks_per_node=tasks_per_node,
        cpus_per_task=cpus,
        gpus=gpus,
        mem=mem,
        time=time,
        partition=partition,
        account=account,
        qos=qos,
        constraint=constraint,
        array=array,
        launcher=launcher,
    )
    timeout_s = _timeout(timeout)
    if timeout is not None and not (wait or follow):
        raise UsageError("--timeout bounds a wait", fix="say --wait or --follow too; --time limits the job")
    if dry_run:
        script = jobs.script_of(spec_of(screen, options), job)
        screen.result({"name": job.name, "script": script}, script)
        return
    with _session(screen, options) as session:
        done = jobs.submit(session, job)
        answer = {"job_id": done.job_id, "name": done.name, "script": done.script, "dir": done.remote_dir}
        screen.known = answer  # also when the job fails while we wait
        if follow and not screen.json:
            screen.note(f"submitted job {done.job_id} ({done.name})")
            _follow(screen, session, done.job_id, timeout_s)
        elif wait or follow:
            screen.note(f"submitted job {done.job_id} ({done.name})")
            ended = _wait(screen, session, [done.job_id], timeout_s)
            answer |= {"state": jobs.worst(ended).state.value}
            screen.result(answer, f"job {done.job_id} {answer['state']}; `clusterctl collect` brings it home")
        else:
            hint = f"submitted job {done.job_id} ({done.name}); see `clusterctl logs {done.job_id} -f`"
            screen.result(answer, hint)


def jobs_(
    screen: Screen,
    options: Options,
    ids: Annotated[list[str] | None, typer.Argument(metavar="[ID...]", help="Only these jobs.")] = None,
) -> None:
    """Show jobs: those that wait and run, and those that were submitted from here."""
    from clusterctl import jobs

    with _session(screen, options) as session:
        found = jobs.known_jobs(session, ids) if ids else jobs.list_jobs(session)
    text = job_table(screen, found) if found else "no jobs"
    screen.result({"jobs": [jobs.as_dict(job) for job in found]}, text)


def logs(
    screen: Screen,
    options: Options,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="Job id.")],
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the job has ended.")] = False,
) -> None:
    """Show what a job has written; its stderr goes to stderr. Ctrl-C detaches, the job goes on."""
    from clusterctl import jobs

    with _session(screen, options) as session:
        if not follow:
            jobs.logs(session, job_id, on_output=functools.partial(_pass_on, screen))
            return
        try:
            _follow(screen, session, job_id, None)
        except KeyboardInterrupt:
            return  # detaching is what was asked for


def cancel(screen: Screen, options: Options, ids: Ids) -> None:
    """Cancel jobs; an array's id stands for all its tasks."""
    from clusterctl import jobs

    with _session(screen, options) as session:
        done = jobs.cancel(session, ids)
    lines = [f"cancelled job {job.id} ({job.name})" for job in done.cancelled]
    lines += [f"job {job.id} ({job.name}) had ended already: {job.state}" for job in done.ended]
    answer = {
        "cancelled": [job.id for job in done.cancelled],
        "already_ended": [{"job_id": job.id, "state": job.state.value} for job in done.ended],
    }
    screen.result(answer, "\n".join(lines))


def collect(
    screen: Screen,
    options: Options,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help="Default: all not yet home.")
    ] = None,
    out: Out = None,
) -> None:
    """Bring runs home: logs, metrics, telemetry, accounting, each checked by its hash."""
    from clusterctl import collect as collecting

    with _session(screen, options) as session:
        runs = collecting.collect(session, ids or None, out=out or Path("runs"))
    answer = [
        {"job_id": r.job_id, "state": r.state, "dir": str(r.directory), "skipped": len(r.skipped)}
        for r in runs
    ]
    for run in runs:
        if stays := not_brought_home(run):
            screen.note(f"note: {stays}; it ends with the cluster")
    lines = [f"job {run.job_id} ({run.name}) {run.state}: {_nearby(run.directory)}" for run in runs]
    screen.result({"runs": answer}, "\n".join(lines) or "nothing to collect")


def job_table(screen: Screen, infos: Sequence[JobInfo]) -> str:
    """Jobs as `jobs` and `status` show them."""
    rows = [[j.id, j.name, j.user, j.partition, j.state.value, ",".join(j.nodes), j.reason] for j in infos]
    return screen.table(["JOB", "NAME", "USER", "PARTITION", "STATE", "NODES", "REASON"], rows)


def not_brought_home(run: RunRecord) -> str:
    """What of a job's files stayed on the cluster, in one line; "" if nothing did."""
    by_reason: dict[str, list[str]] = {}
    for skipped in run.skipped:
        by_reason.setdefault(skipped.reason, []).append(skipped.path)
    if not by_reason:
        return ""
    said = (
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} ({reason})"
        for reason, paths in by_reason.items()
    )
    return f"of job {run.job_id} ({run.name}) was not brought home: {', '.join(said)}"


@contextmanager
def _session(screen: Screen, options: Options) -> Iterator[Session]:
    """A connection to the controller as the job user."""
    from clusterctl import jobs, lifecycle

    workspace = _workspace(screen, options)
    inventory = lifecycle.inventory_of(workspace)
    with jobs.session(lifecycle.spec_as_raised(workspace), inventory, workspace) as session:
        yield session


def _workspace(screen: Screen, options: Options) -> Workspace:
    from clusterctl.workspace import Workspace

    return Workspace.of(spec_of(screen, options).name)


def _wait(screen: Screen, session: Session, ids: list[str], timeout_s: float | None) -> tuple[JobInfo, ...]:
    """Wait for jobs.

    Raises:
        JobFailedError, JobCancelledError, WaitTimeoutError: see the exit codes.
    """
    from clusterctl import jobs

    with screen.working(f"waiting for job {', '.join(ids)}"), _detaching(screen, ids):
        ended = jobs.wait(session, ids, timeout_s=timeout_s, on_change=functools.partial(_changed, screen))
    jobs.raise_unless_completed(session, ended)
    return ended


def _follow(screen: Screen, session: Session, job_id: str, timeout_s: float | None) -> None:
    from clusterctl import jobs

    show = functools.partial(_pass_on, screen)
    changed = functools.partial(_changed, screen)
    with _detaching(screen, [job_id]):
        ended = jobs.follow(session, job_id, on_output=show, timeout_s=timeout_s, on_change=changed)
    jobs.raise_unless_completed(session, ended)


@contextmanager
def _detaching(screen: Screen, ids: Sequence[str]) -> Iterator[None]:
    """Ctrl-C ends the watching, never the job; that is said."""
    try:
        yield
    except KeyboardInterrupt:
        screen.note(f"detached; job {', '.join(ids)} goes on: `clusterctl logs {ids[0]} -f` follows it again")
        raise


def _changed(screen: Screen, job: JobInfo) -> None:
    where = f" on {','.join(job.nodes)}" if job.nodes else ""
    why = f" ({job.reason})" if job.reason not in {"", "None"} else ""
    screen.note(f"job {job.id} {job.state.value}{where}{why}")


def _pass_on(screen: Screen, chunk: LogChunk) -> None:
    if chunk.stream == "stdout":
        screen.raw(chunk.data)
    else:
        sys.stderr.buffer.write(chunk.data)
        sys.stderr.buffer.flush()


def _timeout(text: str | None) -> float | None:
    from clusterctl.errors import UsageError
    from clusterctl.spec.units import parse_duration_s

    try:
        return None if text is None else float(parse_duration_s(text))
    except ValueError as exc:
        raise UsageError("--timeout is wrong", why=str(exc)) from exc


def _nearby(path: Path) -> Path:
    """A path as seen from here, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


def register(app: typer.Typer) -> None:
    """Add these verbs."""
    for function in (submit, cancel, collect):
        app.command()(verb(function))
    app.command("jobs")(verb(jobs_))
    app.command("logs")(verb(logs, long_file=True))
