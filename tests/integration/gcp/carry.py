"""`up` or `down` of a ``Terraformed`` cluster in a process that a test kills.

Its arguments are FOLDER VERB CLUSTER_ID PROJECT ZONE CONTROLLER. It imports no stand-in, which
would take a third of its time.
"""

from __future__ import annotations

import sys
from pathlib import Path

from clusterctl.providers.gcp.apply import Owner, Place, apply_plan
from clusterctl.providers.gcp.terraform import Terraform
from clusterctl.util.progress import HostStep, Reporter


class Lines(Reporter):
    def progress(self, message: str | HostStep) -> None:
        sys.stdout.write(f"{message}\n")
        sys.stdout.flush()


def main(folder: str, verb: str, cluster_id: str, *at: str) -> None:
    place = Place(*at, enables_apis=True)  # as that of terraformed.py
    terraform = Terraform(Path(folder), Lines(), place.explain, place.name)
    plan = terraform.plan(destroy=verb == "down")
    terraform.reporter.progress("planned")
    apply_plan(terraform, plan, Owner(cluster_id))


if __name__ == "__main__":
    main(*sys.argv[1:])
