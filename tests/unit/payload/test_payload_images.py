"""The layers of convolutional networks: against PyTorch, and against finite differences."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from numpy.typing import DTypeLike

from payload.device import Array, Cpu, Device
from payload.nn.conv import Conv2d
from payload.nn.module import Context, Layer, Recompute, Tape, Unit
from payload.nn.norm import BatchNorm
from payload.nn.pool import GlobalAveragePool, MaxPool2d
from tests.unit.payload.doubles.layers import slope, stored
from tests.unit.payload.doubles.oracle import Tensors, assert_close, compare, functional, torch

Runner = Callable[..., subprocess.CompletedProcess[str]]
Theirs = Callable[[Tensors, "torch.Tensor"], "torch.Tensor"]


@dataclass(frozen=True)
class Case:
    """A layer, the shape of what it is given, and PyTorch's way to the same, with channels second."""

    make: Callable[[Context], Layer]
    shape: tuple[int, int, int, int]
    theirs: Theirs


def _conv(inputs: int, outputs: int, kernel: int, stride: int = 1, pad: int = 0, *, size: int = 7) -> Case:
    def theirs(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        return functional.conv2d(x, p["c.weight"], p["c.bias"], stride, pad)

    return Case(
        lambda c: Conv2d(c, "c", inputs, outputs, kernel, stride=stride, padding=pad, bias=True),
        (3, size, size - 1, inputs),
        theirs,
    )


def _norm(relu: bool) -> Case:
    def theirs(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        y = functional.batch_norm(x, None, None, p["n.weight"], p["n.bias"], training=True)
        return functional.relu(y) if relu else y

    return Case(lambda c: BatchNorm(c, "n", 5, relu=relu), (3, 4, 5, 5), theirs)


CASES = {
    "3x3": _conv(2, 3, 3, pad=1),
    "3x3-unpadded": _conv(2, 3, 3),
    "3x3-stride-2": _conv(2, 3, 3, stride=2, pad=1),
    "3x3-far-padded": _conv(2, 3, 3, pad=3),
    "7x7-stride-2": _conv(3, 2, 7, stride=2, pad=3),
    "4x4-stride-3": _conv(2, 2, 4, stride=3, pad=1),
    "1x1": _conv(4, 3, 1),
    "1x1-stride-2": _conv(4, 3, 1, stride=2),
    "norm": _norm(relu=False),
    "norm-relu": _norm(relu=True),
    "max": Case(lambda c: MaxPool2d(c, 2), (3, 7, 6, 2), lambda _, x: functional.max_pool2d(x, 2)),
    "max-overlapping": Case(
        lambda c: MaxPool2d(c, 3, stride=2, padding=1),
        (3, 7, 6, 2),
        lambda _, x: functional.max_pool2d(x, 3, 2, 1),
    ),
    "global": Case(GlobalAveragePool, (3, 4, 5, 2), lambda _, x: x.mean(dim=(2, 3))),
}

BLOCKS = {
    "part-of-an-image": _conv(64, 8, 3, pad=1, size=33),
    "part-of-an-image-stride-2": _conv(64, 8, 3, stride=2, pad=1, size=65),
    "two-images-of-three": _conv(4, 8, 3, pad=1, size=40),
    "one-image-of-three": _conv(48, 2, 3, pad=1, size=20),
}
"""Of 512 positions or a MiB of patches, whichever is more."""

WINOGRAD = {
    "tiles": _conv(32, 40, 3, pad=1, size=16),
    "tiles-cut-at-edges": _conv(33, 32, 3, pad=1, size=15),
    "tiles-unpadded": _conv(32, 33, 3, size=18),
    "tiles-far-padded": _conv(32, 33, 3, pad=2, size=15),
    "tiles-of-two-images-of-three": _conv(32, 32, 3, pad=1, size=32),
    "tiles-of-part-of-an-image": _conv(32, 32, 3, pad=1, size=46),
}
"""In blocks of 128 tiles of 4x4 outputs."""


def _input(case: Case, dtype: str = "float64") -> Array:
    return np.random.default_rng(5).standard_normal(case.shape).astype(dtype)


def _channels_last(theirs: Theirs) -> Theirs:
    def call(p: Tensors, x: torch.Tensor) -> torch.Tensor:
        y = theirs(p, x.permute(0, 3, 1, 2))
        return y.permute(0, 2, 3, 1) if y.ndim == 4 else y

    return call


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("name", [*CASES, *BLOCKS, *WINOGRAD])
def test_layer_is_pytorchs(name: str, dtype: str, device: Device) -> None:
    case = {**CASES, **BLOCKS, **WINOGRAD}[name]
    compare(case.make(Context(device)), _input(case, dtype), device, _channels_last(case.theirs))


class _Counting(Cpu):
    """Counts the multiplications of matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def matmul(
        self, left: Array, right: Array, out: Array | None = None, dtype: DTypeLike | None = None
    ) -> Array:
        product = super().matmul(left, right, out, dtype)
        self.count += product.size * left.shape[-1]
        return product


@pytest.mark.parametrize(
    ("inputs", "batch", "dtype", "fewer"),
    [
        (128, 8, "float32", True),
        (128, 8, "float64", True),
        (128, 8, "float16", False),  # errors of the transforms would be too large
        (16, 8, "float32", False),  # and here they would take longer than the products
        (128, 1, "float32", False),
    ],
)
def test_wide_3x3_convolutions_take_half_the_multiplications(
    inputs: int, batch: int, dtype: str, fewer: bool
) -> None:
    device = _Counting()
    layer, tape = Conv2d(Context(device), "c", inputs, 128, 3, padding=1), Tape()
    stored([Unit("u", layer)], device, dtype)
    y = layer.forward(np.ones((batch, 16, 15, inputs), dtype), tape)
    layer.backward(np.ones_like(y), tape)
    products = 3 * (y.size * inputs * 9)
    assert device.count < products / 2 if fewer else device.count == products


@pytest.mark.parametrize("name", CASES)
def test_layer_gradients_are_slopes(name: str) -> None:
    case, rng = CASES[name], np.random.default_rng(6)
    layer = case.make(Context(Cpu()))
    storage = stored([Unit("u", layer)], Cpu())
    storage.master_weights += 0.5 * rng.standard_normal(storage.master_weights.shape)
    x = _input(case)
    weights = rng.standard_normal(layer.forward(x, Tape()).shape)

    def loss() -> float:
        return float((layer.forward(x, Tape()) * weights).sum())

    first, second = Tape(), Tape()  # two micro-batches in flight: gradients add up
    layer.forward(x, first)
    layer.forward(2 * x[:2], second)
    layer.backward(weights[:2].copy(), second)
    other = storage.grads.copy()
    dx = layer.backward(weights.copy(), first)
    np.testing.assert_allclose(dx, slope(loss, x), atol=1e-7)
    np.testing.assert_allclose(storage.grads - other, slope(loss, storage.master_weights), atol=1e-7)


@pytest.mark.parametrize("name", CASES)
def test_layer_of_no_samples(name: str, device: Device) -> None:
    case = CASES[name]
    layer = case.make(Context(device))
    storage = stored([Unit("u", layer)], device)
    x, tape = device.asarray(_input(case)), Tape()
    full = layer.forward(x, Tape())
    y = layer.forward(x[:0], tape)
    assert y.shape == (0, *full.shape[1:])
    assert layer.backward(device.xp.zeros_like(y), tape).shape == (0, *x.shape[1:])
    assert not storage.grads.any()


@pytest.mark.parametrize("name", CASES)
def test_layer_in_half_precision(name: str, device: Device) -> None:
    case = CASES[name]
    layer, results = case.make(Context(device)), []
    for precision in ("float64", "float16"):
        stored([Unit("u", layer)], device, precision)
        tape = Tape()
        y = layer.forward(device.asarray(_input(case), precision), tape)
        dy = np.random.default_rng(8).standard_normal(y.shape)
        dx = layer.backward(device.asarray(dy, precision), tape)
        assert y.dtype == dx.dtype == precision
        results.append([device.to_host(array).astype("float64") for array in (y, dx)])
    for half, full in zip(results[1], results[0], strict=True):
        np.testing.assert_allclose(half, full, atol=0.03 * np.abs(full).max())


def test_the_first_layer_gives_no_gradient_by_data(device: Device) -> None:
    case, grads = CASES["3x3"], []
    for first in (False, True):
        layer = Conv2d(Context(device), "c", 2, 3, 3, padding=1, first=first)
        storage, tape = stored([Unit("u", layer)], device), Tape()
        x = device.asarray(_input(case))
        y = layer.forward(x, tape)
        assert layer.backward(y, tape).size == (0 if first else x.size)
        grads.append(device.to_host(storage.grads).copy())
    np.testing.assert_allclose(*grads, rtol=1e-12)


def test_the_first_of_equal_numbers_is_the_largest(device: Device) -> None:
    compare(
        MaxPool2d(Context(device), 3, stride=1),
        np.zeros((1, 4, 4, 2)),
        device,
        _channels_last(lambda _, x: functional.max_pool2d(x, 3, 1)),
    )


def test_batch_norm_keeps_pytorchs_running_averages(device: Device) -> None:
    layer, theirs = BatchNorm(Context(device), "n", 5), torch.nn.BatchNorm2d(5, dtype=torch.float64)
    stored([Unit("u", layer)], device)
    rng = np.random.default_rng(4)
    for _ in range(3):
        x = 3 + 2 * rng.standard_normal((4, 2, 3, 5))
        layer.forward(device.asarray(x), Tape())
        theirs(torch.tensor(x).permute(0, 3, 1, 2))
    layer.forward(device.asarray(x), Tape(training=False))
    layer.forward(device.asarray(x), Tape(again=True))
    for name, expected in (("n.running_mean", theirs.running_mean), ("n.running_var", theirs.running_var)):
        assert_close(device.to_host(layer.state[name]).copy(), expected, name)
    theirs.eval()
    y = layer.forward(device.asarray(x), Tape(training=False))
    assert_close(device.to_host(y), theirs(torch.tensor(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1), "y")


def test_batch_norm_sees_a_recomputed_batch_once(device: Device) -> None:
    states = []
    for wrap in (lambda layer: layer, Recompute):
        layer = wrap(BatchNorm(Context(device), "n", 5))
        stored([Unit("u", layer)], device)
        tape, x = Tape(), device.asarray(_input(CASES["norm"]))
        layer.backward(layer.forward(x, tape), tape)
        states.append(device.to_host(layer.state["n.running_mean"]).copy())
    np.testing.assert_array_equal(*states)


def test_batch_norm_of_numbers_far_from_zero(device: Device) -> None:
    x = (1000 + np.random.default_rng(3).standard_normal((64, 8, 8, 5))).astype("float32")
    layer = BatchNorm(Context(device), "n", 5)
    stored([Unit("u", layer)], device, "float32")
    y = device.to_host(layer.forward(device.asarray(x), Tape()))
    wide = x.astype("float64")
    expected = (wide - wide.mean(axis=(0, 1, 2))) / np.sqrt(wide.var(axis=(0, 1, 2)) + 1e-5)
    np.testing.assert_allclose(y, expected, atol=1e-3)


def test_batch_norm_over_ranks_is_that_of_one(program: Runner) -> None:
    ran = program(3, "batchnorm.py")
    assert ran.returncode == 0, ran.stderr
