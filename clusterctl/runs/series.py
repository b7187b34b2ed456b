"""Reads the metrics that a job's program wrote to metrics.jsonl, TensorBoard's files, metrics.csv or the
trainer_state.json of Transformers, and summarizes the configuration and metrics of a run.

The job controls these files, so the bytes read, the number of names and their lengths are limited.
"""

from __future__ import annotations

import csv
import hashlib
import json
import math
import os
import re
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from io import BufferedReader
from itertools import chain, takewhile
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from clusterctl.errors import printable
from clusterctl.runs.tensorboard import EventFiles
from clusterctl.scheduler.attempts import (
    EVENTS_FILE,
    Event,
    Hang,
    Restart,
    events_of,
    hangs_of,
    nodes_of,
    restarts_of,
)
from clusterctl.scheduler.remote_logs import END, end_of
from clusterctl.spec.sweep import Form, configured_name
from clusterctl.state.ledger import AttemptRecord, Metric, Value
from clusterctl.state.submissions import METRICS_FILE, SOURCE_FILE
from clusterctl.transport.remote_open import open_file, read_json

_MAX_DEPTH: Final = 4
_OPTION: Final = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
# Arguments for Hydra, such as ++lr=0.1
_PAIR: Final = re.compile(r"\+{0,2}([A-Za-z][\w./@-]*)=(.*)", re.DOTALL)
_NOT_FINITE: Final = re.compile(r"-(?:inf|infinity|nan)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# They have no value, but a pair may follow.
_HYDRA_FLAGS: Final = frozenset({"-m", "--multirun"})
_MAX_NAMES: Final = 200
# Written by the bundled jobs that measure instead of training.
_RESULTS: Final = ("bench.jsonl", "find.jsonl", "gemm.jsonl", "allreduce.jsonl")
# The side of a benchmark that uses all ranks of the job.
_ALL_RANKS: Final = "all"
_MAX_TEXT: Final = 100
_CSV_FILE: Final = "metrics.csv"
# A CSV file without one of these columns does not hold metrics.
_OVER_TIME: Final = frozenset({"step", "epoch"})
_EVENTS: Final = "tfevents"
# Transformers' Trainer writes it beside the model, and into each checkpoint. It has all steps until then.
_STATE_FILE: Final = "trainer_state.json"
_CHECKPOINT: Final = re.compile(r"checkpoint-\d+/")
# Columns of Lightning and of exports of W&B that are not metrics.
_AXES: Final = frozenset("time step epoch iteration global_step _step _timestamp _runtime".split())
_STEPS: Final = ("step", "global_step", "_step")
# Prefixes of metric names by the line's ``kind``.
_PREFIX: Final = {"evaluation": "eval_"}
_NO_SERIES: Final = frozenset({"run", "result"})
_LARGEST: Final = 1 << 1023
_LATEST: Final = 1 << 37  # Unix seconds
_MAX_BYTES: Final = 32 << 20
_MAX_LINE: Final = 1 << 20
_MAX_LINES: Final = 1 << 20
_MAX_ENTRIES: Final = 200_000
_MAX_FILES: Final = 100
_MAX_RESULTS: Final = 1 << 16
# Folders that a program creates at each start: Lightning's, SummaryWriter's, or a date and time.
_OF_A_START: Final = re.compile(r"version_\d+|[A-Z][a-z]{2}\d\d_\d\d-\d\d-\d\d_.+|\d{8}[-_T]?\d{4,6}")
_DIGITS: Final = re.compile(r"([0-9]+)")


@dataclass(frozen=True, slots=True)
class Record:
    """Metrics that a program wrote at the same time. line: for metrics.jsonl, the whole JSON object."""

    values: Mapping[str, float]
    step: int | None = None
    time: float | None = None  # Unix seconds
    kind: str = ""
    line: Mapping[str, Any] = field(default_factory=dict)


def records(folder: Path) -> Iterator[Record]:
    """Yield the metrics of a run or an array task, file by file.

    Lines of metrics.jsonl come first, then metrics of other names from TensorBoard event files below the
    folder, Lightning's metrics.csv and Transformers' trainer_state.json. For clusterctl's own ``train``, only
    metrics.jsonl is read.
    """
    names: set[str] = set()
    is_ours = False
    for record in _json_records(folder):
        is_ours |= record.kind == "run"
        yield replace(record, values=_printable_values(record.values, names))
    paths = [] if is_ours else _metric_files(folder)
    tables = [path for path in paths if path.endswith(_CSV_FILE)]
    states = [path for path in paths if path.endswith(_STATE_FILE)]
    events = [path for path in paths if path not in {*tables, *states}]
    sources = _event_records(folder, events), _csv_records(folder, tables), _state_records(folder, states)
    for source in sources:
        earlier_names = frozenset(names)
        for record in source:
            if values := _printable_values(record.values, names, without=earlier_names):
                yield Record(values, record.step, record.time)


def events_in(folder: Path) -> tuple[Event, ...]:
    """Return the events of the job or array task with this folder of a collected run."""
    return events_of(end_of(str(folder), EVENTS_FILE, END))


def hangs_in(folder: Path) -> tuple[Hang, ...]:
    """Return the hangs of the job or array task with this folder of a collected run."""
    return hangs_of(events_in(folder))


def sample_times(folder: Path, events: Sequence[Event]) -> list[float]:
    """Return the times of the telemetry of the nodes on which a job or task was, by its events."""
    return [sample["time"] for node in nodes_of(events) for sample in samples_of(folder, node)]


def samples_of(folder: Path, node: str) -> Iterator[dict[str, Any]]:
    """Yield a node's valid samples of telemetry. ``time`` is in Unix seconds."""
    # ValueError: the node's name has a null byte.
    with suppress(ValueError):
        for line in _json_lines(folder, f"telemetry/{node}.jsonl"):
            time = finite(line.get("time"))
            if line.get("kind") == "sample" and time is not None and 0 <= time < _LATEST:
                yield {**line, "time": time}


def gpus_of(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    gpus = sample.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def gpu_energy_j(folder: Path, attempts: Sequence[AttemptRecord]) -> float | None:
    """Return the joules that the GPUs used in these attempts, by their counters. None: no counter."""
    joules = []
    for node in dict.fromkeys(node for attempt in attempts for node in attempt.nodes):
        samples = list(samples_of(folder, node))
        for attempt in attempts:
            end = math.inf if attempt.end_time is None else attempt.end_time
            readings: dict[Any, list[float]] = defaultdict(list)
            for sample in samples:
                if attempt.start_time <= sample["time"] <= end:
                    for gpu in gpus_of(sample):
                        if (millijoules := finite(gpu.get("energy_mj"))) is not None:
                            readings[str(gpu.get("index"))].append(millijoules / 1000)
            joules += [max(0.0, values[-1] - values[0]) for values in readings.values()]
    return sum(joules) if joules else None


def restarts_in(folder: Path, attempts: Sequence[AttemptRecord]) -> tuple[Restart, ...]:
    """Return the restarts of the job or array task with this folder of a collected run, and its attempts."""
    events, starts = events_in(folder), {attempt.start_time: attempt.nodes for attempt in attempts}
    # Most jobs have no restart, and their metrics need not be read.
    if not restarts_of(events, starts=starts):
        return ()
    steps = ((record.time, record.step) for record in records(folder))
    timed = ((time, step) for time, step in steps if time is not None and step is not None)
    return restarts_of(events, timed, starts)


def is_number(value: Any) -> bool:
    """Return whether a value is a number (also NaN or infinity) that fits a float."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return isinstance(value, float) or abs(value) < _LARGEST


def finite(value: Any) -> float | None:
    """Return the value if it is a finite number, otherwise None."""
    return float(value) if is_number(value) and math.isfinite(value) else None


def _printable_values(
    values: Mapping[str, float], names: set[str], *, without: frozenset[str] = frozenset()
) -> dict[str, float]:
    """Return name -> value with printable names, but not the names in ``without``.

    Adds new names to ``names``. If ``names`` has _MAX_NAMES names, values with new names are dropped.
    """
    printable_values: dict[str, float] = {}
    for key, value in values.items():
        name = printable(key[:_MAX_TEXT])[:_MAX_TEXT]
        if name not in without and (name in names or len(names) < _MAX_NAMES):
            names.add(name)
            printable_values[name] = value
    return printable_values


def _open(folder: Path, path: str) -> BufferedReader:
    """Open a regular file below a folder without following links. Raises OSError."""
    return os.fdopen(open_file(os.fsencode(folder), os.fsencode(path)), "rb")


def _lines(folder: Path, name: str) -> Iterator[bytes]:
    """Yield a file's lines except very long lines. Of a very large file, yield the first and last lines."""
    with suppress(OSError), _open(folder, name) as file:
        skips = False
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


def result_lines(folder: Path) -> Sequence[Mapping[str, Any]]:
    """Return the lines of the bundled jobs' files of results. Of very many lines, return the last."""
    return deque(chain.from_iterable(_json_lines(folder, name) for name in _RESULTS), maxlen=_MAX_RESULTS)


def _json_lines(folder: Path, name: str) -> Iterator[dict[str, Any]]:
    if (folder / name).is_file() and _is_as_submitted(folder, name, _submitted_files(folder)):
        return
    for raw in _lines(folder, name):
        # A running job may have written half of the line.
        with suppress(ValueError, RecursionError):
            line = json.loads(raw)
            if isinstance(line, dict):
                yield line


def _json_records(folder: Path) -> Iterator[Record]:
    for line in _json_lines(folder, METRICS_FILE):
        kind = line.get("kind")
        kind = kind if isinstance(kind, str) else ""
        values: dict[str, float] = {}
        if kind not in _NO_SERIES:
            prefix = _PREFIX.get(kind, "")
            numbers = ((key, value) for key, value in line.items() if key not in _AXES and is_number(value))
            values = {prefix + key: float(value) for key, value in numbers}
        steps = (value for key in _STEPS if isinstance(value := line.get(key), int) and is_number(value))
        time = finite(line.get("time", line.get("_timestamp")))
        yield Record(values, next(steps, None), time, kind, line)


def _metric_files(folder: Path) -> list[str]:
    """Return the sorted files with metrics that the job created or changed below a folder."""
    paths: list[str] = []
    entries = 0
    folders = deque([""])
    while folders and entries < _MAX_ENTRIES:
        parent = folders.popleft()
        with suppress(OSError), os.scandir(folder / parent) as scan:
            for entry in scan:
                entries += 1
                path = f"{parent}{entry.name}"
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{path}/")
                elif (_EVENTS in entry.name or entry.name in {_CSV_FILE, _STATE_FILE}) and len(
                    paths
                ) < _MAX_FILES:
                    paths.append(path)
    sent = _submitted_files(folder) if paths else {}
    return sorted((path for path in paths if not _is_as_submitted(folder, path, sent)), key=_order)


def _order(path: str) -> list[str | int]:
    """Return a sort key: file name, then folder, with numbers as integers (version_10 follows version_2)."""
    parent, _, name = path.rpartition("/")
    parts = _DIGITS.split(f"{name}/{parent}")
    return [int(part) if number % 2 else part for number, part in enumerate(parts)]


def _submitted_files(folder: Path) -> Mapping[str, str]:
    try:
        source = read_json(os.fsencode(folder), SOURCE_FILE.encode(), _MAX_BYTES)
        return {str(entry["path"]): str(entry["sha256"]) for entry in source["files"]}
    except (OSError, ValueError, TypeError, KeyError):
        # A task's folder has no SOURCE_FILE.
        return {}


def _is_as_submitted(folder: Path, path: str, sent: Mapping[str, str]) -> bool:
    """Return whether a file has the sha256 in ``sent`` (path -> sha256): the job did not change the file."""
    if path not in sent:
        return False
    with suppress(OSError), _open(folder, path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == sent[path]
    return False


def _prefixes(paths: Sequence[str]) -> list[str]:
    """Return a prefix for the metric names of each file, made from the file's folder, such as ``train/``.

    Folders of repeated starts of a program (such as version_2) get the same prefix, as they are a single run.
    """
    folders = [[part for part in path.split("/")[:-1] if not _OF_A_START.fullmatch(part)] for path in paths]
    common_levels = sum(1 for _ in takewhile(lambda level: len({*level}) == 1, zip(*folders, strict=False)))
    return ["".join(f"{part}/" for part in parts[common_levels:]) for parts in folders]


def _event_records(folder: Path, paths: Sequence[str]) -> Iterator[Record]:
    if not paths:
        return
    reader = EventFiles()
    for prefix, path in zip(_prefixes(paths), paths, strict=True):
        with suppress(OSError), _open(folder, path) as file:
            for event in reader.events(file):
                values = {prefix + tag: value for tag, value in event.scalars.items() if tag not in _AXES}
                yield Record(values, event.step, finite(event.time))


def _csv_records(folder: Path, paths: Sequence[str]) -> Iterator[Record]:
    paths = [path for path in paths if not _OVER_TIME.isdisjoint(next(_csv_rows(folder, path), ()))]
    for prefix, path in zip(_prefixes(paths), paths, strict=True):
        rows = _csv_rows(folder, path)
        head = next(rows, [])
        for row in rows:
            numbers: dict[str, float] = {}
            for name, cell in zip(head, row, strict=False):
                # The cell of a metric that was not logged at this step is empty.
                with suppress(ValueError):
                    numbers[name] = float(cell)
            step = numbers.get("step")
            values = {prefix + name: value for name, value in numbers.items() if name not in _AXES}
            yield Record(values, int(step) if step is not None and step == step // 1 else None)


def _state_records(folder: Path, paths: Sequence[str]) -> Iterator[Record]:
    longest: dict[str, list[dict[str, Any]]] = {}
    for path in paths:
        with suppress(OSError, ValueError, TypeError, KeyError):
            state = read_json(os.fsencode(folder), os.fsencode(path), _MAX_BYTES)
            history = [line for line in state["log_history"] if isinstance(line, dict)]
            key = _CHECKPOINT.sub("", path)
            longest[key] = max(longest.get(key, []), history, key=len)
    for prefix, history in zip(_prefixes([*longest]), longest.values(), strict=True):
        for line in history[:_MAX_LINES]:
            numbers = {key: float(value) for key, value in line.items() if is_number(value)}
            values = {prefix + name: value for name, value in numbers.items() if name not in _AXES}
            step = line.get("step")
            yield Record(values, step if isinstance(step, int) and is_number(step) else None)


def _csv_rows(folder: Path, path: str) -> Iterator[list[str]]:
    with suppress(csv.Error):
        yield from csv.reader(line.decode(errors="replace") for line in _lines(folder, path))


@dataclass
class Summary:
    """The configuration of a run, and the last, lowest and highest value of each metric."""

    config: dict[str, Value] = field(default_factory=dict)
    metrics: dict[str, Metric] = field(default_factory=dict)


def summarize(folder: Path, args: Sequence[str] = ()) -> Summary:
    """Summarize a run or an array task from its folder and the command-line arguments of its program."""
    summary = Summary(config=config_of(args)[0])
    for record in records(folder):
        if isinstance(config := record.line.get("config"), dict):
            # The options in the arguments come first, and keep their values.
            summary.config = {**summary.config, **flat(config), **summary.config}
        for name, value in record.values.items():
            summary.metrics.setdefault(name, Metric()).add(value, record.step)
    for name, value in _measured(folder):
        summary.metrics.setdefault(name, Metric()).add(value)
    return summary


def _measured(folder: Path) -> Iterator[tuple[str, float]]:
    """Yield the measurements in the bundled jobs' files of results; of `bench` those on all of its ranks.

    Whole numbers, such as the sizes of arrays, are not measurements. A list has a value of each rank; the
    measurement is their mean. Only the recipe that `--find` recommends counts, not its trials.
    """
    names: set[str] = set()
    for line in result_lines(folder):
        if line.get("side", _ALL_RANKS) == _ALL_RANKS and line.get("kind") != "trial":
            listed = {key: value if isinstance(value, list) else [value] for key, value in line.items()}
            numbers = {
                key: fmean(values)
                for key, values in listed.items()
                if values and all(isinstance(value, float) for value in values)
            }
            yield from _printable_values(numbers, names, without=_AXES).items()


def config_of(args: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """Split a program's arguments into options and the remaining arguments.

    ``--lr 0.1``, ``--lr=0.1`` and ``lr=0.1`` are options with a value, ``--flag`` is True.
    """
    options: dict[str, Value] = {}
    arguments: list[str] = []
    words = list(args)
    while words and len(options) < _MAX_NAMES:
        word = words.pop(0)
        match = _OPTION.fullmatch(word) or _PAIR.fullmatch(word)
        if match is None:
            arguments.append(word)
            continue
        value: Value = True
        if match[2] is not None:
            value = _value(match[2])
        elif words and not _is_option(words[0]) and word not in _HYDRA_FLAGS:
            value = _value(words.pop(0))
        options[match[1].replace("-", "_")] = value
    return options, arguments + words


def config_of_task(values: Mapping[str, str], form: object = None) -> dict[str, Value]:
    """Return the options of a sweep's task, as ``config_of`` finds them in its arguments.

    form: that of the sweep. If a task gets ``true`` as the option alone, the value is True, and ``false`` is
        left out.
    """
    config = {configured_name(key): _value(text) for key, text in values.items()}
    if form in {Form.PAIR, Form.JOINED}:
        return config
    return {key: value == "true" or value for key, value in config.items() if value != "false"}


def _is_option(word: str) -> bool:
    """Return whether a word is an option rather than a value such as -3 or -inf."""
    return _OPTION.fullmatch(word) is not None and not _NOT_FINITE.fullmatch(word)


def _value(text: str) -> Value:
    """Return the text as a number if a program would read the same number, otherwise as printable text.

    A text such as 007 or 1_000 may be a name.
    """
    if _NUMBER.fullmatch(text):
        for kind in (int, float):
            with suppress(ValueError):
                number = kind(text)
                if is_number(number) and math.isfinite(number):
                    return number
    return printable(text)[:_MAX_TEXT]


def flat(config: Mapping[str, Any], prefix: str = "", *, longest: int = _MAX_TEXT) -> dict[str, Value]:
    """Flatten nested settings to names such as ``optimizer.lr``. Cut texts to ``longest`` characters."""
    values: dict[str, Value] = {}
    for key, value in config.items():
        name = printable(f"{prefix}{key}")[:_MAX_TEXT]
        if len(values) >= _MAX_NAMES:
            break
        if isinstance(value, Mapping):
            if prefix.count(".") < _MAX_DEPTH:
                values |= flat(value, f"{name}.", longest=longest)
        elif isinstance(value, str):
            values[name] = printable(value)[:longest]
        elif value is None or isinstance(value, bool):
            values[name] = value
        elif is_number(value):
            values[name] = value if math.isfinite(value) else str(value)
        else:
            values[name] = json.dumps(value, default=str)[:longest]
    return values
