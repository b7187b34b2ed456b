"""A recorded Terraform plan in place of Terraform, for tests of the code around it.

``recorded/demo.json`` is what `terraform show -json` prints of a new cluster. test_gcp_golden.py
compares it with the plan of today's Terraform, and writes it with UPDATE_GOLDEN=1.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tf.types import Unknown

from clusterctl.providers.gcp import provider
from clusterctl.providers.gcp.costs import INSTANCE
from clusterctl.providers.gcp.provider import variables
from clusterctl.providers.gcp.storage import VARIABLES
from clusterctl.providers.gcp.terraform import (
    STATE_FILE,
    UNKNOWN,
    ResourceChange,
    Terraform,
    TerraformPlan,
    read_changes,
)
from clusterctl.providers.gcp.terraform_run import Diagnostic
from clusterctl.spec.load import parse_spec
from tests.support.google.api import Google as Api
from tests.support.google.cloud import GoogleCloud
from tests.support.google.provider.servicer import Google, RefusedError
from tests.support.google.provider.store import Store
from tests.unit.gcp.module import PUBLIC_KEY

PATH = Path(__file__).with_name("recorded") / "demo.json"
PROJECT = "my-project"
CLUSTER_ID = "a1b2c3"
CONTROLLER = "module.controller."
NODE = 'module.nodes.module.partition["train"]'
SPEC = f"""\
version: 1
name: demo
provider: {{type: gcp, project: {PROJECT}, zone: us-central1-a}}
partitions: [{{name: train, nodes: 1, gpus: {{type: l4}}}}]
"""
READ = ("actions", "before", "after", "after_unknown")


def variables_of_plan() -> dict[str, Any]:
    """Return the variables of the recorded plan."""
    return variables(parse_spec(SPEC, "cluster.yaml"), CLUSTER_ID, PUBLIC_KEY)


def as_file(changes: Sequence[Mapping[str, Any]]) -> str:
    """Return the used parts of `resource_changes`, with a line for each resource."""
    lines = [
        json.dumps(
            {
                **{name: each[name] for name in ("address", "type", "index") if name in each},
                "change": {name: each["change"][name] for name in READ},
            }
        )
        for each in changes
    ]
    return '{"resource_changes": [\n' + ",\n".join(lines) + "\n]}\n"


def demo(project: str = PROJECT, cluster_id: str = CLUSTER_ID) -> tuple[ResourceChange, ...]:
    """Return the recorded changes that create the cluster in this project, with this id."""
    text = PATH.read_text().replace(PROJECT, project).replace(CLUSTER_ID, cluster_id)
    return tuple(
        change for change in read_changes(json.loads(text)) if change.type.startswith("google_")
    )


class Recorded(Terraform):
    """Makes and removes what the recorded plan has, node by node as the variables name them, in a
    cloud.

    Attributes of what is there stay as they are. The state is a file: the type and the id of each
    address.
    """

    def __init__(self, cloud: Store, *words: Any, **options: Any) -> None:
        super().__init__(*words, **options)
        self._cloud = Google(cloud)

    def init(self) -> None:
        """Download nothing."""

    def plan(self, *, destroy: bool = False, targets: Sequence[str] = ()) -> TerraformPlan:
        changes = () if destroy else tuple(self._asked())
        changes = (
            *map(self._made, changes),
            *self._removed({change.address for change in changes}, destroy=destroy),
        )
        chosen = (
            change for change in changes if not targets or change.address.startswith(tuple(targets))
        )
        return TerraformPlan(
            self.folder / "plan.tfplan", "", tuple(chosen), destroy, False, tuple(targets)
        )

    def apply(self, plan: TerraformPlan) -> None:
        failed = [
            refused
            for change in self.plan_remaining(plan).real_changes
            if (refused := self._done(change))
        ]
        if failed:
            raise self.explain(
                "some resources could not be "
                f"{'deleted' if plan.destroys else 'created or changed'}",
                tuple(failed),
            )

    def outputs(self) -> Mapping[str, Any]:
        there = {
            one["name"]: one for one in self._cloud.store.read()["resources"][INSTANCE].values()
        }
        hosts = {
            name: {
                "role": host["role"],
                "partition": host.get("partition"),
                "address": there[name]["network_interface"][0]["network_ip"],
                "instance_id": there[name]["instance_id"],
            }
            for name, host in self._variables["hosts"].items()
        }
        return {
            "hosts": hosts,
            "network_cidr": "10.80.0.0/20",
            "shared": {"kind": "nfs", "path": "/shared"},
        }

    @property
    def _variables(self) -> dict[str, Any]:
        read: dict[str, Any] = json.loads((self.folder / VARIABLES).read_text())
        return read

    @property
    def _state(self) -> dict[str, tuple[str, str]]:
        path = self.folder / STATE_FILE
        return json.loads(path.read_text()) if path.exists() else {}

    def _before(self, kind: str, identity: str) -> Mapping[str, Any] | None:
        there: Mapping[str, Any] | None = (
            self._cloud.store.read()["resources"].get(kind, {}).get(identity)
        )
        return there

    def _made(self, change: ResourceChange) -> ResourceChange:
        """Return the change that creates a resource, starts it, or leaves it as it is."""
        before = self._before(*self._state.get(change.address, ("", "")))
        if before is None:
            return change
        if before.get("current_status") == "TERMINATED":
            on = {**before, "desired_status": "RUNNING", "current_status": UNKNOWN}
            return replace(change, action="update", before=before, after=on)
        return replace(change, action="no-op", before=before, after=before)

    def _removed(self, addresses: Collection[str], *, destroy: bool) -> Iterator[ResourceChange]:
        """Yield the changes that remove all other resources, in deletion order."""
        for address, (kind, identity) in [*self._state.items()][::-1]:
            if address not in addresses and (before := self._before(kind, identity)) is not None:
                why = () if destroy else ("it is no longer in the spec",)
                yield ResourceChange(address, kind, None, "delete", before, None, why)

    def _asked(self) -> Iterator[ResourceChange]:
        """Yield the recorded changes, with those of a host for each host in the variables."""
        variables = self._variables
        recorded = demo(variables["project"], variables["cluster_id"])
        yield from (
            change for change in recorded if not change.address.startswith((CONTROLLER, NODE))
        )
        for name, host in variables["hosts"].items():
            part = CONTROLLER if host["role"] == "controller" else NODE
            yield from (
                _of_host(change, name, host)
                for change in recorded
                if change.address.startswith(part)
            )

    def _done(self, change: ResourceChange) -> Diagnostic | None:
        """Carry out a change. Return the provider's error if Google refuses it."""
        state = self._state
        try:
            if change.action == "create":
                made = self._cloud._create(change.type, _asked_of_google(change.after))
                state[change.address] = (change.type, made["id"])
            elif change.action == "delete":
                self._cloud._delete(change.type, change.before or {})
                del state[change.address]
            else:
                with self._cloud.store.change() as world:
                    world["resources"][change.type][(change.before or {})["id"]][
                        "current_status"
                    ] = "RUNNING"
        except RefusedError as refused:
            return Diagnostic("error", str(refused), "", change.address)
        (self.folder / STATE_FILE).write_text(json.dumps(state))
        return None


