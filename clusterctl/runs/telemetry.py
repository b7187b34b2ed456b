"""Charts of the nodes' telemetry during a run, and detection of a slow node (straggler)."""

from __future__ import annotations

import json
import math
import os
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

from clusterctl.runs.page import Chart, Series, thinned
from clusterctl.runs.series import is_number
from clusterctl.transport.remote_open import open_file

_FOLDER: Final = "telemetry"
_MOST_NODES: Final = 16
_MAX_LINE: Final = 1 << 16
_MAX_LINES: Final = 200_000
_MIB: Final = 1 << 20
_CHARTS: Final = {
    "CPU": "%",
    "Memory": "GiB",
    "GPU": "%",
    "GPU memory": "GiB",
    "Network received": "MiB/s",
    "Network sent": "MiB/s",
    "Power of GPUs": "W",
}
# A straggler takes this much longer than the median of the other ranks, and is the slowest so often that the
# probability for an equally fast node would be below `_BY_CHANCE`.
_SLOWER: Final = 1.2
_BY_CHANCE: Final = 1e-4


def node_charts(folder: Path, nodes: Sequence[str]) -> tuple[list[Chart], list[str]]:
    """Return charts of CPU, memory, network and GPUs, with a line per node, and messages on missing data."""
    shown = nodes[:_MOST_NODES]
    samples = {node: list(_samples(folder, node)) for node in shown}
    silent_nodes = [node for node in shown if not samples[node]]
    missing = [f"the telemetry of {', '.join(silent_nodes)}"] if silent_nodes else []
    if len(nodes) > len(shown):
        missing.append(f"in the charts, {len(nodes) - len(shown)} more nodes")
    first = min((time for rows in samples.values() for time, _ in rows), default=0.0)
    charts = []
    for title, unit in _CHARTS.items():
        series = []
        for node, rows in samples.items():
            points = [((time - first) / 60, values[title]) for time, values in rows if title in values]
            if points:
                series.append(Series(node, thinned(points)))
        if series:
            charts.append(Chart(title, series, "minutes", unit))
    return charts, missing


def _samples(folder: Path, node: str) -> Iterator[tuple[float, Mapping[str, float]]]:
    """Yield (Unix time, {chart title: value}) for each sample of a node. Skip invalid lines of the file."""
    # ValueError: the node's name has a null byte.
    with suppress(OSError, ValueError):
        fd = open_file(os.fsencode(folder), os.fsencode(f"{_FOLDER}/{node}.jsonl"))
        with os.fdopen(fd, "rb") as file:
            for _ in range(_MAX_LINES):
                if not (raw := file.readline(_MAX_LINE)):
                    return
                with suppress(ValueError, RecursionError):
                    line = json.loads(raw)
                    is_sample = isinstance(line, dict) and line.get("kind") == "sample"
                    if is_sample and is_number(time := line.get("time")):
                        yield float(time), _figures(line)


def _figures(line: Mapping[str, Any]) -> dict[str, float]:
    values: dict[str, list[float]] = defaultdict(list)

    def add(title: str, value: Any, unit: float = 1.0) -> None:
        if is_number(value):
            values[title].append(value / unit)

    add("CPU", line.get("cpu_percent"))
    add("Memory", line.get("memory_used_mib"), 1024)
    for title, key in (("Network received", "net_rx_bytes_per_s"), ("Network sent", "net_tx_bytes_per_s")):
        links = line.get(key)
        for value in links.values() if isinstance(links, dict) else ():
            add(title, value, _MIB)
    gpus = line.get("gpus")
    for gpu in gpus if isinstance(gpus, list) else ():
        if isinstance(gpu, dict):
            add("GPU", gpu.get("util"))
            add("GPU memory", gpu.get("mem_used_mib"), 1024)
            add("Power of GPUs", gpu.get("power_w"))
    means = {"CPU", "GPU"}
    return {title: sum(parts) / (len(parts) if title in means else 1) for title, parts in values.items()}


def compare_ranks(
    means: Sequence[float], slowest: Sequence[float], windows: int, hosts: Sequence[str]
) -> str:
    """Return a sentence that compares the ranks and names the straggler: a node or, on one node, a rank.

    means: each rank's milliseconds of computing per step. windows: the number of windows of ten steps.
    slowest: for each rank, the number of windows in which this rank was slowest. hosts: each rank's node. A
    straggler is named only if chance is an improbable cause (Chernoff-Hoeffding bound exp(-n KL)).
    """
    names = hosts if len({*hosts}) > 1 else [f"rank {rank}" for rank in range(len(means))]
    ranks: dict[str, list[int]] = defaultdict(list)
    for rank, name in enumerate(names):
        ranks[name].append(rank)
    worst = max(ranks, key=lambda name: sum(slowest[rank] for rank in ranks[name]))
    share = sum(slowest[rank] for rank in ranks[worst]) / windows
    fair = len(ranks[worst]) / len(means)
    worst_mean = sum(means[rank] for rank in ranks[worst]) / len(ranks[worst])
    other_median = statistics.median(means[rank] for name in ranks if name != worst for rank in ranks[name])
    if worst_mean >= _SLOWER * other_median and windows * _divergence(share, fair) >= -math.log(_BY_CHANCE):
        return (
            f"{worst} is a straggler: it computed {worst_mean:.5g} ms per step, the other ranks "
            f"{other_median:.5g} ms; it was slowest in {100 * share:.0f} % of {windows} windows of ten steps"
        )
    too_few = windows * _divergence(1.0, fair) < -math.log(_BY_CHANCE)
    verdict = "too few steps to detect a straggler" if too_few else "no node is a straggler"
    return f"ranks computed {min(means):.5g} to {max(means):.5g} ms per step; {verdict}"


def _divergence(share: float, fair: float) -> float:
    """Return the KL divergence of Bernoulli(share) from Bernoulli(fair); 0 if ``share`` <= ``fair``."""
    parts = ((share, fair), (1 - share, 1 - fair))
    return sum(a * math.log(a / b) for a, b in parts if a > 0) if share > fair else 0.0
