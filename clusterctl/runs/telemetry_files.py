"""Reads the telemetry that each node of a job wrote to telemetry/NODE.jsonl.

A block has a row for each sample, and columns with a value for each row; NaN stands for a value that
the sample does not have. The columns of ``FIGURES`` have its titles, those below the other values;
``ENERGY`` and ``BUSY`` begin the names of columns of a single GPU, which have rows of their own. The
job can write to these files, so what is impossible is left out.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from operator import lt
from pathlib import Path
from typing import Any, Final

from clusterctl.runs.curve import Column
from clusterctl.runs.metric_files import Block, json_lines
from clusterctl.util.numbers import finite

GPU_AT_WORK: Final = 1.0
"""Percentage of time. The counters of a GPU without work need not be exactly 0."""
TIME: Final = "time"
# The time of the line before the sample, infinite without one: means are since then. Telemetry
# begins anew with each attempt.
BEFORE: Final = "before"
# Cores of the node; how many of them were busy since the line before, and for how many seconds
# together, if that line was not long ago.
CORES: Final = "cores"
BUSY_CORES: Final = "busy_cores"
CORE_S: Final = "core_s"
JOB_MIB: Final = "job_memory_mib"
GPUS: Final = "gpus"
# 1, or NaN: the node did nothing since the line before; shows other GPUs than Slurm has given to the
# job, so that some may be those of other jobs; the use of GPUs is by their counters since the line
# before; that of some GPU is unknown.
IDLE: Final = "idle"
OTHER_GPUS: Final = "other_gpus"
BY_COUNTERS: Final = "by_counters"
UNKNOWN_GPU: Final = "unknown_gpu"
# Of a GPU: its energy so far, and the percentage of time in which any kernel ran.
ENERGY: Final = "energy_mj "
BUSY: Final = "busy "
_MIB: Final = 1 << 20
_LATEST: Final = 1 << 37  # Unix seconds
# No node has so much of anything. Sums and products of less are finite.
_IMPOSSIBLE: Final = 1 << 60
# Use since a line that is older than this is not counted.
_LONGEST_S: Final = 180
# Telemetry that is silent for longer shows no idle time.
_LONGEST_SILENCE_S: Final = 60.0
# A node is idle if its processes use less than these.
_IDLE_CORES: Final = 0.1
_IDLE_BYTES_PER_S: Final = 10_000
# Figures by the key of a sample, of a GPU that are summed, and of a GPU that are averaged.
_OF_GPUS: Final = (("GPU memory", "mem_used_mib", _MIB), ("Power of GPUs", "power_w", 1))
_BY_COUNTERS: Final = (
    ("GPU tensor cores", "tensor_percent"),
    ("GPU memory bandwidth", "bandwidth_percent"),
    ("GPU memory traffic", "bandwidth_bytes_per_s"),
)
_NETWORK: Final = (
    ("Network received", "net_rx_bytes_per_s"),
    ("Network sent", "net_tx_bytes_per_s"),
)
MEANS: Final = frozenset(("CPU", *(title for title, _ in (*_BY_COUNTERS, *_NETWORK))))
"""The figures that are means since the line before the sample."""


@dataclass
class NodeFile:
    """The telemetry of a node, in the folder of a job or an array task.

    left_out: sentences on the samples that were left out, complete after the last block.
    """

    folder: Path
    node: str
    left_out: list[str] = field(default_factory=list)

    @property
    def member(self) -> str:
        """Its place in the table."""
        return f"telemetry/{self.node}"

    def blocks(self) -> Iterator[Block]:
        """Yield the samples, in the order in which they were written."""
        cores = 0
        before = math.inf
        # A node's name with a null byte raises a ValueError.
        with suppress(ValueError):
            for lines in json_lines(self.folder, f"{self.member}.jsonl", self.left_out):
                rows = _Rows()
                for line in lines:
                    time = finite(line.get("time"))
                    if time is None or not 0 <= time < _LATEST:
                        continue
                    if line.get("kind") == "host":
                        cpus = line.get("cpus")
                        cores = len(cpus) if isinstance(cpus, list) else 0
                    elif line.get("kind") == "sample":
                        rows.add(line, time, before, cores)
                    before = time
                if rows.times:
                    yield rows.block()


class _Rows:
    """The samples of a block."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._values: list[dict[str, float]] = []
        self._of_gpus: dict[str, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))

    def add(self, line: Mapping[str, Any], time: float, before: float, cores: int) -> None:
        gpus = _gpus_of(line)
        uses = [_gpu_busy(gpu) for gpu in gpus]
        given = _amount(line.get("job_gpus"))
        values = _figures(line, gpus, uses)
        values |= {BEFORE: before, CORES: float(cores), GPUS: float(len(gpus))}
        percent = values.get("CPU")
        if percent is not None and 0 < time - before < _LONGEST_S:
            busy = max(0.0, percent) / 100 * cores
            values |= {BUSY_CORES: busy, CORE_S: busy * (time - before)}
            is_quiet = cores > 0 and busy < _IDLE_CORES and time - before <= _LONGEST_SILENCE_S
            if is_quiet and _is_idle(line, uses):
                values[IDLE] = 1.0
        if (memory := _amount(line.get(JOB_MIB))) is not None:
            values[JOB_MIB] = memory
        if given is not None and given != len(gpus):
            values[OTHER_GPUS] = 1.0
        if any(map(_has_counters, gpus)):
            values[BY_COUNTERS] = 1.0
        if None in uses:
            values[UNKNOWN_GPU] = 1.0
        for gpu, use in zip(gpus, uses, strict=True):
            for name, value in ((ENERGY, _amount(gpu.get("energy_mj"))), (BUSY, use)):
                if value is not None:
                    times, own = self._of_gpus[f"{name}{gpu.get('index')}"]
                    times.append(time)
                    own.append(value)
        self.times.append(time)
        self._values.append(values)

    def block(self) -> Block:
        place = Column(self.times, self.times, rises=all(map(lt, self.times, self.times[1:])))
        names = dict.fromkeys(chain.from_iterable(self._values))
        columns = {
            name: place._replace(ys=[values.get(name, math.nan) for values in self._values])
            for name in names
        }
        for name, (times, values) in self._of_gpus.items():
            columns[name] = (
                place._replace(ys=values) if times == self.times else Column(times, values)
            )
        return Block(columns, TIME, place)


