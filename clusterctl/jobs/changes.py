"""How jobs change while they are watched, in lines for the user."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from clusterctl.errors import SchedulerError, TransportError
from clusterctl.scheduler.base import JobInfo, Outcome, state_counts
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.standing import out_of_service
from clusterctl.util.progress import LineReporter


@dataclass(slots=True)
class ChangeNotes:
    """Tells the user how jobs change, and once which nodes out of service they wait for.

    note: called with each line.
    """

    session: Session
    note: LineReporter
    _has_explained: bool = False

    def __call__(self, changed: Sequence[JobInfo], jobs: Sequence[JobInfo]) -> None:
        """Tell of the jobs that changed. ``jobs`` are all that are watched."""
        for whole_id in dict.fromkeys(job.whole_id for job in changed):
            tasks = [job for job in jobs if job.whole_id == whole_id]
            if len(tasks) > 1:
                self.note(f"job {whole_id}: {state_counts(tasks)}")
            for job in changed:
                if job.whole_id == whole_id:
                    self._tell(job, array=len(tasks) > 1)

    def _tell(self, job: JobInfo, *, array: bool) -> None:
        """Tell of a job; of a task of an array only if it did not complete."""
        where = f" on {','.join(job.nodes)}" if job.nodes else ""
        why = f" ({job.reason})" if job.reason not in {"", "None"} else ""
        if not array or job.outcome in {Outcome.FAILED, Outcome.CANCELLED}:
            self.note(f"job {job.id} {job.state.value}{where}{why}")
        if job.failed_to_launch:
            self.note(f"job {job.id} is held, since a node could not start it; `clusterctl up` releases it")
        elif job.lacks_nodes and not self._has_explained:
            self._explain(job)

    def _explain(self, job: JobInfo) -> None:
        with suppress(SchedulerError, TransportError):  # the user asked about the job
            partitions = {*job.partition.split(",")}
            nodes = [one for one in self.session.scheduler.nodes() if partitions.intersection(one.partitions)]
            if lines := out_of_service(nodes):
                self._has_explained = True
                self.note(f"job {job.id} waits for nodes that are out of service:")
                for line in lines:
                    self.note(f"  {line}")
