"""What every transport between ranks offers; a group of one rank, and what wrappers share."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from payload.device.base import Array
from payload.errors import PayloadError
from payload.node.host import hostname

T = TypeVar("T")


class Pending(Protocol):
    """A collective or a message under way. Its arrays must be left alone until it is done."""

    def test(self) -> bool:
        """Move it on as far as goes without waiting, and tell whether it is done."""

    def wait(self) -> None:
        """Until it is done: on a GPU at the latest for what is put on the current stream afterwards."""


class Request(Protocol):
    """What mpi4py gives for a message or collective under way."""

    def Test(self) -> bool: ...  # noqa: N802

    def Wait(self) -> object: ...  # noqa: N802


class Done:
    """A ``Pending`` of what is done already."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        """There is nothing to wait for."""


class Communicator(Protocol):
    """A group of ranks. All must call its methods together, and start what is non-blocking in one order.

    Arrays are C-contiguous and on the device. A non-blocking call gives the result of the blocking one.
    What has 16 bits is summed in float32, and rounded once; by NCCL, at every hop. A rank that blocks in one
    communicator does not move on what is under way in others.
    """

    rank: int  # this process, 0 to ``size - 1``
    size: int  # how many ranks there are

    @property
    def bytes_sent(self) -> int:
        """By this rank so far: counted where the algorithm is ours; MPI's and NCCL's own count as rings."""

    @property
    def library(self) -> str:
        """Name and version of what carries the messages."""

    def allreduce(self, array: Array) -> None:
        """Replace an array on every rank with its sum over all ranks."""
        self.iallreduce(array).wait()

    def iallreduce(self, array: Array) -> Pending: ...

    def reduce_scatter(self, array: Array, out: Array) -> None:
        """Sum (size · n,) over all ranks, and give each rank its part of the sum: ``out`` (n,).

        ``out`` may be this rank's own part of ``array``; the rest of ``array`` is undefined afterwards.
        """
        self.ireduce_scatter(array, out).wait()

    def ireduce_scatter(self, array: Array, out: Array) -> Pending: ...

    def allgather_into(self, part: Array, out: Array) -> None:
        """Join each rank's ``part`` (n,) in order of rank: ``out`` (size · n,).

        ``part`` may be this rank's own place in ``out``.
        """
        self.iallgather_into(part, out).wait()

    def iallgather_into(self, part: Array, out: Array) -> Pending: ...

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replace an array on every rank with that of ``root``."""

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:
        """Send an array to one rank; it may be changed once the result is done."""

    def recv(self, out: Array, source: int, tag: int = 0) -> None:
        """Fill an array with what one rank sent."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """The sums of a few numbers over all ranks, added in order of rank and so the same everywhere."""

    def allgather(self, value: T) -> list[T]:
        """Every rank's value (any picklable, small), in order of rank, on every rank."""

    def barrier(self) -> None:
        """Wait until every rank is here."""


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

    def barrier(self) -> None:
        """Nobody to wait for."""


Inner = TypeVar("Inner", bound=Communicator)


def _of_inner(name: str) -> Callable[..., Any]:
    return lambda wrapper, *arguments: getattr(wrapper.inner, name)(*arguments)


class CommunicatorWrapper(Communicator, Generic[Inner]):
    """A communicator that does all as another one does, but for what its subclass does otherwise."""

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.rank, self.size = inner.rank, inner.size

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    @property
    def library(self) -> str:
        return self.inner.library

    iallreduce = _of_inner("iallreduce")
    ireduce_scatter = _of_inner("ireduce_scatter")
    iallgather_into = _of_inner("iallgather_into")
    broadcast = _of_inner("broadcast")
    isend = _of_inner("isend")
    recv = _of_inner("recv")
    sum = _of_inner("sum")
    allgather = _of_inner("allgather")
    barrier = _of_inner("barrier")


def on_all_ranks(comm: Communicator, act: Callable[[], T]) -> T:
    """Do on every rank what may fail on some, such as opening a file, and fail on all of them alike.

    Raises:
        PayloadError: of the first failed rank's kind and code, naming it and its host, on every rank.
    """
    result: list[T] = []
    failure: PayloadError | None = None
    try:
        result.append(act())
    except PayloadError as exc:
        failure = exc
    mine = failure and (type(failure), f"rank {comm.rank} on {hostname()}: {failure}", failure.code)
    failures = [theirs for theirs in comm.allgather(mine) if theirs]
    if failures:
        kind, message, code = failures[0]
        others = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        raise kind(message + others, code=code) from failure
    return result[0]
