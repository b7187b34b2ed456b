"""Slurm's nodes and jobs, as the watcher reads and changes them, and the requests of the watcher to
nodes.

Runs with the platform's Python, from 3.9 on.
"""

from __future__ import annotations

import argparse
import errno
import re
import selectors
import shlex
import socket
import subprocess
import time
from collections.abc import Collection, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import lru_cache, partial

PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
ALIVE_PORT = 6815
FENCE_PORT = 6816
SLURMD_PORT = 6818
# Longest waits for a command, for a node's program `fence`, and for slurmd.
ASK_S = 10.0
FENCE_S = 5.0
SLURMD_S = 1.0
# A request to kill processes that arrives later might hit the next start of the job.
CREDENTIAL_S = 10
ANSWERS = (0, errno.ECONNREFUSED, errno.ECONNRESET)
ALL = "all"
LIST = "list"
ENDED = ("COMPLETING", "FAILED")
NODE = re.compile(r"^NodeName=(\S+) .*?\bNodeAddr=(\S+) .*?\bState=(\S+)", re.MULTILINE)
SBATCH = re.compile(r"^#SBATCH\s(.*)", re.MULTILINE)
# The user's own option in a job's script. argparse reads it like sbatch, also among unknown
# options.
OPTIONS = argparse.ArgumentParser(add_help=False)
OPTIONS.add_argument("-x", "--exclude", nargs="?", default="", const="")
REASON = re.compile(r"\bReason=(.*?) \[\S+@\S+\]")
# Slurm's reason for a job that was killed by SIGKILL begins with this text.
KILLED = "RaisedSignal:9("


@dataclass(frozen=True)
class Node:
    name: str
    address: str
    state: str
    reason: str = ""


@dataclass(frozen=True)
class Job:
    """A job. ``task``: its id for scontrol, such as 12_5; ``nodes``: in Slurm's form, such as
    n[1-3].

    host: the node of its script. end, start: Unix seconds, or other text if they are unknown.
    excluded: nodes that it does not use.
    """

    id: str
    task: str
    state: str
    reason: str
    nodes: str
    host: str = ""
    end: str = ""
    start: str = ""
    excluded: str = ""


def ask(*argv: str, text: str = "") -> str:
    """Return the output of a command, or "" if it fails."""
    env = {"PATH": PATH, "LC_ALL": "C", "SLURM_TIME_FORMAT": "%s"}
    with suppress(OSError, subprocess.TimeoutExpired):
        result = subprocess.run(
            argv, input=text, capture_output=True, text=True, errors="replace", timeout=ASK_S, check=False,
            env=env,
        )  # fmt: skip
        return result.stdout if result.returncode == 0 else ""
    return ""


def read_nodes(names: str = "") -> dict[str, Node]:
    nodes = {}
    for line in ask(
        "scontrol", "--oneliner", "show", "node", *([names] if names else [])
    ).splitlines():
        if match := NODE.match(line):
            reason = REASON.search(line)
            nodes[match[1]] = Node(match[1], match[2], match[3], reason[1] if reason else "")
    return nodes


def read_jobs(*options: str) -> list[Job] | None:
    """Return all jobs that have not ended, or None if squeue fails. Without jobs, it prints its
    header.
    """
    if not (
        rows := ask("squeue", "--all", "--format=%A|%i|%T|%r|%N|%B|%e|%S|%x", *options).splitlines()
    ):
        return None
    return [Job(*fields) for fields in (row.split("|") for row in rows[1:]) if len(fields) == 9]  # noqa: PLR2004


def read_killed_jobs(node: str, seconds: float) -> list[Job]:
    """Return the jobs with a script that was killed on this node in this time.

    When a machine dies, slurmstepd may live a little longer than the script, and report that the
    job failed. A script that ends by itself has an exit code, and Slurm has other reasons for jobs
    that it ends.
    """
    jobs = read_jobs("--states=all", f"--nodelist={node}") or []
    # A job that was requeued keeps the reason for a while.
    ended = [
        job
        for job in jobs
        if job.state in ENDED and job.host == node and job.reason.startswith(KILLED)
    ]
    return [job for job in ended if job.end.isdigit() and time.time() - int(job.end) < seconds]


