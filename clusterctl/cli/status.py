"""status: how a cluster is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from clusterctl.cli.job_table import job_table
from clusterctl.cli.options import Options
from clusterctl.cli.output import Screen
from clusterctl.cluster.status import Status, status_of
from clusterctl.scheduler.base import JobState, NodeInfo
from clusterctl.spec.units import shown_memory

if TYPE_CHECKING:
    from clusterctl.providers.base import PendingRelease
    from clusterctl.scheduler.diagnosis import Diagnosis

# So many jobs get a line that tells what they wait for. As JSON, all of them do.
_MOST_WAITING: Final = 10


def status(screen: Screen, options: Options) -> None:
    """Show the state of nodes and jobs."""
    workspace = options.chosen(screen).workspace()
    found = status_of(workspace)
    waits: list[Diagnosis] = []
    if any(job.state is JobState.PENDING for job in found.jobs):
        # The catalogue of causes takes a while to read.
        from clusterctl.scheduler.diagnosis import waiting

        waits = waiting(found.jobs)
    releases: tuple[PendingRelease, ...] = ()
    if workspace.releases.exists():
        # Only machines of the user's own are released.
        from clusterctl.providers.base import pending_releases

        releases = pending_releases(workspace)
    answer = {
        "cluster": found.cluster,
        "provider": found.provider,
        "ready": found.ready,
        "nodes": [_node(node) for node in found.nodes],
        "jobs": [job.as_dict() for job in found.jobs],
        "waiting": [diagnosis.as_dict() for diagnosis in waits],
        "auto_down": found.auto_down,
        "pending_releases": [release.as_dict() for release in releases],
    }
    # A table of many jobs takes as long as the scheduler's answer.
    lines = [] if screen.json else _lines(screen, found, waits, releases)
    screen.result(answer, *lines)


def _node(node: NodeInfo) -> dict[str, Any]:
    """Return a node as `-o json` shows it."""
    return {
        "name": node.name,
        "state": node.shown,
        "cpus": node.cpus,
        "memory_mib": node.memory_mib,
        "reason": node.reason,
    }


def _lines(
    screen: Screen, found: Status, waits: Sequence[Diagnosis], releases: Sequence[PendingRelease]
) -> list[str]:
    """Return the lines for people: nodes, jobs with what they wait for, and what is left to do."""
    lines = [f"cluster {found.cluster} ({found.provider}): {'ready' if found.ready else 'NOT ready'}", ""]
    rows = [(n.name, n.shown, n.cpus, shown_memory(n.memory_mib), n.reason) for n in found.nodes]
    lines += screen.table(["NODE", "STATE", "CPUS", "MEMORY", "REASON"], rows)
    if found.jobs:
        lines += ["", *job_table(screen, found.jobs, users=True)]
        lines += ["", *(diagnosis.summary for diagnosis in waits[:_MOST_WAITING])] if waits else []
    if auto_down := found.auto_down:
        state = "" if auto_down["armed"] else ", but its timer does not run: `clusterctl up` starts it"
        lines += ["", f"an idle cluster takes itself down after {auto_down['after']}{state}"]
    for release in releases:
        lines += ["", str(release), f"  {release.fix}"]
    return lines
