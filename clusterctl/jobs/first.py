"""`submit --first`: submit a job to several places, and keep the job that starts first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from clusterctl.errors import (
    ClusterctlError,
    JobCancelledError,
    TransportError,
    UsageError,
    WaitTimeoutError,
    raise_together,
)
from clusterctl.jobs.submit import PreparedJob, SubmittedJob, Submitter, new_token
from clusterctl.scheduler.claims import FirstGroup, settle
from clusterctl.scheduler.request.request import Request
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.state.inventory import Inventory
from clusterctl.state.ledger import JobEntry

# These pauses are for clusters of the user. On other people's clusters, the session has the pauses.
_FIRST_PAUSE_S = 0.2
_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class JobPlace:
    """Where a job can run. None: the default partition or account of the cluster."""

    cluster: str
    partition: str | None = None
    account: str | None = None

    @property
    def shown(self) -> str:
        """The place as the user writes it."""
        text = f"{self.cluster}/{self.partition}" if self.partition else self.cluster
        return f"{text}@{self.account}" if self.account else text

    def of(self, request: Request) -> Request:
        """Return the request for this place."""
        chosen = {"partition": self.partition, "account": self.account}
        changes = {name: value for name, value in chosen.items() if value is not None}
        return request.of(request.job.model_copy(update=changes))


def places_of(text: str, inventory: Inventory, clusters: Sequence[str]) -> tuple[JobPlace, ...]:
    """Parse places such as ``train,other@account`` or ``train,cluster/partition``.

    inventory: of the chosen cluster. clusters: the names of all clusters.
    Raises UsageError if a place is unknown, or if there are fewer than two places.
    """
    partitions = [partition.name for partition in inventory.partitions]
    places = []
    for word in text.split(","):
        where, _, account = word.strip().partition("@")
        cluster, slash, partition = where.partition("/")
        if slash:
            place = JobPlace(cluster, partition or None, account or None)
        elif where in partitions or (account and not where):
            place = JobPlace(inventory.cluster, where or None, account or None)
        else:
            place = JobPlace(where, None, account or None)
        if place.cluster not in clusters:
            raise UsageError(
                f"--first: {word!r} is neither a partition nor a cluster",
                code="not-found",
                about="place",
                why=f"{inventory.cluster} has the partitions {', '.join(partitions)}; the clusters are "
                f"{', '.join(clusters)}",
                fix="write CLUSTER/PARTITION for another cluster's partition, PLACE@ACCOUNT for "
                "an account",
            )
        places.append(place)
    if len(set(places)) < max(2, len(places)):
        raise UsageError(
            f"--first needs at least two different places, but got {text!r}",
            about="first-places",
            fix="name partitions or clusters, such as --first short,long",
        )
    return tuple(places)


def reject_unfit(session: Session, job: JobSpec) -> None:
    """Raise UsageError if a job can't be submitted with --first to the cluster of a session."""
    session.site.reject_without_slurm()
    no_shared_folder = UsageError(
        f"--first needs a shared folder, which cluster {session.inventory.cluster} does not have",
        code="unsupported",
        about="shared-folder",
        fix="use --partition",
    )
    raise_together(session.site.folders.unfit(no_shared_folder))
    if job.array or job.sweep:
        raise UsageError(
            "--first does not apply to job arrays",
            about="first-array",
            fix="use --partition",
        )


def submit_first(
    submitters: Mapping[str, Submitter], jobs: Sequence[tuple[str, PreparedJob]], first: FirstGroup
) -> Iterator[tuple[str, SubmittedJob]]:
    """Submit the jobs, given as (cluster, job), in turn. Yield each; at an error, cancel all.

    Raises the errors of ``Submitter.submit``.
    """
    done: list[tuple[str, str]] = []
    for cluster, job in jobs:
        try:
            submitted = submitters[cluster].submit(replace(job, first=first))
        except ClusterctlError:
            sessions = [submitters[where].session for where, _ in done]
            # The error of the submission is raised, even if a job can't be cancelled.
            for session, (_, job_id) in zip(sessions, done, strict=True):
                with suppress(ClusterctlError):
                    session.scheduler.cancel([job_id])
            for session in sessions:
                with suppress(ClusterctlError):
                    settle(session.scheduler, session.ledger, first.id)
            raise
        done.append((cluster, submitted.job_id))
        yield cluster, submitted


def new_first(clusters: Sequence[str]) -> FirstGroup:
    """Return a new FirstGroup for jobs on these clusters."""
    return FirstGroup(new_token(), is_across=len(set(clusters)) > 1)


@dataclass(frozen=True, slots=True)
class FirstStartedJob:
    """The job of a `submit --first` that runs.

    not_cancelled: (cluster, job id) of each job on clusters that can't be reached. Such a job does
        not run.
    """

    session: Session
    entry: JobEntry
    not_cancelled: tuple[tuple[str, str], ...] = ()


def wait_for_first(
    sessions: Sequence[Session], first: FirstGroup, timeout_s: float | None
) -> FirstStartedJob:
    """Wait until a job runs, and cancel the rest.

    While a cluster can't be reached, its jobs are not chosen.

    Raises:
        JobCancelledError: all jobs have ended before they could run.
        WaitTimeoutError: the time is up. The jobs stay in the queue.
        SchedulerError, MachineError: a cluster does not answer, or the choice can't be recorded.
    """
    clock = sessions[0].scheduler.clock
    paces = [session.site.pace for session in sessions]
    first_s = max(_FIRST_PAUSE_S, *(pace.changed_s for pace in paces))
    longest_s = max(_LONGEST_PAUSE_S, *(pace.pending_s for pace in paces))
    for _ in clock.polls(timeout_s, first_s=first_s, longest_s=longest_s):
        left, unreachable = _settled(sessions, first)
        if len(left) > 1 and any(entry.kept for _, entry in left):
            # Some clusters were asked before the choice.
            left, unreachable = _settled(sessions, first)
        for session, entry in left:
            if entry.kept:
                waiting = tuple(
                    (c, str(e.job_id)) for c, e in _entries(unreachable, first) if not e.refused
                )
                return FirstStartedJob(session, entry, waiting)
        if not left and not unreachable:
            states = [f"job {e.job_id} of {c} is {e.state}" for c, e in _entries(sessions, first)]
            raise JobCancelledError(
                "all jobs of --first have ended before they ran",
                about="first",
                why=", ".join(states),
                fix="`clusterctl jobs ID` shows a job's reason; submit again",
            )
    raise WaitTimeoutError(
        "no job of --first has started in time",
        about="first",
        fix="the jobs stay in the queue; `clusterctl jobs` shows them, and chooses the first "
        "that started",
    )


def _settled(
    sessions: Sequence[Session], first: FirstGroup
) -> tuple[list[tuple[Session, JobEntry]], list[Session]]:
    """Settle the jobs on all clusters. Return the jobs left, and the clusters without an answer."""
    left: list[tuple[Session, JobEntry]] = []
    unreachable = []
    for session in sessions:
        try:
            left += [
                (session, entry) for entry in settle(session.scheduler, session.ledger, first.id)
            ]
        except TransportError:
            unreachable.append(session)
    return left, unreachable


def _entries(sessions: Sequence[Session], first: FirstGroup) -> Iterator[tuple[str, JobEntry]]:
    """Yield (cluster, job) for each job of a `submit --first` that Slurm accepted."""
    for session in sessions:
        for entry in session.ledger.entries():
            if entry.first == first.id and entry.job_id:
                yield session.inventory.cluster, entry
