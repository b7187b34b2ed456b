"""The numbers that a job's program wrote over time: to metrics.jsonl, TensorBoard's files or metrics.csv;
and the summary of a run: its configuration, and what its metrics came to.

All of it is of the job's making, so it is bounded: in bytes read, in names, and in the length of each.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import takewhile
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import printable
from clusterctl.runs.tensorboard import EventFiles
from clusterctl.state.ledger import Metric, Value
from clusterctl.state.submissions import SOURCE_FILE
from clusterctl.transport.remote_open import open_file, read_json

_MAX_DEPTH: Final = 4  # of a configuration
_OPTION: Final = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
METRICS_FILE: Final = "metrics.jsonl"
_MAX_NAMES: Final = 200
_MAX_TEXT: Final = 100
_CSV_FILE: Final = "metrics.csv"
_OVER_TIME: Final = frozenset({"step", "epoch"})  # columns; a table without one of them is another
_EVENTS: Final = "tfevents"  # in the name of each event file
_AXES: Final = frozenset(
    "time step epoch iteration global_step _step _timestamp _runtime".split()  # Lightning, and W&B's exports
)
_STEPS: Final = ("step", "global_step", "_step")
_PREFIX: Final = {"evaluation": "eval_"}  # of the names in a line of this ``kind``
_NO_SERIES: Final = frozenset({"run", "result"})  # kinds of lines
_LARGEST: Final = 1 << 1023
_MAX_BYTES: Final = 32 << 20
_MAX_LINE: Final = 1 << 20
_MAX_LINES: Final = 1 << 20
_MAX_ENTRIES: Final = 200_000  # of folders that are looked through
_MAX_FILES: Final = 100
# A folder that a program makes anew at each start: Lightning's, SummaryWriter's, one of only a date and time.
_OF_A_START: Final = re.compile(r"version_\d+|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.+|\d{8}[-_T]?\d{4,6}")
_DIGITS: Final = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class Record:
    """Numbers that a program wrote at once. ``line`` is all of that line of metrics.jsonl, else empty."""

    values: Mapping[str, float]
    step: int | None = None
    time: float | None = None  # in Unix seconds
    kind: str = ""
    line: Mapping[str, Any] = field(default_factory=dict)


def records(folder: Path) -> Iterator[Record]:
    """What the program of a run, or of a task of an array, wrote: of each file in its order.

    First the lines of metrics.jsonl; then what event files of TensorBoard below the folder have besides,
    then Lightning's metrics.csv. The bundled ``train`` writes the same numbers to all.
    """
    names: set[str] = set()
    is_ours = False
    for record in _of_lines(folder):
        is_ours |= record.kind == "run"
        yield Record(_named(record.values, names), record.step, record.time, record.kind, record.line)
    paths = [] if is_ours else _found(folder)
    tables = [path for path in paths if path.endswith(_CSV_FILE)]
    for found in (_of_events(folder, [one for one in paths if one not in tables]), _of_csv(folder, tables)):
        before = frozenset(names)
        for record in found:
            if values := _named(record.values, names, without=before):
                yield Record(values, record.step, record.time)


def is_number(value: Any) -> bool:
    """Whether it is a number, perhaps NaN or infinite, that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < _LARGEST


def finite(value: Any) -> float | None:
    """The value if it is a finite number, else None."""
    return float(value) if is_number(value) and math.isfinite(value) else None


def _named(
    values: Mapping[str, float], names: set[str], *, without: frozenset[str] = frozenset()
) -> dict[str, float]:
    """The values under names that can be printed, but those of too many names."""
    found: dict[str, float] = {}
    for key, value in values.items():
        name = printable(key[:_MAX_TEXT])[:_MAX_TEXT]
        if name not in without and (name in names or len(names) < _MAX_NAMES):
            names.add(name)
            found[name] = value
    return found


def _opened(folder: Path, path: str) -> BufferedReader:
    """A regular file below a folder, no link's; raises OSError."""
    return os.fdopen(open_file(os.fsencode(folder), os.fsencode(path)), "rb")


def _lines(folder: Path, name: str) -> Iterator[bytes]:
    """The lines of a file, of a very large one the first and those at the end; without very long ones."""
    with suppress(OSError), _opened(folder, name) as file:
        skips = False  # the rest of a line
        for number in range(_MAX_LINES):
            line = file.readline(_MAX_LINE)
            if not line:
                return
            is_whole = line.endswith(b"\n") or len(line) < _MAX_LINE
            if is_whole and not skips:
                yield line
            skips = not is_whole
            if number == 0 and (end := os.fstat(file.fileno()).st_size - _MAX_BYTES) > file.tell():
                file.seek(end)
                skips = True


