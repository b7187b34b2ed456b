"""The layers of convolutional networks, beyond what all layers are tested for."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import DTypeLike

from payload.device.base import Array, CpuDevice, Device
from payload.nn.conv import Conv2d
from payload.nn.module import LayerContext, Tape, Unit
from payload.nn.norm import BatchNorm
from payload.nn.pool import MaxPool2d
from tests.integration.payload.conftest import Runner
from tests.support.doubles.cases import CASES, channels_last
from tests.support.doubles.layers import stored
from tests.support.doubles.oracle import assert_close, compare, functional, torch


class _Counting(CpuDevice):
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
    layer = Conv2d(LayerContext(device), "c", inputs, 128, 3, padding=1)
    tape = Tape()
    stored([Unit("u", layer)], device, dtype)
    y = layer.forward(np.ones((batch, 16, 15, inputs), dtype), tape)
    layer.backward(np.ones_like(y), tape)
    products = 3 * (y.size * inputs * 9)
    assert device.count < products / 2 if fewer else device.count == products


def test_first_layer_computes_no_gradient_of_the_input(device: Device) -> None:
    grads = []
    for first in (False, True):
        layer = Conv2d(LayerContext(device), "c", 2, 3, 3, padding=1, first=first)
        storage = stored([Unit("u", layer)], device)
        tape = Tape()
        x = device.asarray(CASES["3x3"].input())
        y = layer.forward(x, tape)
        assert layer.backward(y, tape).size == (0 if first else x.size)
        grads.append(device.to_host(storage.grads).copy())
    np.testing.assert_allclose(*grads, rtol=1e-12)


def test_max_pool_of_equal_numbers_selects_the_first(device: Device) -> None:
    compare(
        MaxPool2d(LayerContext(device), 3, stride=1),
        np.zeros((1, 4, 4, 2)),
        device,
        channels_last(lambda _, x: functional.max_pool2d(x, 3, 1)),
    )


def test_batch_norm_keeps_pytorchs_running_averages(device: Device) -> None:
    layer = BatchNorm(LayerContext(device), "n", 5)
    torch_norm = torch.nn.BatchNorm2d(5, dtype=torch.float64)
    stored([Unit("u", layer)], device)
    rng = np.random.default_rng(4)
    for _ in range(3):
        x = 3 + 2 * rng.standard_normal((4, 2, 3, 5))
        layer.forward(device.asarray(x), Tape())
        torch_norm(torch.tensor(x).permute(0, 3, 1, 2))
    layer.forward(device.asarray(x), Tape(training=False))
    layer.forward(device.asarray(x), Tape(recompute=True))
    for name, expected in (
        ("n.running_mean", torch_norm.running_mean),
        ("n.running_var", torch_norm.running_var),
    ):
        assert_close(device.to_host(layer.state[name]).copy(), expected, name)
    torch_norm.eval()
    y = layer.forward(device.asarray(x), Tape(training=False))
    assert_close(
        device.to_host(y), torch_norm(torch.tensor(x).permute(0, 3, 1, 2)).permute(0, 2, 3, 1), "y"
    )


def test_batch_norm_of_numbers_far_from_zero(device: Device) -> None:
    x = (1000 + np.random.default_rng(3).standard_normal((64, 8, 8, 5))).astype("float32")
    layer = BatchNorm(LayerContext(device), "n", 5)
    stored([Unit("u", layer)], device, "float32")
    y = device.to_host(layer.forward(device.asarray(x), Tape()))
    wide = x.astype("float64")
    expected = (wide - wide.mean(axis=(0, 1, 2))) / np.sqrt(wide.var(axis=(0, 1, 2)) + 1e-5)
    np.testing.assert_allclose(y, expected, atol=1e-3)


def test_batch_norm_over_ranks_is_that_of_one(program: Runner) -> None:
    program(3, "batchnorm.py")
