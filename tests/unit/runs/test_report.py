"""Reports: what they say of a run, of several and of a sweep, also of damaged and hostile ones."""

from __future__ import annotations

import json
import math
import os
import random
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import CollectError, UsageError
from clusterctl.runs.find import Row, metric_names, ranked
from clusterctl.runs.folder import write_sums
from clusterctl.runs.page import REPORT_FILE, Report, Section, thinned, write_report
from clusterctl.runs.report import report_of, report_path, write_report_beside
from clusterctl.runs.series import history_in
from clusterctl.runs.telemetry import compare_ranks
from clusterctl.state.ledger import UNCHANGED
from clusterctl.state.run_record import RunRecord
from tests.support.messages import refused
from tests.unit.runs.made import TIME, made_run, time_use_in

TIMES = "Time of the job"
NODES = ("demo-train-1", "demo-train-2")
HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>\x1b]0;x\x07\u202e|`"


def lines(steps: int = 40, *, slow: float = 1.0, lr: float = 0.1) -> Iterator[dict[str, Any]]:
    """The metrics.jsonl of a `train` on two nodes, of which the second computes ``slow`` times as
    long.
    """
    ranks = [{"rank": rank, "host": host} for rank, host in enumerate(NODES)]
    yield {"kind": "run", "time": TIME + 5, "ranks": ranks, "config": {"lr": lr, "pp": 1}}
    for step in range(1, steps + 1):
        times = {
            "time": TIME + 5 + step / 10,
            "seconds": 0.1,
            "data_ms": 5.0,
            "comm_exposed_ms": 15.0,
        }
        loss = 2.3 * math.exp(-step * lr / 4)
        yield {"kind": "iteration", "step": step, "loss": loss, "samples_per_s": 640.0, **times}
    ranks_of = {"compute_ms": [80.0, 80.0 * slow], "slowest": [2, 38], "windows": 40}
    evaluation = {
        "kind": "evaluation",
        "step": steps,
        "epoch": 1,
        "loss": loss * 1.1,
        "accuracy": 0.9,
    }
    yield {**evaluation, "time": TIME + 9, **ranks_of}
    yield {"kind": "checkpoint", "step": steps, "stall_s": 0.4, "time": TIME + 9.5}


def trained(
    out: Path, job_id: int = 1, *, slow: float = 1.0, lr: float = 0.1, **fields: Any
) -> Row:
    """A run of `train`, with telemetry of its nodes."""
    sentences = {"nodes": NODES, "cost_usd": 1.5, "args": ["--lr", str(lr)], **fields}
    run = made_run(out, job_id, metrics=list(lines(slow=slow, lr=lr)), **sentences)
    (run.directory / "telemetry").mkdir()
    for node in NODES:
        sample = {"kind": "sample", "cpu_percent": 50, "memory_used_mib": 2048}
        gpus = [{"util": 90, "power_w": 300}]
        samples = [{**sample, "gpus": gpus, "time": TIME + second} for second in range(1, 20)]
        text = "".join(f"{json.dumps(one)}\n" for one in samples)
        (run.directory / "telemetry" / f"{node}.jsonl").write_text(text)
    return Row(run)


def replace_in(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def charts(report: Report) -> dict[str, dict[str, list[Any]]]:
    """Title of a chart -> name of a series -> its points."""
    found = (chart for section in report.sections for chart in section.charts)
    return {chart.title: {one.name: list(one.points) for one in chart.series} for chart in found}


def test_report_of_a_run_has_verdict_and_charts(tmp_path: Path) -> None:
    report = report_of([trained(tmp_path)])
    assert report.ok is True
    assert report.missing == []
    text = "\n".join(report.verdict)
    measured = ("COMPLETED after 1m on demo-train-[1-2], 1.50 USD", "2.24321 to 0.846123, in 40")
    for words in (
        *measured,
        "640 samples per second",
        "step: 110 ms, of which 72.7 %",
        "80 ms to 80 ms",
    ):
        assert words in text
    drawn = charts(report)
    assert {"loss", "eval_loss"} == drawn["loss"].keys()
    assert drawn["Computing per step"]["mean"] == [
        ("0 demo-train-1", 80.0),
        ("1 demo-train-2", 80.0),
    ]
    assert {*NODES} == drawn["GPU"].keys() == drawn["Power of GPUs"].keys() == drawn["CPU"].keys()
    spans = {name: points[0][1] for name, points in drawn[TIMES].items()}
    parts = {"useful": 3.8, "checkpoint": 0.4, "data": 0.2, "running": 0.1, "unknown": 52.5}
    assert spans == pytest.approx({"queue": 1, "start-up": 3, **parts}, abs=1e-3)


def test_report_lists_restarts_of_a_run(tmp_path: Path) -> None:
    """The first attempt reached step 30, and the second began with step 20."""
    row = trained(tmp_path)
    second = next(line for line in lines() if line.get("step") == 20)["time"]
    failure = {
        "reason": "failed",
        "kind": "SIGKILL",
        "place": "rank 1 on n2",
        "progress": [19, 30, 0],
    }
    events: list[dict[str, Any]] = [
        {"time": TIME, "event": "start", "restarts": 0},
        {"time": second - 9, "event": "end", "status": 137},
        {"time": second - 9, "event": "requeue", **failure},
        {"time": second - 0.05, "event": "start", "restarts": 1},
    ]
    (row.folder / "job.events").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    report = report_of([row])
    line = next(line for line in report.verdict if failure["place"] in line)
    assert "11 steps lost" in line
    assert "again after 9s" in line
    assert all(section.title != "Restarts" for section in report.sections)
    events += [{**event, "time": second + 1 + n} for n, event in enumerate(events[2:])]
    (row.folder / "job.events").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert len(section_of(report_of([row]), "Restarts").lines) == 2


def test_report_lists_hangs_of_a_run(tmp_path: Path) -> None:
    row = trained(tmp_path)
    hang = {"time": TIME + 90, "event": "hang", "seconds": 80, "summary": "rank 7 at loader.py:88"}
    events = [{"time": TIME, "event": "start"}, hang, {"time": TIME + 190, "event": "progress"}]
    (row.folder / "job.events").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    report = report_of([row])
    assert [f"for 3m: {hang['summary']}" in line for line in report.verdict].count(True) == 1
    assert all(section.title != "Hangs" for section in report.sections)
    events += [{**hang, "time": TIME + 300}, {"time": TIME + 400, "event": "progress"}]
    (row.folder / "job.events").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    assert len(section_of(report_of([row]), "Hangs").lines) == 2


def test_last_hang_and_alarm_are_told_beside_a_diagnosis_without_them(tmp_path: Path) -> None:
    events = [
        {"event": event, "time": TIME + 9 * at, "kind": "idle-gpus", "seconds": 5, "summary": event}
        for at, event in enumerate("start alarm alarm-over hang progress".split())
    ]
    diagnosis: dict[str, Any] = {"job_id": "1", "cause": "exit code 3"}
    row = trained(tmp_path, state="FAILED", diagnosis=diagnosis)
    (row.folder / "job.events").write_text("".join(f"{json.dumps(event)}\n" for event in events))
    (attempt,) = history_in(row.folder)
    texts = [*map(str, (*attempt.hangs, *attempt.all_alarms))]
    verdict = report_of([row]).verdict
    assert [sum(text in line for line in verdict) for text in texts] == [1, 1]
    diagnosis["remarks"] = texts
    (task,) = row.run.tasks
    record = row.run.model_copy(
        update={"tasks": (task.model_copy(update={"diagnosis": diagnosis}),)}
    )
    verdict = report_of([Row(record)]).verdict
    assert [sum(text in line for line in verdict) for text in texts] == [1, 1]


def test_report_has_the_same_facts_in_each_format(tmp_path: Path) -> None:
    report = report_of([trained(tmp_path, note="two | <b>words</b>")])
    as_json = report.as_dict()
    as_markdown = report.as_markdown()
    as_html = report.as_html()
    assert json.loads(json.dumps(as_json, allow_nan=False)) == as_json
    shown = as_html.replace('<span class="whole">', "").replace("</span>", "")
    for line in report.verdict:
        assert line in shown
        assert line in as_markdown.replace("\\", "")
    for title in charts(report):
        assert f">{title}<" in as_html
    assert "two | &lt;b&gt;words&lt;/b&gt;" in as_html
    assert r"two \| \<b\>words\</b\>" in as_markdown


@pytest.mark.parametrize("ranks", [2, 8])
def test_nodes_of_equal_speed_have_no_straggler(ranks: int) -> None:
    for seed in range(200):
        rng = random.Random(seed)  # noqa: S311
        windows = [
            [rng.lognormvariate(0, 0.3) for _ in range(ranks)] for _ in range(rng.randint(1, 30))
        ]
        means = [sum(column) / len(windows) for column in zip(*windows, strict=True)]
        slowest = [sum(max(one) == one[rank] for one in windows) for rank in range(ranks)]
        hosts = [f"n{rank * 2 // ranks}" for rank in range(ranks)]
        assert "is a straggler:" not in compare_ranks(means, slowest, len(windows), hosts)
    # Nor do few steps tell.
    assert compare_ranks([1, 3], [0, 5], 5, NODES).endswith("detect a straggler")


def test_straggler_is_named(tmp_path: Path) -> None:
    """Stages of a pipeline are none."""
    row = trained(tmp_path, slow=1.5)
    assert any(line.startswith("demo-train-2 is a straggler") for line in report_of([row]).verdict)
    replace_in(row.folder / "metrics.jsonl", '"pp": 1', '"pp": 2')
    assert "stages" in report_of([row]).verdict[-1]


@pytest.mark.parametrize(
    ("state", "fields", "sentences"),
    [
        ("FAILED", {"diagnosis": {"job_id": "1", "cause": "out of memory", "fix": "--mem", "lines": ["x"]}},
         "failed: out of memory\nfix: --mem"),
        ("CANCELLED", {"elapsed_s": None}, "CANCELLED on demo-train-[1-2]"),
        ("NODE_FAIL", {}, "NODE_FAIL after 1m on demo-train-[1-2]"),
        ("RUNNING", {"final": False, "end_time": None}, "RUNNING when it was collected"),
    ],
)  # fmt: skip
def test_runs_that_did_not_complete(
    tmp_path: Path, state: str, fields: dict[str, Any], sentences: str
) -> None:
    task = {"id": "1", "state": state, "nodes": NODES}
    report = report_of([trained(tmp_path, state=state, tasks=[task], **fields)])
    assert report.ok is (None if state in {"CANCELLED", "RUNNING"} else False)
    assert sentences in "\n".join(report.verdict)
    assert bool(report.missing) is (state == "RUNNING")


def test_submitted_files_are_not_missing(tmp_path: Path) -> None:
    sent = [{"path": f"data-{number}", "reason": UNCHANGED, "files": 1} for number in range(50)]
    assert report_of([trained(tmp_path, skipped=sent)]).missing == []
    row = trained(tmp_path, 2, skipped=[*sent, {"path": "checkpoint-1", "reason": "a checkpoint"}])
    (line,) = report_of([row]).missing
    assert line.startswith("1 ")


def test_report_names_missing_files(tmp_path: Path) -> None:
    row = trained(tmp_path)
    (row.folder / "metrics.jsonl").unlink()
    (row.folder / "telemetry" / "demo-train-2.jsonl").write_text('{"kind": "sam')
    (row.folder / "environment.json").write_text("{")
    report = report_of([row])
    shown = ("environment.json", "telemetry/demo-train-2.jsonl, t", "demo-train-2", "metrics.jsonl")
    assert [name in line for name, line in zip(shown, report.missing, strict=True)] == [True] * 4
    assert report.ok is True


def hostile(out: Path) -> RunRecord:
    """A run with all that a job, or somebody who sends a run, could write into its files."""
    rows = [
        '{"kind": "run", "ranks": 3, "config": [], "time": 1e308}',
        "[" * 100_000,
        "x" * (10 << 20),
    ]
    for n, one in enumerate(
        ["NaN", "Infinity", "-Infinity", "1e400", "null", '"x"', "[1]", str(10**400)]
    ):
        rows.append(f'{{"kind": "iteration", "step": {n}, "loss": {one}, "seconds": {one}}}')
        rows.append(
            f'{{"kind": "evaluation", "windows": {one}, "compute_ms": [1, {one}], "slowest": [1, '
            f"2]}}"
        )
    rows += [json.dumps({"step": 1, HOSTILE: 3.0, "y" * 5000: 1}), '{"step": 2, "loss": 1']
    run = made_run(
        out,
        name="x",
        nodes=[HOSTILE, "../../etc", "\0"],
        note=HOSTILE,
        args=["--x", HOSTILE],
        diagnosis={"cause": HOSTILE, "lines": [HOSTILE]},
        state="STRANGE",
    )
    (run.directory / "metrics.jsonl").write_text("\n".join(rows))
    environment = {"client": {"git": {"commit": HOSTILE}}, "hosts": 3}
    (run.directory / "environment.json").write_text(json.dumps(environment))
    return run


def test_report_of_a_hostile_run_is_escaped(tmp_path: Path) -> None:
    report = report_of([Row(hostile(tmp_path))])
    page = report.as_html()
    assert page.count("<script") == 3  # the data and our two
    assert "<img" not in page
    assert not {"\x1b", "\x07", "\u202e", "\0"} & {*page, *report.as_markdown()}
    json.dumps(report.as_dict(), allow_nan=False)
    assert len(page) < 1 << 20


@pytest.mark.parametrize(
    "fields",
    [
        {"sweep": {"keys": 3}},
        {"sweep": {"keys": [["a"]]}},
        {"sweep": {"metric": 3}},
        {"end_time": 10**400},
    ],
)
def test_damaged_record_is_refused_as_such(tmp_path: Path, fields: dict[str, Any]) -> None:
    run = made_run(tmp_path)
    record = json.loads((run.directory / "run.json").read_text())
    (run.directory / "run.json").write_text(json.dumps({**record, **fields}))
    with refused("record-damaged/run", CollectError):
        RunRecord.load(run.directory)


def test_numbers_near_the_largest(tmp_path: Path) -> None:
    row = trained(tmp_path)
    replace_in(row.folder / "metrics.jsonl", '"data_ms": 5.0', '"data_ms": 1e308')
    node = row.folder / "telemetry" / "demo-train-1.jsonl"
    replace_in(node, '"util": 90, "power_w": 300', '"util": 1e308, "power_w": 1e308')
    assert report_of([row]).as_html()


def test_runs_in_comparison(tmp_path: Path) -> None:
    twins = report_of([trained(tmp_path / "twins", number) for number in (1, 2)]).verdict
    assert twins[0].endswith("the same")
    assert twins[1].endswith("identical over 40 steps")
    assert len(twins) == 2
    first = trained(tmp_path)
    second = trained(tmp_path, 2, lr=0.2)
    report = report_of([first, second])
    assert report.verdict[0].endswith("differ in lr")
    (differs,) = (one for one in report.sections if one.title == "Differs: configuration")
    assert differs.tables[0].rows == [("lr", "0.1", "0.2")]
    assert charts(report)["loss (markers: eval_loss)"].keys() == {
        f"{row.shown} {name}" for row in (first, second) for name in ("loss", "eval_loss")
    }


def swept(out: Path, count: int) -> Row:
    """A sweep whose tasks have the losses 1, 1/2, ...; of which the last failed."""
    tasks = [
        {"id": f"7_{n}", "state": "COMPLETED" if n < count - 1 else "FAILED",
         "nodes": NODES[:1], "config": {"lr": n / 8},
         "metrics": {"loss": {"last": 1 / (n + 1), "min": 1 / (n + 1), "max": 1.0, "count": 2}}}
        for n in range(count)
    ]  # fmt: skip
    run = made_run(out, 7, tasks=tasks, sweep={"keys": ["lr"], "metric": "loss", "goal": "min"})
    for task in run.tasks:
        folder = run.directory / task.folder
        folder.mkdir()
        (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(one)}\n" for one in lines(300)))
    return Row(run)


def test_report_of_a_sweep_of_200_ranks_all_tasks(tmp_path: Path) -> None:
    report = report_of([swept(tmp_path, 200)])
    assert "best: task 198, lr=24.75: loss 0.00502513 (lower is better)" in report.verdict
    assert any("199 of 200" in line for line in report.verdict)
    ranking = report.sections[0].tables[0]
    # The task with the lowest loss failed.
    assert [row[0] for row in (*ranking.rows[:2], ranking.rows[-1])] == ["198", "197", "199"]
    assert len(charts(report)["loss by lr"]["loss"]) == 199
    assert charts(report)["loss by lr"]["did not complete"] == [(24.875, 0.005)]
    assert len(charts(report)["loss"]) == 16
    assert len(report.as_html()) < 5 << 20


@pytest.mark.parametrize(
    "state", ["FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "RUNNING", "NODE_FAIL"]
)
def test_sweep_without_completed_task_has_no_best(tmp_path: Path, state: str) -> None:
    row = swept(tmp_path, 3)
    tasks = tuple(task.model_copy(update={"state": state}) for task in row.run.tasks)
    (row.folder / "run.json").write_text(row.run.model_copy(update={"tasks": tasks}).as_json())
    row = Row(RunRecord.load(row.folder))
    assert ranked(row).best is None
    for report in (report_of([row]), report_of([row, trained(tmp_path)])):
        assert not any("best: " in line or "its best" in line for line in report.verdict)


def test_sweep_ranked_by_metric_with_the_name_of_a_field_has_a_report(tmp_path: Path) -> None:
    row = swept(tmp_path, 3)
    tasks = tuple(
        task.model_copy(update={"metrics": {"cost": task.metrics["loss"]}})
        for task in row.run.tasks
    )
    sweep = {"keys": ["lr"], "metric": "cost", "goal": "min"}
    (row.folder / "run.json").write_text(
        row.run.model_copy(update={"tasks": tasks, "sweep": sweep}).as_json()
    )
    report = report_of([Row(RunRecord.load(row.folder))])
    assert any(
        line.startswith("best: task 1, lr=0.125: ") and "0.5" in line for line in report.verdict
    )


def section_of(report: Report, title: str) -> Section:
    (section,) = [section for section in report.sections if section.title == title]
    return section


def test_comparison_repeats_values_that_are_the_same(tmp_path: Path) -> None:
    rows = [trained(tmp_path, number, lr=lr) for number, lr in ((1, 0.1), (2, 0.2), (3, 0.1))]
    (table,) = section_of(report_of(rows), "Differs: configuration").tables
    assert table.rows == [("lr", "0.1", "0.2", "0.1")]


def test_comparison_names_each_difference_once(tmp_path: Path) -> None:
    """The number of nodes and their hardware have the same name."""
    rows = [
        Row(
            made_run(
                tmp_path, number, job={"nodes": number}, hosts={"a": {"cpu_model": str(number)}}
            )
        )
        for number in (1, 2)
    ]
    assert report_of(rows).verdict[0].count("nodes") == 1


def test_sweep_is_compared_by_its_best_task(tmp_path: Path) -> None:
    """The figures and the differences are those of this task, and have its name."""
    report = report_of([trained(tmp_path), swept(tmp_path, 30)])
    best = "demo-7-train/task-28"
    assert [row[0] for row in section_of(report, "Results").tables[0].rows] == [
        "demo-1-train",
        best,
    ]
    (table,) = section_of(report, "Differs: configuration").tables
    assert (table.head, table.rows) == (
        ("configuration", "demo-1-train", best),
        [("lr", "0.1", "3.5"), ("pp", "1", "-")],
    )
    assert ["task 28, lr=3.5, by loss, lower is better" in line for line in report.verdict] == [
        False,
        False,
        True,
    ]
    grids = [swept(tmp_path / name, 3) for name in ("a", "b")]
    replace_in(grids[1].folder / "environment.json", '"job": {', '"job": {"array": "0-2", ')
    twins = [trained(tmp_path / "twins", number) for number in (1, 2)]
    # Of these not only the compared tasks are the same.
    assert report_of(grids).verdict[0] != report_of(twins).verdict[0]


def test_settings_left_at_defaults_are_folded_in_the_report(tmp_path: Path) -> None:
    """Markdown has the number of defaults. A program that does not tell its defaults has none."""
    config = {"lr": 0.1, "seed": 7, **{f"default{n}": n for n in range(40)}}
    line: dict[str, Any] = {"kind": "run", "config": config, "given": ["lr", "seed"]}
    more: dict[str, Any] = {"args": ["--lr", "0.2", "--default3", "3"], "note": "first"}
    row = Row(made_run(tmp_path, 1, metrics=[line], **more))
    report = report_of([row])
    own, defaults = section_of(report, "Configuration").tables
    assert [key for key, _ in own.rows] == ["lr", "default3", "seed", "note"]
    assert (own.folded, defaults.folded, len(defaults.rows)) == (False, True, 39)
    assert "| default5 |" not in report.as_markdown()
    assert report.as_html().count("<details>") == 1
    words = Row(made_run(tmp_path, 4, metrics=[line], args=["--lr", "0.2", "digits"]))
    assert (
        dict(section_of(report_of([words]), "Configuration").tables[0].rows)["arguments"]
        == "--lr 0.2 digits"
    )
    line.pop("given")
    (table,) = section_of(
        report_of([Row(made_run(tmp_path, 2, metrics=[line]))]), "Configuration"
    ).tables
    assert (table.folded, len(table.rows)) == (False, 42)
    other = Row(made_run(tmp_path, 3, args=["--width", "5"]))
    own, defaults = section_of(report_of([row, other]), "Differs: configuration").tables
    assert [key for key, *_ in own.rows] == ["lr", "default3", "seed", "width"]
    assert (defaults.folded, len(defaults.rows)) == (True, 39)


def test_failed_tasks_are_named_with_the_command_for_them(tmp_path: Path) -> None:
    diagnosis = {
        "job_id": "7_4",
        "state": "FAILED",
        "cause": "out of memory",
        "fix": "--mem",
        "lines": [],
    }
    row = swept(tmp_path, 5)
    tasks = [task.model_copy(update={"state": state}) for task, state in zip(
        row.run.tasks, ("COMPLETED", "FAILED", "TIMEOUT", "COMPLETED", "FAILED"), strict=True
    )]  # fmt: skip
    tasks[4] = tasks[4].model_copy(update={"diagnosis": diagnosis})
    run = row.run.model_copy(update={"tasks": tuple(tasks), "state": "FAILED"})
    (row.folder / "run.json").write_text(run.as_json())
    verdict = report_of([Row(run)]).verdict
    assert {"7_1 FAILED", "7_2 TIMEOUT"} <= {*verdict}
    assert "7_4 FAILED: out of memory" in verdict
    assert ["replay" in line for line in verdict].count(True) == 1
    running = run.model_copy(update={"final": False})
    (row.folder / "run.json").write_text(running.as_json())
    assert not any("replay" in line for line in report_of([Row(running)]).verdict)


def test_results_have_units_and_right_sums_are_a_sentence(tmp_path: Path) -> None:
    """A wrong sum is a column."""
    sums = {
        "kind": "allreduce",
        "ok": True,
        "comm": "mpi",
        "bytes": 4096,
        "ms": 33.317011,
        "wrong": [0, 0],
    }
    sums |= {"bus_gb_per_s": 0.0012}
    products = {
        "kind": "gemm",
        "ok": False,
        "gflops": [11.268, 8.786],
        "wrong_rows": [0, 3],
        "mfu": 0.4567,
    }
    rows = [Row(made_run(tmp_path, number)) for number in (1, 2)]
    for row, line in zip(rows, (sums, products), strict=True):
        (row.folder / f"{line['kind']}.jsonl").write_text(json.dumps(line))
    right, wrong = (section_of(report_of([row]), "Results") for row in rows)
    assert (right.tables[0].head, right.tables[0].rows) == (
        ["comm", "bytes", "ms", "bus_gb_per_s"],
        [["mpi", "4 KiB", "33.317 ms", "0.0012 GB/s"]],
    )
    assert (len(right.lines), len(wrong.lines)) == (1, 0)
    assert wrong.tables[0].rows == [["false", "11.268 GFLOP/s, 8.786 GFLOP/s", "0, 3", "0.4567"]]


def results_of(out: Path, *lines: Any) -> Section:
    row = Row(made_run(out))
    (row.folder / "gemm.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    return section_of(report_of([row]), "Results")


RIGHT = {"kind": "gemm", "ok": True, "m": 1}


@pytest.mark.parametrize(
    "lines",
    [
        [{**RIGHT, "ok": False}, *[RIGHT] * 64],
        [RIGHT, {**RIGHT, "kind": "allreduce", "ok": False}],
        [RIGHT, {"kind": "gemm", "m": 1}],
        [RIGHT, {**RIGHT, "ok": [True]}],
        [RIGHT, {**RIGHT, "ok": {}}],
    ],
)
def test_results_are_right_only_if_all_are(tmp_path: Path, lines: Sequence[Any]) -> None:
    """Lines that are not shown and lines of other kinds count too."""
    found = {"kind": "found", "lr": 0.1}
    assert len(results_of(tmp_path / "right", RIGHT, found).lines) == 1
    assert results_of(tmp_path / "without", found).lines == []
    results = results_of(tmp_path, *lines)
    assert results.lines == []
    assert all("ok" in table.head for table in results.tables)


def test_results_of_many_kinds_and_with_deep_lists(tmp_path: Path) -> None:
    kinds = [{"kind": f"kind{number}", "m": 1} for number in range(5)]
    assert [table.title for table in results_of(tmp_path / "kinds", *kinds).tables] == [
        f"kind{number}" for number in (4, 3, 2, 1, 0)
    ]
    row = Row(made_run(tmp_path))
    # The deepest of these can't be read.
    deep = [f'{{"kind": "gemm", "m": {"[" * depth}{"]" * depth}}}\n' for depth in range(1, 1100)]
    (row.folder / "gemm.jsonl").write_text("".join(deep))
    (table,) = section_of(report_of([row]), "Results").tables
    assert {text.strip("[]") for (text,) in table.rows} == {""}
    assert len(table.rows) == 64


def test_large_numbers_durations_and_sizes_are_readable(tmp_path: Path) -> None:
    lines = [{"step": step, "tokens_per_s": 102_211.0, "time": TIME + step} for step in (3, 5)]
    task = {
        "id": "1",
        "state": "COMPLETED",
        "nodes": NODES[:1],
        "start_time": TIME,
        "end_time": TIME + 124,
    }
    more: dict[str, Any] = {"tasks": [task], "start_time": TIME + 64, "submit_time": TIME + 1}
    report = report_of([Row(made_run(tmp_path, 1, metrics=lines, **more))])
    assert ["tokens" in line for line in report.verdict].count(True) == 1
    assert any("102,211 tokens" in line for line in report.verdict)
    assert section_of(report, "Time").tables[0].rows[-1] == ("all", "2m3s", "100 %")
    rows = [trained(tmp_path / "both", number) for number in (1, 2)]
    for row in rows:
        replace_in(row.folder / "telemetry" / "demo-train-1.jsonl", "2048", "300")
        replace_in(row.folder / "telemetry" / "demo-train-2.jsonl", "2048", "94")
    use = section_of(report_of(rows), "Results").tables[1]
    assert dict(zip(use.head, use.rows[0], strict=True))["Memory (highest)"] == "300 MiB"


def test_comparison_lists_values_that_could_not_be_compared(tmp_path: Path) -> None:
    rows = [trained(tmp_path, number, lr=lr) for number, lr in ((1, 0.1), (2, 0.2), (3, 0.3))]
    (rows[2].folder / "environment.json").write_text("{")
    report = report_of(rows)
    (differs,) = (one for one in report.sections if one.title == "Differs: configuration")
    assert differs.tables[0].head == ("configuration", "demo-1-train", "demo-2-train")
    assert differs.tables[0].rows == [("lr", "0.1", "0.2")]
    assert "demo-1-train and demo-3-train" in report.missing[0]
    assert report_of(rows[1:]).verdict[0].endswith("can't be read")


def test_runs_of_one_name_are_titled_by_their_folders(tmp_path: Path) -> None:
    rows = [trained(tmp_path / name) for name in ("a", "b")]
    assert set(charts(report_of(rows))["eval_accuracy"]) == {str(row.folder) for row in rows}


def test_sweep_whose_own_metric_is_absent_is_ranked_by_another(tmp_path: Path) -> None:
    row = swept(tmp_path, 3)
    run = row.run.model_copy(update={"sweep": {"keys": ["lr"], "metric": "val_auc"}})
    report = report_of([Row(run)])
    assert "the sweep's own ranking: no run has a value for 'val_auc'" in report.missing
    assert "best: task 1, lr=0.125: loss 0.5 (lower is better)" in report.verdict


def test_failed_tasks_that_ran_again_count_as_they_ended_then(tmp_path: Path) -> None:
    row = swept(tmp_path, 3)
    loss = {"last": 0.1, "count": 1}
    again = {"id": "8_2", "state": "COMPLETED", "nodes": NODES[:1], "metrics": {"loss": loss}}
    made_run(
        tmp_path, 8, tasks=[again], replay_of=row.run.token, of_failed=True, submit_time=TIME + 500
    )
    report = report_of([row])
    assert report.ok is True
    assert any("3 of 3" in line for line in report.verdict)
    assert any("job 8" in line for line in report.verdict)


def test_tasks_that_run_again_are_not_to_be_repeated(tmp_path: Path) -> None:
    row = swept(tmp_path, 3)
    ended = row.run.model_copy(update={"state": "FAILED"})
    assert ["replay" in line for line in report_of([Row(ended)]).verdict].count(True) == 1
    again = {"id": "8_2", "state": "RUNNING", "nodes": NODES[:1]}
    repeats: dict[str, Any] = {
        "replay_of": row.run.token,
        "of_failed": True,
        "submit_time": TIME + 500,
    }
    made_run(tmp_path, 8, tasks=[again], state="RUNNING", final=False, **repeats)
    verdict = report_of([Row(ended)]).verdict
    assert "8_2 RUNNING" in verdict
    assert not any("replay" in line for line in verdict)


def test_tasks_of_any_id_have_a_report(tmp_path: Path) -> None:
    """They are in the order of their numbers."""
    ids = ("7_10", "7_x", "7_[1-3]", "7_9", "7")
    tasks = [{"id": each, "state": "FAILED", "nodes": NODES[:1]} for each in ids]
    verdict = report_of([Row(made_run(tmp_path, 7, tasks=tasks))]).verdict
    assert "7, 7_9, 7_x, 7_10, 7_[1-3] FAILED" in verdict


def test_times_of_another_clock_are_left_out(tmp_path: Path) -> None:
    row = trained(tmp_path)
    path = row.folder / "metrics.jsonl"
    path.write_text(
        "".join(f'{{"step": {step}, "loss": 1, "time": {step}}}\n' for step in range(9))
    )
    assert time_use_in(row.run, row.run.tasks[0]).keys() == {"queue", "unknown"}


def test_bundled_jobs_that_measure_have_tables_of_results(tmp_path: Path) -> None:
    """Their files are their metrics: nothing is missing. Of many lines the last are shown."""
    row = Row(made_run(tmp_path, 7))
    sizes = [
        {"kind": "micro_batch", "time": TIME, "size": 1 << n, "samples_per_s": n / 3}
        for n in range(70)
    ]
    found = {"kind": "found", "time": TIME, "lr": 0.1}
    hostile: list[Any] = [
        {"kind": ["x"], "a\n\x1b[2J": "b" * 10**5},
        [],
        {},
        {"kind": "found", "ranks": [0, 1]},
    ]
    text = "".join(json.dumps(line) + "\n" for line in [*sizes, found, *hostile])
    (row.folder / "find.jsonl").write_text(text + '{"half')
    report = report_of([row])
    assert not any(line.startswith("metrics:") for line in report.missing)
    (results,) = [section for section in report.sections if section.title == "Results"]
    # The result is before the trials.
    *_, best, by_size = results.tables
    assert (by_size.title, by_size.head, len(by_size.rows)) == (
        "micro batch",
        ["size", "samples_per_s"],
        64,
    )
    assert by_size.rows[-1] == [str(1 << 69), "23 samples/s"]
    assert (best.head, best.rows) == (["lr", "ranks"], [["0.1", "-"], ["-", "0, 1"]])
    shown = [
        cell for table in results.tables for cells in (table.head, *table.rows) for cell in cells
    ]
    assert max(map(len, shown)) < 300
    assert all(cell.isprintable() for cell in shown)


def test_verdict_has_each_figure_once(tmp_path: Path) -> None:
    """Both ends are the extremes. The log has only the line of the cause. The cost is below a
    cent.
    """
    lines = [{"step": n, "grad_norm": float(n)} for n in (1, 2, 3)]
    diagnosis = {
        "job_id": "1",
        "cause": "out of memory",
        "fix": "--mem",
        "lines": ["error: out of memory"],
    }
    task = {"id": "1", "state": "FAILED", "nodes": NODES[:1]}
    more: dict[str, Any] = {
        "tasks": [task],
        "state": "FAILED",
        "diagnosis": diagnosis,
        "cost_usd": 0.0068,
    }
    report = report_of([Row(made_run(tmp_path, metrics=lines, **more))])
    (sentences,) = [line for line in report.verdict if "grad_norm" in line]
    assert "between" not in sentences
    assert "0.0068 USD" in report.verdict[0]
    assert all(section.title != "From the log" for section in report.sections)


def test_usual_metrics_come_first_also_with_a_slash(tmp_path: Path) -> None:
    lines = [
        {"step": n, "train/lr": 0.5 / n, "val/loss": 1 / n, "val/accuracy": 1 - 1 / n}
        for n in (1, 2, 4)
    ]
    row = Row(made_run(tmp_path, metrics=[{**line, "same": 3} for line in lines]))
    assert list(metric_names([row])) == ["val/loss", "val/accuracy", "train/lr", "same"]
    sentences = [line for line in report_of([row]).verdict if " went from " in line]
    assert [line.split()[0] for line in sentences] == ["val/loss", "val/accuracy"]


def test_report_of_an_array_without_metrics_says_so(tmp_path: Path) -> None:
    tasks = [{"id": f"7_{n}", "state": "COMPLETED", "nodes": NODES[:1]} for n in range(3)]
    report = report_of([Row(made_run(tmp_path, 7, tasks=tasks))])
    assert any(line.startswith("metrics:") for line in report.missing)
    assert any("3 of 3" in line for line in report.verdict)


def test_tasks_that_a_chart_of_a_parameter_omits_are_named(tmp_path: Path) -> None:
    row = swept(tmp_path, 5)
    tasks = [
        task.model_copy(update={"metrics": {}}) if n in {1, 3} else task
        for n, task in enumerate(row.run.tasks)
    ]
    (row.folder / "run.json").write_text(
        row.run.model_copy(update={"tasks": tuple(tasks)}).as_json()
    )
    report = report_of([Row(RunRecord.load(row.folder))])
    assert re.findall(r"\d+", report.missing[-1]) == ["1", "3"]
    assert len(charts(report)["loss by lr"]["loss"]) == 2


def test_file_that_is_not_a_report_is_kept(tmp_path: Path) -> None:
    row = trained(tmp_path)
    own = row.folder / REPORT_FILE
    own.write_text("the user's own")
    write_report_beside(row.run)
    with refused("exists/report", UsageError):
        write_report(report_of([row]), own)
    assert own.read_text() == "the user's own"
    own.unlink()
    victim = tmp_path / "victim"
    victim.write_text("victim")
    for name in (REPORT_FILE, f".{REPORT_FILE}.incomplete"):
        (row.folder / name).symlink_to(victim)
    with refused("exists/report", UsageError):
        write_report(report_of([row]), own)
    own.unlink()
    write_report(report_of([row]), own)
    assert victim.read_text() == "victim"
    own.unlink()
    os.mkfifo(own)
    with refused("exists/report", UsageError):  # at once
        write_report(report_of([row]), own)


def test_report_that_the_job_wrote_is_the_jobs(tmp_path: Path) -> None:
    row = trained(tmp_path)
    planted = '<meta name="generator" content="clusterctl"> planted'
    (row.folder / REPORT_FILE).write_text(planted)
    write_sums(row.folder, {})
    write_report_beside(row.run)
    assert (row.folder / REPORT_FILE).read_text() == planted
    with refused("exists/job-file", UsageError):
        report_path(row)


def test_report_follows_the_record(tmp_path: Path) -> None:
    """A snapshot's report is replaced when the run has come home whole; that of a run at home
    stays.
    """
    row = trained(tmp_path, state="RUNNING", final=False)
    path = row.folder / REPORT_FILE
    write_report_beside(row.run)
    assert "RUNNING when" in path.read_text()
    os.utime(path, ns=(1, 1))  # it is older than the record
    ended = row.run.model_copy(update={"state": "COMPLETED", "final": True})
    write_report_beside(ended)
    first = path.stat().st_ino
    assert "RUNNING" not in path.read_text()
    write_report_beside(ended)
    assert path.stat().st_ino == first


def test_report_that_fails_does_not_stop_collect(tmp_path: Path) -> None:
    """The tasks of the run are no list, as a mistake in the code could leave them."""
    run = made_run(tmp_path).model_copy(update={"tasks": 7})
    with pytest.raises(TypeError):
        report_of([Row(run)])
    write_report_beside(run)
    assert not (run.directory / REPORT_FILE).exists()


def test_thinned_points_keep_the_extremes_and_the_gaps() -> None:
    points = [(float(x), float(x % 7)) for x in range(10_000)]
    points[5000], points[7000] = (5000.0, 1e6), (7000.0, math.nan)
    thin = thinned(points)
    assert len(thin) <= 600
    assert (5000.0, 1e6) in thin
    assert (7000.0, None) in thin
    assert thin == sorted(thin, key=lambda one: one[0])
