"""jobs, logs, cancel, collect: the verbs of a job's life."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from clusterctl.cli.completion import job_ids
from clusterctl.cli.options import Options, OutFolder, naming_lock_holder, workspace_of
from clusterctl.cli.output import Screen
from clusterctl.errors import SchedulerError, TransportError, UsageError

if TYPE_CHECKING:
    from clusterctl.jobs.logs import LogChunk, OnOutput
    from clusterctl.scheduler.models import JobInfo
    from clusterctl.scheduler.session import Session
    from clusterctl.state.ledger import RunRecord


_MOST_REASONS = 8

Ids = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help="Job ids, such as 12, or 12_3 of an array.", autocompletion=job_ids),
]


def jobs_(
    screen: Screen,
    options: Options,
    ids: Annotated[
        list[str] | None, typer.Argument(metavar="[ID...]", help="Only these jobs.", autocompletion=job_ids)
    ] = None,
) -> None:
    """List pending and running jobs, and those submitted from here."""
    from clusterctl.jobs.control import known_jobs, list_jobs

    with open_session(screen, options) as session:
        found = known_jobs(session, ids) if ids else list_jobs(session)
    lines = job_table(screen, found) if found else ["no jobs"]
    screen.result({"jobs": [job.as_dict() for job in found]}, *lines)


def logs(
    screen: Screen,
    options: Options,
    job_id: Annotated[str, typer.Argument(metavar="ID", help="Job id.", autocompletion=job_ids)],
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the job has ended.")
    ] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the bytes unchanged to files and pipes.")] = False,
) -> None:
    """Print a job's stdout and stderr. Ctrl-C detaches; the job goes on.

    Colors are kept; other control characters are escaped.
    """
    from clusterctl.jobs.logs import logs
    from clusterctl.scheduler.models import worst

    if raw and screen.json:
        raise UsageError("--raw and -o json exclude each other", fix="use one of them; JSON changes no text")
    kept = KeptLogs()
    shown = contextlib.nullcontext(kept.keep) if screen.json else screen.logs(raw=raw)
    state = {}
    try:
        with open_session(screen, options) as session, shown as show:
            if follow:
                ended = follow_job(screen, session, job_id, None, show=show)
                state = {"state": worst(ended).state.value}
            else:
                logs(session, job_id, on_output=show)
    except KeyboardInterrupt:
        if not follow:
            raise  # else detaching is what was asked for
    finally:
        screen.known = {"job_id": job_id, "logs": kept.as_list()}
    screen.result({**screen.known, **state})


def cancel(screen: Screen, options: Options, ids: Ids) -> None:
    """Cancel jobs. The id of an array cancels all of its tasks."""
    from clusterctl.jobs.control import cancel

    with open_session(screen, options) as session:
        done = cancel(session, ids)
    lines = [f"cancelled job {job.id} ({job.name})" for job in done.cancelled]
    lines += [f"job {job.id} ({job.name}) had ended already: {job.state}" for job in done.ended]
    answer = {
        "cancelled": [job.id for job in done.cancelled],
        "already_ended": [{"job_id": job.id, "state": job.state.value} for job in done.ended],
    }
    screen.result(answer, *lines)


def collect(
    screen: Screen,
    options: Options,
    ids: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[ID...]", help="Default: all that are not collected yet.", autocompletion=job_ids
        ),
    ] = None,
    out: OutFolder = None,
    max_file: Annotated[
        str, typer.Option(metavar="SIZE", help="Do not copy larger files; list them.")
    ] = "64GiB",
) -> None:
    """Copy runs from the cluster; each file is verified by its hash.

    A run is a job's logs, metrics, telemetry, accounting, and the other files in its folder.
    """
    from clusterctl.runs.collect import collect
    from clusterctl.spec.units import parse_size_mib

    try:
        most = parse_size_mib(max_file) << 20
    except ValueError as exc:
        raise UsageError("--max-file is wrong", why=str(exc)) from exc
    with open_session(screen, options) as session:
        runs = collect(session, ids or None, out=out or Path("runs"), max_file=most)
    answer = [
        {
            "job_id": r.job_id,
            "state": r.state,
            "dir": str(r.directory),
            "skipped": len(r.skipped),
            "cost_usd": r.cost_usd,
        }
        for r in runs
    ]
    for run in runs:
        if stays := not_brought_home(run):
            screen.note(f"note: {stays}; it ends with the cluster")
    lines = [
        f"job {run.job_id} ({run.name}) {run.state}: {_nearby(run.directory)}{_cost(run)}" for run in runs
    ]
    screen.result({"runs": answer}, *(lines or ["nothing to collect"]))


def _cost(run: RunRecord) -> str:
    return "" if run.cost_usd is None else f", {run.cost_usd:.2f} USD"


def job_table(screen: Screen, infos: Sequence[JobInfo]) -> list[str]:
    """Jobs as `jobs` and `status` show them."""
    rows = [[j.id, j.name, j.user, j.partition, j.state.value, ",".join(j.nodes), j.reason] for j in infos]
    return screen.table(["JOB", "NAME", "USER", "PARTITION", "STATE", "NODES", "REASON"], rows)


def not_brought_home(run: RunRecord) -> str:
    """What of a job's files stayed on the cluster, in one line; "" if nothing did that is not here, too."""
    from clusterctl.state.ledger import UNCHANGED

    by_reason: dict[str, list[str]] = {}
    for skipped in (one for one in run.skipped if one.reason != UNCHANGED):
        by_reason.setdefault(skipped.reason, []).append(skipped.path)
    if not by_reason:
        return ""
    said = [
        f"{paths[0]}{f' and {len(paths) - 1} more' if len(paths) > 1 else ''} ({reason})"
        for reason, paths in by_reason.items()
    ]
    more = f", and more: see {_nearby(run.directory)}/run.json" if len(said) > _MOST_REASONS else ""
    shown = ", ".join(said[:_MOST_REASONS])
    return f"of job {run.job_id} ({run.name}) was not collected: {shown}{more}"


