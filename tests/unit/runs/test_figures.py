"""Figures of metrics are those that NumPy computes of all values, at any size."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest

from clusterctl.runs import charts, compare, curve, telemetry
from clusterctl.runs.compare import compare_losses
from clusterctl.runs.find import Row, ranked, reject_unknown_keys
from clusterctl.runs.page import Chart, Report
from clusterctl.runs.report import report_of
from clusterctl.runs.scaling import scaling_of
from clusterctl.runs.series import summarize
from clusterctl.state.run_record import RunRecord
from tests.support.messages import refused
from tests.unit.runs.made import TIME, made_run, record

Array: TypeAlias = np.ndarray[Any, Any]
NAN = math.nan
INF = math.inf


@dataclass(frozen=True)
class Case:
    """A file of metrics. write: how it is written. axis: the key of the places; "row": their
    number.
    """

    columns: Mapping[str, Array]
    write: Callable[[Path, Mapping[str, Array]], None]
    axis: str = "step"


def noise(count: int, seed: int = 0, **others: float) -> Array:
    """Return a falling loss with noise. others: other values, as ``at_PLACE=value``."""
    values = np.exp(-np.arange(count) / count)
    values += 0.1 * np.random.default_rng(seed).standard_normal(count)
    for key, value in others.items():
        values[int(key.removeprefix("at_"))] = value
    return values


def by_step(count: int, **others: float) -> dict[str, Array]:
    return {"step": np.arange(count), "loss": noise(count, 0, **others)}


def text_of(columns: Mapping[str, Array], row: str) -> str:
    return "".join(
        row % values for values in zip(*(each.tolist() for each in columns.values()), strict=True)
    )


def as_lines(more: str = "") -> Callable[[Path, Mapping[str, Array]], None]:
    """Return a writer of metrics.jsonl. more: further text in each line."""

    def write(folder: Path, columns: Mapping[str, Array]) -> None:
        text = text_of(
            columns, f"{{{', '.join(f'{json.dumps(key)}: %s' for key in columns)}{more}}}\n"
        )
        text = (
            text.replace(": nan", ": NaN")
            .replace(": inf", ": Infinity")
            .replace(": -inf", ": -Infinity")
        )
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(text)

    return write


def as_table(folder: Path, columns: Mapping[str, Array]) -> None:
    text = f"{','.join(columns)}\n{text_of(columns, ','.join(['%s'] * len(columns)) + chr(10))}"
    (folder / "metrics.csv").write_text(text)


def as_state(folder: Path, columns: Mapping[str, Array]) -> None:
    rows = zip(*(each.tolist() for each in columns.values()), strict=True)
    history = [dict(zip(columns, row, strict=True)) for row in rows]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": history}))


def restarted() -> Mapping[str, Array]:
    """Return the losses of two attempts. The second begins in the middle of the first."""
    first = by_step(20_000, at_15000=9.0)
    second = by_step(30_000, at_25000=-3.0)
    second = {"step": second["step"][10_000:], "loss": second["loss"][10_000:] + 1}
    return {key: np.concatenate([first[key], second[key]]) for key in first}


def spike(count: int, at: int) -> Mapping[str, Array]:
    return {"step": np.arange(count), "loss": np.where(np.arange(count) == at, 50.0, 1.0)}


LINES = as_lines()
CASES = {
    "100": Case(by_step(100), LINES),
    "1,000 with gaps": Case(by_step(1000, at_7=NAN, at_8=NAN, at_500=INF), LINES),
    "10,000, last -inf": Case(by_step(10_000, at_9999=-INF), LINES),
    "60,001 with a spike": Case(spike(60_001, 101), LINES),
    "epochs": Case({"epoch": 10 * np.arange(1, 200), "loss": noise(199)}, LINES, "epoch"),
    "epochs in a table": Case({"epoch": np.arange(9000), "loss": noise(9000)}, as_table, "epoch"),
    "neither": Case({"loss": noise(5000)}, LINES, "row"),
    "restart": Case(restarted(), LINES),
    "trainer": Case(by_step(20_000, at_13=7.0), as_state),
    "5,000 long lines": Case(by_step(5000, at_1=-5.0), as_lines(f', "t": "{"p" * 400}"')),
}


def chart_of(report: Report, name: str) -> Chart:
    drawn = (chart for section in report.sections for chart in section.charts)
    return next(chart for chart in drawn if chart.title == name)


def collected(out: Path, *cases: Case, job_id: int = 1, **fields: Any) -> Row:
    """Return the run of a job that wrote these files, with the record that `collect` writes."""
    run = made_run(out, job_id, **fields)
    (run.directory / "metrics.jsonl").unlink()
    for case in cases:
        case.write(run.directory, case.columns)
    found = record(job_id, **{**vars(summarize(run.directory)), **fields})
    (run.directory / "run.json").write_text(RunRecord.model_validate(found).as_json())
    return Row(RunRecord.load(run.directory))


def check(row: Row, name: str, case: Case) -> None:
    """Compare the figures of a metric in run.json and in the report with those of NumPy."""
    ys = case.columns["loss"]
    xs = np.arange(1, len(ys) + 1) if case.axis == "row" else case.columns[case.axis]
    finite = np.isfinite(ys)
    low = np.argmin(np.where(finite, ys, INF))
    high = np.argmax(np.where(finite, ys, -INF))
    metric = row.metrics[name]
    assert (metric.axis, metric.count, metric.last_step) == (case.axis, len(ys), xs[-1])
    assert (row.value(f"{name}.min"), metric.min_step) == (ys[low], xs[low])
    assert (row.value(f"{name}.max"), metric.max_step) == (ys[high], xs[high])
    assert row.value(name) == (ys[-1] if finite[-1] else None)
    assert row.nonfinite(name) == (None if finite[-1] else str(ys[-1]))
    assert (metric.nonfinite, metric.nonfinite_step) == (
        (~finite).sum(), None if finite.all() else xs[~finite][0]
    )  # fmt: skip
    assert metric.repeated == (xs[1:] <= np.maximum.accumulate(xs)[:-1]).sum()
    report = report_of([row])
    if name == "loss" and finite[-1]:
        assert any(f"in {len(ys):,} values" in line for line in report.verdict)
    # The last value of each place is drawn, and no part of the run has more points than another.
    last = {x: y for x, y in zip(xs.tolist(), ys.tolist(), strict=True) if math.isfinite(y)}
    chart = chart_of(report, name)
    drawn = {x: y for x, y in chart.series[0].points if y is not None}
    assert chart.x == case.axis
    assert drawn.items() <= last.items()
    assert {min(last.values()), max(last.values())} <= {*drawn.values()}
    assert np.median([*drawn]) == pytest.approx(np.median([*last]), rel=0.05)


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_figures_of_a_run_are_those_of_all_its_values(tmp_path: Path, case: Case) -> None:
    check(collected(tmp_path, case), "loss", case)


def test_figures_of_two_runs_in_a_file_are_apart(tmp_path: Path) -> None:
    cases = {
        run: Case(by_step(3000, at_7=value), LINES) for run, value in (("a", 9.0), ("b", -9.0))
    }
    row = collected(tmp_path)
    lines = [
        {"run": run, "step": step, "loss": loss}
        for step in range(3000)
        for run, case in cases.items()
        for loss in [case.columns["loss"][step]]
    ]
    (row.folder / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    row = Row(row.run.model_copy(update=vars(summarize(row.folder))))
    for run, case in cases.items():
        check(row, f"{run}/loss", case)


def test_tasks_of_a_sweep_are_ranked_by_their_last_values(tmp_path: Path) -> None:
    """Task 1 is worse than the others, except for its last value."""
    losses = [noise(60_000, seed) + seed % 2 for seed in range(4)]
    losses[1][-1] = -1.0
    tasks = [
        {"id": f"1_{n}", "state": "COMPLETED", "nodes": ["n1"], "config": {"seed": n}}
        for n in range(4)
    ]
    run = made_run(tmp_path, tasks=tasks, sweep={"keys": ["seed"], "metric": "loss", "goal": "min"})
    for task, ys in zip(run.tasks, losses, strict=True):
        (run.directory / task.folder).mkdir()
        LINES(run.directory / task.folder, {"step": np.arange(len(ys)), "loss": ys})
    found = [
        task.model_copy(update={"metrics": summarize(run.directory / task.folder).metrics})
        for task in run.tasks
    ]
    updated = run.model_copy(update={"tasks": tuple(found)})
    (run.directory / "run.json").write_text(updated.as_json())
    row = Row(RunRecord.load(run.directory))
    rows = ranked(row).tasks
    assert [task.number for task in rows] == [str(n) for n in np.argsort([ys[-1] for ys in losses])]
    chart = chart_of(report_of([row]), "loss")
    drawn = {line.name: dict(line.points) for line in chart.series}
    for number, ys in enumerate(losses):
        assert {ys.min(), ys.max()} <= {*drawn[f"task {number}"].values()}


def test_medians_of_a_scaling_and_a_report_are_those_of_all_values(tmp_path: Path) -> None:
    """The speed doubles near the end of the run."""
    speeds = 100 + noise(80_000)
    speeds[60_000:] *= 2
    columns = {"step": np.arange(80_000), "samples_per_s": speeds}
    scaling = {"nodes": [1, 2], "repeats": 1}
    rows = [
        collected(
            tmp_path, Case(columns, LINES), job_id=n, scaling=scaling, nodes=[f"n{k}" for k in range(n)],
            tasks=[{"id": str(n), "state": "COMPLETED", "nodes": [f"n{k}" for k in range(n)]}],
        )
        for n in (1, 2)
    ]  # fmt: skip
    (first,) = scaling_of(rows).curves
    assert first.sizes[0].figures["samples_per_s"].mean == pytest.approx(np.median(speeds))
    assert any(
        f"median speed: {np.median(speeds):.6g}" in line for line in report_of(rows[:1]).verdict
    )


def test_scaling_of_a_run_whose_metrics_are_incomplete_says_so(tmp_path: Path) -> None:
    columns = {"step": np.arange(2), "samples_per_s": noise(2)}
    lines = as_lines(f', "text": "{"x" * (3 << 20)}"')
    rows = [
        collected(
            tmp_path, Case(columns, lines), job_id=n, scaling={"nodes": [1, 2]}, nodes=["n1"],
            tasks=[{"id": str(n), "state": "COMPLETED", "nodes": ["n1"]}],
        )
        for n in (1, 2)
    ]  # fmt: skip
    missing = scaling_of(rows).missing
    assert [
        [row.shown in text and "metrics.jsonl" in text for text in missing].count(True)
        for row in rows
    ] == [1, 1]


def test_sweep_names_tasks_behind_the_charts_with_incomplete_metrics(tmp_path: Path) -> None:
    tasks = [
        {
            "id": f"1_{n}",
            "state": "COMPLETED",
            "metrics": {"loss": {"last": float(n), "count": 1}},
            "left_out": ["3 lines"] if n == 18 else [],
        }
        for n in range(20)
    ]
    run = made_run(tmp_path, tasks=tasks, sweep={"keys": ["lr"], "metric": "loss", "goal": "min"})
    assert any("tasks 18 " in text for text in report_of([Row(run)]).missing)


def test_replay_that_differs_in_its_last_step_only_is_different(tmp_path: Path) -> None:
    columns = by_step(60_000)
    other = {**columns, "loss": columns["loss"].copy()}
    other["loss"][-1] += 1
    rows = [
        collected(tmp_path, Case(each, LINES), job_id=n)
        for n, each in enumerate((columns, other), 1)
    ]
    losses = compare_losses(*rows)
    assert losses is not None
    assert (losses.identical, losses.steps, losses.first) == (False, 60_000, 59_999)
    assert losses.largest == pytest.approx(1)


@pytest.mark.parametrize(("limit", "complete"), [(50, False), (100, True)])
def test_losses_of_a_comparison_beyond_the_limit_are_named(
    tmp_path: Path, limit: int, complete: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "_MAX_LOSSES", limit)
    rows = (collected(tmp_path, CASES["100"], job_id=n) for n in (1, 2))
    losses = compare_losses(*rows)
    assert losses is not None
    assert (losses.identical, losses.steps, losses.complete) == (True, limit, complete)
    assert ("only the first" in str(losses)) == (not complete)


def test_use_of_nodes_is_that_of_all_samples(tmp_path: Path) -> None:
    cpu = 50 + 10 * noise(20_000)
    cpu[777], cpu[888] = 0.5, 99.5
    row = collected(tmp_path, end_time=TIME + 30_000)
    (row.folder / "telemetry").mkdir()
    columns = {"time": TIME + np.arange(20_000), "cpu_percent": cpu, "memory_used_mib": 100 * cpu}
    text = text_of(
        columns, '{"kind": "sample", "time": %s, "cpu_percent": %s, "memory_used_mib": %s}\n'
    )
    (row.folder / "telemetry/n1.jsonl").write_text(text)
    use = telemetry.node_use(row.folder, ["n1"])
    assert use["cpu_percent"] == pytest.approx(cpu.mean())
    assert use["memory_max_gib"] == pytest.approx(100 * cpu.max() / 1024)
    found = telemetry._NodeSamples.of(row.folder, "n1", TIME, TIME + 30_000).curves["CPU"]
    assert {0.5, 99.5} <= {y for _, y in found.points()}


def test_curve_with_the_same_values_in_other_pieces_is_the_same() -> None:
    xs = [*range(10_000)]
    ys = noise(10_000, at_9=NAN, at_500=INF).tolist()
    curves = []
    for size in (1, 7, 1000, 10_000):
        each = curve.Curve()
        for at in range(0, len(xs), size):
            each.extend("step", curve.Column(xs[at : at + size], ys[at : at + size], rises=True))
        curves.append(each)
    assert len({repr((each.metric(), each.points())) for each in curves}) == 1


def test_values_without_a_step_among_others_are_counted_and_named(tmp_path: Path) -> None:
    lines = [{"loss": 9.0}, *({"step": n, "loss": 1 / n} for n in range(1, 9)), {"loss": 0.01}]
    row = Row(made_run(tmp_path, metrics=lines))
    loss = row.metrics["loss"]
    assert (loss.count, loss.last, loss.last_step, loss.max, loss.max_step) == (
        10,
        0.01,
        None,
        9.0,
        None,
    )
    report = report_of([row])
    assert chart_of(report, "loss").series[0].points == [(n, 1 / n) for n in range(1, 9)]
    (section,) = [each for each in report.sections if each.title == "Metrics"]
    assert any("2 of 10 values" in line for line in section.lines)


def test_repeated_steps_are_named_in_the_report(tmp_path: Path) -> None:
    report = report_of([collected(tmp_path, CASES["restart"])])
    (section,) = [each for each in report.sections if each.title == "Metrics"]
    assert any("10,000 of 40,000 values" in line for line in section.lines)


def test_nested_numbers_have_the_names_of_both_keys(tmp_path: Path) -> None:
    lines = [
        {"step": n, "train": {"loss": n, "deep": {"acc": 1, "t": "x"}}, "lr": 1} for n in range(3)
    ]
    row = Row(made_run(tmp_path, metrics=[*lines, {"config": {"lr": 9}}]))
    assert {name: metric.last for name, metric in row.metrics.items()} == {
        "train.loss": 2, "train.deep.acc": 1, "lr": 1
    }  # fmt: skip
    assert row.value("config.lr") == 9


def test_metrics_that_are_left_out_are_named_and_not_guessed(tmp_path: Path) -> None:
    row = Row(made_run(tmp_path, metrics=[{"step": 1, **{f"metric_{n}": n for n in range(1100)}}]))
    assert len(row.metrics) == 1000
    (left_out,) = row.run.left_out
    assert "1,000 names" in left_out
    assert left_out in report_of([row]).missing
    with refused("not-found/run-key") as caught:
        reject_unknown_keys([row], ["metric_1050"])
    assert left_out in str(caught.value.why)
    assert "metric_150" not in str(caught.value.fix)


@pytest.mark.parametrize("key", ["global_step", "_step", "iteration", "epoch"])
def test_places_have_any_usual_key_and_may_be_floats(tmp_path: Path, key: str) -> None:
    row = Row(made_run(tmp_path, metrics=[{key: 2.0 * n, "loss": n} for n in range(5)]))
    loss = row.metrics["loss"]
    assert (loss.axis, loss.last_step) == ("epoch" if key == "epoch" else "step", 8)


def test_damaged_line_is_skipped_alone(tmp_path: Path) -> None:
    row = collected(tmp_path, CASES["10,000, last -inf"])
    path = row.folder / "metrics.jsonl"
    lines = path.read_text().splitlines()
    for at in (0, 4000, 9000):
        lines[at] = '{"step": 1, "loss": '
    lines[5000] = '{"step": 5000, "loss": 1.5, "text": "\\ud800"}'
    path.write_text("\n".join([*lines, '{"step": 1']))
    loss = summarize(row.folder).metrics["loss"]
    assert (loss.count, loss.last_step) == (9997, 9999)


def iterations(count: int) -> Iterator[Mapping[str, Any]]:
    for step in range(count):
        ms = 5.0 if step < count // 2 else 1.0
        yield {
            "kind": "iteration", "step": step, "time": TIME + 5 + step / 1e4, "loss": 1.0, "seconds": 0.01,
            "comm_exposed_ms": ms, "data_ms": 1.0,
        }  # fmt: skip


def test_parts_of_a_step_are_means_over_the_whole_run(tmp_path: Path) -> None:
    row = Row(made_run(tmp_path, metrics=[{"kind": "run"}, *iterations(20_000)]))
    metrics = charts.ProgramMetrics.of(row)
    assert metrics.part_means == pytest.approx([6.0, 3.0, 1.0])
    assert metrics.median("step") == pytest.approx(10)
    areas = chart_of(report_of([row]), "Parts of a step").series
    exposed = next(line for line in areas if line.name == "exposed communication")
    assert [y for _, y in exposed.points[:40]] == [5.0] * 40
    assert [y for _, y in exposed.points[-40:]] == [1.0] * 40


@pytest.mark.parametrize("key", ["epoch", "step"])
@pytest.mark.parametrize("batches", [30, 2000])
def test_chart_with_many_values_in_an_epoch_counts_rows(
    tmp_path: Path, key: str, batches: int
) -> None:
    """Not only the last value of each epoch."""
    losses = noise(3 * batches).tolist()
    lines = [{key: n // batches, "loss": loss} for n, loss in enumerate(losses)]
    row = Row(made_run(tmp_path, metrics=lines))
    assert (row.metrics["loss"].axis, row.metrics["loss"].last_step) == (key, 2)
    report = report_of([row])
    chart = chart_of(report, "loss")
    assert chart.x == "row"
    assert dict(chart.series[0].points).items() <= dict(enumerate(losses, 1)).items()
    assert len(chart.series[0].points) >= 90
    (section,) = [each for each in report.sections if each.title == "Metrics"]
    assert any("by row" in line for line in section.lines)


def test_options_beyond_the_limit_are_named(tmp_path: Path) -> None:
    config = {f"option_{n}": n for n in range(1200)}
    found = made_run(tmp_path, metrics=[{"config": config}])
    assert (len(found.config), len(found.left_out)) == (1000, 1)


def test_files_and_lines_that_are_too_large_are_named(tmp_path: Path) -> None:
    row = collected(tmp_path)
    entries = ",".join(["{}"] * ((1 << 19) + 1))
    (row.folder / "trainer_state.json").write_text(f'{{"log_history": [{entries}]}}')
    (row.folder / "metrics.csv").write_text("step,loss\n1,2\n" + '"' + "x" * 200_000)
    (row.folder / "metrics.jsonl").write_text(f'{{"a": 1}}\n{{"text": "{"x" * (3 << 20)}"}}\n')
    found = summarize(row.folder).left_out
    for name in ("trainer_state.json", "metrics.csv", "metrics.jsonl"):
        assert [name in text for text in found].count(True) == 1, found
    missing = report_of([row]).missing
    assert {*found} <= {*missing}
    assert not any("wrote no" in text for text in missing)


@pytest.mark.parametrize(
    "lines",
    [
        '{"run": "a", "kind": [], "loss": 1}',
        '{"step": 1%s, "time": 1%s, "loss": 1%s}\n{"step": -1%s, "time": -1%s, "loss": -1%s}'
        % (("0" * 400,) * 6),
        '{"step": 1, "epoch": null, "time": NaN, "loss": {"a": {"b": Infinity}}}\n{"step": "x"}',
        "\n".join(f'{{"step": {n}, "loss": {(-1) ** n}e308}}' for n in range(3000)),
        '{"kind": "checkpoint", "stall_s": []}\n{"kind": "result", "seconds": {"a": 1}}',
    ],
    ids=["kind", "large", "mixed", "overflow", "others"],
)
def test_hostile_lines_have_figures_and_a_report(tmp_path: Path, lines: str) -> None:
    row = collected(tmp_path)
    (row.folder / "metrics.jsonl").write_text(f"{lines}\n")
    row = Row(row.run.model_copy(update=vars(summarize(row.folder))))
    assert report_of([row]).as_html()
    assert report_of([row, row]).as_html()
    compare_losses(row, row)
