"""The comparison with PyTorch in benchmarks/: a fault ends it, and its message reaches the user."""

from __future__ import annotations

import math

import pytest

from benchmarks.support.steps import STEPS, reject_disagreement

FALLING = [5.0 - 0.1 * step for step in range(3 * STEPS)]


@pytest.mark.parametrize(
    ("step", "rounding", "more"),
    [(1, 2e-6, 1e-5), (10, 2e-5, 1e-4), (11, 0.04, 0.06), (30, 0.1, math.nan)],
)
def test_losses_may_differ_by_rounding_only(step: int, rounding: float, more: float) -> None:
    pytorch_losses = FALLING.copy()
    pytorch_losses[step - 1] += rounding
    reject_disagreement(FALLING, pytorch_losses)
    pytorch_losses[step - 1] += more
    with pytest.raises(AssertionError) as caught:
        reject_disagreement(FALLING, pytorch_losses)
    assert str(caught.value).startswith(f"step {step}: ")
