"""Joins a run's metrics with its telemetry by time: the state of the nodes during each iteration.

A telemetry sample covers the time since the previous sample. The means of an iteration are weighted
by the overlap of each sample with the iteration. Standard library only.
"""

from __future__ import annotations

import json
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise, product
from pathlib import Path
from typing import Any

from payload.cli.config import AlignConfig
from payload.cli.jsonl import JsonLines, answer
from payload.errors import UsageError
from payload.node.nvml import ACTIVE

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class MeanReadings:
    """The mean readings of a node from ``start`` to ``end``, in Unix seconds."""

    start: float
    end: float
    figures: Mapping[str, float]


def run(config: AlignConfig) -> int:
    """Write ``aligned.jsonl`` beside metrics.jsonl, print averages over the run, and return the
    exit code.
    """
    nodes = {
        path.stem: read_samples(path)
        for path in sorted((config.folder / "telemetry").glob("*.jsonl"))
    }
    if not nodes:
        raise UsageError(
            f"{config.folder} does not contain telemetry/<host>.jsonl; pass the folder of a job "
            "or run",
            code="no-telemetry",
        )
    iterations = [
        it for it in _records(config.folder / "metrics.jsonl") if it["kind"] == "iteration"
    ]
    spans = [(record["time"] - record["seconds"], record["time"]) for record in iterations]
    with JsonLines(config.folder / "aligned.jsonl") as file:
        for record, (start, end) in zip(iterations, spans, strict=True):
            figures = averages([(start, end)], nodes)
            file.write("iteration", step=record["step"], start=start, end=end, **figures)
    seconds = sum(record["seconds"] for record in iterations)
    answer(iterations=len(iterations), seconds=seconds, **averages(spans, nodes))
    return 0


def averages(
    spans: Iterable[tuple[float, float]], nodes: Mapping[str, Sequence[MeanReadings]]
) -> Record:
    """Average the telemetry of each node over ``spans``, pairs (start, end) in Unix seconds.

    Return each node's means, the mean CPU and GPU use over all nodes, and the sum of all nodes' GPU
    power.
    """
    totals: dict[str, dict[str, float]] = {host: defaultdict(float) for host in nodes}
    seconds: dict[str, dict[str, float]] = {host: defaultdict(float) for host in nodes}
    for (start, end), (host, samples) in product(spans, nodes.items()):
        first = bisect_right(samples, start, key=lambda sample: sample.end)
        for sample in islice(samples, first, None):
            if sample.start >= end:
                break
            overlap = min(end, sample.end) - max(start, sample.start)
            for name, figure in sample.figures.items():
                totals[host][name] += figure * overlap
                seconds[host][name] += overlap
    hosts = {
        host: {
            name: round(integral / seconds[host][name], 3) for name, integral in integrals.items()
        }
        for host, integrals in totals.items()
    }
    means_of_nodes = {
        name: [means[name] for means in hosts.values() if name in means]
        for name in ("cpu_percent", "gpu_util", "power_w")
    }
    return {
        "cpu_percent": _mean(means_of_nodes["cpu_percent"]),
        "gpu_util": _mean(means_of_nodes["gpu_util"]),
        "power_w": round(sum(means_of_nodes["power_w"]), 3) if means_of_nodes["power_w"] else None,
        "hosts": hosts,
    }


def read_samples(path: Path) -> list[MeanReadings]:
    """Read a node's samples in order of time. While a requeued job waited, there are no samples."""
    lines = _records(path)
    return [
        MeanReadings(previous["time"], line["time"], dict(_figures(line)))
        for previous, line in pairwise(lines)
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
    # The counters tell of all the time since the sample before, NVML's rate of a second at most.
    used = [use for gpu in gpus if (use := gpu.get(ACTIVE, gpu["util"])) is not None]
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
            # A run that was killed may leave half a line at the end.
            if number < len(lines):
                raise UsageError(f"{path}:{number} is not JSON: {exc}", code="not-json") from exc
    return records


def _mean(numbers: Sequence[float]) -> float | None:
    return round(sum(numbers) / len(numbers), 3) if numbers else None
