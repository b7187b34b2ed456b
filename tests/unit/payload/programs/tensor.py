"""Models divided over tensor-parallel ranks give the loss and the gradients of the whole one, dropout too."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from payload.comm import mpi
from payload.comm.base import Communicator, Solo
from payload.device import Array, Cpu
from payload.models import bert, gpt, lstm, vit
from payload.nn.loss import LossSums, SoftmaxCrossEntropy
from payload.nn.module import Context, Parameter, Unit
from payload.parallel.mesh import make_mesh
from payload.parallel.pipeline import Pipeline, Stage
from tests.unit.payload.doubles.layers import batch_of, stored

Build = Callable[[Context], list[Unit]]
_DEVICE = Cpu()
_SMALL = {"layers": 2, "heads": 4, "width": 16, "dropout": 0.2}

gathered: set[int] = set()


class Recorded(mpi.MpiCommunicator):
    """Of all ranks, and of how many numbers each rank gathers from each."""

    def allgather_into(self, part: Array, out: Array) -> None:
        gathered.add(part.size)
        super().allgather_into(part, out)


mpi.start()
world = Recorded()
rng = np.random.default_rng(0)
tokens = rng.integers(0, 24, (5, 9))
images = rng.standard_normal((5, 8, 8, 3))
MODELS: dict[str, tuple[Build, Array, Array, bool]] = {
    "gpt": (
        lambda c: gpt.build(c, vocabulary=24, length=8, **_SMALL),
        tokens[:, :-1],
        tokens[:, 1:],
        gpt.SPLIT_LOGITS,
    ),
    "bert": (
        lambda c: bert.build(c, vocabulary=24, length=9, **_SMALL),
        tokens,
        np.where(rng.random(tokens.shape) < 0.4, tokens, -1),
        bert.SPLIT_LOGITS,
    ),
    "vit": (
        lambda c: vit.build(c, side=8, patch=4, classes=5, **_SMALL),
        images,
        rng.integers(0, 5, 5),
        False,
    ),
    "lstm": (
        lambda c: lstm.build(c, classes=24, vocabulary=24, layers=1, width=8),
        tokens[:, :-1],
        tokens[:, 1:],
        False,
    ),
}


def trained(name: str, tp: Communicator, dtype: str) -> tuple[LossSums, dict[str, Parameter]]:
    """The sums and the gradients of one iteration of two micro-batches, of which one is empty."""
    build, x, targets, split = MODELS[name]
    context = Context(_DEVICE, tp=tp)
    units = build(context)
    storage = stored(units, _DEVICE, dtype)
    x = x.astype(dtype) if x.dtype == "float64" else x
    batches = [batch_of(_DEVICE, x, targets), batch_of(_DEVICE, x[:0], targets[:0])]
    schedule = Pipeline(Stage(units, storage), SoftmaxCrossEntropy(context, split=split))
    sums = schedule.train(batches, scale=0.1, seed=2, iteration=7)
    return sums, {parameter.name: parameter for unit in units for parameter in unit.layer.parameters}


def check(name: str, tp: Communicator, dtype: str, rtol: float) -> None:
    ours, parts = trained(name, tp, dtype)
    whole, full = trained(name, Solo(), dtype)
    np.testing.assert_allclose(ours.loss, whole.loss, rtol=rtol, err_msg=name)
    assert (ours.correct, ours.count) == (whole.correct, whole.count), name
    for key, part in parts.items():
        expected = part.part(full[key].grad)
        np.testing.assert_allclose(
            part.grad, expected, rtol=rtol, atol=rtol * np.abs(expected).max(), err_msg=f"{name} {key}"
        )
        if part.axis is None:  # what every rank holds must never drift apart
            assert len(set(tp.allgather(part.grad.tobytes()))) == 1, f"{name} {key}"


pairs = make_mesh(world, tp=2).tp
for group, dtype, rtol in ((world, "float64", 1e-10), (pairs, "float64", 1e-10), (pairs, "float32", 1e-5)):
    for model in MODELS:
        check(model, group, dtype, rtol)
assert gathered == {0, 4 * 5 * 8, 4 * 5 * 9}, gathered  # four for each target: logits stay where they are
