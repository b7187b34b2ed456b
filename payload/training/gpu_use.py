"""The use of GPUs in turns of work: idle share, tensor cores, memory bandwidth, energy per sample.

A figure is a mean over the time of all turns, and then over the GPUs. A figure that cannot be measured
on each GPU and in each turn is left out.
"""

from __future__ import annotations

import statistics
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from payload.device.base import Device
from payload.node.host import hostname
from payload.node.nvml import ACTIVE, Card

SHORTEST_TURN_S = 1.0
"""Shorter turns are not measured. NVML refreshes a GPU's counters each 0.1 s, so a part of the work
before and after a turn counts, too; and the utilization of a GPU without counters is that of up to the
last second (nvmlUtilization_t)."""


@dataclass(frozen=True, slots=True)
class GpuMeasurement:
    """The use of a GPU in turns of work of ``seconds`` in total, in which ``samples`` were
    computed.

    means: percentages and rates over the time of all turns. joules: None if the GPU does not count
    them. processes: the processes that computed on it at the end; None: unknown.
    """

    seconds: float
    samples: int
    means: Mapping[str, float]
    joules: float | None
    processes: int | None


@dataclass(slots=True)
class GpuMeter:
    """Measures the use of a GPU in turns of work, each between ``begin`` and ``end``.

    Turns of less than ``SHORTEST_TURN_S`` are not counted.
    """

    card: Card
    _began: float = field(default=0.0, init=False)
    _joules_before: float | None = field(default=None, init=False)
    _uses: list[GpuMeasurement] = field(default_factory=list, init=False)

    def begin(self) -> None:
        self.card.restart()
        self._joules_before = self.card.energy_j()
        self._began = time.monotonic()

    def end(self, samples: int) -> None:
        """End a turn in which so many samples were computed. The GPU has finished its work."""
        seconds = time.monotonic() - self._began
        if seconds < SHORTEST_TURN_S:
            return
        means = self.card.activity()
        # Without counters, only the last part of the turn is known.
        if ACTIVE not in means and (rates := self.card.utilization()) is not None:
            means = {**means, ACTIVE: float(rates.gpu)}
        before, after = self._joules_before, self.card.energy_j()
        joules = None if before is None or after is None else after - before
        processes = self.card.processes()
        count = None if processes is None else len(processes)
        self._uses.append(GpuMeasurement(seconds, samples, means, joules, count))

    def use(self) -> GpuMeasurement | None:
        """Return the use in all turns, weighted by their time. A value that a turn lacks is left out.

        None: no turn was long enough.
        """
        if not self._uses:
            return None
        seconds = sum(use.seconds for use in self._uses)
        means = {
            name: sum(use.means[name] * use.seconds for use in self._uses) / seconds
            for name in _in_all([use.means for use in self._uses])
        }
        joules = [use.joules for use in self._uses if use.joules is not None]
        return GpuMeasurement(
            seconds,
            sum(use.samples for use in self._uses),
            means,
            sum(joules) if len(joules) == len(self._uses) else None,
            self._uses[-1].processes,
        )


def gpu_of(device: Device) -> str:
    """Return a name of a rank's GPU that no other GPU of the job has; of its node without a GPU."""
    return f"{hostname()} {device.gpu and device.gpu['uuid']}"


def figures_of(gpus: Sequence[tuple[GpuMeasurement | None, int]]) -> dict[str, float]:
    """Return the use of all GPUs: means over the GPUs, and the samples per joule of all of them.

    gpus: the use of each GPU, and how many processes of this program compute on it. If more do, the
    GPU's energy is not that of this program alone, and is left out, as is each figure that a GPU lacks.
    Empty: a GPU was not measured.
    """
    uses = [use for use, _ in gpus if use is not None]
    if not uses or len(uses) < len(gpus):
        return {}
    figures = {
        f"gpu_{name}": statistics.fmean(use.means[name] for use in uses)
        for name in _in_all([use.means for use in uses])
    }
    if (active := figures.get(f"gpu_{ACTIVE}")) is not None:
        figures["gpu_idle_percent"] = 100 - active
    joules = [use.joules / use.samples for use in uses if use.joules and use.samples]
    is_shared = any(use is not None and (use.processes or 0) > own for use, own in gpus)
    if len(joules) == len(uses) and not is_shared:
        figures["samples_per_joule"] = 1 / sum(joules)
    return figures


def total_joules(ranks: Sequence[tuple[str, float | None, int]]) -> float | None:
    """Return the joules of the GPUs of all ranks, each GPU once.

    ranks: for each rank its GPU, the joules of that GPU, and how many processes compute on it. None: a
    GPU does not count them, or other programs compute on it, too.
    """
    own = Counter(gpu for gpu, *_ in ranks)
    by_gpu = {gpu: joules for gpu, joules, _ in ranks}
    known = [joules for joules in by_gpu.values() if joules is not None]
    is_shared = any(processes > own[gpu] for gpu, _, processes in ranks)
    return None if is_shared or len(known) < len(by_gpu) else sum(known)


def _in_all(figures: Sequence[Mapping[str, float]]) -> list[str]:
    """Return the names that all of these have, in the order of the first."""
    return [name for name in figures[0] if all(name in each for each in figures)]
