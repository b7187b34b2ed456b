"""The present state of a cluster, for `top`: its nodes, its queue, and the user's running jobs.

Slurm is asked at the pace of the site, and the jobs' folders at each look: telemetry, metrics and
logs of the jobs are files there (readings.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from clusterctl.jobs.events import QueryTimer, with_hangs
from clusterctl.jobs.messages import TELLS_NOBODY, JobMessages
from clusterctl.jobs.queue import known_jobs
from clusterctl.jobs.readings import NO_TELEMETRY_S, JobUse, Readings, read
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo, plain
from clusterctl.scheduler.session import (
    SHOWN_PATIENCE_S,
    Session,
    connections_of,
    session_of,
    site_of,
)
from clusterctl.scheduler.sites.site import Overview
from clusterctl.scheduler.slurm.parse import PartitionInfo
from clusterctl.state.chosen import naming_lock_holder
from clusterctl.state.inventory import job_inventory
from clusterctl.state.workspace import Workspace
from clusterctl.transport.base import Connect

# The folders of at most this many running jobs are read, the newest first.
MOST_READ: Final = 64
# A node is silent after so many intervals of telemetry without a sample.
_SAMPLES: Final = 3


@dataclass(frozen=True, slots=True)
class ClusterMoment:
    """The state of a cluster at a time.

    asked_s: how long ago the scheduler was asked. pace_s: it is asked at most once in this time, in
        seconds; 0: at each look.
    user: the account that the user's jobs run as. jobs: those in the queue, newest first. uses: job
        id -> the activity of the job, for the user's running jobs. unread: the number of further
        running jobs of the user.
    """

    cluster: str
    user: str = ""
    asked_s: float = 0.0
    pace_s: float = 0.0
    nodes: tuple[NodeInfo, ...] = ()
    partitions: tuple[PartitionInfo, ...] = ()
    jobs: tuple[JobInfo, ...] = ()
    uses: Mapping[str, JobUse] = field(default_factory=dict)
    unread: int = 0

    def as_dict(self) -> dict[str, Any]:
        nodes = [
            {
                key: getattr(node, key)
                for key in (
                    "name cpus allocated_cpus memory_mib allocated_mib load gres gres_used reason"
                ).split()
            }
            | {"state": node.shown}
            for node in self.nodes
        ]
        return {
            "cluster": self.cluster,
            "asked_s": round(self.asked_s, 1),
            "pace_s": self.pace_s,
            "nodes": nodes,
            "partitions": [asdict(partition) for partition in self.partitions],
            "jobs": [job.as_dict() | {"use": plain(self.uses.get(job.id))} for job in self.jobs],
            "unread": self.unread,
        }


class ClusterWatch:
    """A look at a cluster, again and again. ids: only these jobs; empty: all of the queue.

    told: sends messages about the user's jobs.
    """

    def __init__(
        self,
        session: Session,
        to: Connect,
        ids: Sequence[str] = (),
        told: JobMessages = TELLS_NOBODY,
    ) -> None:
        self._session = session
        self._to = to
        self._ids = tuple(ids)
        self._told = told
        self._turn = QueryTimer(session)
        self._asked_at = 0.0
        self._overview = Overview((), is_ready=False)
        self._readings: dict[str, Readings] = {}

    def look(self) -> ClusterMoment:
        """Return the state of the cluster now.

        Raises:
            UsageError: an id is malformed, or selects a job that has ended.
            SchedulerError, TransportError: the cluster does not answer, or a job is unknown.
        """
        clock = self._session.scheduler.clock
        if self._turn.is_due(self._overview.jobs):
            self._overview = self._ask()
            self._asked_at = clock.now()
            self._tell()
        # Ended jobs stay in Slurm's queue for some minutes.
        jobs = tuple(job for job in self._overview.jobs if not job.ended or job.token)
        running = [job for job in jobs if job.state is JobState.RUNNING and self._is_own(job)]
        read_jobs = running[:MOST_READ]
        self._readings = {job.id: self._readings.get(job.id, Readings()) for job in read_jobs}
        read(self._session, read_jobs, self._readings, clock.now())
        now = clock.now()
        silent_s = max(NO_TELEMETRY_S, _SAMPLES * self._session.inventory.interval_s)
        return ClusterMoment(
            cluster=self._session.inventory.cluster,
            user=self._session.inventory.job_user,
            asked_s=now - self._asked_at,
            pace_s=self._session.site.pace.changed_s,
            nodes=self._overview.nodes,
            partitions=self._overview.partitions,
            jobs=jobs,
            uses={job.id: self._readings[job.id].use(job, now, silent_s) for job in read_jobs},
            unread=len(running) - len(read_jobs),
        )

    @property
    def has_ended(self) -> bool:
        """Whether all jobs of ``ids`` have ended, so that nothing more happens."""
        return bool(self._ids) and all(job.ended for job in self._overview.jobs)

    def _tell(self) -> None:
        if self._told is not TELLS_NOBODY:
            own = [job for job in self._overview.jobs if self._is_own(job)]
            self._told.look(self._session, with_hangs(self._session, own))

    def _ask(self) -> Overview:
        if self._ids:
            return Overview(known_jobs(self._session, self._ids), is_ready=True)
        overview = self._session.site.overview(self._session.scheduler, self._to)
        if not self._session.inventory.traits.shares_kernel:
            return overview
        # Each node reports the load of the machine, which is that of all nodes and of other programs.
        nodes = tuple(replace(node, load=None) for node in overview.nodes)
        return replace(overview, nodes=nodes)

    def _is_own(self, job: JobInfo) -> bool:
        return bool(job.token) and job.user == self._session.inventory.job_user


@contextmanager
def watching(
    workspace: Workspace, ids: Sequence[str] = (), told: JobMessages = TELLS_NOBODY
) -> Iterator[ClusterWatch]:
    """Open a connection to a cluster to look at it. ids, told: see ``ClusterWatch``.

    Raises the errors of ``status_of``.
    """
    with naming_lock_holder(workspace):
        site = site_of(job_inventory(workspace))
        with connections_of(site, workspace) as connections:
            session = session_of(site, workspace, connections, patience_s=SHOWN_PATIENCE_S)
            yield ClusterWatch(session, connections.to, ids, told)
