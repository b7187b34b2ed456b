"""`clusterctl runs`: what it prints, in text and in JSON."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.support.verbs import Clusterctl
from tests.unit.runs.made import made_run


@pytest.fixture
def made(cli: Clusterctl) -> Clusterctl:
    for number, lr in enumerate(("0.1", "0.01"), 1):
        lines = [{"kind": "iteration", "step": step, "loss": 1 / step} for step in (1, number + 1)]
        made_run(cli.cwd / "runs", number, args=["--lr", lr], metrics=lines, tags=["base"], cost_usd=0.5)
    return cli


def test_runs_alone_lists_the_newest_first(made: Clusterctl) -> None:
    head, first, second = made("runs").stdout.splitlines()
    assert head.split() == ["RUN", "STATE", "SUBMITTED", "ELAPSED", "NODES", "LOSS"]
    assert first.split() == ["demo-2-train", "COMPLETED", *first.split()[2:4], "00:01:00", "1", "0.333333"]
    assert second.startswith("demo-1-train")


def test_columns_order_and_limit(made: Clusterctl) -> None:
    ran = made("runs", "--columns", "lr,loss.max,cost,note", "--sort", "lr", "--limit", "1")
    assert [line.split() for line in ran.stdout.splitlines()] == [
        ["RUN", "LR", "LOSS.MAX", "COST", "NOTE"],
        ["demo-2-train", "0.01", "1", "0.50", "-"],
    ]
    assert "1 more: --limit 2" in ran.stderr
    assert (
        made("runs", "list", "--reverse", "--tag", "base").stdout.splitlines()[1].startswith("demo-1-train")
    )
    assert made("runs", "--tag", "none").stdout == "no run is like that\n"


def test_json_has_all_of_each_run(made: Clusterctl) -> None:
    answer = json.loads(made("runs", "-o", "json", "--where", "lr<0.05").stdout)
    (run,) = answer["runs"]
    assert (answer["ok"], answer["total"], run["job"], run["tags"]) == (True, 1, "2", ["base"])
    assert run["config"] == {"lr": 0.01}
    assert run["metrics"]["loss"]["min_step"] == 3
    assert Path(run["dir"]) == made.cwd / "runs" / "demo-2-train"


def test_one_run_in_full(made: Clusterctl) -> None:
    text = made("runs", "show", "2").stdout
    assert "arguments  --lr 0.01\n" in text
    assert [line.split() for line in text.splitlines() if line.startswith("loss")] == [
        ["loss", "0.333333", "at", "3", "0.333333", "at", "3", "1", "at", "1"]
    ]
    assert json.loads(made("runs", "show", "demo-2-train", "-o", "json").stdout)["run"]["args"] == [
        "--lr",
        "0.01",
    ]


def test_two_runs_compared(made: Clusterctl) -> None:
    assert [line.split() for line in made("runs", "diff", "1", "2").stdout.splitlines()] == [
        ["CONFIGURATION", "demo-1-train", "demo-2-train"],
        ["lr", "0.1", "0.01"],
        [],
        ["RESULT", "demo-1-train", "demo-2-train"],
        ["loss", "0.5", "0.333333"],
    ]
    assert made("runs", "diff", "1", "1").stdout == "nothing differs\n"
    found = json.loads(made("runs", "diff", "1", "2", "-o", "json").stdout)["differences"]
    assert found[0] == {"section": "configuration", "key": "lr", "a": 0.1, "b": 0.01}


def test_removal_asks_first(made: Clusterctl) -> None:
    folder = made.cwd / "runs" / "demo-1-train"
    assert "say --yes" in made("runs", "rm", "1", rc=2).stderr
    assert folder.is_dir()
    made("runs", "rm", "1", "demo-1-train", "--yes")
    assert not folder.exists()
    assert made("runs", "list").stdout.count("demo-") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["show", "9"], "there is no collected run '9'"),
        (["diff", "1"], "Missing argument"),
        (["--where", "lrr=1"], "did you mean lr?"),
        (["--sort", "lss"], "did you mean loss?"),
        (["--columns", "lr,nothing.at.all"], "no run has"),
        (["--dir", "nowhere"], "can't be read"),
        (["--dir", "runs", "--everywhere"], "exclude each other"),
        (["lst"], "runs list"),
    ],
)
def test_what_is_wrong_is_one_error(made: Clusterctl, words: list[str], message: str) -> None:
    assert message in made("runs", *words, rc=2).stderr


def test_without_any_run(cli: Clusterctl) -> None:
    assert "no runs; `clusterctl collect`" in cli("runs").stdout


def test_elsewhere_all_that_was_collected_on_this_machine(made: Clusterctl, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    made.home.mkdir(exist_ok=True)
    (made.home / "runs.jsonl").write_text(json.dumps({"folder": str(made.cwd / "runs")}) + "\n")
    ran = made("runs", cwd=elsewhere)
    assert "demo-2-train" in ran.stdout
    assert "no ./runs here: these are the runs in" in ran.stderr


def test_hostile_words_of_a_run_are_inert(made: Clusterctl) -> None:
    hostile = "\x1b]0;pwn\x07\n<script>"
    made_run(made.cwd / "runs", 3, args=[f"--{'a' * 10}={hostile}"], metrics=[{hostile: 1.0}], note=hostile)
    for words in ([], ["show", "3"], ["diff", "3", "1"], ["--columns", "note,aaaaaaaaaa"]):
        text = made("runs", *words).stdout
        assert "\x1b" not in text
        assert "\x07" not in text
