"""What the nodes did during each iteration: a run's metrics and its telemetry, lined up by time.

A sample of telemetry stands for the time since the one before it. An iteration takes from each the part of
that time that lies within the iteration: means are weighted by it. Iterations shorter than the interval
between samples so share one. Standard library only.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, takewhile
from pathlib import Path
from typing import Any

from payload.cli.config import AlignConfig
from payload.cli.jsonl import JsonLines, answer
from payload.errors import UsageError

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sample:
    """What one node did from ``start`` to ``end``, in Unix seconds."""

    start: float
    end: float
    figures: Mapping[str, float]


def run(config: AlignConfig) -> int:
    """Write ``aligned.jsonl`` beside the metrics, print what all iterations come to, and give the exit code.

    Raises:
        UsageError: the folder has no metrics or telemetry, or cannot be written.
    """
    nodes = {path.stem: read_samples(path) for path in sorted((config.folder / "telemetry").glob("*.jsonl"))}
    if not nodes:
        raise UsageError(
            f"{config.folder} has no telemetry/<host>.jsonl; name the folder of a job or run",
            code="no-telemetry",
        )
    iterations = [one for one in _records(config.folder / "metrics.jsonl") if one["kind"] == "iteration"]
    whole = Averages()
    with JsonLines(config.folder / "aligned.jsonl") as file:
        for one in iterations:
            span = one["time"] - one["seconds"], one["time"]
            whole.add(span, nodes)
            sums = Averages()
            sums.add(span, nodes)
            file.write("iteration", step=one["step"], start=span[0], end=span[1], **sums.told())
    seconds = sum(one["seconds"] for one in iterations)
    answer(iterations=len(iterations), seconds=seconds, **whole.told())
    return 0


class Averages:
    """Figures of some nodes over some stretches of time, each weighted by how long it held."""

    def __init__(self) -> None:
        self._sums: dict[
            str, dict[str, tuple[float, float]]
        ] = {}  # host -> figure -> (its integral, seconds)

    def add(self, span: tuple[float, float], nodes: Mapping[str, Sequence[Sample]]) -> None:
        """What the nodes did from when to when."""
        for host, samples in nodes.items():
            sums = self._sums.setdefault(host, {})
            first = bisect_right(samples, span[0], key=lambda sample: sample.end)
            for sample in takewhile(lambda sample: sample.start < span[1], islice(samples, first, None)):
                seconds = min(span[1], sample.end) - max(span[0], sample.start)
                for name, figure in sample.figures.items():
                    integral, before = sums.get(name, (0.0, 0.0))
                    sums[name] = integral + figure * seconds, before + seconds

    def told(self) -> Record:
        """Means by node; over all nodes the mean use of cores and GPUs, and the power that all GPUs drew."""
        hosts = {
            host: {name: round(integral / seconds, 3) for name, (integral, seconds) in sums.items()}
            for host, sums in self._sums.items()
        }

        def known(name: str) -> list[float]:
            return [means[name] for means in hosts.values() if name in means]

        overall = {name: _mean(known(name)) for name in ("cpu_percent", "gpu_util")}
        return {**overall, "power_w": _total(known("power_w")), "hosts": hosts}


def read_samples(path: Path) -> list[Sample]:
    """Of one node, in order of time. What came before a job ran again is not joined to what came after."""
    lines = _records(path)
    return [
        Sample(before["time"], line["time"], dict(_figures(line)))
        for before, line in pairwise(lines)
        if line["kind"] == "sample"
    ]


def _figures(line: Record) -> Iterator[tuple[str, float]]:
    for name in ("cpu_percent", "memory_used_mib", "job_memory_mib"):
        if line.get(name) is not None:
            yield name, line[name]
    for name in ("net_rx_bytes_per_s", "net_tx_bytes_per_s"):
        if line.get(name):
            yield name, sum(line[name].values())
    gpus = line.get("gpus") or []
    used = [gpu["util"] for gpu in gpus if gpu["util"] is not None]
    power = [gpu["power_w"] for gpu in gpus if gpu["power_w"] is not None]
    if used:
        yield "gpu_util", sum(used) / len(used)
    if power:
        yield "power_w", sum(power)


def _records(path: Path) -> list[Record]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as exc:
        raise UsageError(f"{path} cannot be read: {exc.strerror}", code="file-unreadable") from exc
    records = []
    for number, line in enumerate(lines, start=1):
        try:
            records.append(json.loads(line))
        except ValueError as exc:
            if number < len(lines):  # a run that was killed may leave half a line at the end
                raise UsageError(f"{path}:{number} is not JSON: {exc}", code="not-json") from exc
    return records


def _mean(numbers: Sequence[float]) -> float | None:
    return round(sum(numbers) / len(numbers), 3) if numbers else None


def _total(numbers: Sequence[float]) -> float | None:
    return round(sum(numbers), 3) if numbers else None
