"""The processes of a job on this node. Uses only the standard library of Python 3.8 or newer."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

from payload.node import task

# The environment of telemetry, of hang.py and of stacks.py. Their processes are no part of a rank.
WATCHER = "CLUSTERCTL_WATCHER"
# A step that is killed keeps these. task.py passes on the last output of its rank, and records its
# end.
_KEPT = re.compile(r"(?:^|/)(?:srun|payload/node/(?:job|task)\.py)$")
# Programs that start ranks, among the first words of a command line.
_STARTERS = re.compile(
    r"(?:^|/)(?:srun|orted|prted|prterun|mpirun|mpiexec|slurmstepd|torchrun|payload/node/(?:job|task)\.py)$"
    r"|^torch\.distributed\.run$"
)
_STARTER_WORDS = 4
# Signals that a process blocks, ignores or catches, in its status file.
_MASKS = re.compile(r"^Sig(?:Blk|Ign|Cgt):\s*([0-9a-f]+)$", re.MULTILINE)


def of_job(job: str) -> Iterator[tuple[int, Mapping[str, str], Sequence[str]]]:
    """Yield process id, environment and words of this user's processes of a job, but those of
    telemetry.
    """
    # pathlib is slow to import.
    for pid in filter(str.isdigit, os.listdir("/proc")):
        pairs = (
            text.partition("=")[::2] for text in task.text_of(f"/proc/{pid}/environ").split("\0")
        )
        variables = dict(pairs)
        if variables.get("SLURM_JOB_ID") == job and WATCHER not in variables:
            yield int(pid), variables, task.text_of(f"/proc/{pid}/cmdline").split("\0")


def kill_ranks(job: str) -> None:
    """Kill the processes of a job's ranks on this node."""
    for pid, variables, words in of_job(job):
        if "SLURM_STEP_ID" in variables and not any(map(_KEPT.search, words[:_STARTER_WORDS])):
            with suppress(OSError):
                os.kill(pid, signal.SIGKILL)


def handles(pid: int, number: int) -> bool:
    """Return whether a process catches, blocks or ignores a signal, so that the signal does not end
    it.
    """
    masks = _MASKS.findall(task.text_of(f"/proc/{pid}/status"))
    return any(int(mask, 16) >> (number - 1) & 1 for mask in masks)


def is_handled(job: str, number: int) -> bool | None:
    """Return whether a process of the job's program on this node handles a signal. None: no process
    is seen.

    Launchers do not count. torchrun catches signals, and then ends its ranks with them.
    """
    pids = [
        pid
        for pid, _, words in of_job(job)
        if not any(map(_STARTERS.search, words[:_STARTER_WORDS]))
    ]
    return any(handles(pid, number) for pid in pids) if pids else None
