"""How a plan is shown, and when `up` asks before it does what the plan says."""

from __future__ import annotations

from json import loads
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli import plan as cli_plan
from clusterctl.cli import up as cli_up
from clusterctl.cli.output import Screen
from clusterctl.cli.plan import as_dict, text
from clusterctl.cli.up import approve
from clusterctl.cluster.phases import Drift
from clusterctl.cluster.plan import Plan, prompt_about
from clusterctl.cluster.up import UpResult
from clusterctl.cluster.verify import Verification
from clusterctl.errors import UsageError
from clusterctl.providers.base import HostChange, HostPlan
from clusterctl.spec.load import SpecDifference, differences, dump_spec
from clusterctl.state.inventory import PartitionFacts
from tests.support.inventories import inventory_with
from tests.support.manual import ROOT, assert_shown
from tests.support.messages import refused, shows
from tests.support.providers import BareProvider, use_provider
from tests.unit.cluster.specs import spec_of

SPEC = spec_of({"name": "train", "nodes": 3})
L4 = "g2-standard-8, 1 x L4"
MAKE = tuple(HostChange(f"d-train-{i}", "make", L4, usd_per_hour=0.75) for i in (1, 2, 3))
REMOVE = HostChange("d-old-1", "remove", L4, "the spec has no place for it", 0.5)
STAY = HostChange("d-ctl", "keep", "e2-standard-4", usd_per_hour=0.25)


GONE = "no longer in the spec"


def show(plan: Plan) -> list[str]:
    shown = text(Screen(json=False, color=False), SPEC, plan)
    return [line.rstrip() for line in shown]


def test_plan_shows_equal_hosts_in_a_row_and_the_cost_below() -> None:
    planned = HostPlan((STAY, *MAKE, REMOVE), ("a disk of 10GiB is made",), "2026-10-01")
    assert show(Plan(planned)) == [
        "cluster 'd' (local): changes that `clusterctl up` would make",
        "",
        "        HOSTS          WHAT                   WHY                           USD AN HOUR",
        "keep    d-ctl          e2-standard-4                                        0.25",
        "make    d-train-[1-3]  g2-standard-8, 1 x L4                                2.25",
        "remove  d-old-1        g2-standard-8, 1 x L4  the spec has no place for it  0.50",
        "",
        "other changes:",
        "  a disk of 10GiB is made",
        "",
        "cost: 2.50 USD an hour, 60.00 a day; now 0.75 USD an hour, 18.00 a day",
        "list prices of 2026-10-01",
    ]


def test_plan_shows_texts_of_several_lines_in_lines() -> None:
    """As the output of a host or of ssh; an escaped line end would be read as text."""
    drift = (Drift("d-ctl", "does not answer: ssh: no route\nthe last line"),)
    lines = show(Plan(HostPlan((STAY,)), drift=drift))
    assert lines[lines.index("drift:") + 1 :][:2] == [
        "  d-ctl: does not answer: ssh: no route",
        "    the last line",
    ]


def test_plan_shows_settings_drift_and_notes() -> None:
    plan = Plan(
        HostPlan((HostChange("d-ctl", "keep", "the controller"),)),
        (SpecDifference("users", "bob is added"),),
        (Drift("d-ctl", "munge was stopped"),),
        ("it is late",),
    )
    shown = "\n".join(show(plan))
    for line in (
        "settings:\n  users: bob is added",
        "drift:\n  d-ctl: munge was stopped",
        "notes:\n  it is late",
    ):
        assert line in shown
    assert "cost" not in shown
    answer = as_dict(SPEC, plan)
    assert [
        (one["kind"], one["name"], one["action"], one["what"]) for one in answer["changes"]
    ] == [
        ("setting", "users", "change", "bob is added"),
        ("drift", "d-ctl", "repair", "munge was stopped"),
    ]
    assert answer["kept"] == ["d-ctl"]
    assert answer["cost"] is None


def test_plan_is_shown_as_in_the_manual() -> None:
    users = [{"name": "ada", "uid": 2001}, {"name": "bob", "uid": 2002}]
    before, after = (
        spec_of(*({"name": name, "nodes": 1} for name in names), users=people, name="demo")
        for names, people in ((["train"], users[:1]), (["train", "big"], users))
    )
    job = "job 7 (train) of ada on demo-train-2: demo-train-2 leaves the cluster"
    plan = Plan(
        HostPlan(
            (
                HostChange("demo-ctl", "keep", "the controller"),
                HostChange("demo-train-1", "keep", "1 CPU, 2 GiB of memory"),
                HostChange("demo-big-1", "make", "2 CPUs, 8 GiB of memory"),
                HostChange("demo-train-2", "remove", "1 CPU, 2 GiB of memory", GONE),
            )
        ),
        differences(before, after),
        (Drift("demo-train-1", "slurmd was stopped"),),
        (f"`up` would fail: this change would cancel jobs: 1; {job}; cancel it",),
    )
    lines = text(Screen(json=False, color=False), after, plan)
    assert_shown(ROOT / "docs/convergence.md", "clusterctl plan", "\n".join(lines), {})


def test_plan_in_json_has_the_cost_before_and_after() -> None:
    unpriced = HostChange("d-x-1", "make", "a thing")
    answer = as_dict(SPEC, Plan(HostPlan((STAY, *MAKE, REMOVE, unpriced), priced_on="2026-10-01")))
    assert answer["cost"] == {
        "per_hour": 2.5,
        "per_day": 60.0,
        "now_per_hour": 0.75,
        "now_per_day": 18.0,
        "currency": "USD",
        "priced_on": "2026-10-01",
        "unpriced": ["d-x-1"],
    }


def agree(plan: HostPlan, *, yes: bool = False) -> None:
    approve(Screen(json=False, color=False), Plan(plan), yes=yes)


