"""Charts of reports: the colors, units and axes of their lines, and the order in which they are
drawn.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs.charts import line_chart
from clusterctl.runs.find import Row
from clusterctl.runs.page import Chart, Report, Section, Series, thinned
from clusterctl.runs.report import report_of
from clusterctl.runs.scaling import scaling_of
from clusterctl.runs.telemetry import compare_ranks
from clusterctl.runs.telemetry_files import FIGURES
from clusterctl.util import formatting
from tests.unit.runs.made import TIME, made_run
from tests.unit.runs.test_report import NODES, TIMES, lines, trained


def charts_of(report: Report) -> dict[str, Chart]:
    return {chart.title: chart for section in report.sections for chart in section.charts}


def colors(chart: Chart) -> list[Any]:
    return [series.color for series in chart.series]


def section_of(report: Report, title: str) -> Section:
    return next(section for section in report.sections if section.title == title)


def wrote(out: Path, job_id: int, records: Sequence[Mapping[str, Any]], **fields: Any) -> Row:
    return Row(made_run(out, job_id, metrics=records, **fields))


def sweep(out: Path, values: Sequence[Mapping[str, Any]], results: Sequence[float]) -> Row:
    """A sweep with a task for each of ``values``. Its loss falls to the task's result within ten
    steps.
    """
    tasks = [
        {"id": f"7_{number}", "state": "COMPLETED", "nodes": NODES[:1], "config": config,
         "metrics": {"loss": {"last": result, "min": result, "max": 1.0, "count": 10}}}
        for number, (config, result) in enumerate(zip(values, results, strict=True))
    ]  # fmt: skip
    run = made_run(
        out, 7, tasks=tasks, sweep={"keys": [*values[0]], "metric": "loss", "goal": "min"}
    )
    for task, result in zip(run.tasks, results, strict=True):
        (run.directory / task.folder).mkdir()
        losses = ({"step": step, "loss": result * 10 / step} for step in range(1, 11))
        (run.directory / task.folder / "metrics.jsonl").write_text(
            "\n".join(map(json.dumps, losses))
        )
    return Row(run)


def test_evaluations_are_markers_beside_the_training_line(tmp_path: Path) -> None:
    records = [
        {"step": n, "loss": 1 / n, "eval_loss": 2 / n**2, "eval_accuracy": n / 9}
        for n in range(1, 5)
    ]
    drawn = charts_of(report_of([wrote(tmp_path, 1, records)]))
    assert [(one.name, one.marks, one.color) for one in drawn["loss"].series] == [
        ("loss", False, 0),
        ("eval_loss", True, 1),
    ]
    assert [one.marks for one in drawn["eval_accuracy"].series] == [True]


def test_single_evaluation_is_drawn_as_a_marker(tmp_path: Path) -> None:
    records = [{"step": 0, "eval_loss": 9.0}, {"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]
    drawn = charts_of(report_of([wrote(tmp_path, 1, records)]))
    assert [(one.name, one.marks) for one in drawn["loss"].series] == [
        ("loss", False),
        ("eval_loss", True),
    ]


def test_run_has_one_color_in_all_charts(tmp_path: Path) -> None:
    """Also in the chart of a metric that only the second run has."""
    rows = [
        wrote(tmp_path, 1, [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}]),
        wrote(tmp_path, 2, [{"step": 1, "loss": 3.0, "val_loss": 4.0}, {"step": 2, "acc": 0.5}]),
    ]
    report = report_of(rows)
    drawn = charts_of(report)
    assert colors(drawn["loss (markers: val_loss)"]) == [0, 1, 1]
    assert {one.run for one in drawn["loss (markers: val_loss)"].series} == {
        row.shown for row in rows
    }
    assert colors(drawn["acc"]) == [1]
    nodes = charts_of(report_of([trained(tmp_path / "nodes")]))
    assert [colors(nodes[title]) for title in ("CPU", "GPU")] == [[0, 1]] * 2


def test_learning_rate_has_a_log_axis_and_the_colors_of_tasks(tmp_path: Path) -> None:
    rates = [0.1, 0.001, 0.01]
    drawn = charts_of(report_of([sweep(tmp_path, [{"lr": lr} for lr in rates], [0.3, 0.1, 0.2])]))
    assert drawn["loss by lr"].x_log
    assert drawn["loss by lr"].series[0].points == [(0.001, 0.1), (0.01, 0.2), (0.1, 0.3)]
    # The best task is the first, here and in the chart of the losses.
    assert drawn["loss by lr"].series[0].color == [0, 1, 2]
    assert [(one.name, one.color) for one in drawn["loss"].series] == [
        ("task 1", 0),
        ("task 2", 1),
        ("task 0", 2),
    ]


@pytest.mark.parametrize("key", ["seed", "depth", "kind", "offset"])
def test_parameter_other_than_learning_rate_has_a_linear_axis(tmp_path: Path, key: str) -> None:
    values: dict[str, list[Any]] = {
        "seed": [1, 20],
        "depth": [2, 19],
        "kind": ["a", "b"],
        "offset": [0, 9],
    }
    drawn = charts_of(
        report_of([sweep(tmp_path, [{key: value} for value in values[key]], [0.1, 0.2])])
    )
    assert not drawn[f"loss by {key}"].x_log


def test_seeds_have_a_mean_and_a_spread(tmp_path: Path) -> None:
    values = [{"lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (1, 2)]
    report = report_of([sweep(tmp_path, values, [0.1, 0.3, 0.5, 0.5])])
    seeds = section_of(report, "Seeds")
    assert seeds.tables[0].rows == [
        ["0.1", "0.20 ± 0.14", "2"],
        ["0.2", "0.5 ± 0", "2"],
    ]
    first, second = seeds.charts[0].series
    assert (first.name, second.name) == ("lr=0.1", "lr=0.2")
    assert first.points[0] == (1, pytest.approx(2.0))
    assert first.spread[0] == (pytest.approx(2 - 2**0.5), pytest.approx(2 + 2**0.5))
    assert len(first.points) == len(first.spread) == 10
    without = report_of([sweep(tmp_path / "other", [{"lr": 1}, {"lr": 2}], [0.1, 0.3])])
    assert all(section.title != "Seeds" for section in without.sections)


def test_runs_that_differ_in_their_seed_are_averaged(tmp_path: Path) -> None:
    rows = [
        wrote(tmp_path, number, [{"step": 1, "loss": number}, {"step": 2, "loss": number / 2}],
              args=["--seed", str(number)])
        for number in (1, 2)
    ]  # fmt: skip
    (table,) = section_of(report_of(rows), "Seeds").tables
    assert table.rows == [["0.75 ± 0.35", "2"]]


def test_line_that_hides_another_is_drawn_with_gaps(tmp_path: Path) -> None:
    twins = charts_of(report_of([trained(tmp_path / "twins", number) for number in (1, 2, 3)]))
    covers = {one.name: one.covers for one in twins["loss (markers: eval_loss)"].series}
    assert list(covers.values()) == [0, 0, 1, 1, 2, 2]
    differ = charts_of(report_of([trained(tmp_path, 1), trained(tmp_path, 2, lr=0.2)]))
    assert [one.covers for one in differ["loss (markers: eval_loss)"].series] == [0] * 4


def test_lines_with_other_places_hide_each_other_too() -> None:
    """As the samples of two nodes do, which are never of the same moment."""
    own = [Series(str(at), [(x + at / 3, 5.0) for x in range(9)]) for at in range(2)]
    high = Series("high", [(0.5, 9.0), (8.5, 9.0)])
    assert [one.covers for one in line_chart("", [*own, high]).series] == [0, 1, 0]
    gaps = Series("gaps", [(0, None), (1, math.nan), (20, 5.0)])
    assert [one.covers for one in line_chart("", [own[0], gaps]).series] == [0, 0]


def test_lines_hide_each_other_on_the_axis_that_is_drawn() -> None:
    """They differ by 5 of 1005, and by the whole height of an axis that does not begin at 0."""
    tall = [Series(str(y), [(0, y), (1, y)]) for y in (1000.0, 1005.0)]
    assert [line_chart("", tall, unit=unit).series[1].covers for unit in ("", "B")] == [0, 1]


@pytest.mark.parametrize(
    ("name", "unit"),
    [
        ("samples_per_s", "samples/s"),
        ("train/tokens_per_s", "tokens/s"),
        ("memory_bytes", "B"),
        ("seconds", "s"),
        ("eval_time_s", "s"),
        ("data_ms", "ms"),
        ("cache_mib", "MiB"),
        ("cpu_percent", "%"),
        ("tokens/s", "tokens/s"),
        ("perf/images/sec", "images/s"),
        ("bytes_per_s", "B/s"),
        ("bus_gb_per_s", "GB/s"),
        ("time/seconds", "s"),
        ("loss", ""),
        ("accuracies", ""),
        ("train/mfu", ""),
    ],
)
def test_metric_unit_follows_its_name(name: str, unit: str) -> None:
    assert formatting.unit_of(name) == unit


@pytest.mark.parametrize(
    ("unit", "value", "drawn"),
    [
        ("B", 3 << 20, ("MiB", 3)),
        ("B", 1500, ("B", 1500)),
        ("B/s", 1 << 12, ("KiB/s", 4)),
        ("", 1e9, ("", 1e9)),
    ],
)
def test_values_have_a_fitting_unit(unit: str, value: float, drawn: tuple[str, float]) -> None:
    chart = line_chart("", [Series("", [(0, 0.1), (150, value)])], "s", unit)
    assert (chart.y, chart.series[0].points[-1][1]) == drawn
    assert (chart.x, chart.series[0].points[-1][0]) == ("minutes", 2.5)
    assert line_chart("", [Series("", [(90, value)])], "s", unit).x == "s"


@pytest.mark.parametrize(
    ("size", "text"), [(1 << 20, "1 MiB"), (1500, "1.5 KiB"), (1000, "1,000 B")]
)
def test_size_has_the_largest_unit_that_it_reaches(size: int, text: str) -> None:
    assert formatting.quantity(size, "B") == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (5e-324, "4.94066e-324"),
        (1_234_567.0, "1,234,567"),
        (1e22, "1e+22"),
        (0.1 + 0.2, "0.3"),
        (-1e-5, "-1e-05"),
    ],
)
def test_numbers_of_any_size_have_few_digits(value: float, text: str) -> None:
    assert formatting.quantity(value, "") == text


def test_noise_has_a_smoothed_line_of_means() -> None:
    line = Series("", [(x, float(x % 2)) for x in range(100)])
    smooth = line_chart("", [line]).series[0].smooth
    assert len(smooth) == 50
    assert {y for _, y in smooth} == {0.5}
    assert smooth[0][0] == 0.5
    assert line_chart("", [Series("", line.points, marks=True)]).series[0].smooth == ()
    assert line_chart("", [Series("", line.points[:30])]).series[0].smooth == ()


def test_last_value_of_a_repeated_step_is_drawn() -> None:
    line = Series("", [(1, 4.0), (2, 3.0), (1, 2.0), (3, 1.0)])
    assert line_chart("", [line]).series[0].points == [(1, 2.0), (2, 3.0), (3, 1.0)]


def test_metrics_that_add_nothing_have_no_chart(tmp_path: Path) -> None:
    """A metric that never changed, the only value of a metric, and a multiple of another metric."""
    records = [
        {"step": n, "loss": 9 - n, "lr": 0.5, "a_bytes": n, "b_bytes": n} for n in range(1, 5)
    ]
    report = report_of([wrote(tmp_path, 1, [*records, {"step": 4, "accuracy": 0.75}])])
    assert {*map(named, charts_of(report))} == {("loss",), ("a_bytes", "b_bytes"), ()}
    (line,) = section_of(report, "Metrics").lines
    assert all(words in line for words in ("lr 0.5", "accuracy 0.75"))


def named(title: str) -> tuple[str, ...]:
    """Return the metrics and the numbers in a chart's title."""
    return tuple(re.findall(r"\bloss\b|\bmfu\b|[a-z]+(?:_[a-z]+)+|\d+(?:\.\d+)?", title))


