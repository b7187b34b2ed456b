"""A job's stdout and stderr as they grow."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Literal

from clusterctl.errors import SchedulerError, TransportError
from clusterctl.scheduler.base import JobInfo, backoff, unmanaged_job
from clusterctl.scheduler.session import Session
from clusterctl.transport.base import Transport, lines, remote_argv
from clusterctl.util.terminal import plain_line

_PROGRAM = "clusterctl.jobs.remote_follow"
_LOG = re.compile(r"(stdout|stderr)(?:-([0-9]+))?\.log")
LONGEST_PAUSE_S = 5.0  # between two looks at a job that is followed
_TAIL_LINES = 20
_TAIL_COLUMNS = 2000
# What Open MPI and Slurm say of the other ranks once one has failed. The tail of a log leaves it out: it says
# nothing of the cause, and there may be more of it than lines are shown.
_CONSEQUENCES = re.compile(
    r"^-{74}\n(?:An MPI communication peer process|MPI_ABORT was invoked|Primary job +terminated normally)"
    r"(?:.*\n)*?-{74}(?:\n|\Z)"
    r"|^slurmstepd-\S+ error: +(?:mpi/pmix.*|\*\*\* STEP \S+ ON \S+ CANCELLED AT \S+ \*\*\*)(?:\n|\Z)"
    r"|^srun: (?:Job step aborted: |launch/slurm: _step_signal: |Force Terminated ).*(?:\n|\Z)"
    r"|^srun: error: \S+ tasks? \S+ Terminated(?:\n|\Z)",
    re.MULTILINE,
)


@dataclass(frozen=True, slots=True)
class LogChunk:
    """Bytes of one of a job's logs, as the job wrote them; ``task`` is set for an array."""

    stream: Literal["stdout", "stderr"]
    task: int | None
    data: bytes


OnOutput = Callable[[LogChunk], None]


@dataclass(slots=True)
class LogReader:
    """Reads the logs in a job's folder from where it last stopped."""

    transport: Transport
    folder: str
    task: int | None = None
    gone: bool = False  # the folder was not there when it was last looked at
    _offsets: dict[str, int] = field(default_factory=dict)

    def read(self, how: Literal["once", "follow", "tail"]) -> Generator[LogChunk | None, None, None]:
        """What was added since: once, or without end; or the end of stderr, else of stdout.

        None comes about once a second, so that the caller can look at the job.

        Raises:
            TransportError: the connection broke; calling it again goes on from there.
        """
        task = "" if self.task is None else str(self.task)
        argv = remote_argv(_PROGRAM, self.folder, how, json.dumps(self._offsets), task)
        with closing(self.transport.stream(argv)) as stream:
            for line in lines(stream, self._not_understood(b"a line does not end")):
                yield self._chunk(line)

    def _chunk(self, line: bytes) -> LogChunk | None:
        try:
            answer = json.loads(line)
            self.gone = "gone" in answer
            if not answer or self.gone:
                return None
            match = _LOG.fullmatch(answer["log"])
            data = base64.b64decode(answer["data"])
            self._offsets[answer["log"]] = int(answer["at"]) + len(data)
        except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as exc:
            raise self._not_understood(line) from exc
        if match is None:
            return None
        task = int(match[2]) if match[2] else None
        return LogChunk("stdout" if match[1] == "stdout" else "stderr", task, data)

    def _not_understood(self, line: bytes) -> TransportError:
        return TransportError(
            "the log reader on the cluster answered what clusterctl does not understand",
            where=self.transport.host,
            why=line[:200].decode(errors="replace").encode("unicode_escape").decode(),
            host=self.transport.host,
        )


def tail(transport: Transport, folder: str, task: int | None) -> str:
    """The last lines of a job's stderr, else of its stdout, fit for a terminal; "" if there are none.

    What only follows from a rank's failure is left out, unless there is nothing else.
    """
    reader = LogReader(transport, folder, task)
    said = b"".join(chunk.data for chunk in reader.read("tail") if chunk).decode(errors="replace")
    if reader.gone:
        return "(the job's folder is gone)"
    said = _CONSEQUENCES.sub("", said) or said
    # Only a newline ends a line: what else Python takes for an end, a binary log is full of.
    last = said.removesuffix("\n").split("\n")[-_TAIL_LINES:]
    return "\n".join(plain_line(line)[-_TAIL_COLUMNS:] for line in last)


class JobLogs:
    """The logs of a job on the hosts that have them, from where they were last read."""

    def __init__(self, session: Session, job_id: str) -> None:
        session.scheduler.check_id(job_id)
        self._session = session
        self.task = int(job_id.partition("_")[2]) if "_" in job_id else None
        self.folder = folder_of(session, job_id)
        self._readers: dict[str, LogReader] = {}

    @property
    def gone(self) -> bool:
        """Whether no host has the job's folder any more."""
        return all(reader.gone for reader in self._readers.values())

    def new(self, jobs: Sequence[JobInfo]) -> Iterator[LogChunk]:
        """What was added since; ``jobs`` tell the nodes, which is needed where those have the logs."""
        for reader in self._readers_of(jobs):
            yield from (chunk for chunk in reader.read("once") if chunk is not None)

    def grow(
        self, seen: Callable[[], Sequence[JobInfo]], deadline: float | None
    ) -> Generator[LogChunk | None, None, None]:
        """What is added, without end; None now and then. See ``LogReader.read``."""
        if not self._session.unshared_nodes:
            (reader,) = self._readers_of(())
            yield from reader.read("follow")  # which ends by an error, or by being closed
        clock = self._session.scheduler.clock
        for pause in backoff(longest_s=LONGEST_PAUSE_S):
            yield from self.new(seen())
            yield None
            clock.sleep(pause if deadline is None else max(0.0, min(pause, deadline - clock.now())))

    def _readers_of(self, jobs: Sequence[JobInfo]) -> list[LogReader]:
        nodes = tuple(dict.fromkeys(node for job in jobs for node in job.nodes))
        return [
            self._readers.setdefault(host, LogReader(transport, self.folder, self.task))
            for host, transport in self._session.hosts_with_files(nodes)
        ]


def logs(session: Session, job_id: str, *, on_output: OnOutput) -> None:
    """Pass on the output of a job so far.

    Raises:
        SchedulerError: the job is unknown, or clusterctl did not submit it.
        TransportError: the controller can't be reached.
    """
    found = JobLogs(session, job_id)
    chunk = None
    for chunk in found.new(session.scheduler.jobs([job_id]) if session.unshared_nodes else ()):
        on_output(chunk)
    if found.gone:
        raise SchedulerError(
            f"the folder of job {job_id} is gone, and its logs with it",
            where=f"{found.folder} on the cluster",
            why="the job itself or a user removed it",
            fix="`clusterctl jobs` still says how it ended",
        )
    if chunk is None and found.task is not None and not session.scheduler.jobs([job_id]):
        raise session.scheduler.unknown([job_id])


def folder_of(session: Session, job_id: str) -> str:
    """The job's folder on the cluster.

    Raises:
        SchedulerError: the job is unknown, or clusterctl did not submit it.
    """
    entry = session.ledger.find(job_id)
    if entry is not None and entry.remote_dir is not None:
        return entry.remote_dir
    jobs = session.scheduler.jobs([job_id])
    if not jobs:
        raise session.scheduler.unknown([job_id])
    if not jobs[0].comment.startswith("clusterctl:"):
        raise unmanaged_job(jobs[0])
    return jobs[0].work_dir
