"""`rehearse` on a real cluster: programs that keep the contract of restarts.md, or break it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.messages import condition

FAULTS = ("rank-killed", "rank-frozen", "time-limit", "checkpoint-torn", "node-killed")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
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


# They include PyTorch, so that all programs share an environment of several GiB.
LIBRARIES = ("--requirements", EXAMPLES / "requirements-lightning.txt")
MODEL = "--hidden 1024 --global-batch-size 256 --epochs 100 --save-interval 120".split()


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("words", "arguments", "verdicts"),
    [
        (("train",), MODEL, "survives survives survives survives survives"),
        (
            (EXAMPLES / "torch_ddp.py", *LIBRARIES),
            ("--epochs", "60", "--checkpoint-seconds", "1"),
            "survives " * 5,
        ),
        (
            (EXAMPLES / "lightning_mlp.py", *LIBRARIES),
            ("--epochs", "60", "--checkpoint-seconds", "1"),
            "survives " * 5,
        ),
        ((PROGRAMS / "plain_ddp.py", *LIBRARIES), (), "restarts-from-zero " * 5),
        ((COUNTS,), ("--breaks", "hangs"), "hangs " * 5),
        ((COUNTS,), ("--breaks", "verifies"), "survives survives survives differs survives"),
    ],
    ids=["train", "ddp", "lightning", "plain-ddp", "hangs", "torn"],
)
def test_rehearse_of_a_program_finds_each_verdict(
    cluster: Cluster, words: tuple[str | Path, ...], arguments: tuple[str, ...], verdicts: str
) -> None:
    rc = 0 if set(verdicts.split()) == {"survives"} else 7
    answer = rehearsed(cluster, *words, "--nodes", "2", "--", *arguments, rc=rc)
    found = [answer["faults"][fault]["verdict"] for fault in FAULTS]
    assert found == verdicts.split(), answer["faults"]
