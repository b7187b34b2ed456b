"""The client of Terraform: parsed plans, and real runs on Terraform's built-in resource."""

from __future__ import annotations

import json
import stat
from pathlib import Path
from typing import Any, NoReturn

import pytest

from clusterctl.errors import ProvisionError, StalePlanError
from clusterctl.providers.gcp import terraform_run
from clusterctl.providers.gcp.terraform import UNKNOWN, ResourceChange, read_changes
from clusterctl.providers.gcp.terraform_program import TerraformProgram
from tests.support.messages import refused
from tests.support.terraform import Work, addresses

GONE = "it is no longer in the spec"


def actions(changes: tuple[ResourceChange, ...]) -> dict[str | int | None, str]:
    return {change.key: change.action for change in changes}


def test_apply_creates_changes_and_removes_planned_resources(work: Work) -> None:
    plan = work.terraform.plan()
    assert actions(plan.real_changes) == {"one": "create", "two": "create", "three": "create"}
    work.terraform.apply(plan)
    assert "one: creating…" in work.said
    assert any(line.startswith("one: created") for line in work.said)
    assert work.terraform.outputs() == {"kinds": {"one": "small", "two": "small", "three": "small"}}
    again = work.terraform.plan()
    assert again.is_empty
    assert actions(again.changes) == {"one": "no-op", "two": "no-op", "three": "no-op"}

    work.hosts(one="large", two="small", four="small")
    plan = work.terraform.plan()
    assert actions(plan.changes) == {
        "one": "replace",
        "two": "no-op",
        "three": "delete",
        "four": "create",
    }
    why = {change.key: change.why_replaced for change in plan.real_changes}
    assert why == {"one": ("triggers_replace",), "three": (GONE,), "four": ()}
    assert "hunter2" not in "".join(work.said)
    for name in ("terraform.tfstate", "plan.tfplan"):
        assert stat.S_IMODE((work.folder / name).stat().st_mode) == 0o600

    plan = work.terraform.plan(destroy=True)
    assert plan.destroys
    assert set(actions(plan.changes).values()) == {"delete"}
    work.terraform.apply(plan)
    assert addresses(work.terraform) == ()
    assert work.terraform.plan(destroy=True).is_empty


def test_imports_of_a_killed_plan_are_forgotten(work: Work) -> None:
    gone = {"to": 'terraform_data.node["gone"]', "id": "x"}
    left = work.folder / "clusterctl-adopt.tf.json"
    left.write_text(json.dumps({"import": [gone]}))
    assert len(work.terraform.plan().real_changes) == 3


@pytest.mark.parametrize("destroy", [False, True])
def test_interrupted_apply_names_the_commands_that_continue(
    work: Work, monkeypatch: pytest.MonkeyPatch, destroy: bool
) -> None:
    plan = work.terraform.plan(destroy=destroy)

    def interrupt(*_: object, **__: object) -> NoReturn:
        raise KeyboardInterrupt

    monkeypatch.setattr(terraform_run, "run", interrupt)
    with pytest.raises(KeyboardInterrupt):
        work.terraform.apply(plan)
    assert "`clusterctl down`" in work.said[-1]
    assert ("`clusterctl up`" in work.said[-1]) is not destroy


def test_apply_repeats_a_stale_plan_after_a_failure(work: Work) -> None:
    """The plan is made again, as long as it shows nothing new."""
    shown = work.terraform.plan()
    work.break_host("two")
    with refused("changed", ProvisionError, "out of order"):
        work.terraform.apply(shown)
    assert any(line.startswith("two: failed") for line in work.said)
    work.mend_host("two")
    saved = shown.path.read_bytes()
    plan = work.terraform.plan()
    assert actions(plan.changes) == {"one": "no-op", "two": "replace", "three": "no-op"}
    assert actions(plan.real_changes) == {"two": "replace"}
    shown.path.write_bytes(saved)  # stale by now: the state has two hosts
    work.terraform.apply(shown)
    assert work.existing() == {"one", "two", "three"}
    assert work.terraform.plan().is_empty


def test_apply_refuses_changes_that_were_not_shown(work: Work) -> None:
    work.terraform.apply(work.terraform.plan())
    work.hosts(one="large", two="small", three="small")
    shown = work.terraform.plan()
    work.hosts(one="large", two="large", three="small")
    work.terraform.plan()  # another file now
    with refused(
        "plan-changed", StalePlanError, why='it would now also replace terraform_data.node["two"]'
    ):
        work.terraform.apply(shown)
    work.hosts(one="large", two="small", three="small")
    work.terraform.apply(shown)


def test_invalid_module_is_refused_with_its_reason(work: Work) -> None:
    (work.folder / "more.tf").write_text('resource "terraform_data" "x" { inptu = 1 }\n')
    with refused("plan", ProvisionError, 'An argument named "inptu"'):
        work.terraform.plan()


def test_crash_of_terraform_has_its_output_as_cause(work: Work, tmp_path: Path) -> None:
    lines = ("!!!!!! TERRAFORM CRASH !!!!!!", "panic: runtime error")
    crashing = tmp_path / "crashing"
    crashing.write_text(f"#!/bin/sh\necho '{lines[0]}'; echo '{lines[1]}' >&2; exit 11\n")
    crashing.chmod(0o755)
    work.terraform.program = TerraformProgram(crashing, "1.9.0")
    with refused("plan", ProvisionError) as caught:
        work.terraform.plan()
    assert "\n".join(lines) in caught.value.why


def test_init_error_is_parsed_from_human_output(work: Work) -> None:
    (work.folder / "more.tf").write_text('terraform { required_version = "< 1.0" }\n')
    with refused("up", ProvisionError) as caught:
        work.terraform.init()
    assert caught.value.why.startswith("Unsupported Terraform Core version: This")
    assert "│" not in caught.value.why


def test_terraform_variables_of_the_environment_are_ignored(
    work: Work, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TF_CLI_ARGS_plan", "-destroy")
    monkeypatch.setenv("TF_VAR_seconds", "not a number")
    monkeypatch.setenv("TF_WORKSPACE", "other")
    assert len(work.terraform.plan().real_changes) == 3


def shown(change: dict[str, Any], **more: Any) -> dict[str, Any]:
    resource = {"address": "a.b", "mode": "managed", "type": "a", "name": "b", **more}
    return {
        "resource_changes": [
            {**resource, "change": {"actions": ["create"], "before": None, **change}}
        ]
    }


def test_read_changes_marks_unknown_values() -> None:
    change = {
        "after": {"name": "n", "disk": [{"size": 10}]},
        "after_unknown": {"id": True, "disk": [{"uri": True}]},
    }
    (read_,) = read_changes(shown(change))
    assert read_.after == {"name": "n", "id": UNKNOWN, "disk": [{"size": 10, "uri": UNKNOWN}]}


def test_change_has_the_kind_of_its_actions() -> None:
    for actions, action in {
        ("no-op",): "no-op",
        ("update",): "update",
        ("delete", "create"): "replace",
        ("create", "delete"): "replace",
        ("forget",): "no-op",
    }.items():
        (change,) = read_changes(shown({"actions": list(actions), "before": {}, "after": {}}))
        assert change.action == action
    assert read_changes(shown({"after": {}}, mode="data")) == ()
    (deposed,) = read_changes(
        shown({"actions": ["delete"], "before": {}, "after": None}, deposed="1a2b")
    )
    assert deposed.address == "a.b (deposed 1a2b)"
    (adopted,) = read_changes(
        shown({"actions": ["no-op"], "after": {}, "importing": {"id": "x/y"}})
    )
    assert adopted.adopts == "x/y"
