"""`rehearse` on a real cluster: programs that keep the contract of restarts.md, or break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.support.cluster import Cluster
from tests.support.messages import condition

ROOT = Path(__file__).resolve().parents[2]
PROGRAMS = ROOT / "tests" / "e2e" / "rehearsed"
COUNTS = PROGRAMS / "counts.py"


def rehearsed(cluster: Cluster, *words: str | Path, rc: int) -> dict[str, Any]:
    """Return the answer, and the verdicts by fault."""
    answer = cluster("-o", "json", "rehearse", *words, rc=rc, timeout_s=1700).json
    return {**answer, "faults": {fault["fault"]: fault for fault in answer["faults"]}}


def test_rehearse_notices_a_checkpoint_that_is_not_verified(cluster: Cluster) -> None:
    words = (COUNTS, "--nodes", "2", "--fault", "checkpoint-torn")
    program = ("--steps", "80", "--save-interval", "20", "--breaks", "verifies")
    answer = rehearsed(cluster, *words, "--", *program, rc=7)
    torn = answer["faults"]["checkpoint-torn"]
    assert (torn["verdict"], torn["identical"]) == ("differs", False)
    assert [line["line"] for line in torn["missing"]] == ["verifies"]
    assert len(answer["undisturbed"]["checkpoints"]) == 4
    assert [condition(failure) for failure in answer["failures"]] == ["job-failed/rehearsal"]
    assert answer["best_interval_s"] > answer["save_s"] > 0
