"""Optimizers and schedules against PyTorch's, in float64; LAMB against its paper, written out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

from payload.device.base import Array, Device
from payload.nn.module import LayerContext, Parameter, Segment, zeros
from payload.optim.adamw import AdamW
from payload.optim.base import Optimizer
from payload.optim.lamb import LAMB
from payload.optim.sgd import SGD
from payload.training.schedule import LearningRate, scaled
from tests.support.doubles.oracle import torch

Make = Callable[[Device, Array, Sequence[Segment]], Optimizer]

_SHAPES = ((30, 400), (400,), (400, 10), (10,))  # more than one block of the larger ones
_DECAY = 0.1
_SCALE = 0.5


def _segments(device: Device) -> list[Segment]:
    segments = []
    start = 0
    for number, shape in enumerate(_SHAPES):
        parameter = Parameter(LayerContext(device), f"p{number}", shape, zeros)
        segments.append(Segment(parameter, start, start + parameter.size))
        start += parameter.size
    return segments


def _gradients() -> Iterator[tuple[float, Array]]:
    """Learning rates and gradients of a few iterations; at first of zero, where it is easy to go
    wrong.
    """
    rng = np.random.default_rng(3)
    size = sum(int(np.prod(shape)) for shape in _SHAPES)
    yield 0.1, np.zeros(size)
    for _ in range(5):
        yield rng.random(), rng.standard_normal(size)


def _first() -> Array:
    return np.random.default_rng(4).standard_normal(sum(int(np.prod(shape)) for shape in _SHAPES))


def _payload_steps(device: Device, make: Make) -> Array:
    values = device.asarray(_first().copy())
    optimizer = make(device, values, _segments(device))
    for lr, gradient in _gradients():
        optimizer.step(values, device.asarray(gradient / _SCALE), lr=lr, scale=_SCALE)
    assert optimizer.updates == 6
    return device.to_host(values)


def _torch_steps(kind: Callable[..., torch.optim.Optimizer], **options: Any) -> Array:
    flat = torch.tensor(_first())
    sizes = [int(np.prod(shape)) for shape in _SHAPES]
    parts = [torch.nn.Parameter(part) for part in flat.split(sizes)]
    weights = parts[::2]
    biases = parts[1::2]
    groups = [{"params": weights, "weight_decay": _DECAY}, {"params": biases, "weight_decay": 0.0}]
    optimizer = kind(groups, lr=1.0, **options)
    for lr, gradient in _gradients():
        for group in optimizer.param_groups:
            group["lr"] = lr
        for part, grad in zip(parts, torch.tensor(gradient).split(sizes), strict=True):
            part.grad = grad
        optimizer.step()
    return torch.cat([part.detach() for part in parts]).numpy()


@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_pytorchs(device: Device, nesterov: bool) -> None:
    options = {"momentum": 0.9, "nesterov": nesterov}
    payload_steps = _payload_steps(
        device, lambda *given: SGD(*given, weight_decay=_DECAY, **options)
    )
    np.testing.assert_allclose(
        payload_steps, _torch_steps(torch.optim.SGD, **options), rtol=1e-12, atol=1e-14
    )


def test_adamw_is_pytorchs(device: Device) -> None:
    payload_steps = _payload_steps(
        device, lambda *given: AdamW(*given, beta1=0.8, beta2=0.95, eps=1e-3, weight_decay=_DECAY)
    )
    torch_steps = _torch_steps(torch.optim.AdamW, betas=(0.8, 0.95), eps=1e-3)
    np.testing.assert_allclose(payload_steps, torch_steps, rtol=1e-12, atol=1e-14)


def test_lamb_is_its_papers(device: Device) -> None:
    def make(device: Device, values: Array, segments: Sequence[Segment]) -> LAMB:
        parameters = [segment.parameter for segment in segments]
        return LAMB(
            device,
            values,
            segments,
            parameters,
            beta1=0.8,
            beta2=0.95,
            eps=1e-3,
            weight_decay=_DECAY,
        )

    expected = np.split(_first(), np.cumsum([np.prod(shape) for shape in _SHAPES])[:-1])
    for number, x in enumerate(expected):
        decay = _DECAY if number % 2 == 0 else 0.0
        m = np.zeros_like(x)
        v = np.zeros_like(x)
        for t, (lr, gradient) in enumerate(_gradients(), start=1):
            g = np.split(gradient, np.cumsum([np.prod(shape) for shape in _SHAPES])[:-1])[number]
            m = 0.8 * m + 0.2 * g
            v = 0.95 * v + 0.05 * g * g
            r = (m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.95**t)) + 1e-3) + decay * x
            trust = np.linalg.norm(x) / np.linalg.norm(r) if decay and np.linalg.norm(r) else 1.0
            x[:] = x - lr * trust * r
    np.testing.assert_allclose(
        _payload_steps(device, make), np.concatenate(expected), rtol=1e-12, atol=1e-14
    )


def test_adamw_step_in_float32_is_independent_of_block_sizes(device: Device) -> None:
    segments = _segments(device)
    whole, parts = (device.asarray(_first(), "float32") for _ in range(2))
    one = AdamW(device, whole, segments)
    many = [
        AdamW(device, parts[s.start : s.stop], [Segment(s.parameter, 0, s.stop - s.start)])
        for s in segments
    ]
    for lr, gradient in _gradients():
        grads = device.asarray(gradient, "float32")
        one.step(whole, grads.copy(), lr=lr)
        for optimizer, s in zip(many, segments, strict=True):
            optimizer.step(parts[s.start : s.stop], grads[s.start : s.stop], lr=lr)
    assert whole.dtype == np.float32
    np.testing.assert_array_equal(device.to_host(whole), device.to_host(parts))


def _rates(scheduler: Callable[[torch.optim.Optimizer], Any], count: int) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.4)
    schedule = scheduler(optimizer)
    rates = []
    for _ in range(count):
        rates.append(float(optimizer.param_groups[0]["lr"]))
        optimizer.step()
        schedule.step()
    return rates


def _at(rate: LearningRate, count: int) -> list[float]:
    return [rate.at(iteration) for iteration in range(1, count + 1)]


def test_schedules_are_pytorchs() -> None:
    lr = torch.optim.lr_scheduler
    cosine = LearningRate(0.4, "cosine", iterations=20, minimum=0.1)
    assert _at(cosine, 20) == pytest.approx(
        _rates(lambda o: lr.CosineAnnealingLR(o, 19, eta_min=0.1), 20), rel=1e-12
    )
    step = LearningRate(0.4, "step", iterations=20, milestones=(5, 9), factor=0.3)
    assert _at(step, 20) == pytest.approx(
        _rates(lambda o: lr.MultiStepLR(o, [5, 9], gamma=0.3), 20), rel=1e-12
    )
    warm = LearningRate(0.4, "cosine", iterations=20, warmup=5)
    expected = _rates(
        lambda o: lr.SequentialLR(
            o,
            [lr.LinearLR(o, start_factor=1 / 5, total_iters=4), lr.CosineAnnealingLR(o, 15)],
            milestones=[4],
        ),
        20,
    )
    assert _at(warm, 20) == pytest.approx(expected, rel=1e-12, abs=1e-16)


def test_learning_rate_schedule_has_its_first_and_last_value() -> None:
    assert _at(LearningRate(0.4, "constant", iterations=4, warmup=2), 4) == [0.2, 0.4, 0.4, 0.4]
    assert LearningRate(0.4, "cosine", iterations=9, minimum=0.01).at(9) == pytest.approx(0.01)
    assert LearningRate(0.4, "cosine", iterations=9, minimum=0.01).at(12) == pytest.approx(0.01)
    assert LearningRate(0.4, "cosine", iterations=1).at(1) == 0.4
    assert LearningRate(0.4, "step", iterations=9, milestones=(1, 2), minimum=0.1).at(9) == 0.1


def test_rate_grows_with_the_workers_by_the_rule() -> None:
    assert [scaled(0.1, rule, 4) for rule in ("none", "linear", "sqrt")] == pytest.approx(
        [0.1, 0.4, 0.2]
    )
