"""The commands of the command line: name, function, and the first sentence of the help.

A command's function is imported when the command runs or its help is shown, so that
``clusterctl --help`` imports none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from clusterctl.cli.options import Verb
from clusterctl.errors import MachineError

# A function that imports the function of a command.
Import = Callable[[], Verb]

# Command -> the import of its function, and the first sentence of its help.
VERBS: Final[dict[str, tuple[Import, str]]] = {}
GROUPS: Final = {
    "image": "Images that nodes start from.",
    "cache": "The cache of node images.",
    "runs": "Collected runs. Without a command, `clusterctl runs` is `clusterctl runs list`.",
    "storage": "Storage that outlived its cluster (storage.keep).",
    "orphans": "Clusters without a workspace.",
    "node": "Manage individual nodes without affecting the others.",
    "agent": "What agents may do through `mcp`, and what they did.",
    "bundle": "Packages and programs for air-gapped hosts, in a single file.",
}


def _verb(name: str, summary: str) -> Callable[[Import], Import]:
    def add(function: Import) -> Import:
        VERBS[name] = function, summary
        return function

    return add


@_verb("init", "Write a commented cluster.yaml.")
def init() -> Verb:
    from clusterctl.cli import spec

    return spec.init


@_verb("validate", "Validate a spec, and report all errors with their lines.")
def validate() -> Verb:
    from clusterctl.cli import spec

    return spec.validate


@_verb("schema", "Print the JSON Schema of the spec, for editors.")
def schema() -> Verb:
    from clusterctl.cli import spec

    return spec.schema


@_verb("doctor", "Check the hosts and report problems.")
def doctor() -> Verb:
    from clusterctl.cli import plan

    return plan.doctor


@_verb("attach", "Use an existing Slurm cluster with your own account.")
def attach() -> Verb:
    from clusterctl.cli import attach

    return attach.attach


@_verb("invite", "Print the command with which a colleague attaches the cluster.")
def invite() -> Verb:
    from clusterctl.cli import invite

    return invite.invite


@_verb("detach", "Remove clusterctl's files from an attached cluster.")
def detach() -> Verb:
    from clusterctl.cli import attach

    return attach.detach


@_verb("plan", "Show what `up` would change, and its cost.")
def plan() -> Verb:
    from clusterctl.cli import plan

    return plan.plan


@_verb("up", "Create or repair the cluster.")
def up() -> Verb:
    from clusterctl.cli import up

    return up.up


@_verb("down", "Collect runs, remove the cluster, and verify the cleanup.")
def down() -> Verb:
    from clusterctl.cli import down

    return down.down


@_verb("status", "Show the state of nodes and jobs.")
def status() -> Verb:
    from clusterctl.cli import jobs

    return jobs.status


@_verb("list", "List your clusters, kept storage, and orphans on this machine.")
def list_() -> Verb:
    from clusterctl.cli import listing

    return listing.list_


@_verb("submit", "Submit a bundled job, your own script, or a job file.")
def submit() -> Verb:
    from clusterctl.cli import submit

    return submit.submit


@_verb("rehearse", "Cause faults in your job, and show whether it survives.")
def rehearse() -> Verb:
    from clusterctl.cli import rehearse

    return rehearse.rehearse


@_verb("replay", "Submit a collected run again, unchanged.")
def replay() -> Verb:
    from clusterctl.cli import replay

    return replay.replay


@_verb("jobs", "List your jobs, newest first, or show a single job in full.")
def jobs() -> Verb:
    from clusterctl.cli import jobs

    return jobs.jobs


@_verb("top", "Show live what nodes, jobs and their ranks do.")
def top() -> Verb:
    from clusterctl.cli import top

    return top.top


@_verb("where", "Show where a job would run, and when it would start.")
def where() -> Verb:
    from clusterctl.cli import where

    return where.where


@_verb("wait", "Wait until jobs have ended.")
def wait() -> Verb:
    from clusterctl.cli import waiting

    return waiting.wait


@_verb("logs", "Print a job's stdout and stderr.")
def logs() -> Verb:
    from clusterctl.cli import logs

    return logs.logs


@_verb("stacks", "Show where the ranks of a running job are.")
def stacks() -> Verb:
    from clusterctl.cli import logs

    return logs.stacks


@_verb("cancel", "Cancel jobs.")
def cancel() -> Verb:
    from clusterctl.cli import cancel

    return cancel.cancel


@_verb("collect", "Copy runs from the cluster, with the SHA-256 of each file.")
def collect() -> Verb:
    from clusterctl.cli import collect

    return collect.collect


@_verb("runs list", "List collected runs, newest first.")
def runs_list() -> Verb:
    from clusterctl.cli import runs

    return runs.list_


@_verb("runs show", "Show a collected run in full.")
def runs_show() -> Verb:
    from clusterctl.cli import runs

    return runs.show


@_verb("runs diff", "Compare two runs.")
def runs_diff() -> Verb:
    from clusterctl.cli import runs

    return runs.diff


@_verb("runs rm", "Remove collected runs from this machine, after asking.")
def runs_rm() -> Verb:
    from clusterctl.cli import runs

    return runs.rm


@_verb("usage", "Show hours and cost by user, account, partition or month.")
def usage() -> Verb:
    from clusterctl.cli import usage

    return usage.usage


@_verb("report", "Write the report of a run, a sweep, or several runs.")
def report() -> Verb:
    from clusterctl.cli import runs

    return runs.report


@_verb("ssh", "Open a shell on a host, or run a command there.")
def ssh() -> Verb:
    from clusterctl.cli import access

    return access.ssh


@_verb("shell", "Open a shell, or run a command, on allocated nodes.")
def shell() -> Verb:
    from clusterctl.cli import access

    return access.shell


@_verb("code", "Connect ssh, and editors that use it, to a running job.")
def code() -> Verb:
    from clusterctl.cli import access

    return access.code


@_verb("put", "Copy files and folders to the cluster.")
def put() -> Verb:
    from clusterctl.cli import files

    return files.put


@_verb("get", "Copy files and folders from the cluster.")
def get() -> Verb:
    from clusterctl.cli import files

    return files.get


@_verb("completion", "Print the completion script of a shell.")
def completion() -> Verb:
    from clusterctl.cli import completion

    return completion.completion


@_verb("image bake", "Build the image for new nodes, unless it exists for this configuration.")
def image_bake() -> Verb:
    from clusterctl.cli import up

    return up.bake


@_verb(
    "cache list",
    "List the cached node images; for a cloud spec, also the images in its project, with their cost.",
)
def cache_list() -> Verb:
    from clusterctl.cli import listing

    return listing.cache_list


@_verb(
    "cache prune",
    "Remove cached node images that no cluster uses; with --images, also the images in a cloud project.",
)
def cache_prune() -> Verb:
    from clusterctl.cli import listing

    return listing.cache_prune


@_verb("storage list", "List the kept storage of all clusters.")
def storage_list() -> Verb:
    from clusterctl.cli import listing

    return listing.storage_list


@_verb("storage remove", "Remove kept storage with all data on it.")
def storage_remove() -> Verb:
    from clusterctl.cli import down

    return down.storage_remove


@_verb("orphans list", "List orphans: clusters with this name but no workspace, with their cost.")
def orphans_list() -> Verb:
    from clusterctl.cli import down

    return down.orphans_list


@_verb("orphans remove", "Remove orphans: clusters with this name but no workspace.")
def orphans_remove() -> Verb:
    from clusterctl.cli import down

    return down.orphans_remove


@_verb("node drain", "Drain nodes: no new jobs start, running jobs continue.")
def node_drain() -> Verb:
    from clusterctl.cli import node

    return node.drain


@_verb("node resume", "Resume nodes, so that jobs can start on them again.")
def node_resume() -> Verb:
    from clusterctl.cli import node

    return node.resume


@_verb("node reboot", "Reboot nodes once idle: drain them, wait for running jobs, then reboot.")
def node_reboot() -> Verb:
    from clusterctl.cli import node

    return node.reboot


@_verb("node remove", "Remove nodes from the cluster and restore the machines.")
def node_remove() -> Verb:
    from clusterctl.cli import node

    return node.remove


@_verb("node forget", "Forget removed nodes that could not be restored and no longer exist.")
def node_forget() -> Verb:
    from clusterctl.cli import node

    return node.forget


@_verb("node add", "Add machines of the spec to the running cluster.")
def node_add() -> Verb:
    from clusterctl.cli import node

    return node.add


@_verb("node replace", "Replace the machines of nodes; the node names stay.")
def node_replace() -> Verb:
    from clusterctl.cli import node

    return node.replace


@_verb("bundle create", "Pack OS packages with dependencies and Python wheels into a file.")
def bundle_create() -> Verb:
    from clusterctl.cli import bundle

    return bundle.create


@_verb("bundle verify", "Verify that a bundle is intact and matches clusterctl and the spec.")
def bundle_verify() -> Verb:
    from clusterctl.cli import bundle

    return bundle.verify


@_verb("bundle show", "Show the manifest of a bundle.")
def bundle_show() -> Verb:
    from clusterctl.cli import bundle

    return bundle.show


@_verb("agent limits", "Show what agents may do through `mcp`, and what they use of it.")
def agent_limits() -> Verb:
    from clusterctl.cli import agent

    return agent.limits


@_verb("agent log", "Show the calls of agents, the last at the end.")
def agent_log() -> Verb:
    from clusterctl.cli import agent

    return agent.log


@_verb("agent resume", "Let agents submit again after failed jobs in a row.")
def agent_resume() -> Verb:
    from clusterctl.cli import agent

    return agent.resume


@_verb("mcp", "Serve agents by the Model Context Protocol.")
def mcp() -> Verb:
    try:
        from clusterctl.cli import mcp_server
    except ModuleNotFoundError as exc:
        if (exc.name or "").partition(".")[0] not in {"mcp", "mcp_types", "anyio"}:
            raise
        raise MachineError(
            "the server for agents needs the package mcp, which is not installed here",
            code="mcp-missing",
            why=str(exc),
            fix="pip install 'clusterctl[mcp]'",
        ) from exc
    return mcp_server.mcp
