"""For how long training stands still for a checkpoint: if it is written beside, and if it is waited
for.
"""

from __future__ import annotations

import json
import statistics
import tempfile
from pathlib import Path

from benchmarks.support.ranks import run
from benchmarks.support.rounds import Measured, measure

_RANKS = 2
_TRAIN = (
    "train --hidden 4096,4096 --iterations 64 --save-interval 16 --keep 1"  # 136 MB a checkpoint
)


def stalls(rounds: int = 3) -> Measured:
    """Seconds a checkpoint, the median over a run's."""
    runs: dict[str, list[list[float]]] = {"async": [], "sync": []}

    def side(save: str) -> float:
        took = _stalls(save)
        runs[save].append(took)
        return statistics.median(took)

    measured = measure(
        f"training stands still for a checkpoint of 136 MB, {_RANKS} ranks",
        rounds,
        aim="async at most a tenth of sync: 10 or more",
        written_beside=lambda: side("async"),
        waited_for=lambda: side("sync"),
    )
    for save, taken in runs.items():
        all_ms = " | ".join(" ".join(f"{seconds * 1e3:.0f}" for seconds in run) for run in taken)
        measured.notes.append(f"{save}, ms of each checkpoint: {all_ms}")
    return measured


def _stalls(save: str) -> list[float]:
    with tempfile.TemporaryDirectory() as out:
        run("payload", *_TRAIN.split(), "--save", save, "--out", out, ranks=_RANKS)
        lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    took = [one["stall_s"] for one in map(json.loads, lines) if one["kind"] == "checkpoint"]
    return took[:-1]  # the run ends with the last one, which is always waited for
