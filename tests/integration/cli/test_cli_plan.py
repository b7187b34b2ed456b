"""Plans by the command itself: questions on a terminal, and the exit code of `plan --check`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from tests.support.terminal import on_terminal
from tests.support.verbs import Clusterctl

ASKS = """
import sys, time
from clusterctl.cli.up import approve
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import Phases
from clusterctl.cluster.plan import Plan
from clusterctl.providers.base import HostChange, HostPlan

class Counted:
    writes = 0
    def __getattr__(self, name):
        return getattr(sys.__stderr__, name)
    def write(self, text):
        self.writes += 1
        return sys.__stderr__.write(text)

class Slow(Screen):
    def confirm(self, question, *, yes):
        before = sys.stderr.writes
        time.sleep(0.5)
        print("it stood still" if sys.stderr.writes == before else "it moved")
        super().confirm(question, yes=yes)

hosts = (HostChange("d-train-1", "make", "g2-standard-8", usd_per_hour=0.75),)
sys.stderr = Counted()
screen = Slow(json=False, color=False)
phases = Phases(screen)
with phases.shown():
    phases.step("plan")
    phases.progress("a picture that moves")
    approve(screen, Plan(HostPlan(hosts)), yes=False)
    print("goes on")
"""


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("n", 1)])
def test_plan_that_costs_asks_on_a_terminal(tmp_path: Path, answer: str, code: int) -> None:
    with on_terminal(
        [sys.executable, "-c", ASKS], {**os.environ, "TERM": "xterm"}, tmp_path
    ) as shell:
        shell.read_until("at this price? [y/N]")
        assert "it stood still" in shell.shown
        assert "cost: 0.75 USD" in shell.shown
        shell.type(f"{answer}\n")
        assert shell.end() == code
        assert ("goes on" in shell.shown) == (answer == "y")


def test_plan_check_reports_by_its_exit_code_and_writes_nothing(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(
        "version: 1\nname: demo\nprovider: {type: local}\npartitions: [{name: train, nodes: 2}]\n"
    )
    assert "make  demo-train-[1-2]" in cli("plan", rc=0).stdout
    answer = cli("plan", "--check", "-o", "json", rc=3).json
    assert [one["name"] for one in answer["changes"]] == [
        "demo-ctl",
        "demo-train-1",
        "demo-train-2",
    ]
    assert cli("up", "--dry-run").stdout == cli("plan").stdout
    assert not cli.home.exists()
