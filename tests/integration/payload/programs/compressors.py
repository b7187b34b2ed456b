"""What every compressor keeps to: nothing is lost, all ranks agree, and what is late comes."""

from __future__ import annotations

import numpy as np

from payload.cli.config import COMPRESSORS
from payload.comm import mpi
from payload.comm.compression import Compressed, ParamSlice, make_compressor
from payload.comm.nccl import Nccl
from payload.comm.ring import Naive, Ring
from payload.comm.transport import MpiTransport
from payload.device.base import Array, CpuDevice
from tests.support.doubles.streams import Streamed

world = mpi.start()
RANK = world.rank
SIZE = world.size
PIECES = [
    ParamSlice(0, (40, 60)),
    ParamSlice(2400, (60,)),
    ParamSlice(2460, (3, 3, 8, 16)),
    ParamSlice(3612, (5, 2)),
]
COUNT = 3622
HALF = slice(0, 2460)  # the first bucket; the rest is the second


def gradient(salt: int, dtype: str = "float32") -> Array:
    return np.random.default_rng((RANK, salt)).standard_normal(COUNT).astype(dtype)


def total(array: Array) -> Array:
    exact = array.astype("float64")
    world.allreduce(exact)
    return exact


def make(name: str, transport: MpiTransport, grads: Array) -> Compressed:
    options = {"topk": {"ratio": 0.05}, "powersgd": {"rank": 2}, "int8": {}}[name]
    compressor = make_compressor(name, transport, **options)
    compressor.attach(grads, PIECES)
    return compressor


def loses_nothing(name: str, transport: MpiTransport, dtype: str) -> None:
    """What is summed and what all keep is what all had."""
    grads = gradient(0, dtype)
    compressor = make(name, transport, grads)
    given = np.zeros(COUNT)
    for salt in range(3):
        grads[...] = gradient(salt, dtype)
        had = total(grads) + total(compressor.state["residual"])
        compressor.allreduce(grads)
        np.testing.assert_allclose(grads + total(compressor.state["residual"]), had, atol=1e-4)
        for other_grads in world.allgather(grads):
            np.testing.assert_array_equal(grads, other_grads)
        given += grads
    assert np.abs(given).sum() > 0


def catches_up(name: str, transport: MpiTransport) -> None:
    """The mean over iterations goes to the sum of the gradients, as one over their number."""
    mine = gradient(2)
    exact = total(mine)
    grads = np.empty_like(mine)
    compressor = make(name, transport, grads)
    mean = np.zeros(COUNT)
    errors = []
    for iteration in range(1, 81):
        grads[...] = mine
        compressor.allreduce(grads)
        mean += (grads - mean) / iteration
        if iteration in (20, 80):
            errors.append(np.linalg.norm(mean - exact) / np.linalg.norm(exact))
    assert errors[1] < 0.4 * errors[0] < 0.4, (name, errors)


def goes_on_beside_others(name: str, transport: MpiTransport) -> None:
    """In buckets, from the last one, with exact sums on the same transport in between."""
    grads = gradient(3)
    blocking = make(name, transport, grads)
    expected = []
    for salt in (3, 4):
        grads[...] = gradient(salt)
        blocking.allreduce(grads[HALF.stop :])
        blocking.allreduce(grads[HALF])
        expected.append(grads.copy())
    other = make(name, transport, grads)
    for salt, wanted in zip((3, 4), expected, strict=True):
        grads[...] = gradient(salt)
        between = np.full(50_000, RANK + 1.0)
        pending = [other.iallreduce(grads[HALF.stop :]), other.iallreduce(between)]
        if RANK % 2:
            pending[-1].test()
        pending.append(other.iallreduce(grads[HALF]))
        for one in pending[:: 1 if RANK else -1]:
            one.wait()
        assert (between == SIZE * (SIZE + 1) / 2).all()
        np.testing.assert_array_equal(grads, wanted)
    for key, array in blocking.state.items():
        np.testing.assert_array_equal(other.state[key], array)


def resumes(name: str, transport: MpiTransport) -> None:
    grads = gradient(5)
    first = make(name, transport, grads)
    first.allreduce(grads)
    saved = {key: array.copy() for key, array in first.state.items()}
    grads[...] = gradient(6)
    first.allreduce(grads)
    wanted = grads.copy()
    second = make(name, transport, grads)
    for key, array in second.state.items():
        array[...] = saved[key]
    grads[...] = gradient(6)
    second.allreduce(grads)
    np.testing.assert_array_equal(grads, wanted)


def recovers(name: str, transport: MpiTransport) -> None:
    """From a gradient that is not finite, and from one of zeros."""
    grads = gradient(7)
    compressor = make(name, transport, grads)
    compressor.allreduce(grads)
    grads[...] = gradient(8)
    if RANK == SIZE - 1:
        grads[[5, 2500]] = np.nan, np.inf
    compressor.allreduce(grads)
    assert not np.isfinite(grads).all()
    assert all(np.isfinite(array).all() for array in compressor.state.values())
    grads[...] = 0
    compressor.allreduce(grads)
    grads[...] = gradient(9)
    compressor.allreduce(grads)
    assert np.isfinite(grads).all()
    assert np.abs(grads).sum() > 0


def sends_less(name: str, transport: MpiTransport) -> None:
    grads = gradient(9)
    compressor = make(name, transport, grads)
    before = compressor.bytes_sent
    compressor.allreduce(grads)
    sent = compressor.bytes_sent - before
    dense = 2 * grads.nbytes * (SIZE - 1) / SIZE
    assert SIZE == 1 or 0 < sent < 0.5 * dense, (name, sent, dense)


def is_the_same_on_a_gpu(name: str) -> None:
    """Or what stands for one: CuPy's arrays, on NCCL."""
    gpu = Streamed(RANK)
    host = gradient(10)
    device = gpu.asarray(host)
    by_numpy = make(name, Naive(), host)
    by_cupy = make(name, Nccl(gpu), device)
    for salt in (11, 12):
        host[...] = gradient(salt)
        device[...] = gpu.asarray(gradient(salt))
        by_numpy.allreduce(host)
        by_cupy.iallreduce(device).wait()
        np.testing.assert_allclose(gpu.to_host(device), host, rtol=1e-3, atol=1e-4)
    for key, array in by_numpy.state.items():
        np.testing.assert_allclose(gpu.to_host(by_cupy.state[key]), array, rtol=1e-3, atol=1e-4)


for name in COMPRESSORS:
    is_the_same_on_a_gpu(name)
    for transport in (mpi.MpiCommunicator(CpuDevice()), Ring(), Naive()):
        with np.errstate(invalid="ignore", over="ignore"):
            loses_nothing(name, transport, "float32")
            goes_on_beside_others(name, transport)
            recovers(name, transport)
    loses_nothing(name, transport, "float64")
    resumes(name, transport)
    catches_up(name, transport)
    sends_less(name, mpi.MpiCommunicator())