def _of_lines(folder: Path) -> Iterator[Record]:
    for raw in _lines(folder, METRICS_FILE):
        try:
            line = json.loads(raw)
        except (ValueError, RecursionError):  # half a line of a job that goes on
            continue
        if not isinstance(line, dict):
            continue
        kind = line.get("kind")
        kind = kind if isinstance(kind, str) else ""
        values: dict[str, float] = {}
        if kind not in _NO_SERIES:
            prefix = _PREFIX.get(kind, "")
            numbers = ((key, one) for key, one in line.items() if key not in _AXES and is_number(one))
            values = {prefix + key: float(one) for key, one in numbers}
        steps = (one for key in _STEPS if isinstance(one := line.get(key), int) and is_number(one))
        time = finite(line.get("time", line.get("_timestamp")))
        yield Record(values, next(steps, None), time, kind, line)


def _found(folder: Path) -> list[str]:
    """The event files and metrics.csv below a folder that the job has made or changed, in their order."""
    found: list[str] = []
    entries = 0
    folders = deque([""])
    while folders and entries < _MAX_ENTRIES:
        above = folders.popleft()
        with suppress(OSError), os.scandir(folder / above) as scan:
            for entry in scan:
                entries += 1
                path = f"{above}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                elif (_EVENTS in entry.name or entry.name == _CSV_FILE) and len(found) < _MAX_FILES:
                    found.append(path)
    sent = _sent(folder) if found else {}
    return sorted((path for path in found if not _is_sent(folder, path, sent)), key=_order)


def _order(path: str) -> list[str | int]:
    """By the file's name, which has its time, then by the folder; version_10 comes after version_2."""
    above, _, name = path.rpartition("/")
    parts = _DIGITS.split(f"{name}/{above}")
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def _sent(folder: Path) -> Mapping[str, str]:
    """What was sent with the job: path -> sha256."""
    try:
        source = read_json(os.fsencode(folder), SOURCE_FILE.encode(), _MAX_BYTES)
        return {str(one["path"]): str(one["sha256"]) for one in source["files"]}
    except (OSError, ValueError, TypeError, KeyError):  # the folder of a task has none
        return {}


def _is_sent(folder: Path, path: str, sent: Mapping[str, str]) -> bool:
    """Whether it is as it was sent: the numbers of an earlier run, in the folder of the script."""
    if path not in sent:
        return False
    with suppress(OSError), _opened(folder, path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sent[path]
    return False


def _prefixes(paths: Sequence[str]) -> list[str]:
    """What tells the names of one folder from those of another, such as ``train/`` and ``validation/``.

    Folders of several starts of a program have the same names: it has gone on.
    """
    folders = [[one for one in path.split("/")[:-1] if not _OF_A_START.fullmatch(one)] for path in paths]
    shared = sum(1 for _ in takewhile(lambda level: len({*level}) == 1, zip(*folders, strict=False)))
    return ["".join(f"{one}/" for one in parts[shared:]) for parts in folders]


def _of_events(folder: Path, paths: Sequence[str]) -> Iterator[Record]:
    if not paths:
        return
    reader = EventFiles()
    for prefix, path in zip(_prefixes(paths), paths, strict=True):
        with suppress(OSError), _opened(folder, path) as file:
            for event in reader.events(file):
                values = {prefix + tag: one for tag, one in event.scalars.items() if tag not in _AXES}
                yield Record(values, event.step, finite(event.time))


def _of_csv(folder: Path, paths: Sequence[str]) -> Iterator[Record]:
    paths = [path for path in paths if not _OVER_TIME.isdisjoint(next(_rows(folder, path), ()))]
    for prefix, path in zip(_prefixes(paths), paths, strict=True):
        rows = _rows(folder, path)
        head = next(rows, [])
        for row in rows:
            numbers: dict[str, float] = {}
            for name, cell in zip(head, row, strict=False):
                with suppress(ValueError):  # an empty one, of what is not logged at this step
                    numbers[name] = float(cell)
            step = numbers.get("step")
            values = {prefix + name: one for name, one in numbers.items() if name not in _AXES}
            yield Record(values, int(step) if step is not None and step == step // 1 else None)


def _rows(folder: Path, path: str) -> Iterator[list[str]]:
    with suppress(csv.Error):
        yield from csv.reader(line.decode(errors="replace") for line in _lines(folder, path))


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
        if is_number(number) and math.isfinite(number):
            return number
    return printable(text)[:_MAX_TEXT]


def flat(config: Mapping[str, Any], prefix: str = "", *, longest: int = _MAX_TEXT) -> dict[str, Value]:
    """A configuration with names such as ``optimizer.lr`` for what is nested. ``longest``: of its texts."""
    found: dict[str, Value] = {}
    for key, value in config.items():
        name = printable(f"{prefix}{key}")[:_MAX_TEXT]
        if len(found) >= _MAX_NAMES:
            break
        if isinstance(value, Mapping):
            if prefix.count(".") < _MAX_DEPTH:
                found |= flat(value, f"{name}.", longest=longest)
        elif isinstance(value, str):
            found[name] = printable(value)[:longest]
        elif value is None or isinstance(value, bool):
            found[name] = value
        elif is_number(value):
            found[name] = value if math.isfinite(value) else str(value)
        else:
            found[name] = json.dumps(value, default=str)[:longest]
    return found
