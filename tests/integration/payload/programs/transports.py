"""Every transport gives what the naive one gives, blocking or not, and with several operations
under way.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import nullcontext

import ml_dtypes
import numpy as np
import pytest

from payload.comm import mpi, ring, transport
from payload.comm.base import Pending, on_all_ranks
from payload.comm.hierarchical import Hierarchical
from payload.comm.mpi import CudaAwareMpi
from payload.comm.nccl import Nccl
from payload.comm.ring import Naive, Ring
from payload.comm.staging import InPlace
from payload.comm.transport import MPI, MpiTransport
from payload.device.base import Array, CpuDevice, Device
from payload.errors import UsageError
from tests.support.doubles.streams import Streamed
from tests.support.messages import refused

# Smaller than in earnest, so that small arrays are of many pieces and go all ways.
transport.CHUNK_BYTES = mpi.CHUNK_BYTES = 1 << 14
ring.MESSAGE_BYTES = 1 << 12
mpi.RING_BYTES = 1 << 13
world = mpi.start()
RANK = world.rank
SIZE = world.size


def on_two_nodes(comm: MPI.Comm) -> MPI.Comm:
    """Uneven, and not of neighbours: the second rank is alone."""
    return comm.Split(int(comm.rank == 1), -comm.rank)


def on_nodes_of_their_own(comm: MPI.Comm) -> MPI.Comm:
    return comm.Split(comm.rank, 0)


CASES = [("float32", n) for n in (0, 1, 5003)]
CASES += [("int32", 10), ("float16", 3001), (ml_dtypes.bfloat16, 33)]


def put(numbers: Array, dtype: object) -> Array:
    return device.asarray(numbers.astype(dtype))  # type: ignore[call-overload]


def same(found: Array, expected: Array, where: str) -> None:
    np.testing.assert_array_equal(device.to_host(found), expected, err_msg=where)


def numbers_of_rank(dtype: object, size: int, salt: int = 0) -> Array:
    return put(of(RANK, size, salt), dtype)


def outcomes(comm: MpiTransport, dtype: object, size: int, *, blocking: bool) -> dict[str, Array]:
    """Of each collective; (size · SIZE,) where parts are wanted."""

    def call(name: str, *arrays: Array) -> None:
        if blocking:
            getattr(comm, name)(*arrays)
        else:
            getattr(comm, f"i{name}")(*arrays).wait()

    found = {}
    found["sum"] = numbers_of_rank(dtype, size)
    call("allreduce", found["sum"])
    found["sum of rows"] = numbers_of_rank(dtype, 6 * size).reshape(2, -1)
    call("allreduce", found["sum of rows"])

    mine = slice(RANK * size, (RANK + 1) * size)
    found["part"] = put(np.full(size, 99), dtype)
    call("reduce_scatter", numbers_of_rank(dtype, size * SIZE), found["part"])
    whole = numbers_of_rank(dtype, size * SIZE)
    call("reduce_scatter", whole, whole[mine])
    found["part in place"] = whole[mine]

    found["joined"] = put(np.full(size * SIZE, 99), dtype)
    call("allgather_into", numbers_of_rank(dtype, size), found["joined"])
    whole = put(np.zeros(size * SIZE), dtype)
    whole[mine] = numbers_of_rank(dtype, size)
    call("allgather_into", whole[mine], whole)
    found["joined in place"] = whole

    found["traded"] = put(np.full(size * SIZE, 99), dtype)
    trade = comm.lane.start(
        comm.alltoall_steps(numbers_of_rank(dtype, size * SIZE), found["traded"])
    )
    trade.wait()

    found["root's"] = numbers_of_rank(dtype, size)
    comm.broadcast(found["root's"], root=SIZE - 1)
    found["neighbour's"] = numbers_of_rank(dtype, size)
    sent = comm.isend(numbers_of_rank(dtype, size), (RANK + 1) % SIZE, tag=3)
    comm.recv(found["neighbour's"], (RANK - 1) % SIZE, tag=3)
    sent.wait()
    return found


def agree(comm: MpiTransport, kind: str) -> None:
    for (dtype, size), expected in EXPECTED:
        for blocking in (True, False):
            for name, found in outcomes(comm, dtype, size, blocking=blocking).items():
                where = f"{kind}: {name} of {size} {np.dtype(dtype)}, blocking: {blocking}"  # type: ignore[call-overload]
                same(found, expected[name], where)


def many_at_once(comm: MpiTransport, kind: str) -> None:
    """Ranks look after their operations in different orders, and use another communicator in
    between.
    """
    luck = random.Random(RANK)  # noqa: S311
    other = comm.split(0, -RANK)
    sizes = [3, 4000, 1, 15_000, 700, 5, 0, 9000]
    sums = [numbers_of_rank("float32", size, salt=salt) for salt, size in enumerate(sizes)]
    wholes = [put(np.zeros(size * SIZE), "float32") for size in sizes]
    pending: list[Pending] = []
    for salt, size in enumerate(sizes):
        pending.append(comm.iallreduce(sums[salt]))
        pending.append(
            comm.iallgather_into(numbers_of_rank("float32", size, salt=salt), wholes[salt])
        )
        for operation in luck.sample(pending, len(pending) // 2):
            operation.test()
        between = numbers_of_rank("float64", 3000)
        other.allreduce(between)
        same(between, expected_sum("float64", 3000), kind)
        assert comm.sum([RANK])[0] == SIZE * (SIZE - 1) / 2
        if salt == 4:  # a blocking one comes after those under way
            comm.allreduce(between)
            same(between, SIZE * expected_sum("float64", 3000), kind)
    luck.shuffle(pending)
    for operation in pending:
        operation.wait()
        assert operation.test()
    for salt, size in enumerate(sizes):
        same(sums[salt], expected_sum("float32", size, salt), kind)
        same(wholes[salt], np.concatenate([of(rank, size, salt) for rank in range(SIZE)]), kind)


def of(rank: int, size: int, salt: int = 0) -> Array:
    """A rank's numbers: whole and small, so that sums are exact in 16 bits too."""
    return (np.arange(size) * (rank + 2) + salt) % 7


