"""Removes the values of `submit --secret` when a job does not need them any more.

The folder of a job's values is outside of the job's own folder, and only its user can read it. The
file FILE in it has the values (see ``task.read_secrets``). A task of an array adds an empty file
``done-TASK`` at its end. If nodes share no folder, each has such files of the tasks whose first node
it is, so clusterctl removes the values of an array that has run on several nodes. Uses only the
standard library of Python 3.8 or newer.
"""

from __future__ import annotations

import os
import shlex
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress

from payload.node import restarts, task
from payload.node.requeue import FILES_S, STEP, JobEvents, own_log, step_environment

DONE = "done-"
# States in which Slurm may start the job again.
MAY_START_AGAIN = frozenset(("REQUEUED", "PREEMPTED", "NODE_FAIL"))


def forget(options: Mapping[str, str], nodes: Sequence[str]) -> None:
    """Remove the values if no attempt of this job and no other task of its array will need them.

    options: of `job.py run`. nodes: the job's nodes, without Slurm.
    """
    folder = options["secrets"]
    if will_start_again() or not is_last_task(folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    if "each-node" in options:
        remove_on_nodes(folder, nodes, options.get("ssh", ""))


def will_start_again() -> bool:
    """Return whether this job was requeued, by job.py or by Slurm."""
    if restarts.state_by_slurm(restarts.end_of_file(own_log())) in MAY_START_AGAIN:
        return True
    past = JobEvents().read()
    return bool(past) and past[-1].is_requeued


def is_last_task(folder: str) -> bool:
    """Record the end of this task of an array. Return whether this folder has the ends of all tasks;
    True for a job without tasks.
    """
    own = os.environ.get("SLURM_ARRAY_TASK_ID")
    if own is None:
        return True
    count = int(os.environ.get("SLURM_ARRAY_TASK_COUNT", "1"))
    try:
        with open(f"{folder}/{DONE}{own}", "w"):
            pass
        return sum(name.startswith(DONE) for name in os.listdir(folder)) >= count
    except OSError:
        return False


def remove_on_nodes(folder: str, nodes: Sequence[str], ssh: str) -> None:
    """Remove a folder on all nodes of the job, which share no folder."""
    remove = ["rm", "-rf", "--", folder]
    if nodes:
        for node in nodes:
            with suppress(OSError):
                task.output_of([*ssh.split(), node, " ".join(map(shlex.quote, remove))])
        return
    count = os.environ.get("SLURM_JOB_NUM_NODES", "1")
    step = ["timeout", FILES_S, *STEP, f"--nodes={count}", f"--ntasks={count}", "--chdir=/"]
    task.output_of([*step, *remove], step_environment())
