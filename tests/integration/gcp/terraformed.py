"""A cluster on the cloud double: the real Terraform module, plan and apply.

cluster = Terraformed(tmp_path, monkeypatch.setenv)       # demo-ctl and demo-train-1..N, nothing made yet
cluster.nodes(4); cluster.up()                            # -> the plan that was carried out
cluster.cloud.fail("quota_of_region", name="demo-train-*")   # see cloud.py
cluster.said                                              # what a user would have read
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from clusterctl.providers.gcp.apply import Owner, Place, apply_plan
from clusterctl.providers.gcp.costs import INSTANCE
from clusterctl.providers.gcp.orphans import ID_LABEL
from clusterctl.providers.gcp.provider import variables
from clusterctl.providers.gcp.terraform import UNKNOWN, Plan, Terraform
from clusterctl.spec.load import parse_spec
from clusterctl.util.assets import data_folder
from clusterctl.util.progress import Clock
from tests.support.google.cloud import GoogleCloud
from tests.support.terraform import RecordingReporter, addresses, in_state

CLUSTER_ID = "a1b2c3"
PLACE = Place("my-project", "us-central1-a", "demo-ctl", enables_apis=True)
SPEC = """
version: 1
name: demo
provider: {{type: gcp, project: my-project, zone: us-central1-a, partitions: {{train: {{{settings}}}}}{more}}}
partitions: [{{name: train, nodes: {nodes}, gpus: {{type: nvidia-l4, count: 1}}}}]
"""


class Terraformed:
    """The cluster `demo` of the id ``CLUSTER_ID``, and its cloud."""

    def __init__(self, folder: Path, setenv: Callable[[str, str], None], *, lag: int = 0) -> None:
        self.cloud = GoogleCloud(folder, lag=lag)
        for name, value in self.cloud.env.items():
            setenv(name, value)
        self.folder = folder / "terraform"
        shutil.copytree(data_folder("terraform") / "gcp", self.folder)
        reporter = RecordingReporter()
        self.said = reporter.lines
        self.waited: list[float] = []
        self.terraform = Terraform(self.folder, reporter, PLACE.explain, PLACE.name)
        self.nodes(2)
        self.terraform.init()

    def nodes(self, count: int, settings: str = "", more: str = "") -> None:
        """Ask for so many nodes, with ``settings`` of their partition and ``more`` of the
        provider.
        """
        more = more and f", {more}"
        spec = parse_spec(SPEC.format(nodes=count, settings=settings, more=more), "cluster.yaml")
        chosen = variables(spec, CLUSTER_ID, "ssh-ed25519 AAAA clusterctl")
        (self.folder / "clusterctl.auto.tfvars.json").write_text(json.dumps(chosen))

    def up(self) -> Plan:
        """Plan and carry out."""
        plan = self.terraform.plan()
        apply_plan(self.terraform, plan, Owner(CLUSTER_ID), clock=Clock(sleep=self.waited.append))
        return plan

    def down(self) -> None:
        """Plan to remove all, and carry that out."""
        plan = self.terraform.plan(destroy=True)
        apply_plan(self.terraform, plan, Owner(CLUSTER_ID), clock=Clock(sleep=self.waited.append))

    def forget(self, host: str) -> None:
        """Remove an instance from the state, as if Terraform was killed before it wrote the state."""
        (address,) = (
            each for each in addresses(self.terraform) if f'"{host}"].google_compute_inst' in each
        )
        in_state(self.terraform, "rm", address)

    def plant(self, host: str, *, cluster_id: str) -> dict[str, Any]:
        """Have an instance of that name there already, as asked for but for whose it is; its
        attributes.
        """
        (asked,) = (
            c.after for c in self.terraform.plan().changes if (c.after or {}).get("name") == host
        )
        there: dict[str, Any] = json.loads(json.dumps(asked).replace(f'"{UNKNOWN}"', "null"))
        there["id"] = f"projects/{PLACE.project}/zones/{PLACE.zone}/instances/{host}"
        for labels in ("labels", "effective_labels", "terraform_labels"):
            there[labels] = {ID_LABEL: cluster_id}
        with self.cloud.store.change() as world:
            world["resources"].setdefault(INSTANCE, {})[there["id"]] = there
        return there