@contextmanager
def cloud_in(
    folder: Path, patch: pytest.MonkeyPatch, *, is_real: bool
) -> Iterator[tuple[GoogleCloud, Api]]:
    """Yield a cloud with its API. ``GcpProvider`` plans with real Terraform, or with the recorded
    plan.
    """
    cloud = GoogleCloud(folder, serves=is_real)
    if not is_real:
        store = cloud.store
        patch.setattr(
            provider, "Terraform", lambda *words, **options: Recorded(store, *words, **options)
        )
    with Api(cloud.store) as double:
        for name, value in {**cloud.env, **double.environment}.items():
            if name != "HOME":
                patch.setenv(name, value)
        yield cloud, double
    assert not double.violations, double.violations


def _of_host(recorded: ResourceChange, name: str, host: Mapping[str, Any]) -> ResourceChange:
    """Return the recorded change of a host, for the host of this name."""
    after = json.loads(json.dumps(recorded.after).replace("demo-train-1", name))
    if recorded.type == INSTANCE:
        image = host["image"]
        path = f"family/{image['family']}" if image["family"] else image["name"]
        boot = host.get("boot_image") or f"projects/{image['project']}/global/images/{path}"
        after["boot_disk"][0]["initialize_params"][0]["image"] = boot
        after["machine_type"] = host["machine_type"]
    address = recorded.address.replace("demo-train-1", name)
    if partition := host.get("partition"):
        address = address.replace('["train"]', f'["{partition}"]')
    return replace(recorded, address=address, after=after)


def _asked_of_google(value: Any) -> Any:
    """Mark values that are known only after apply as the provider does. Names of other resources
    become empty.
    """
    if isinstance(value, Mapping):
        return {
            name: Unknown if each == UNKNOWN else _asked_of_google(each)
            for name, each in value.items()
        }
    if isinstance(value, list):
        return ["" if each == UNKNOWN else _asked_of_google(each) for each in value]
    return value
