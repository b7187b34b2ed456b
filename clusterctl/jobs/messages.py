"""Messages about jobs, to receivers that the user has chosen: commands, or services such as ntfy.

They are sent from this machine while a command watches the jobs. Events are found by comparing two
states of a job. The first state of a job that was submitted before the command causes no message.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from enum import StrEnum
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

from clusterctl.errors import ClusterctlError, UsageError, printable
from clusterctl.jobs.events import requeue_grace_s
from clusterctl.scheduler.base import (
    BEFORE_START,
    JobInfo,
    JobState,
    Outcome,
    state_counts,
    worst_job,
)
from clusterctl.scheduler.ends.diagnosis import Diagnosis, notices_of
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.session import Session
from clusterctl.state.workspace import state_home

if TYPE_CHECKING:
    from clusterctl.util.receivers import MessageQueue, Receiver


# Instead of a receiver: no messages.
NO_MESSAGES: Final = "none"
# In the state folder. No cluster has a name with a dot.
FILE: Final = "notify.txt"
_MOST_LINES: Final = 20
_MOST_LETTERS: Final = 400


class JobEvent(StrEnum):
    """The event that a message reports about a job, as in CLUSTERCTL_EVENT."""

    START = "start"
    RESTART = "restart"
    HANG = "hang"
    ALARM = "alarm"
    FAILED = "failed"
    CANCELLED = "cancelled"
    COMPLETED = "completed"


_ENDS: Final = MappingProxyType(
    {
        Outcome.FAILED: JobEvent.FAILED,
        Outcome.CANCELLED: JobEvent.CANCELLED,
        Outcome.COMPLETED: JobEvent.COMPLETED,
    }
)
_VERBS: Final = MappingProxyType(
    {
        JobEvent.START: "started",
        JobEvent.RESTART: "restarts",
        JobEvent.HANG: "hangs",
        JobEvent.ALARM: "wastes its time",
        JobEvent.FAILED: "failed",
        JobEvent.CANCELLED: "ended",
        JobEvent.COMPLETED: "completed",
    }
)
# Apprise's kinds of messages. The others are "info".
_KINDS: Final = MappingProxyType(
    {
        JobEvent.RESTART: "warning",
        JobEvent.HANG: "warning",
        JobEvent.ALARM: "warning",
        JobEvent.FAILED: "failure",
        JobEvent.CANCELLED: "failure",
        JobEvent.COMPLETED: "success",
    }
)


def chosen_receivers(targets: Sequence[str]) -> tuple[Receiver, ...]:
    """Return the receivers that the user has chosen: ``targets`` (--notify) or, if these are empty,
    the lines of the file notify.txt in the state folder. "none": no receivers.

    Raises the errors of ``receivers_of``.
    """
    where = "--notify"
    if not targets:
        where = str(state_home() / FILE)
        try:
            lines = Path(where).read_text(encoding="utf-8").splitlines()
        except FileNotFoundError:
            return ()
        except UnicodeDecodeError as exc:
            raise UsageError(
                f"{where} is not a text in UTF-8", code="file-invalid", about="notify", why=str(exc)
            ) from exc
        targets = [line.strip() for line in lines if line.strip() and line.strip()[0] != "#"]
    if not targets or [*targets] == [NO_MESSAGES]:
        return ()
    # Most users have no receivers.
    from clusterctl.util.receivers import receivers_of  # noqa: PLC0415

    return receivers_of(targets, where)


def happenings(before: JobInfo | None, job: JobInfo) -> Iterator[JobEvent]:
    """Yield the events of a job since its state ``before``. None: since its submission."""
    if job.ended:
        if before is None or not before.ended:
            yield _ENDS[job.outcome]
        return
    if before is not None and (before.ended or _is_restarted(before, job)):
        yield JobEvent.RESTART
    elif job.state is JobState.RUNNING and (before is None or before.state in BEFORE_START):
        yield JobEvent.START
    if job.hang and not (before and before.hang):
        yield JobEvent.HANG
    known = {alarm.kind for alarm in before.alarms} if before is not None else set()
    if {alarm.kind for alarm in job.alarms} - known:
        yield JobEvent.ALARM


def _is_restarted(before: JobInfo, job: JobInfo) -> bool:
    # The accounting does not tell how often a job was restarted.
    if before.restarts is None or job.restarts is None:
        return False
    return before.restarts < job.restarts


class JobMessages:
    """Sends messages about the events of jobs. post: None: it sends no messages.

    submitted: whether this command has submitted the jobs, so that all events are reported.
        Otherwise the first look causes no messages. Each event of an array is reported once, for
        the first task that has it, and the end once for all tasks.
    """

    def __init__(self, post: MessageQueue | None = None, *, submitted: bool = False) -> None:
        self._post = post
        self._tells_unseen = submitted
        self._tells_old = submitted
        self._began = time.time()
        self._seen: dict[str, JobInfo] = {}
        self._told: set[tuple[str, JobEvent]] = set()

    def of_cluster(self) -> JobMessages:
        """Return a further ``JobMessages``, for the jobs of another cluster."""
        return self if self._post is None else JobMessages(self._post, submitted=self._tells_old)

    def look(self, session: Session, jobs: Sequence[JobInfo]) -> None:
        """Send messages about the events since the last look."""
        if self._post is None:
            return
        # The controller's watcher may requeue a job that was killed.
        settled = [job for job in jobs if not (job.end_time and requeue_grace_s(job))]
        previous = self._seen
        self._seen = previous | {job.id: job for job in settled}
        news = {
            job.id: [*happenings(previous.get(job.id), job)]
            for job in settled
            if self._tells_unseen and not self._is_old(previous.get(job.id), job)
        }
        self._tells_unseen = True
        for whole_id in dict.fromkeys(job.whole_id for job in settled):
            tasks = [job for job in self._seen.values() if job.whole_id == whole_id]
            changed = [job for job in tasks if news.get(job.id)]
            if tasks[0].task is None:
                for job in changed:
                    self._tell(session, job, news[job.id])
            elif changed:
                self._tell_array(session, tasks, changed, news)

    def _is_old(self, before: JobInfo | None, job: JobInfo) -> bool:
        """Return whether a job ended before the command began, and only appears now, for example
        because the accounting answers again.
        """
        is_unseen = before is None and job.ended and not self._tells_old
        return is_unseen and (job.end_time or 0) < self._began

    def _tell_array(
        self,
        session: Session,
        tasks: Sequence[JobInfo],
        changed: Sequence[JobInfo],
        news: Mapping[str, Sequence[JobEvent]],
    ) -> None:
        if all(task.ended for task in tasks):
            worst = worst_job(tasks)
            self._tell(session, worst, [_ENDS[worst.outcome]], of_all=state_counts(tasks))
            return
        for task in changed:
            untold = [each for each in news[task.id] if (task.whole_id, each) not in self._told]
            # The end of a task is told only if it is bad.
            untold = [each for each in untold if each is not JobEvent.COMPLETED]
            self._told |= {(task.whole_id, each) for each in untold}
            self._tell(session, task, untold)

    def _tell(
        self, session: Session, job: JobInfo, news: Sequence[JobEvent], *, of_all: str = ""
    ) -> None:
        """Send a message for each happening. of_all: the states of all tasks of an ended array."""
        for happening in news:
            diagnosis = _diagnosis(session, job) if job.ended else None
            ending = Ending.of([job], diagnosis)
            problems = _problems(job, happening, ending)
            job_id = job.whole_id if of_all else job.id
            cluster = session.inventory.cluster
            lines = [of_all, *problems]
            if happening not in {JobEvent.HANG, JobEvent.ALARM}:
                lines += [*ending.details(), f"fix: {ending.fix}" if ending.cause else ""]
                lines += notices_of(filter(None, [diagnosis]))
            values = {
                "EVENT": happening.value,
                "CLUSTER": cluster,
                "JOB": job_id,
                "JOB_NAME": job.name,
                "STATE": job.state.value,
                "CAUSE": "; ".join(problems),
            }
            title = f"job {job_id} ({job.name}) {_VERBS[happening]} on {cluster}"
            from clusterctl.util.receivers import Message  # noqa: PLC0415 - as above

            message = Message(
                title=_shown(title),
                text="\n".join(_shown(line) for line in lines[:_MOST_LINES] if line),
                kind=_KINDS.get(happening, "info"),
                values={name: _shown(value) for name, value in values.items()},
            )
            if self._post is not None:
                self._post.send(message)

    def failures(self) -> Iterator[str]:
        """Yield a note about each message that was not sent, since the last call."""
        yield from self._post.failures() if self._post is not None else ()


TELLS_NOBODY: Final = JobMessages()


def _shown(text: str) -> str:
    """Return a line for other people's services: short, without control characters and possible
    secrets.
    """
    from clusterctl.util.redact import redactor  # noqa: PLC0415 - as above

    return redactor(())(printable(text[:_MOST_LETTERS]))


def _diagnosis(session: Session, job: JobInfo) -> Diagnosis | None:
    """Return how a job ended. None: the cluster does not answer, or nothing is to be said."""
    # This import is slow.
    from clusterctl.scheduler.ends.judge import judge  # noqa: PLC0415

    try:
        return judge(session, [job]).get(job.id)
    except ClusterctlError:
        return None


def _problems(job: JobInfo, happening: JobEvent, ending: Ending) -> list[str]:
    match happening:
        case JobEvent.HANG:
            return [str(job.hang)]
        case JobEvent.ALARM:
            return [str(alarm) for alarm in job.alarms]
    return [ending.cause]