def speeds(tokens: int) -> list[dict[str, float]]:
    """The same speed in samples, tokens and as a share of the peak, and an evaluation in bits and
    nats.
    """
    return [
        {"step": n, "loss": 1 / n**2, "samples_per_s": 100 + n % 3, "tokens_per_s": tokens * (100 + n % 3),
         "mfu": 2e-3 * (100 + n % 3), "eval_loss": 2 / n, "eval_bits": 3 / n}
        for n in range(1, 8)
    ]  # fmt: skip


def test_multiple_of_a_metric_is_named_in_its_chart(tmp_path: Path) -> None:
    drawn = charts_of(report_of([wrote(tmp_path, 1, speeds(128))]))
    assert {*map(named, drawn)} == {
        (),
        ("loss", "eval_bits", "1.5", "eval_loss"),
        ("samples_per_s", "tokens_per_s", "128", "mfu", "0.002"),
    }
    section = section_of(report_of([wrote(tmp_path, 9, speeds(128))]), "Metrics")
    assert any(line.startswith("tokens_per_s, 128 times samples_per_s: ") for line in section.lines)
    # Samples of other lengths: the tokens of these runs differ otherwise than the samples.
    drawn = charts_of(report_of([wrote(tmp_path, 2, speeds(128)), wrote(tmp_path, 3, speeds(64))]))
    assert {("samples_per_s", "mfu", "0.002"), ("tokens_per_s",)} <= {*map(named, drawn)}


