"""Layers and models of the payload, ready to run, and numerical gradients to compare with."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from payload.data.loader import local_slice
from payload.device.base import Array, Device
from payload.nn.loss import SoftmaxCrossEntropy
from payload.nn.module import RandomState, Unit
from payload.optim.base import Optimizer
from payload.optim.precision import LossScale, Precision
from payload.optim.sgd import SGD
from payload.parallel.engine import Engine
from payload.parallel.mesh import EngineOptions, Mesh, alone
from payload.parallel.pipeline import MicroBatch
from payload.parallel.zero import FlatStorage


def engine_of(
    device: Device,
    mesh: Mesh,
    units: Sequence[Unit],
    optimizer: Callable[..., Optimizer] = SGD,
    *,
    split: bool = False,
    loss_scale: LossScale | None = None,
    **options: Any,
) -> Engine:
    """A model with cross-entropy and an optimizer; ``options`` are fields of ``EngineOptions``."""
    return Engine(
        device,
        mesh,
        units,
        SoftmaxCrossEntropy(mesh.context(device), split=split),
        lambda storage: optimizer(
            storage.optimizer_device, storage.master_weights, storage.segments
        ),
        options=EngineOptions(**options),
        loss_scale=loss_scale,
    )


def batch_of(device: Device, x: Array, targets: Array, dtype: str | None = None) -> MicroBatch:
    """These samples, in the order of their places in the batch."""
    places = np.arange(len(targets), dtype="uint32")
    return MicroBatch(device.asarray(x, dtype), device.asarray(targets), device.asarray(places))


def cut(batch: MicroBatch, pieces: int) -> list[MicroBatch]:
    """A batch in micro-batches of nearly the same size, some of them empty if there are fewer
    samples.
    """
    parts = [local_slice(len(batch.samples), piece, pieces) for piece in range(pieces)]
    return [
        MicroBatch(batch.inputs[part], batch.targets[part], batch.samples[part]) for part in parts
    ]


def stored(
    units: Sequence[Unit],
    device: Device,
    dtype: str = "float64",
    precision: Precision | None = None,
) -> FlatStorage:
    """The units' parameters and gradients in flat arrays, at the beginning of an iteration."""
    dp = alone().dp
    precision = precision or Precision(np.dtype(dtype), np.dtype(dtype))
    storage = FlatStorage(device, units, dp, EngineOptions(seed=1, precision=precision))
    storage.begin()
    return storage


def draw(count: int, device: Device) -> RandomState:
    return RandomState(
        seed=3, iteration=5, samples=device.asarray(np.arange(count, dtype="uint32"))
    )


def slope(function: Callable[[], float], variable: Array, step: float = 1e-6) -> Array:
    """Central differences of a function of ``variable``, which is moved in place."""
    result = np.zeros_like(variable)
    for index in np.ndindex(variable.shape):
        value = variable[index]
        variable[index] = value + step
        above = function()
        variable[index] = value - step
        result[index] = (above - function()) / (2 * step)
        variable[index] = value
    return result
