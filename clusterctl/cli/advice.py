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

# `attach LOGIN` chooses no cluster, `attach` does.
_OF_CLUSTER: Final = "|".join(name for name, verb in VERBS.items() if verb.names_cluster)
_COMMAND: Final = re.compile(rf"`clusterctl ({_OF_CLUSTER}|attach(?=`))((?: [^`]*)?)`")
_CHOICE: Final = re.compile(r" (--cluster|--file|-f)(?=[ =])")


def cluster_option(file: Path | None, cluster: str | None) -> str:
    """Return the option with which the user has chosen a cluster. "": there is no such option, or
    no cluster has the name.
    """
    if file is not None:
        return f"--file {shlex.quote(str(file))}"
    return f"--cluster {cluster}" if cluster in clusters_up() else ""


def with_cluster(text: str, option: str) -> str:
    """Return a message with this option in its commands (`` `clusterctl logs 7` ``) that act on a
    cluster. A command that names its cluster is unchanged.
    """

    def completed(command: re.Match[str]) -> str:
        verb, rest = command.groups()
        own, _, _ = f"{rest} ".partition(" -- ")
        if f" {option.removeprefix('--cluster ')}/" in own:
            return command[0]
        # The -f of `logs` follows a log.
        if any(verb != "logs" or choice[1] != "-f" for choice in _CHOICE.finditer(own)):
            return command[0]
        return f"`clusterctl {verb} {option}{rest}`"

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
