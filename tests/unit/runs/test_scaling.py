"""The table, the chart and the report of a scaling. The expected figures are computed by hand."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.runs.find import Row, named_rows
from clusterctl.runs.report import report_of
from clusterctl.runs.scaling import ScalingCurve, ScalingRow, ScalingTable, is_scaling, scaling_of
from clusterctl.runs.spread import Spread
from clusterctl.spec.metrics import Goal
from clusterctl.state.ledger import note_runs_folder
from clusterctl.state.run_record import RunRecord
from tests.support.messages import refused
from tests.unit.runs.made import TIME, made_run

NAME = "train-scaling-0a1b"
SCALING = {"nodes": [1, 2], "weak": False, "repeats": 2, "metric": None}


def measured(
    out: Path, job_id: int, nodes: int, lines: Sequence[Mapping[str, Any]], **fields: Any
) -> RunRecord:
    """A completed run of a scaling on some nodes."""
    names = [f"demo-train-{number}" for number in range(1, nodes + 1)]
    task = {"id": str(job_id), "state": "COMPLETED", "exit_code": 0, "nodes": names}
    more = {"name": NAME, "nodes": names, "tasks": [task], "scaling": SCALING, **fields}
    return made_run(out, job_id, metrics=lines, **more)


def steps(*speeds: float, seconds: float = 0.2, exposed_ms: float = 20.0) -> list[dict[str, Any]]:
    times = {"kind": "iteration", "seconds": seconds, "comm_exposed_ms": exposed_ms, "data_ms": 1.0}
    return [
        {**times, "step": step, "time": TIME + step, "loss": 1 / step, "samples_per_s": speed}
        for step, speed in enumerate(speeds, 1)
    ]


def result(seconds: float, accuracy: float) -> list[dict[str, Any]]:
    evaluation = {
        "kind": "evaluation",
        "step": 9,
        "time": TIME + 9,
        "loss": 0.5,
        "accuracy": accuracy,
    }
    return [evaluation, {"kind": "result", "seconds": seconds, "time": TIME + 10}]


def sizes_of(scaling: ScalingTable, title: str = "") -> dict[int, ScalingRow]:
    (curve,) = [curve for curve in scaling.curves if curve.title == title]
    return {size.nodes: size for size in curve.sizes}


def spread(mean: float, deviation: float = 0.0) -> Spread:
    """A spread that equals another up to rounding."""
    return Spread(pytest.approx(mean), pytest.approx(deviation, abs=1e-9))


@pytest.fixture
def runs(tmp_path: Path) -> list[Row]:
    """Two runs each on 1 node, at 90 and 110 samples/s at the median, and on 2 nodes, at 150 and
    170.
    """
    speeds = {1: [(10, 90, 95), (110, 110, 110)], 2: [(150, 150, 150), (170, 170, 170)]}
    rows = []
    for nodes, repeats in speeds.items():
        for repeat, each in enumerate(repeats):
            lines = [
                *steps(*each, exposed_ms=20.0 * (nodes - 1)),
                *result(12.0 / nodes + repeat, 0.9),
            ]
            rows.append(Row(measured(tmp_path / "runs", 10 * nodes + repeat, nodes, lines)))
    return rows


def test_strong_scaling_computed_by_hand(runs: list[Row]) -> None:
    sizes = sizes_of(scaling_of(runs))
    one = sizes[1].figures
    two = sizes[2].figures
    assert (sizes[1].runs, sizes[2].runs) == (2, 2)
    # The mean of 90 and 110 is 100; sqrt((10² + 10²) / 1) = 14.14.
    assert one["samples_per_s"] == spread(100, math.sqrt(200))
    assert two["samples_per_s"] == spread(160, math.sqrt(200))
    # 150 / 100 and 170 / 100: mean 1.6, deviation sqrt(0.1² + 0.1²) = 0.1414; on two nodes half of
    # that.
    assert one["speed_up"] == spread(1.0, math.sqrt(0.02))
    assert two["speed_up"] == spread(1.6, math.sqrt(0.02))
    assert two["efficiency_percent"] == spread(80, 50 * math.sqrt(0.02))
    # The program ran 12 and 13 s, then 6 and 7 s.
    assert (one["time_s"], two["time_s"]) == (
        spread(12.5, math.sqrt(0.5)),
        spread(6.5, math.sqrt(0.5)),
    )
    # By the time: 12.5 s / 6.5 s, as the rows of the table say.
    assert two["time_speed_up"].mean == pytest.approx(12.5 / 6.5)
    # A step has 200 ms, of which 20 ms wait for communication.
    assert (two["step_ms"], two["comm_exposed_percent"]) == (spread(200), spread(10))
    assert (one["eval_loss"], two["eval_accuracy"]) == (spread(0.5), spread(0.9))


def test_table_has_a_column_for_each_number_of_nodes(runs: list[Row]) -> None:
    table = scaling_of(runs).table()
    assert table.head == ("", "1 node", "2 nodes")
    cells = {row[0]: row[1:] for row in table.rows}
    assert cells["runs"] == ["2", "2"]
    assert cells["samples_per_s (higher is better)"] == ["100 ± 14", "160 ± 14"]
    assert cells["speed-up"] == ["1.00 ± 0.14", "1.60 ± 0.14"]
    assert cells["efficiency, %"] == ["100 ± 14", "80.0 ± 7.1"]


@pytest.mark.parametrize(
    ("weak", "speed_up", "efficiency"),
    [(False, 2.0, 100.0), (True, 4.0, 200.0)],
    ids=["strong", "weak"],
)
def test_time_is_faster_if_it_is_less(
    tmp_path: Path, weak: bool, speed_up: float, efficiency: float
) -> None:
    """Without a metric, the jobs' times count: 60 and 30 s. In weak scaling, two nodes did twice
    the work.
    """
    options = {**SCALING, "weak": weak, "repeats": 1}
    rows = []
    for nodes in (1, 2):
        task = {"start_time": TIME, "end_time": TIME + 60 // nodes}
        run = measured(tmp_path, nodes, nodes, [], scaling=options, elapsed_s=60 // nodes, **task)
        rows.append(Row(run))
    scaling = scaling_of(rows)
    figures = sizes_of(scaling)[2].figures
    assert (scaling.metric, figures["time_s"]) == ("time_s", spread(30))
    (clock,) = scaling.clocks
    assert clock in "".join(scaling.notes())
    assert figures["speed_up"] == spread(speed_up)
    assert figures["efficiency_percent"] == spread(efficiency)


def test_speed_up_is_the_ratio_of_the_means_and_zero_is_no_speed(tmp_path: Path) -> None:
    """10 and 20 ms are 15 ms on average, as the table says, so 5 ms are 3 times as fast."""

    def scaling(*values: float) -> ScalingTable:
        options = {**SCALING, "metric": "epoch_ms"}
        places = [(tmp_path / str(values), number, min(number, 2)) for number in (1, 2)]
        places += [(tmp_path / str(values), 3, 1)]
        lines = [[{"epoch_ms": value}] for value in values]
        return scaling_of(
            [
                Row(measured(*place, line, scaling=options))
                for place, line in zip(places, lines, strict=True)
            ]
        )

    figures = sizes_of(scaling(10, 5, 20))
    assert figures[1].figures["speed_up"].mean == pytest.approx(1)
    assert figures[2].figures["speed_up"] == spread(15 / 5)
    assert "speed_up" not in sizes_of(scaling(0, 5, 0))[2].figures
    # Twice the time on two nodes is not called fast.
    assert "slower" in next(scaling(10, 20, 10).verdict())


def test_program_is_measured_by_its_own_metric(tmp_path: Path) -> None:
    options = {**SCALING, "metric": "epoch_ms"}
    lines = {1: 8.0, 2: 5.0}
    rows = [
        Row(measured(tmp_path, nodes, nodes, [{"epoch_ms": value}], scaling=options))
        for nodes, value in lines.items()
    ]
    scaling = scaling_of(rows)
    assert sizes_of(scaling)[2].figures["speed_up"] == spread(1.6)
    assert "slower" not in next(scaling.verdict())
    rows = [
        Row(row.run.model_copy(update={"scaling": {**options, "metric": "nope"}})) for row in rows
    ]
    with refused("not-found/run-key", UsageError) as caught:
        scaling_of(rows)
    assert "epoch_ms" in (caught.value.fix or "")


def scaled(out: Path, metric: str, values: Sequence[float], **options: Any) -> ScalingTable:
    """A scaling with a run on 1, 2, 4, ... nodes, by a metric."""
    scaling = {**SCALING, "repeats": 1, "metric": metric, **options}
    rows = []
    for at, value in enumerate(values):
        names = [f"demo-train-{number}" for number in range(1, 2**at + 1)]
        task = {
            "id": str(at + 1),
            "state": "COMPLETED",
            "start_time": TIME,
            "end_time": TIME + 60,
            "nodes": names,
        }
        run = measured(out, at + 1, 2**at, [{metric: value}], tasks=[task], scaling=scaling)
        rows.append(Row(run))
    return scaling_of(rows)


@pytest.mark.parametrize(
    ("metric", "options", "values", "speed_up"),
    [
        ("updates_per_s", {}, (200, 100), 0.5),
        ("gflops", {}, (100, 190), 1.9),
        ("update_ms", {}, (1.0, 0.5), 2.0),
        ("error_rate", {}, (0.2, 0.1), 2.0),
        ("widgets", {"goal": "max"}, (10, 15), 1.5),
        ("widgets", {"goal": "min"}, (10, 5), 2.0),
        ("gflops", {"goal": "min"}, (200, 100), 2.0),
        ("tokens_per_s", {"weak": True}, (100, 180), 1.8),
        ("epoch_ms", {"weak": True}, (10, 12.5), 1.6),
        ("ms_per_token", {"weak": True, "goal": "min"}, (10, 5), 2.0),
    ],
)
def test_speed_up_follows_the_direction_of_the_metric(
    tmp_path: Path,
    metric: str,
    options: Mapping[str, Any],
    values: Sequence[float],
    speed_up: float,
) -> None:
    scaling = scaled(tmp_path, metric, values, **options)
    assert sizes_of(scaling)[2].figures["speed_up"] == spread(speed_up)
    assert scaling.goal is not None
    assert f"{metric} ({scaling.goal.words})" in [row[0] for row in scaling.table().rows]
    assert scaling.goal.words in next(scaling.verdict())


def test_metric_of_zero_or_below_has_no_speed_up_and_is_named(tmp_path: Path) -> None:
    scaling = scaled(tmp_path, "reward", (-0.2, -0.1))
    assert "speed_up" not in sizes_of(scaling)[2].figures
    assert ["-0.2" in line for line in scaling.missing] == [True, False]


def test_scaling_by_metric_of_unknown_direction_has_no_speed_up(tmp_path: Path) -> None:
    scaling = scaled(tmp_path, "widgets", (10, 15))
    assert (scaling.goal, sizes_of(scaling)[2].figures["widgets"]) == (None, spread(15))
    assert "speed_up" not in sizes_of(scaling)[2].figures
    assert "--set scaling.goal=" in scaling.missing[-1]


def test_verdict_of_the_same_speed_has_no_factor(tmp_path: Path) -> None:
    options = {**SCALING, "metric": "epoch_ms"}
    rows = [
        Row(measured(tmp_path, nodes, nodes, [{"epoch_ms": 8.0}], scaling=options))
        for nodes in (1, 2)
    ]
    assert " times " not in next(scaling_of(rows).verdict())


def test_scaling_of_two_models_has_two_curves(tmp_path: Path) -> None:
    """A sweep of two models: runs with two tasks each."""
    rows = []
    for nodes in (1, 2):
        names = [f"demo-train-{number}" for number in range(nodes)]
        tasks = []
        for number, (model, speed) in enumerate((("resnet50", 100.0), ("mlp", 10.0))):
            task = {"id": f"{nodes}_{number}", "state": "COMPLETED", "nodes": names}
            metrics = {"samples_per_s": {"last": speed * nodes * (1 - 0.1 * number * (nodes - 1))}}
            tasks.append({**task, "config": {"model": model}, "metrics": metrics})
        hosts = {name: {"gpus": [{"name": "NVIDIA L4"}]} for name in names}
        run = measured(
            tmp_path, nodes, nodes, [], sweep={"keys": ["model"]}, tasks=tasks, hosts=hosts
        )
        rows.append(Row(run))
    scaling = scaling_of(rows)
    assert sizes_of(scaling, "model=resnet50")[2].figures["efficiency_percent"] == spread(100)
    assert sizes_of(scaling, "model=mlp")[2].figures["efficiency_percent"] == spread(90)
    (chart,) = report_of(rows).sections[0].charts
    assert {series.name: list(series.points) for series in chart.series} == {
        "model=resnet50": [(1, 1.0), (2, 2.0)],
        "model=mlp": [(1, 1.0), (2, pytest.approx(1.8))],
        "ideal": [(1, 1.0), (2, 2.0)],
    }
    # What nobody measured is grey and dashed.
    assert [(series.color, bool(series.dash)) for series in chart.series] == [
        *[(None, False)] * 2,
        (-1, True),
    ]


def test_scaling_names_hardware_and_shared_machines(tmp_path: Path) -> None:
    def scaling(folder: str, gpu: str, *, shares_machine: bool) -> ScalingTable:
        hosts = {"demo-train-1": {"gpus": [{"name": gpu}]}}
        more = {"hosts": hosts, "shares_machine": shares_machine}
        return scaling_of(
            [
                Row(measured(tmp_path / folder, number, number, steps(9), **more))
                for number in (1, 2)
            ]
        )

    apart = scaling("apart", "NVIDIA H100 80GB HBM3", shares_machine=False)
    shared = scaling("shared", "NVIDIA L4", shares_machine=True)
    assert apart.hardware == "NVIDIA H100 80GB HBM3"
    # Nothing is said of where such a scaling stops paying.
    assert ["share" in line for line in shared.verdict()][:1] == [True]
    assert ["paying" in line for line in (*shared.verdict(), *apart.verdict())].count(True) == 1


def test_use_of_nodes_while_the_program_ran(tmp_path: Path) -> None:
    """Samples before the first and after the last line of metrics do not count."""
    task = {
        "id": "1",
        "state": "COMPLETED",
        "exit_code": 0,
        "start_time": TIME + 1,
        "end_time": TIME + 3,
    }
    nodes = ["demo-train-1", "demo-train-2"]
    run = measured(
        tmp_path, 1, 2, steps(9, 9, 9), tasks=[{**task, "nodes": nodes, "gpu_energy_j": 40_000}]
    )
    (run.directory / "telemetry").mkdir()
    for node, percent in zip(run.nodes, (40, 60), strict=True):
        samples = []
        for second in range(7):
            is_inside = 1 <= second <= 3
            gpus = [{"util": 90 if is_inside else 0, "index": index} for index in range(2)]
            busy = {
                "cpu_percent": percent if is_inside else 0,
                "memory_used_mib": 1024 * min(second, 3),
            }
            network = {"net_tx_bytes_per_s": {"eth0": 2 << 20 if is_inside else 0}}
            samples.append(
                {"kind": "sample", "time": TIME + second, "gpus": gpus, **busy, **network}
            )
        text = "".join(f"{json.dumps(sample)}\n" for sample in samples)
        (run.directory / "telemetry" / f"{node}.jsonl").write_text(text)
    other = measured(tmp_path, 2, 1, steps(9))
    figures = sizes_of(scaling_of([Row(run), Row(other)]))[2].figures
    expected = {
        "cpu_percent": 50,
        "memory_max_gib": 3,
        "gpu_percent": 90,
        "sent_mib_per_s": 2,
        "energy_kj": 40,
    }
    assert {name: figures[name] for name in expected} == {
        name: spread(value) for name, value in expected.items()
    }


def test_runs_without_figures_are_missing(runs: list[Row], tmp_path: Path) -> None:
    task = {"id": "30", "state": "FAILED", "nodes": ["demo-train-1"]}
    failed = Row(measured(tmp_path / "runs", 30, 1, [], tasks=[task], state="FAILED"))
    complete = scaling_of([*runs, failed])
    incomplete = scaling_of([*runs[1:3], failed])
    assert [failed.shown in fact for fact in complete.missing] == [True]
    assert len(incomplete.missing) == 2
    assert sizes_of(complete)[1].runs == 2
    alone = scaling_of([failed, failed])
    assert (alone.curves, report_of([failed, failed]).ok) == ([], None)


def test_memory_of_less_than_a_gib_is_in_mib() -> None:
    def cells(*gib: float) -> dict[str, Sequence[str]]:
        sizes = [
            ScalingRow(
                nodes,
                nodes,
                nodes,
                1,
                {"memory_max_gib": Spread(each, 0.0), "tokens_per_s": Spread(102_211.0, 0.0)},
            )
            for nodes, each in enumerate(gib, 1)
        ]
        scaling = ScalingTable(
            NAME, "nodes", False, "time_s", Goal.MIN, [ScalingCurve("", sizes)], False, "", []
        )
        return {row[0].rpartition(", ")[2]: row[1:] for row in scaling.table().rows}

    small = cells(0.25, 0.5)
    mixed = cells(0.25, 2)
    assert (small["MiB"], small["tokens_per_s"]) == (["256", "512"], ["102,211"] * 2)
    assert mixed["GiB"] == ["0.25", "2"]


def test_run_that_cannot_be_read_is_named(runs: list[Row]) -> None:
    """The table has the runs that can be read."""
    (runs[3].folder / "run.json").write_text("{")
    scaling = scaling_of(runs[:3])
    assert [runs[3].shown in fact for fact in scaling.missing] == [True]
    assert [size.runs for size in scaling.curves[0].sizes] == [2, 1]


@pytest.mark.parametrize(
    ("lines", "ranks"),
    [
        (["#!/bin/bash", "#SBATCH --ntasks-per-node=3", "#SBATCH --nodes=2", "srun x"], 6),
        (["#!/bin/bash", "#SBATCH --tasks-per-node 2", "#SBATCH --mem=1G"], 4),
        (["#!/bin/bash", "#SBATCH -n 5"], 5),
        (["#!/bin/bash", "#SBATCH --nodes=2", "#SBATCH 'half"], 8),
        ([], 8),
    ],
    ids=["per-node", "other-name", "in-all", "damaged", "without-scheduler"],
)
def test_scaling_reads_the_number_of_ranks_from_the_script(
    tmp_path: Path, lines: list[str], ranks: int
) -> None:
    """Without a script of sbatch, the option of `submit` does."""
    row = Row(measured(tmp_path, 1, 2, steps(9), job={"tasks_per_node": 4}))
    if lines:
        (row.folder / "job.sbatch").write_text("\n".join(lines))
    assert sizes_of(scaling_of([row]))[2].ranks == ranks


def test_scaling_is_named_by_its_jobs(
    runs: list[Row], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copytree("runs", "copies")
    note_runs_folder(Path("copies").resolve())
    rows = named_rows(NAME)
    assert [row.run.job_id for row in rows] == [row.run.job_id for row in runs]
    assert [row.run.job_id for row in named_rows(runs[0].run.directory.name)] == ["10"]
    other = Row(measured(tmp_path / "runs", 40, 1, steps(1), name=NAME.replace("0a1b", "0a1c")))
    assert (is_scaling(rows), is_scaling([*rows, other]), is_scaling(rows[:1])) == (
        True,
        False,
        False,
    )
    with refused("not-found/run", UsageError):
        named_rows("train-scaling-ffff")


def test_time_without_a_metric_has_fractions_of_seconds(tmp_path: Path) -> None:
    """The program ran 3.9 s on each number of nodes, and Slurm's whole seconds are 4 and 5."""
    rows = []
    for nodes in (1, 2):
        task = {"start_time": TIME, "end_time": TIME + 3 + nodes}
        run = measured(tmp_path, nodes, nodes, [], elapsed_s=3 + nodes, **task)
        events = [
            {"time": TIME + 0.2, "event": "start"},
            {"time": TIME + 4.1, "event": "end", "status": 0},
        ]
        (run.directory / "job.events").write_text("\n".join(map(json.dumps, events)))
        rows.append(Row(run))
    recorded = scaling_of(rows)
    assert [size.figures["time_s"] for size in sizes_of(recorded).values()] == [spread(3.9)] * 2
    assert sizes_of(recorded)[2].figures["efficiency_percent"] == spread(50)
    (tmp_path / rows[1].run.directory / "job.events").unlink()
    mixed = scaling_of(rows)
    assert sizes_of(mixed)[2].figures["time_s"] == spread(5)
    assert len(mixed.clocks) == len(recorded.clocks) + 1


