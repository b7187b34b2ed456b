"""Every ZeRO stage on these ranks takes the steps that one rank takes, and holds a part of what it
holds.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import DTypeLike

from benchmarks.support.memory import formula, held
from payload.comm import mpi
from payload.comm.base import Communicator
from payload.comm.transport import MpiTransport
from payload.device import choose
from payload.device.base import Array, Device
from payload.nn.activation import ReLU
from payload.nn.linear import Linear
from payload.nn.module import LayerContext, Parameter, Sequential, Tape, Unit
from payload.optim.adamw import AdamW
from payload.optim.precision import PRECISIONS, LossScale
from payload.parallel.engine import Engine, StepResult
from payload.parallel.mesh import Mesh, alone, make_mesh
from payload.parallel.pipeline import MicroBatch
from tests.support.doubles.layers import batch_of, engine_of
from tests.support.doubles.streams import Streamed

SAMPLES = 12


class Head:
    """Multiplies by the transpose of another layer's weights, as GPT's head does by its
    embedding's.
    """

    def __init__(self, device: Device, weight: Parameter) -> None:
        self._device = device
        self.parameters = [weight]

    def forward(self, x: Array, tape: Tape) -> Array:
        tape.push(x)
        return self._device.matmul(x, self.parameters[0].value.T)

    def backward(self, dy: Array, tape: Tape) -> Array:
        (x,) = tape.pop()
        self.parameters[0].add_product(dy, x)
        return self._device.matmul(dy, self.parameters[0].value)


def build(device: Device) -> list[Unit]:
    """Sizes that no number of ranks divides; the first layer's weights are the last one's, too."""
    context = LayerContext(device)
    first = Linear(context, "first", 5, 7)
    middle = [Linear(context, f"middle{i}", 7, 7) for i in range(3)]
    return [
        Unit("first", Sequential(first, ReLU())),
        *(Unit(f"middle{i}", Sequential(layer, ReLU())) for i, layer in enumerate(middle)),
        Unit("head", Head(device, first.weight)),
    ]


def share(
    device: Device, step: int, dp: Communicator, dtype: DTypeLike = "float64"
) -> Sequence[MicroBatch]:
    """This rank's samples, in micro-batches that are not of one size, one of them empty on some
    ranks.
    """
    rng = np.random.default_rng(step)
    x = rng.standard_normal((SAMPLES, 5))
    labels = rng.integers(0, 5, SAMPLES)
    mine = np.arange(dp.rank, SAMPLES, dp.size)
    cuts = [mine[:1], mine[1:4], mine[4:]]
    return [batch_of(device, x[cut], labels[cut], dtype) for cut in cuts]


def run(
    device: Device, mesh: Mesh, precision: str, **options: object
) -> tuple[Engine, list[StepResult], list[float]]:
    """Some steps, of which float16 skips the first, and an evaluation after each."""
    scale = LossScale(2.0**20, dynamic=True) if precision == "fp16" else None
    options |= {"seed": 3, "clip": 1.0, "precision": PRECISIONS[precision], "loss_scale": scale}
    engine = engine_of(device, mesh, build(device), AdamW, **options)
    outcomes = []
    evaluations = []
    for step in range(5):
        batches = share(device, step, mesh.dp, PRECISIONS[precision].compute)
        outcomes.append(engine.step(batches, targets=SAMPLES, iteration=step, lr=1e-2))
        evaluations.append(engine.evaluate(batches).loss)
    return engine, outcomes, evaluations


def check(
    device: Device, transport: MpiTransport, precision: str, rtol: float, **options: object
) -> None:
    """The steps are those of one rank, as far as sums in another order let them."""
    _, expected, judged = run(device, alone(), precision)
    assert any(outcome.grad_norm > 1 for outcome in expected), "nothing was clipped"
    assert (precision == "fp16") == expected[0].skipped
    for zero in range(4):
        engine, outcomes, evaluations = run(
            device, make_mesh(transport), precision, zero=zero, **options
        )
        np.testing.assert_allclose(evaluations, judged, rtol=rtol)
        for actual, reference in zip(outcomes, expected, strict=True):
            assert (actual.skipped, actual.loss_scale) == (
                reference.skipped,
                reference.loss_scale,
            ), (
                precision,
                zero,
            )
            np.testing.assert_allclose(actual.loss, reference.loss, rtol=rtol)
            np.testing.assert_allclose(actual.grad_norm, reference.grad_norm, rtol=10 * rtol)
        if options["bucket_bytes"] == 1 and precision != "fp64":
            check_memory(engine, precision, zero)


def check_memory(engine: Engine, precision: str, zero: int) -> None:
    """What is held is what the paper says, but for padding, buffers, and at stage 1 the sums of
    gradients.
    """
    numbers = sum(parameter.size for parameter in engine.storage.parameters)
    ranks = engine.mesh.dp.size
    found = held(engine)
    formats = PRECISIONS[precision]
    paper = formula(numbers, precision=formats, states=2, ranks=ranks, zero=zero)
    padded = 4 * (ranks - 1) * 4 * (2 if zero == 1 else 1)  # numbers of four bytes in four buckets
    sums = numbers * 4 // ranks if zero == 1 and ranks > 1 else 0
    case = (precision, zero, found, paper)
    assert 0 <= found.weights - paper.weights <= padded, case
    assert 0 <= found.gradients - paper.gradients - sums <= padded, case
    assert 0 <= found.masters - paper.masters <= padded, case
    assert found.optimizer == 2 * found.masters, case
    # At once: two of the first bucket, which is used at the end, too; two others; padding.
    buckets = 2 * 42 + 2 * 56 + 12
    width = {2: 4, 3: 4 + formats.compute.itemsize}.get(zero, 0)
    parts = buckets * 4 // ranks if zero >= 2 else 0  # of a later micro-batch
    assert found.working <= (buckets * width + parts) * 9 // 8, case
    assert (found.working > 0) == (zero >= 2), case


mpi.start()
device = choose("auto", 0)
world = mpi.MpiCommunicator(device)
# What is under way is seen late, and read late.
gpu = device if device.gpu else Streamed(world.rank)
for bucket_bytes in (600, 1):
    check(gpu, mpi.MpiCommunicator(gpu), "fp64", 1e-11, bucket_bytes=bucket_bytes)
check(device, world, "fp64", 1e-11, bucket_bytes=1 << 20, overlap=False)
for precision, rtol in (("fp32", 1e-5), ("bf16", 2e-3), ("fp16", 1e-3)):
    check(device, world, precision, rtol, bucket_bytes=1)
