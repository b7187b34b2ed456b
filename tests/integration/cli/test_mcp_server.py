"""`clusterctl mcp`: the requests of the official client, over streams in memory; and processes of
servers whose client or machine fails them. Slurm is played.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clusterctl.agent.journal import Journal
from clusterctl.cli import mcp_server
from tests.integration.cli.conftest import Answer as Verb
from tests.support.agent_project import Project, answer_of
from tests.support.agents import Agent
from tests.support.messages import condition
from tests.support.processes import eventually
from tests.support.verbs import SCRIPT


@pytest.fixture
def server(project: Project) -> Iterator[subprocess.Popen[str]]:
    """A server for a client that writes the protocol by hand."""
    process = subprocess.Popen(
        [SCRIPT, "mcp"],
        cwd=project.folder,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


def codes(answer: dict[str, Any]) -> list[str]:
    return [condition(failure) for failure in answer["failures"]]


def test_life_of_a_job(project: Project, answer: Verb) -> None:
    """Dry run, submit, wait, a failure's cause, fix and resubmit, cancel; each call is journalled."""
    project.script("job.sh", "echo started; exit 3")

    async def story(agent: Agent) -> None:
        given = {"target": "job.sh", "nodes": 1, "time": "10m"}
        planned = await agent.done("submit", **given, dry_run=True)
        assert planned["at_most"]["node_hours"] > 0
        assert project.jobs() == {}
        submitted = await agent.done("submit", **given)
        assert [job["job_id"] for job in submitted["jobs"]] == ["1"]
        waited = await agent.call("wait", ids=["1"], timeout="1m")
        assert codes(waited) == ["job-failed"]
        log = await agent.call("logs", job_id="1")
        assert "started" in json.dumps(log)
        project.script("job.sh", "sleep 600")
        assert (await agent.done("submit", **given))["jobs"][0]["job_id"] == "2"
        (row,) = (await agent.call("jobs", ids=["2"]))["jobs"]
        assert row["state"] == "RUNNING"
        assert (await agent.done("cancel", ids=["2"]))["cancelled"] == ["2"]

    project.tell(story)
    assert {job["state"] for job in project.jobs().values()} == {"FAILED", "CANCELLED"}
    begun = [row["verb"] for row in project.journal() if row["event"] == "begin"]
    assert begun == ["submit", "submit", "wait", "logs", "submit", "jobs", "cancel"]
    log = answer("agent", "log")["calls"]
    assert [call["verb"] for call in log] == begun
    assert [call["jobs"] for call in log if call["jobs"]] == [["1"], ["2"]]


def test_wait_is_one_call_with_progress(project: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mcp_server, "_PROGRESS_S", 0.1)
    project.script("job.sh", "while [ ! -e ended ]; do sleep 0.1; done")
    seen: list[str] = []

    async def heard(progress: float, total: float | None, message: str | None) -> None:
        seen.append(f"{progress} of {total}: {message}")
        Path(project.jobs()["1"]["dir"], "files", "ended").touch()

    async def story(agent: Agent) -> None:
        await agent.done("submit", target="job.sh", time="5m")
        result = await agent.client.call_tool("wait", {"ids": ["1"]}, progress_callback=heard)
        assert not result.is_error

    project.tell(story)
    assert seen
    assert [job["state"] for job in project.jobs().values()] == ["COMPLETED"]


def test_tools_are_the_commands_with_their_annotations(project: Project) -> None:
    found: dict[str, Any] = {}

    async def story(agent: Agent) -> None:
        found.update({tool.name: tool for tool in (await agent.client.list_tools()).tools})

    project.tell(story)
    assert found["jobs"].annotations.read_only_hint
    # Their defaults are those of the protocol: not only reading, destructive, not idempotent.
    assert found["down"].annotations.destructive_hint is not False
    assert found["submit"].annotations.destructive_hint is False
    assert not found["submit"].annotations.idempotent_hint
    assert "dry_run" in found["submit"].input_schema["properties"]
    assert not found.keys() & {"ssh", "shell", "mcp", "runs_rm", "orphans_remove"}
    # Every client has them in its context.
    size = len(json.dumps([tool.model_dump(exclude_none=True) for tool in found.values()]))
    assert size < 18_000


@pytest.mark.parametrize("dry_run", [True, False])
@pytest.mark.parametrize(
    ("limits", "given", "name"),
    [
        ({"node_hours": 0.3}, {"array": "1-16:4"}, "node_hours"),
        ({"nodes": 1}, {"nodes": 2}, "nodes"),
        ({"time": "4m"}, {}, "time"),
        ({"verbs_off": ["submit"]}, {}, "verbs_off"),
        ({}, {"folder": ".."}, "folders"),
    ],
)
def test_submission_over_a_limit_is_refused_with_the_limit_that_its_user_can_change(
    project: Project, limits: dict[str, Any], given: dict[str, Any], name: str, *, dry_run: bool
) -> None:
    project.limit(**limits)
    project.script("job.sh", "true")

    async def story(agent: Agent) -> None:
        refused = await agent.call("submit", target="job.sh", time="5m", dry_run=dry_run, **given)
        assert codes(refused) == ["agent-limit"]
        assert refused["limit"]["name"] == name
        assert f"`agent.{name}` in {project.config}" in refused["failures"][0]["fix"]

    project.tell(story)
    assert project.jobs() == {}


