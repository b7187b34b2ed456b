"""What wrappers of a communicator share: what they do not change goes through."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, TypeVar

from payload.comm.base import Communicator, Pending
from payload.device import Array

T = TypeVar("T")
Inner = TypeVar("Inner", bound=Communicator)


class Through(Communicator, Generic[Inner]):
    """A communicator that does all as another one does."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    @property
    def library(self) -> str:
        return self.inner.library

    def iallreduce(self, array: Array) -> Pending:
        return self.inner.iallreduce(array)

    def ireduce_scatter(self, array: Array, out: Array) -> Pending:
        return self.inner.ireduce_scatter(array, out)

    def iallgather_into(self, part: Array, out: Array) -> Pending:
        return self.inner.iallgather_into(part, out)

    def broadcast(self, array: Array, root: int = 0) -> None:
        self.inner.broadcast(array, root)

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:
        return self.inner.isend(array, dest, tag)

    def recv(self, out: Array, source: int, tag: int = 0) -> None:
        self.inner.recv(out, source, tag)

    def sum(self, values: Sequence[float]) -> list[float]:
        return self.inner.sum(values)

    def allgather(self, value: T) -> list[T]:
        return self.inner.allgather(value)

    def exchange(self, value: T, dest: int, source: int) -> T:
        return self.inner.exchange(value, dest, source)

    def barrier(self) -> None:
        self.inner.barrier()
