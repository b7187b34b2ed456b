"""Arrays with indices above Slurm's MaxArraySize: users see one job, and Slurm has an array for
each part.

A part has the tasks with numbers of the same first digits, such as 20 to 29. In Slurm, the last
digits are their numbers, so Slurm gives their logs the right names. The job's script gets the rest
as arguments (see templates/job.sbatch.j2). All parts share the job's folder. The id of the first
part is the job's id.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final

from ClusterShell.RangeSet import RangeSet, RangeSetException

from clusterctl.scheduler.base import JobInfo, comment_of
from clusterctl.state.ledger import JobEntry, Ledger

MOST_PARTS: Final = 100


@dataclass(frozen=True, slots=True)
class Part:
    """Part of an array. options, arguments: for sbatch. offset: of its tasks' numbers to Slurm's.

    in_turn: whether it may start only after the part before it, because the array limits its
        running tasks.
    """

    offset: int
    options: tuple[str, ...]
    arguments: tuple[str, ...]
    in_turn: bool


# 3, 0-9 or 0-9:2
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def tasks_of(array: str) -> list[int]:
    """Return the numbers of an array's tasks in order. array: a value of `sbatch --array`, or "".

    Empty: Slurm refuses the value.
    """
    with suppress(RangeSetException, ValueError):
        return [*map(int, RangeSet(array.partition("%")[0].replace(":", "/")))]
    return []


def count_at_most(array: str) -> int:
    """Return how many tasks an array has if no number is twice in it, without listing them.

    array: a value of `sbatch --array`, or "".
    """
    ranges = _RANGE.findall(array.partition("%")[0])
    return sum(
        (int(last or first) - int(first)) // max(1, int(step or 1)) + 1
        for first, last, step in ranges
    )


def fold_tasks(numbers: Iterable[int]) -> str:
    """Return numbers of tasks as a value of `sbatch --array`: ``0-3,7``."""
    return str(RangeSet(",".join(map(str, numbers))))


def most_tasks(max_array: int) -> int:
    """Return the limit of an array's indices if it is sent in parts. max_array: Slurm's
    MaxArraySize.
    """
    size = _size(max_array)
    return MOST_PARTS * size if size > 1 else max_array


def _size(max_array: int) -> int:
    """Return the number of tasks of a part, a power of ten."""
    return int(10 ** (len(str(max_array)) - 1))


def parts_of(array: str, max_array: int) -> tuple[Part, ...]:
    """Return the parts of an array in order. Empty: Slurm takes the array as a whole."""
    tasks = tasks_of(array)
    if not tasks or tasks[-1] < max_array:
        return ()
    size = _size(max_array)
    limit = "".join(array.partition("%")[1:])
    whole = (str(tasks[0]), str(tasks[-1]), str(len(tasks)))
    parts = []
    for first in dict.fromkeys(task // size for task in tasks):
        own = RangeSet.fromlist([str(task % size) for task in tasks if task // size == first])
        number = f"{first}%{len(str(size)) - 1}a" if first else "%a"
        logs = (
            f"--{name}={file}-{number}.log"
            for name, file in (("output", "stdout"), ("error", "stderr"))
        )
        options = (f"--array={own}{limit}", *logs, "--hold")
        parts.append(Part(first * size, options, (str(first * size), *whole), bool(limit)))
    return tuple(parts)


@dataclass(frozen=True, slots=True)
class SplitArrays:
    """The arrays of a ledger that Slurm has in parts.

    parts: id of each part in Slurm -> the entry of its array, and the offset of its tasks' numbers.
    """

    parts: dict[int, tuple[JobEntry, int]]

    @classmethod
    def of(cls, ledger: Ledger) -> SplitArrays:
        rows = {row.token: row for row in ledger.entries_and_parts()}
        parts = [row for row in rows.values() if row.job_id and row.offset is not None]
        return cls({int(p.job_id or 0): (rows[p.part_of or p.token], p.offset or 0) for p in parts})

    def slurm_ids(self, ids: Iterable[str]) -> list[str]:
        """Return Slurm's ids of jobs and tasks: for an array in parts, the id of each part."""
        return [slurm_id for job_id in ids for slurm_id in self._slurm_ids(job_id)]

    def _slurm_ids(self, job_id: str) -> Iterator[str]:
        number, _, task = job_id.partition("_")
        own = [
            (offset, part) for part, (entry, offset) in self.parts.items() if entry.job_id == number
        ]
        if task:
            offset, part = max(((o, p) for o, p in own if o <= int(task)), default=(0, number))
            yield f"{part}_{int(task) - offset}"
        else:
            yield from [str(part) for _, part in sorted(own)] or [number]

    def own_id(self, slurm_id: str) -> str:
        """Return the id that users see."""
        number, _, task = slurm_id.partition("_")
        entry, offset = self.parts.get(int(number), (None, 0))
        own = (entry.job_id if entry is not None else None) or number
        return f"{own}_{int(task) + offset}" if task else own

    def renumbered(self, jobs: Sequence[JobInfo]) -> tuple[JobInfo, ...]:
        """Return Slurm's jobs with the ids and tasks that users see."""
        return tuple(self._renumbered(job) for job in jobs) if self.parts else tuple(jobs)

    def _renumbered(self, job: JobInfo) -> JobInfo:
        entry, offset = self.parts.get(job.number, (None, 0))
        # After Slurm has begun its numbers again, another job may have the number.
        is_part = entry is not None and job.token.partition("p")[0] in ("", entry.token)
        if entry is None or entry.job_id is None or not is_part:
            return job
        return replace(
            job,
            number=int(entry.job_id),
            task=None if job.task is None else job.task + offset,
            comment=comment_of(entry.token),
        )
