"""An agent's whole work on a cluster of its own: the official client, a real server, a real Slurm."""

from __future__ import annotations

import json
import os
import secrets
from pathlib import Path
from typing import Any

from tests.support.agents import TRAIN, Agent, converse
from tests.support.cluster import local_spec
from tests.support.messages import condition
from tests.support.residue import nothing_left
from tests.support.verbs import SCRIPT, Clusterctl


def codes(answer: dict[str, Any]) -> list[str]:
    return [condition(failure) for failure in answer["failures"]]


async def work(agent: Agent) -> None:
    """Raise a cluster, submit, find a failure's cause, fix it, sweep, collect, report."""
    await agent.done("up")
    assert codes(await agent.call("down")) == ["agent-limit"]

    given = {"target": "train.py", "nodes": 1, "time": "5m"}
    planned = await agent.done("submit", **given, args=["--lr=3"], dry_run=True)
    assert planned["at_most"]["node_hours"] > 0
    submitted = await agent.done("submit", **given, args=["--lr=3"])
    failed = submitted["jobs"][0]["job_id"]
    assert codes(await agent.call("wait", ids=[failed], timeout="5m")) == ["job-failed"]
    (job,) = (await agent.call("jobs", ids=[failed]))["jobs"]
    assert "diverges" in json.dumps(job["diagnosis"])

    fixed = await agent.done("submit", **given, args=["--lr=0.1"])
    job_id = fixed["jobs"][0]["job_id"]
    assert (await agent.call("wait", ids=[job_id], timeout="5m"))["ok"]

    swept = await agent.done("submit", **given, sweep=["lr=0.1,0.2,0.3"])
    sweep = swept["jobs"][0]["job_id"]
    assert (await agent.call("wait", ids=[sweep], timeout="5m"))["ok"]

    collected = await agent.call("collect")
    assert len(collected["runs"]) >= 3
    report = (await agent.call("report", run=[job_id]))["report"]
    assert "loss" in report


def test_agent_works_on_a_cluster_of_its_own(tmp_path: Path) -> None:
    name = f"a{secrets.token_hex(3)}"
    project = tmp_path / "project"
    project.mkdir()
    home = tmp_path / "home"
    (project / "cluster.yaml").write_text(local_spec(name))
    (project / "train.py").write_text(TRAIN)
    environ = {
        **os.environ,
        "CLUSTERCTL_HOME": str(home),
        "XDG_CONFIG_HOME": str(tmp_path / "config"),
    }
    cli = Clusterctl(home, project, {"XDG_CONFIG_HOME": str(tmp_path / "config")})
    with nothing_left(home):
        try:
            transcript = converse([SCRIPT, "mcp"], project, environ, work)
        finally:
            cli("down", "--yes", "--discard", rc=None)
    log = cli("-o", "json", "agent", "log").json["calls"]
    assert [call["verb"].replace(" ", "_") for call in log] == [
        tool for tool, _, _ in transcript if tool != "more"
    ]
    assert [call["verb"] for call in log if call["answer"] == "agent-limit"] == ["down"]
    used = cli("-o", "json", "agent", "limits").json["used"]
    assert 0 < used["node_hours"] < 1
