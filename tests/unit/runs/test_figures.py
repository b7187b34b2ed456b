"""Figures of metrics are those that NumPy computes of all values, at any size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterctl.runs.find import Row
from clusterctl.runs.page import Chart, Report
from clusterctl.runs.report import report_of
from clusterctl.runs.series import summarize
from clusterctl.state.ledger import RunRecord
from tests.unit.runs.made import made_run, record

Lines = Iterable[dict[str, Any]]
NAN, INF = math.nan, math.inf


def noise(count: int, seed: int = 0) -> np.ndarray[Any, np.dtype[np.float64]]:
    return np.exp(-np.arange(count) / count) + 0.1 * np.random.default_rng(seed).standard_normal(count)


def steps(count: int, **values: float) -> Iterator[dict[str, Any]]:
    """Lines with a step and a loss; values: other losses, ``at_STEP=loss``."""
    other = {int(key.removeprefix("at_")): value for key, value in values.items()}
    for step, loss in enumerate(noise(count).tolist()):
        yield {"step": step, "loss": other.get(step, loss)}


def written(folder: Path, lines: Lines) -> None:
    with (folder / "metrics.jsonl").open("w") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)


def table(folder: Path, lines: Lines) -> None:
    rows = list(lines)
    text = "".join(",".join(map(str, row.values())) + "\n" for row in rows)
    (folder / "metrics.csv").write_text(",".join(rows[0]) + "\n" + text)


def state(folder: Path, lines: Lines) -> None:
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": list(lines)}))


def restarted() -> Iterator[dict[str, Any]]:
    """The second attempt begins in the middle of the first."""
    yield from steps(20_000, at_15000=9.0)
    for line in steps(30_000, at_25000=-3.0):
        if line["step"] >= 10_000:
            yield {**line, "loss": line["loss"] + 1}


def two_runs() -> Iterator[dict[str, Any]]:
    for line in steps(3000):
        yield {"run": "a", **line}
        yield {"run": "b", **line, "loss": line["loss"] + 5}


@dataclass(frozen=True)
class Case:
    """A file of metrics. names: its metrics and the test of their lines. write: how it is written."""

    lines: Callable[[], Lines]
    axis: str = "step"
    write: Callable[[Path, Lines], None] = written
    names: tuple[str, ...] = ("loss",)


CASES = {
    "100": Case(lambda: steps(100)),
    "1,000 with gaps": Case(lambda: steps(1000, at_7=NAN, at_8=NAN, at_500=INF)),
    "inf is last": Case(lambda: steps(10_000, at_9999=-INF)),
    "60,001 with a spike": Case(lambda: ({"step": n, "loss": 50 if n == 101 else 1} for n in range(60_001))),
    "epochs": Case(lambda: ({"epoch": 10 * n, "loss": 1 / n} for n in range(1, 200)), "epoch"),
    "epochs in a table": Case(
        lambda: ({"epoch": n, "loss": 1 / (n + 1)} for n in range(9000)), "epoch", table
    ),
    "neither": Case(lambda: ({"loss": line["loss"]} for line in steps(5000)), "row"),
    "restart": Case(restarted),
    "two runs": Case(two_runs, names=("a/loss", "b/loss")),
    "trainer": Case(lambda: steps(20_000, at_13=7.0), write=state),
    "100,000 long lines": Case(lambda: ({**line, "t": "p" * 400} for line in steps(100_000, at_1=-5.0))),
    "1,200,000": Case(lambda: steps(1_200_000, at_777777=50.0, at_1199999=9.0)),
}


def places_and_values(case: Case, name: str) -> tuple[Any, Any]:
    """Return the arrays that a reader of the file makes of it."""
    run, key = name.split("/") if "/" in name else (None, name)
    lines = [line for line in case.lines() if line.get("run") == run]
    values = np.array([line[key] for line in lines])
    if case.axis == "row":
        return np.arange(1, len(lines) + 1), values
    return np.array([line[case.axis] for line in lines]), values


def chart_of(report: Report, name: str) -> Chart:
    charts = (chart for section in report.sections for chart in section.charts)
    return next(chart for chart in charts if chart.title == name)


def run_with(out: Path, case: Case, **fields: Any) -> Row:
    run = made_run(out, **fields)
    case.write(run.directory, case.lines())
    # As `collect` writes it.
    told = record(**{**vars(summarize(run.directory)), **fields})
    (run.directory / "run.json").write_text(RunRecord.model_validate(told).as_json())
    return Row(RunRecord.load(run.directory))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_figures_of_a_run_are_those_of_all_its_values(tmp_path: Path, case: Case) -> None:
    row = run_with(tmp_path, case)
    report = report_of([row])
    for name in case.names:
        xs, ys = places_and_values(case, name)
        numbers = np.isfinite(ys)
        low, high = np.nanargmin(np.where(numbers, ys, NAN)), np.nanargmax(np.where(numbers, ys, NAN))
        metric = row.metrics[name]
        assert (metric.axis, metric.count) == (case.axis, len(ys))
        assert (row.value(f"{name}.min"), metric.min_step) == (ys[low], xs[low])
        assert (row.value(f"{name}.max"), metric.max_step) == (ys[high], xs[high])
        assert metric.last_step == xs[-1]
        assert row.value(name) == (ys[-1] if numbers[-1] else None)
        assert row.nonfinite(name) == (None if numbers[-1] else str(ys[-1]))
        assert metric.nonfinite == (~numbers).sum()
        assert metric.nonfinite_step == (xs[~numbers][0] if not numbers.all() else None)
        assert metric.repeated == (xs[1:] <= np.maximum.accumulate(xs)[:-1]).sum()
        # The last value of each place is drawn.
        drawn = dict(zip(xs.tolist(), ys.tolist(), strict=True))
        chart = chart_of(report, name)
        points = [(x, y) for x, y in chart.series[0].points if y is not None]
        assert chart.x == case.axis
        assert all(drawn[x] == y for x, y in points)
        assert {min(filter(math.isfinite, drawn.values())), max(filter(math.isfinite, drawn.values()))} <= {
            y for _, y in points
        }
        # No part of the run has more points than another.
        if len(drawn) > 1000:
            middle = np.median([x for x, _ in points])
            assert middle == pytest.approx(np.median(list(drawn)), rel=0.05)
        assert all(words in "\n".join(report.verdict) for words in told(ys, numbers) if name == "loss")


def told(ys: Any, numbers: Any) -> list[str]:
    """Return words of the verdict."""
    words = [] if numbers.all() else [f"infinite in {(~numbers).sum()} of {len(ys):,} values"]
    return words + ([f"in {len(ys):,} values"] if numbers[-1] else [])
