"""Hints: the usual meaning of a known message, signal or exit code, and a remedy to try.

A hint explains a line that is shown, not why the job failed. The messages are in data/hints.yaml.
Hints that rest on more than a message are in certain_hints.py.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Final

from clusterctl.scheduler.ends.diagnosis import Hint
from clusterctl.scheduler.ends.excerpt import OF_BASH, Excerpt
from clusterctl.scheduler.ends.facts import Evidence, Facts
from clusterctl.scheduler.ends.log_text import says_no_error, short
from clusterctl.util.assets import read_table

_HINTS: Final = Path(__file__).with_name("data") / "hints.yaml"
# A line of a message of Open MPI; the rule before a message of mpirun.
_OF_MPI: Final = re.compile(r"\[\S+:\d+\] \*\*\* ")
_RULE: Final = re.compile(r"-{70,}$")


@dataclass(frozen=True, slots=True, kw_only=True)
class HintRule:
    """A row of data/hints.yaml, which describes the fields."""

    name: str
    says: str
    fix: str
    match: tuple[str, ...] = ()
    signal: str = ""
    exit_codes: tuple[int, ...] = ()
    general: bool = False


def _table() -> tuple[HintRule, ...]:
    return read_table(_HINTS, tuple[HintRule, ...])


@cache
def rows() -> tuple[tuple[HintRule, re.Pattern[str]], ...]:
    """Return the rows about lines, each with its expressions joined into one expression."""
    return tuple(
        (row, re.compile("|".join(f"(?:{each})" for each in row.match)))
        for row in _table()
        if row.match
    )


def hinted_lines(excerpt: Excerpt) -> Iterator[str]:
    """Yield the line that ended the job: the last statement, or else the exception with which the log
    ends, unless it ended only a part of the program. What mpirun or a runtime says of the end counts as
    that line.
    """
    last = excerpt.last_line
    mpirun = [line for line in excerpt.last if _OF_MPI.match(line)]
    banner = [line for rule, line in pairwise(excerpt.last) if _RULE.match(rule)]
    runtime = [line for line in excerpt.of_shell if not OF_BASH.match(line)]
    raised = "" if excerpt.part else excerpt.exception
    end = (last, *mpirun, *banner, *runtime) if last else (raised,)
    yield from (line for line in dict.fromkeys(end) if line and not says_no_error(line))


def usual_hint(lines: Iterable[str], evidence: Evidence) -> Iterator[Hint]:
    """Yield the hint of the table about the lines: of the first row that fits one. A general row is the
    last choice.
    """
    found = [
        (row, match) for line in lines for row, pattern in rows() if (match := pattern.search(line))
    ]
    for row, match in sorted(found, key=lambda each: each[0].general)[:1]:
        groups = {name: short(text) for name, text in match.groupdict("").items()}
        # The search for packages reads files.
        told = f"{row.says} {row.fix}"
        ways = {name: way(evidence) for name, way in _WAYS.items() if f"{{{name}}}" in told}
        says, fix = (
            text.format(**groups, **ways) if "{" in text else text for text in (row.says, row.fix)
        )
        yield Hint(name=row.name, line=match.string, says=says, fix=fix)


def _place(evidence: Evidence) -> str:
    return "in the image" if evidence.packages().image else "on the node"


def _install(evidence: Evidence) -> str:
    if evidence.packages().image:
        return "add it to the image, or use another image with --container"
    if evidence.advice.is_operator:
        return "install it on the nodes (`software.packages` of the spec), or use --module or --container"
    return "load it with --module, or use an --env-path or a --container that has it"


def way_to_packages(evidence: Evidence) -> str:
    """Return how the job gets the packages of Python of an environment that is not sent."""
    packages = evidence.packages()
    if packages.image or packages.environment:
        return "submit again: the packages are those of --container or --env-path"
    if packages.way:
        return packages.way
    listed = packages.listed or "requirements.txt (such a file: pip freeze)"
    return f"submit with --requirements {listed}, or with --env-path"


# The remedies of the job's user, by their names in the fixes of data/hints.yaml.
_WAYS: Final[Mapping[str, Callable[[Evidence], str]]] = MappingProxyType(
    {
        "place": _place,
        "install": _install,
        "packages": way_to_packages,
        "repair": lambda evidence: evidence.advice.repair,
    }
)


def hint_of_end(facts: Facts) -> Iterator[Hint]:
    """Yield a hint about the signal or the exit code."""
    failed = facts.failed
    for row in _table():
        if (row.signal and row.signal == failed.signal) or failed.exit_code in row.exit_codes:
            yield Hint(name=row.name, says=row.says, fix=row.fix)
