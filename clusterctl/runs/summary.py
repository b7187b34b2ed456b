"""What a run was asked for and what it came to: its configuration, and the metrics that its program wrote.

Both are of the job's making, so they are bounded: in bytes read, in names, and in the length of each.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import printable
from clusterctl.runs.series import MAX_NAMES, MAX_TEXT, is_number, records
from clusterctl.state.ledger import Metric, Value

_MAX_DEPTH: Final = 4
_OPTION: Final = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


@dataclass
class Summary:
    """``config``: option or key -> value. ``metrics``: name -> its last, lowest and highest value."""

    config: dict[str, Value] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)


def summarize(folder: Path, args: Sequence[str] = ()) -> Summary:
    """The summary of a run, or of a task of an array, from its folder and the arguments of its program.

    Of a very large metrics.jsonl, the values are those of its first line and its end.
    """
    found = Summary(config=config_of(args)[0])
    for record in records(folder):
        if isinstance(config := record.line.get("config"), dict):
            found.config = {**flat(config), **found.config}
        for name, value in record.values.items():
            found.metrics.setdefault(name, Metric()).add(value, record.step)
    return found


def config_of(args: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """The options in a program's arguments, and the other words.

    ``--lr 0.1`` and ``--lr=0.1`` are options with a value, ``--flag`` is True.
    """
    found: dict[str, Value] = {}
    others: list[str] = []
    words = list(args)
    while words and len(found) < MAX_NAMES:
        match = _OPTION.fullmatch(word := words.pop(0))
        if match is None:
            others.append(word)
            continue
        value: Value = True
        if match[2] is not None:
            value = _value(match[2])
        elif words and _OPTION.fullmatch(words[0]) is None:  # -3 is none, either
            value = _value(words.pop(0))
        found[match[1].replace("-", "_")] = value
    return found, others + words


def _value(text: str) -> Value:
    """A number where the text is one, else the text as it can be printed."""
    for kind in (int, float):
        try:
            number = kind(text)
        except ValueError:
            continue
        if is_number(number) and math.isfinite(number):
            return number
    return printable(text)[:MAX_TEXT]


def flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """A configuration with names such as ``optimizer.lr`` for what is nested."""
    found: dict[str, Value] = {}
    for key, value in config.items():
        name = printable(f"{prefix}{key}")[:MAX_TEXT]
        if len(found) >= MAX_NAMES:
            break
        if isinstance(value, Mapping):
            if prefix.count(".") < _MAX_DEPTH:
                found |= flat(value, f"{name}.")
        elif isinstance(value, str):
            found[name] = printable(value)[:MAX_TEXT]
        elif value is None or isinstance(value, bool):
            found[name] = value
        elif is_number(value):
            found[name] = value if math.isfinite(value) else str(value)
        else:
            found[name] = json.dumps(value, default=str)[:MAX_TEXT]
    return found