@lru_cache(4096)
def expand_ranges(nodes: str) -> tuple[str, ...]:
    if names := ask("scontrol", "show", "hostnames", nodes).split():
        return tuple(names)
    # lru_cache does not keep exceptions.
    raise LookupError(nodes)


def expand(nodes: str) -> tuple[str, ...]:
    """Return the names in a list of Slurm's, such as n[1-3]. Empty if scontrol fails."""
    if "[" not in nodes:
        return tuple(nodes.split(","))
    with suppress(LookupError):
        return expand_ranges(nodes)
    return ()


def read_script(job: Job) -> str:
    return ask("scontrol", "write", "batch_script", job.id, "-")


def asks_for_requeue(script: str) -> bool:
    return "--requeue" in script


def own_exclusions(script: str) -> str:
    """Return the nodes that a job's user has excluded, in Slurm's form."""
    words: list[str] = []
    for line in SBATCH.findall(script):
        # sbatch ignores a quote without an end.
        with suppress(ValueError):
            words += shlex.split(line, comments=True)
    return OPTIONS.parse_known_args(words)[0].exclude or ""


def silent_nodes(nodes: Iterable[Node], seconds: float) -> set[str]:
    """Try to connect to all nodes at once. Return the nodes that do not answer within this time."""
    silent = set()
    with selectors.DefaultSelector() as selector:
        for node in nodes:
            connection = socket.socket(socket.AF_INET6 if ":" in node.address else socket.AF_INET)
            connection.setblocking(False)
            error = connection.connect_ex((node.address, ALIVE_PORT))
            if error == errno.EINPROGRESS:
                selector.register(connection, selectors.EVENT_WRITE, (node.name, connection))
                continue
            connection.close()
            if error not in ANSWERS:
                silent.add(node.name)
        deadline = time.monotonic() + seconds
        while waiting := selector.get_map():
            events = selector.select(max(0.0, deadline - time.monotonic()))
            for key in [key for key, _ in events] or list(waiting.values()):
                name, connection = key.data
                if (
                    not events
                    or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR) not in ANSWERS
                ):
                    silent.add(name)
                selector.unregister(connection)
                connection.close()
    return silent


def is_own(node: Node) -> bool:
    """Return whether the node's address is the controller's. Only then can a socket be bound to
    it.
    """
    family = socket.AF_INET6 if ":" in node.address else socket.AF_INET
    with suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as unused:
        unused.bind((node.address, 0))
        return True
    return False


def request(words: str, node: Node) -> list[str]:
    """Send a request to a node's program ``fence``, and return the answer's words. Empty: no
    answer.
    """
    text = f"fence {node.name} {words}"
    credential = ask("munge", "--restrict-uid=0", f"--ttl={CREDENTIAL_S}", "--string", text)
    with (
        suppress(OSError),
        closing(socket.create_connection((node.address, FENCE_PORT), FENCE_S)) as line,
    ):
        line.sendall(credential.encode())
        with line.makefile() as answer:
            return answer.readline().split()
    return []


def request_fence(jobs: str, node: Node) -> bool:
    """Have a node kill the processes of these jobs, and return whether they are gone."""
    return request(jobs, node) == ["ok"]


def request_list(node: Node) -> tuple[str, list[str] | None]:
    """Return a node's name, and the ids of jobs with a script that runs on it, or None without an
    answer.
    """
    kind, *jobs = request(LIST, node) or [""]
    return node.name, jobs if kind == "jobs" else None


def runs_slurmd(node: Node) -> bool:
    with (
        suppress(OSError),
        closing(socket.create_connection((node.address, SLURMD_PORT), SLURMD_S)),
    ):
        return True
    return False


def fence(nodes: Collection[Node], *jobs: str) -> list[bool]:
    """Kill the processes of these jobs on these nodes, at once. Return for each whether they are
    gone.
    """
    with ThreadPoolExecutor(max(1, min(32, len(nodes)))) as pool:
        return list(pool.map(partial(request_fence, " ".join(jobs)), nodes))


def update(node: str, state: str, reason: str = "") -> None:
    ask(
        "scontrol",
        "update",
        f"nodename={node}",
        f"state={state}",
        *([f"reason={reason}"] if reason else []),
    )
