"""The mean and the spread of the values of some runs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from clusterctl.runs.find import Row
from clusterctl.runs.report import report_of
from clusterctl.runs.spread import Spread, mean_of
from tests.unit.runs.made import made_run


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([0.5], "0.5"),
        ([1.0, 2.0], "1.50 ± 0.71"),
        ([1e300, 2e300], "1.50e+300 ± 7.1e+299"),
        ([1e308, 1e308], "1e+308"),
        ([1.7e308, -1.7e308], "0 ± inf"),
        ([1e300], "1e+300"),
    ],
)
def test_spread_of_values_of_any_size_has_a_text(values: list[float], text: str) -> None:
    assert str(Spread.of(values)) == text


@pytest.mark.parametrize("factor", [1.0, 1e-200, 1e200])
def test_spread_differs_from_another_whatever_their_scale(factor: float) -> None:
    low, high = (
        Spread.of([value * factor for value in values]) for values in ([1, 1.1, 0.9], [5, 5.1, 4.9])
    )
    wide = Spread.of([value * factor for value in (0.5, 9, 1)])
    assert low.differs_from(high) is True
    assert low.differs_from(wide) is False
    assert math.isfinite(low.error)


@pytest.mark.parametrize(
    ("values", "mean"),
    [
        ([1, 2.5], 1.75),
        ([1e308, 1e308], 1e308),
        ([math.inf, 1], math.inf),
        ([math.inf, -math.inf], math.nan),
    ],
)
def test_mean_of_values_of_any_size_is_a_number(values: list[float], mean: float) -> None:
    assert mean_of(values) == pytest.approx(mean, nan_ok=True)


@pytest.mark.parametrize("factor", [1e308, math.inf])
def test_report_of_seeds_that_diverged_is_written(tmp_path: Path, factor: float) -> None:
    rows = []
    for seed in (1, 2, 3):
        losses = [factor * (-1) ** seed, factor, 0.9 * min(factor, 1e308)]
        metrics = [{"step": step, "loss": loss} for step, loss in enumerate(losses)]
        rows.append(
            Row(made_run(tmp_path, seed, metrics=metrics, args=["--seed", str(seed), "--lr", "1"]))
        )
    assert [section for section in report_of(rows).sections if section.title == "Seeds"]


def test_single_run_has_no_deviation_for_programs() -> None:
    assert Spread.of([2.0]).as_dict() == {"mean": 2.0, "deviation": None, "count": 1}
    assert Spread.of([2.0, 2.0]).as_dict() == {"mean": 2.0, "deviation": 0.0, "count": 2}
