"""`clusterctl runs`: what it prints, in text and in JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.messages import codes, shows
from tests.support.verbs import Clusterctl
from tests.unit.runs.made import made_run

SPEC = "version: 1\nname: demo\nprovider: {type: local}\npartitions: [{name: a, nodes: 1}]\n"


@pytest.fixture
def cli_with_runs(cli: Clusterctl) -> Clusterctl:
    for number, lr in enumerate(("0.1", "0.01"), 1):
        lines = [{"kind": "iteration", "step": step, "loss": 1 / step} for step in (1, number + 1)]
        made_run(
            cli.cwd / "runs", number, args=["--lr", lr], metrics=lines, tags=["base"], cost_usd=0.5
        )
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    return cli


def test_runs_alone_lists_the_newest_first(cli_with_runs: Clusterctl) -> None:
    head, first, second = cli_with_runs("runs").stdout.splitlines()
    assert head.split() == ["RUN", "STATE", "SUBMITTED", "ELAPSED", "NODES", "LOSS"]
    assert first.split() == [
        "demo-2-train",
        "COMPLETED",
        *first.split()[2:4],
        "1m",
        "1",
        "0.333333",
    ]
    assert second.startswith("demo-1-train")


def test_columns_order_and_limit(cli_with_runs: Clusterctl) -> None:
    result = cli_with_runs(
        "runs", "--columns", "lr,loss.max,cost,note", "--sort", "lr", "--limit", "1"
    )
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["RUN", "LR", "LOSS.MAX", "COST", "NOTE"],
        ["demo-2-train", "0.01", "1", "0.50", "USD", "-"],
    ]
    assert "1 more: --limit 2" in result.stderr
    assert (
        cli_with_runs("runs", "list", "--reverse", "--tag", "base")
        .stdout.splitlines()[1]
        .startswith("demo-1-train")
    )
    assert shows(cli_with_runs("runs", "--tag", "none").stdout, "no-run-matches")


def test_runs_in_json_have_all_fields(cli_with_runs: Clusterctl) -> None:
    answer = json.loads(cli_with_runs("runs", "-o", "json", "--where", "lr<0.05").stdout)
    (run,) = answer["runs"]
    assert (answer["ok"], answer["total"], run["job"], run["tags"]) == (True, 1, "2", ["base"])
    assert run["config"] == {"lr": 0.01}
    assert run["metrics"]["loss"]["min_step"] == 3
    assert Path(run["dir"]) == cli_with_runs.cwd / "runs" / "demo-2-train"


def test_ledger_has_the_time_of_each_run_and_the_sum(cli_with_runs: Clusterctl) -> None:
    """Their records have no events, so nothing tells what the programs did on the nodes."""
    head, *rows = cli_with_runs("runs", "--ledger").stdout.splitlines()
    assert head.split() == ["RUN", "TIME", "QUEUE", "%", "UNKNOWN", "%"]
    assert [row.split() for row in rows] == [
        ["demo-2-train", "1m1s", "1.6", "98.4"],
        ["demo-1-train", "1m1s", "1.6", "98.4"],
        ["sum", "2m2s", "1.6", "98.4"],
    ]
    answer = json.loads(cli_with_runs("runs", "--ledger", "-o", "json").stdout)
    assert answer["sum"] == {"queue": 2, "unknown": 120}
    assert answer["runs"][0]["seconds"] == {"queue": 1, "unknown": 60}
    for more in (("--columns", "lr"), ("--sweep", "1", "--sort", "lr")):
        refused = cli_with_runs("runs", "--ledger", *more, "-o", "json", rc=2)
        assert codes(refused) == ["options-exclusive"]


def test_runs_show_prints_arguments_and_metrics(cli_with_runs: Clusterctl) -> None:
    text = cli_with_runs("runs", "show", "2").stdout
    lines = [line.split() for line in text.splitlines()]
    assert ["lr", "0.01"] in lines
    assert [line for line in lines if line[:1] == ["loss"] and "at" in line] == [
        ["loss", "0.333333", "at", "3", "0.333333", "at", "3", "1", "at", "1"]
    ]
    assert json.loads(cli_with_runs("runs", "show", "demo-2-train", "-o", "json").stdout)["run"][
        "args"
    ] == [
        "--lr",
        "0.01",
    ]


def test_runs_diff_of_two_runs(cli_with_runs: Clusterctl) -> None:
    assert [
        line.split() for line in cli_with_runs("runs", "diff", "1", "2").stdout.splitlines()
    ] == [
        ["CONFIGURATION", "demo-1-train", "demo-2-train"],
        ["lr", "0.1", "0.01"],
        [],
        ["RESULT", "demo-1-train", "demo-2-train"],
        ["loss", "0.5", "0.333333"],
        [],
        "losses: identical over 1 step of 2 and 2".split(),
    ]
    assert cli_with_runs("runs", "diff", "1", "1").stdout.startswith("no differences\n\nlosses: ")
    same = cli_with_runs("runs", "diff", "1", "1", "-o", "json").json
    assert (same["differences"], same["losses"]["identical"], same["losses"]["steps"]) == (
        [],
        True,
        2,
    )
    found = json.loads(cli_with_runs("runs", "diff", "1", "2", "-o", "json").stdout)["differences"]
    assert found[0] == {"section": "configuration", "key": "lr", "a": 0.1, "b": 0.01}


def test_runs_remove_asks_first(cli_with_runs: Clusterctl) -> None:
    folder = cli_with_runs.cwd / "runs" / "demo-1-train"
    assert "pass --yes" in cli_with_runs("runs", "rm", "1", rc=2).stderr
    assert folder.is_dir()
    cli_with_runs("runs", "rm", "1", "demo-1-train", "--yes")
    assert not folder.exists()
    assert cli_with_runs("runs", "list").stdout.count("demo-") == 1


def test_runs_show_prints_the_diagnosis_and_that_the_job_ran_on(cli_with_runs: Clusterctl) -> None:
    output = {"job_id": "3", "cause": "out of memory", "lines": ["killed"], "fix": "say --mem"}
    out = cli_with_runs.cwd / "runs"
    task = {"id": "3", "state": "OUT_OF_MEMORY", "signal": 9, "nodes": ["demo-train-1"]}
    made_run(out, 3, state="OUT_OF_MEMORY", diagnosis=output, tasks=[task])
    made_run(out, 4, state="RUNNING", final=False)
    text = cli_with_runs("runs", "show", "3").stdout
    lines = text.splitlines()
    assert ["exit", "SIGKILL"] in [line.split() for line in lines]
    assert lines.index("| killed") < lines.index(
        "OUT_OF_MEMORY after 1m on demo-train-1 (exit SIGKILL)"
    )
    assert f"failed: {output['cause']}\nfix: {output['fix']}" in text
    assert "RUNNING when it" in cli_with_runs("runs", "show", "4").stdout
    assert (
        cli_with_runs("runs", "--where", "exit=0", "--columns", "state").stdout.count("COMPLETED")
        == 2
    )


def test_runs_whose_metric_became_nan_or_infinite_are_found(cli_with_runs: Clusterctl) -> None:
    out = cli_with_runs.cwd / "nan"
    values = {21: float("nan"), 22: float("inf"), 23: float("-inf"), 24: 0.5, 25: 7.0}
    for job_id, value in values.items():
        made_run(
            out, job_id, metrics=[{"epoch": 1, "val_loss": 9.0}, {"epoch": 2, "val_loss": value}]
        )
    listed = {
        "val_loss=nan": {21},
        "val_loss==NaN": {21},
        "val_loss!=nan": {22, 23, 24, 25},
        "val_loss=inf": {22},
        "val_loss>1": {22, 25},
        "val_loss<=0.5": {23, 24},
        "val_loss~inf": {22, 23},
        "metric.val_loss=-inf": {23},
        "val_loss.max=nan": set(),
    }
    for condition, expected in listed.items():
        rows = json.loads(
            cli_with_runs("-o", "json", "runs", "--dir", "nan", "--where", condition).stdout
        )["runs"]
        assert {int(row["job"]) for row in rows} == expected, condition
    shown = cli_with_runs("runs", "--dir", "nan", "--columns", "val_loss").stdout.split()
    assert [shown.count(word) for word in ("nan", "inf", "-inf")] == [1, 1, 1]
    table = cli_with_runs("runs", "show", "nan/demo-22-train").stdout
    assert "inf at epoch 2" in table
    assert "9 at epoch 1" in table


def test_sweep_by_its_metric(cli_with_runs: Clusterctl) -> None:
    diverged = {"last": None, "nonfinite": 1, "last_nonfinite": "nan"}
    values = ((0.1, {"last": 2.0}), (0.01, {"last": 1.0}), (1, diverged))
    tasks = [
        {
            "id": f"7_{n}",
            "state": "COMPLETED",
            "config": {"lr": lr},
            "metrics": {"eval_loss": loss},
        }
        for n, (lr, loss) in enumerate(values)
    ]
    sweep = {"version": 1, "metric": "eval_loss", "goal": "min", "keys": ["lr"]}
    made_run(cli_with_runs.cwd / "runs", 7, tasks=tasks, sweep=sweep)
    assert [line.split() for line in cli_with_runs("runs", "--sweep", "7").stdout.splitlines()] == [
        ["JOB", "LR", "EVAL_LOSS", "STATE"],
        ["7_1", "0.01", "1", "COMPLETED"],
        ["7_0", "0.1", "2", "COMPLETED"],
        ["7_2", "1", "nan", "COMPLETED"],
        [],
        ["best:", "7_1", "lr=0.01:", "eval_loss", "1", "(lower", "is", "better)"],
    ]
    for words, order in (
        ("", "102"),
        ("--sort eval_loss", "102"),
        ("-r", "012"),
        ("--sort lr -r", "201"),
    ):
        rows = json.loads(
            cli_with_runs("runs", "--sweep", "7", *words.split(), "-o", "json").stdout
        )["runs"]
        assert [row["job"] for row in rows] == [f"7_{number}" for number in order]
    for words in (("--sort", "eval_loss"), ("--where", "eval_loss<9"), ("--columns", "eval_loss")):
        assert codes(cli_with_runs("-o", "json", "runs", *words, rc=2)) == [
            "option-invalid/key-of-tasks"
        ]
    assert (
        cli_with_runs("runs", "--tasks", "--sort", "eval_loss")
        .stdout.splitlines()[1]
        .startswith("demo-7-train/task-1")
    )
    assert codes(cli_with_runs("-o", "json", "runs", "--sweep", "1", rc=2)) == [
        "option-invalid/sweep"
    ]


def test_link_to_run_is_that_run_and_unreadable_run_is_noted(cli_with_runs: Clusterctl) -> None:
    out = cli_with_runs.cwd / "runs"
    (out / "link").symlink_to(out / "demo-1-train")
    (out / "demo-2-train" / "run.json").write_text("[]")
    result = cli_with_runs("runs")
    assert result.stdout.count("demo-1-train") == 1
    assert "the run.json of" in result.stderr
    cli_with_runs("runs", "rm", "link", "1", "--yes")
    assert not (out / "demo-1-train").exists()
    assert sorted(path.name for path in out.iterdir()) == ["demo-2-train", "link"]


@pytest.mark.parametrize(
    ("words", "code", "named"),
    [
        (["--sort", "lss"], "not-found/run-key", "mean loss?"),
        (["--columns", "lr,nothing.at.all"], "not-found/run-key", "'nothing.at.all'"),
        (["--dir", "runs", "--everywhere"], "options-exclusive", "--everywhere"),
        (["--sweep", "1", "--where", "lr=1"], "options-exclusive", "--sort"),
    ],
)
def test_runs_with_wrong_arguments_is_one_error(
    cli_with_runs: Clusterctl, words: list[str], code: str, named: str
) -> None:
    result = cli_with_runs("-o", "json", "runs", *words, rc=2)
    assert codes(result) == [code]
    assert named in result.stderr


def test_runs_without_any_run(cli: Clusterctl) -> None:
    assert shows(cli("runs").stdout, "no-runs")


def test_runs_outside_a_runs_folder_lists_all_of_this_machine(
    cli_with_runs: Clusterctl, tmp_path: Path
) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    cli_with_runs.home.mkdir(exist_ok=True)
    (cli_with_runs.home / "runs.jsonl").write_text(
        json.dumps({"folder": str(cli_with_runs.cwd / "runs")}) + "\n"
    )
    result = cli_with_runs("runs", cwd=elsewhere)
    assert "demo-2-train" in result.stdout
    assert shows(result.stderr, "runs-elsewhere")
    assert str(cli_with_runs.cwd / "runs") in result.stderr


def test_hostile_text_in_a_run_is_printed_harmlessly(cli_with_runs: Clusterctl) -> None:
    hostile = "\x1b]0;pwn\x07\n<script>"
    made_run(
        cli_with_runs.cwd / "runs",
        3,
        args=[f"--{'a' * 10}={hostile}"],
        metrics=[{hostile: 1.0}],
        note=hostile,
    )
    for words in ([], ["show", "3"], ["diff", "3", "1"], ["--columns", "note,aaaaaaaaaa"]):
        text = cli_with_runs("runs", *words).stdout
        assert "\x1b" not in text
        assert "\x07" not in text


def test_report_of_runs(cli_with_runs: Clusterctl) -> None:
    output = cli_with_runs("report", "1").stdout
    assert "COMPLETED after 1m" in output
    path = Path(output.splitlines()[-1].removeprefix("report: "))
    assert path.name == "report.html"
    assert path.parent == cli_with_runs.cwd / "runs" / "demo-1-train"
    assert "two runs.html" in cli_with_runs("report", "1", "2", "--out", "two runs.html").stdout
    assert "they differ in" in (cli_with_runs.cwd / "two runs.html").read_text()
    assert cli_with_runs("report", "1", "-o", "md").stdout.startswith(
        "# demo-1-train\n\n- COMPLETED after 1m"
    )
    assert cli_with_runs("report", "1", "-o", "json").json["report"]["title"] == "demo-1-train"


def test_report_is_opened_in_the_browser_of_the_user(cli_with_runs: Clusterctl) -> None:
    browser = cli_with_runs.cwd / "browser"
    browser.write_text('#!/bin/sh\necho "$1" >"$0.opened"\n')
    browser.chmod(0o755)
    cli = replace(cli_with_runs, environ={**cli_with_runs.environ, "BROWSER": f"{browser} %s"})
    cli("report", "1", "--open")
    report = cli.cwd / "runs" / "demo-1-train" / "report.html"
    assert browser.with_name("browser.opened").read_text() == f"{report.as_uri()}\n"


def test_runs_over_seeds_have_means_and_name_those_that_diverged(
    cli_with_seeds: Clusterctl,
) -> None:
    result = cli_with_seeds("runs", "--over", "seed")
    assert [line.split() for line in result.stdout.splitlines()] == [
        ["LR", "LOSS", "N", "DIVERGED"],
        ["0.0001", "0.25", "±", "0.12", "3", "0"],
        ["1e-05", "0.562", "±", "0.088", "2", "1"],
    ]
    assert shows(result.stderr, "means-of-runs")
    assert shows(result.stderr, "run-not-averaged")
    assert "demo-6-train diverged" in result.stderr
    first, second = cli_with_seeds("runs", "--over", "seed", "-o", "json").json["groups"]
    assert first["metrics"]["loss"] == {"mean": 0.25, "deviation": 0.125, "count": 3}
    assert (second["n"], second["diverged"]) == (2, ["demo-6-train"])
    assert cli_with_seeds("runs", "--over", "seed", "-o", "csv").stdout.splitlines() == [
        "lr,loss,loss_sd,loss_n,diverged",
        "0.0001,0.25,0.125,3,0",
        "1e-05,0.5625,0.08838834764831845,2,1",
    ]
    latex = cli_with_seeds("runs", "--over", "seed", "-o", "latex").stdout.splitlines()
    assert r"1e-05 & $0.562 \pm 0.088$ & $2$ & $1$ \\" in latex
    assert any(line.startswith("% ") and "demo-6-train" in line for line in latex)


def test_runs_are_printed_as_csv_and_markdown(cli_with_seeds: Clusterctl) -> None:
    head, *rows = cli_with_seeds("runs", "-o", "csv").stdout.splitlines()
    assert {"run", "lr", "seed", "loss", "loss.min", "submitted"} <= {*head.split(",")}
    assert len(rows) == 6
    columns = ("runs", "--columns", "lr,loss", "--sort", "loss", "-o")
    assert cli_with_seeds(*columns, "csv").stdout.splitlines()[:2] == [
        "run,lr,loss",
        "demo-1-train,0.0001,0.125",
    ]
    assert cli_with_seeds(*columns, "md").stdout.splitlines()[::2] == [
        "| run | lr | loss |",
        "| demo-1-train | 0.0001 | 0.125 |",
        "| demo-3-train | 0.0001 | 0.375 |",
        "| demo-5-train | 1e-05 | 0.625 |",
    ]


@pytest.mark.parametrize(
    ("arguments", "printed"),
    [
        (("--columns", "lr,loss", "-o", "csv"), ["run,lr,loss"]),
        (("--over", "seed", "--columns", "loss", "-o", "csv"), ["loss,loss_sd,loss_n,diverged"]),
        (("--columns", "lr", "-o", "md"), ["| run | lr |", "| --- | --- |"]),
    ],
)
def test_table_for_a_program_has_its_head_alone_if_no_run_matches(
    cli_with_seeds: Clusterctl, arguments: Sequence[str], printed: Sequence[str]
) -> None:
    result = cli_with_seeds("runs", "--tag", "none", *arguments)
    assert result.stdout.splitlines() == printed
    assert shows(result.stderr, "no-run-matches")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("runs", "--over", "seed", "--sort", "loss"), "options-exclusive"),
        (("runs", "--over", "sed"), "unknown-run-key"),
        (("runs", "--ledger", "-o", "csv"), "options-exclusive"),
        (("runs", "figure", "loss", "1", "--out", "loss.gif"), "figure-form-unknown"),
        (("runs", "figure", "loss", "1", "--out", "none/loss.csv"), "file-unwritable"),
        (("runs", "figure", "loss", "1", "--out", "none/loss.pdf"), "file-unwritable"),
        (("runs", "figure", "los", "1"), "unknown-run-key"),
    ],
)
def test_means_and_figures_with_wrong_options_are_refused(
    cli_with_seeds: Clusterctl, arguments: tuple[str, ...], code: str
) -> None:
    assert shows(cli_with_seeds(*arguments, rc=2).stderr, code)
