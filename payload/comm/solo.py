"""A group of one rank: what all parallel code runs on where there is nothing to share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from payload.comm.base import Communicator, Done, Pending
from payload.device import Array

T = TypeVar("T")


class Solo(Communicator):
    """A communicator of one: all sums are what they were."""

    rank = 0
    size = 1
    library = "none"
    bytes_sent = 0

    def iallreduce(self, array: Array) -> Pending:  # noqa: ARG002
        return Done()

    def ireduce_scatter(self, array: Array, out: Array) -> Pending:
        if out is not array:
            out[...] = array
        return Done()

    def iallgather_into(self, part: Array, out: Array) -> Pending:
        return self.ireduce_scatter(part, out)

    def broadcast(self, array: Array, root: int = 0) -> None:
        """All have it already."""

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:
        raise NotImplementedError("a rank alone has nobody to send to")

    def recv(self, out: Array, source: int, tag: int = 0) -> None:
        raise NotImplementedError("a rank alone has nobody to receive from")

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def allgather(self, value: T) -> list[T]:
        return [value]

    def exchange(self, value: T, dest: int, source: int) -> T:  # noqa: ARG002
        return value

    def barrier(self) -> None:
        """Nobody to wait for."""
