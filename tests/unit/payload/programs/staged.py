"""Sums and broadcasts of arrays that live apart from the host, over more than one chunk."""

import numpy as np

from payload.comm import mpi
from payload.comm.base import together, total
from payload.device import Array, Cpu
from payload.errors import UsageError


class Apart(Cpu):
    """Stands for a GPU: what the host has is a copy, until it is written back."""

    def to_host(self, array: Array) -> Array:
        return array.copy()


mpi.start()
comm = mpi.MpiCommunicator(Apart())
ranks = comm.size * (comm.size + 1) // 2
for dtype in ("float32", "float64"):
    size = 2 * mpi.CHUNK_BYTES // np.dtype(dtype).itemsize + 5
    pattern = (np.arange(size) % 251).astype(dtype).reshape(1, -1)

    array = pattern * (comm.rank + 1)
    comm.allreduce(array)
    np.testing.assert_array_equal(array, pattern * ranks)

    array = pattern * (comm.rank + 1)
    comm.broadcast(array)
    np.testing.assert_array_equal(array, pattern)

assert total(comm, comm.rank + 1) == ranks
assert comm.allgather(comm.rank) == list(range(comm.size))

try:
    comm.allreduce(np.ones((4, 4))[:, ::2])
except ValueError as error:
    assert "contiguous" in str(error)  # noqa: PT017
else:
    raise AssertionError("a copy was summed, and the caller's array was not")


def fails_on_the_last() -> str:
    if comm.rank == comm.size - 1:
        raise UsageError("no such thing")
    return "fine"


try:
    together(comm, fails_on_the_last)
except UsageError as error:
    assert f"rank {comm.size - 1} on " in str(error)  # noqa: PT017
else:
    raise AssertionError("one rank failed and the others went on")
assert together(comm, lambda: "fine") == "fine"
