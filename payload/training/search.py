"""Search for a good micro-batch size and learning rate: ``train --find``."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace

from payload.cli.config import TrainConfig
from payload.cli.report import Report
from payload.data.base import Dataset
from payload.device.base import Device
from payload.errors import UsageError
from payload.parallel.engine import Engine
from payload.parallel.mesh import Mesh, alone
from payload.training.build import build_engine, build_loader, build_units

# Number of measured iterations, of which the fastest counts. They follow an iteration that is not measured.
_TRIALS = 3
# The smallest batch with this share of the best speed is chosen. Larger batches only need more memory.
_GOOD_ENOUGH = 0.95
_LEAST_LR, _MOST_LR = 1e-6, 10.0
_ITERATIONS = 100
_SMOOTHING = 0.9
# Multiple of the lowest loss at which training counts as diverged.
_TOO_HIGH = 4.0


@dataclass(frozen=True, slots=True)
class Speed:
    """A micro-batch size, and the total speed of all ranks with this size."""

    micro_batch: int
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """A learning rate, and the smoothed loss at this rate."""

    lr: float
    loss: float


def find(config: TrainConfig, device: Device, mesh: Mesh, dataset: Dataset) -> None:
    """Find a micro-batch size and a learning rate, print them, and write them to find.jsonl.

    Raises UsageError if no learning rate lowers the loss, or the settings contradict each other.
    """
    report = Report(mesh.world, config.run.out / "find.jsonl")
    sizes = []
    if mesh.tp.size == mesh.pp.size == 1:
        for speed in measure_speeds(config, device, mesh, dataset):
            sizes.append(speed)
            report.write("micro_batch", size=speed.micro_batch, samples_per_s=speed.samples_per_s)
            report.print_line(f"micro-batch {speed.micro_batch:6}  {speed.samples_per_s:10.1f} samples/s")
    units = build_units(config.model, dataset, mesh.context(device))
    engine = build_engine(config, device, mesh, units)
    points = []
    for point in measure_losses(config, engine, dataset):
        points.append(point)
        report.write("learning_rate", lr=point.lr, loss=point.loss)
        report.print_line(f"learning rate {point.lr:9.2e}  loss {point.loss:.4f}")
    if sizes:
        size, batch = fit_to_ranks(
            fastest_size(sizes), config.batch.global_batch_size, mesh.dp.size, dataset.training
        )
        line = f"use --micro-batch-size {size}"
        if batch > config.batch.global_batch_size:
            line += f" --global-batch-size {batch}; a smaller batch does not suffice for {mesh.dp.size} ranks"
        report.write("found", micro_batch=size, global_batch=batch)
        report.print_line(line)
    lr = steepest_rate(points)
    report.write("found", lr=lr)
    report.print_line(f"use --lr {lr:.2g} for a batch of {config.batch.global_batch_size}")


def measure_speeds(config: TrainConfig, device: Device, mesh: Mesh, dataset: Dataset) -> Iterator[Speed]:
    """Yield the speeds of the micro-batch sizes 1, 2, 4, …

    The last size is the largest that fits the memory and the data, unless the speed stops growing earlier.
    Each rank trains a model of its own, so a rank that runs out of memory does not block another rank.
    """
    best, slower, size = 0.0, 0, 1
    while size <= dataset.training and slower < 2:  # noqa: PLR2004
        speed = sum(mesh.world.allgather(_speed_alone(config, device, dataset, size)))
        if math.isnan(speed):
            return
        yield Speed(size, speed)
        slower = 0 if speed > best / _GOOD_ENOUGH else slower + 1
        best = max(best, speed)
        size *= 2


def _speed_alone(config: TrainConfig, device: Device, dataset: Dataset, size: int) -> float:
    """Return this rank's samples per second with micro-batches of ``size``. NaN: not enough memory."""
    batch = replace(config.batch, global_batch_size=size, micro_batch_size=size)
    config_of_size, mesh = replace(config, batch=batch), alone()
    seconds = math.inf
    try:
        engine = build_engine(
            config_of_size, device, mesh, build_units(config.model, dataset, mesh.context(device))
        )
        loader = build_loader(config_of_size, dataset, device, mesh)
        feeds = loader.training(1, 1 + _TRIALS)
        for number, feed in enumerate(feeds):
            began = time.perf_counter()
            engine.step(feed.batches, targets=feed.targets, iteration=number + 1, lr=_LEAST_LR)
            device.synchronize()
            if number:
                seconds = min(seconds, (time.perf_counter() - began) / len(feed.slot.indices))
    # CuPy's out-of-memory error is also a MemoryError.
    except MemoryError:
        return math.nan
    return 1 / seconds


def measure_losses(config: TrainConfig, engine: Engine, dataset: Dataset) -> Iterator[Point]:
    """Run an iteration at each of many learning rates, from low to high, until the loss diverges.

    This is the range test of Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section
    3.3. The rates grow by a constant factor. The losses are a bias-corrected moving average, as in Adam.
    """
    loader = build_loader(config, dataset, engine.device, engine.mesh)
    mean, lowest = 0.0, math.inf
    for number, feed in enumerate(loader.training(1, _ITERATIONS)):
        lr = _LEAST_LR * (_MOST_LR / _LEAST_LR) ** (number / (_ITERATIONS - 1))
        result = engine.step(feed.batches, targets=feed.targets, iteration=number + 1, lr=lr)
        if not math.isfinite(result.loss):
            return
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * result.loss
        loss = mean / (1 - _SMOOTHING ** (number + 1))
        lowest = min(lowest, loss)
        if loss > _TOO_HIGH * lowest:
            return
        yield Point(lr, loss)


def fastest_size(sizes: list[Speed]) -> int:
    """Return the smallest micro-batch size with at least 95 % of the best speed."""
    best = max(speed.samples_per_s for speed in sizes)
    return min(speed.micro_batch for speed in sizes if speed.samples_per_s >= _GOOD_ENOUGH * best)


def fit_to_ranks(size: int, batch: int, ranks: int, samples: int) -> tuple[int, int]:
    """Return the micro-batch size, at most samples / ranks, and the global batch, at least size · ranks."""
    size = min(size, max(1, samples // ranks))
    return size, max(batch, size * ranks)


def steepest_rate(points: list[Point]) -> float:
    """Return the learning rate at which the loss falls fastest per logarithm of the rate.

    Only rates below the rate with the lowest loss are considered. Raises UsageError if the loss never falls.
    """
    lowest = min(range(len(points)), key=lambda index: points[index].loss, default=0)
    slopes = [
        (points[index + 1].loss - points[index - 1].loss, points[index].lr) for index in range(1, lowest)
    ]
    if not slopes or min(slopes)[0] >= 0:
        raise UsageError(
            "--find: no learning rate lowers the loss; check the model and the data", code="no-learning-rate"
        )
    return min(slopes)[1]
