"""What `collect` and `down` say of files that stay behind."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.cli.collect import left_notes
from clusterctl.cli.main import app
from clusterctl.cli.output import Screen
from clusterctl.cli.runs import show_tables
from clusterctl.scheduler.session import Session
from clusterctl.spec.job import JobSpec
from clusterctl.spec.models import PROVIDERS
from clusterctl.spec.sweep import Scaling
from clusterctl.state import inventory
from clusterctl.state.workspace import Workspace
from clusterctl.util.progress import Clock
from tests.support.messages import shows
from tests.support.played.cluster import PlayedCluster, submitted
from tests.unit.runs.made import made_run


@pytest.fixture
def workspace(tmp_path: Path) -> Workspace:
    one = Workspace(tmp_path / "demo")
    one.create()
    return one


# A file of each sort: with data, a link, and one that does not exist.
LEFT = (
    {"path": "weights", "reason": "Permission denied"},
    {"path": "best.pt", "reason": "a symbolic link", "down": "deletes", "target": "/scratch/best"},
    {"path": "sacct.json", "reason": "no accounting", "down": ""},
)


@pytest.mark.parametrize(
    ("provider", "keep", "expected"),
    [
        (
            "local",
            False,
            [("files-missing", 2), ("files-left", 0), ("files-unprotected", 1)],
        ),
        ("local", True, [("files-stay", 0), ("files-stay", 1), ("files-missing", 2)]),
        ("onprem", False, [("files-stay", 0), ("files-stay", 1), ("files-missing", 2)]),
    ],
)
def test_note_on_uncollected_files_says_what_down_does(
    workspace: Workspace,
    monkeypatch: pytest.MonkeyPatch,
    provider: str,
    expected: list[tuple[str, int]],
    *,
    keep: bool,
) -> None:
    traits = SimpleNamespace(traits=PROVIDERS[provider], is_foreign=False)
    monkeypatch.setattr(inventory, "inventory_of", lambda _: traits)
    monkeypatch.setattr(inventory, "keeps_storage", lambda _: keep)
    run = made_run(workspace.root.parent / "runs", 42, skipped=LEFT)
    notes = left_notes(run, workspace)
    named = [
        (note.code, number)
        for note in notes
        for number, left in enumerate(LEFT)
        if f"{left['path']}" in note
    ]
    assert named == expected
    assert left_notes(made_run(workspace.root.parent / "more", 43), workspace) == []


@pytest.mark.parametrize(
    ("words", "seconds"), [("collect --all", 5), ("jobs", 10), ("cancel 1", 10)]
)
def test_stopped_slurmctld_is_waited_for_once_and_not_for_long(
    played_session: Session,
    cluster: PlayedCluster,
    tmp_path: Path,
    set_clock: Callable[[Clock], None],
    capsys: pytest.CaptureFixture[str],
    *,
    words: str,
    seconds: int,
) -> None:
    submitted(played_session, tmp_path, "true")
    with cluster.state() as state:
        state["away"] = 1000
    slept: list[float] = []
    set_clock(Clock(lambda: sum(slept), slept.append))
    app(words.split(), prog_name="clusterctl", standalone_mode=False)
    assert sum(slept) == pytest.approx(seconds)
    text = capsys.readouterr().err
    assert shows(text, "slurm-away")
    assert f"squeue for {seconds}" in text
    assert "`clusterctl up`" in text


def test_run_that_is_not_collected_leaves_the_table(
    played_session: Session, cluster: PlayedCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    """The table of a scaling has its other runs. The job without a run is named."""
    Path("mine.sh").write_text("#!/bin/bash\necho '{\"loss\": 1.5}' >metrics.jsonl\n")
    words = ["-o", "json", "submit", "mine.sh", "--scaling", "1,2"]
    app(words, prog_name="clusterctl", standalone_mode=False)
    rows = json.loads(capsys.readouterr().out)["jobs"]
    for row in rows:
        cluster.wait_until_ended(row["job_id"])
    entry = played_session.ledger.find(rows[1]["job_id"])
    assert entry is not None
    played_session.ledger.update(entry, remote_dir=None)
    job = JobSpec(name=rows[0]["name"], script=Path("mine.sh"), scaling=Scaling(nodes=(1, 2)))
    show_tables(Screen(json=False, color=False), played_session, rows, [job, job], [])
    assert [size["runs"] for size in rows[1]["scaling"]["curves"][0]["sizes"]] == [1]
    output = capsys.readouterr()
    assert "job 2: " in output.err
    # A table is a result: `submit ... --wait >table.txt` keeps it.
    assert "loss" in output.out
    assert "1 node" in output.out


def test_sweep_of_option_with_name_of_field_shows_values_of_option(
    played_session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    tasks = [
        {
            "id": f"9_{number}",
            "state": "COMPLETED",
            "config": {"name": name, "nodes": 7},
            "metrics": {"loss": {"last": 2.0 - number, "count": 1}},
        }
        for number, name in enumerate(("sgd", "adam"))
    ]
    collected = made_run(tmp_path / "runs", 9, tasks=tasks, sweep={"keys": ["name", "nodes"]})
    monkeypatch.setattr("clusterctl.cli.runs.collect_runs", lambda *_: [collected])
    rows: list[dict[str, Any]] = [{"job_id": "9"}]
    job = JobSpec(name="mine", bundled="train", sweep={"grid": ["name=sgd,adam", "nodes=7"]})
    show_tables(Screen(json=False, color=False), played_session, rows, [job], [])
    output = capsys.readouterr()
    assert "best: 9_1 config.name=adam config.nodes=7: " in output.out
    assert "sgd" in output.out


def test_sweep_by_metric_of_unknown_direction_names_the_option_to_rank(
    played_session: Session,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The tasks wrote a single metric, and nobody said which of its values are better."""
    metric = {"widgets": {"last": 2.0, "count": 1}}
    tasks = [{"id": f"9_{number}", "state": "COMPLETED", "metrics": metric} for number in range(2)]
    collected = made_run(tmp_path / "runs", 9, tasks=tasks, sweep={"keys": ["a"]})
    monkeypatch.setattr("clusterctl.cli.runs.collect_runs", lambda *_: [collected])
    rows: list[dict[str, Any]] = [{"job_id": "9"}]
    job = JobSpec(name="mine", bundled="train", sweep={"grid": ["a=1,2"]})
    show_tables(Screen(json=False, color=False), played_session, rows, [job], [])
    output = capsys.readouterr()
    assert "--goal min" in output.err
    assert (rows[0]["sweep"], "best" in output.out) == (None, False)
