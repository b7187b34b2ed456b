"""Work ahead in a thread."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _End:
    error: BaseException | None = None


def prefetched(items: Iterator[T], depth: int, begin: Callable[[], None] = lambda: None) -> Iterator[T]:
    """The same items, up to ``depth`` of them made ahead by a thread, which ``begin`` is called in first.

    What goes wrong in the thread is raised here, in its place among the items. The thread ends with the last
    item, or when this iterator is closed.
    """
    if not depth:
        yield from items
        return
    ready: queue.Queue[T | _End] = queue.Queue(depth)
    closed = threading.Event()

    def work() -> None:
        try:
            begin()
            for item in items:
                ready.put(item)
                if closed.is_set():
                    return
            ready.put(_End())
        except BaseException as exc:
            ready.put(_End(exc))

    thread = threading.Thread(target=work, name="prefetch", daemon=True)
    thread.start()
    try:
        while not isinstance(item := ready.get(), _End):
            yield item
        if item.error:
            raise item.error
    finally:
        closed.set()
        while thread.is_alive():  # it may wait for room
            try:
                ready.get(timeout=0.05)
            except queue.Empty:
                continue
        thread.join()
