"""Where the values of a metric are drawn: by steps, epochs and ranks, and beside diverged runs."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs import metric_files
from clusterctl.runs.charts import ProgramMetrics, line_chart
from clusterctl.runs.curve import Curve
from clusterctl.runs.find import Row
from clusterctl.runs.page import Series
from clusterctl.runs.report import report_of
from tests.unit.runs.made import made_run

NAN = float("nan")


def curves(folder: Path, lines: Sequence[Any]) -> tuple[dict[str, Curve], Sequence[str]]:
    """What a run with these lines of metrics has; a text is written as it is."""
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    run = made_run(folder)
    (run.directory / "metrics.jsonl").write_text("\n".join(texts))
    metrics = ProgramMetrics.of(Row(run))
    return metrics.curves, metrics.left_out


def batches(epochs: Sequence[int], start: int = 0) -> list[dict[str, float]]:
    return [
        {"epoch": e, "step": b, "loss": 10 - e - b / 40} for e in epochs for b in range(start, 40)
    ]


@pytest.mark.parametrize("start", [0, 1])
def test_steps_that_begin_anew_with_each_epoch_are_counted_on(tmp_path: Path, start: int) -> None:
    found, _ = curves(tmp_path, batches(range(5), start))
    assert [x for x, _ in found["loss"].points()] == list(range(start, start + 5 * (40 - start)))
    assert found["loss"].repeated == 0


def test_epoch_that_is_there_again_after_a_restart_repeats_its_steps(tmp_path: Path) -> None:
    found, _ = curves(tmp_path, [*batches(range(3)), *batches(range(2, 5))])
    assert found["loss"].repeated == 40
    assert found["loss"].points()[-1] == (199, 10 - 4 - 39 / 40)


def test_steps_of_very_many_epochs_are_counted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also after a restart, though the first epochs are forgotten."""
    monkeypatch.setattr(metric_files, "_MAX_EPOCHS", 10)
    lines = [*batches(range(23)), {"epoch": 22, "step": 39, "val_loss": 1}, *batches(range(20, 30))]
    found, _ = curves(tmp_path, lines)
    assert found["loss"].repeated == 3 * 40
    assert found["loss"].points()[-1] == (30 * 40 - 1, 10 - 29 - 39 / 40)


def test_steps_of_the_whole_run_stay_as_they_are(tmp_path: Path) -> None:
    lines = [{"epoch": n // 10, "step": n, "loss": 1.0 + n} for n in range(30)]
    evaluations = [{"epoch": n, "step": 10 * n + 9, "val_loss": 1.0 * n} for n in range(3)]
    found, _ = curves(tmp_path, [*lines, *evaluations])
    assert [x for x, _ in found["loss"].points()] == list(range(30))
    assert [x for x, _ in found["val_loss"].points()] == [9, 19, 29]


def test_restart_from_an_earlier_epoch_leaves_steps_of_the_run(tmp_path: Path) -> None:
    """The first epoch that was logged after it was not logged before it."""
    steps = [25, 50, 75, 60, 85, 110]
    found, _ = curves(tmp_path, [{"step": n, "epoch": n / 10, "loss": n} for n in steps])
    assert [x for x, _ in found["loss"].points()] == steps


@pytest.mark.parametrize("evaluated", [1, 3])
def test_steps_of_evaluations_move_no_others(tmp_path: Path, evaluated: int) -> None:
    lines: list[Any] = []
    for epoch in range(4):
        lines += [{"epoch": epoch, "step": 10 * epoch + n, "loss": 1.0} for n in range(10)]
        lines += [{"epoch": epoch + 1, "step": n, "val_loss": 1.0} for n in range(evaluated)]
    found, _ = curves(tmp_path, lines)
    assert [x for x, _ in found["loss"].points()] == list(range(40))


def test_lines_with_more_keys_count_on_with_the_others(tmp_path: Path) -> None:
    lines = batches(range(3))
    for at in (0, 40, 80, 39, 79, 119, 5, 57):
        lines[at] = {**lines[at], f"more_{at % 40}": 1.0}
    found, _ = curves(tmp_path, lines)
    assert [x for x, _ in found["loss"].points()] == list(range(120))


def test_ranks_that_write_the_same_steps_have_metrics_of_their_own(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": n + 100 * rank, "rank": rank} for n in range(9) for rank in (0, 1)]
    found, _ = curves(tmp_path, lines)
    assert {name: curve.points()[-1] for name, curve in found.items()} == {
        "rank0/loss": (8, 8),
        "rank1/loss": (8, 108),
    }


def test_one_writer_has_no_rank_in_its_metrics(tmp_path: Path) -> None:
    found, _ = curves(tmp_path, [{"step": n, "loss": n, "rank": n % 3} for n in range(9)])
    assert list(found) == ["loss"]


def test_ranks_are_compared_at_a_limited_number_of_places(tmp_path: Path) -> None:
    lines = [{"step": n, "loss": 1.0, "rank": 0} for n in range(100_001)]
    found, left_out = curves(tmp_path, [*lines, {**lines[-1], "rank": 1}])
    assert (list(found), len(left_out)) == (["loss"], 1)


def test_ranks_and_epochs_that_are_no_numbers_count_for_nothing(tmp_path: Path) -> None:
    odd: list[Any] = [[1], {"a": 1}, "0", None, True, 1e400]
    lines = [
        {"step": n, "epoch": value, "rank": value, "run": value, "loss": 1.0}
        for n, value in enumerate([*odd, 0, 1])
    ]
    found, _ = curves(tmp_path, lines)
    assert found["loss"].count == len(lines)


def test_torn_lines_are_counted(tmp_path: Path) -> None:
    _, left_out = curves(tmp_path, [{"step": 1, "loss": 1}, '{"step": 2, "lo', "7", '{"st'])
    assert left_out == ["3 lines of metrics.jsonl, torn or no JSON object"]


def test_run_that_diverged_does_not_set_the_axis() -> None:
    good = Series("good", [(0, 1.0), (1, 0.5)])
    lost = Series("lost", [(0, 0.9), (1, 1e226), (2, NAN)])
    assert line_chart("loss", [good, lost]).series[1].points == [(0, 0.9), (1, None), (2, None)]
    assert line_chart("loss", [lost]).series[0].points[1] == (1, 1e226)


def test_task_that_diverged_is_named_and_not_missing(tmp_path: Path) -> None:
    metrics = [
        {"eval_loss": {"last": 0.2, "min": 0.2, "max": 1.0, "count": 5}},
        {"eval_loss": {"min": 0.9, "max": 1e226, "count": 5, "nonfinite": 1, "nonfinite_step": 4,
                       "last_nonfinite": "nan", "axis": "epoch"}},
    ]  # fmt: skip
    tasks = [
        {"id": f"7_{n}", "state": "COMPLETED", "nodes": ["n1"], "config": {"lr": n}, "metrics": own}
        for n, own in enumerate(metrics)
    ]
    run = made_run(tmp_path, 7, tasks=tasks, sweep={"keys": ["lr"], "metric": "eval_loss"})
    report = report_of([Row(run)])
    assert any("task 1" in line and "epoch 4" in line for line in report.verdict)
    assert not any("eval_loss" in line for line in report.missing)
    ranking = next(one for one in report.sections if one.title.startswith("Ranking"))
    assert [row[2] for row in ranking.tables[0].rows] == ["0.2", "nan"]
