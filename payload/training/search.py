"""Looks for a micro-batch size and a learning rate to train with: ``train --find``."""

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

_TRIALS = 3  # iterations of which the fastest counts, after one that is not measured
_GOOD_ENOUGH = 0.95  # of the best speed: larger batches only cost memory
_LEAST_LR, _MOST_LR = 1e-6, 10.0
_ITERATIONS = 100
_SMOOTHING = 0.9
_TOO_HIGH = 4.0  # times the lowest loss: it has diverged


@dataclass(frozen=True, slots=True)
class Speed:
    """Of one micro-batch size, of all ranks."""

    micro_batch: int
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class Point:
    """Of the curve of losses over learning rates."""

    lr: float
    loss: float  # smoothed


def find(config: TrainConfig, device: Device, mesh: Mesh, dataset: Dataset) -> None:
    """Measure, print and write both.

    Raises:
        UsageError: no learning rate was any good, or the settings do not go together.
    """
    report = Report(mesh.world, config.run.out / "find.jsonl")
    sizes = []
    if mesh.tp.size == mesh.pp.size == 1:
        for speed in speeds(config, device, mesh, dataset):
            sizes.append(speed)
            report.write("micro_batch", size=speed.micro_batch, samples_per_s=speed.samples_per_s)
            report.print_line(f"micro-batch {speed.micro_batch:6}  {speed.samples_per_s:10.1f} samples/s")
    units = build_units(config.model, dataset, mesh.context(device))
    engine = build_engine(config, device, mesh, units)
    points = []
    for point in range_test(config, engine, dataset):
        points.append(point)
        report.write("learning_rate", lr=point.lr, loss=point.loss)
        report.print_line(f"learning rate {point.lr:9.2e}  loss {point.loss:.4f}")
    if sizes:
        size, batch = usable(knee(sizes), config.batch.global_batch_size, mesh.dp.size, dataset.training)
        line = f"use --micro-batch-size {size}"
        if batch > config.batch.global_batch_size:
            line += f" --global-batch-size {batch}: less leaves each of {mesh.dp.size} ranks less than that"
        report.write("found", micro_batch=size, global_batch=batch)
        report.print_line(line)
    lr = steepest(points)
    report.write("found", lr=lr)
    report.print_line(f"use --lr {lr:.2g} for a batch of {config.batch.global_batch_size}")


def speeds(config: TrainConfig, device: Device, mesh: Mesh, dataset: Dataset) -> Iterator[Speed]:
    """Of sizes that double until memory is full, the data ends, or nothing is gained any more.

    Every rank works alone, so that one whose memory is full keeps no other waiting.
    """
    best, useless, size = 0.0, 0, 1
    while size <= dataset.training and useless < 2:  # noqa: PLR2004
        speed = sum(mesh.world.allgather(_speed_alone(config, device, dataset, size)))
        if math.isnan(speed):
            return
        yield Speed(size, speed)
        useless = 0 if speed > best / _GOOD_ENOUGH else useless + 1
        best = max(best, speed)
        size *= 2


def _speed_alone(config: TrainConfig, device: Device, dataset: Dataset, size: int) -> float:
    """Samples a second of this rank; NaN where its memory is full."""
    batch = replace(config.batch, global_batch_size=size, micro_batch_size=size)
    given, mesh = replace(config, batch=batch), alone()
    seconds = math.inf
    try:
        engine = build_engine(given, device, mesh, build_units(config.model, dataset, mesh.context(device)))
        loader = build_loader(given, dataset, device, mesh)
        feeds = loader.training(1, 1 + _TRIALS)
        for number, feed in enumerate(feeds):
            began = time.perf_counter()
            engine.step(feed.batches, targets=feed.targets, iteration=number + 1, lr=_LEAST_LR)
            device.synchronize()
            if number:
                seconds = min(seconds, (time.perf_counter() - began) / len(feed.slot.indices))
    except MemoryError:  # CuPy's is one, too
        return math.nan
    return 1 / seconds


def range_test(config: TrainConfig, engine: Engine, dataset: Dataset) -> Iterator[Point]:
    """Train a little at each of many learning rates, from low to high, until the loss grows without bound.

    Smith, "Cyclical Learning Rates for Training Neural Networks", 2017, section 3.3, with rates that grow by
    a factor. Losses are smoothed as Adam does its moments.
    """
    loader = build_loader(config, dataset, engine.device, engine.mesh)
    mean, lowest = 0.0, math.inf
    for number, feed in enumerate(loader.training(1, _ITERATIONS)):
        lr = _LEAST_LR * (_MOST_LR / _LEAST_LR) ** (number / (_ITERATIONS - 1))
        outcome = engine.step(feed.batches, targets=feed.targets, iteration=number + 1, lr=lr)
        if not math.isfinite(outcome.loss):
            return
        mean = _SMOOTHING * mean + (1 - _SMOOTHING) * outcome.loss
        loss = mean / (1 - _SMOOTHING ** (number + 1))
        lowest = min(lowest, loss)
        if loss > _TOO_HIGH * lowest:
            return
        yield Point(lr, loss)


def knee(sizes: list[Speed]) -> int:
    """The smallest of the sizes that are about as fast as the fastest."""
    best = max(one.samples_per_s for one in sizes)
    return min(one.micro_batch for one in sizes if one.samples_per_s >= _GOOD_ENOUGH * best)


def usable(size: int, batch: int, ranks: int, samples: int) -> tuple[int, int]:
    """The micro-batch that so many data-parallel ranks can all have, and the least global batch, from
    ``batch`` on, of which each gets that much."""
    size = min(size, max(1, samples // ranks))
    return size, max(batch, size * ranks)


def steepest(points: list[Point]) -> float:
    """The learning rate, by its logarithm, at which the loss falls fastest before its lowest point.

    Raises:
        UsageError: it falls nowhere.
    """
    lowest = min(range(len(points)), key=lambda place: points[place].loss, default=0)
    slopes = [
        (points[place + 1].loss - points[place - 1].loss, points[place].lr) for place in range(1, lowest)
    ]
    if not slopes or min(slopes)[0] >= 0:
        raise UsageError(
            "--find: the loss falls at no learning rate; look at the model and the data",
            code="no-learning-rate",
        )
    return min(slopes)[1]
