"""A copy of terraform/gcp, and real Terraform on it with the cloud double.

module = Module(tmp_path)                        # copies the module; `terraform init` is done
module.set(variables(spec_of("t4"), CLUSTER_ID, PUBLIC_KEY))   # what clusterctl would write
module.apply(); module.plan()                    # each fails the test when Terraform does
module.run("plan").stderr                        # or see for yourself
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from clusterctl.spec.load import CurrentUser, load_spec
from clusterctl.spec.models import ClusterSpec
from clusterctl.util.assets import data_folder
from tests.support.google.cloud import GoogleCloud

SPECS = Path(__file__).with_name("specs")
NAMES = tuple(sorted(path.stem for path in SPECS.glob("*.yaml")))
CLUSTER_ID = "0123ab"
PUBLIC_KEY = (
    "ssh-ed25519 AAAAC3NzaC1lZDI1NTE5AAAAIPublicPublicPublicPublicPublicPublicPubl clusterctl"
)
VARIABLES = "clusterctl.auto.tfvars.json"


def spec_of(name: str) -> ClusterSpec:
    """Return one of the shared specs."""
    return load_spec(SPECS / f"{name}.yaml", current_user=CurrentUser(name="ada", uid=1001))


def labels(cluster: str, cluster_id: str) -> dict[str, str]:
    """Return the labels that the module gives every resource of a cluster."""
    return {"clusterctl-cluster": cluster, "clusterctl-id": cluster_id}


def description(cluster: str, cluster_id: str) -> str:
    """Return the same information as a description, for resources that can't have labels."""
    return f"clusterctl-cluster={cluster} clusterctl-id={cluster_id}"


@dataclass(frozen=True)
class TerraformResult:
    """The result of a Terraform command. ``said``: its output without frames and line breaks."""

    rc: int
    stdout: str
    stderr: str

    @property
    def said(self) -> str:
        return " ".join(f"{self.stdout} {self.stderr}".replace("│", " ").split())


class Module:
    """A copy of the Terraform module in ``folder``. Default ``source``: the project's own module."""

    def __init__(self, folder: Path, *, source: Path | None = None) -> None:
        self.cloud = GoogleCloud(folder)
        self.path = folder / "terraform"
        shutil.copytree(source or data_folder("terraform") / "gcp", self.path)
        self._good("init")

    def set(self, values: dict[str, Any]) -> None:
        """Write these variables."""
        (self.path / VARIABLES).write_text(json.dumps(values, indent=1))

    def apply(self) -> str:
        return self._good("apply", "-auto-approve").said

    def plan(self) -> dict[str, list[str]]:
        """Plan. Return address -> actions of each resource that changes."""
        changes = self.planned()["resource_changes"]
        actions = {each["address"]: each["change"]["actions"] for each in changes}
        return {address: done for address, done in actions.items() if done != ["no-op"]}

    def planned(self) -> dict[str, Any]:
        """Plan. Return the plan as `terraform show -json` prints it."""
        self._good("plan", "-out=plan.tfplan")
        plan: dict[str, Any] = json.loads(self._good("show", "-json", "plan.tfplan").stdout)
        return plan

    def outputs(self) -> dict[str, Any]:
        found = json.loads(self._good("output", "-json").stdout)
        return {name: each["value"] for name, each in found.items()}

    def run(self, verb: str, *options: str) -> TerraformResult:
        """Run any Terraform command, whether it fails or not."""
        colors = () if verb in {"fmt", "state"} else ("-no-color",)
        done = subprocess.run(
            [self.cloud.terraform, verb, *colors, *options],
            cwd=self.path,
            env=os.environ | self.cloud.env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        return TerraformResult(done.returncode, done.stdout, done.stderr)

    def _good(self, verb: str, *options: str) -> TerraformResult:
        ran = self.run(verb, *options)
        assert ran.rc == 0, f"terraform {verb}: {ran.said}"
        return ran
