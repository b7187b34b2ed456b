"""The attempts of a job: the times in which it had its nodes.

Verbs about jobs need them, and no record of a run, whose models import pydantic.
"""

from __future__ import annotations

from dataclasses import dataclass

from clusterctl.util import formatting
from clusterctl.util.numbers import counted


@dataclass(frozen=True, slots=True, kw_only=True)
class AttemptRecord:
    """A time in which a job had its nodes, as Slurm knows it: from a start to the next requeue or
    the end. Unix seconds.

    state: Slurm's state of an attempt that has ended, such as PREEMPTED. "": unknown.
    suspended_s: seconds for which Slurm had stopped the job. Its nodes were those of other jobs.
    """

    start_time: int
    end_time: int | None = None
    nodes: tuple[str, ...] = ()
    state: str = ""
    suspended_s: int = 0

    def __str__(self) -> str:
        """Return a text such as ``2026-11-27 09:30:00 UTC on 2 nodes for 42s``."""
        lasted = "" if self.end_time is None else f" for {formatting.duration(self.seconds)}"
        nodes = counted(len(self.nodes), "node")
        return f"{formatting.moment(self.start_time, utc=True)} on {nodes}{lasted}"

    @property
    def seconds(self) -> int:
        """Duration without suspended time, as sacct has it; 0 if the attempt has not ended."""
        return self.seconds_until(self.start_time)

    def seconds_until(self, now: int) -> int:
        """Return the duration without suspended time; until ``now``, in Unix seconds, if the
        attempt has not ended.
        """
        whole = (now if self.end_time is None else self.end_time) - self.start_time
        return max(0, whole - self.suspended_s)