def test_submissions_add_up_until_the_limit(project: Project) -> None:
    project.limit(node_hours=0.2)
    project.script("job.sh", "true")

    async def story(agent: Agent) -> None:
        await agent.done("submit", target="job.sh", time="5m")
        await agent.done("submit", target="job.sh", time="5m")
        # Looking uses nothing.
        await agent.done("submit", target="job.sh", time="1m", dry_run=True)
        refused = await agent.call("submit", target="job.sh", time="5m")
        assert refused["limit"]["used"] == pytest.approx(1 / 6, abs=1e-3)
        assert (await agent.call("jobs"))["ok"]

    project.tell(story)
    assert len(project.jobs()) == 2


def test_unknown_cluster_has_a_fix_in_the_arguments_of_the_tool(project: Project) -> None:
    async def story(agent: Agent) -> None:
        (failed,) = (await agent.call("jobs", cluster="elsewhere"))["failures"]
        assert failed["fix"]
        assert "-f" not in failed["fix"].split()
        assert "--" not in failed["fix"]

    project.tell(story)


@pytest.mark.parametrize("signal_name", ["KILL", "TERM"])
def test_killed_server_leaves_a_submission_that_is_carried_out_and_known(
    project: Project, server: subprocess.Popen[str], signal_name: str
) -> None:
    """The submission goes on alone, and its job is in the journal."""
    project.script("job.sh", "sleep 600")
    with project.cluster.state() as state:
        # Slurm answers again after some tries.
        state["away"] = 0
    given = {"target": "job.sh", "time": "5m"}
    client = _Bare(server)
    assert client.call("submit", **given, dry_run=True)["ok"]
    with project.cluster.state() as state:
        state["away"] = 3
    client.send("submit", **given)
    journal = Journal(project.state / ".agent")
    # The program that carries it out has asked Slurm: the journal has a call before it is begun.
    eventually(lambda: project.tries_left() < 3, pause_s=0.05)
    server.kill() if signal_name == "KILL" else server.terminate()
    server.wait()
    eventually(lambda: not _pending(journal))
    (call,) = [call for call in journal.calls().values() if call.jobs]
    assert (condition(call), [*call.jobs]) == ("ok", ["1"])
    assert len(project.jobs()) == 1


def test_vanished_client_leaves_nothing_running_but_its_job(
    project: Project, server: subprocess.Popen[str]
) -> None:
    project.script("job.sh", "sleep 600")
    client = _Bare(server)
    given = {"target": "job.sh", "time": "5m"}
    assert client.call("submit", **given)["ok"]
    client.send("wait", ids=["1"], timeout="30m")
    journal = Journal(project.state / ".agent")
    eventually(lambda: _pending(journal))
    assert server.stdin
    server.stdin.close()
    server.wait(timeout=60)
    assert [job["state"] for job in project.jobs().values()] == ["RUNNING"]


def test_messages_that_are_no_protocol_do_not_end_the_server(server: subprocess.Popen[str]) -> None:
    client = _Bare(server)
    assert server.stdin
    server.stdin.write('{"jsonrpc": "2.0"\n[]\nnull\n\n{"method": 7}\n')
    server.stdin.flush()
    assert client.ask("tools/list", {})["tools"]
    server.stdin.close()
    server.wait(timeout=60)


@pytest.mark.parametrize("where", ["home", "state", "config", "missing"])
def test_server_refuses_to_work_in_a_folder_with_the_limits_in_it(
    project: Project, where: str
) -> None:
    folders = {
        "home": project.cluster.home,
        "state": project.state,
        "config": project.config.parent,
        "missing": project.folder / "missing",
    }
    refusal = answer_of(["mcp", f"--project={folders[where]}"], project.folder, os.environ)
    assert refusal.code == "option-invalid"


def test_server_with_wrong_limits_does_not_start(project: Project) -> None:
    project.limit(nodes="many")
    assert answer_of(["mcp"], project.folder, os.environ).code == "spec-invalid"


def _pending(journal: Journal) -> bool:
    return any(not condition(call) for call in journal.calls().values())


class _Bare:
    """A client that writes the protocol by hand, and so can vanish at any moment."""

    def __init__(self, server: subprocess.Popen[str]) -> None:
        self._server = server
        self._number = 0
        client = {"name": "bare", "version": "1"}
        self.ask(
            "initialize",
            {"protocolVersion": "2025-06-18", "capabilities": {}, "clientInfo": client},
        )
        self._write({"method": "notifications/initialized"})

    def send(self, tool: str, **arguments: Any) -> None:
        self._number += 1
        params = {"name": tool, "arguments": arguments}
        self._write({"id": self._number, "method": "tools/call", "params": params})

    def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        result = self.ask("tools/call", {"name": tool, "arguments": arguments})
        return dict(json.loads(result["content"][0]["text"]))

    def ask(self, method: str, params: dict[str, Any]) -> dict[str, Any]:
        self._number += 1
        self._write({"id": self._number, "method": method, "params": params})
        while True:
            assert self._server.stdout
            line = self._server.stdout.readline()
            assert line, "the server has ended"
            answer = json.loads(line)
            if answer.get("id") == self._number:
                return dict(answer["result"])

    def _write(self, message: dict[str, Any]) -> None:
        assert self._server.stdin
        self._server.stdin.write(json.dumps({"jsonrpc": "2.0", **message}) + "\n")
        self._server.stdin.flush()
