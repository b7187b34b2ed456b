"""Recomputation changes what is kept, and no number."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from payload.device.base import Array, Device
from payload.models import mlp
from payload.nn.module import (
    LayerContext,
    RandomState,
    Recompute,
    Sequential,
    Tape,
    Unit,
    state_of,
)
from payload.parallel.mesh import EngineOptions, alone
from payload.parallel.pipeline import Stage
from payload.parallel.zero import FlatStorage
from tests.support.doubles.models import SMALL


def _units(device: Device) -> list[Unit]:
    return mlp.build(LayerContext(device), inputs=5, classes=3, hidden=(64, 64, 64))


def _stage(device: Device, units: list[Unit]) -> Stage:
    dp = alone().dp
    storage = FlatStorage(device, units, dp, EngineOptions(seed=1))
    storage.begin()
    return Stage(units, storage)


@pytest.mark.parametrize("model", SMALL)
def test_recomputed_unit_gives_the_same_gradients_and_state(model: str, device: Device) -> None:
    """It leaves its input as it was, draws the same, and its state has seen the batch once."""
    samples = device.asarray(np.arange(4, dtype="uint32"))

    def run(*, again: bool) -> list[Array]:
        units = SMALL[model].units(LayerContext(device))
        if again:
            units = [replace(unit, layer=Recompute(unit.layer)) for unit in units]
        stage = _stage(device, units)
        tape = Tape(draw=RandomState(1, 2, samples))
        y = stage.forward(SMALL[model].inputs(4, device, "float32"), tape)
        stage.backward(y, tape, last=True)
        found = [stage.storage.grads, *state_of([unit.layer for unit in units]).values()]
        return [device.to_host(array).copy() for array in found]

    for recomputed, stored in zip(run(again=True), run(again=False), strict=True):
        np.testing.assert_array_equal(recomputed, stored)


def test_recompute_keeps_only_inputs_of_units(device: Device) -> None:
    x = device.asarray(np.random.default_rng(1).standard_normal((16, 5)), "float32")
    tape = Tape()
    stage = _stage(device, [Unit(unit.name, Recompute(unit.layer)) for unit in _units(device)])
    stage.forward(x, tape)
    assert tape.nbytes == x.nbytes + 3 * 16 * 64 * 4
    full = Tape()
    whole = Sequential(*(unit.layer for unit in _units(device)))
    _stage(device, [Unit("all", Recompute(whole))]).forward(x, full)
    assert full.nbytes == x.nbytes


def test_memory_of_shared_views_counts_once() -> None:
    tape = Tape()
    whole = np.zeros(100)
    tape.push(whole[:50], (whole[50:], [whole.reshape(10, 10)]), 3, None)
    assert tape.nbytes == whole.nbytes
    evaluation = Tape(training=False)
    evaluation.push(whole)
    assert evaluation.nbytes == 0
