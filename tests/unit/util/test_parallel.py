"""Tests of parallel calls: their number, and the failure of a call."""

from __future__ import annotations

import threading

import pytest

from clusterctl.util.process import parallel_map


def test_parallel_map_stops_after_the_first_error() -> None:
    """The caller then releases its lock, so running calls are waited for and no further call
    starts.
    """
    begun = threading.Event()
    ended = []
    before = threading.active_count()

    def call(number: int) -> None:
        if number == 0:
            assert begun.wait(30)
            raise LookupError(number)
        begun.set()
        threading.Event().wait(0.5)  # longer than the error takes to be seen
        ended.append(number)

    with pytest.raises(LookupError):
        parallel_map(range(100), call, most=2)
    assert ended  # two of them may end in either order
    assert sorted(ended) == list(range(1, len(ended) + 1))
    assert len(ended) < 99
    assert threading.active_count() == before


def test_parallel_map_limits_the_calls_at_once() -> None:
    together = threading.Barrier(3)
    assert parallel_map(range(9), lambda number: (together.wait(30), number)[1], most=3) == list(
        range(9)
    )
    with pytest.raises(threading.BrokenBarrierError):
        parallel_map(range(3), lambda _: together.wait(0.2), most=2)
