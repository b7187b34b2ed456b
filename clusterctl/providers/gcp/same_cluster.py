"""That a plan is for the cluster that its state has: else it would remove another's, or forget ours."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from clusterctl.errors import ProvisionError, UsageError
from clusterctl.providers.gcp.labels import cluster_id_of
from clusterctl.providers.gcp.terraform import Plan

_COSTS: Final = ("google_compute_", "google_filestore_")


def refuse_another(plan: Plan, cluster_id: str) -> None:
    """That nothing in the state bears another cluster's id, as where two share a bucket for their states.

    Raises:
        ProvisionError: something does.
    """
    ids = {found for there in _there(plan) if (found := cluster_id_of(there)) not in (None, cluster_id)}
    if ids:
        raise ProvisionError(
            f"Terraform's state is that of another cluster: {', '.join(sorted(map(str, ids)))}",
            where="provider.state",
            why=f"this one is {cluster_id}; the other would be taken to pieces",
            fix="give this cluster another name, or its state another prefix; if the other was yours and its "
            "workspace was lost, remove it first: `clusterctl down --orphans`",
        )


def refuse_moved(plan: Plan, project: str) -> None:
    """That what is there is in the project of the spec: `down` looks for what is left in one project alone.

    Raises:
        UsageError: it is in another one.
    """
    projects = {str(there["project"]) for there in _there(plan, _COSTS) if there.get("project")} - {project}
    if projects:
        raise UsageError(
            f"the cluster is in the project {', '.join(sorted(projects))} already",
            where="provider.project",
            fix="put provider.project back; or take the cluster down first, which is done where it is",
        )


def _there(plan: Plan, types: tuple[str, ...] = ("google_",)) -> Iterator[Mapping[str, Any]]:
    return (change.before for change in plan.changes if change.before and change.type.startswith(types))
