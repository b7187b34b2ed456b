"""Agents: a clusterctl that plays, and a scripted client of the server.

`PlayedProgram` takes the place of the program that carries out a call, and submits to a list.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client

from clusterctl.agent.journal import Journal
from clusterctl.cli.agent_program import CommandAnswer, Program

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
    """Answers as clusterctl does. ran: the programs. jobs: how many were submitted.

    instead: called in place of a program that acts.
    """

    ran: list[Program] = field(default_factory=list)
    jobs: int = 0
    instead: Callable[[Program], CommandAnswer] | None = None

    @property
    def words(self) -> list[list[str]]:
        """The words of each program."""
        return [[*program.words] for program in self.ran]

    def __call__(self, program: Program, _: Callable[[str], None]) -> CommandAnswer:
        self.ran.append(program)
        if program.call and self.instead is not None:
            return self.instead(program)
        if not program.call or program.words[0] not in {"submit", "replay"}:
            return CommandAnswer(dict(OK), 0)
        with (journal := Journal()).lock():
            journal.reserve(program.call, 1.0)
        self.jobs += 1
        return CommandAnswer({**OK, "jobs": [{"job_id": str(self.jobs)}]}, 0)


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

    async def done(self, tool: str, **arguments: Any) -> dict[str, Any]:
        """Call a tool, which succeeds. Return its answer."""
        answer = await self.call(tool, **arguments)
        assert answer["ok"], answer
        return answer

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
