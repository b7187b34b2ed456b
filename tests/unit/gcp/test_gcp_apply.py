"""`apply` with a scripted Terraform: retries and their pauses."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

import pytest

from clusterctl.errors import Failure, TerraformError
from clusterctl.providers.gcp.apply import WAITS_S, apply_plan
from clusterctl.providers.gcp.terraform import Terraform, TerraformPlan
from clusterctl.util.progress import Clock
from tests.support.messages import refused
from tests.support.terraform import RecordingReporter

SHOWN = TerraformPlan(Path("plan.tfplan"), "0", ())
REMAINING = TerraformPlan(Path("plan.tfplan"), "1", ())


def error(code: str, *, transient: bool = False) -> TerraformError:
    made = TerraformError("x", failures=(Failure(code, f"it is {code}"),))
    made.transient = transient
    return made


@dataclass
class Scripted:
    """Fails with these errors, one an apply; the last one is for ever if it is ``stuck``."""

    errors: list[TerraformError]
    stuck: bool = False
    applied: list[TerraformPlan] = field(default_factory=list)
    reporter: RecordingReporter = field(default_factory=RecordingReporter)

    def apply(self, plan: TerraformPlan) -> None:
        self.applied.append(plan)
        if self.errors:
            raise self.errors[0] if self.stuck and len(self.errors) == 1 else self.errors.pop(0)

    def plan_remaining(self, plan: TerraformPlan) -> TerraformPlan:
        assert plan == SHOWN
        return REMAINING


def run(scripted: Scripted) -> list[float]:
    waited: list[float] = []
    apply_plan(cast(Terraform, scripted), SHOWN, clock=Clock(sleep=waited.append))
    return waited


def test_apply_retries_the_rest_of_the_plan_after_transient_errors() -> None:
    scripted = Scripted([error("cloud-refused/server-error", transient=True)] * 3)
    assert run(scripted) == [5, 10, 20]
    assert scripted.applied == [SHOWN, REMAINING, REMAINING, REMAINING]
    assert scripted.reporter.lines[0].startswith("it is cloud-refused/server-error")


def test_apply_retries_end() -> None:
    scripted = Scripted([error("cloud-refused/server-error", transient=True)], stuck=True)
    with refused("cloud-refused/server-error", TerraformError):
        run(scripted)
    assert len(scripted.applied) == len(WAITS_S) + 1


@pytest.mark.parametrize("code", ["quota", "unavailable", "exists/cloud-name"])
def test_apply_does_not_retry_lasting_errors(code: str) -> None:
    scripted = Scripted([error(code)])
    with pytest.raises(TerraformError):
        run(scripted)
    assert scripted.applied == [SHOWN]