def test_seconds_alone_are_the_time_of_a_step(tmp_path: Path) -> None:
    lines = [{key: line[key] for key in ("kind", "step", "seconds")} for line in steps(9, 9)]
    rows = [Row(measured(tmp_path, nodes, nodes, lines)) for nodes in (1, 2)]
    assert sizes_of(scaling_of(rows))[1].figures["step_ms"] == spread(200)


def made_sizes(
    speed_ups: Mapping[int, Spread], **figures: Mapping[int, Spread]
) -> list[ScalingRow]:
    """Sizes with these speed-ups and further figures, by number of nodes."""
    first = next(iter(speed_ups))
    return [
        ScalingRow(
            count,
            count,
            count,
            speed_up.count,
            {
                "speed_up": speed_up,
                "efficiency_percent": speed_up.times(100 * first / count),
                **{name: values[count] for name, values in figures.items() if count in values},
            },
        )
        for count, speed_up in speed_ups.items()
    ]


def verdict_of(sizes: Sequence[ScalingRow], *, weak: bool = False) -> list[str]:
    curve = ScalingCurve("", sizes)
    scaling = ScalingTable(NAME, "nodes", weak, "gflops", Goal.MAX, [curve], False, "", [])
    return [*scaling.verdict()]


def three(mean: float, deviation: float) -> Spread:
    return Spread(mean, deviation, 3)