def _nearby(path: Path) -> Path:
    """A path as seen from here, where it lies below."""
    here = Path.cwd()
    return path.relative_to(here) if path.is_relative_to(here) else path


_MOST_KEPT = 8 << 20  # bytes of logs in one answer; as JSON each may take six


@contextmanager
def open_session(screen: Screen, options: Options) -> Iterator[Session]:
    """A connection to the controller as the job user."""
    from clusterctl.scheduler import session as access

    workspace = workspace_of(screen, options)
    with naming_lock_holder(workspace):
        access.inventory_of(workspace)  # it is up
        with access.session(access.applied_spec(workspace), workspace) as session:
            yield session
        if refusal := session.ledger.refusal:
            screen.note(f"note: {refusal.what} ({refusal.why}): what became of jobs is asked anew next time")


def wait_for(
    screen: Screen, session: Session, ids: list[str], timeout_s: float | None
) -> tuple[JobInfo, ...]:
    """Wait until jobs have ended.

    Raises:
        WaitTimeoutError: ``timeout_s`` has passed.
    """
    from clusterctl.jobs.control import wait

    with screen.working(f"waiting for job {', '.join(ids)}"), _detaching(screen, ids):
        return wait(session, ids, timeout_s=timeout_s, on_change=_Changes(screen, session))


def follow_job(
    screen: Screen, session: Session, job_id: str, timeout_s: float | None, *, show: OnOutput
) -> tuple[JobInfo, ...]:
    """Show what a job writes until it has ended; raises unless it completed."""
    from clusterctl.jobs.control import follow, raise_unless_completed

    changes = _Changes(screen, session)
    with _detaching(screen, [job_id]):
        ended = follow(session, job_id, on_output=show, timeout_s=timeout_s, on_change=changes)
    raise_unless_completed(session, ended)
    return ended


@contextmanager
def _detaching(screen: Screen, ids: Sequence[str]) -> Iterator[None]:
    """Ctrl-C ends the watching, never the job; that is said."""
    try:
        yield
    except KeyboardInterrupt:
        screen.note(f"detached; job {', '.join(ids)} goes on: `clusterctl logs {ids[0]} -f` follows it again")
        raise


class _Changes:
    """Says what becomes of jobs; and, once, which nodes they wait for that are out of service."""

    def __init__(self, screen: Screen, session: Session) -> None:
        self._screen = screen
        self._session = session
        self._explained = False

    def __call__(self, job: JobInfo) -> None:
        where = f" on {','.join(job.nodes)}" if job.nodes else ""
        why = f" ({job.reason})" if job.reason not in {"", "None"} else ""
        self._screen.note(f"job {job.id} {job.state.value}{where}{why}")
        if job.failed_to_launch:
            self._screen.note(
                f"job {job.id} is held, since a node could not start it; `clusterctl up` releases it"
            )
        elif job.lacks_nodes and not self._explained:
            self._explain(job)

    def _explain(self, job: JobInfo) -> None:
        from clusterctl.cluster import verify

        try:
            nodes = self._session.scheduler.nodes()
        except (SchedulerError, TransportError):  # the job is what was asked for
            return
        wanted = {*job.partition.split(",")}
        lines = verify.out_of_service([node for node in nodes if wanted.intersection(node.partitions)])
        if lines:
            self._explained = True
            head = f"job {job.id} waits for nodes that are out of service:"
            self._screen.note(head, *(f"  {line}" for line in lines))


class KeptLogs:
    """What a job wrote, for an answer in JSON: a text for each stream, of each task of an array.

    ``most`` bounds the bytes of all: beyond that, the longest loses its beginning.
    """

    def __init__(self, most: int = _MOST_KEPT) -> None:
        self._most = most
        self._size = 0
        self._bytes: dict[tuple[str, int | None], bytearray] = {}
        self._cut: set[tuple[str, int | None]] = set()

    def keep(self, chunk: LogChunk) -> None:
        """Add to it."""
        self._bytes.setdefault((chunk.stream, chunk.task), bytearray()).extend(chunk.data)
        self._size += len(chunk.data)
        if self._size > self._most:
            longest = max(self._bytes, key=lambda key: len(self._bytes[key]))
            del self._bytes[longest][: self._size - self._most]
            self._cut.add(longest)
            self._size = sum(map(len, self._bytes.values()))

    def as_list(self) -> list[dict[str, str | int | None]]:
        """The answer's ``logs``; ``truncated`` says that the beginning of one is left out."""
        return [
            {
                "stream": key[0],
                "task": key[1],
                "text": data.decode(errors="replace"),
                "truncated": key in self._cut,
            }
            for key, data in self._bytes.items()
        ]


def timeout_of(text: str | None) -> float | None:
    """Seconds of ``--timeout``, which is written as ``--time`` is."""
    from clusterctl.errors import UsageError
    from clusterctl.spec.units import parse_slurm_time_s

    try:
        return None if text is None else float(parse_slurm_time_s(text))
    except ValueError as exc:
        raise UsageError("--timeout is wrong", why=str(exc)) from exc
