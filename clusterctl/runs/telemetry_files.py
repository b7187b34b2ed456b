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
from enum import Enum, auto
from functools import partial
from itertools import chain
from operator import lt
from pathlib import Path
from typing import Any, Final

from clusterctl.runs.curve import Column
from clusterctl.runs.metric_files import Block, json_lines
from clusterctl.spec.units import GIB_MIB, MIB
from clusterctl.util.numbers import finite

GPU_AT_WORK: Final = 1.0
"""Percentage of time. The counters of a GPU without work need not be exactly 0."""
TIME: Final = "time"
# The time of the line before the sample, infinite without one. Telemetry begins anew with each
# attempt.
BEFORE: Final = "before"
# Cores of the node.
CORES: Final = "cores"
# How many cores were busy since the line before, and for how many seconds together, if that line was
# not long ago.
BUSY_CORES: Final = "busy_cores"
CORE_S: Final = "core_s"
JOB_MIB: Final = "job_memory_mib"
GPUS: Final = "gpus"
# The following are 1, or NaN.
# The node did nothing since the line before.
IDLE: Final = "idle"
# The node shows other GPUs than Slurm has given to the job: some may be those of other jobs.
OTHER_GPUS: Final = "other_gpus"
# The use of the GPUs is a mean since the line before, by their counters.
BY_COUNTERS: Final = "by_counters"
# It is not known how much a GPU was used.
UNKNOWN_GPU: Final = "unknown_gpu"
# Of a GPU: its energy so far, and the percentage of time in which any kernel ran.
ENERGY: Final = "energy_mj "
BUSY: Final = "busy "
_LATEST: Final = 1 << 37  # Unix seconds
# No node has so much of anything. Sums and products of less are finite.
_IMPOSSIBLE: Final = 1 << 60
_MOST: Final = 2.0**120  # of the GPUs of a node, in the figures' units
# Use since a line that is older than this is not counted.
_LONGEST_S: Final = 180
# Telemetry that is silent for longer shows no idle time.
_LONGEST_SILENCE_S: Final = 60.0
# A node is idle if its processes use less than these.
_IDLE_CORES: Final = 0.1
_IDLE_BYTES_PER_S: Final = 10_000


class Parts(Enum):
    """What a figure of a node is: its own value, or that of its parts together."""

    NODE = auto()
    SUM_OF_LINKS = auto()
    SUM_OF_GPUS = auto()
    MEAN_OF_GPUS = auto()


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure of the nodes.

    source: the key in a sample, or in its GPUs. "": the use of a GPU. source_size: the unit there,
    as a multiple of ``unit``. is_mean: whether it is the mean since the line before. None: if it is
    by counters. in_charts: whether it has a chart, in ``unit``.
    key: its name in comparisons and in the table of a scaling; "": it is only in charts. key_unit:
    the unit there, with ``size`` of ``unit``. is_highest: whether it is the highest sample there,
    not the mean.
    """

    title: str
    source: str
    unit: str
    key: str = ""
    key_unit: str = ""
    size: int = 1
    parts: Parts = Parts.NODE
    source_size: int = 1
    is_mean: bool | None = False
    is_highest: bool = False
    in_charts: bool = True

    @property
    def heading(self) -> str:
        return f"{self.title} ({'highest' if self.is_highest else 'mean'})"


_Memory: Final = partial(
    Figure, unit="B", key_unit="GiB", size=GIB_MIB * MIB, source_size=MIB, is_highest=True
)
_Network: Final = partial(Figure, unit="B/s", parts=Parts.SUM_OF_LINKS, is_mean=True)
_OfGpus: Final = partial(Figure, unit="%", key_unit="%", parts=Parts.MEAN_OF_GPUS, is_mean=True)
FIGURES: Final = (
    Figure("CPU", "cpu_percent", "%", "cpu_percent", "%", is_mean=True),
    _Memory("Memory", "memory_used_mib", key="memory_max_gib"),
    _OfGpus("GPU", "", key="gpu_percent", is_mean=None),
    _OfGpus("GPU tensor cores", "tensor_percent", key="gpu_tensor_percent"),
    _OfGpus("GPU memory bandwidth", "bandwidth_percent", key="gpu_bandwidth_percent"),
    # The same as a speed, if the peak is known.
    _OfGpus(
        "GPU memory traffic",
        "bandwidth_bytes_per_s",
        unit="B/s",
        key="gpu_bandwidth_gb_per_s",
        key_unit="GB/s",
        size=10**9,
        in_charts=False,
    ),
    _Memory("GPU memory", "mem_used_mib", key="gpu_memory_max_gib", parts=Parts.SUM_OF_GPUS),
    _Network("Network received", "net_rx_bytes_per_s"),
    _Network(
        "Network sent", "net_tx_bytes_per_s", key="sent_mib_per_s", key_unit="MiB/s", size=MIB
    ),
    Figure("Power of GPUs", "power_w", "W", parts=Parts.SUM_OF_GPUS),
)


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


def is_of_node(block: Block) -> bool:
    """Return whether a block has what readers of telemetry expect, as those of a ``NodeFile`` have."""
    columns = {
        name: column.ys
        for name, column in block.columns.items()
        if not name.startswith((ENERGY, BUSY))
    }
    return (
        {BEFORE, CORES, GPUS} <= columns.keys()
        and all(len(ys) == len(block.place.ys) for ys in columns.values())
        and not any(map(math.isnan, columns[BEFORE]))
        and not any(map(math.isnan, chain(columns[CORES], columns[GPUS])))
        and not any(
            any(map(_MOST.__le__, map(abs, column.ys)))
            for name, column in block.columns.items()
            if name != BEFORE
        )
    )


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
    for figure in FIGURES:
        values: Iterable[Any] = uses
        if figure.parts is Parts.NODE:
            values = (line.get(figure.source),)
        elif figure.parts is Parts.SUM_OF_LINKS:
            links = line.get(figure.source)
            values = links.values() if isinstance(links, dict) else ()
        elif figure.source:
            values = (gpu.get(figure.source) for gpu in gpus)
        numbers = _amounts(values)
        total = sum(numbers) * figure.source_size
        if figure.parts is not Parts.MEAN_OF_GPUS:
            figures |= {figure.title: total} if numbers else {}
        # A mean of some GPUs alone would be a figure from a part.
        elif numbers and len(numbers) == len(gpus):
            figures[figure.title] = total / len(gpus)
    return figures


def _amounts(values: Iterable[Any]) -> list[float]:
    return [number for number in map(_amount, values) if number is not None]


def _is_idle(line: Mapping[str, Any], uses: Sequence[float | None]) -> bool:
    """Return whether network and GPUs did nothing since the line before. A value that is missing may
    be any. uses: of the GPUs.
    """
    links = [line.get(each.source) for each in FIGURES if each.parts is Parts.SUM_OF_LINKS]
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
