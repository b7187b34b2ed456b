"""A fact of a run has the same text in each view."""

from __future__ import annotations

import html
from collections.abc import Sequence
from pathlib import Path

from clusterctl.runs.facts import (
    configuration,
    ending_of,
    environment,
    facts_of,
    job_facts,
    line_of,
    log_lines,
    metric_values,
    outcome,
    resource_facts,
    time_facts,
)
from clusterctl.runs.find import Row
from clusterctl.runs.page import Section
from clusterctl.runs.report import report_of
from tests.unit.runs.made import TIME, made_run


def told_run(out: Path) -> Row:
    task = {
        "id": "1",
        "state": "FAILED",
        "exit_code": 3,
        "nodes": ["n1", "n2"],
        "attempts": [{"start_time": TIME, "end_time": TIME + 5400, "nodes": ["n1", "n2"]}],
        "tres": "cpu=8,mem=8G,node=2",
        "time_limit_s": 7200,
        "time_use": {"queue": 600.0, "useful": 4800.0, "suspended": 30.0},
        "gpu_energy_j": 1234567.0,
    }
    diagnosis = {"job_id": "1", "cause": "exit code 3", "fix": "read it", "lines": ["a", "b"]}
    metrics = [
        {"step": step, "loss": loss, "eval_loss": 1.0 / (step + 1)}
        for step, loss in enumerate([2.0, 0.123456789, float("nan"), 0.5])
    ]
    run = made_run(
        out,
        args=["--lr", "0.000123456789", "words"],
        metrics=metrics,
        tasks=[task],
        nodes=["n1", "n2"],
        state="FAILED",
        cost_usd=0.012345,
        diagnosis=diagnosis,
        skipped=[{"path": "big.bin", "reason": "larger than 64 GiB"}],
        tags=["a", "b"],
        note="a note",
        elapsed_s=5400,
    )
    return Row(run)


def texts_of(sections: Sequence[Section]) -> set[str]:
    """Return the texts of all facts, lines and cells."""
    facts = [fact.text for section in sections for fact in section.facts]
    cells = [
        cell
        for section in sections
        for table in section.tables
        if not table.folded
        for row in table.rows
        for cell in row
    ]
    lines = [line for section in sections for line in (*section.lines, *section.log)]
    return {text for text in (*facts, *cells, *lines) if text}


def rows(head: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return ["  ".join(row) for row in (head, *cells)]


def test_facts_have_the_same_text_in_each_view(tmp_path: Path) -> None:
    row = told_run(tmp_path)
    sections = facts_of(
        row, job_facts, time_facts, resource_facts, configuration, environment, log_lines, outcome
    )
    texts = texts_of(sections)
    # Each value is there: given in full, measured with its unit.
    assert {
        "0.000123456789",
        "1,234,567 J",
        "1h30m",
        "0.0123 USD",
        "big.bin",
        "job 1 (train) failed: exit code 3",
        "fix: read it; the whole log: `clusterctl logs demo/1`",
    } <= texts
    terminal = "\n".join(line for section in sections for line in section.as_text(rows))
    report = report_of([row])
    page = html.unescape(
        report.as_html().replace('<span class="whole">', "").replace("</span>", "")
    )
    markdown = report.as_markdown().replace("\\", "")
    as_json = str(report.as_dict())
    for text in texts:
        assert text in terminal
        assert text in page
        assert text in markdown
        assert text in as_json or text.replace("'", "\\'") in as_json


def test_line_of_a_run_has_the_texts_of_its_facts(tmp_path: Path) -> None:
    row = told_run(tmp_path)
    line = line_of(row, Path("runs/demo-1-train"))
    (job,) = facts_of(row, job_facts)
    texts = {fact.label: fact.text for fact in job.facts}
    assert texts["state"] in line
    assert texts["cost"] in line
    assert "runs/demo-1-train" in line


def test_line_of_the_log_that_the_cause_quotes_is_told_once(tmp_path: Path) -> None:
    diagnosis = {"job_id": "1", "cause": "exit code 3; last line: no such data"}
    for at, log in enumerate((["no such data"], ["reading", "no such data"])):
        row = Row(made_run(tmp_path / str(at), diagnosis={**diagnosis, "lines": log}))
        assert [section.log for section in facts_of(row, log_lines)] == [log] * at


def test_diagnosis_of_a_run_may_lack_what_it_usually_has(tmp_path: Path) -> None:
    tasks = [{"id": f"1_{number}", "state": "FAILED"} for number in range(2)]
    diagnosis = {"job_id": "1_0", "cause": "unknown"}
    row = Row(made_run(tmp_path, tasks=tasks, state="FAILED", diagnosis=diagnosis))
    assert not any(line.startswith("fix") for line in ending_of(row).verdict)
    assert ending_of(row.tasks[1]).diagnosis is None


def test_end_of_an_array_is_that_of_the_task_with_its_state(tmp_path: Path) -> None:
    failed = {"id": "1_0", "state": "FAILED", "exit_code": 3, "reason": "NonZeroExitCode"}
    row = Row(
        made_run(
            tmp_path,
            tasks=[failed, {"id": "1_1", "state": "RUNNING"}],
            state="RUNNING",
            final=False,
        )
    )
    ending = ending_of(row)
    assert (ending.state, ending.exit_code, ending.reason) == ("RUNNING", None, "")


def test_attempts_of_an_array_of_one_task_are_those_of_the_task(tmp_path: Path) -> None:
    attempts = [{"start_time": TIME + at, "end_time": TIME + at + 5} for at in (0, 9)]
    row = Row(made_run(tmp_path, tasks=[{"id": "1_1", "state": "COMPLETED", "attempts": attempts}]))
    assert [each.start_time for each in ending_of(row).attempts] == [TIME, TIME + 9]


def test_values_that_are_no_numbers_are_told_once(tmp_path: Path) -> None:
    (metrics,) = facts_of(told_run(tmp_path), metric_values)
    assert [line.count("1 of 4") for line in metrics.lines if "NaN" in line] == [1]
    assert all("nan" not in cell for table in metrics.tables for row in table.rows for cell in row)
