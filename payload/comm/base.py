"""What every transport between ranks offers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, TypeVar

from payload.device import Array
from payload.errors import PayloadError
from payload.host import hostname

T = TypeVar("T")


class Communicator(Protocol):
    """A group of ranks. All of them must call its methods together."""

    @property
    def library(self) -> str:
        """Name and version of what carries the messages."""

    @property
    def rank(self) -> int:
        """This process, 0 to ``size - 1``."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    def allreduce(self, array: Array) -> None:
        """Replace a C-contiguous device array on every rank with its sum over all ranks."""

    def broadcast(self, array: Array) -> None:
        """Replace a C-contiguous device array on every rank with rank 0's."""

    def allgather(self, value: T) -> list[T]:
        """Every rank's value (any picklable, small), in order of rank, on every rank."""

    def exchange(self, value: T, dest: int, source: int) -> T:
        """Send a value to one rank while receiving one from another."""


def total(comm: Communicator, value: float) -> float:
    """The sum of one number over all ranks, added in order of rank and so the same everywhere."""
    return sum(comm.allgather(value))


def together(comm: Communicator, act: Callable[[], T]) -> T:
    """Do on every rank what may fail on some, such as opening a file, and fail on all of them alike.

    Raises:
        PayloadError: of the first failed rank's kind, naming it and its host, on every rank.
    """
    result: list[T] = []
    failure: PayloadError | None = None
    try:
        result.append(act())
    except PayloadError as exc:
        failure = exc
    mine = failure and (type(failure), f"rank {comm.rank} on {hostname()}: {failure}")
    failures = [theirs for theirs in comm.allgather(mine) if theirs]
    if failures:
        kind, message = failures[0]
        others = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        raise kind(message + others) from failure
    return result[0]
