"""Matrix products of each rank, summed over ranks by MPI: the work that dominates training.

Rank r holds k of a layer's inputs: their values for m samples, A_r (m, k), and their weights, B_r
(k, n). The layer's output is C = A B = sum over r of A_r B_r (m, n). All numbers are small
integers, so float32 and float64 give C exactly, for any order of the sums. The check is Freivalds'
("Probabilistic machines can use less running time", 1977): C x must equal A (B x) for a random x of
±1. A wrong row of C passes the check with a probability of at most 1/2.
"""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from payload.cli.config import GemmConfig
from payload.cli.report import ResultWriter, begin, place
from payload.cli.values import GemmSize
from payload.comm import make_transport
from payload.comm.base import Communicator
from payload.device.base import Array, Device

Record = dict[str, Any]

_LARGEST = 4
"""The factors are integers from -_LARGEST to _LARGEST."""


def run(config: GemmConfig) -> int:
    """Measure products and sums, and print them. Return the exit code: 1 if a result is wrong, else
    0.
    """
    _, device = begin(config.device)
    records = gemm(config, device, make_transport(config.comm, device))
    return 0 if all(record["ok"] for record in records) else 1


def gemm(config: GemmConfig, device: Device, comm: Communicator) -> list[Record]:
    """Measure products of all sizes and dtypes. Return the results on all ranks. Rank 0 also prints
    them.
    """
    report = ResultWriter(comm, config.out / "gemm.jsonl")
    places = comm.allgather(place(comm.rank, device))
    records = []
    for size in config.sizes:
        for dtype in config.dtypes:
            layer = _Layer.draw(device, comm, size, dtype, seed=config.seed)
            record = _measure(
                layer, device, comm, warmup=config.warmup, iterations=config.iterations
            )
            records.append(record)
            report.write("gemm", **record)
            report.print_line(_line_of(record, places))
    ok = all(record["ok"] for record in records)
    report.answer(ok=ok, world_size=comm.size, ranks=places, results=records)
    report.close()
    return records


@dataclass(frozen=True, slots=True)
class _Layer:
    """A rank's factors A_r and B_r of the matrix product, with values that check the sum over
    ranks.
    """

    size: GemmSize
    a: Array  # (m, k)
    b: Array  # (k, n)
    # [n] float64, ±1, the same on all ranks
    x: Array
    # [m] float64 on the host: A (B x), summed over ranks
    expected: Array
    # Relative rounding error of an element of a product. 0: products are exact.
    rounding: float

    @classmethod
    def draw(
        cls, device: Device, comm: Communicator, size: GemmSize, dtype: str, *, seed: int
    ) -> _Layer:
        rng = np.random.default_rng((seed, comm.rank))
        a = rng.integers(-_LARGEST, _LARGEST, (size.m, size.k), endpoint=True).astype(np.float64)
        b = rng.integers(-_LARGEST, _LARGEST, (size.k, size.n), endpoint=True).astype(np.float64)
        x = np.random.default_rng(seed).choice([-1.0, 1.0], size.n)
        # Summed without the allreduce, which this value checks.
        expected = np.array(comm.sum((a @ (b @ x)).tolist()))
        largest_sum = _LARGEST**2 * size.k * comm.size
        spacing = float(ml_dtypes.finfo(dtype).eps)  # type: ignore[no-untyped-call]
        rounding = 0.0 if largest_sum <= 2 / spacing else spacing
        return cls(
            size,
            device.asarray(a, dtype),
            device.asarray(b, dtype),
            device.asarray(x),
            expected,
            rounding,
        )

    @property
    def flops(self) -> int:
        """Number of floating-point operations of a rank's product. A multiply-add counts as 2."""
        return 2 * self.size.m * self.size.k * self.size.n

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of the sums. 16-bit factors are summed as float32."""
        return np.promote_types(self.a.dtype, np.float32)

    def wrong_rows(
        self, device: Device, comm: Communicator, own_product: Array, output: Array
    ) -> int:
        """Return how many rows of ``output``, the sum C, are wrong. own_product: this rank's A_r
        B_r.
        """
        actual = device.to_host(output.astype(self.x.dtype) @ self.x).copy()
        tolerance = np.zeros(self.size.m)
        if self.rounding:
            sizes = device.to_host(abs(own_product).sum(axis=1, dtype=self.x.dtype)).tolist()
            tolerance = self.rounding * np.array(comm.sum(sizes))
        return int((np.abs(actual - self.expected) > tolerance).sum())


def _measure(
    layer: _Layer, device: Device, comm: Communicator, *, warmup: int, iterations: int
) -> Record:
    """Return the median times of products and sums, and whether the last sum is right."""
    xp = device.xp
    size = layer.size
    product = xp.empty((size.m, size.n), layer.dtype)
    own_product = product
    product_s = []
    sum_s = []
    for _ in range(warmup + iterations):
        comm.barrier()
        began = time.perf_counter()
        device.matmul(layer.a, layer.b, out=product)
        device.synchronize()
        product_s.append(time.perf_counter() - began)
        own_product = product.copy()
        device.synchronize()
        # Do not count the wait for a slower rank as time of the sum.
        comm.barrier()
        began = time.perf_counter()
        comm.allreduce(product)
        device.synchronize()
        sum_s.append(time.perf_counter() - began)
    gflops = layer.flops / statistics.median(product_s[warmup:]) / 1e9
    sum_ms = 1e3 * max(comm.allgather(statistics.median(sum_s[warmup:])))
    wrong = comm.allgather(layer.wrong_rows(device, comm, own_product, product))
    return {
        "ok": not any(wrong),
        "m": size.m,
        "k": size.k,
        "n": size.n,
        "dtype": layer.a.dtype.name,
        "iterations": iterations,
        "gflops": [round(speed, 3) for speed in comm.allgather(gflops)],
        "sum_bytes": product.nbytes,
        "sum_ms": round(sum_ms, 4),
        "wrong_rows": wrong,
    }


def _line_of(record: Record, places: list[Record]) -> str:
    shape = f"({record['m']}, {record['k']}) x ({record['k']}, {record['n']}) {record['dtype']}"
    speeds = ", ".join(
        f"rank {place['rank']} on {place['host']} {speed:.1f} GFLOP/s"
        for place, speed in zip(places, record["gflops"], strict=True)
    )
    verdict = "right" if record["ok"] else f"WRONG in {max(record['wrong_rows'])} rows"
    mib = record["sum_bytes"] / 2**20
    return f"{shape}: {speeds}; sum of {mib:.1f} MiB {record['sum_ms']:.2f} ms; {verdict}"
