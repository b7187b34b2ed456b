"""The list of nodes in `status`, and the table of jobs."""

from __future__ import annotations

from dataclasses import replace

from clusterctl.cli.jobs import job_table, node_rows
from clusterctl.cli.output import Screen
from clusterctl.scheduler.base import JobInfo, JobState, NodeInfo


def node(number: int, shown: str = "idle", reason: str = "") -> NodeInfo:
    return NodeInfo(f"n{number}", shown, reason, 8, 2048, "", ())


def test_few_nodes_have_a_row_each() -> None:
    rows = node_rows([node(1), node(2, "down*", "Not responding"), node(3)])
    assert [row[0] for row in rows] == ["n1", "n2", "n3"]
    assert rows[1] == ["n2", "down*", "8", "2 GiB", "Not responding"]


def test_many_nodes_that_are_alike_share_a_row_and_those_out_of_service_come_first() -> None:
    out = {50: "ECC errors", 51: "ECC errors", 60: "power supply"}
    nodes = [
        node(number, "idle+drain" if number in out else "idle", out.get(number, ""))
        for number in range(1, 65)
    ]
    assert [(row[0], row[4]) for row in node_rows(nodes)] == [
        ("n[50-51]", "ECC errors"),
        ("n60", "power supply"),
        ("n[1-49,52-59,61-64]", ""),
    ]


def test_table_of_jobs_has_users_and_reasons_only_if_they_tell_something() -> None:
    waiting = JobInfo(number=7, name="a", user="ada", state=JobState.PENDING, reason="Priority")
    screen = Screen(json=False, color=False)
    usual = "JOB NAME STATE NODES SUBMITTED ELAPSED EXIT".split()
    assert job_table(screen, [waiting])[0].split() == [*usual, "REASON"]
    assert job_table(screen, [replace(waiting, reason="")])[0].split() == usual
    of_all = job_table(screen, [waiting], users=True)[0].split()
    assert of_all == [*usual[:2], "USER", *usual[2:], "REASON"]
