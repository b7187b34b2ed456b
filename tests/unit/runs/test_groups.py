"""Means over seeds, judged by NumPy: which runs count, and which are named instead."""

from __future__ import annotations

import csv
import gc
import io
import json
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from clusterctl.errors import Notice
from clusterctl.runs import groups as groups_module
from clusterctl.runs.curve import Column, Curve, Places
from clusterctl.runs.figure import MetricFigure
from clusterctl.runs.find import Row, latest_tasks
from clusterctl.runs.groups import Group, Groups, MeanLine, MeanLines, grouped, is_seed
from clusterctl.runs.metric_files import Block, MetricFiles
from clusterctl.runs.report import report_of
from clusterctl.runs.series import summarize
from clusterctl.runs.table import stored
from clusterctl.state.run_record import RunRecord
from tests.support.messages import condition, refused
from tests.unit.runs.made import made_run
from tests.unit.runs.test_charts import charts_of, section_of

STEPS = range(1, 21)


def losses(number: int) -> list[float]:
    generator = np.random.default_rng(number)
    return [float(2 / step + generator.normal(0, 0.1)) for step in STEPS]


def note_codes(groups: Groups | MetricFigure) -> list[str]:
    return [condition(note) for note in groups.notes() if isinstance(note, Notice)]


def swept(
    out: Path,
    configs: Sequence[Mapping[str, Any]],
    curves: Sequence[Sequence[float]],
    states: Mapping[int, str] = {},
) -> Row:
    """A sweep whose tasks wrote these losses."""
    tasks = [
        {"id": f"7_{n}", "state": states.get(n, "COMPLETED"), "nodes": ["n1"], "config": config}
        for n, config in enumerate(configs)
    ]
    sweep = {"keys": [*configs[0]], "metric": "loss", "goal": "min"}
    run = made_run(out, 7, tasks=tasks, sweep=sweep)
    found = []
    for task, curve in zip(run.tasks, curves, strict=True):
        folder = run.directory / task.folder
        folder.mkdir()
        lines = (json.dumps({"step": n, "loss": y}) for n, y in zip(STEPS, curve, strict=False))
        (folder / "metrics.jsonl").write_text("\n".join(lines))
        found.append(task.model_copy(update={"metrics": summarize(folder).metrics}))
    record = run.model_copy(update={"tasks": tuple(found)})
    (run.directory / "run.json").write_text(record.as_json())
    return Row(RunRecord.load(run.directory))


def three_by_five(out: Path) -> tuple[Row, list[list[float]]]:
    """Three rates with five seeds each; the run of the last rate with seed 3 diverges."""
    configs = [{"lr": lr, "seed": seed} for lr in (0.01, 0.1, 0.3) for seed in range(5)]
    curves = [losses(number) for number in range(15)]
    curves[13] = [10.0 ** (15 * step) if step < 20 else float("nan") for step in STEPS]
    return swept(out, configs, curves), curves


def test_groups_means_and_deviations_are_those_of_numpy(tmp_path: Path) -> None:
    row, curves = three_by_five(tmp_path)
    groups = grouped(latest_tasks(row))
    head, rows = groups.figures()
    assert head == ["lr", "loss", "loss_sd", "loss_n", "diverged"]
    for at, (lr, mean, deviation, count, diverged) in enumerate(rows):
        good = [curves[n][-1] for n in range(5 * at, 5 * at + 5) if n != 13]
        assert (lr, count, diverged) == ((0.01, 0.1, 0.3)[at], len(good), int(at == 2))
        assert mean == pytest.approx(np.mean(good), rel=1e-13)
        assert deviation == pytest.approx(np.std(good, ddof=1), rel=1e-12)
    assert [row.number for row in groups.groups[2].diverged] == ["13"]
    assert note_codes(groups) == ["means-of-runs", "run-not-averaged"]


def test_figure_points_are_those_of_numpy(tmp_path: Path) -> None:
    row, curves = three_by_five(tmp_path)
    figure = MetricFigure.of(latest_tasks(row), "loss")
    legends = [line.legend for line in figure.means.lines]
    assert legends == ["lr=0.01", "lr=0.1", "lr=0.3 (1 diverged)"]
    head, *points = csv.reader(io.StringIO(figure.points()))
    assert head == ["lr", "step", "loss", "loss_sd", "n"]
    good = [[curves[n] for n in range(at, at + 5) if n != 13] for at in (0, 5, 10)]
    expected = [
        (lr, step, np.mean(ys), np.std(ys, ddof=1), len(ys))
        for lr, of_group in zip((0.01, 0.1, 0.3), good, strict=True)
        for step, ys in zip(STEPS, zip(*of_group, strict=True), strict=True)
    ]
    assert np.array(points, float) == pytest.approx(np.array(expected), rel=1e-12)


