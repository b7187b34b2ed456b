"""Applies a Terraform plan on Google Cloud: retries transient errors, imports what an earlier run left there.

A machine that was made while Terraform, its provider or clusterctl was killed is not in the state: making it
again says that it already exists. If it is this cluster's, by its label or by the id in its name, it is
imported into the state by the plan that goes on from there; what is somebody else's is never touched. Quota
and stock-out are not waited for: the user decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final

from clusterctl.errors import ProvisionError, TerraformError, UsageError
from clusterctl.providers.gcp.orphans import cluster_id_of
from clusterctl.providers.gcp.terraform.client import Terraform
from clusterctl.providers.gcp.terraform.plan import Plan, ResourceChange
from clusterctl.util.progress import LineReporter

WAITS_S: Final = (5, 10, 20, 40, 60, 60)
_LAYERS: Final = 12  # of what depends on each other, taken over one after the other
_IN_USE: Final = "in-use"
_NAMES: Final = ("name", "account_id", "role_id")


@dataclass(frozen=True, slots=True)
class Owner:
    """The cluster, by its id. ``clear`` removes all of it that is not in the state."""

    cluster_id: str
    clear: Callable[[], None] | None = None

    def owns(self, change: ResourceChange) -> bool:
        """Whether what is there is this cluster's: by label, by description, by name where it has neither."""
        there = change.before or {}
        if (marked := cluster_id_of(there)) is not None:
            return marked == self.cluster_id
        parts = {part for name in _NAMES for part in str(there.get(name)).replace("_", "-").split("-")}
        return self.cluster_id in parts


def apply_plan(
    terraform: Terraform,
    plan: Plan,
    owner: Owner,
    *,
    report: LineReporter,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Do what ``plan`` shows, to the end.

    Raises:
        TerraformError: part of it can't be done; what was done stays, and the next run goes on from there.
        StalePlanError: something else would have to be done by now.
    """
    waits, layers, clear = iter(WAITS_S), iter(range(_LAYERS)), owner.clear
    adopt: Mapping[str, str] = MappingProxyType({})
    failed: TerraformError | None = None
    while True:
        try:
            left = plan if failed is None else terraform.rest_of(plan, adopt=adopt)
            if all(owner.owns(change) for change in left.changes if change.adopts):
                return terraform.apply(left)
        except TerraformError as error:
            failed, adopt = error, {}
            if error.already_exists and next(layers, None) is not None:
                adopt = error.already_exists
                names = ", ".join(identity.rpartition("/")[2] for identity in adopt.values())
                report(f"there already: {names}; looking whether it is this cluster's")
            elif clear is not None and plan.destroys and any(f.code == _IN_USE for f in error.failures):
                report("removing what is the cluster's, but not in Terraform's state")
                clear()
                clear = None
            elif error.transient and (seconds := next(waits, None)) is not None:
                report(
                    f"{'; '.join(dict.fromkeys(f.cause for f in error.failures))}; going on in {seconds} s"
                )
                sleep(seconds)
            else:
                raise
        else:
            assert failed is not None  # noqa: S101  # only then is something taken over
            raise failed  # what is there is another's


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
