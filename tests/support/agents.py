"""Agents: a clusterctl that plays, and a scripted client of the server.

`PlayedProgram` takes the place of the program that carries out a call, and submits to a list.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from clusterctl.cli.agent_program import CommandAnswer, Program
from clusterctl.state.ledger import JobEntry, Ledger
from clusterctl.state.workspace import Workspace

OK: dict[str, Any] = {"ok": True, "failures": []}
# A program that fails because of the learning rate that the agent chose.
TRAIN = """\
import argparse, json
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
lr = parser.parse_args().lr
if lr > 1:
    raise ValueError(f"the learning rate {lr} diverges")
lines = [json.dumps({"step": step, "loss": lr / step}) for step in range(1, 200)]
Path("metrics.jsonl").write_text("\\n".join(lines) + "\\n")
for step in range(1, 200):
    print("step", step, "loss", lr / step)
"""


def failure(code: str, rc: int = 1) -> CommandAnswer:
    row = {"code": code, "cause": code, "host": None, "phase": None, "fix": "", "retryable": False}
    return CommandAnswer({"ok": False, "failures": [row]}, rc)


@dataclass
class PlayedProgram:
    """Answers as clusterctl does, for commands in two steps. ran: the words of each command.

    at_most: of each submission. script: of its job. content: what is submitted, besides the words;
    another content changes the digest. states: job ID -> its state; a new job runs; the ledger of the
    cluster `local` has it.
    instead: called in place of a command that acts.
    """

    at_most: Mapping[str, Any] = field(
        default_factory=lambda: {"jobs": 1, "tasks": 1, "node_hours": 1.0, "usd": 0.0}
    )
    script: str = "#!/bin/bash\n#SBATCH --nodes=1\n"
    content: str = ""
    states: dict[str, str] = field(default_factory=dict)
    elapsed_s: int = 1800
    ran: list[list[str]] = field(default_factory=list)
    acted: list[list[str]] = field(default_factory=list)
    instead: Callable[[list[str]], CommandAnswer] | None = None

    def __call__(self, program: Program, _: Callable[[str], None]) -> CommandAnswer:
        words = list(program.words)
        self.ran.append(words)
        steps = [word for word in words if word.startswith(("--dry-run", "--if-digest="))]
        if not steps:
            return self._read(words)
        rest = [word for word in words if word not in steps]
        digest = hashlib.sha256(json.dumps([rest, self.content]).encode()).hexdigest()
        job = {"name": "job", "script": self.script}
        if steps == ["--dry-run"]:
            told = {"dry_run": True, "digest": digest, "at_most": dict(self.at_most)}
            return CommandAnswer({**OK, **told, "jobs": [job]}, 0)
        if steps != [f"--if-digest={digest}"]:
            return failure("plan-changed", 2)
        assert program.call, "it would end with the server"
        if self.instead is not None:
            return self.instead(words)
        self.acted.append(rest)
        if words[0] not in {"submit", "replay"}:
            return CommandAnswer(dict(OK), 0)
        ids = [str(len(self.states) + 1 + number) for number in range(self.at_most["jobs"] or 1)]
        self.states |= dict.fromkeys(ids, "RUNNING")
        ledger = _ledger()
        for job_id in ids:
            entry = JobEntry(token=f"t{job_id}", name="job", user="u", submitted_at=time.time())
            ledger.update(ledger.add(entry), job_id=job_id)
        return CommandAnswer({**OK, "jobs": [{"job_id": job_id} for job_id in ids]}, 0)

    def _read(self, words: list[str]) -> CommandAnswer:
        if words[0] != "jobs":
            return CommandAnswer(dict(OK), 0)
        ledger = _ledger()
        for entry in ledger.entries():
            state = self.states[entry.job_id or ""]
            if state != "RUNNING" and entry.state is None:
                hours = self.elapsed_s / 3600
                ledger.update(entry, state=state, state_at=time.time(), node_hours=hours)
        return CommandAnswer(dict(OK), 0)


def _ledger() -> Ledger:
    workspace = Workspace.of("local")
    workspace.root.mkdir(exist_ok=True)
    return Ledger(workspace.jobs)


@dataclass
class Place:
    """A user's project, limits and state, with nothing of this machine's user."""

    root: Path

    def __post_init__(self) -> None:
        self.project = self.root / "project"
        self.outside = self.root / "outside"
        self.config = self.root / "config" / "clusterctl" / "config.yaml"
        self.state = self.root / "state"
        for folder in (self.project, self.outside, self.config.parent, self.state):
            folder.mkdir(parents=True)
        (self.project / "train.py").write_text("print('hello')\n")
        (self.outside / "secret").write_text("hunter2\n")

    def environment(self) -> dict[str, str]:
        return {
            "HOME": str(self.root / "home"),
            "XDG_CONFIG_HOME": str(self.root / "config"),
            "CLUSTERCTL_HOME": str(self.state),
        }

    def limit(self, **limits: Any) -> None:
        """Write the limits of the user."""
        self.config.write_text(json.dumps({"agent": limits}))

    def journal(self) -> list[dict[str, Any]]:
        """The lines of the journal."""
        path = self.state / ".agent" / "journal.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]


@dataclass
class Agent:
    """The official client of the protocol, connected to a server.

    transcript: (tool, arguments, answer) of each call, for assertions and for its size.
    """

    client: Client
    transcript: list[tuple[str, dict[str, Any], str]] = field(default_factory=list)

    async def call(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool. Return its answer, of a long one all parts."""
        text = await self._text(tool, arguments)
        while "\n[cut: " in text:
            head, _, tail = text.rpartition("\n[cut: ")
            text = head + await self._text("more", {"cursor": tail.split("'")[1]})
        answer = json.loads(text)
        assert isinstance(answer["ok"], bool)
        return dict(answer)

    async def both(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool in two steps, which succeed. Return the answer of the second."""
        planned = await self.call(tool, **arguments)
        assert planned["ok"], planned
        done = await self.call(tool, **arguments, token=planned["token"])
        assert done["ok"], done
        return done

    async def _text(self, tool: str, arguments: dict[str, Any]) -> str:
        result = await self.client.call_tool(tool, arguments)
        (content,) = result.content
        assert content.type == "text"
        self.transcript.append((tool, arguments, content.text))
        return content.text


def converse(
    argv: Sequence[str | Path],
    folder: Path,
    environ: Mapping[str, str],
    story: Callable[[Agent], Awaitable[None]],
) -> list[tuple[str, dict[str, Any], str]]:
    """Start a server in a folder, tell it a story, and end it. Return the transcript.

    argv: what starts the server. environ: its environment.
    """
    agents: list[Agent] = []

    async def run() -> None:
        command, *words = map(str, argv)
        server = StdioServerParameters(command=command, args=words, env=dict(environ), cwd=folder)
        async with Client(stdio_client(server)) as client:
            agents.append(Agent(client))
            await story(agents[0])

    anyio.run(run)
    return agents[0].transcript