def test_metrics_of_a_diverged_run_are_not_merged_as_multiples(tmp_path: Path) -> None:
    """Beside its large values, all differences between other values seem small."""
    rows = [
        wrote(tmp_path, number, [{"step": n, "a": a**n, "b": 2 * a**n + n} for n in range(1, 30)])
        for number, a in ((1, 1.1), (2, 1e6))
    ]
    assert {"a", "b"} <= {*charts_of(report_of(rows))}


def used(out: Path, samples: Mapping[str, Sequence[tuple[float, float]]], **fields: Any) -> Row:
    """A run of 60 s from TIME + 2 on, with the loss at 10, 20 and 30 s, and samples (time, CPU) of
    nodes.
    """
    records = [{"step": n, "loss": 1 / n, "time": TIME + 2 + 10 * n} for n in (1, 2, 3)]
    row = wrote(out, 1, records, nodes=[*samples], **fields)
    (row.folder / "telemetry").mkdir()
    for node, listed in samples.items():
        records = [
            {"kind": "sample", "time": TIME + 2 + at, "cpu_percent": cpu, "memory_used_mib": 512}
            for at, cpu in listed
        ]
        (row.folder / "telemetry" / f"{node}.jsonl").write_text("\n".join(map(json.dumps, records)))
    return row


