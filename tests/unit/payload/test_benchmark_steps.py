"""The comparison with PyTorch in benchmarks/: a fault ends it, and its message reaches the user."""

from __future__ import annotations

import math

import pytest

from benchmarks.support import ranks
from benchmarks.support.steps import STEPS, reject_disagreement

FALLING = [5.0 - 0.1 * step for step in range(3 * STEPS)]


def test_failed_rank_shows_its_exception(capfd: pytest.CaptureFixture[str]) -> None:
    """Also after PyTorch has replaced the hook by which an exception is shown."""
    with pytest.raises(SystemExit):
        ranks.run("benchmarks.support.steps", "no-such-model", 1, ranks=1)
    assert "KeyError: 'no-such-model'" in capfd.readouterr().err


@pytest.mark.parametrize(("step", "difference"), [(1, 2e-6), (10, 2e-5), (11, 0.04), (30, 0.1)])
def test_losses_that_differ_by_rounding_agree(step: int, difference: float) -> None:
    theirs = FALLING.copy()
    theirs[step - 1] += difference
    reject_disagreement(FALLING, theirs)


@pytest.mark.parametrize(
    ("step", "difference"), [(1, 1e-5), (10, 1e-4), (11, 0.06), (30, 0.2), (30, math.nan)]
)
def test_losses_that_differ_by_more_are_rejected(step: int, difference: float) -> None:
    theirs = FALLING.copy()
    theirs[step - 1] += difference
    with pytest.raises(AssertionError) as caught:
        reject_disagreement(FALLING, theirs)
    assert str(caught.value).startswith(f"step {step}: ")
