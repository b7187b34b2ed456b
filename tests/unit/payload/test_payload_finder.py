"""The search for a batch size and a learning rate; the evaluation of a trained model."""

from __future__ import annotations

import math
from itertools import groupby
from math import inf

import pytest

from payload.comm.base import Solo
from payload.data.datasets import open_dataset
from payload.device.base import CpuDevice
from payload.errors import UsageError
from payload.parallel.mesh import alone as alone_mesh
from payload.training.schedule import build_schedule
from payload.training.search import (
    SearchTrial,
    Speed,
    SpeedSearch,
    fastest_size,
    most_robust,
    plan_trials,
    recipe_of,
    try_out,
)
from tests.support.messages import refused
from tests.support.payload import train_config


def test_fastest_size_ends_where_speed_stops_growing() -> None:
    speeds = [Speed(1, 10), Speed(2, 19), Speed(4, 35), Speed(8, 36), Speed(16, 36.5)]
    assert fastest_size(speeds) == 8
    assert fastest_size([Speed(1, 10)]) == 1


GROWING = {1: 10.0, 2: 20.0, 4: 21.0, 8: 40.0, 16: 80.0, 32: 81.0, 64: 81.0, 128: 81.0}


@pytest.mark.parametrize("planted", [*range(10), None])
@pytest.mark.parametrize(("largest", "last"), [(1000, 64), (16, 16), (31, 16), (1, 1)])
def test_size_does_not_depend_on_a_bad_measurement(
    largest: int, last: int, planted: int | None
) -> None:
    search = SpeedSearch(largest)
    for number, size in enumerate(search.sizes()):
        search.record(size, 1.0 if number == planted else GROWING[size])
    expected = [Speed(size, speed) for size, speed in GROWING.items() if size <= last]
    assert search.speeds[: len(expected)] == expected
    assert fastest_size(search.speeds) == min(last, 16)


@pytest.mark.parametrize(("before", "later"), [([], 2), ([1, 2, 4, 8, 16, 32, 64], 1)])
def test_sizes_without_memory_are_not_measured_again(before: list[int], later: int) -> None:
    """Also if these sizes had enough memory in the first round."""
    search = SpeedSearch(1000)
    measured = []
    for size in search.sizes():
        search.record(
            size, math.nan if size > 8 and len(measured) >= len(before) else GROWING[size]
        )
        measured.append(size)
    assert measured == [*before, 1, 2, 4, 8, 16, *([1, 2, 4, 8] * later)]
    assert fastest_size(search.speeds) == 8


ALIKE = [Speed(1, 1000), Speed(2, 1100), Speed(4, 1200), Speed(8, 2000)]
SPEEDS = [Speed(16, 1000), Speed(32, 2000), Speed(64, 4000), Speed(128, 8000), Speed(256, 8100)]


@pytest.mark.parametrize(
    ("flags", "speeds", "ranks", "samples", "trials"),
    [
        ("", [], 1, 1000, [(64, None, 100, 10)]),
        ("", SPEEDS, 1, 1000, [(64, 64, 100, 10), (128, 128, 100, 10)]),
        ("", SPEEDS[:2], 1, 1000, [(64, 32, 100, 10)]),
        ("", SPEEDS, 4, 1000, [(64, 16, 100, 10), (512, 128, 100, 10)]),
        ("", ALIKE, 16, 1000, [(64, 4, 100, 10), (128, 8, 83, 8)]),
        ("", ALIKE, 64, 300, [(64, 1, 100, 10), (300, 5, 26, 3)]),
        ("", ALIKE, 256, 1000, [(64, 1, 100, 10), (1000, 4, 20, 2)]),
        ("--global-batch-size 32", SPEEDS, 1, 1000, [(32, 32, 100, 10)]),
    ],
)
def test_trials_have_the_batches_of_the_user_and_of_the_ranks(
    flags: str, speeds: list[Speed], ranks: int, samples: int, trials: list[tuple[int | None, ...]]
) -> None:
    """(batch, micro-batch, iterations, warm-up); larger batches take the same time."""
    planned = list(plan_trials(train_config(*flags.split()), speeds, ranks, samples))
    batches = [
        (b.global_batch_size, b.micro_batch_size, b.iterations, each.optimizer.warmup_iterations)
        for each in planned
        for b in (each.batch,)
    ]
    assert [*dict.fromkeys(batches)] == trials
    series = [
        [*group]
        for _, group in groupby(planned, lambda each: (each.batch, each.optimizer.schedule))
    ]
    assert len(series) == 2 * len(trials)
    for group in series:
        rates = [each.optimizer.lr for each in group]
        assert (rates[0], rates[-1], 0.05 in rates, rates) == (0.0063, 0.8, True, sorted(rates))


@pytest.mark.parametrize(
    "flags", ["--schedule cosine --min-lr 0.01", "--schedule step --decay-iterations 500"]
)
def test_trial_has_a_schedule_of_its_own_length(flags: str) -> None:
    for trial in plan_trials(train_config("--lr", "0.05", *flags.split()), SPEEDS, 1, 1000):
        build_schedule(trial, 1, 16)


def tried(*losses: float, batch: int = 64) -> list[SearchTrial]:
    configs = (
        train_config("--global-batch-size", str(batch), "--lr", str(number + 1))
        for number in range(len(losses))
    )
    return [SearchTrial(config, loss) for config, loss in zip(configs, losses, strict=True)]


@pytest.mark.parametrize(
    ("trials", "found"),
    [
        (tried(5, 4, 3, 3, 3, 4), (64, 4)),
        (tried(5, 3, 3, 1, inf, 1), (64, 3)),
        (tried(1, 1, 9) + tried(9, 1, 1, batch=128), (64, 2)),
        (tried(3, 3, 3) + tried(9, 1, 1, 1, batch=128), (128, 3)),
    ],
)
def test_best_rate_has_good_neighbours(trials: list[SearchTrial], found: tuple[int, float]) -> None:
    recipe = recipe_of(most_robust(trials).settings)
    assert (recipe["global_batch_size"], recipe["lr"]) == found


def test_search_in_which_nothing_is_learned_is_refused() -> None:
    with refused("no-learning-rate", UsageError):
        most_robust(tried(1, inf, 1, inf))


def test_diverging_trial_has_no_loss() -> None:
    config = train_config("--lr", "1e30", "--iterations", "3")
    assert try_out(config, CpuDevice(), alone_mesh(), open_dataset(config, Solo())) == inf
