"""submit: the flags that describe a job, and what becomes of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from clusterctl.cli.options import Options, verb
from clusterctl.cli.progress import showing_progress
from clusterctl.cli.show import Screen
from clusterctl.cli.watching import follow_job, open_session, timeout_of, wait_for
from clusterctl.cli.which import spec_of

if TYPE_CHECKING:
    from clusterctl.jobs.source import Source

# Each is a field of JobWords, which says what it may be. The help stands here so that it comes at once.
JOB_FLAGS: Final[Mapping[str, Any]] = {
    "nodes": Annotated[int | None, typer.Option("--nodes", "-N", help="Nodes. Default: 1.")],
    "tasks_per_node": Annotated[int | None, typer.Option(help="Ranks on each node. Default: 1.")],
    "cpus": Annotated[int | None, typer.Option(help="Cores of each rank.")],
    "gpus": Annotated[int | None, typer.Option(help="GPUs on each node.")],
    "mem": Annotated[str | None, typer.Option(help="Memory on each node, such as 4GiB.")],
    "time": Annotated[str | None, typer.Option(help="Time limit, such as 30m or 1:30:00.")],
    "name": Annotated[str | None, typer.Option(help="Job name. Default: the job's or the script's.")],
    "partition": Annotated[str | None, typer.Option("--partition", "-p", help="Default: the first.")],
    "account": Annotated[str | None, typer.Option("--account", "-A", help="Slurm account.")],
    "qos": Annotated[str | None, typer.Option("--qos", "-q", help="Quality of service.")],
    "constraint": Annotated[str | None, typer.Option("--constraint", "-C", help="Node features.")],
    "array": Annotated[str | None, typer.Option("--array", "-a", help="Array of jobs, such as 1-10%2.")],
    "launcher": Annotated[
        str | None, typer.Option(help="How ranks are started: srun (PMIx, the default) or mpirun.")
    ],
    "include": Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Send this too, whatever .gitignore says. Repeatable."),
    ],
    "exclude": Annotated[
        list[str] | None,
        typer.Option(metavar="PATTERN", help="Do not send this of the script's folder. Repeatable."),
    ],
    "folder": Annotated[
        bool | None,
        typer.Option("--folder/--no-folder", help="Send the script's folder with it. Default: yes."),
    ],
    "env": Annotated[
        list[str] | None,
        typer.Option(help="K=V for the program; K alone takes its value here. Repeatable."),
    ],
    "container": Annotated[
        str | None, typer.Option(help="Run in this Apptainer image (.sif), on the cluster or here.")
    ],
}


def submit(
    screen: Screen,
    options: Options,
    target: Annotated[str, typer.Argument(metavar="JOB", help="train, probe, or a script of yours.")],
    args: Annotated[list[str] | None, typer.Argument(help="What the program gets, after --.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the sbatch script; submit nothing.")
    ] = False,
    wait: Annotated[bool, typer.Option("--wait", help="Wait until the job has ended.")] = False,
    follow: Annotated[bool, typer.Option("--follow", help="Show its output until it has ended.")] = False,
    timeout: Annotated[str | None, typer.Option(help="Longest wait, such as 10m; the job goes on.")] = None,
    **flags: object,
) -> None:
    """Submit a bundled job or a script of yours. What stands after -- goes to the program."""
    from clusterctl import jobs
    from clusterctl.errors import UsageError
    from clusterctl.spec import job_spec
    from clusterctl.transfer.tree import shown_size

    given = {field: value for field, value in {"args": args, **flags}.items() if value not in (None, [])}
    job = job_spec(target, given)
    timeout_s = timeout_of(timeout)
    if timeout is not None and not (wait or follow):
        raise UsageError("--timeout bounds a wait", fix="say --wait or --follow too; --time limits the job")
    source = jobs.source_of(job)
    for note in source.notes if source else ():
        screen.note(f"note: {note}")
    if dry_run:
        script = jobs.script_of(spec_of(screen, options), job)
        if source:
            screen.note(
                f"with it go {len(source.files)} files, {shown_size(source.bytes)}, of {source.folder}"
            )
        screen.result({"name": job.name, "script": script, "source": _source(source)}, script)
        return
    with open_session(screen, options) as session:
        with showing_progress(screen) as progress:
            done = jobs.submit(session, job, source=source, progress=progress)
        answer = {
            "job_id": done.job_id,
            "name": done.name,
            "script": done.script,
            "dir": done.remote_dir,
            "source": dataclasses.asdict(done.source) if done.source else None,
        }
        screen.known = answer  # also when the job fails while we wait
        if follow and not screen.json:
            screen.note(f"submitted job {done.job_id} ({done.name})")
            follow_job(screen, session, done.job_id, timeout_s)
        elif wait or follow:
            screen.note(f"submitted job {done.job_id} ({done.name})")
            ended = wait_for(screen, session, [done.job_id], timeout_s)
            answer |= {"state": jobs.worst(ended).state.value}
            screen.result(answer, f"job {done.job_id} {answer['state']}; `clusterctl collect` brings it home")
        else:
            hint = f"submitted job {done.job_id} ({done.name}); see `clusterctl logs {done.job_id} -f`"
            screen.result(answer, hint)


def _source(source: Source | None) -> dict[str, int] | None:
    return {"files": len(source.files), "bytes": source.bytes} if source else None


def register(app: typer.Typer) -> None:
    """Add the verb."""
    app.command()(verb(submit, flags=JOB_FLAGS))
