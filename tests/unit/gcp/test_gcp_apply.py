"""`apply` with a scripted Terraform: retries, their pauses, and imports of existing resources."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest

from clusterctl.errors import Failure, TerraformError
from clusterctl.providers.gcp.apply import WAITS_S, Owner, apply_plan
from clusterctl.providers.gcp.terraform import Plan, ResourceChange, Terraform
from clusterctl.util.progress import Clock
from tests.support.messages import refused
from tests.support.terraform import RecordingReporter

OWNER = Owner("a1b2c3")
SHOWN = Plan(Path("plan.tfplan"), "0", ())


def error(
    code: str, *, transient: bool = False, already_exists: Mapping[str, str] = {}
) -> TerraformError:
    made = TerraformError("x", failures=(Failure(code, f"it is {code}"),))
    made.transient = transient
    made.already_exists = already_exists
    return made


@dataclass
class Scripted:
    """Fails with these errors, one an apply; the last one is for ever if it is ``stuck``."""

    errors: list[TerraformError]
    stuck: bool = False
    attributes: Mapping[str, Any] = field(default_factory=dict)  # of whatever is taken over
    applied: int = 0
    reporter: RecordingReporter = field(default_factory=RecordingReporter)
    adopted: list[Mapping[str, str]] = field(default_factory=list)

    def apply(self, _: Plan) -> None:
        self.applied += 1
        if self.errors:
            raise self.errors[0] if self.stuck and len(self.errors) == 1 else self.errors.pop(0)

    def plan_remaining(self, plan: Plan, *, adopt: Mapping[str, str]) -> Plan:
        self.adopted.append(adopt)
        changes = (
            ResourceChange(address, "t", None, "no-op", self.attributes, None, (), identity)
            for address, identity in adopt.items()
        )
        return Plan(plan.path, "1", tuple(changes), plan.destroys)


def run(
    scripted: Scripted, owner: Owner = OWNER, plan: Plan = SHOWN
) -> tuple[list[str], list[float]]:
    waited: list[float] = []
    apply_plan(cast(Terraform, scripted), plan, owner, clock=Clock(sleep=waited.append))
    return scripted.reporter.lines, waited


def test_apply_retries_transient_errors_with_growing_pauses() -> None:
    notes, waited = run(Scripted([error("rate-limit", transient=True)] * 3))
    assert waited == [5, 10, 20]
    assert notes[0].startswith("it is rate-limit")


def test_apply_retries_end() -> None:
    scripted = Scripted([error("rate-limit", transient=True)], stuck=True)
    with refused("rate-limit", TerraformError):
        run(scripted)
    assert scripted.applied == len(WAITS_S) + 1


@pytest.mark.parametrize("code", ["quota", "stockout", "permission"])
def test_apply_does_not_retry_lasting_errors(code: str) -> None:
    scripted = Scripted([error(code)])
    with pytest.raises(TerraformError):
        run(scripted)
    assert scripted.applied == 1


def test_existing_resources_are_imported_in_limited_layers() -> None:
    scripted = Scripted(
        [error("name-taken", already_exists={"a": "projects/p/n/demo-a1b2c3-net"})],
        stuck=True,
        attributes={"name": "demo-a1b2c3-net"},
    )
    with pytest.raises(TerraformError):
        run(scripted)
    assert scripted.adopted[0] == {"a": "projects/p/n/demo-a1b2c3-net"}
    assert 5 < len(scripted.adopted) < 20


@pytest.mark.parametrize(
    ("attributes", "is_own"),
    [
        ({"name": "demo-train-1", "effective_labels": {"clusterctl-id": "a1b2c3"}}, True),
        ({"name": "demo-a1b2c3-x", "effective_labels": {"clusterctl-id": "ffffff"}}, False),
        (
            {
                "name": "demo-a1b2c3-x",
                "description": "clusterctl-cluster=demo clusterctl-id=ffffff",
            },
            False,
        ),
        ({"name": "demo-x", "description": "clusterctl-cluster=demo clusterctl-id=a1b2c3"}, True),
        ({"name": "demo-a1b2c3-net", "labels": {}}, True),
        ({"account_id": "demo-a1b2c3-nodes"}, True),
        ({"name": "demo-train-1", "effective_labels": {}}, False),
        ({"name": "demoa1b2c3net"}, False),
        ({}, False),
    ],
)
def test_apply_imports_only_resources_with_the_cluster_id(
    attributes: Mapping[str, Any], is_own: bool
) -> None:
    scripted = Scripted([error("name-taken", already_exists={"a": "b"})], attributes=attributes)
    with nullcontext() if is_own else refused("name-taken", TerraformError):
        run(scripted)
    assert scripted.applied == (2 if is_own else 1)
