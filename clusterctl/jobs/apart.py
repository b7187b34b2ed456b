"""What a job writes where hosts share no folder: it is read on those on which it ran."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from clusterctl.jobs.logs import LogChunk, LogReader
from clusterctl.scheduler.models import JobInfo
from clusterctl.scheduler.session import Session


class LogsApart:
    """Reads the logs of one job, or of an array's tasks, from where it last stopped."""

    def __init__(self, session: Session, folder: str, task: int | None) -> None:
        self._session = session
        self._folder = folder
        self._task = task
        self._readers: dict[str, LogReader] = {}

    def new(self, jobs: Sequence[JobInfo]) -> Iterator[LogChunk]:
        """What was added since.

        Raises:
            TransportError: a host can't be reached.
        """
        for host, transport in self._session.holders(nodes_of(jobs)):
            reader = self._readers.setdefault(host, LogReader(transport, self._folder, self._task))
            yield from reader.new()


def nodes_of(jobs: Sequence[JobInfo]) -> tuple[str, ...]:
    """The nodes of all of them, each once."""
    return tuple(dict.fromkeys(node for job in jobs for node in job.nodes))