def test_nodes_are_drawn_over_the_time_of_the_job(tmp_path: Path) -> None:
    """All on the same axis as the loss. Samples before the start or after the end are not drawn.

    The clock of a node may be two seconds behind or ahead of Slurm's.
    """
    samples = {
        NODES[0]: [(-3, 9), (-2, 8), (5, 50), (61.5, 60), (62.5, 0)],
        NODES[1]: [(7, 40), (58, 30)],
    }
    section = section_of(report_of([used(tmp_path, samples)]), "Nodes")
    drawn = {chart.title: chart for chart in section.charts}
    assert [*drawn] == ["Loss over time", "CPU", "Memory"]
    assert {(chart.x, chart.x_end) for chart in drawn.values()} == {("s", 61.5)}
    assert [line.points for line in drawn["CPU"].series] == [
        [(0, 8), (5, 50), (61.5, 60)],
        [(7, 40), (58, 30)],
    ]
    assert [line.points for line in drawn["Loss over time"].series] == [
        [(10, 1), (20, 0.5), (30, 1 / 3)]
    ]
    # A job that runs, and a cluster without accounting: from the first sample to the last.
    running = used(tmp_path / "running", samples, start_time=None, end_time=None)
    cpu = section_of(report_of([running]), "Nodes").charts[1]
    assert (cpu.x, cpu.x_end, cpu.series[1].points[0]) == ("s", 65.5, (10, 40))


