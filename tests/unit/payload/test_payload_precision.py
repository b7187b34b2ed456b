"""Half precision: layers keep to the format, training reaches what float32 does, overflow is
survived.
"""

from __future__ import annotations

import math

import numpy as np
import pytest

from payload.data.datasets import load_digits
from payload.device.base import Array, Device
from payload.models import mlp
from payload.nn.linear import Linear
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import LayerContext, RandomState, Tape, Unit
from payload.nn.pool import GlobalAveragePool
from payload.optim.precision import PRECISIONS, LossScale, loss_scale
from payload.parallel.engine import Engine
from payload.parallel.mesh import EngineOptions, alone
from payload.parallel.pipeline import MicroBatch
from payload.parallel.zero import FlatStorage
from tests.support.doubles.layers import batch_of, engine_of
from tests.support.doubles.models import SMALL


def _passes(model: str, precision: str, device: Device) -> tuple[Array, Array]:
    """Logits and gradients of one micro-batch; what passes between units is in the format."""
    formats = PRECISIONS[precision]
    units = SMALL[model].units(LayerContext(device))
    storage = FlatStorage(device, units, alone().dp, EngineOptions(seed=1, precision=formats))
    at = SMALL[model].inputs(3, device, formats.compute)
    tape = Tape(draw=RandomState(1, 1, device.asarray(np.arange(3, dtype="uint32"))))
    storage.begin()
    for unit in units:
        at = unit.layer.forward(at, tape)
        assert at.dtype == formats.compute, f"out of {unit.name}"
    logits = device.to_host(at).astype("float64")
    labels = device.asarray(
        np.random.default_rng(3).integers(0, logits.shape[-1], logits.shape[:-1])
    )
    loss = SoftmaxCrossEntropy(LayerContext(device))
    loss.forward(at, labels, tape)
    at = loss.backward(1 / labels.size, tape)
    for unit in reversed(units):
        assert at.dtype == formats.compute, f"gradient into {unit.name}"
        at = unit.layer.backward(at, tape)
        storage.backward_done(unit, last=True)
    assert storage.grads.dtype == formats.master
    return logits, device.to_host(storage.grads).astype("float64")


@pytest.mark.parametrize(("precision", "bound"), [("bf16", 0.05), ("fp16", 0.01)])
@pytest.mark.parametrize("model", SMALL)
def test_layers_keep_to_the_format(
    model: str, precision: str, bound: float, device: Device
) -> None:
    logits, gradients = _passes(model, precision, device)
    expected_logits, expected_gradients = _passes(model, "fp32", device)
    _assert_near(logits, expected_logits, bound)
    # A rounded number on the other side of a ReLU's 0 lets a gradient through, or stops it.
    _assert_near(gradients, expected_gradients, 0.2 if model in ("resnet18", "cnn") else bound)


def _assert_near(actual: Array, expected: Array, bound: float) -> None:
    assert 0 < np.linalg.norm(actual - expected) < bound * np.linalg.norm(expected)


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_mean_of_an_image_is_summed_in_float32(precision: str, device: Device) -> None:
    x = device.asarray(np.ones((1, 60, 50, 1)), PRECISIONS[precision].compute)
    y = GlobalAveragePool(LayerContext(device)).forward(x, Tape())
    assert device.to_host(y).astype("float32").tolist() == [[1]]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_sums_over_rows_are_float32(precision: str, device: Device) -> None:
    # bfloat16 counts to 256, float16 to 2048
    formats = PRECISIONS[precision]
    count = 4096
    linear = Linear(LayerContext(device), "l", 1, 1)
    units = [Unit("l", linear)]
    storage = FlatStorage(device, units, alone().dp, EngineOptions(seed=1, precision=formats))
    storage.begin()
    tape = Tape()
    ones = device.asarray(np.ones((count, 1)), formats.compute)
    linear.forward(ones, tape)
    linear.backward(ones, tape)
    assert device.to_host(storage.grads).tolist() == [count, count]


def _engine(device: Device, precision: str, scale: LossScale | None = None) -> Engine:
    units = mlp.build(LayerContext(device), inputs=64, classes=10, hidden=(48,))
    options = {"seed": 1, "precision": PRECISIONS[precision]}
    return engine_of(
        device, alone(), units, loss_scale=scale or loss_scale(precision, None), **options
    )


