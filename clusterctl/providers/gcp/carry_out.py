"""Carries out a plan on Google Cloud: waits where that helps, and takes over what an earlier run left there.

A machine that was made while Terraform, its provider or clusterctl was killed is not in the state: making it
again says that it exists. If it is this cluster's, by its label or by the id in its name, it is taken into
the state by the plan that goes on from there; what is somebody else's is never touched. Quota and stock-out
are not waited for: the user decides.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from clusterctl.errors import TerraformError
from clusterctl.providers.gcp.labels import cluster_id_of
from clusterctl.providers.gcp.terraform import Plan, ResourceChange, Terraform
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


def carry_out(
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
