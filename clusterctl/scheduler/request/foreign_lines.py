"""Lines of a script for other schedulers, such as ``#PBS``, and the options of `submit` that replace
them.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from clusterctl.errors import Notice


@dataclass(frozen=True, slots=True)
class _Option:
    """An option of another scheduler. pattern: its group is the value.

    flag: of `submit`. written: returns the value as the flag takes it.
    """

    pattern: str
    flag: str
    written: Callable[[str], str] = str


def _from_seconds(text: str) -> str:
    return f"{text}s" if text.isdecimal() else text


def _from_minutes(text: str) -> str:
    """Return a time that another scheduler reads as minutes, or as hours and minutes."""
    return f"{text}m" if text.isdecimal() else f"{text}:00" if text.count(":") == 1 else text


# Start of a line -> the options in it that have a flag of `submit` of the same meaning.
_SCHEDULERS: Final[Mapping[str, Sequence[_Option]]] = {
    "#PBS": (
        _Option(r"-N\s*(\S+)", "--name"),
        _Option(r"\b(?:nodes|select)=(\d+)", "--nodes"),
        _Option(r"\b(?:ppn|mpiprocs)=(\d+)", "--tasks-per-node"),
        _Option(r"\bmem=(\w+)", "--mem"),
        _Option(r"\bwalltime=([\d:]+)", "--time", _from_seconds),
        _Option(r"-q\s*(\S+)", "--partition"),
        _Option(r"-A\s*(\S+)", "--account"),
        _Option(r"-[Jt]\s*(\d\S*)", "--array"),
    ),
    "#BSUB": (
        _Option(r"-J\s*\"?([^\s\"\[]+)", "--name"),
        _Option(r"-n\s*(\d+)", "--tasks-per-node"),
        _Option(r"-M\s*(\w+)", "--mem"),
        _Option(r"-W\s*([\d:]+)", "--time", _from_minutes),
        _Option(r"-q\s*(\S+)", "--partition"),
        _Option(r"-P\s*(\S+)", "--account"),
        _Option(r"-J\s*\"?[^\s\"\[]+\[([^]]+)\]", "--array"),
    ),
    "#$": (
        _Option(r"-N\s+(\S+)", "--name"),
        _Option(r"-pe\s+\S+\s+(\d+)", "--tasks-per-node"),
        _Option(r"\b(?:h_vmem|mem_free)=(\w+)", "--mem"),
        _Option(r"\bh_rt=([\d:]+)", "--time", _from_seconds),
        _Option(r"-q\s+(\S+)", "--partition"),
        _Option(r"-P\s+(\S+)", "--account"),
        _Option(r"-t\s+(\d\S*)", "--array"),
    ),
    "#COBALT": (
        _Option(r"--jobname[\s=]+(\S+)", "--name"),
        _Option(r"(?:-n|--nodecount)[\s=]+(\d+)", "--nodes"),
        _Option(r"(?:-t|--time)[\s=]+([\d:]+)", "--time", _from_minutes),
        _Option(r"(?:-q|--queue)[\s=]+(\S+)", "--partition"),
        _Option(r"(?:-A|--project)[\s=]+(\S+)", "--account"),
    ),
}
_MARK: Final = re.compile(rf"({'|'.join(map(re.escape, _SCHEDULERS))})\s+(?=-)")


@dataclass(frozen=True, slots=True)
class ForeignLines:
    """The lines of a script for another scheduler.

    note: names them, with the flags that replace them.
    options: name of an option of a job -> its value. places: name -> the line.
    """

    note: Notice
    options: Mapping[str, object]
    places: Mapping[str, str]


def foreign_lines(script: str, lines: Sequence[str]) -> Iterator[ForeignLines]:
    """Yield the lines for each other scheduler before a script's first command.

    script: the file's name.
    """
    found: dict[str, list[tuple[int, str]]] = {}
    for number, line in enumerate(lines, start=1):
        if line.strip() and not line.startswith("#"):
            break
        if match := _MARK.match(line):
            found.setdefault(match[1], []).append((number, f" {line[match.end() :]}"))
    for mark, rows in found.items():
        values: dict[str, str] = {}
        places: dict[str, str] = {}
        for option in _SCHEDULERS[mark]:
            for number, text in rows:
                if match := re.search(rf"(?<=[\s,:]){option.pattern}", text):
                    values[option.flag] = option.written(match[1])
                    places[_field(option.flag)] = f"`{mark}{text}` in line {number} of {script}"
        numbers = ", ".join(str(number) for number, _ in rows)
        head = "line" if len(rows) == 1 else "lines"
        flags = " ".join(f"{flag} {shlex.quote(value)}" for flag, value in values.items())
        instead = f"use {flags}" if flags else "use options of `clusterctl submit`"
        text = f"{script}, {head} {numbers}: {mark} lines have no effect here; in their place, {instead}"
        given = {
            _field(flag): int(value) if value.isdecimal() else value
            for flag, value in values.items()
        }
        yield ForeignLines(Notice("foreign-directives", text), given, places)


def _field(flag: str) -> str:
    return flag.removeprefix("--").replace("-", "_")
