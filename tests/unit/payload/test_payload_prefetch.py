"""Batches that a thread makes ahead."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from payload.data.loader import prefetched


def _numbers(broken_at: int) -> Iterator[int]:
    for number in range(10):
        if number == broken_at:
            raise ZeroDivisionError("broken")
        yield number


@pytest.mark.parametrize("depth", [0, 1, 3, 20])
def test_prefetched_items_and_errors_arrive_in_order(depth: int) -> None:
    assert list(prefetched(_numbers(99), depth)) == list(range(10))
    items = prefetched(_numbers(4), depth)
    assert [next(items) for _ in range(4)] == [0, 1, 2, 3]
    with pytest.raises(ZeroDivisionError):
        next(items)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetch_thread_works_ahead_and_ends_when_closed() -> None:
    made: list[int] = []
    threads: set[str] = set()

    def make() -> Iterator[int]:
        for number in range(1000):
            made.append(number)
            yield number

    items = prefetched(make(), 3, lambda: threads.add(threading.current_thread().name))
    assert next(items) == 0
    assert next(items) == 1
    items.close()  # type: ignore[attr-defined]
    assert 2 <= len(made) < 10
    assert threads == {"prefetch_0"}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("prefetch")]


def test_prefetch_thread_that_cannot_start_raises() -> None:
    def begin() -> None:
        raise OSError("no device")

    with pytest.raises(OSError, match="no device"):
        next(prefetched(iter([1]), 2, begin))
