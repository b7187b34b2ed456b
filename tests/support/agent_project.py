"""The folder of an agent with a played cluster, whose commands run in forks."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import anyio
from mcp.client.client import Client

from clusterctl.cli.agent_calls import Calls
from clusterctl.cli.agent_program import CommandAnswer, Program
from clusterctl.cli.mcp_server import server_of
from tests.support import forks
from tests.support.agents import Agent
from tests.support.played.cluster import PlayedCluster

Story = Callable[[Agent], Awaitable[None]]
# What goes over SSH is run on this machine, with the played commands.
CUSTOM = """\
import os, sys
sys.path.append({repository!r})
os.environ.update({environ!r})
from clusterctl.transport import ssh
from tests.support.local_transport import LocalTransport
ssh.SSHTransport = lambda *_, **__: LocalTransport()
"""


class Project:
    """The folder of an agent, with a played cluster."""

    def __init__(self, cluster: PlayedCluster, root: Path) -> None:
        self.cluster = cluster
        self.folder = root / "cwd"
        self.config = root / "config" / "clusterctl" / "config.yaml"
        self.state = root / "state"
        self.custom = root / "custom"
        self.custom.mkdir()
        repository = str(Path(__file__).parents[2])
        (self.custom / "sitecustomize.py").write_text(
            CUSTOM.format(repository=repository, environ=cluster.environment())
        )

    def limit(self, **limits: Any) -> None:
        self.config.parent.mkdir(parents=True, exist_ok=True)
        self.config.write_text(json.dumps({"agent": limits}))

    def script(self, name: str, body: str) -> str:
        (self.folder / name).write_text(f"#!/bin/bash\n{body}\n")
        return name

    @property
    def calls(self) -> Calls:
        return Calls(self.folder, run=run_in_fork)

    def tell(self, story: Story) -> None:
        """Tell a story to a server in this process, which runs commands in forks."""

        async def run() -> None:
            server = server_of(self.calls)
            async with Client(server, mode="legacy") as client:
                await story(Agent(client))

        anyio.run(run)

    def journal(self) -> list[dict[str, Any]]:
        lines = (self.state / ".agent" / "journal.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def jobs(self) -> dict[str, Any]:
        with self.cluster.state() as state:
            return dict(state["jobs"])

    def tries_left(self) -> int:
        """How many more calls Slurm leaves without an answer."""
        with self.cluster.state() as state:
            return int(state["away"])


def run_in_fork(program: Program, _: Callable[[str], None]) -> CommandAnswer:
    """Take the place of `run_program`: run the command without the start of a Python."""
    return answer_of(program.words, program.folder, program.environ)


def answer_of(words: Sequence[str], folder: Path, environ: Mapping[str, str]) -> CommandAnswer:
    """Run a command of clusterctl in a fork."""
    argv = ["clusterctl", "-o", "json", *words]
    done = forks.clusterctl(argv, cwd=folder, environ=environ, stdin="", timeout_s=120)
    return CommandAnswer(json.loads(done.stdout), done.returncode)
