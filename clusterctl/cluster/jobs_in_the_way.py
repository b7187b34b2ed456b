"""The jobs on nodes whose hardware is to be taken up: Slurm would end them, so such a node waits."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress
from typing import Final

from clusterctl.errors import ClusterctlError, SchedulerError, TransportError
from clusterctl.jobs.control import active_jobs
from clusterctl.scheduler.base import Scheduler
from clusterctl.scheduler.models import JobInfo

REASON: Final = "clusterctl: its hardware changes"


def at_work(scheduler: Scheduler, hosts: Collection[str]) -> dict[str, str]:
    """Those of the hosts on which jobs are at work, or may be, in words."""
    try:
        return _named(hosts, active_jobs(scheduler))
    except (SchedulerError, TransportError) as exc:
        return _unknown(hosts, exc)


def keep_free(scheduler: Scheduler, hosts: Collection[str]) -> dict[str, str]:
    """As ``at_work``, and on the others no job begins until `up` resumes them, which it does to prove them.

    They are drained before the question, those at work put back after it. What nobody could use anyway
    keeps the reason that it has.
    """
    drained: list[str] = []
    try:
        drained = sorted(node.name for node in scheduler.nodes() if node.name in hosts and node.usable)
        if drained:
            scheduler.drain(drained, REASON)
        found = _named(hosts, active_jobs(scheduler))
    except (SchedulerError, TransportError) as exc:
        found = _unknown(hosts, exc)
    if back := [host for host in drained if host in found]:
        with suppress(TransportError):  # proving them will do it
            scheduler.resume(back)
    return found


def _named(hosts: Collection[str], active: Iterable[JobInfo]) -> dict[str, str]:
    known = tuple(active)
    found: dict[str, str] = {}
    for host in sorted(hosts):
        if ids := [job.id for job in known if host in job.nodes]:
            which = f"job {ids[0]} is" if len(ids) == 1 else f"jobs {', '.join(ids)} are"
            found[host] = (
                f"{which} at work there, which Slurm would end; run `clusterctl up` again afterwards"
            )
    return found


def _unknown(hosts: Collection[str], exc: ClusterctlError) -> dict[str, str]:
    why = f"Slurm does not say which jobs are at work there ({exc.why or exc.what})"
    return dict.fromkeys(hosts, f"{why}; run `clusterctl up` again once it does")
