"""`submit --first`: submit a job to several places, and keep the job that starts first."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from clusterctl.errors import ClusterctlError, JobCancelledError, TransportError, UsageError, WaitTimeoutError
from clusterctl.jobs.submit import PreparedJob, Submitted, Submitter, new_token
from clusterctl.scheduler.first import First, settle
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.state.facts import ClusterFacts
from clusterctl.state.submissions import JobEntry

_LONGEST_PAUSE_S = 10.0


@dataclass(frozen=True, slots=True)
class Place:
    """Where a job can run. None: the default partition or account of the cluster."""

    cluster: str
    partition: str | None = None
    account: str | None = None

    @property
    def shown(self) -> str:
        """The place as the user writes it."""
        text = f"{self.cluster}/{self.partition}" if self.partition else self.cluster
        return f"{text}@{self.account}" if self.account else text

    def of_job(self, job: JobSpec) -> JobSpec:
        """Return the job for this place."""
        chosen = {"partition": self.partition, "account": self.account}
        return job.model_copy(update={name: value for name, value in chosen.items() if value is not None})


def places_of(text: str, facts: ClusterFacts, clusters: Sequence[str]) -> tuple[Place, ...]:
    """Parse places such as ``train,other@account`` or ``train,cluster/partition``.

    facts: of the chosen cluster. clusters: the names of all clusters.
    Raises UsageError if a place is unknown, or if there are fewer than two places.
    """
    partitions = [partition.name for partition in facts.partitions]
    places = []
    for word in text.split(","):
        where, _, account = word.strip().partition("@")
        cluster, slash, partition = where.partition("/")
        if slash:
            place = Place(cluster, partition or None, account or None)
        elif where in partitions or (account and not where):
            place = Place(facts.cluster, where or None, account or None)
        else:
            place = Place(where, None, account or None)
        if place.cluster not in clusters:
            raise UsageError(
                f"--first: {word!r} is neither a partition nor a cluster",
                code="unknown-place",
                why=f"{facts.cluster} has the partitions {', '.join(partitions)}; the clusters are "
                f"{', '.join(clusters)}",
                fix="write CLUSTER/PARTITION for another cluster's partition, PLACE@ACCOUNT for an account",
            )
        places.append(place)
    if len(set(places)) < max(2, len(places)):
        raise UsageError(
            f"--first needs at least two different places, but got {text!r}",
            code="first-needs-places",
            fix="name partitions or clusters, such as --first short,long",
        )
    return tuple(places)


def reject_unfit(session: Session, job: JobSpec) -> None:
    """Raise UsageError if a job can't be submitted with --first to the cluster of a session."""
    # This property raises an error if the cluster has no Slurm.
    _ = session.slurm
    if not session.facts.is_shared:
        raise UsageError(
            f"--first needs a shared folder, which cluster {session.facts.cluster} does not have",
            code="first-needs-shared-folder",
            fix="use --partition",
        )
    if job.array or job.sweep:
        raise UsageError("--first does not apply to job arrays", code="first-of-array", fix="use --partition")


def submit_first(
    submitters: Mapping[str, Submitter], jobs: Sequence[tuple[str, PreparedJob]], first: First
) -> Iterator[tuple[str, Submitted]]:
    """Submit the jobs, given as (cluster, job), in turn. Yield each; after an error, cancel all of them.

    Raises the errors of ``Submitter.submit``.
    """
    done: list[tuple[str, str]] = []
    for cluster, job in jobs:
        try:
            submitted = submitters[cluster].submit(replace(job, first=first))
        except ClusterctlError:
            for where, job_id in done:
                submitters[where].session.scheduler.cancel([job_id])
                settle(submitters[where].session.scheduler, submitters[where].session.ledger, first.id)
            raise
        done.append((cluster, submitted.job_id))
        yield cluster, submitted


def new_first(clusters: Sequence[str]) -> First:
    """Return a new First for jobs on these clusters."""
    return First(new_token(), is_across=len(set(clusters)) > 1)


def wait_for_first(
    sessions: Sequence[Session], first: First, timeout_s: float | None
) -> tuple[Session, JobEntry]:
    """Wait until a job runs and the rest are cancelled. Return the job with the session of its cluster.

    While a cluster can't be reached, its jobs are not chosen, and the wait goes on.

    Raises:
        JobCancelledError: all jobs have ended before they could run.
        WaitTimeoutError: the time is up. The jobs stay in the queue.
        SchedulerError, MachineError: a cluster does not answer, or the choice can't be recorded.
    """
    clock = sessions[0].scheduler.clock
    for _ in clock.polls(timeout_s, longest_s=_LONGEST_PAUSE_S):
        left: list[tuple[Session, JobEntry]] = []
        is_complete = True
        for session in sessions:
            try:
                left += [(session, entry) for entry in settle(session.scheduler, session.ledger, first.id)]
            except TransportError:
                is_complete = False
        if is_complete and not left:
            raise JobCancelledError(
                "all jobs of --first have ended before they ran",
                code="first-all-cancelled",
                why="they were cancelled, or clusterctl did not choose a job in time",
                fix="submit again",
            )
        if is_complete and len(left) == 1 and left[0][1].kept:
            return left[0]
    raise WaitTimeoutError(
        "no job of --first has started in time",
        code="first-timeout",
        fix="the jobs stay in the queue; `clusterctl jobs` shows them, and chooses the first that started",
    )
