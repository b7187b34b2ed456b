"""How a cluster goes: its runs come home, all of it is removed, and an independent look proves that."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from clusterctl import collect
from clusterctl.access import spec_as_raised
from clusterctl.errors import (
    CollectError,
    Failure,
    LeftoversError,
    SchedulerError,
    TransportError,
    UsageError,
)
from clusterctl.providers.base import Leftover, Provider, Say
from clusterctl.records import RunRecord
from clusterctl.workspace import Workspace


@dataclass(frozen=True, slots=True)
class Orphan:
    """A cluster that no workspace here knows any more, and what there is of it."""

    cluster_id: str
    left: tuple[Leftover, ...]


def bring_home(workspace: Workspace, out: Path | None) -> tuple[RunRecord, ...]:
    """Collect what was not collected yet.

    Raises:
        CollectError: a run could not be brought home.
    """
    try:
        return collect.collect_all(spec_as_raised(workspace), workspace, out=out)
    except (CollectError, SchedulerError, TransportError, UsageError) as exc:
        fix = (
            exc.fix if isinstance(exc, CollectError) else "mend it with `clusterctl up` and take it down then"
        )
        raise CollectError(
            "the cluster stays up: runs that are not home yet can't be collected",
            where=exc.where,
            why=f"{exc.what}: {exc.why}" if exc.why else exc.what,
            fix=f"{fix}; or give the runs up: --discard-runs",
        ) from exc


def find_orphans(provider: Provider, name: str, *, known: str | None) -> tuple[Orphan, ...]:
    """The clusters of that name that the provider has, but for the one whose id is ``known``."""
    ids = (cluster_id for cluster_id in provider.orphans(name) if cluster_id != known)
    return tuple(Orphan(cluster_id, provider.leftovers(cluster_id)) for cluster_id in ids)


def destroy_lost(provider: Provider, name: str, workspace: Workspace, say: Say) -> None:
    """Remove the clusters of that name that were lost: an `up` that came to no hosts took their name.

    Raises:
        LeftoversError: something of one is still there.
    """
    for orphan in find_orphans(provider, name, known=workspace.known_id()):
        destroy(provider, orphan.cluster_id, None, say)


def destroy(provider: Provider, cluster_id: str, workspace: Workspace | None, say: Say) -> None:
    """Remove everything of a cluster, and look whether anything is left.

    Raises:
        LeftoversError: something is; one failure each, with its cost.
    """
    provider.destroy(cluster_id, workspace=workspace, say=say)
    left = provider.leftovers(cluster_id)
    if left:
        fix = "run `clusterctl down` again; what stays then has to be removed by hand"
        raise LeftoversError(
            "something of the cluster is still there",
            why="; ".join(map(str, left)),
            fix=fix,
            failures=tuple(Failure(LeftoversError.code, str(one), phase="destroy", fix=fix) for one in left),
        )
