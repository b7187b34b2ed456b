"""Calls in parallel threads. Ctrl-C does not wait for those that hang."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Final, TypeVar

from clusterctl.errors import ClusterctlError

T = TypeVar("T")
R = TypeVar("R")

_MAX_THREADS: Final = 32


def on_each(
    hosts: Iterable[str], ask: Callable[[str], R], *, most: int = _MAX_THREADS
) -> tuple[dict[str, R], dict[str, ClusterctlError]]:
    """What every host answered, and how some failed: at most ``most`` at once, and none stops the others."""

    def answer(host: str) -> R | ClusterctlError:
        try:
            return ask(host)
        except ClusterctlError as exc:
            return exc

    names = list(hosts)
    answers = dict(zip(names, parallel_map(names, answer, most=most), strict=True))
    failed = {host: one for host, one in answers.items() if isinstance(one, ClusterctlError)}
    return {host: one for host, one in answers.items() if not isinstance(one, ClusterctlError)}, failed


def parallel_map(items: Sequence[T], function: Callable[[T], R], *, most: int = _MAX_THREADS) -> list[R]:
    """The results of the calls in their order. The first exception is raised, and no further call starts.

    concurrent.futures would wait for its threads, also when the interpreter exits.
    """
    pending: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, R | None, BaseException | None]] = queue.SimpleQueue()
    stopped = threading.Event()
    for number in range(len(items)):
        pending.put(number)

    def work() -> None:
        while not stopped.is_set():
            try:
                number = pending.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, function(items[number]), None))
            except BaseException as exc:  # raised again in the caller
                done.put((number, None, exc))

    for _ in range(min(most, len(items))):
        threading.Thread(target=work, daemon=True).start()
    results: dict[int, R | None] = {}
    try:
        for _ in items:
            number, result, error = done.get()
            if error is not None:
                raise error
            results[number] = result
    finally:
        stopped.set()
    return [results[number] for number in range(len(items))]  # type: ignore[misc]  # complete here
