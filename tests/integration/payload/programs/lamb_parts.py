"""LAMB over pieces: a matrix split between 2 tensor-parallel ranks, each half again between 2 that
shard it, beside a matrix and a bias that all tensor-parallel ranks have."""

import numpy as np

from payload.comm import mpi
from payload.device.base import CpuDevice
from payload.nn.module import LayerContext, Parameter, Segment, zeros
from payload.optim.lamb import LAMB
from payload.parallel.mesh import make_mesh

SPLIT = (4, 6)
SAME = (3, 3)
BIAS = (5,)

mesh = make_mesh(mpi.start(), tp=2)
rng = np.random.default_rng(0)
first = [rng.standard_normal(shape) for shape in (SPLIT, SAME, BIAS)]
gradients = [[rng.standard_normal(shape) for shape in (SPLIT, SAME, BIAS)] for _ in range(3)]


def parameters(context: LayerContext) -> list[Parameter]:
    return [
        Parameter(context, "split", SPLIT, zeros, axis=1),
        Parameter(context, "same", SAME, zeros),
        Parameter(context, "bias", BIAS, zeros),
    ]


def flat(owners: list[Parameter], arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(
        [owner.part(array).ravel() for owner, array in zip(owners, arrays, strict=True)]
    )


whole = parameters(LayerContext(CpuDevice()))
ends = np.cumsum([parameter.size for parameter in whole])
pieces = [Segment(p, end - p.size, int(end)) for p, end in zip(whole, ends, strict=True)]
expected = flat(whole, first)
optimizer = LAMB(CpuDevice(), expected, pieces, whole)
for gradient in gradients:
    optimizer.step(expected, flat(whole, gradient), lr=0.1)

mine = parameters(LayerContext(CpuDevice(), tp=mesh.tp, dp=mesh.dp))
total = sum(parameter.size for parameter in mine)
half = slice(0, total // 2) if mesh.dp.rank == 0 else slice(total // 2, total)
pieces = []
start = 0
for parameter in mine:
    low = max(start, half.start)
    high = min(start + parameter.size, half.stop)
    if low < high:
        pieces.append(Segment(parameter, low - half.start, high - half.start, low - start))
    start += parameter.size
values = flat(mine, first)[half].copy()
optimizer = LAMB(CpuDevice(), values, pieces, mine, [mesh.dp, mesh.tp])
for gradient in gradients:
    optimizer.step(values, flat(mine, gradient)[half].copy(), lr=0.1)

split, same, bias = np.split(expected, ends[:-1])
wanted = flat(mine, [split.reshape(SPLIT), same.reshape(SAME), bias])[half]
np.testing.assert_allclose(values, wanted, rtol=1e-12, atol=1e-14)