@pytest.mark.parametrize(
    ("speed_ups", "says"),
    [
        # From 4 to 8 nodes 1.37 times the speed, of 2 times at best.
        ({1: 1.0, 2: 1.92, 4: 3.56, 8: 4.88}, "stops paying at 8 nodes: efficiency 61 %"),
        ({1: 1.0, 2: 0.9, 4: 0.8}, "stops paying at 2 nodes: efficiency 45 %"),
        ({1: 1.0, 2: 1.92, 4: 3.7}, "pays up to 4 nodes"),
        # Of the two sizes the first sentence says all.
        ({1: 1.0, 2: 1.92}, ""),
        # The later size contradicts.
        ({1: 1.0, 2: 1.1, 4: 3.9}, ""),
    ],
)
def test_scaling_verdict_names_the_size_that_stops_paying(
    speed_ups: Mapping[int, float], says: str
) -> None:
    lines = verdict_of(
        made_sizes({count: Spread(value, 0.0) for count, value in speed_ups.items()})
    )
    paying = [line for line in lines if "pay" in line]
    assert [line.startswith(says) for line in paying] == ([True] if says else [])


def test_scaling_verdict_ignores_gains_within_the_spread() -> None:
    sizes = made_sizes({1: three(1.0, 0.2), 2: three(1.55, 0.3), 4: three(3.0, 0.5)})
    assert ["can't be told" in line for line in verdict_of(sizes) if "pay" in line] == [True]


