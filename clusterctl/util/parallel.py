"""Asks many at once, each in a thread. Ctrl-C does not wait for those that do not answer."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Final, TypeVar

Q = TypeVar("Q")
A = TypeVar("A")

_MOST: Final = 32


def parallel_map(questions: Sequence[Q], ask: Callable[[Q], A]) -> list[A]:
    """What ``ask`` says to each, in their order. What it raises for one of them is raised, and ends it all.

    An executor would have us wait for its threads, also on the way out.
    """
    todo: queue.SimpleQueue[int] = queue.SimpleQueue()
    done: queue.SimpleQueue[tuple[int, A | None, BaseException | None]] = queue.SimpleQueue()
    over = threading.Event()
    for number in range(len(questions)):
        todo.put(number)

    def work() -> None:
        while not over.is_set():
            try:
                number = todo.get_nowait()
            except queue.Empty:
                return
            try:
                done.put((number, ask(questions[number]), None))
            except BaseException as exc:  # raised where the answers are taken
                done.put((number, None, exc))

    for _ in range(min(_MOST, len(questions))):
        threading.Thread(target=work, daemon=True).start()
    answers: dict[int, A | None] = {}
    try:
        for _ in questions:
            number, answer, error = done.get()
            if error is not None:
                raise error
            answers[number] = answer
    finally:
        over.set()
    return [answers[number] for number in range(len(questions))]  # type: ignore[misc]  # all are there
