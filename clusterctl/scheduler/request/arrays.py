"""The numbers of an array's tasks, in a value of `sbatch --array` such as ``0-9:3,12%2``."""

from __future__ import annotations

import re
from collections.abc import Iterable
from contextlib import suppress
from typing import Final

from ClusterShell.RangeSet import RangeSet, RangeSetException

# 3, 0-9 or 0-9:2
_RANGE: Final = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def tasks_of(array: str) -> list[int]:
    """Return the numbers of an array's tasks in order. array: a value of `sbatch --array`, or "".

    Empty: Slurm refuses the value.
    """
    with suppress(RangeSetException, ValueError):
        return [*map(int, RangeSet(array.partition("%")[0].replace(":", "/")))]
    return []


def names_tasks(text: str) -> bool:
    """Return whether a text has the form of numbers of tasks, such as ``1-3,7`` or ``0-8:2%4``."""
    found = [_RANGE.fullmatch(part) for part in text.partition("%")[0].split(",")]
    return all(one and int(one[1]) <= int(one[2] or one[1]) for one in found)


def count_at_most(array: str) -> int:
    """Return how many tasks an array has if no number is twice in it, without listing them.

    array: a value of `sbatch --array`, or "".
    """
    ranges = _RANGE.findall(array.partition("%")[0])
    return sum(
        (int(last or first) - int(first)) // max(1, int(step or 1)) + 1
        for first, last, step in ranges
    )


def has_task(array: str, number: int) -> bool:
    """Return whether a value of `sbatch --array` has the task with this number."""
    return any(
        int(first) <= number <= int(last or first)
        and (number - int(first)) % max(1, int(step or 1)) == 0
        for first, last, step in _RANGE.findall(array.partition("%")[0])
    )


def fold_tasks(numbers: Iterable[int]) -> str:
    """Return numbers of tasks as a value of `sbatch --array`: ``0-3,7``."""
    return str(RangeSet(",".join(map(str, numbers))))