def test_running_jobs_loss_after_the_last_sample_is_drawn(tmp_path: Path) -> None:
    row = used(tmp_path, {NODES[0]: [(5, 50), (15, 60)]}, end_time=None)
    drawn = section_of(report_of([row]), "Nodes").charts
    assert [chart.x_end for chart in drawn] == [30] * 3


def test_chart_of_a_node_with_a_wrong_clock_names_it(tmp_path: Path) -> None:
    late, silent = (
        {node: [(at, 50)] for node, at in zip(NODES, (5, last), strict=True)} for last in (-100, 5)
    )
    (named_line,) = report_of([used(tmp_path, late)]).missing
    assert [word in named_line for word in ("clocks", *NODES)] == [True, False, True]
    row = used(tmp_path / "silent", silent)
    (row.folder / "telemetry" / f"{NODES[1]}.jsonl").unlink()
    (line,) = report_of([row]).missing
    assert [word in line for word in ("clocks", *NODES)] == [False, False, True]


def test_nodes_with_a_single_sample_have_no_chart(tmp_path: Path) -> None:
    report = report_of([used(tmp_path, {NODES[0]: [(5, 50), (63, 0)], NODES[1]: [(7, math.nan)]})])
    assert (all(each.title != "Nodes" for each in report.sections), report.missing) == (True, [])
    silent = report_of([used(tmp_path / "silent", {NODES[0]: [(63, 9)]})])
    assert [NODES[0] in line for line in silent.missing] == [True]
    assert all(each.title != "Nodes" for each in silent.sections)


def test_amounts_and_shares_begin_at_zero(tmp_path: Path) -> None:
    records = [
        {"step": n, "loss": 1 / n, "samples_per_s": 90 + n, "data_bytes": 9 + n}
        for n in range(1, 5)
    ]
    row = used(tmp_path, {NODES[0]: [(5, 50), (6, 60)]})
    (row.folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, records)))
    drawn = {title: chart.from_zero for title, chart in charts_of(report_of([row])).items()}
    amounts = {"samples_per_s": True, "data_bytes": True, "CPU": True, "Memory": True}
    assert drawn == {"loss": False, TIMES: False, **amounts}


def test_large_numbers_of_seeds_and_ranks_are_readable(tmp_path: Path) -> None:
    rows = [
        wrote(tmp_path, number, [{"step": 1, "loss": number * 30_000}, {"step": 2, "loss": number * 20_000}],
              args=["--seed", str(number)])
        for number in (1, 2)
    ]  # fmt: skip
    (table,) = section_of(report_of(rows), "Seeds").tables
    assert table.rows == [["30,000 ± 14,000", "2"]]
    assert "20,000 ms to 20,000 ms" in compare_ranks([2e4, 2e4], [5, 5], 10, NODES)


