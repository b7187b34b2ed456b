"""The commands of the command line: the only list of them, with the effect of each.

A command's function is imported when the command runs or its help is shown, so that
``clusterctl --help`` imports none of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from enum import StrEnum
from typing import Final

from clusterctl.errors import MachineError

VerbFunction = Callable[..., int | None]


class Effect(StrEnum):
    """What a command does, at most.

    READS: it changes nothing. PLANS: it changes nothing, and shows what another command would do.
    SUBMITS: its jobs cost. CHANGES: it changes files here, or files, jobs, nodes or a cluster there.
    """

    READS = "reads"
    PLANS = "plans"
    SUBMITS = "submits"
    CHANGES = "changes"

    @property
    def only_shows(self) -> bool:
        return self in {Effect.READS, Effect.PLANS}


class Panel(StrEnum):
    """The heading of a command in `clusterctl --help`."""

    SET_UP = "Set up"
    JOBS = "Jobs"
    RESULTS = "Results"
    NODES = "Nodes"
    MORE = "More"


@dataclass(frozen=True, slots=True)
class VerbGroup:
    """A group of commands, such as `runs`."""

    summary: str
    panel: Panel


@dataclass(frozen=True, slots=True)
class Verb:
    """A command. function: MODULE:FUNCTION in clusterctl.cli. summary: first sentence of its help.

    panel: None for a command of a group.
    without: the options of other commands that it can't use, by their names in ``COMMON``.
    extra: modules of an optional dependency that it needs.
    """

    function: str
    summary: str
    effect: Effect
    panel: Panel | None = None
    _: KW_ONLY
    names_cluster: bool = True
    without: tuple[str, ...] = ()
    extra: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        return f"clusterctl.cli.{self.function.partition(':')[0]}"

    def load(self) -> VerbFunction:
        """Import the function of the command. MachineError: its optional dependency is missing."""
        name = self.function.partition(":")[2]
        try:
            module = importlib.import_module(self.module)
        except ModuleNotFoundError as exc:
            if (exc.name or "").partition(".")[0] not in self.extra:
                raise
            raise MachineError(
                "the server for agents needs the package mcp, which is not installed here",
                code="tool-missing",
                about="mcp",
                why=str(exc),
                fix="pip install 'clusterctl[mcp]'",
            ) from exc
        function: VerbFunction = getattr(module, name)
        return function


# Of a command that is about no single cluster.
_NO_CLUSTER: Final = ("file", "cluster")

GROUPS: Final[Mapping[str, VerbGroup]] = {
    "image": VerbGroup("Build the image that new nodes start from.", Panel.MORE),
    "cache": VerbGroup("List or prune the cached images of nodes.", Panel.MORE),
    "runs": VerbGroup(
        "List, show, compare, draw and remove collected runs. `clusterctl runs` alone lists them.",
        Panel.RESULTS,
    ),
    "storage": VerbGroup(
        "List or remove storages, which outlive clusters (storage.name).", Panel.MORE
    ),
    "orphans": VerbGroup(
        "List or remove orphans: clusters that have lost their workspace.", Panel.MORE
    ),
    "node": VerbGroup("Drain, reboot, add, replace or remove single nodes.", Panel.NODES),
    "agent": VerbGroup("Show the limits and the calls of agents that use `mcp`.", Panel.MORE),
}
VERBS: Final[Mapping[str, Verb]] = {
    "init": Verb(
        "spec:init",
        "Write a commented cluster.yaml.",
        Effect.CHANGES,
        Panel.SET_UP,
        names_cluster=False,
        without=("cluster",),
    ),
    "validate": Verb(
        "spec:validate",
        "Validate a spec, and report all errors with their lines.",
        Effect.READS,
        Panel.SET_UP,
        names_cluster=False,
    ),
    "plan": Verb(
        "plan:plan",
        "Show what `up` would change, and its cost.",
        Effect.PLANS,
        Panel.SET_UP,
    ),
    "up": Verb(
        "up:up",
        "Create or repair the cluster.",
        Effect.CHANGES,
        Panel.SET_UP,
    ),
    "status": Verb(
        "jobs:status",
        "Show the state of nodes and jobs.",
        Effect.READS,
        Panel.SET_UP,
    ),
    "doctor": Verb(
        "plan:doctor",
        "Check the hosts and report problems.",
        Effect.READS,
        Panel.SET_UP,
    ),
    "attach": Verb(
        "attach:attach",
        "Use an existing Slurm cluster with your own account.",
        Effect.CHANGES,
        Panel.SET_UP,
        names_cluster=False,
    ),
    "detach": Verb(
        "attach:detach",
        "Remove clusterctl's files from an attached cluster.",
        Effect.CHANGES,
        Panel.SET_UP,
    ),
    "down": Verb(
        "down:down",
        "Collect runs, remove the cluster, and verify the cleanup.",
        Effect.CHANGES,
        Panel.SET_UP,
    ),
    "submit": Verb(
        "submit:submit",
        "Submit a bundled job, your own script, or a job file.",
        Effect.SUBMITS,
        Panel.JOBS,
    ),
    "where": Verb(
        "where:where",
        "Show where a job would run, and when it would start.",
        Effect.PLANS,
        Panel.JOBS,
    ),
    "jobs": Verb(
        "jobs:jobs",
        "List your jobs, newest first, or show a single job in full.",
        Effect.READS,
        Panel.JOBS,
    ),
    "logs": Verb(
        "logs:logs",
        "Print a job's stdout and stderr.",
        Effect.READS,
        Panel.JOBS,
    ),
    "top": Verb(
        "top:top",
        "Show live what nodes, jobs and their ranks do.",
        Effect.READS,
        Panel.JOBS,
    ),
    "wait": Verb(
        "waiting:wait",
        "Wait until jobs have ended.",
        Effect.READS,
        Panel.JOBS,
    ),
    "cancel": Verb("cancel:cancel", "Cancel jobs.", Effect.CHANGES, Panel.JOBS),
    "rehearse": Verb(
        "rehearse:rehearse",
        "Cause faults in your job, and show whether it survives.",
        Effect.CHANGES,
        Panel.JOBS,
    ),
    "collect": Verb(
        "collect:collect",
        "Copy runs from the cluster, with the SHA-256 of each file.",
        Effect.CHANGES,
        Panel.RESULTS,
    ),
    "runs list": Verb(
        "runs:list_", "List collected runs, newest first.", Effect.READS, names_cluster=False
    ),
    "runs show": Verb(
        "runs:show", "Show a collected run in full.", Effect.READS, names_cluster=False
    ),
    "runs diff": Verb("runs:diff", "Compare two runs.", Effect.READS, names_cluster=False),
    "runs figure": Verb(
        "runs:figure",
        "Write a figure of a metric for a paper.",
        Effect.READS,
        names_cluster=False,
    ),
    "runs rm": Verb(
        "runs:rm",
        "Remove collected runs from this machine, after asking.",
        Effect.CHANGES,
        names_cluster=False,
    ),
    "report": Verb(
        "runs:report",
        "Write the report of a run, a sweep, or several runs.",
        Effect.READS,
        Panel.RESULTS,
        names_cluster=False,
    ),
    "replay": Verb(
        "replay:replay",
        "Submit a collected run again, unchanged.",
        Effect.SUBMITS,
        Panel.RESULTS,
    ),
    "usage": Verb(
        "usage:usage",
        "Show hours and cost by user, account, partition or month.",
        Effect.READS,
        Panel.RESULTS,
    ),
    "node drain": Verb(
        "node:drain",
        "Drain nodes: no new jobs start, running jobs continue.",
        Effect.CHANGES,
    ),
    "node resume": Verb(
        "node:resume",
        "Resume nodes, so that jobs can start on them again.",
        Effect.CHANGES,
    ),
    "node reboot": Verb(
        "node:reboot",
        "Reboot nodes once idle: drain them, wait for running jobs, then reboot.",
        Effect.CHANGES,
    ),
    "node remove": Verb(
        "node:remove",
        "Remove nodes from the cluster and release the machines.",
        Effect.CHANGES,
    ),
    "node forget": Verb(
        "node:forget",
        "Forget removed nodes that could not be released and no longer exist.",
        Effect.CHANGES,
    ),
    "node add": Verb(
        "node:add",
        "Add machines of the spec to the running cluster.",
        Effect.CHANGES,
    ),
    "node replace": Verb(
        "node:replace",
        "Replace the machines of nodes; the node names stay.",
        Effect.CHANGES,
    ),
    "ssh": Verb(
        "access:ssh",
        "Open a shell on a host, or run a command there.",
        Effect.CHANGES,
        Panel.NODES,
    ),
    "shell": Verb(
        "access:shell",
        "Open a shell, or run a command, on allocated nodes.",
        Effect.SUBMITS,
        Panel.NODES,
    ),
    "code": Verb(
        "access:code",
        "Connect ssh, and editors that use it, to a running job.",
        Effect.CHANGES,
        Panel.NODES,
    ),
    "put": Verb(
        "files:put",
        "Copy files and folders to the cluster.",
        Effect.CHANGES,
        Panel.NODES,
    ),
    "get": Verb(
        "files:get",
        "Copy files and folders from the cluster.",
        Effect.CHANGES,
        Panel.NODES,
    ),
    "list": Verb(
        "listing:list_",
        "List your clusters, and orphans on this machine.",
        Effect.READS,
        Panel.MORE,
        names_cluster=False,
        without=_NO_CLUSTER,
    ),
    "schema": Verb(
        "spec:schema",
        "Print the JSON Schema of the spec, for editors.",
        Effect.READS,
        Panel.MORE,
        names_cluster=False,
        without=_NO_CLUSTER,
    ),
    "storage list": Verb(
        "storage:storage_list",
        "List your storages on this machine, or all storages of a Google Cloud project.",
        Effect.READS,
        names_cluster=False,
    ),
    "storage remove": Verb(
        "storage:storage_remove",
        "Remove a storage with all data on it.",
        Effect.CHANGES,
        names_cluster=False,
    ),
    "orphans list": Verb(
        "down:orphans_list",
        "List orphans: clusters with this name but no workspace, with their cost.",
        Effect.READS,
        names_cluster=False,
    ),
    "orphans remove": Verb(
        "down:orphans_remove",
        "Remove orphans: clusters with this name but no workspace.",
        Effect.CHANGES,
        names_cluster=False,
    ),
    "cache list": Verb(
        "listing:cache_list",
        "List the cached node images; for a cloud spec, also the images in its project, with their cost.",
        Effect.READS,
        names_cluster=False,
    ),
    "cache prune": Verb(
        "listing:cache_prune",
        "Remove cached node images that no cluster uses; with --images, also the images in a cloud project.",
        Effect.CHANGES,
        names_cluster=False,
    ),
    "image bake": Verb(
        "up:bake",
        "Build the image for new nodes, unless it exists for this configuration.",
        Effect.CHANGES,
        names_cluster=False,
    ),
    "bundle": Verb(
        "bundle:bundle",
        "Download OS packages with dependencies and Python wheels to a folder.",
        Effect.CHANGES,
        Panel.MORE,
    ),
    "agent limits": Verb(
        "agent:limits",
        "Show the limits of agents, and the node hours that their jobs of the last 24 hours can use.",
        Effect.READS,
        names_cluster=False,
        without=_NO_CLUSTER,
    ),
    "agent log": Verb(
        "agent:log",
        "Show every call of agents, the last at the end.",
        Effect.READS,
        names_cluster=False,
        without=_NO_CLUSTER,
    ),
    "mcp": Verb(
        "mcp_server:mcp",
        "Serve agents by the Model Context Protocol.",
        Effect.SUBMITS,
        Panel.MORE,
        extra=("mcp", "mcp_types", "anyio"),
        names_cluster=False,
        without=_NO_CLUSTER,
    ),
    "manual": Verb(
        "manual:manual",
        "Print a page of the manual.",
        Effect.READS,
        Panel.MORE,
        names_cluster=False,
        without=_NO_CLUSTER,
    ),
    "completion": Verb(
        "completion:completion",
        "Print the completion script of a shell.",
        Effect.READS,
        Panel.MORE,
        names_cluster=False,
        without=_NO_CLUSTER,
    ),
}
