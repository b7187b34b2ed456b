"""Summarizes the configuration and the metrics of a run, and reads its events, telemetry and
results.

The job controls these files, so the number of names and their lengths are limited.
"""

from __future__ import annotations

import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Final

from clusterctl.errors import printable
from clusterctl.runs.curve import STEP, Column, Curve
from clusterctl.runs.metric_files import (
    AXES,
    CONFIG,
    MAX_DEPTH,
    MAX_NAMES,
    MAX_TEXT,
    Block,
    MetricFiles,
    Names,
    json_lines,
)
from clusterctl.runs.spread import mean_of
from clusterctl.runs.table import TableWriter, stored
from clusterctl.runs.telemetry_files import ENERGY, OTHER_GPUS, NodeFile
from clusterctl.runs.tensorboard import ReadBudget
from clusterctl.scheduler.ends.remote_logs import END, end_of
from clusterctl.scheduler.history import EVENTS_FILE, Attempt, attempts_of, nodes_of
from clusterctl.scheduler.slurm.records import restarts_of
from clusterctl.spec.sweep import ArgumentForm, configured_name
from clusterctl.state.attempts import AttemptRecord
from clusterctl.state.run_record import Metric, Value
from clusterctl.util.numbers import is_number

_OPTION: Final = re.compile(r"--?([A-Za-z][\w.-]*)(?:=(.*))?", re.DOTALL)
# Arguments for Hydra, such as ++lr=0.1
_PAIR: Final = re.compile(r"\+{0,2}([A-Za-z][\w./@-]*)=(.*)", re.DOTALL)
_NOT_FINITE: Final = re.compile(r"-(?:inf|infinity|nan)", re.IGNORECASE)
_NUMBER: Final = re.compile(r"[+-]?(?:(?:0|[1-9][0-9]*)(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
# They have no value, but a pair may follow.
_HYDRA_FLAGS: Final = frozenset({"-m", "--multirun"})
# Written by the bundled jobs that measure instead of training.
_RESULTS: Final = ("bench.jsonl", "find.jsonl", "gemm.jsonl", "allreduce.jsonl")
# The side of a benchmark that uses all ranks of the job.
_ALL_RANKS: Final = "all"
# Bytes of a file of results, which `bench` and others keep small: all lines are kept in memory.
_RESULTS_BYTES: Final = 1 << 24


def history_in(folder: Path) -> tuple[Attempt, ...]:
    """Return the attempts of the job or array task with this folder of a collected run."""
    return attempts_of(end_of(str(folder), EVENTS_FILE, END))


def sample_times(folder: Path, history: Sequence[Attempt]) -> list[float]:
    """Return the times of the telemetry of the nodes on which a job or task was."""
    return [
        time
        for node in nodes_of(history)
        for block in stored(NodeFile(folder, node))
        for time in block.place.ys
    ]


def gpu_energy_j(folder: Path, attempts: Sequence[AttemptRecord]) -> float | None:
    """Return the joules that the GPUs used in these attempts, by their counters. None: no
    counter, or a node shows GPUs that may be those of other jobs.
    """
    joules: list[float] = []
    for node in dict.fromkeys(node for attempt in attempts for node in attempt.nodes):
        # The first and the last reading of each GPU in each attempt.
        readings: dict[tuple[int, str], tuple[float, float]] = {}
        for block in stored(NodeFile(folder, node)):
            named = [name for name in block.columns if name.startswith(ENERGY)]
            for number, attempt in enumerate(attempts):
                span = attempt.start_time, attempt.end_time or math.inf
                if OTHER_GPUS in block.columns and block.columns[OTHER_GPUS].within(*span):
                    return None
                for name in named:
                    if inside := block.columns[name].within(*span):
                        first, _ = readings.get((number, name), (inside[0], 0.0))
                        readings[number, name] = first, inside[-1]
        joules += [max(0.0, last - first) / 1000 for first, last in readings.values()]
    return sum(joules) if joules else None


class StepsAround:
    """The time and step of the first and the last metrics between each two of some moments."""

    def __init__(self, moments: Iterable[float]) -> None:
        self._moments = sorted(set(moments))
        self._ends: dict[int, tuple[tuple[float, int], tuple[float, int]]] = {}

    def add(self, block: Block) -> None:
        place = block.place
        if not self._moments or block.axis != STEP:
            return
        for time, step in zip(place.times or (), place.xs or (), strict=False):
            if time is not None:
                at = bisect_right(self._moments, time)
                point = (time, int(step))
                first, last = self._ends.get(at, (point, point))
                self._ends[at] = min(first, point), max(last, point)

    @property
    def points(self) -> list[tuple[float, int]]:
        return [point for both in self._ends.values() for point in both]


def restart_times(folder: Path, accounted: Sequence[AttemptRecord]) -> list[float]:
    """Return when a job or array task was restarted, in Unix seconds."""
    return [attempt.again for attempt in restarts_of(history_in(folder), accounted)]


def restarts_in(
    folder: Path, accounted: Sequence[AttemptRecord], steps: StepsAround | None = None
) -> tuple[Attempt, ...]:
    """Return the attempts after which a job or array task was restarted.

    folder: of a collected run. accounted: its attempts in run.json. steps: around the restarts. None:
        they are read.
    """
    # Most jobs have no restart, and their metrics need not be read.
    if not (times := restart_times(folder, accounted)):
        return ()
    if steps is None:
        steps = StepsAround(times)
        for block in stored(MetricFiles(folder)):
            steps.add(block)
    return restarts_of(history_in(folder), accounted, steps.points)


def result_lines(folder: Path, left_out: list[str]) -> list[Mapping[str, Any]]:
    """Return the lines of the bundled jobs' files of results. left_out: gets sentences on others."""
    files = (json_lines(folder, name, left_out, ReadBudget(_RESULTS_BYTES)) for name in _RESULTS)
    return [*chain.from_iterable(chain.from_iterable(files))]


@dataclass
class Summary:
    """The configuration of a run, and the last, lowest and highest value of each metric.

    given: the options that the user set, as the program tells. None: it does not.
    left_out: sentences on the metrics that were left out.
    """

    config: dict[str, Value] = field(default_factory=dict)
    given: tuple[str, ...] | None = None
    metrics: dict[str, Metric] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()


def summarize(
    folder: Path,
    args: Sequence[str] = (),
    readers: Sequence[Callable[[Block], None]] = (),
    table: TableWriter | None = None,
) -> Summary:
    """Summarize a run or an array task from its folder and the command-line arguments of its
    program. readers, table: get all metrics, too, so that they are parsed once.
    """
    config = config_of(args)[0]
    given_options: tuple[str, ...] | None = None
    curves: dict[str, Curve] = defaultdict(Curve)
    files = MetricFiles(folder)
    for block in files.blocks() if table is None else table.blocks(files):
        if block.kind == "run":
            own = _given(block.lines[-1])
            given_options = None if own is None else (*dict.fromkeys((*own, *config_of(args)[0])),)
        for read in readers:
            read(block)
        for line in block.lines if block.lines and CONFIG in block.lines[0] else ():
            if isinstance(given := line[CONFIG], dict):
                # The options in the arguments come first, and keep their values.
                config = {**config, **flat(given), **config}
        for name, column in block.columns.items():
            curves[name].extend(block.axis, column)
    names = Names()
    unread: list[str] = []
    for key, value in _measured(result_lines(folder, unread)):
        if (measured := names.shown(key)) is not None:
            curves[measured].extend("", Column(None, [value]))
    metrics = {name: curve.metric() for name, curve in curves.items()}
    left_out = [*files.left_out, *unread, *names.left_out()]
    if len(config) >= MAX_NAMES:
        left_out.append(f"options of the program after the first {MAX_NAMES:,}")
    return Summary(config, given_options, metrics, tuple(left_out))


def _given(line: Mapping[str, Any]) -> tuple[str, ...] | None:
    """Return the names of the options that the user set, by a program's line about its run."""
    given = line.get("given")
    if not isinstance(given, list):
        return None
    return tuple(printable(str(name))[:MAX_TEXT] for name in given[:MAX_NAMES])


def _measured(lines: Iterable[Mapping[str, Any]]) -> Iterator[tuple[str, float]]:
    """Yield the measurements in the bundled jobs' files of results; of `bench` those on all of its
    ranks.

    Whole numbers, such as the sizes of arrays, are not measurements. A list has a value of each
    rank; the measurement is their mean. Only the recipe that `--find` recommends counts, not its
    trials.
    """
    for line in lines:
        if line.get("side", _ALL_RANKS) == _ALL_RANKS and line.get("kind") != "trial":
            listed = {
                key: value if isinstance(value, list) else [value] for key, value in line.items()
            }
            for key, values in listed.items():
                if values and key not in AXES and all(isinstance(value, float) for value in values):
                    yield key, mean_of(values)


def config_of(args: Sequence[str]) -> tuple[dict[str, Value], list[str]]:
    """Split a program's arguments into options and the remaining arguments.

    ``--lr 0.1``, ``--lr=0.1`` and ``lr=0.1`` are options with a value, ``--flag`` is True.
    """
    options: dict[str, Value] = {}
    arguments: list[str] = []
    words = list(args)
    while words and len(options) < MAX_NAMES:
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

    form: that of the sweep. If a task gets ``true`` as the option alone, the value is True, and
        ``false`` is left out.
    """
    config = {configured_name(key): _value(text) for key, text in values.items()}
    if form in {ArgumentForm.PAIR, ArgumentForm.JOINED}:
        return config
    return {key: value == "true" or value for key, value in config.items() if value != "false"}


def _is_option(word: str) -> bool:
    """Return whether a word is an option rather than a value such as -3 or -inf."""
    return _OPTION.fullmatch(word) is not None and not _NOT_FINITE.fullmatch(word)


def _value(text: str) -> Value:
    """Return the text as a number if a program would read the same number, otherwise as printable
    text.

    A text such as 007 or 1_000 may be a name.
    """
    if _NUMBER.fullmatch(text):
        for kind in (int, float):
            with suppress(ValueError):
                number = kind(text)
                if is_number(number) and math.isfinite(number):
                    return number
    return printable(text)[:MAX_TEXT]


def flat(
    config: Mapping[str, Any], prefix: str = "", *, longest: int = MAX_TEXT
) -> dict[str, Value]:
    """Flatten nested settings to names such as ``optimizer.lr``. Cut texts to ``longest``
    characters.
    """
    values: dict[str, Value] = {}
    for key, value in config.items():
        name = printable(f"{prefix}{key}")[:MAX_TEXT]
        if len(values) >= MAX_NAMES:
            break
        if isinstance(value, Mapping):
            if prefix.count(".") < MAX_DEPTH:
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
