"""Tensor parallelism: a program that compares divided models with whole ones."""

from __future__ import annotations

from collections.abc import Callable
from subprocess import CompletedProcess


def test_models_divided_by_2_and_by_4_are_whole_ones(program: Callable[..., CompletedProcess[str]]) -> None:
    answer = program(4, "tensor.py")
    assert answer.returncode == 0, answer.stderr
