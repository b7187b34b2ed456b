"""Training with ZeRO on several ranks."""

from __future__ import annotations

import pytest

from tests.integration.payload.conftest import Runner
from tests.support.sweeps import in_sweep


@pytest.mark.parametrize("ranks", [3, *in_sweep(1, 2)])
def test_zero_stages_take_the_steps_of_one_rank(program: Runner, ranks: int) -> None:
    program(ranks, "zero.py")


@pytest.mark.parametrize("zero", [*in_sweep("1"), "3"])
def test_run_may_end_after_any_step(program: Runner, zero: str) -> None:
    program(2, "leave.py", zero, launched=True)