def _gpus_of(sample: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    gpus = sample.get("gpus")
    return [gpu for gpu in gpus if isinstance(gpu, dict)] if isinstance(gpus, list) else []


def _gpu_busy(gpu: Mapping[str, Any]) -> float | None:
    """Return the percentage of time in which any kernel ran on a GPU; None: unknown.

    By the GPU's counters it is that since the sample before, otherwise that of at most a second.
    """
    return _amount(gpu.get("active_percent" if _has_counters(gpu) else "util"))


def _has_counters(gpu: Mapping[str, Any]) -> bool:
    return _amount(gpu.get("active_percent")) is not None


def _figures(
    line: Mapping[str, Any], gpus: Sequence[Mapping[str, Any]], uses: Sequence[float | None]
) -> dict[str, float]:
    """Return the figures of a sample by title. uses: of its GPUs."""
    figures: dict[str, float] = {}
    for title, key, unit in (("CPU", "cpu_percent", 1), ("Memory", "memory_used_mib", _MIB)):
        if (value := _amount(line.get(key))) is not None:
            figures[title] = value * unit
    for title, key in _NETWORK:
        links = line.get(key)
        if rates := _amounts(links.values() if isinstance(links, dict) else ()):
            figures[title] = sum(rates)
    for title, key, unit in _OF_GPUS if gpus else ():
        if amounts := _amounts(gpu.get(key) for gpu in gpus):
            figures[title] = sum(amount * unit for amount in amounts)
    means = [("GPU", uses)] if gpus else []
    means += [(title, [gpu.get(key) for gpu in gpus]) for title, key in _BY_COUNTERS if gpus]
    for title, values in means:
        # A mean of some GPUs alone would be a figure from a part.
        if len(numbers := _amounts(values)) == len(gpus):
            figures[title] = sum(numbers) / len(gpus)
    return figures


def _amounts(values: Iterable[Any]) -> list[float]:
    return [number for number in map(_amount, values) if number is not None]


def _is_idle(line: Mapping[str, Any], uses: Sequence[float | None]) -> bool:
    """Return whether network and GPUs did nothing since the line before. A value that is missing may
    be any. uses: of the GPUs.
    """
    links = [line.get(key) for _, key in _NETWORK]
    rates = [_amount(rate) for each in links if isinstance(each, dict) for rate in each.values()]
    return (
        all(isinstance(each, dict) for each in links)
        and None not in rates
        and sum(rate or 0.0 for rate in rates) < _IDLE_BYTES_PER_S
        and isinstance(line.get("gpus"), list)
        and all(use is not None and use < GPU_AT_WORK for use in uses)
    )


def _amount(value: Any) -> float | None:
    """Return the value if it is a number that a node can have, otherwise None."""
    number = finite(value)
    return number if number is not None and abs(number) < _IMPOSSIBLE else None