@pytest.mark.parametrize(
    ("base", "other", "word"),
    [
        (three(0.130, 0.003), three(0.187, 0.004), "different"),
        (three(0.130, 0.003), three(0.131, 0.002), "same within"),
        (three(0.130, 0.03), three(0.187, 0.03), "same within"),
        (Spread(0.130, 0.0), Spread(0.187, 0.0), "can't be judged"),
        (Spread(0.130, 0.0), Spread(0.130001, 0.0), "same in four digits"),
        (three(0.130, 0.0), three(0.130001, 0.0), "same in four digits"),
        # Repeats with the same seed have no spread.
        (three(0.130, 0.0), three(0.187, 0.0), "can't be judged"),
    ],
)
def test_verdict_on_the_loss_of_two_sizes(base: Spread, other: Spread, word: str) -> None:
    speeds = {1: Spread(1.0, 0.0, base.count), 2: Spread(1.9, 0.0, other.count)}
    lines = verdict_of(made_sizes(speeds, eval_loss={1: base, 2: other}))
    (line,) = [line for line in lines if line.startswith("eval_loss")]
    assert word in line


def test_scaling_by_tasks_has_a_column_for_each_number(tmp_path: Path) -> None:
    options = {"tasks": [1, 2, 4], "weak": False, "repeats": 1, "metric": "gflops"}
    rows = [
        Row(
            measured(
                tmp_path,
                number,
                1,
                [{"gflops": speed}],
                scaling=options,
                job={"tasks_per_node": number},
                shares_machine=True,
            )
        )
        for number, speed in ((1, 100.0), (2, 190.0), (4, 240.0))
    ]
    scaling = scaling_of(rows)
    table = scaling.table()
    cells = {row[0]: row[1:] for row in table.rows}
    assert table.head == ("", "1 task", "2 tasks", "4 tasks")
    assert (cells["nodes"], cells["ranks"]) == (["1"] * 3, ["1", "2", "4"])
    assert cells["efficiency, %"] == ["100", "95", "60"]
    (chart,) = scaling.report().sections[0].charts
    assert (chart.x, chart.series[-1].points) == ("tasks per node", [(1, 1.0), (2, 2.0), (4, 4.0)])
    # The tasks are all on one node, so the scaling is not one of nodes that share a machine.
    assert "stops paying at 4 tasks" in "".join(scaling.verdict())
    assert not any("separate machines" in line for line in scaling.verdict())


