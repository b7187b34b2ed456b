"""`up` or `down` of a ``Terraformed`` cluster as a process of its own, to be killed: FOLDER up|down."""

from __future__ import annotations

import sys
from pathlib import Path

from clusterctl.providers.gcp.apply import Owner, apply_plan, explaining, names
from clusterctl.providers.gcp.terraform import Terraform
from tests.support.google.terraformed import CLUSTER_ID, PLACE


def report(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def main(folder: str, verb: str) -> None:
    terraform = Terraform(Path(folder), report, explain=explaining(PLACE), names=names(PLACE))
    plan = terraform.plan(destroy=verb == "down")
    report("planned")
    apply_plan(terraform, plan, Owner(CLUSTER_ID), report=report)


if __name__ == "__main__":
    main(*sys.argv[1:])
