"""Training with ZeRO on several ranks."""

from __future__ import annotations

from tests.integration.payload.conftest import Runner


def test_zero_stages_take_the_steps_of_one_rank(program: Runner) -> None:
    program(3, "zero.py")


def test_run_may_end_after_any_step(program: Runner) -> None:
    program(2, "leave.py", "3", launched=True)
