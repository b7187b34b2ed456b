"""The micro-batches that a pipeline of ranks keeps."""

from __future__ import annotations

from tests.integration.payload.conftest import Runner


def test_stage_has_at_most_as_many_micro_batches_as_stages(program: Runner) -> None:
    program(4, "flight.py")
