"""How a cluster goes: its runs come home, all of it is removed, and an independent look proves that."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from clusterctl import runs
from clusterctl.errors import (
    ClusterctlError,
    CollectError,
    Failure,
    LeftoversError,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.providers.base import Leftover, Provider
from clusterctl.scheduler.session import applied_spec
from clusterctl.state.ledger import JobEntry, Ledger, RunRecord
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Reporter


@dataclass(frozen=True, slots=True)
class Orphan:
    """A cluster that no workspace here knows any more, and what there is of it."""

    cluster_id: str
    left: tuple[Leftover, ...]


def to_discard(workspace: Workspace, ids: Collection[str], *, everything: bool) -> tuple[JobEntry, ...]:
    """The submissions whose runs are not home and are given up: those of the jobs ``ids``, or all.

    Raises:
        UsageError: one of the ids is of no job that was submitted from here.
    """
    not_home = runs.uncollected(workspace)
    submitted = {entry.job_id for entry in Ledger(workspace.jobs).entries()}
    if unknown := [job_id for job_id in ids if job_id not in submitted]:
        there = ", ".join(entry.job_id for entry in not_home if entry.job_id) or "none"
        raise UsageError(
            f"there is no run of job {', '.join(unknown)} to discard",
            why="no such job was submitted from here",
            fix=f"the jobs whose runs are not home: {there}",
        )
    return tuple(entry for entry in not_home if everything or entry.job_id in ids)


def bring_home(
    workspace: Workspace, out: Path | None, discard: Collection[JobEntry] = ()
) -> tuple[RunRecord, ...]:
    """Collect what was not collected yet, but for what is to be discarded.

    Raises:
        CollectError: a run could not be brought home; all others were.
    """
    ids = [entry.job_id for entry in discard if entry.job_id]
    try:
        return runs.collect_all(applied_spec(workspace), workspace, out=out, discard=ids)
    except (CollectError, SchedulerError, TransportError, UsageError) as exc:
        raise stays_up(exc, ids) from exc


def stays_up(exc: ClusterctlError, discarded: Sequence[str] = ()) -> CollectError:
    """The error of a `down` that could not collect: which jobs' runs, why, and how to give up these alone,
    beside those that are ``discarded`` already.
    """
    jobs = exc.jobs if isinstance(exc, CollectError) else ()
    whose = f"job {jobs[0]}: " if len(jobs) == 1 else ""
    given_up = (*discarded, *jobs) if jobs else ()
    options = " ".join(f"--discard-run {job_id}" for job_id in given_up) or "--discard-runs"
    remedy = (
        exc.fix if isinstance(exc, CollectError) else "converge it with `clusterctl up`, then take it down"
    )
    return CollectError(
        "the cluster stays up: runs that are not home yet can't be collected",
        where=exc.where,
        why=f"{whose}{exc.what}: {exc.why}" if exc.why else f"{whose}{exc.what}",
        fix=f"{remedy}; or give these runs up: {options}",
        failures=exc.failures if jobs else (),
    )


def find_orphans(provider: Provider, name: str, *, known: str | None) -> tuple[Orphan, ...]:
    """The clusters of that name that the provider has, but for the one whose id is ``known``."""
    ids = (cluster_id for cluster_id in provider.orphans(name) if cluster_id != known)
    return tuple(Orphan(cluster_id, provider.leftovers(cluster_id)) for cluster_id in ids)


def destroy_lost(provider: Provider, name: str, workspace: Workspace, report: Reporter) -> None:
    """Remove the clusters of that name that were lost: an `up` that came to no hosts took their name.

    Raises:
        LeftoversError: something of one is still there.
    """
    for orphan in find_orphans(provider, name, known=workspace.known_id()):
        destroy(provider, orphan.cluster_id, None, report)


def destroy(provider: Provider, cluster_id: str, workspace: Workspace | None, report: Reporter) -> None:
    """Remove everything of a cluster, and look whether anything is left.

    Raises:
        LeftoversError: something is; one failure each, with its cost.
    """
    provider.destroy(cluster_id, workspace=workspace, report=report)
    left = provider.leftovers(cluster_id)
    if left:
        fix = "run `clusterctl down` again; what stays then has to be removed by hand"
        raise LeftoversError(
            "something of the cluster is still there",
            why="; ".join(map(str, left)),
            fix=fix,
            failures=tuple(Failure(LeftoversError.code, str(one), phase="destroy", fix=fix) for one in left),
        )
