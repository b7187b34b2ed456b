"""The processes of a job on this node. Uses only the standard library of Python 3.8 or newer."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import NamedTuple

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
# Programs that start the program of a rank, and wait for it.
_WRAPPERS = re.compile(r"(?:bash|sh|dash|env|time|apptainer|singularity|starter.*)$")
# Signals that a process blocks, ignores or catches, in its status file.
_MASKS = re.compile(r"^Sig(?:Blk|Ign|Cgt):\s*([0-9a-f]+)$", re.MULTILINE)


class RankProcess(NamedTuple):
    """A process of a rank. words: its command line. started: clock ticks since the system's start."""

    pid: int
    parent: int
    words: tuple[str, ...]
    started: int = 0

    @property
    def age(self) -> tuple[int, int]:
        """A key by which older processes come first. The numbers of processes begin again."""
        return self.started, self.pid


def of_job(job: str | None) -> Iterator[tuple[int, Mapping[str, str], Sequence[str]]]:
    """Yield process id, environment and words of this user's processes of a job, but those of
    telemetry.

    job: its number. None: processes without Slurm.
    """
    # pathlib is slow to import.
    for pid in filter(str.isdigit, os.listdir("/proc")):
        pairs = (
            text.partition("=")[::2] for text in task.text_of(f"/proc/{pid}/environ").split("\0")
        )
        variables = dict(pairs)
        if variables.get("SLURM_JOB_ID") == job and WATCHER not in variables:
            yield int(pid), variables, task.text_of(f"/proc/{pid}/cmdline").split("\0")


def ranks_here() -> dict[int, list[RankProcess]]:
    """Return rank -> its processes on this node, for the job of this process.

    A launcher's variables name the rank. If no process has such a variable, the job's program is
    rank 0.
    """
    named: dict[int, list[RankProcess]] = {}
    of_step: dict[int, list[RankProcess]] = {}
    of_script: dict[int, list[RankProcess]] = {}
    for pid, variables, words in of_job(os.environ.get("SLURM_JOB_ID")):
        status = stat_of(f"/proc/{pid}")
        if not words[0] or not status or _is_starter(words):
            continue
        process = RankProcess(pid, int(status[1]), tuple(words[:-1]), int(status[19]))
        number = variables.get("RANK") or variables.get("OMPI_COMM_WORLD_RANK") or ""
        if number.isdigit():
            named.setdefault(int(number), []).append(process)
        elif "SLURM_STEP_ID" in variables and "SLURM_PROCID" in variables:
            of_step.setdefault(int(variables["SLURM_PROCID"]), []).append(process)
        elif "SLURM_JOB_ID" in variables:
            of_script.setdefault(0, []).append(process)
    return named or of_step or of_script


def main_process(processes: Sequence[RankProcess]) -> RankProcess:
    """Return the process that runs a rank's program: it neither started the program nor was started
    by it.
    """
    pids = {process.pid for process in processes}
    main = min(
        (p for p in processes if p.parent not in pids), key=lambda p: p.age, default=processes[0]
    )
    while _WRAPPERS.search(main.words[0].rpartition("/")[2]):
        children = [process for process in processes if process.parent == main.pid]
        if not children:
            break
        main = min(children, key=lambda process: process.age)
    return main


def stat_of(folder: str) -> list[str]:
    """Return the fields of a stat file in /proc, from the state on; [] if the process has ended."""
    return task.text_of(f"{folder}/stat").rpartition(")")[2].split()


def _is_starter(words: Sequence[str]) -> bool:
    return any(map(_STARTERS.search, words[:_STARTER_WORDS]))


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
    pids = [pid for pid, _, words in of_job(job) if not _is_starter(words)]
    return any(handles(pid, number) for pid in pids) if pids else None
