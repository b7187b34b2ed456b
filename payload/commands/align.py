"""What the nodes did during each iteration: a run's metrics and its telemetry, lined up by time.

A sample of telemetry stands for the time since the one before it. An iteration takes from each the part of
that time that lies within the iteration: means are weighted by it. Iterations shorter than the interval
between samples so share one. Standard library only.
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
    spans = [(one["time"] - one["seconds"], one["time"]) for one in iterations]
    with JsonLines(config.folder / "aligned.jsonl") as file:
        for one, span in zip(iterations, spans, strict=True):
            file.write("iteration", step=one["step"], start=span[0], end=span[1], **averages([span], nodes))
    seconds = sum(one["seconds"] for one in iterations)
    answer(iterations=len(iterations), seconds=seconds, **averages(spans, nodes))
    return 0


def averages(spans: Iterable[tuple[float, float]], nodes: Mapping[str, Sequence[Sample]]) -> Record:
    """Return the figures of some nodes over some spans of time, each weighted by how long it held.

    Returns:
        Means by node; over all nodes the mean use of cores and GPUs, and the power of all GPUs together.
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
        host: {name: round(integral / seconds[host][name], 3) for name, integral in found.items()}
        for host, found in totals.items()
    }
    known = {
        name: [means[name] for means in hosts.values() if name in means]
        for name in ("cpu_percent", "gpu_util", "power_w")
    }
    return {
        "cpu_percent": _mean(known["cpu_percent"]),
        "gpu_util": _mean(known["gpu_util"]),
        "power_w": round(sum(known["power_w"]), 3) if known["power_w"] else None,
        "hosts": hosts,
    }


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
