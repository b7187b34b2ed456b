"""Agents with two clusters that are up, whose Slurm is played; cluster.yaml names one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from clusterctl.cli.agent_calls import Calls
from clusterctl.cli.agent_program import CommandAnswer, Program
from clusterctl.state.inventory import inventory_of
from clusterctl.state.workspace import Workspace
from tests.support.agent_project import Project, run_in_fork
from tests.support.agents import Agent
from tests.support.played.cluster import SPEC, node_record
from tests.unit.runs.made import made_run

BOTH = ["demo", "two"]


@pytest.fixture
def project(project: Project) -> Project:
    with project.cluster.state() as state:
        state["nodes"] = [node_record("n1", "train")]
        train = {"Partition": "train", "Available": "up", "Time": "infinite"}
        state["partitions"] = [{**train, "NodeAIOT": "0/1/0/1"}]
    two = Workspace.of("two")
    two.create()
    two.spec.write_text(SPEC.replace("demo", "two"))
    two.inventory.write_text(replace(inventory_of(Workspace.of("demo")), cluster="two").text)
    return project


@pytest.mark.parametrize("other", ["", SPEC.replace("demo", "other")])
def test_where_compares_all_clusters_whatever_the_spec_names(project: Project, other: str) -> None:
    """Also if the agent replaces or removes it after the limits were checked."""
    spec = project.folder / "cluster.yaml"

    def replace_spec(program: Program, heard: Callable[[str], None]) -> CommandAnswer:
        spec.write_text(other) if other else spec.unlink(missing_ok=True)
        return run_in_fork(program, heard)

    calls = Calls(project.folder, run=replace_spec)
    for given, clusters in (({}, BOTH), ({"cluster": "two"}, ["two"]), ({}, BOTH)):
        body = calls.call("where", given).body
        assert sorted({place["cluster"] for place in body["places"]}) == clusters
        assert body["unanswered"] == []


def test_all_clusters_are_asked_at_once(project: Project) -> None:
    answer = project.calls.call("status", {"cluster": "all"}).body
    assert sorted(each["cluster"] for each in answer["clusters"]) == BOTH
    assert project.calls.call("jobs", {"cluster": "all"}).body["unanswered"] == []


def test_collected_runs_need_no_cluster(project: Project) -> None:
    """Runs of the same options but for their seed are averaged; some have no value of an option."""
    for number, args in enumerate(([], [], ["--dropout", "0.1"], ["--dropout", "0.1"]), 1):
        seeded = [*args, "--seed", str(number)]
        made_run(project.folder / "runs", number, args=seeded, metrics=[{"step": 1, "loss": 0.5}])
    (project.folder / "cluster.yaml").unlink()

    async def story(agent: Agent) -> None:
        found = await agent.call("runs_list", over="seed")
        groups = [([*group["options"].values()], group["n"]) for group in found["groups"]]
        assert sorted(groups, key=str) == [([0.1], 2), ([None], 2)]

    project.tell(story)
