"""`up`, `down` or `remove` of a ``Terraformed`` cluster as a process of its own, to be killed.

Its arguments are FOLDER VERB CLUSTER_ID PROJECT ZONE CONTROLLER. `remove` is `down` with what only Google's
API shows, as ``GcpProvider.destroy`` has it. It imports no stand-in, which would take a third of its time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

from clusterctl.errors import ProvisionError
from clusterctl.providers.gcp.api import Api
from clusterctl.providers.gcp.apply import Owner, Place, apply_plan, explaining, names
from clusterctl.providers.gcp.orphans import find_resources, remove_resources
from clusterctl.providers.gcp.terraform import Terraform


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def removing(api: Api, cluster_id: str, tell: Callable[[str], None]) -> Callable[[], None]:
    """What removes all of the cluster that Google's API shows."""
    return lambda: remove_resources(api, find_resources(api, cluster_id), report=tell)


def main(folder: str, verb: str, cluster_id: str, *at: str) -> None:
    place = Place(*at, enables_apis=True)  # as that of terraformed.py
    terraform = Terraform(Path(folder), report, explain=explaining(place), names=names(place))
    remove = removing(Api(place.project), cluster_id, report)
    plan = terraform.plan(destroy=verb != "up")
    report("planned")
    try:
        apply_plan(terraform, plan, Owner(cluster_id, remove if verb == "remove" else None), report=report)
    except ProvisionError as exc:
        if verb != "remove":
            raise
        report(exc.cause)
    if verb == "remove":
        remove()


if __name__ == "__main__":
    main(*sys.argv[1:])