@pytest.mark.parametrize("peak", [19.0, 1e4])
def test_chart_is_logarithmic_if_a_line_is_hidden_otherwise(tmp_path: Path, peak: float) -> None:
    """The peaks of the other tasks are 1 and 2. They do not lie on each other on a logarithmic
    axis.
    """
    values = [{"lr": lr} for lr in (0.1, 0.2, 0.3)]
    drawn = charts_of(report_of([sweep(tmp_path, values, [0.1, 0.2, peak / 10])]))
    is_far = peak > 20
    assert (drawn["loss"].y_log, drawn["loss by lr"].y_log) == (is_far, is_far)
    assert [line.covers for line in drawn["loss"].series] == [0, not is_far, 0]


def test_evaluations_and_amounts_make_no_axis_logarithmic() -> None:
    far = [Series("a", [(0, 1.0), (1, 2.0)]), Series("b", [(0, 100.0)])]
    assert line_chart("", far).y_log
    assert not line_chart("", [far[0], Series("b", [(0, 100.0)], marks=True)]).y_log
    assert not line_chart("", far, unit="B").y_log
    assert not line_chart("", [*far, Series("c", [(0, -1.0)])]).y_log
    assert not line_chart("", [Series("a", [(0, 1.0), (1, 100.0)])]).y_log


def sums(out: Path, job_id: int, speeds: Mapping[str, Sequence[float]], **more: Any) -> Row:
    """A run of `allreduce`, with the bandwidths of each transport for 4 KiB, 16 KiB, ..."""
    row = wrote(out, job_id, [])
    records = [
        {"kind": "allreduce", "comm": comm, "bytes": 4096 * 4**at, "bus_gb_per_s": speed, **more}
        for comm, listed in speeds.items()
        for at, speed in enumerate(listed)
    ]
    (row.folder / "allreduce.jsonl").write_text("\n".join(map(json.dumps, records)))
    return row


def test_results_by_size_have_a_chart(tmp_path: Path) -> None:
    rows = [sums(tmp_path, number, {"mpi": [1.0, number], "ring": [2.0, 3.0]}) for number in (1, 2)]
    results = section_of(report_of(rows[:1]), "Results")
    (chart,) = results.charts
    assert (chart.x, chart.x_log, chart.y, chart.from_zero) == ("size in bytes", True, "GB/s", True)
    assert (chart.x_bytes, chart.has_points) == (True, True)
    assert [(line.name, line.color, line.points) for line in chart.series] == [
        ("mpi", 0, [(4096, 1.0), (16384, 1.0)]),
        ("ring", 1, [(4096, 2.0), (16384, 3.0)]),
    ]
    assert len(results.tables[0].rows) == 4
    # A single size is only in the table.
    single = section_of(report_of([sums(tmp_path / "single", 1, {"mpi": [1.0]})]), "Results")
    assert (single.charts, len(single.tables[0].rows)) == ([], 1)
    # In a comparison, a chart of each transport with a color per run.
    compared = section_of(report_of(rows), "Results").charts
    assert [[(line.name, line.color) for line in chart.series] for chart in compared] == [
        [(row.shown, number) for number, row in enumerate(rows)]
    ] * 2
    assert compared[0].series[1].points == [(4096, 1.0), (16384, 2.0)]


def test_results_of_matrices_are_means_over_ranks(tmp_path: Path) -> None:
    """Damaged results are left out."""
    row = wrote(tmp_path, 1, [])
    sizes = [(64, [1.5, 2.5]), (512, [3.0, 4.0]), (0, [1.0]), (8, "x"), (8, [1.0, None]), (8, [])]
    records = [{"kind": "gemm", "m": m, "k": 64, "n": 64, "gflops": speeds} for m, speeds in sizes]
    lines = [
        *map(json.dumps, records),
        '{"kind": [1]}',
        '{"kind": "gemm"}',
        '{"kind": "micro_batch", "size": NaN}',
    ]
    (row.folder / "gemm.jsonl").write_text("\n".join(lines))
    (chart,) = section_of(report_of([row]), "Results").charts
    # The geometric mean of 512, 64 and 64 is 128.
    assert chart.series[0].points == [(64, 2.0), (128, 3.5)]


