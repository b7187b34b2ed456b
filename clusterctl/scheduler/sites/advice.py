"""Remedies on the cluster itself: operators may repair it, guests ask the operators."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from clusterctl.spec.names import ASK_OPERATORS, RUN_UP

# On a cluster that other people operate, if the nodes can't use the folder of `attach`.
ANOTHER_FOLDER: Final = (
    "`clusterctl detach`, then attach again with a --folder on a disk that the nodes share and jobs "
    "may write to, such as --folder '$SCRATCH/clusterctl'"
)


@dataclass(frozen=True, slots=True)
class Advice:
    """Parts of messages to the user of a cluster.

    repair: the remedy for a broken cluster. is_operator: whether the user operates the cluster.
    shows_nodes: the command that shows the hardware of the nodes.
    sets_account: the command that sets the Slurm account of all jobs. "": no such command.
    cancels_of_others: the way to cancel another user's jobs, after "ask USER". {ids}: Slurm's
        numbers of the jobs.
    """

    repair: str
    is_operator: bool
    shows_nodes: str
    cancels_of_others: str
    sets_account: str = ""


OWN: Final = Advice(
    repair=RUN_UP,
    is_operator=True,
    shows_nodes="`clusterctl status` shows the nodes with their cores and memory",
    cancels_of_others=", or cancel it as the administrator: `clusterctl ssh --admin -- sudo scancel {ids}`",
)
FOREIGN: Final = Advice(
    repair=ASK_OPERATORS,
    is_operator=False,
    shows_nodes="`clusterctl ssh 'sinfo --format=%R,%D,%c,%m,%G'` shows what the nodes have",
    cancels_of_others=" or the cluster's operators",
    sets_account="`clusterctl attach --account NAME` sets it for all jobs",
)
