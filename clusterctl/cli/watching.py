"""What verbs about jobs share: the session, waiting, following, and what is said meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from clusterctl.cli.options import Options
from clusterctl.cli.show import Screen
from clusterctl.cli.which import telling_who_works, workspace_of
from clusterctl.errors import SchedulerError, TransportError

if TYPE_CHECKING:
    from clusterctl.jobs import LogChunk, Session
    from clusterctl.jobs.watch import OnOutput
    from clusterctl.scheduler.models import JobInfo


_MOST_KEPT = 8 << 20  # bytes of logs in one answer; as JSON each may take six


@contextmanager
def open_session(screen: Screen, options: Options) -> Iterator[Session]:
    """A connection to the controller as the job user."""
    from clusterctl.scheduler import session as access

    workspace = workspace_of(screen, options)
    with telling_who_works(workspace):
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
    from clusterctl import jobs

    with screen.working(f"waiting for job {', '.join(ids)}"), _detaching(screen, ids):
        return jobs.wait(session, ids, timeout_s=timeout_s, on_change=_Changes(screen, session))


def follow_job(
    screen: Screen, session: Session, job_id: str, timeout_s: float | None, *, show: OnOutput
) -> tuple[JobInfo, ...]:
    """Show what a job writes until it has ended; raises unless it completed."""
    from clusterctl import jobs

    changes = _Changes(screen, session)
    with _detaching(screen, [job_id]):
        ended = jobs.follow(session, job_id, on_output=show, timeout_s=timeout_s, on_change=changes)
    jobs.raise_unless_completed(session, ended)
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