def test_figure_of_nodes_has_the_same_name_everywhere(tmp_path: Path) -> None:
    keyed = [figure for figure in FIGURES if figure.key]
    titles = {chart.title for chart in section_of(report_of([trained(tmp_path)]), "Nodes").charts}
    assert titles - {"Loss over time"} <= {figure.title for figure in FIGURES}
    rows = [trained(tmp_path, number, lr=number) for number in (2, 3)]
    compared = section_of(report_of(rows), "Results").tables[1].head
    scaling = {"nodes": [2], "weak": False, "repeats": 2, "metric": None}
    task = {"id": "1", "state": "COMPLETED", "nodes": NODES}
    same = {"scaling": scaling, "name": "train-scaling-0a1b", "tasks": [task]}
    table = scaling_of([trained(tmp_path, number, **same) for number in (4, 5)]).table()
    shown = {row[0] for row in table.rows}
    measured = [figure for figure in keyed if figure.title in {"CPU", "Memory", "GPU"}]
    assert {figure.heading for figure in measured} <= {*compared}
    assert {f"{figure.heading}, {figure.key_unit}" for figure in measured} <= shown


def test_units_are_in_markdown(tmp_path: Path) -> None:
    text = report_of([trained(tmp_path)]).as_markdown()
    for head in (
        "| Memory (GiB) |",
        "| CPU (%) |",
        "| Power of GPUs (W) |",
        "wait of rank 0 (ms)",
        "queue (s)",
    ):
        assert head in text


def test_chart_and_a_table_round_a_value_alike(tmp_path: Path) -> None:
    rows = [
        wrote(tmp_path, n, [{"step": at, "loss": at * 0.9721448} for at in (2, 1)]) for n in (1, 2)
    ]
    report = report_of(rows)
    assert section_of(report, "Results").tables[0].rows[0][1] == "0.972145"
    assert "| demo-1-train | 0.972145 | 1.94429 |" in report.as_markdown()


def test_thinned_points_keep_the_first_and_the_last() -> None:
    points = [(float(x), float(x * 7919 % 1009)) for x in range(10_000)]
    points[0], points[-1] = (0.0, 500.5), (9999.0, 500.25)
    thin = thinned(points)
    assert thin[0] == (0.0, 500.5)
    assert thin[-1] == (9999.0, 500.25)


def test_swept_option_with_the_name_of_a_field_has_its_own_values(tmp_path: Path) -> None:
    report = report_of([sweep(tmp_path, [{"name": "sgd"}, {"name": "adam"}], [0.5, 0.25])])
    assert any("name=adam" in line and "best: task 1" in line for line in report.verdict)
    assert "loss by config.name" in charts_of(report)
    text = report.as_markdown()
    assert "sgd" in text
    assert "=train" not in text


def test_table_of_a_chart_does_not_replace_a_last_value_that_is_infinite(tmp_path: Path) -> None:
    values = [1.0, 4.0, 2.0, math.inf]
    row = wrote(tmp_path, 1, [{"step": at, "loss": value} for at, value in enumerate(values)])
    assert "| loss | 1 | - | 1 | 4 |" in report_of([row]).as_markdown()


def test_table_of_a_long_chart_has_its_first_and_last_value(tmp_path: Path) -> None:
    rows = [{"step": at, "loss": 1 + at * 7919 % 1009} for at in range(3000)]
    rows[0]["loss"], rows[-1]["loss"] = 500.5, 499.5
    row = wrote(tmp_path, 1, rows)
    assert "| loss | 500.5 | 499.5 | 1 | 1,009 |" in report_of([row]).as_markdown()