@pytest.mark.parametrize(
    ("plan", "lost"),
    [
        (HostPlan((HostChange("d-ctl", "make", "the controller"),)), ""),
        (HostPlan((STAY, REMOVE)), "d-old-1"),
        (HostPlan((STAY, HostChange("d-old-1", "replace", L4))), "d-old-1"),
        (HostPlan((STAY, HostChange("gpu7", "remove", "compute", released=True))), "gpu7"),
        (HostPlan((STAY, HostChange("gpu7", "replace", "compute", released=True))), "gpu7"),
        (HostPlan((HostChange("d-ctl", "change", L4, detached_disks=("mine",)),)), "mine"),
    ],
)
def test_plan_that_destroys_needs_yes_without_a_terminal(plan: HostPlan, lost: str) -> None:
    assert lost in prompt_about(Plan(plan))
    agree(plan, yes=True)
    if not lost:
        agree(plan)
        return
    with refused("confirmation-needed", UsageError, lost):
        agree(plan)


def test_plan_with_costs_is_shown_without_a_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    costs = "d-image costs 0.07 USD an hour meanwhile"
    agree(HostPlan((STAY, *MAKE), notes=(costs,)))
    output = capsys.readouterr().err
    assert "d-train-[1-3]" in output
    assert f"note: {costs}\n" in output


@pytest.mark.parametrize(
    "more",
    [
        {"hosts": (STAY, HostChange("d-x-1", "make", "a3-megagpu-8g"))},
        {"hosts": (STAY, HostChange("d-x-1", "change", "a3-megagpu-8g", usd_per_hour=None))},
        {
            "hosts": (STAY,),
            "other": ("make a Filestore instance",),
            "other_unpriced": ("d-shared",),
        },
    ],
)
def test_plan_with_unknown_price_may_cost_more(
    more: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    plan = HostPlan(priced_on="2026-10-01", **more)
    assert plan.may_cost_more
    assert plan.usd_per_hour is None
    agree(plan)
    shown = capsys.readouterr().err
    assert shows(shown, "price-unknown")
    assert "include d-" in shown
    assert all(line in shown for line in plan.other)
    assert not HostPlan((STAY,), priced_on="2026-10-01").may_cost_more
    removal = HostChange("d-x-1", "remove", "a3-megagpu-8g")
    assert not HostPlan((STAY, removal), priced_on="2026-10-01").may_cost_more


class Imaging(BareProvider):
    """A provider whose image was built after it was planned, by another command."""

    known_shared = "/shared"

    def check(self, *_: object, **__: object) -> None:
        pass

    def preflight(self, *_: object, **__: object) -> None:
        pass

    def plan(self, *_: object, **__: object) -> HostPlan:
        return HostPlan((), images=("on demo-image, 0.07 USD an hour",))

    def prepare_templates(self, *_: object, **__: object) -> dict[str, str]:
        return {}

    def destroy(self, *_: object, **__: object) -> None:
        pass

    def leftovers(self, *_: object, **__: object) -> tuple[()]:
        return ()


@pytest.mark.parametrize("yes", [True, False])
def test_plan_with_an_image_asks_on_a_terminal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    yes: bool,
) -> None:
    answers: list[bool] = []

    class Terminal(Screen):
        can_prompt = True

        def confirm(self, _: str, *, yes: bool) -> None:
            answers.append(yes)

    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "home"))
    use_provider(monkeypatch, lambda *_: Imaging())
    cloud = {"type": "gcp", "project": "a-project", "zone": "us-central1-a"}
    file = tmp_path / "cluster.yaml"
    file.write_text(dump_spec(spec_of(provider=cloud)))
    cli_up.bake(Terminal(json=False, color=False, file=file), yes=yes)
    output = capsys.readouterr()
    assert answers == [yes]
    assert "demo-image, 0.07 USD" in output.err
    assert "the image already exists" in output.out


def test_dry_run_of_an_up_that_would_be_refused_shows_the_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    class Checked(BareProvider):
        def check(self, _: object) -> None:
            raise UsageError("no", code="fixed-while-up")

    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    use_provider(monkeypatch, lambda *_: Checked())
    plan = Plan(HostPlan((REMOVE,)))
    monkeypatch.setattr(cli_plan, "preview", lambda _: plan)
    screen = Screen(json=True, color=False)
    with refused("fixed-while-up", UsageError) as caught:
        cli_up.show_changes(screen, SPEC)
    screen.error(caught.value)
    answer = loads(capfd.readouterr().out)
    assert [change["name"] for change in answer["changes"]] == ["d-old-1"]
    with refused("fixed-while-up", UsageError):
        cli_up.show_changes(Screen(json=False, color=False), SPEC)
    assert "d-old-1" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("partitions", "drained", "count"),
    [
        ({"train": ("n1",), "short": ("n2",)}, (), 1),
        ({"train": ("n1", "n2", "n3")}, (), 2),
        ({"train": ("n1", "n2")}, ("n2",), 1),
    ],
)
def test_up_ends_with_a_job_that_the_default_partition_can_run(
    partitions: dict[str, tuple[str, ...]],
    drained: tuple[str, ...],
    count: int,
    *,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path))
    use_provider(monkeypatch, lambda *_: BareProvider())
    inventory = inventory_with(*(PartitionFacts(name, nodes) for name, nodes in partitions.items()))
    verification = Verification(("n1",), drained=dict.fromkeys(drained, "a fan"))
    result = UpResult(inventory, verification, (), ())
    monkeypatch.setattr(cli_up.cluster_up, "up", lambda *_: result)
    assert cli_up.bring_up(Screen(json=False, color=False), SPEC) == 0
    assert f" --nodes {count} " in capsys.readouterr().out.splitlines()[-1]