def _batches(device: Device, precision: str, size: int) -> list[MicroBatch]:
    training, _ = load_digits()
    order = np.random.default_rng(1).permutation(len(training.labels))
    x = training.images[order] / 8 - 1
    labels = training.labels[order]
    return [
        batch_of(device, x[at : at + size], labels[at : at + size], PRECISIONS[precision].compute)
        for at in range(0, len(labels) - size, size)
    ]


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_training_in_low_precision_reaches_the_loss_of_float32(
    precision: str, device: Device
) -> None:
    def accuracy(precision: str) -> float:
        engine = _engine(device, precision)
        iteration = 0
        for _ in range(6):
            for batch in _batches(device, precision, 64):
                iteration += 1
                outcome = engine.step([batch], targets=64, iteration=iteration, lr=0.05)
                assert outcome.finite
        _, held_out = load_digits()
        x = held_out.images / 8 - 1
        batch = batch_of(device, x, held_out.labels, PRECISIONS[precision].compute)
        return engine.evaluate([batch]).accuracy

    whole = accuracy("fp32")
    assert whole > 0.94
    assert abs(accuracy(precision) - whole) <= 0.01


def test_overflowing_step_is_skipped_and_the_scale_recovers(device: Device) -> None:
    scale = LossScale(2.0**24, dynamic=True, interval=3)
    engine = _engine(device, "fp16", scale)
    batch = _batches(device, "fp16", 64)[0]
    before = device.to_host(engine.storage.master_weights).copy()
    outcome = engine.step([batch], targets=64, iteration=1, lr=0.05)
    assert outcome.skipped
    assert not outcome.finite
    assert math.isfinite(outcome.loss)
    assert (device.to_host(engine.storage.master_weights) == before).all()
    assert (scale.value, scale.skipped) == (2.0**23, 1)
    outcomes = [engine.step([batch], targets=64, iteration=2, lr=0.05) for _ in range(12)]
    went_well = [not outcome.skipped for outcome in outcomes]
    assert went_well.index(True) < 8
    assert 1 + went_well.count(False) == scale.skipped
    assert outcomes[-1].loss < outcome.loss
    first = outcomes[went_well.index(True)]
    assert first.grad_norm == pytest.approx(
        _engine(device, "fp32")
        .step(_batches(device, "fp32", 64)[:1], targets=64, iteration=1, lr=0)
        .grad_norm,
        rel=1e-2,
    )


def test_overflow_without_dynamic_scale_is_not_skipped(device: Device) -> None:
    engine = _engine(device, "fp16", LossScale(2.0**24))
    outcome = engine.step(_batches(device, "fp16", 64)[:1], targets=64, iteration=1, lr=0.05)
    assert not outcome.finite
    assert not outcome.skipped


def test_loss_that_is_not_finite_is_not_the_scales_fault(device: Device) -> None:
    engine = _engine(device, "fp16")
    engine.storage.master_weights -= (
        6e4  # so that what ReLU lets through, and then the logits, overflow
    )
    engine.storage.publish()
    outcome = engine.step(_batches(device, "fp16", 64)[:1], targets=64, iteration=1, lr=0.05)
    assert not outcome.skipped
    assert not outcome.finite
    assert engine.loss_scale.value == 2.0**16


def test_scale_grows_after_its_interval_and_gives_up_at_one() -> None:
    scale = LossScale(4.0, dynamic=True, interval=2)
    scale.record_success()
    assert scale.overflowed()
    scale.record_success()
    assert scale.value == 2
    scale.record_success()
    assert scale.value == 4
    assert [scale.overflowed() for _ in range(3)] == [True, True, False]
    again = LossScale(64.0, dynamic=True)
    again.restore(scale.state)
    assert again.state == scale.state == {"value": 1.0, "skipped": 3, "unbroken": 0}


def test_fixed_scale_of_a_resumed_run_is_the_one_that_the_user_has_set() -> None:
    scale = LossScale(8.0)
    scale.restore({"value": 64.0, "skipped": 3, "unbroken": 1})
    assert scale.state == {"value": 8.0, "skipped": 3, "unbroken": 0}


@pytest.mark.parametrize(
    ("precision", "wanted", "value", "dynamic"),
    [
        ("fp16", None, 2.0**16, True),
        ("fp16", 8.0, 8.0, False),
        ("bf16", None, 1.0, False),
        ("fp32", None, 1.0, False),
    ],
)
def test_loss_scale_follows_precision_and_setting(
    precision: str, wanted: float | None, value: float, dynamic: bool
) -> None:
    scale = loss_scale(precision, wanted)
    assert (scale.value, scale.dynamic) == (value, dynamic)
