"""Commands in messages, completed with the cluster that the user has chosen.

A command in backquotes is one for the user to type. A command that another process runs is in
single quotes, and a text of another process is ``Quoted``: both are shown unchanged.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Final

from clusterctl.cli.verbs import VERBS
from clusterctl.state.workspace import clusters_up

# Commands that take IDs of jobs as their first words.
_OF_JOBS: Final = frozenset(
    {
        *("jobs", "logs", "top", "wait", "cancel", "code", "collect", "replay", "report"),
        *("runs show", "runs diff", "runs rm"),
    }
)
# `attach LOGIN` chooses no cluster, `attach` does.
_OF_CLUSTER: Final = "|".join(
    name for name, verb in VERBS.items() if verb.names_cluster or name in _OF_JOBS
)
_COMMAND: Final = re.compile(rf"`clusterctl ({_OF_CLUSTER}|attach(?=`))((?: [^`]*)?)`")
_NUMBERS: Final = re.compile(r"(?: (?:ID|m?[0-9]+(?:_(?:[0-9]+|\[[^] ]*\]))?)(?= |$))+")
_NAMED: Final = re.compile(r" [a-z][a-z0-9-]*/(?:ID|m?[0-9])")
_CHOICE: Final = re.compile(r" (--cluster|--file|-f)(?=[ =])")


def cluster_option(file: Path | None, cluster: str | None) -> str:
    """Return the option with which the user has chosen a cluster. "": there is no such option, or
    no cluster has the name.
    """
    if file is not None:
        return f"--file {shlex.quote(str(file))}"
    return f"--cluster {cluster}" if cluster in clusters_up() else ""


def with_cluster(text: str, option: str, cluster: str) -> str:
    """Return a message whose commands name the cluster: `` `clusterctl up` `` gets the option, and
    `` `clusterctl logs 7` `` becomes `` `clusterctl logs demo/7` ``. A command that names its cluster
    is unchanged.

    option: "": the user has chosen no cluster. cluster: the name of the cluster. "": unknown.
    """

    def completed(command: re.Match[str]) -> str:
        verb, rest = command.groups()
        own, _, _ = f"{rest} ".partition(" -- ")
        # The -f of `logs` follows a log.
        if _NAMED.search(own) or any(
            verb != "logs" or choice[1] != "-f" for choice in _CHOICE.finditer(own)
        ):
            return command[0]
        if cluster and verb in _OF_JOBS and (numbers := _NUMBERS.match(rest)):
            jobs = numbers[0].replace(" ", f" {cluster}/")
            return f"`clusterctl {verb}{jobs}{rest[numbers.end() :]}`"
        # `attach` alone is of a cluster, and the commands on runs need none.
        is_of_cluster = verb == "attach" or VERBS[verb].names_cluster
        return f"`clusterctl {verb} {option}{rest}`" if is_of_cluster else command[0]

    return _COMMAND.sub(completed, text) if option else text


def first_job(nodes: int, *, minutes: str = "") -> str:
    """Return the advice to submit a job, with a command that the cluster runs as it is.

    nodes: how many the default partition can give to a job. minutes: the time limit without which
        Slurm accepts no job. "": it needs none.
    """
    # The bundled job `train` ends by itself long before.
    limit = f" --time {minutes}m" if minutes else ""
    count = max(1, min(nodes, 2))
    return f"submit a job with `clusterctl submit train --nodes {count}{limit} --follow`"
