"""LAMB on several ranks takes the steps of one."""

from __future__ import annotations

from tests.integration.payload.conftest import Runner


def test_lamb_steps_of_parts_are_those_of_the_whole(program: Runner) -> None:
    program(4, "lamb_parts.py")