def test_chart_has_error_bars_of_repeats(runs: list[Row]) -> None:
    (chart,) = scaling_of(runs).report().sections[0].charts
    measured_line, ideal = chart.series
    assert measured_line.errors[1] == pytest.approx((1.6 - math.sqrt(0.02), 1.6 + math.sqrt(0.02)))
    assert (ideal.errors, chart.x, ideal.points) == ((), "nodes", [(1, 1.0), (2, 2.0)])


def test_rows_of_cost_energy_and_idle_gpus(tmp_path: Path) -> None:
    """Three steps of 0.2 s at 50 samples/s are 30 samples, for 60 J. Of 2 nodes for an hour, at 3
    USD.
    """
    task = {"id": "2", "state": "COMPLETED", "start_time": TIME, "end_time": TIME + 3600}
    names = ["demo-train-1", "demo-train-2"]
    tasks = [{**task, "nodes": names, "gpu_energy_j": 60.0}]
    lines = [
        *steps(50, 50, 50),
        {"kind": "evaluation", "step": 3, "time": TIME + 4, "perplexity": 7.5},
    ]
    more = {"tasks": tasks, "price_per_hour": 3.0, "cost_usd": 6.0, "start_time": TIME}
    run = measured(tmp_path, 2, 2, lines, **more)
    (run.directory / "telemetry").mkdir()
    sample = {"kind": "sample", "time": TIME + 2, "gpus": [{"util": 75, "index": 0}]}
    (run.directory / "telemetry" / f"{names[0]}.jsonl").write_text(f"{json.dumps(sample)}\n")
    rows = [Row(measured(tmp_path, 1, 1, steps(30))), Row(run)]
    figures = sizes_of(scaling_of(rows))[2].figures
    expected = {
        "samples_per_joule": 0.5,
        "node_hours": 2,
        "cost_usd": 6,
        "gpu_idle_percent": 25,
        "eval_perplexity": 7.5,
    }
    assert {name: figures[name] for name in expected} == {
        name: spread(value) for name, value in expected.items()
    }
    tasks = [{**tasks[0], "id": "3_0"}]
    swept = [
        measured(tmp_path / "sweep", 3, 2, [], tasks=tasks, price_per_hour=3.0, sweep={"keys": []}),
        measured(tmp_path / "sweep", 4, 1, []),
    ]
    assert sizes_of(scaling_of([*map(Row, swept)]))[2].figures["cost_usd"] == spread(6)


