"""Recomputation changes what is kept, and no number."""

from __future__ import annotations

import numpy as np

from payload.device import Array, Device
from payload.models import mlp
from payload.nn.base import Context, Unit
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.parameter import Parameter
from payload.nn.tape import Draw, Tape
from payload.parallel.mesh import alone
from payload.parallel.schedule import InTurn
from payload.parallel.stage import Batch, Stage
from payload.parallel.storage import Storage
from payload.recompute import Recompute, recomputed


def _units(device: Device) -> list[Unit]:
    return mlp.build(Context(device), inputs=5, classes=3, hidden=(64, 64, 64))


def _stage(device: Device, units: list[Unit]) -> Stage:
    dp = alone().dp
    storage = Storage(device, units, dp, seed=1)
    storage.begin()
    return Stage(units, storage)


def _x(device: Device) -> Array:
    return device.asarray(np.random.default_rng(1).standard_normal((16, 5)), "float32")


def test_gradients_are_the_same_to_the_bit(device: Device) -> None:
    plain = _stage(device, _units(device))
    again = _stage(device, recomputed(_units(device)))
    labels = device.asarray(np.arange(16) % 3)
    batches = [Batch(_x(device), labels, device.asarray(np.arange(16, dtype="uint32")))] * 2
    for stage in (plain, again):
        InTurn(stage, SoftmaxCrossEntropy(Context(device))).train(batches, scale=1, seed=0, iteration=1)
    assert (plain.storage.grads == again.storage.grads).all()
    assert again.storage.grads.any()


def test_only_inputs_of_units_are_kept(device: Device) -> None:
    x = _x(device)
    tape = Tape()
    stage = _stage(device, [Unit(unit.name, Recompute(unit.layer)) for unit in _units(device)])
    stage.forward(x, tape)
    assert tape.nbytes == x.nbytes + 3 * 16 * 64 * 4
    full = Tape()
    _stage(device, [Unit("all", Recompute(Nested(_units(device))))]).forward(x, full)
    assert full.nbytes == x.nbytes


class Nested:
    """Units as one layer that counts how often it meets a micro-batch."""

    def __init__(self, units: list[Unit]) -> None:
        self._layers = [unit.layer for unit in units]
        self.parameters: list[Parameter] = [p for layer in self._layers for p in layer.parameters]
        self.state: dict[str, Array] = {"seen": np.zeros(1)}

    def forward(self, x: Array, tape: Tape) -> Array:
        assert tape.draw is None or tape.draw.seed == 7
        self.state["seen"] += 1 if tape.training and not tape.again else 0
        for layer in self._layers:
            x = layer.forward(x, tape)
        return x

    def backward(self, dy: Array, tape: Tape) -> Array:
        for layer in reversed(self._layers):
            dy = layer.backward(dy, tape)
        return dy


def test_a_second_run_is_known_as_such_and_draws_the_same(device: Device) -> None:
    layer = Recompute(Nested(_units(device)))
    stage = _stage(device, [Unit("all", layer)])
    tape = Tape(draw=Draw(7, 1, np.arange(16, dtype="uint32")))
    y = stage.forward(_x(device), tape)
    stage.backward(y, tape, last=True)
    assert layer.state["seen"] == 1


def test_the_memory_that_views_share_counts_once() -> None:
    tape, whole = Tape(), np.zeros(100)
    tape.push(whole[:50], (whole[50:], [whole.reshape(10, 10)]), 3, None)
    assert tape.nbytes == whole.nbytes
    evaluation = Tape(training=False)
    evaluation.push(whole)
    assert evaluation.nbytes == 0