def test_comparisons_have_times_of_a_step_and_use_of_nodes(tmp_path: Path) -> None:
    tasks = [
        {
            "id": "1",
            "state": "COMPLETED",
            "nodes": NODES,
            "start_time": TIME,
            "end_time": TIME + 3600,
        }
    ]
    rows = [trained(tmp_path, 1, tasks=tasks), trained(tmp_path, 2, lr=0.2)]
    use = section_of(report_of(rows), "Results").tables[1]
    assert dict(zip(use.head, use.rows[0], strict=True)) == {
        "run": "demo-1-train",
        "step (mean)": "100 ms",
        "node hours": "2",
        "cost": "1.50 USD",
        "CPU (mean)": "50 %",
        "GPU (mean)": "90 %",
        "Memory (highest)": "2 GiB",
    }
    assert use.rows[1][2] == "-"


def test_lines_of_the_log_are_apart_from_the_verdict(tmp_path: Path) -> None:
    records = ["Traceback", '  File "a.py"', "```", "ValueError"]
    diagnosis = {"job_id": "1", "cause": "ValueError", "fix": "", "lines": records}
    report = report_of([trained(tmp_path, state="FAILED", diagnosis=diagnosis)])
    assert not {*records[:3]} & {*report.verdict}
    assert report.sections[0].log == records
    assert all(f"\n    {line}\n" in report.as_markdown() for line in records)
    assert "  File &#34;a.py&#34;\n```" in report.as_html()


def requeued(out: Path) -> Row:
    """A run of two attempts of 60 s and 30 s, with 100 s between them."""
    spans = [(TIME, TIME + 60), (TIME + 160, TIME + 190)]
    attempts = [{"start_time": start, "end_time": end, "nodes": NODES[:1]} for start, end in spans]
    times = {"start_time": TIME, "end_time": TIME + 190}
    task = {
        "id": "1",
        "state": "COMPLETED",
        "nodes": NODES[:1],
        "attempts": attempts,
        "gpu_energy_j": 70,
    }
    records = [
        {"step": n, "loss": 1 / n, "time": TIME + at} for n, at in ((1, 10), (2, 55), (3, 185))
    ]
    return wrote(
        out, 1, records, tasks=[{**task, **times}], submit_time=TIME - 5, elapsed_s=90, **times
    )


def test_lines_have_a_gap_between_attempts(tmp_path: Path) -> None:
    row = requeued(tmp_path)
    (row.folder / "telemetry").mkdir()
    samples = [{"kind": "sample", "time": TIME + at, "cpu_percent": 50} for at in (5, 55, 165, 185)]
    (row.folder / "telemetry" / f"{NODES[0]}.jsonl").write_text("\n".join(map(json.dumps, samples)))
    loss, cpu = section_of(report_of([row]), "Nodes").charts
    # From minute 1 to minute 2 2/3 there was no attempt.
    minutes = [round(60 * x) for x, y in cpu.series[0].points if y is None]
    assert (cpu.x, minutes) == ("minutes", [110])
    assert [y is None for _, y in loss.series[0].points] == [False, False, True, False]


def test_chart_of_job_time_counts_all_attempts(tmp_path: Path) -> None:
    report = report_of([requeued(tmp_path)])
    chart = charts_of(report)[TIMES]
    spans = {one.name.split(",")[0]: round(60 * one.points[0][1], 6) for one in chart.series}
    assert chart.y == "minutes"
    # No event tells when the program ended.
    assert spans == {"queue": 105, "useful": 45, "running": 10 + 25, "unknown": 10}


def test_node_hours_and_energy_are_those_of_the_record(tmp_path: Path) -> None:
    facts = section_of(report_of([requeued(tmp_path)]), "Job").facts
    texts = {fact.label: fact.text for fact in facts}
    figures = {key: texts[key] for key in ("elapsed", "node hours", "GPU energy")}
    assert figures == {"elapsed": "1m30s", "node hours": "0.025", "GPU energy": "70 J"}
    lost = list(lines(3))
    without = section_of(report_of([wrote(tmp_path, 2, lost)]), "Job").facts
    assert "GPU energy" not in {fact.label for fact in without}
