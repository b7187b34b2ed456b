"""What a run was asked for and what it came to: its configuration, and the metrics that its program wrote.

Both are of the job's making, so they are bounded: in bytes read, in names, and in the length of each.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import printable
from clusterctl.state.ledger import Metric, Value
from clusterctl.transport.remote_open import open_file

METRICS_FILE: Final = "metrics.jsonl"
_AXES: Final = frozenset(
    "time step epoch iteration global_step _step _timestamp _runtime".split()  # Lightning, and W&B's exports
)
_PREFIX: Final = {"evaluation": "eval_"}  # of the names in a line of this ``kind``
_NO_SERIES: Final = frozenset({"run", "result"})  # kinds of lines
_MAX_BYTES: Final = 32 << 20
_MAX_LINE: Final = 1 << 20
_MAX_NAMES: Final = 200
_MAX_TEXT: Final = 100
_MAX_DEPTH: Final = 4
_LARGEST: Final = 1 << 1023
_MAX_LINES: Final = 1 << 20
_OPTION: Final = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)


@dataclass
class Summary:
    """``config``: option or key -> value. ``metrics``: name -> its last, lowest and highest value."""

    config: dict[str, Value] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)


def summarize(folder: Path, args: Sequence[str] = ()) -> Summary:
    """The summary of a run, or of a task of an array, from its folder and the arguments of its program.

    Of a very large metrics.jsonl, the last values are those of its end, the lowest and highest, too.
    """
    found = Summary(config=config_of(args)[0])
    for record in filter(None, map(_record, _last_lines(folder))):
        if isinstance(config := record.get("config"), dict):
            found.config = {**_flat(config), **found.config}
        kind = record.get("kind")
        kind = kind if isinstance(kind, str) else ""
        if kind not in _NO_SERIES:
            _add(found.metrics, record, _PREFIX.get(kind, ""))
    return found


def config_of(args: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """The options in a program's arguments, and the other words.

    ``--lr 0.1`` and ``--lr=0.1`` are options with a value, ``--flag`` is True.
    """
    found: dict[str, Value] = {}
    others: list[str] = []
    words = list(args)
    while words and len(found) < _MAX_NAMES:
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
        if _is_value(number) and math.isfinite(number):
            return number
    return printable(text)[:_MAX_TEXT]


def _last_lines(folder: Path) -> Iterator[bytes]:
    """The lines of the file of metrics, of a very large one the last; without those that are no record."""
    try:
        fd = open_file(os.fsencode(folder), METRICS_FILE.encode())
    except OSError:
        return
    with os.fdopen(fd, "rb") as file:
        skips = file.seek(max(0, os.fstat(fd).st_size - _MAX_BYTES)) > 0  # the rest of a line
        for _ in range(_MAX_LINES):
            line = file.readline(_MAX_LINE)
            if not line:
                return
            is_whole = line.endswith(b"\n") or len(line) < _MAX_LINE
            if is_whole and not skips:
                yield line
            skips = not is_whole


def _record(line: bytes) -> Mapping[str, Any] | None:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # half a line of a job that goes on
        return None
    return found if isinstance(found, dict) else None


def _add(metrics: dict[str, Metric], record: Mapping[str, Any], prefix: str) -> None:
    """Take up the numbers of a line."""
    steps = (record.get(name) for name in ("step", "global_step", "_step"))
    step = next((one for one in steps if isinstance(one, int) and _is_value(one)), None)
    for key, value in record.items():
        if key in _AXES or not _is_value(value):
            continue
        name = printable(prefix + key)[:_MAX_TEXT]
        if name not in metrics and len(metrics) >= _MAX_NAMES:
            continue
        metrics.setdefault(name, Metric()).add(float(value), step)


def _is_value(value: Any) -> bool:
    """Whether it is a number, perhaps NaN or infinite, that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < _LARGEST


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Value]:
    """A configuration with names such as ``optimizer.lr`` for what is nested."""
    found: dict[str, Value] = {}
    for key, value in config.items():
        name = printable(f"{prefix}{key}")[:_MAX_TEXT]
        if len(found) >= _MAX_NAMES:
            break
        if isinstance(value, Mapping):
            if prefix.count(".") < _MAX_DEPTH:
                found |= _flat(value, f"{name}.")
        elif isinstance(value, str):
            found[name] = printable(value)[:_MAX_TEXT]
        elif value is None or isinstance(value, bool):
            found[name] = value
        elif _is_value(value):
            found[name] = value if math.isfinite(value) else str(value)
        else:
            found[name] = json.dumps(value, default=str)[:_MAX_TEXT]
    return found
