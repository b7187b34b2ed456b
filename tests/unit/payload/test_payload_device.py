"""Which device a rank takes, by what its environment says, and how often a training step waits for
a GPU.
"""

from __future__ import annotations

from itertools import product

import numpy as np
import pytest

from payload.models import gpt
from payload.nn.module import LayerContext
from payload.optim.adamw import AdamW
from payload.optim.precision import PRECISIONS, loss_scale
from payload.parallel.mesh import alone
from tests.support.doubles.layers import batch_of, cut, engine_of
from tests.support.doubles.strict import Strict, Waits

_DEVICE = Strict()


def _waits_of_a_step(micro_batches: int, layers: int, precision: str) -> int:
    units = gpt.build(
        LayerContext(_DEVICE),
        vocabulary=32,
        length=6,
        dropout=0.1,
        layers=layers,
        heads=2,
        width=16,
    )
    scale = loss_scale(precision, None)
    engine = engine_of(
        _DEVICE, alone(), units, AdamW, precision=PRECISIONS[precision], loss_scale=scale
    )
    tokens = np.random.default_rng(1).integers(0, 32, (4, 6))
    batch = batch_of(_DEVICE, tokens, tokens)
    engine.step(cut(batch, micro_batches), targets=24, iteration=1, lr=1e-3)
    before = Waits.count
    assert engine.step(cut(batch, micro_batches), targets=24, iteration=2, lr=1e-3).finite
    return Waits.count - before


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_host_waits_a_fixed_number_of_times_a_step(precision: str) -> None:
    """For the loss, the number of targets and the gradients' norm."""
    waits = {_waits_of_a_step(cuts, layers, precision) for layers, cuts in product((1, 3), (1, 2))}
    assert waits == {3}
