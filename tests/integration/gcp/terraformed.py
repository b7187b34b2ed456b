"""A cluster on the doubles of Google: GcpProvider, the real Terraform module, plan and apply.

cluster = Terraformed(tmp_path, cloud, google)            # demo-ctl and demo-train-1..N, nothing made yet
cluster.nodes(4); cluster.up()
cluster.cloud.fail("quota_of_region", name="demo-train-*")   # see cloud.py
cluster.said                                              # what a user would have read
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from clusterctl.providers.base import Prompts
from clusterctl.providers.gcp.apply import ProjectZone, apply_plan
from clusterctl.providers.gcp.costs import INSTANCE
from clusterctl.providers.gcp.orphans import ID_LABEL
from clusterctl.providers.gcp.provider import GcpProvider
from clusterctl.providers.gcp.terraform import UNKNOWN, Terraform
from clusterctl.spec.load import dump_spec, parse_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.spec.providers.gcp import GcpSettings
from clusterctl.util.progress import Clock
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.terraform import RecordingReporter
from tests.unit.gcp.clusters import put_own_network, workspace_in

PLACE = ProjectZone(PROJECT, "us-central1-a", "demo-ctl")
SPEC = """
version: 1
name: demo
provider:
  {{{more}type: gcp, project: demo-project, zone: us-central1-a, partitions: {{train: {{{settings}}}}}}}
partitions: [{{name: train, nodes: {nodes}, gpus: {{type: nvidia-l4, count: 1}}}}]
"""


class Terraformed:
    """The cluster `demo`, and its cloud, which also has a network of somebody's own."""

    def __init__(self, folder: Path, cloud: GoogleCloud, google: Google) -> None:
        self.cloud = cloud
        self.google = google
        self.workspace = workspace_in(folder / "home")
        self.reporter = RecordingReporter()
        self.said = self.reporter.lines
        self.waited: list[float] = []
        put_own_network(cloud)
        self.own = set(cloud.resources())
        self.nodes(2)

    def nodes(self, count: int, settings: str = "", more: str = "") -> None:
        """Ask for so many nodes, with ``settings`` of their partition and ``more`` of the
        provider.
        """
        more = more and f"{more}, "
        text = SPEC.format(nodes=count, settings=settings, more=more)
        self.spec: ClusterSpec = parse_spec(text, "cluster.yaml")
        self.workspace.spec.write_text(dump_spec(self.spec))

    @property
    def provider(self) -> GcpProvider:
        """A provider as each command has a new one, but for its pauses."""
        assert isinstance(self.spec.provider, GcpSettings)
        made = GcpProvider(self.spec.provider, Prompts(reporter=self.reporter))
        made._api.clock = Clock(sleep=self.waited.append)
        return made

    @property
    def terraform(self) -> Terraform:
        return self.provider._terraform(self.workspace, self.spec.controller_host)

    @property
    def resources(self) -> set[str]:
        """The ids of what exists, but for the network that is somebody's own."""
        return set(self.cloud.resources()) - self.own

    def up(self) -> None:
        """Plan and carry out."""
        provider = self.provider
        provider.plan(self.spec, self.workspace)
        done = provider.apply(self.spec, self.workspace)
        self.workspace.inventory.write_text(done.inventory.text)

    def down(self) -> None:
        """Have Terraform alone remove all."""
        apply_plan(
            self.terraform, self.terraform.plan(destroy=True), clock=self.provider._api.clock
        )

    def destroy(self) -> None:
        """Remove all as `down` does."""
        self.provider.destroy(self.workspace.cluster_id(), workspace=self.workspace)

    def argv(self, verb: str) -> list[str]:
        """Return the command line of a process that does the same, and that a test kills."""
        return [sys.executable, "-m", "tests.integration.gcp.carry", str(self.workspace.root), verb]

    def plant(self, host: str, *, cluster_id: str) -> dict[str, Any]:
        """Have an instance of that name there already, as asked for but for whose it is; its
        attributes.
        """
        self.provider.plan(self.spec, self.workspace)
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
