"""Search for good settings of a training: ``train --find``.

The settings are found together: short trainings with different batch sizes and learning rates, each
with the warm-up and the schedule that are recommended with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from payload.cli.config import BatchSettings, TrainConfig
from payload.cli.report import ResultWriter
from payload.cli.settings import text_of
from payload.data.base import Dataset
from payload.device.base import Device
from payload.errors import UsageError
from payload.parallel.mesh import Mesh, alone
from payload.training.build import build_engine, build_loader, build_units
from payload.training.schedule import build_schedule

# Each size is measured in several rounds, so that other work on the machine slows down some of them
# only. Of all measured iterations the fastest counts. In a round they follow an iteration that is
# not measured.
_ROUNDS = 3
_MEASURED = 2
# Speed still grows with the size if the smaller sizes have less than this share of a size's speed.
_GROWN = 0.95
# The smallest size that has at least this share of the best speed is chosen.
_GOOD_ENOUGH = 0.97
_LEAST_LR = 1e-6
# Iterations of a trial with --global-batch-size. Other trials take as much time, but have at least
# _LEAST.
_ITERATIONS = 100
_LEAST = 20
# Share of a trial in which the learning rate rises.
_WARMUP = 0.1
_EVAL_SAMPLES = 1024
# Multiples of the learning rate that the optimizer has by default.
_FACTORS = (1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class Speed:
    """A micro-batch size, and the total speed of all ranks with this size."""

    micro_batch: int
    samples_per_s: float


@dataclass(frozen=True, slots=True)
class SearchTrial:
    """A short training, and its loss on held-out samples. Infinite: it learned nothing, or
    diverged.
    """

    settings: TrainConfig
    loss: float


def find(config: TrainConfig, device: Device, mesh: Mesh, dataset: Dataset) -> None:
    """Find a batch size, a learning rate and its schedule, print them, and write them to
    find.jsonl.

    Raises UsageError if no learning rate lowers the loss, or the settings contradict each other.
    """
    report = ResultWriter(mesh.world, config.run.out / "find.jsonl")
    speeds: Sequence[Speed] = ()
    if mesh.tp.size == mesh.pp.size == 1:
        speeds = measure_speeds(config, device, mesh, dataset, report)
        for speed in speeds:
            report.write("micro_batch", size=speed.micro_batch, samples_per_s=speed.samples_per_s)
    trials = []
    for settings in plan_trials(config, speeds, mesh.dp.size, dataset.training):
        trial = SearchTrial(settings, try_out(settings, device, mesh, dataset))
        trials.append(trial)
        recipe = recipe_of(settings)
        loss = trial.loss if math.isfinite(trial.loss) else None
        report.write("trial", **recipe, iterations=settings.batch.iterations, loss=loss)
        line = "batch {global_batch_size:6}  learning rate {lr:9.2e}  {schedule:8}".format_map(
            recipe
        )
        report.print_line(f"{line}  {'learned nothing' if loss is None else f'loss {loss:.4f}'}")
    chosen = most_robust(trials)
    best = recipe_of(chosen.settings)
    report.write("found", **best, loss=chosen.loss)
    flags = (
        f"--{name.replace('_', '-')} {text_of(best[name])}"
        for name in best
        if best[name] is not None
    )
    report.print_line(f"use {' '.join(flags)}")
    report.close()


def most_robust(trials: Sequence[SearchTrial]) -> SearchTrial:
    """Return the trial with the lowest mean loss of the trial and its neighbours in learning rate.

    Half and double the rate then train well too. trials: in the order of ``plan_trials``.
    Raises UsageError if no learning rate lowers the loss.
    """
    triples = [
        (lower.loss + trial.loss + higher.loss, trial)
        for lower, trial, higher in zip(trials, trials[1:], trials[2:], strict=False)
        if len({(t.settings.batch, t.settings.optimizer.schedule) for t in (lower, trial, higher)})
        == 1
    ]
    loss, chosen = min(triples, key=lambda triple: triple[0])
    if not math.isfinite(loss):
        raise UsageError(
            "--find: no learning rate lowers the loss; check the model and the data",
            code="no-learning-rate",
        )
    return chosen


def recipe_of(settings: TrainConfig) -> dict[str, Any]:
    """Return the settings that are recommended together, by name."""
    batch = settings.batch
    optimizer = settings.optimizer
    return {
        "global_batch_size": batch.global_batch_size,
        "micro_batch_size": batch.micro_batch_size,
        "lr": optimizer.lr,
        "warmup_iterations": optimizer.warmup_iterations,
        "schedule": optimizer.schedule,
    }


def plan_trials(
    config: TrainConfig, speeds: Sequence[Speed], ranks: int, samples: int
) -> Iterator[TrainConfig]:
    """Yield the settings of each trial: all learning rates, with each schedule, at each batch size.

    The second batch size gives each rank its fastest micro-batch. It is tried if it is larger, and
    the user has not set a batch size. Its trials run for the same time, but have at least 20
    iterations.
    ranks: of data parallelism. samples: for training.
    """
    given = config.batch
    batches = [given]
    if speeds:
        micro = fastest_size(speeds)
        sizes = {given.global_batch_size}
        if "global_batch_size" not in config.given:
            sizes.add(max(given.global_batch_size, min(micro * ranks, samples)))
        batches = [
            replace(
                given, global_batch_size=size, micro_batch_size=min(micro, math.ceil(size / ranks))
            )
            for size in sorted(sizes)
        ]
    for batch in batches:
        slower = _seconds(batch, speeds) / _seconds(batches[0], speeds)
        iterations = max(_LEAST, round(_ITERATIONS / slower))
        length = replace(batch, iterations=iterations, epochs=iterations)
        for schedule, factor in product(("constant", "cosine"), _FACTORS):
            lr = float(f"{factor * (config.optimizer.lr or 0.0):.2g}")
            optimizer = replace(
                config.optimizer,
                lr=lr,
                min_lr=min(config.optimizer.min_lr, lr),
                warmup_iterations=round(_WARMUP * iterations),
                schedule=schedule,
                decay_iterations=None,
            )
            yield replace(config, batch=length, optimizer=optimizer)


def _seconds(batch: BatchSettings, speeds: Sequence[Speed]) -> float:
    """Return the time of an iteration, by the measured size that is nearest below the
    micro-batch.
    """
    smaller = [speed for speed in speeds if speed.micro_batch <= (batch.micro_batch_size or 0)]
    return batch.global_batch_size / smaller[-1].samples_per_s if smaller else 1.0


def try_out(settings: TrainConfig, device: Device, mesh: Mesh, dataset: Dataset) -> float:
    """Train with these settings, and return the loss on held-out samples.

    Infinite: training diverged, or the loss is not lower than that of the first iteration.
    """
    settings = replace(
        settings, evaluation=replace(settings.evaluation, eval_samples=_EVAL_SAMPLES)
    )
    engine = build_engine(
        settings, device, mesh, build_units(settings.model, dataset, mesh.context(device))
    )
    loader = build_loader(settings, dataset, device, mesh)
    schedule = build_schedule(settings, mesh.dp.size, loader.order.per_epoch)
    losses: list[float] = []
    for feed in loader.training(1, schedule.iterations):
        number = feed.slot.iteration
        lr = schedule.at(number)
        losses.append(engine.step(feed.batches, targets=feed.targets, iteration=number, lr=lr).loss)
        if not math.isfinite(losses[-1]):
            return math.inf
    loss = engine.evaluate(loader.held_out()).loss
    return loss if loss < losses[0] else math.inf


class SpeedSearch:
    """The best speed of each measured micro-batch size: 1, 2, 4, …

    The last size is the largest that fits the memory and the data, unless the speed stops growing
    earlier.
    """

    def __init__(self, largest: int) -> None:
        self._largest = largest
        self._speeds: dict[int, float] = {}

    @property
    def speeds(self) -> list[Speed]:
        return [Speed(size, speed) for size, speed in self._speeds.items()]

    def sizes(self) -> Iterator[int]:
        """Yield each size to be measured next, in several rounds. ``record`` its speed before the
        next.
        """
        for _ in range(_ROUNDS):
            size = 1
            while size <= self._largest and (
                self._grows_at(size // 2) or self._grows_at(size // 4)
            ):
                yield size
                size *= 2

    def record(self, size: int, speed: float) -> None:
        """Record a measured speed. NaN: not enough memory."""
        if math.isnan(speed):
            self._largest = size // 2
            self._speeds = {other: best for other, best in self._speeds.items() if other < size}
        else:
            self._speeds[size] = max(speed, self._speeds.get(size, 0.0))

    def _grows_at(self, size: int) -> bool:
        """Return whether a size is faster than the smaller sizes."""
        smaller = [speed for other, speed in self._speeds.items() if other < size]
        return not smaller or self._speeds[size] > max(smaller) / _GROWN


def measure_speeds(
    config: TrainConfig, device: Device, mesh: Mesh, dataset: Dataset, report: ResultWriter
) -> list[Speed]:
    """Print each measured speed. Return the speeds of the micro-batch sizes that ``SpeedSearch``
    chooses.

    Each rank trains a model of its own, so a rank that runs out of memory does not block another
    rank.
    """
    search = SpeedSearch(dataset.training)
    for size in search.sizes():
        speed = sum(mesh.world.allgather(_speed_alone(config, device, dataset, size)))
        search.record(size, speed)
        result = "not enough memory" if math.isnan(speed) else f"{speed:10.1f} samples/s"
        report.print_line(f"micro-batch {size:6}  {result}")
    return search.speeds


def _speed_alone(config: TrainConfig, device: Device, dataset: Dataset, size: int) -> float:
    """Return this rank's samples per second with micro-batches of ``size``. NaN: not enough
    memory.
    """
    batch = replace(config.batch, global_batch_size=size, micro_batch_size=size)
    config_of_size = replace(config, batch=batch)
    mesh = alone()
    seconds = math.inf
    try:
        engine = build_engine(
            config_of_size, device, mesh, build_units(config.model, dataset, mesh.context(device))
        )
        loader = build_loader(config_of_size, dataset, device, mesh)
        feeds = loader.training(1, 1 + _MEASURED)
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


def fastest_size(speeds: Sequence[Speed]) -> int:
    """Return the smallest size with at least 97 % of the best speed."""
    least = _GOOD_ENOUGH * max(speed.samples_per_s for speed in speeds)
    return min(speed.micro_batch for speed in speeds if speed.samples_per_s >= least)
