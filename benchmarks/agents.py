"""How much of an agent's context clusterctl takes: the tools of `mcp`, or a skill and a shell.

Does the same work on each side, on a cluster of its own with two nodes, from `up` to the report: a
submission that fails, its cause, the fix, a sweep, the results. Counts the calls and the letters of
all requests and answers, and prints the letters divided by 4, which is about their number of tokens.

Usage: python benchmarks/agents.py
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anyio
from mcp.client.client import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from support.clusters import Cluster
from support.rounds import machine

from tests.support.agents import TRAIN

PROGRAM = Path(sys.executable).with_name("clusterctl")
SKILL = Path(__file__).resolve().parents[1] / "skills" / "clusterctl" / "SKILL.md"
LETTERS_PER_TOKEN = 4
# The steps of the work: tool, arguments, and the words of the command line. JOB is the last job.
STEPS: list[tuple[str, dict[str, Any], str]] = [
    ("up", {}, "up"),
    ("status", {}, "status"),
    (
        "submit",
        {"target": "train.py", "time": "5m", "args": ["--lr=3"]},
        "submit train.py --time 5m -- --lr=3",
    ),
    ("wait", {"ids": ["JOB"]}, "wait JOB"),
    ("jobs", {"ids": ["JOB"]}, "jobs JOB"),
    ("logs", {"job_id": "JOB"}, "logs JOB"),
    (
        "submit",
        {"target": "train.py", "time": "5m", "args": ["--lr=0.1"]},
        "submit train.py --time 5m -- --lr=0.1",
    ),
    ("wait", {"ids": ["JOB"]}, "wait JOB"),
    ("logs", {"job_id": "JOB"}, "logs JOB"),
    (
        "submit",
        {"target": "train.py", "time": "5m", "sweep": ["lr=0.1,0.2,0.3,0.4"]},
        "submit train.py --time 5m --sweep lr=0.1,0.2,0.3,0.4",
    ),
    ("wait", {"ids": ["JOB"]}, "wait JOB"),
    ("jobs", {}, "jobs"),
    ("collect", {}, "collect"),
    ("runs_list", {"sweep": "JOB"}, "runs list --sweep JOB"),
    ("report", {"run": ["JOB"]}, "report JOB"),
    ("usage", {}, "usage"),
]
# What costs: a dry run first.
IN_TWO_STEPS = frozenset({"up", "submit"})
# What is in the context before any call.
BEFORE = frozenset({"tools", "skill"})


def job_in(answer: Mapping[str, Any], before: str) -> str:
    rows = answer.get("jobs") or [answer]
    return str(rows[0].get("job_id", before)) if isinstance(rows, list) else before


def by_mcp(cluster: Cluster) -> dict[str, list[int]]:
    """Step -> letters of each request and answer."""
    sizes: dict[str, list[int]] = {}

    async def run() -> None:
        server = StdioServerParameters(
            command=str(PROGRAM),
            args=["mcp"],
            env={**os.environ, **cluster.environ},
            cwd=cluster.folder / "project",
        )
        async with Client(stdio_client(server)) as client:
            tools = [
                tool.model_dump(by_alias=True, exclude_none=True)
                for tool in (await client.list_tools()).tools
            ]
            instructions = client.instructions or ""
            sizes["tools"] = [len(json.dumps(tools, separators=(",", ":"))) + len(instructions)]
            job = ""

            async def call(tool: str, arguments: dict[str, Any]) -> dict[str, Any]:
                result = await client.call_tool(tool, arguments)
                text = "".join(getattr(part, "text", "") for part in result.content)
                sizes.setdefault(tool, []).append(len(json.dumps(arguments)) + len(text))
                whole = text.partition("\n[cut: ")[0]
                return dict(json.loads(whole)) if whole == text else {"ok": True}

            for tool, arguments, _ in STEPS:
                given = json.loads(json.dumps(arguments).replace("JOB", job))
                if tool in IN_TWO_STEPS:
                    await call(tool, {**given, "dry_run": True})
                answer = await call(tool, given)
                if tool in IN_TWO_STEPS:
                    job = job_in(answer, job)

    anyio.run(run)
    return sizes


def by_shell(cluster: Cluster, *options: str) -> dict[str, list[int]]:
    """Step -> letters of each command line and its output."""
    sizes: dict[str, list[int]] = {}
    if SKILL.exists():
        sizes["skill"] = [len(SKILL.read_text())]
    job = ""

    def call(words: list[str]) -> str:
        argv = [*options, *words]
        done = subprocess.run(
            [PROGRAM, *argv],
            cwd=cluster.folder / "project",
            env={**os.environ, **cluster.environ},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
        )
        # The agent's shell shows both, unless JSON is asked for.
        shown = done.stdout if options else done.stdout + done.stderr
        if words[0] in IN_TWO_STEPS and done.returncode != 0:
            raise SystemExit(f"{shlex.join(argv)}\n{done.stderr}")
        name = "_".join(words[:2]) if words[0] == "runs" else words[0]
        sizes.setdefault(name, []).append(len(shlex.join(["clusterctl", *argv])) + len(shown))
        return done.stdout + done.stderr

    for tool, _, line in STEPS:
        words = shlex.split(line.replace("JOB", job))
        if tool in IN_TWO_STEPS:
            call([words[0], "--dry-run", *words[1:]])
        text = call(words)
        if tool == "submit":
            job = (
                job_in(json.loads(text[: text.index("\n")]), job)
                if options
                else text.partition("submitted job ")[2].split()[0]
            )
    return sizes


@contextmanager
def project() -> Iterator[Cluster]:
    """Yield a cluster that is not up. Its folder has a folder `project`."""
    with tempfile.TemporaryDirectory(prefix="clusterctl-bench-") as folder:
        cluster = Cluster.new(folder, 2)
        # No agent works in a folder with clusterctl's state in it.
        own = cluster.folder / "project"
        own.mkdir()
        (own / "train.py").write_text(TRAIN)
        shutil.copy(cluster.folder / "cluster.yaml", own)
        try:
            yield cluster
        finally:
            cluster.down()


# Side -> its work.
WORKS = {
    "mcp": by_mcp,
    "shell, JSON": lambda cluster: by_shell(cluster, "-o", "json"),
    "shell, tables": by_shell,
}


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    sides = {}
    for side, work in WORKS.items():
        with project() as cluster:
            sides[side] = work(cluster)
    names = list(dict.fromkeys(name for sizes in sides.values() for name in sizes))
    print(f"{'tokens (letters / 4)':<22}" + "".join(f"{side:>15}" for side in sides))
    for name in names:
        counts = [sum(sizes.get(name, [])) // LETTERS_PER_TOKEN for sizes in sides.values()]
        print(f"{name:<22}" + "".join(f"{count or '-':>15}" for count in counts))
    sums = [sum(map(sum, sizes.values())) // LETTERS_PER_TOKEN for sizes in sides.values()]
    print(f"{'sum':<22}" + "".join(f"{count:>15}" for count in sums))
    calls = [
        sum(len(each) for name, each in sizes.items() if name not in BEFORE)
        for sizes in sides.values()
    ]
    print(f"{'calls':<22}" + "".join(f"{count:>15}" for count in calls))
    if not SKILL.exists():
        print(f"without a skill: {SKILL.name} does not exist")
    print(machine())


if __name__ == "__main__":
    main()