def test_figure_of_some_runs_of_a_size_is_left_out(runs: list[Row]) -> None:
    record = runs[2].run
    priced = Row(record.model_copy(update={"cost_usd": 4.0}))
    scaling = scaling_of([*runs[:2], priced, runs[3]])
    assert "cost_usd" not in sizes_of(scaling)[2].figures
    assert any("only 1 of 2 runs" in line for line in scaling.missing)


@pytest.mark.parametrize(
    ("target", "lines", "seconds", "missing"),
    [
        ("eval_accuracy=0.9", [(10, 0.5), (20, 0.9), (30, 0.95)], 20, ""),
        ("eval_accuracy>=0.95", [(10, 0.5), (20, 0.9), (30, 0.95)], 30, ""),
        ("eval_loss<=0.3", [(10, 0.5), (20, 0.2), (30, 0.95)], 20, ""),
        ("eval_accuracy=0.99", [(10, 0.5), (20, 0.9)], None, "not reached"),
        ("eval_f1=0.99", [(10, 0.5), (20, 0.9)], None, "no eval_f1"),
        ("eval_accuracy=0.9", [(None, 0.95)], None, "no time"),
    ],
)
def test_time_to_target_is_that_of_the_first_value_that_reaches_it(
    tmp_path: Path,
    target: str,
    lines: Sequence[tuple[int | None, float]],
    seconds: float | None,
    missing: str,
) -> None:
    name = "loss" if "loss" in target else "accuracy"
    written = [
        {
            "kind": "evaluation",
            "step": step,
            name: value,
            **({} if at is None else {"time": TIME + at}),
        }
        for step, (at, value) in enumerate(lines)
    ]
    options = {**SCALING, "repeats": 1, "time_to": target}
    task = {"id": "1", "state": "COMPLETED", "start_time": TIME, "end_time": TIME + 60}
    rows = [
        Row(
            measured(
                tmp_path,
                nodes,
                nodes,
                written,
                scaling=options,
                start_time=TIME,
                end_time=TIME + 60,
                tasks=[{**task, "nodes": [f"demo-train-{number}" for number in range(nodes)]}],
            )
        )
        for nodes in (1, 2)
    ]
    scaling = scaling_of(rows)
    figure = sizes_of(scaling)[2].figures.get("target_s")
    assert figure == (None if seconds is None else spread(seconds))
    assert any(missing in line for line in scaling.missing) if missing else not scaling.missing
    if seconds is not None:
        assert "time to" in "".join(row[0] for row in scaling.table().rows)