@pytest.mark.parametrize("every", [1, 10, 0.25])
def test_mean_line_of_many_steps_goes_on_after_a_restart(every: float) -> None:
    """Also if a run repeated an odd number of steps, or began one step later."""
    steps = [*range(2000)], [*range(1001), *range(1000, 2000)], [*range(1, 2000)]
    line = MeanLine(Group({}, (), (), ()))
    for number, of_run in enumerate(steps, 1):
        curve = Curve(places=Places())
        for at in range(0, len(of_run), 300):
            xs = [every * step for step in of_run[at : at + 300]]
            column = Column(xs, [number * x + at for x in xs], rises=xs == sorted({*xs}))
            curve.extend("step", column)
        line.add(curve)
    points = line.points
    places = [place / every for place, _ in points]
    assert len(places) > 500
    assert places[0] < 5
    assert places[-1] > 1995
    assert max(b - a for a, b in pairwise(places)) <= 4
    expected = [
        statistics.fmean(
            number * every * step + 300 * ((len(of_run) - 1 - of_run[::-1].index(step)) // 300)
            for number, of_run in enumerate(steps, 1)
        )
        for step in map(round, places)
    ]
    assert [one.mean for _, one in points] == pytest.approx(expected)


def test_curves_of_many_seeds_are_not_in_memory_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = swept(tmp_path, [{"seed": n} for n in range(6)], [losses(n) for n in range(6)])
    counts = []

    def counting(files: MetricFiles) -> Iterator[Block]:
        counts.append(sum(isinstance(one, Curve) for one in gc.get_objects()))
        return stored(files)

    monkeypatch.setattr(groups_module, "stored", counting)
    MeanLines.of(grouped(latest_tasks(row)).groups, "loss")
    assert len(counts) == 6
    assert max(counts) <= counts[0] + 1


def test_report_means_all_tasks_and_names_those_that_diverged(tmp_path: Path) -> None:
    """Also with more tasks than the other charts have lines."""
    configs = [{"lr": lr, "seed": seed} for lr in (1, 2, 3) for seed in range(7)]
    curves = [losses(number) for number in range(21)]
    curves[20] = [*curves[20][:-1], float("inf")]
    report = report_of([swept(tmp_path, configs, curves)])
    seeds = section_of(report, "Seeds")
    assert sorted(row[0] + row[-2] + row[-1] for row in seeds.tables[0].rows) == [
        "170",
        "270",
        "361",
    ]
    (chart,) = seeds.charts
    drawn = {line.name: line for line in chart.series}
    assert sorted(drawn) == ["lr=1", "lr=2", "lr=3 (1 diverged)"]
    last = [curve[-1] for curve in curves[:7]]
    mean, deviation = np.mean(last), np.std(last, ddof=1)
    assert drawn["lr=1"].points[-1] == (20, pytest.approx(mean))
    assert drawn["lr=1"].spread[-1] == pytest.approx((mean - deviation, mean + deviation))
    assert any("task-20 diverged" in line for line in seeds.lines)


def test_chart_names_runs_that_diverged_and_their_values_do_not_set_its_axis(
    tmp_path: Path,
) -> None:
    row, curves = three_by_five(tmp_path)
    chart = charts_of(report_of([row]))["loss"]
    assert [one.run for one in chart.series if "diverged" in one.run] == ["task 13 (diverged)"]
    highest = max(max(curve) for n, curve in enumerate(curves) if n != 13)
    assert max(y for one in chart.series for _, y in one.points if y is not None) <= highest


def test_markdown_has_no_first_and_last_of_points_by_a_parameter(tmp_path: Path) -> None:
    row, _ = three_by_five(tmp_path)
    text = report_of([row]).as_markdown()
    assert "loss by lr" not in text
    assert "| lr=0.1 |" in text


def test_groups_leave_out_failed_and_repeated_runs_and_say_why(tmp_path: Path) -> None:
    configs = [{"seed": seed} for seed in (1, 2, 3, 3)]
    row = swept(tmp_path, configs, [losses(n) for n in range(4)], {1: "FAILED"})
    (group,) = grouped(latest_tasks(row)).groups
    assert [each.number for each in group.counted] == ["0", "3"]
    failed, repeated = group.left_out
    assert failed.endswith("/task-1: FAILED")
    assert "/task-2: " in repeated
    assert "/task-3 has the same seed" in repeated


def on_nodes(*names: str) -> list[dict[str, Any]]:
    return [{"id": "1", "state": "COMPLETED", "nodes": names}]


def test_run_that_was_requeued_onto_another_node_stays_in_its_group(tmp_path: Path) -> None:
    nodes = ({}, {"tasks": on_nodes("b"), "nodes": ["a", "b"]})
    metrics = [{"step": 1, "loss": 1.0}]
    rows = [
        Row(made_run(tmp_path, n, args=[f"--seed={n}"], metrics=metrics, **fields))
        for n, fields in enumerate(nodes, 1)
    ]
    (group,) = grouped(rows).groups
    assert len(group.counted) == 2


def test_groups_of_runs_have_the_same_options_arguments_and_name(tmp_path: Path) -> None:
    """A run of other data, of another program or of more nodes is not averaged with the rest."""
    rows = []
    for number, (words, lr, fields) in enumerate(
        [
            (["cifar"], 1, {}),
            (["cifar"], 1, {}),
            (["mnist"], 1, {}),
            (["cifar"], 2, {}),
            (["cifar"], 1, {"name": "other"}),
            (["cifar"], 1, {"tasks": on_nodes("a", "b"), "nodes": ["a", "b"]}),
        ]
    ):
        args = [*words, f"--lr={lr}", f"--seed={number}", f"--fold={number % 2}"]
        metrics = [{"step": 1, "loss": float(number)}]
        rows.append(Row(made_run(tmp_path, number + 1, args=args, metrics=metrics, **fields)))
    assert not grouped(rows, ["seed"]).has_means
    assert note_codes(grouped(rows, ["seed"])) == ["no-runs-to-average"]
    groups = grouped(rows, ["seed", "fold"]).groups
    assert [len(each.counted) for each in groups] == [2, 1, 1, 1, 1]
    assert groups[0].options == {
        "name": "train", "nodes": 1, "arguments": "cifar", "config.lr": 1,
    }  # fmt: skip


def test_run_that_diverged_is_in_no_mean_of_another_metric(tmp_path: Path) -> None:
    rows = [
        Row(made_run(tmp_path, n, args=[f"--seed={n}"], metrics=[{"step": 1, "loss": y, "f1": 0.1 * n}]))
        for n, y in enumerate((1.0, 2.0, float("inf")), 1)
    ]  # fmt: skip
    (group,) = grouped(rows, metrics=["f1"]).groups
    assert group.text("f1") == "0.150 ± 0.071"
    assert len(group.diverged) == 1


def test_metric_that_only_some_runs_have_tells_of_how_many(tmp_path: Path) -> None:
    rows = [
        Row(made_run(tmp_path, n, args=[f"--seed={n}"], metrics=[{"step": 1, "loss": 1.0, **more}]))
        for n, more in enumerate(({}, {"f1": 0.25}, {}), 1)
    ]
    (group,) = grouped(rows, metrics=["f1", "loss", "none"]).groups
    assert [*map(group.text, ("f1", "loss", "none"))] == ["0.25 (n=1)", "1 ± 0", "-"]


def test_figure_without_lines_is_refused(tmp_path: Path) -> None:
    failed = swept(
        tmp_path, [{"seed": 1}, {"seed": 2}], [losses(1)] * 2, {0: "FAILED", 1: "FAILED"}
    )
    many = swept(tmp_path / "many", [{"lr": n} for n in range(20)], [losses(1)] * 20)
    for row, metric in ((failed, "loss"), (many, "loss"), (many, "lost")):
        with refused("not-found/figure-lines" if metric == "loss" else "not-found/run-key"):
            MetricFigure.of(latest_tasks(row), metric)


def test_figure_of_runs_without_metrics_names_no_field_that_cannot_be_drawn(tmp_path: Path) -> None:
    with refused("not-found/run-key") as caught:
        MetricFigure.of([Row(made_run(tmp_path))], "loss")
    assert "node_hours" not in str(caught.value.fix)


@pytest.mark.parametrize(
    ("key", "expected"),
    [("seed", True), ("config.data_seed", True), ("trainer.random_state", True), ("seeds", False)],
)
def test_seed_is_known_by_its_name(key: str, expected: bool) -> None:
    assert is_seed(key) is expected


def test_metric_with_the_name_of_an_option_is_averaged_and_drawn(tmp_path: Path) -> None:
    rows = [
        Row(
            made_run(
                tmp_path,
                n,
                args=["--loss=mse", "--accuracy=16", f"--seed={n}"],
                metrics=[{"step": step, "loss": float(n), "accuracy": 0.5} for step in (1, 2)],
            )
        )
        for n in (1, 3)
    ]
    for groups in (grouped(rows), grouped(rows, metrics=["loss", "accuracy"])):
        (group,) = groups.groups
        assert groups.metrics == ["metric.loss", "metric.accuracy"]
        assert [*map(group.text, groups.metrics)] == ["2.0 ± 1.4", "0.5 ± 0"]
    head, *points = MetricFigure.of(rows, "loss").points().splitlines()
    assert head == "step,metric.loss,metric.loss_sd,n"
    assert points[0].startswith("1,2.0,")


def test_sweep_of_an_option_with_the_name_of_its_metric_has_means_and_a_chart(
    tmp_path: Path,
) -> None:
    configs = [{"loss": loss, "seed": seed} for loss in ("mse", "mae") for seed in range(2)]
    report = report_of([swept(tmp_path, configs, [losses(n) for n in range(4)])])
    (ranking,) = section_of(report, "Ranking by metric.loss, lower is better").tables
    assert [*ranking.head].count("loss") == 1
    seeds = section_of(report, "Seeds")
    assert seeds.tables[0].head == ["loss", "metric.loss", "n"]
    assert {line.name for line in seeds.charts[0].series} == {"loss=mse", "loss=mae"}
    assert "loss" in charts_of(report)


@pytest.mark.parametrize("key", ["mine.min", "metric.mine.max"])
def test_lowest_and_highest_values_of_a_run_that_diverged_are_in_no_mean(
    tmp_path: Path, key: str
) -> None:
    metrics = [{"step": 1, "mine": 1.0}, {"step": 2, "mine": float("nan")}]
    rows = [Row(made_run(tmp_path, n, args=[f"--seed={n}"], metrics=metrics)) for n in (1, 2)]
    (group,) = grouped(rows, metrics=[key]).groups
    assert (group.text(key), len(group.diverged)) == ("-", 2)


def test_metric_whose_name_begins_as_a_key_is_averaged(tmp_path: Path) -> None:
    metrics = [{"step": 1, "metric.x": 2.0}]
    rows = [Row(made_run(tmp_path, n, args=[f"--seed={n}"], metrics=metrics)) for n in (1, 2)]
    groups = grouped(rows)
    assert groups.groups[0].text(groups.metrics[0]) == "2 ± 0"


def seeded(
    out: Path, *curves: Sequence[Mapping[str, float]], **options: Sequence[int]
) -> list[Row]:
    """Runs with a seed each that wrote these lines."""
    rows = []
    for n, metrics in enumerate(curves):
        own = [f"--{key}={values[n]}" for key, values in options.items()]
        rows.append(Row(made_run(out, n + 1, args=[f"--seed={n}", *own], metrics=metrics)))
    return rows


def by(axis: str, *places: float, name: str = "loss") -> list[dict[str, float]]:
    return [{axis: place, name: 1.0} for place in places]


def test_figure_has_one_axis_and_names_the_runs_by_another(tmp_path: Path) -> None:
    curves = [by("epoch", 1, 2), *[by("step", 10, 20)] * 4]
    figure = MetricFigure.of(seeded(tmp_path, *curves, lr=[1, 1, 1, 2, 2]), "loss")
    assert figure.means.axis == "step"
    assert [line.count for line in figure.means.lines] == [2, 2]
    assert [row.split(",")[-1] for row in figure.points().splitlines()[1:]] == ["2"] * 4
    (reason,) = figure.left_out
    assert reason.startswith("demo-1-train: ")
    assert note_codes(figure) == ["means-of-runs", "run-not-averaged"]


def test_figure_names_runs_without_the_metric_and_groups_without_common_steps(
    tmp_path: Path,
) -> None:
    curves = [
        by("step", 1, 2),
        by("step", 1),
        by("step", 1, name="f1"),
        by("step", 1),
        by("step", 2),
    ]
    figure = MetricFigure.of(seeded(tmp_path, *curves, lr=[1, 1, 1, 2, 2]), "loss")
    assert [(line.legend, line.count) for line in figure.means.lines] == [("lr=1", 2)]
    assert [reason.partition(":")[0] for reason in figure.left_out] == ["demo-3-train", "lr=2"]


@pytest.mark.parametrize(("metric", "why"), [("loss.min", "single value"), ("loss", "lr=1")])
def test_figure_that_is_refused_says_why_its_own_runs_have_no_line(
    tmp_path: Path, metric: str, why: str
) -> None:
    rows = seeded(tmp_path, *[by("step", n) for n in range(4)], lr=[1, 1, 2, 2])
    with refused("not-found/figure-lines") as caught:
        MetricFigure.of(rows, metric)
    assert why in str(caught.value.why)


def test_means_and_figures_tell_once_what_was_not_read_of_their_runs(tmp_path: Path) -> None:
    rows = seeded(tmp_path, *[by("step", 1)] * 3)
    for row in rows[1:]:
        with (row.folder / "metrics.jsonl").open("a") as file:
            file.write('{"step": 2, "lo')
    left_out = summarize(rows[1].folder).left_out
    rows[1] = Row(rows[1].run.model_copy(update={"left_out": tuple(left_out)}))
    assert note_codes(grouped(rows)) == ["means-of-runs", "metrics-not-read"]
    notes = MetricFigure.of(rows, "loss").notes()
    unread = [note for note in notes if condition(note) == "metrics-not-read"]
    assert [note.split(": ")[1] for note in unread] == ["demo-2-train", "demo-3-train"]


def test_names_of_options_have_no_prefix_and_their_values_stay(tmp_path: Path) -> None:
    files = ["config.a", "config.a", "config.b"]
    rows = seeded(tmp_path, *[by("step", 1)] * 3, file=files, name=["u", "u", "v"])
    groups = grouped([*rows, *seeded(tmp_path / "again", by("step", 1), file=files, name=["u"])])
    assert groups.groups[0].name == "file=config.a, config.name=u"
    (reason,) = groups.left_out
    assert reason.endswith(" has the same seed")


def test_seed_of_a_field_s_name_is_averaged_by_its_key(tmp_path: Path) -> None:
    rows = seeded(tmp_path, *[by("step", 1)] * 2, user=[1, 2])
    assert grouped(rows, ["seed", "config.user"]).has_means
    assert note_codes(grouped(rows[:1], ["seed"])) == ["no-runs-to-average"]


def test_run_that_failed_before_it_told_its_options_adds_no_column_and_no_row(
    tmp_path: Path,
) -> None:
    config = {"config": {"width": 8, "depth": 2, "lr": 1}}
    rows = seeded(tmp_path, *[[config, *by("step", 1)]] * 2)
    failed = Row(made_run(tmp_path, 3, args=["--seed=3"], state="FAILED"))
    assert grouped([*rows, failed]).table() == (["loss", "n"], [["1 ± 0", "2"]])
    other = {"config": {"width": 8, "depth": 2, "lr": 2}}
    more = Row(made_run(tmp_path, 4, args=["--seed=1"], metrics=[other, *by("step", 1)]))
    groups = grouped([*rows, failed, more])
    assert groups.table() == (["lr", "loss", "n"], [["1", "1 ± 0", "2"], ["2", "1", "1"]])
    assert groups.left_out == ["demo-3-train: FAILED"]


@pytest.mark.parametrize(("values", "is_log"), [((100.0, 100.1), True), ((1.0, 199.0), False)])
def test_means_whose_band_reaches_below_zero_have_no_logarithmic_axis(
    tmp_path: Path, values: Sequence[float], is_log: bool
) -> None:
    ends = [*values, 1.0, 1.0]
    curves = [[{"step": n, "loss": end} for n in (1, 2)] for end in ends]
    report = report_of(seeded(tmp_path, *curves, lr=[1, 1, 2, 2]))
    (chart,) = section_of(report, "Seeds").charts
    assert chart.y_log is is_log


def test_chart_in_which_all_runs_diverged_names_them(tmp_path: Path) -> None:
    curves = [[{"step": 1, "loss": 1.0}, {"step": 2, "loss": float("nan")}]] * 2
    chart = charts_of(report_of(seeded(tmp_path, *curves)))["loss"]
    assert all(line.run.endswith("(diverged)") for line in chart.series)
