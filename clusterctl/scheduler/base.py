"""The protocol of a scheduler: Slurm, or mpirun over SSH where a cluster has none."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from clusterctl.errors import ClusterctlError, SchedulerError
from clusterctl.scheduler.models import JobInfo, JobRequest, NodeInfo
from clusterctl.transport.base import Result, Transport

_T = TypeVar("_T")


def backoff(first_s: float = 0.2, factor: float = 1.4, longest_s: float = 15.0) -> Iterator[float]:
    """Ever longer pauses between two polls, in seconds: quick for short jobs, easy on Slurm for long ones."""
    pause = first_s
    while True:
        yield pause
        pause = min(pause * factor, longest_s)


def polls(timeout_s: float | None, longest_s: float = 15.0) -> Iterator[None]:
    """One item for each look at something that is waited for, with pauses between; it ends with the time."""
    begun = time.monotonic()
    for pause in backoff(longest_s=longest_s):
        yield
        if timeout_s is not None and time.monotonic() - begun > timeout_s:
            return
        time.sleep(pause)


@dataclass(frozen=True, slots=True)
class Clock:
    """Time, so that tests need not wait."""

    now: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep


def patiently(clock: Clock, patience_s: float, ask: Callable[[], _T]) -> _T:
    """What ``ask`` returns; it is called again, within bounds, while its error says that this may help."""
    give_up = clock.now() + patience_s
    for pause in backoff(first_s=0.5, longest_s=5.0):
        try:
            return ask()
        except ClusterctlError as exc:
            if not exc.retryable or clock.now() + pause > give_up:
                raise
        clock.sleep(pause)
    raise AssertionError("backoff never ends")


class Scheduler(Protocol):
    """Jobs and nodes of one cluster. ``transport`` reaches the controller, where jobs' folders are seen.

    All of it raises SchedulerError where the answer is not to be had, and TransportError where no host is.
    """

    @property
    def transport(self) -> Transport: ...
    @property
    def clock(self) -> Clock: ...

    @property
    def manages_nodes(self) -> bool:
        """Whether it drains and resumes nodes, and ends the jobs of a node whose hardware changes."""

    @property
    def script_name(self) -> str:
        """The file name of a job's script."""

    def check_id(self, text: str) -> None:
        """Raises UsageError unless ``text`` is the id of a job as it is written here."""

    def unknown(self, ids: Sequence[str]) -> SchedulerError:
        """The error for ids that it does not know."""

    def reject_if_busy(self) -> None:
        """Raises SchedulerError if a job would neither start nor wait in a queue."""

    def submit(self, request: JobRequest) -> str:
        """Start a job, or queue it; its id.

        Raises:
            AnswerLostError: it may have been taken.
            SchedulerError: it was refused; of Slurm its words, and the valid choices where they are known.
            UnreachableError: it was not submitted.
        """

    def jobs(self, ids: Sequence[str]) -> tuple[JobInfo, ...]:
        """The jobs of these ids, without those that are not known.

        Raises:
            UsageError: an id is not one.
        """

    def own_jobs(self) -> tuple[JobInfo, ...]:
        """The jobs of this user that wait, run, or lately ended."""

    def all_jobs(self) -> tuple[JobInfo, ...]:
        """The jobs of all users that wait, run, or lately ended, as far as this user may see them."""

    def by_comment(self, comment: str, submitted_at: float) -> JobInfo | None:
        """The job of this user with exactly this comment; ``submitted_at``: Unix seconds, by our clock."""

    def cancel(self, ids: Sequence[str]) -> None:
        """Cancel jobs, which are not requeued; ask ``jobs`` first."""

    def annotate(self, job_id: str, text: str) -> None:
        """Set a job's admin comment, such as why it ends, where there is accounting."""

    def nodes(self) -> tuple[NodeInfo, ...]:
        """All nodes, as far as this user may see them."""

    def drain(self, nodes: Sequence[str], reason: str) -> None:
        """Drain these nodes: running jobs go on, no new ones start."""

    def resume(self, nodes: Sequence[str]) -> None:
        """Resume drained nodes."""

    def run_verification_job(self, hosts: tuple[str, ...], payload: str) -> Result:
        """Run this payload's probe, a rank on each of these hosts. It ends by itself if it hangs."""

    def release_held_jobs(self) -> tuple[str, ...]:
        """Let jobs that a node failed to launch wait for nodes again; their ids."""

    def reconfigure(self) -> None:
        """Have all daemons read their configuration again."""

    def accounting(self, job_id: str) -> str | None:
        """What the accounting says of a job, as JSON; None where there is no accounting."""

    def version(self) -> str | None:
        """Its version, such as ``22.05.8``; None where there is no such program."""


def active_jobs(scheduler: Scheduler) -> tuple[JobInfo, ...]:
    """All users' jobs that wait or run, as far as this user may see them."""
    return tuple(job for job in scheduler.all_jobs() if not job.ended)


def verification_argv(hosts: Sequence[str]) -> tuple[str, ...]:
    """The command of one rank of the payload's probe; CuPy alone would take more than its memory."""
    python = ("/opt/clusterctl/env/bin/python", "-m", "payload", "probe")
    return (*python, "--device", "cpu", "--expect-hosts", ",".join(hosts))
