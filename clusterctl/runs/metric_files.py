"""Reads the metrics that a job's program wrote to metrics.jsonl, TensorBoard's files, metrics.csv
or the trainer_state.json of Transformers.

The job controls these files, so the bytes read, the number of names and their lengths are limited.
What a limit leaves out is listed.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from io import BufferedReader
from itertools import groupby, islice, takewhile
from operator import itemgetter, le, lt
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeAlias

from pydantic_core import from_json

from clusterctl.errors import printable
from clusterctl.runs.curve import ROW, STEP, Column
from clusterctl.runs.tensorboard import EventFiles, ReadBudget
from clusterctl.state.ledger import METRICS_FILE, METRICS_PLACES, SOURCE_FILE
from clusterctl.transport.remote_open import open_file, read_json, read_whole
from clusterctl.util import formatting
from clusterctl.util.numbers import LARGEST, counted, finite, is_number

MAX_DEPTH: Final = 4
MAX_NAMES: Final = 1000
MAX_TEXT: Final = 100
_CSV_FILE: Final = "metrics.csv"
# A CSV file without one of these columns does not hold metrics.
_OVER_TIME: Final = frozenset({"step", "epoch"})
_EVENTS: Final = "tfevents"
# Transformers' Trainer writes it beside the model, and into each checkpoint. It has all steps until
# then.
_STATE_FILE: Final = "trainer_state.json"
_CHECKPOINT: Final = re.compile(r"checkpoint-\d+/")
_TIMES: Final = ("time", "_timestamp")
# Columns of Lightning and of exports of W&B that are not metrics.
AXES: Final = frozenset(
    "time step epoch iteration global_step _step _timestamp _runtime rank".split()
)
# A line may tell the program's configuration.
CONFIG: Final = "config"
# Prefixes of metric names by the line's ``kind``.
_PREFIX: Final = {"evaluation": "eval_"}
_NO_SERIES: Final = frozenset({"run", "result"})
# Keys of the run and the rank that wrote a line, if several write to the same file.
_RUN: Final = "run"
_RANK: Final = "rank"
_WRITER: Final = re.compile(rb'"(run|rank)"\s*:\s*("(?:[^"\\]|\\.)*"|\d+)')
_EPOCH: Final = "epoch"
# Longer lines are left out.
_CHUNK: Final = 1 << 20
# What a file in a folder costs of the budget, a byte of a file that is parsed as a whole, and an
# object in it.
_COST_OF_ENTRY: Final = 1 << 12
_COST_OF_BYTE: Final = 11
_COST_OF_OBJECT: Final = 1 << 11
# Places at which it is looked whether ranks wrote the same step. Each takes 100 bytes of memory.
_MAX_PLACES: Final = 100_000
# A restart may repeat the steps of so many epochs, the latest ones. To save memory, the steps of earlier
# epochs are forgotten.
_MAX_EPOCHS: Final = 10_000
_ROWS: Final = 1 << 14
# Folders that a program creates at each start: Lightning's, SummaryWriter's, or a date and time.
_OF_A_START: Final = re.compile(
    r"version_\d+|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.+|\d{8}[-_T]?\d{4,6}"
)
_DIGITS: Final = re.compile(r"([0-9]+)")

_Line = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Block:
    """Metrics that a program wrote one after the other. columns: name -> the values.

    axis: what the places in ``columns`` are.
    place: the places and the times of the lines, without values.
    lines: for metrics.jsonl, the JSON objects. kind: their ``kind``.
    """

    columns: Mapping[str, Column]
    axis: str
    place: Column
    kind: str = ""
    lines: Sequence[Mapping[str, Any]] = ()


@dataclass
class MetricFiles:
    """The files with metrics below the folder of a run or an array task.

    budget: how much of them is read.
    left_out: sentences on the data that were left out, complete after the last block.
    """

    folder: Path
    budget: ReadBudget = field(default_factory=ReadBudget)
    left_out: list[str] = field(default_factory=list)

    @property
    def member(self) -> str:
        """Their place in the table."""
        return "metrics"

    def blocks(self) -> Iterator[Block]:
        """Yield the metrics, file by file.

        Lines of metrics.jsonl come first, then metrics of other names from TensorBoard event files
        below the folder, Lightning's metrics.csv and Transformers' trainer_state.json. For
        clusterctl's own ``train``, only metrics.jsonl is read.
        """
        names = Names()
        is_ours = False
        for block in self._json_blocks(names):
            is_ours |= block.kind == "run"
            yield block
        paths = [] if is_ours else self._metric_files()
        tables = [path for path in paths if path.endswith(_CSV_FILE)]
        states = [path for path in paths if path.endswith(_STATE_FILE)]
        events = [path for path in paths if path not in {*tables, *states}]
        for source in (
            self._event_blocks(names, events),
            self._csv_blocks(names, tables),
            self._state_blocks(names, states),
        ):
            names.keep_others_only()
            yield from source
        if self.budget.is_exceeded:
            self.left_out.append("metrics of files beyond the first GiB")
        self.left_out += names.left_out()

    def _json_blocks(self, names: Names) -> Iterator[Block]:
        writers = self._writers()
        rows = 0
        steps: _Steps = defaultdict(_StepsOfEpochs)
        for lines in json_lines(self.folder, METRICS_FILE, self.left_out, self.budget):
            yield from _blocks_of(lines, names, rows, steps, writers=writers)
            rows += len(lines)

    def _writers(self) -> frozenset[str]:
        """Return the keys that tell the writers of metrics.jsonl apart: ``run`` if it has lines of
        several runs, ``rank`` if several ranks wrote the same step.
        """
        texts: dict[bytes, set[bytes]] = defaultdict(set)
        for chunk in _chunks(self.folder, METRICS_FILE, [], ReadBudget()):
            # Searching for the bytes alone is far faster.
            has_writers = b'"rank"' in chunk or b'"run"' in chunk
            for key, text in _WRITER.findall(chunk) if has_writers else ():
                if len(texts[key]) <= 1:
                    texts[key].add(text)
        found: set[str] = set()
        wanted = {key.decode() for key, values in texts.items() if len(values) > 1}
        runs: set[str] = set()
        # By the hash of a line's place and keys.
        ranks: dict[int, int] = {}
        for chunk in _chunks(self.folder, METRICS_FILE, [], ReadBudget()) if wanted else ():
            for line in _parsed(_lines_of(chunk)):
                kind = _text(line, "kind")
                if kind == "run":
                    # Those of the bundled `train` are written by rank 0.
                    return frozenset()
                run = _text(line, _RUN)
                if run and kind not in _NO_SERIES and len(runs) <= 1:
                    runs.add(run)
                if isinstance(rank := line.get(_RANK), int):
                    at = finite(line.get(_EPOCH)), finite(line.get("step"))
                    place = hash((*at, run, *line))
                    if ranks.get(place, rank) != rank:
                        found.add(_RANK)
                    elif len(ranks) < _MAX_PLACES:
                        ranks[place] = rank
            found |= {_RUN} if len(runs) > 1 else set()
            if found == wanted:
                break
        if len(ranks) == _MAX_PLACES and _RANK not in found:
            self.left_out.append(
                f"the ranks of {METRICS_FILE} after its first {_MAX_PLACES:,} steps"
            )
        return frozenset(found)

    def _metric_files(self) -> list[str]:
        """Return the sorted files with metrics that the job created or changed below a folder."""
        paths: list[str] = []
        folders = deque([""])
        while folders and self.budget.allows_more():
            parent = folders.popleft()
            with suppress(OSError), os.scandir(self.folder / parent) as scan:
                for entry in scan:
                    self.budget.take(_COST_OF_ENTRY)
                    path = f"{parent}{entry.name}"
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(f"{path}/")
                    elif _EVENTS in entry.name or entry.name in {_CSV_FILE, _STATE_FILE}:
                        paths.append(path)
        sent = _submitted_files(self.folder) if paths else {}
        own = (path for path in paths if not _is_as_submitted(self.folder, path, sent))
        return sorted(own, key=_order)

    def _event_blocks(self, names: Names, paths: Sequence[str]) -> Iterator[Block]:
        reader = EventFiles(self.budget)
        for prefix, path in zip(_prefixes(paths), paths, strict=True):
            with suppress(OSError), open_below(self.folder, path) as file:
                events = reader.events(file)
                while listed := list(islice(events, _ROWS)):
                    scalars: dict[str, list[tuple[int, float, float]]] = defaultdict(list)
                    for event in listed:
                        for tag, value in event.scalars.items():
                            scalars[tag].append((event.step, value, event.time))
                    for tag, points in scalars.items():
                        name = None if tag in AXES else names.shown(prefix + tag)
                        if name is not None:
                            xs, ys, times = zip(*points, strict=True)
                            times = tuple(map(finite, times))
                            place = _column(xs, xs, times)
                            yield Block({name: _column(xs, ys, times)}, STEP, place)

    def _csv_blocks(self, names: Names, paths: Sequence[str]) -> Iterator[Block]:
        paths = [
            path
            for path in paths
            if not _OVER_TIME.isdisjoint(next(self._csv_rows(path, [], ReadBudget()), ()))
        ]
        row = 0
        for prefix, path in zip(_prefixes(paths), paths, strict=True):
            rows = self._csv_rows(path, self.left_out, self.budget)
            head = next(rows, [])
            steps: _Steps = defaultdict(_StepsOfEpochs)
            while listed := list(islice(rows, _ROWS)):
                lines = (dict(zip(head, cells, strict=False)) for cells in listed)
                numbers = [
                    {
                        key: number
                        for key, cell in line.items()
                        if (number := _number(cell)) is not None
                    }
                    for line in lines
                ]
                yield from _blocks_of(numbers, names, row, steps, prefix)
                row += len(listed)

    def _csv_rows(self, path: str, left_out: list[str], budget: ReadBudget) -> Iterator[list[str]]:
        lines = (
            line.decode(errors="replace")
            for chunk in _chunks(self.folder, path, left_out, budget)
            for line in chunk.split(b"\n")
        )
        rows = csv.reader(lines)
        try:
            yield from rows
        except csv.Error:
            left_out.append(
                f"rows of {path} after the first {rows.line_num - 1:,}, where it is damaged"
            )

    def _state_blocks(self, names: Names, paths: Sequence[str]) -> Iterator[Block]:
        longest: dict[str, list[_Line]] = {}
        for path in paths:
            try:
                state = self._read_state(path)
            except (OSError, ValueError, RecursionError) as exc:
                reason = getattr(exc, "strerror", None) or str(exc).partition("\n")[0]
                self.left_out.append(f"{path}, which can't be read: {reason}")
                continue
            with suppress(TypeError, KeyError):
                history = [line for line in state["log_history"] if isinstance(line, dict)]
                key = _CHECKPOINT.sub("", path)
                longest[key] = max(longest.get(key, []), history, key=len)
        row = 0
        for prefix, history in zip(_prefixes([*longest]), longest.values(), strict=True):
            yield from _blocks_of(history, names, row, defaultdict(_StepsOfEpochs), prefix)
            row += len(history)

    def _read_state(self, path: str) -> Any:
        """Return the content of a trainer_state.json. Raises OSError, ValueError or
        RecursionError.
        """
        most = max(0, self.budget.left) // _COST_OF_BYTE
        data = read_whole(os.fsencode(self.folder), os.fsencode(path), most)
        objects = data.count(b"{") + data.count(b"[")
        if not self.budget.take(_COST_OF_BYTE * len(data) + _COST_OF_OBJECT * objects):
            raise ValueError(f"{objects:,} entries are too many")
        return json.loads(data)


class Names:
    """The printable names of metrics: at most MAX_NAMES."""

    def __init__(self) -> None:
        self._kept: set[str] = set()
        self._is_full = False
        self._earlier: frozenset[str] = frozenset()
        self._cache: dict[str, str | None] = {}

    def keep_others_only(self) -> None:
        """From now on return None for the names that there are."""
        self._earlier = frozenset(self._kept)
        self._cache.clear()

    def shown(self, key: str) -> str | None:
        """Return the printable name of a metric; None if its values are left out."""
        if key in self._cache:
            return self._cache[key]
        name: str | None = printable(key[:MAX_TEXT])[:MAX_TEXT]
        if name in self._earlier:
            name = None
        elif name not in self._kept and len(self._kept) >= MAX_NAMES:
            self._is_full = True
            return None
        else:
            self._kept.add(str(name))
        self._cache[key] = name
        return name

    def left_out(self) -> Iterator[str]:
        if self._is_full:
            yield f"metrics after the first {MAX_NAMES:,} names"


def _number(cell: str) -> float | None:
    try:
        return float(cell)
    # The cell of a metric that was not logged at this step is empty.
    except ValueError:
        return None


def open_below(folder: Path, path: str) -> BufferedReader:
    """Open a regular file below a folder without following links. Raises OSError."""
    return os.fdopen(open_file(os.fsencode(folder), os.fsencode(path)), "rb")


def json_lines(
    folder: Path, name: str, left_out: list[str], budget: ReadBudget | None = None
) -> Iterator[list[_Line]]:
    """Yield the JSON objects in a file's lines, many at a time. left_out: gets sentences on the
    others.
    """
    if _is_as_submitted(folder, name, _submitted_files(folder)):
        return
    torn = 0
    for chunk in _chunks(folder, name, left_out, budget or ReadBudget()):
        lines = _lines_of(chunk)
        objects = _parsed(lines)
        torn += len(lines) - len(objects)
        yield objects
    if torn:
        left_out.append(f"{counted(torn, 'line')} of {name}, torn or no JSON object")


def _chunks(folder: Path, name: str, left_out: list[str], budget: ReadBudget) -> Iterator[bytes]:
    """Yield a file in chunks of whole lines, without very long lines.

    Of a very large file, yield the first line and the end. left_out: gets sentences on the rest.
    """
    long_lines = 0
    with suppress(OSError), open_below(folder, name) as file:
        rest = b""
        # The chunk begins within a line that is left out.
        is_within = False
        size = os.fstat(file.fileno()).st_size
        most = max(0, budget.left)
        if size > most + _CHUNK:
            first = file.readline(_CHUNK)
            if first.endswith(b"\n"):
                yield first
            file.seek(size - most)
            is_within = True
            left_out.append(
                f"{name} has {formatting.size(size)}: only its first line and the last "
                f"{formatting.size(most)} were read"
            )
        budget.take(min(size, most))
        while chunk := file.read(_CHUNK):
            if is_within:
                _, newline, chunk = chunk.partition(b"\n")
                is_within = not newline
            whole, newline, tail = chunk.rpartition(b"\n")
            if newline:
                yield rest + whole
                rest = tail
            else:
                rest += tail
            if len(rest) > _CHUNK:
                rest = b""
                is_within = True
                long_lines += 1
        if rest:
            yield rest
    if long_lines:
        lines_of = counted(long_lines, "line")
        left_out.append(f"{lines_of} of {name}, longer than {formatting.size(_CHUNK)}")


def _lines_of(chunk: bytes) -> list[bytes]:
    return [line for line in chunk.removeprefix(b"\xef\xbb\xbf").split(b"\n") if line.strip()]


def _parsed(lines: Sequence[bytes]) -> list[_Line]:
    """Return the lines that are JSON objects. A running job may have written half of the last
    line.
    """
    values: Sequence[Any] = ()
    with suppress(ValueError, RecursionError):
        # Parsing many lines at once is faster. Python's parser accepts a little more, such as
        # surrogates.
        values = (
            from_json(b"[%b]" % b",".join(lines))
            if len(lines) > 1
            else json.loads(b"[%b]" % lines[0])
        )
    if len(values) == len(lines):
        return [value for value in values if isinstance(value, dict)]
    if len(lines) == 1:
        return []
    half = len(lines) // 2
    return _parsed(lines[:half]) + _parsed(lines[half:])


class _StepsOfEpochs:
    """Steps that begin anew with each epoch, counted on from epoch to epoch.

    A shape stands for the keys of a line: lines with other keys, such as those of an evaluation,
    may count steps of their own.
    """

    def __init__(self) -> None:
        # By the shape and the epoch.
        self._starts: dict[tuple[int, int], float] = {}
        # Of the epochs with which steps began anew.
        self._begun: dict[int, float] = {}
        # The step and the epoch of the last line of a shape.
        self._lasts: dict[int, tuple[float, int]] = {}
        self._start = 0.0
        self._lowest = math.inf
        self._highest = -math.inf
        self._top = -math.inf

    def place(self, shape: int, step: float, epoch: float) -> float:
        """Return the number of a step since the first epoch. In an epoch that was there before,
        as after a restart, the steps have the same numbers again.
        """
        number = math.floor(epoch)
        if (shape, number) not in self._starts:
            if len(self._starts) >= _MAX_EPOCHS:
                self._forget()
            self._starts[shape, number] = self._start_of(shape, step, number)
        self._start = self._starts[shape, number]
        self._lasts[shape] = step, number
        self._lowest = min(self._lowest, step)
        self._highest = max(self._highest, step)
        place = self._start + step
        self._top = max(self._top, place)
        return place

    def _forget(self) -> None:
        """Keep the latest half of the epochs."""
        self._starts = dict([*self._starts.items()][len(self._starts) // 2 :])
        numbers = {number for _, number in self._starts}
        self._begun = {each: start for each, start in self._begun.items() if each in numbers}
        self._lasts = {
            shape: last for shape, last in self._lasts.items() if (shape, last[1]) in self._starts
        }

    def _start_of(self, shape: int, step: float, number: int) -> float:
        """Return what to add to the steps of a shape in an epoch that it has not had."""
        if shape not in self._lasts:
            return self._begun.get(number, self._start)
        last, before = self._lasts[shape]
        # The steps are those of the run, or it went back to an earlier epoch.
        if step > self._highest or number < before:
            return self._starts[shape, before]
        if number not in self._begun:
            if last <= step > self._lowest:
                return self._start
            self._begun[number] = self._top + 1 - step
        return self._begun[number]

    def are_of_the_run(
        self, shapes: Sequence[int], steps: Sequence[Any], epochs: Sequence[Any]
    ) -> bool:
        """Return whether the steps of many lines rise, and so have the numbers that they have.
        Faster than ``place``, which then need not be called.
        """
        if self._begun or not (_are_finite(steps) and _are_finite(epochs)):
            return False
        if steps[0] <= self._highest or not all(map(le, steps, steps[1:])):
            return False
        # Lines of two shapes may have the same step.
        if len({*zip(shapes, steps, strict=True)}) < len(steps):
            return False
        numbers = [*map(math.floor, epochs)]
        starts = dict.fromkeys(zip(shapes, numbers, strict=True), 0.0)
        if len(self._starts) + len(starts) > _MAX_EPOCHS:
            self._forget()
        self._starts |= starts
        self._lasts |= zip(shapes, zip(steps, numbers, strict=True), strict=True)
        self._lowest = min(self._lowest, steps[0])
        self._highest = self._top = steps[-1]
        return True


# By the run and the rank that wrote the steps.
_Steps: TypeAlias = defaultdict[tuple[object, ...], _StepsOfEpochs]


def _blocks_of(
    lines: Sequence[_Line],
    names: Names,
    row: int,
    steps: _Steps,
    prefix: str = "",
    *,
    writers: frozenset[str] = frozenset(),
) -> Iterator[Block]:
    """Yield lines as blocks. row: the number of lines before them. writers: the keys of runs and
    ranks that wrote to the same file.
    """
    _count_on([line for line in lines if _EPOCH in line], steps)
    part = _Part(range(row + 1, row + 1 + len(lines)), lines)
    if not writers:
        yield from _shaped(part, names, prefix)
        return
    for writer, own in part.by(lambda line: _writer(line, writers)).items():
        yield from _shaped(own, names, f"{writer}{prefix}")


def _count_on(lines: Sequence[_Line], steps: _Steps) -> None:
    """Replace the steps of lines that also have an epoch by the number of steps of all epochs."""
    if not lines:
        return
    keys = [key for key, axis in METRICS_PLACES if axis == STEP]
    first = next((key for key in keys if key in lines[0]), keys[0])
    values = [line.get(first) for line in lines]
    epochs = [line[_EPOCH] for line in lines]
    shapes = [*map(hash, map(tuple, lines))]
    is_one = not any(_RANK in line or _RUN in line for line in lines)
    if is_one and steps["", None].are_of_the_run(shapes, values, epochs):
        return
    for line, shape, of in zip(lines, shapes, map(finite, epochs), strict=True):
        key = next((key for key in keys if key in line), keys[0])
        value = finite(line.get(key))
        writer = _text(line, _RUN), finite(line.get(_RANK))
        is_counted = writer in steps or len(steps) < MAX_NAMES
        if value is not None and of is not None and is_counted:
            place = steps[writer].place(shape, value, of)
            # A whole number stays one.
            line[key] = line[key] if place == value else place


def _writer(line: _Line, writers: frozenset[str]) -> str:
    """Return a prefix for the metrics of a run or rank, such as ``a/`` or ``rank0/``."""
    run = _text(line, _RUN) if _RUN in writers else ""
    rank = line.get(_RANK) if _RANK in writers else None
    return f"{run}/" * bool(run) + f"rank{rank}/" * isinstance(rank, int)


class _Part(NamedTuple):
    """Lines, and the number of the row of each."""

    rows: Sequence[int]
    lines: Sequence[_Line]

    def by(self, key: Callable[[_Line], Any]) -> Mapping[Any, _Part]:
        """Return the lines with each key."""
        groups: dict[Any, tuple[list[int], list[_Line]]] = defaultdict(lambda: ([], []))
        for row, line in zip(self.rows, self.lines, strict=True):
            rows, lines = groups[key(line)]
            rows.append(row)
            lines.append(line)
        return {own_key: _Part(*group) for own_key, group in groups.items()}

    def consecutive(self, key: Callable[[_Line], Any]) -> Iterator[_Part]:
        """Yield stretches of lines with the same key."""
        at = 0
        for _, same in groupby(self.lines, key):
            lines = [*same]
            yield _Part(self.rows[at : at + len(lines)], lines)
            at += len(lines)


def _shaped(part: _Part, names: Names, prefix: str) -> Iterator[Block]:
    """Yield blocks of lines that have the same keys and are of the same kind."""
    shapes = {*map(tuple, part.lines)}
    keys = [key for shape in shapes for key in shape if key not in AXES]
    if len(shapes) > 1 and len({*keys}) == len(keys):
        parts: Iterable[_Part] = part.by(tuple).values()
    else:
        # The order of the values of a metric matters, also if some lines have other metrics, too.
        parts = part.consecutive(tuple) if len(shapes) > 1 else [part] if part.lines else []
    for same in parts:
        kinds = [line.get("kind") for line in same.lines]
        if kinds.count(kinds[0]) == len(kinds):
            yield from _block(same, names, prefix)
            continue
        for of_kind in same.consecutive(lambda line: _text(line, "kind")):
            yield from _block(of_kind, names, prefix)


def _block(part: _Part, names: Names, prefix: str) -> Iterator[Block]:
    rows, lines = part
    kind = _text(lines[0], "kind")
    columns = {} if kind in _NO_SERIES else _columns(lines)
    if nested := [key for key, column in columns.items() if dict in {*map(type, column)}]:
        yield from _shaped(_Part(rows, [_flattened(line, nested) for line in lines]), names, prefix)
        return
    times = _times(lines)
    prefix += _PREFIX.get(kind, "")
    for axis, start, end, xs in _places(rows, lines):
        is_all = end - start == len(lines)
        own_times = times if times is None or is_all else times[start:end]
        place = _column(xs, xs, own_times)
        shown: dict[str, Column] = {}
        for key, values in columns.items():
            column = _numbers(place, values if is_all else values[start:end])
            if column is not None:
                name = names.shown(prefix + key)
                if name is not None:
                    shown[name] = column
        yield Block(shown, axis, place, kind, lines if is_all else lines[start:end])


def _text(line: _Line, key: str) -> str:
    text = line.get(key)
    return text if isinstance(text, str) else ""


def _columns(lines: Sequence[_Line]) -> dict[str, list[Any]]:
    keys = (key for key in lines[0] if key not in AXES and key != CONFIG)
    return {key: [*map(itemgetter(key), lines)] for key in keys}


def _flattened(line: _Line, nested: Sequence[str]) -> _Line:
    """Return the line with the numbers of nested objects as ``outer.inner``, as W&B names them."""
    flat: _Line = {}

    def add(key: str, value: Any, depth: int) -> None:
        if not isinstance(value, dict):
            flat[key] = value
        elif depth < MAX_DEPTH:
            for inner, one in value.items():
                add(f"{key}.{inner}", one, depth + 1)

    for key, value in line.items():
        add(key, value, 0) if key in nested else flat.setdefault(key, value)
    return flat


def _times(lines: Sequence[_Line]) -> list[float | None] | None:
    key = next((key for key in _TIMES if key in lines[0]), None)
    if key is None:
        return None
    values = [*map(itemgetter(key), lines)]
    if _are_finite(values):
        return [*map(float, values)]
    times = [*map(finite, values)]
    return None if all(time is None for time in times) else times


def _places(
    rows: Sequence[int], lines: Sequence[_Line]
) -> Iterator[tuple[str, int, int, Sequence[float]]]:
    """Yield axis, start, end and places for parts of lines that have the same keys."""
    keys = [(key, axis) for key, axis in METRICS_PLACES if key in lines[0]]
    if not keys:
        yield ROW, 0, len(lines), rows
        return
    key, axis = keys[0]
    xs = list(map(itemgetter(key), lines))
    if _are_finite(xs):
        yield axis, 0, len(lines), xs
        return
    found: list[tuple[str, float]] = []
    for row, line in zip(rows, lines, strict=True):
        places = ((axis, line[key]) for key, axis in keys if finite(line[key]) is not None)
        found.append(next(places, (ROW, row)))
    start = 0
    for axis, same in groupby(found, itemgetter(0)):
        xs = [x for _, x in same]
        yield axis, start, start + len(xs), xs
        start += len(xs)


def _are_finite(values: Sequence[Any]) -> bool:
    """Return whether all values are finite numbers."""
    if not {*map(type, values)} <= {int, float}:
        return False
    # Integers that do not fit a float may have a sum that does.
    if not -LARGEST < min(values) <= max(values) < LARGEST:
        return False
    with suppress(OverflowError):
        return math.isfinite(sum(values))
    return False


def _column(
    xs: Sequence[float], ys: Sequence[float], times: Sequence[float | None] | None
) -> Column:
    return Column(xs, ys, times, all(map(lt, xs, xs[1:])))


def _numbers(place: Column, values: Sequence[Any]) -> Column | None:
    """Return the values that are numbers, with their places; None if there are no numbers."""
    kinds = {*map(type, values)}
    if kinds == {float}:
        return place._replace(ys=values)
    if kinds <= {int, float}:
        with suppress(OverflowError):
            return place._replace(ys=[*map(float, values)])
    if kinds.isdisjoint({int, float}):
        return None
    ats = [at for at, value in enumerate(values) if is_number(value)]
    if not ats:
        return None
    xs = place.xs
    times = place.times
    return Column(
        None if xs is None else [xs[at] for at in ats],
        [float(values[at]) for at in ats],
        None if times is None else [times[at] for at in ats],
        place.rises,
    )


def _order(path: str) -> list[str | int]:
    """Return a sort key: file name, then folder, with numbers as integers (version_10 follows
    version_2).
    """
    parent, _, name = path.rpartition("/")
    parts = _DIGITS.split(f"{name}/{parent}")
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def _submitted_files(folder: Path) -> Mapping[str, str]:
    try:
        source = read_json(
            os.fsencode(folder), SOURCE_FILE.encode(), ReadBudget().left // _COST_OF_BYTE
        )
        return {str(entry["path"]): str(entry["sha256"]) for entry in source["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        # A task's folder has no SOURCE_FILE.
        return {}


def _is_as_submitted(folder: Path, path: str, sent: Mapping[str, str]) -> bool:
    """Return whether a file has the sha256 in ``sent`` (path -> sha256): the job did not change the
    file.
    """
    if path not in sent:
        return False
    with suppress(OSError), open_below(folder, path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sent[path]
    return False


def _prefixes(paths: Sequence[str]) -> list[str]:
    """Return a prefix for the metric names of each file, made from the file's folder, such as
    ``train/``.

    Folders of repeated starts of a program (such as version_2) get the same prefix, as they are a
    single run.
    """
    folders = [
        [part for part in path.split("/")[:-1] if not _OF_A_START.fullmatch(part)] for path in paths
    ]
    common_levels = sum(
        1 for _ in takewhile(lambda level: len({*level}) == 1, zip(*folders, strict=False))
    )
    return ["".join(f"{part}/" for part in parts[common_levels:]) for parts in folders]
