"""Charts of what the nodes of a run did over time, from telemetry/<host>.jsonl."""

from __future__ import annotations

import json
import os
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
# What is charted: title -> unit.
_CHARTS: Final = {
    "CPU": "%",
    "Memory": "GiB",
    "GPU": "%",
    "GPU memory": "GiB",
    "Network received": "MiB/s",
    "Network sent": "MiB/s",
    "Power of GPUs": "W",
}


def node_charts(folder: Path, nodes: Sequence[str]) -> tuple[list[Chart], list[str]]:
    """The charts, a line for each node, over the minutes since the first sample; and what is missing."""
    shown = nodes[:_MOST_NODES]
    samples = {node: list(_samples(folder, node)) for node in shown}
    missing = (
        [f"the telemetry of {', '.join(gone)}"] if (gone := [n for n in shown if not samples[n]]) else []
    )
    if len(nodes) > len(shown):
        missing.append(f"in the charts, {len(nodes) - len(shown)} more nodes")
    first = min((time for found in samples.values() for time, _ in found), default=0.0)
    charts = []
    for title, unit in _CHARTS.items():
        series = []
        for node, found in samples.items():
            points = [((time - first) / 60, values[title]) for time, values in found if title in values]
            if points:
                series.append(Series(node, thinned(points)))
        if series:
            charts.append(Chart(title, series, "minutes", unit))
    return charts, missing


def _samples(folder: Path, node: str) -> Iterator[tuple[float, Mapping[str, float]]]:
    """The samples of a node: Unix seconds, and figure -> value; lines that are none are left out."""
    with suppress(OSError, ValueError):  # ValueError: a null byte in the node's name
        fd = open_file(os.fsencode(folder), os.fsencode(f"{_FOLDER}/{node}.jsonl"))
        with os.fdopen(fd, "rb") as file:
            for _ in range(_MAX_LINES):
                if not (raw := file.readline(_MAX_LINE)):
                    return
                with suppress(ValueError, RecursionError):
                    line = json.loads(raw)
                    if (
                        isinstance(line, dict)
                        and line.get("kind") == "sample"
                        and is_number(line.get("time"))
                    ):
                        yield float(line["time"]), _figures(line)


def _figures(line: Mapping[str, Any]) -> dict[str, float]:
    """The figures of a sample, by the titles of their charts."""
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
    return {title: sum(found) / (len(found) if title in means else 1) for title, found in values.items()}
