"""The interface of every communicator, a communicator of one rank, and a base class for
wrappers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, Protocol, TypeVar

from payload.device.base import Array
from payload.errors import PayloadError
from payload.node.host import hostname

T = TypeVar("T")


class Pending(Protocol):
    """A collective or message in progress. The caller must not use its arrays until the operation
    is done.
    """

    def test(self) -> bool:
        """Advance the operation as far as possible without blocking, and return whether it is
        done.
        """

    def wait(self) -> None:
        """Block until the operation is done. On a GPU only the current stream blocks, not the
        host.
        """


class MpiRequest(Protocol):
    """A request of mpi4py for a message or collective in progress."""

    def Test(self) -> bool: ...  # noqa: N802

    def Wait(self) -> object: ...  # noqa: N802


class CompletedOperation:
    """A ``Pending`` that is already done."""

    def test(self) -> bool:
        return True

    def wait(self) -> None:
        """Return at once."""


class Communicator(Protocol):
    """A group of ranks. All ranks must call its methods in the same order, also the non-blocking
    methods.

    Arrays are C-contiguous and on the device. A non-blocking call gives the same result as the
    blocking call. Sums of 16-bit numbers are computed in float32 and rounded once (by NCCL, at
    every hop). While a rank blocks in a communicator, the rank's operations in other communicators
    do not advance.
    """

    rank: int
    """This process: 0 to ``size - 1``."""
    size: int

    @property
    def bytes_sent(self) -> int:
        """Bytes that this rank has sent. For sums by MPI or NCCL, a ring algorithm is assumed."""

    @property
    def library(self) -> str:
        """Name and version of the library that sends the messages."""

    def allreduce(self, array: Array) -> None:
        """Replace an array on every rank with its sum over all ranks."""
        self.iallreduce(array).wait()

    def iallreduce(self, array: Array) -> Pending:
        """Start an ``allreduce``."""

    def reduce_scatter(self, array: Array, out: Array) -> None:
        """Sum ``array`` (size · n,) over all ranks; each rank gets its part of the sum in ``out``
        (n,).

        ``out`` may be this rank's own part of ``array``; the rest of ``array`` is undefined
        afterwards.
        """
        self.ireduce_scatter(array, out).wait()

    def ireduce_scatter(self, array: Array, out: Array) -> Pending:
        """Start a ``reduce_scatter``."""

    def allgather_into(self, part: Array, out: Array) -> None:
        """Concatenate each rank's ``part`` (n,), in order of rank, in ``out`` (size · n,) on every
        rank.

        ``part`` may be this rank's own part of ``out``.
        """
        self.iallgather_into(part, out).wait()

    def iallgather_into(self, part: Array, out: Array) -> Pending:
        """Start an ``allgather_into``."""

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Replace an array on every rank with the array of rank ``root``."""

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:
        """Start sending an array to rank ``dest``. The array must not change until the operation is
        done.
        """

    def recv(self, out: Array, source: int, tag: int = 0) -> None:
        """Receive an array from rank ``source``."""

    def sum(self, values: Sequence[float]) -> list[float]:
        """Sum each number over all ranks. Adds in order of rank, so that all ranks get the same
        result.
        """

    def allgather(self, value: T) -> list[T]:
        """Return a list, in order of rank, of the ranks' values, which must be small and
        picklable.
        """

    def barrier(self) -> None:
        """Wait until every rank has called ``barrier``."""


class Solo(Communicator):
    """A communicator of one rank. The sum over all ranks is the input itself."""

    rank = 0
    size = 1
    library = "none"
    bytes_sent = 0

    def iallreduce(self, array: Array) -> Pending:  # noqa: ARG002
        return CompletedOperation()

    def ireduce_scatter(self, array: Array, out: Array) -> Pending:
        if out is not array:
            out[...] = array
        return CompletedOperation()

    def iallgather_into(self, part: Array, out: Array) -> Pending:
        return self.ireduce_scatter(part, out)

    def broadcast(self, array: Array, root: int = 0) -> None:
        """Do nothing: the only rank already has the array."""

    def isend(self, array: Array, dest: int, tag: int = 0) -> Pending:
        raise NotImplementedError("a communicator of one rank has no rank to send to")

    def recv(self, out: Array, source: int, tag: int = 0) -> None:
        raise NotImplementedError("a communicator of one rank has no rank to receive from")

    def sum(self, values: Sequence[float]) -> list[float]:
        return list(values)

    def allgather(self, value: T) -> list[T]:
        return [value]

    def barrier(self) -> None:
        """Return at once: there are no other ranks."""


Inner = TypeVar("Inner", bound=Communicator)


def _delegate(name: str) -> Callable[..., Any]:
    return lambda wrapper, *arguments: getattr(wrapper.inner, name)(*arguments)


class CommunicatorWrapper(Communicator, Generic[Inner]):
    """A communicator that passes every call on to ``inner``, unless a subclass overrides the
    method.
    """

    def __init__(self, inner: Inner) -> None:
        self.inner = inner
        self.rank = inner.rank
        self.size = inner.size

    @property
    def bytes_sent(self) -> int:
        return self.inner.bytes_sent

    @property
    def library(self) -> str:
        return self.inner.library

    iallreduce = _delegate("iallreduce")
    ireduce_scatter = _delegate("ireduce_scatter")
    iallgather_into = _delegate("iallgather_into")
    broadcast = _delegate("broadcast")
    isend = _delegate("isend")
    recv = _delegate("recv")
    sum = _delegate("sum")
    allgather = _delegate("allgather")
    barrier = _delegate("barrier")


def on_all_ranks(comm: Communicator, act: Callable[[], T]) -> T:
    """Call a function on every rank and return this rank's result. If a rank fails, raise on all
    ranks.

    Raises:
        PayloadError: the error of the first rank that failed, with the number and host of that
            rank.
    """
    result: list[T] = []
    failure: PayloadError | None = None
    try:
        result.append(act())
    except PayloadError as exc:
        failure = exc
    own_failure = failure and (
        type(failure),
        f"rank {comm.rank} on {hostname()}: {failure}",
        failure.code,
    )
    failures = [
        failure_of_rank for failure_of_rank in comm.allgather(own_failure) if failure_of_rank
    ]
    if failures:
        kind, message, code = failures[0]
        more = f" (and {len(failures) - 1} more ranks)" if len(failures) > 1 else ""
        raise kind(message + more, code=code) from failure
    return result[0]