def expected_sum(dtype: str, size: int, salt: int = 0) -> Array:
    return sum((of(rank, size, salt) for rank in range(SIZE)), np.zeros(size)).astype(dtype)


def completes_by_looking(comm: MpiTransport) -> None:
    array = numbers_of_rank("float32", 20_000)
    pending = comm.iallreduce(array)
    while not pending.test():
        pass
    same(array, expected_sum("float32", 20_000), "by looking")


def refuses(comm: MpiTransport) -> None:
    ones = device.xp.ones((4, 4))
    calls = {"contiguous": lambda: comm.allreduce(ones[:, ::2])}
    if SIZE > 1:
        odd = device.xp.ones(SIZE + 1)
        calls["evenly"] = lambda: comm.reduce_scatter(odd, device.xp.ones(1))
    for wrong, call in calls.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011
            call()
        assert wrong in str(caught.value)


def counts(comm: MpiTransport) -> None:
    before = comm.bytes_sent
    comm.allreduce(numbers_of_rank("float32", 6000))
    sent = sum(world.allgather(comm.bytes_sent - before))
    everything = 24_000 * (SIZE - 1) * (SIZE if isinstance(comm, Naive) else 2)
    assert (
        everything / 2 <= sent <= everything
        if isinstance(comm, Hierarchical)
        else abs(sent - everything) < 64
    )


def fails_on_the_last() -> None:
    if RANK == SIZE - 1:
        raise UsageError("no such thing", code="it-failed")


def agrees_on_failures() -> None:
    with refused("it-failed", UsageError, f"rank {SIZE - 1} on "):
        on_all_ranks(world, fails_on_the_last)
    assert on_all_ranks(world, lambda: "fine") == "fine"


def refuses_a_shared_gpu() -> None:
    shared = refused("gpu-shared-by-ranks", UsageError, "rank 0 on ", "with rank 1")
    with shared if SIZE > 1 else nullcontext():
        Nccl(Streamed(0))


device: Device = CpuDevice()
EXPECTED = [(case, outcomes(Naive(), *case, blocking=True)) for case in CASES]
np.testing.assert_array_equal(EXPECTED[2][1]["sum"], expected_sum("float32", 5003))
gpu = Streamed(RANK)
KINDS: list[tuple[str, Device, Callable[[], MpiTransport]]] = [
    ("naive on a GPU", gpu, lambda: Naive(gpu)),
    ("mpi", device, lambda: mpi.MpiCommunicator(device)),
    ("mpi on the device", device, lambda: CudaAwareMpi(device, staging=InPlace(device))),
    ("ring", device, lambda: Ring(device)),
    ("two nodes", gpu, lambda: Hierarchical(gpu, node_of=on_two_nodes)),
    ("many nodes", device, lambda: Hierarchical(device, node_of=on_nodes_of_their_own)),
    ("mpi on a GPU", gpu, lambda: mpi.MpiCommunicator(gpu)),
    ("ring on a GPU", gpu, lambda: Ring(gpu)),
    ("nccl", gpu, lambda: Nccl(gpu)),
]
for kind, place, make in KINDS:
    device = place
    comm = make()
    agree(comm, kind)
    many_at_once(comm, kind)
    completes_by_looking(comm)
    refuses(comm)
    counts(comm)
refuses_a_shared_gpu()
agrees_on_failures()
