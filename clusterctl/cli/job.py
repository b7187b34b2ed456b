"""logs, cancel, and how a job is waited for and followed."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any

import typer

from clusterctl.cli.options import Options, job_ids
from clusterctl.cli.output import ENDINGS, Screen
from clusterctl.errors import Notice, SchedulerError, TransportError, UsageError, excluded
from clusterctl.jobs import watch
from clusterctl.jobs.watch import LogChunk, OnOutput
from clusterctl.scheduler.base import JobInfo, Outcome, state_counts, worst
from clusterctl.scheduler.session import SOON_S, Session, open_session
from clusterctl.spec.units import parse_slurm_time_s

if TYPE_CHECKING:
    from clusterctl.scheduler.diagnosis import Diagnosis

Ids = Annotated[
    list[str],
    typer.Argument(metavar="ID...", help="Job ids, such as 12, or 12_3 of an array.", autocompletion=job_ids),
]


def logs(
    screen: Screen,
    options: Options,
    job_id: Annotated[
        str | None,
        typer.Argument(
            metavar="[ID]", help="Job id. Default: the last job submitted.", autocompletion=job_ids
        ),
    ] = None,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="Follow the output until the job has ended.")
    ] = False,
    rank: Annotated[int | None, typer.Option(min=0, help="Only what this rank wrote.", metavar="N")] = None,
    label: Annotated[bool, typer.Option("--label", help="Begin each line with its rank, as `1: `.")] = False,
    raw: Annotated[bool, typer.Option("--raw", help="Write the bytes unchanged to files and pipes.")] = False,
) -> None:
    """Print a job's stdout and stderr. Ctrl-C detaches; the job goes on.

    Colors are kept; other control characters are escaped.
    """
    if raw and screen.json:
        raise excluded("--raw", "-o json")
    kept = KeptLogs()
    shown = contextlib.nullcontext(kept.keep) if screen.json else screen.logs(raw=raw)
    ranks = str(rank) if rank is not None else "all" if label else ""
    state: dict[str, Any] = {}
    causes: tuple[Diagnosis, ...] = ()
    try:
        with (
            open_session(options.chosen(screen.note)) as session,
            shown as on_output,
            labelled(on_output, label=label and not screen.json) as show,
        ):
            job_id = job_id or _last_submitted(screen, session)
            if follow:
                ended = follow_job(screen, session, job_id, None, show=show, rank=ranks)
                state = {"state": worst(ended).state.value}
            else:
                watch.logs(session, job_id, on_output=show, rank=ranks)
                with contextlib.suppress(SchedulerError, TransportError):  # the log is what was asked for
                    causes = () if raw else watch.diagnoses(session, session.scheduler.jobs([job_id]))
    except ENDINGS:
        if not follow:
            raise  # else detaching is what was asked for
    finally:
        screen.known = {"job_id": job_id, "logs": kept.as_list()}
    if causes:
        screen.note(f"{causes[0].summary}; fix: {causes[0].fix}")
        state = {"diagnosis": causes[0].as_dict()}
    screen.result({**screen.known, **state})


def _last_submitted(screen: Screen, session: Session) -> str:
    for entry in reversed(session.ledger.entries()):
        if entry.job_id is not None:
            screen.note(Notice("last-job", f"{entry.shown}, the last one submitted"))
            return entry.job_id
    raise UsageError(
        "no job was submitted yet",
        code="no-job-yet",
        fix="name one: `clusterctl jobs` lists the jobs there are",
    )


def cancel(screen: Screen, options: Options, ids: Ids) -> None:
    """Cancel jobs. The id of an array cancels all of its tasks."""
    with open_session(options.chosen(screen.note), patience_s=SOON_S) as session:
        jobs = watch.cancel(session, ids)
    cancelled, ended = ([job for job in jobs if job.ended is over] for over in (False, True))
    lines = [f"cancelled job {job.id} ({job.name})" for job in cancelled]
    lines += [f"job {job.id} ({job.name}) had ended already: {job.state}" for job in ended]
    answer = {
        "cancelled": [job.id for job in cancelled],
        "already_ended": [{"job_id": job.id, "state": job.state.value} for job in ended],
    }
    screen.result(answer, *lines)


_MOST_KEPT = 8 << 20  # bytes of logs in one answer; as JSON each may take six


def wait_for(
    screen: Screen, session: Session, ids: list[str], timeout_s: float | None
) -> tuple[JobInfo, ...]:
    """Wait until jobs have ended."""
    with screen.working(f"waiting for job {', '.join(ids)}"), _detaching(screen, ids):
        return watch.wait(session, ids, timeout_s=timeout_s, on_change=_Changes(screen, session))


def follow_job(
    screen: Screen, session: Session, job_id: str, timeout_s: float | None, *, show: OnOutput, rank: str = ""
) -> tuple[JobInfo, ...]:
    """Show what a job writes until it has ended; raises unless it completed."""
    changes = _Changes(screen, session)
    with _detaching(screen, [job_id]):
        ended = watch.follow(
            session, job_id, on_output=show, rank=rank, timeout_s=timeout_s, on_change=changes
        )
    watch.raise_unless_completed(session, ended, log_is_shown=True)
    return ended


@contextmanager
def _detaching(screen: Screen, ids: Sequence[str]) -> Iterator[None]:
    """Ctrl-C or a signal ends the watching, never the job; that is said."""
    try:
        yield
    except ENDINGS:
        goes_on = f"detached; job {', '.join(ids)} goes on: `clusterctl logs {ids[0]} -f` follows it again"
        screen.note(Notice("detached", goes_on))
        raise


class _Changes:
    """Says what becomes of jobs; and, once, which nodes they wait for that are out of service."""

    def __init__(self, screen: Screen, session: Session) -> None:
        self._screen = screen
        self._session = session
        self._explained = False

    def __call__(self, changed: Sequence[JobInfo], jobs: Sequence[JobInfo]) -> None:
        for whole_id in dict.fromkeys(job.whole_id for job in changed):
            one = [job for job in jobs if job.whole_id == whole_id]
            if len(one) > 1:
                self._screen.note(f"job {whole_id}: {state_counts(one)}")
            for job in changed:
                if job.whole_id == whole_id:
                    self._tell(job, array=len(one) > 1)

    def _tell(self, job: JobInfo, *, array: bool) -> None:
        """A line of a job; of a task of an array only if it did not complete."""
        where = f" on {','.join(job.nodes)}" if job.nodes else ""
        why = f" ({job.reason})" if job.reason not in {"", "None"} else ""
        if not array or job.outcome in {Outcome.FAILED, Outcome.CANCELLED}:
            self._screen.note(f"job {job.id} {job.state.value}{where}{why}")
        if job.failed_to_launch:
            self._screen.note(
                f"job {job.id} is held, since a node could not start it; `clusterctl up` releases it"
            )
        elif job.lacks_nodes and not self._explained:
            self._explain(job)

    def _explain(self, job: JobInfo) -> None:
        from clusterctl.cluster import verify

        with contextlib.suppress(SchedulerError, TransportError):  # the job is what was asked for
            wanted = {*job.partition.split(",")}
            nodes = [one for one in self._session.scheduler.nodes() if wanted.intersection(one.partitions)]
            if lines := verify.out_of_service(nodes):
                self._explained = True
                head = f"job {job.id} waits for nodes that are out of service:"
                self._screen.note(head, *(f"  {line}" for line in lines))


_LONGEST_LINE = 1 << 20


@contextmanager
def whole_lines(show: OnOutput) -> Iterator[OnOutput]:
    """Show whole lines only, one or more at a time; at the end, the rest of each stream as a line."""
    begun: dict[LogChunk, bytes] = {}

    def show_lines(chunk: LogChunk) -> None:
        of = dataclasses.replace(chunk, data=b"")
        whole, newline, begun[of] = (begun.get(of, b"") + chunk.data).rpartition(b"\n")
        if len(begun[of]) > _LONGEST_LINE:
            whole, newline = whole + newline + begun.pop(of), b"\n"
        if newline:
            show(dataclasses.replace(of, data=whole + newline))

    try:
        yield show_lines
    finally:
        for of in [of for of, rest in begun.items() if rest]:
            show_lines(dataclasses.replace(of, data=b"\n"))


@contextmanager
def labelled(show: OnOutput, *, label: bool) -> Iterator[OnOutput]:
    """Show whole lines, each after its rank, and after the task of an array: `1: ` or `3/1: `."""

    def show_labelled(chunk: LogChunk) -> None:
        task = "" if chunk.task is None else f"{chunk.task}/"
        prefix = f"{task}{chunk.rank or 0}: ".encode()
        lines = chunk.data.removesuffix(b"\n").split(b"\n")
        show(dataclasses.replace(chunk, data=b"".join(prefix + line + b"\n" for line in lines)))

    if not label:
        yield show
        return
    with whole_lines(show_labelled) as show_whole:
        yield show_whole


class KeptLogs:
    """What a job wrote, for an answer in JSON: a text for each stream, of each task of an array.

    ``most`` bounds the bytes of all: beyond that, the longest loses its beginning.
    """

    def __init__(self, most: int = _MOST_KEPT) -> None:
        self._most = most
        self._size = 0
        self._bytes: dict[tuple[str, int | None, int | None], bytearray] = {}
        self._cut: set[tuple[str, int | None, int | None]] = set()

    def keep(self, chunk: LogChunk) -> None:
        self._bytes.setdefault((chunk.stream, chunk.task, chunk.rank), bytearray()).extend(chunk.data)
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
                "rank": key[2],
                "text": data.decode(errors="replace"),
                "truncated": key in self._cut,
            }
            for key, data in self._bytes.items()
        ]


def timeout_of(text: str | None) -> float | None:
    """Seconds of ``--timeout``, which is written as ``--time`` is."""
    try:
        return None if text is None else float(parse_slurm_time_s(text))
    except ValueError as exc:
        raise UsageError("--timeout is wrong", code="bad-value", why=str(exc)) from exc
