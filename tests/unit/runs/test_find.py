"""Collected runs: found, named, filtered and sorted."""

from __future__ import annotations

import csv
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.runs.find import Row, TaskRanking, find_runs, named_run, ordered, ranked
from clusterctl.runs.query import RunQuery, all_columns, cells, list_runs, select_runs
from clusterctl.runs.tabular import as_csv
from clusterctl.spec.metrics import Goal
from clusterctl.state.chosen import ChosenCluster
from clusterctl.state.ledger import (
    JobEntry,
    Ledger,
    note_runs_folder,
    readable_runs,
    run_folders,
    runs_folders,
)
from clusterctl.state.workspace import Workspace
from tests.support.messages import refused
from tests.unit.runs.made import TIME, made_run


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """./runs with four runs, and a folder that is none."""
    monkeypatch.setenv("CLUSTERCTL_HOME", str(tmp_path / "state"))
    monkeypatch.chdir(tmp_path)
    out = tmp_path / "runs"
    for number, (lr, loss, state) in enumerate(
        [(1e-3, 0.5, "COMPLETED"), (1e-2, 0.3, "COMPLETED"), (1e-1, float("nan"), "FAILED")], 1
    ):
        lines = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": loss, "best": True}]
        made_run(
            out,
            number,
            args=["--lr", str(lr)],
            metrics=lines,
            state=state,
            tags=["a", f"t{number}"],
        )
    made_run(out, 4, name="shell", args=["--mode", "fast"], user="bob", note="no metrics")
    (out / "notes").mkdir()
    spec = "version: 1\nname: demo\nprovider: {type: local}\npartitions: [{name: a, nodes: 1}]\n"
    (tmp_path / "cluster.yaml").write_text(spec)
    return out


def rows(out: Path) -> list[Row]:
    return [Row(run) for run in find_runs([out])[0]]


def jobs(found: list[Row]) -> list[Any]:
    return [int(row.run.job_id) for row in found]


def select(out: Path, **query: Any) -> list[Any]:
    return jobs(select_runs(RunQuery(**query), [out]).rows)


def test_runs_are_listed_newest_first_and_damaged_ones_named(out: Path) -> None:
    (out / "demo-9-torn").mkdir()
    (out / "demo-9-torn" / "run.json").write_text('{"version": 1')
    runs, damaged = find_runs([out, out / "demo-2-train"])
    assert [run.job_id for run in runs] == ["4", "3", "2", "1"]
    assert damaged == [out / "demo-9-torn"]
    with refused("file-unreadable", UsageError):
        find_runs([out / "nowhere"])


@pytest.mark.parametrize(
    ("conditions", "expected"),
    [
        (["lr>=1e-2"], [3, 2]),
        (["lr=0.01"], [2]),
        (["lr!=0.01"], [4, 3, 1]),
        (["loss<0.4"], [2]),
        (["loss.max>=2", "state=completed"], [2, 1]),
        (["loss.min=2"], [3]),  # its last is no number
        (["name~SHE"], [4]),
        (["note~metrics"], [4]),
        (["mode=fast"], [4]),
        (["config.lr<0.1", "metric.loss>0.4"], [1]),
        (["user = bob"], [4]),
        (["lr==1e-1"], [3]),
        (["exit=0", "final=true"], [4, 3, 2, 1]),
        (["job>=3"], [4, 3]),
        (["tags=t2"], [2]),
        (["elapsed>=1m", "elapsed<=00:01:00"], [4, 3, 2, 1]),
        (["submitted<2020-01-01"], []),
        (["submitted>2020-01-01", " lr = 0.01 "], [2]),
        (["elapsed>=60", "nodes=1"], [4, 3, 2, 1]),
    ],
)
def test_select_where_joins_conditions(
    out: Path, conditions: list[str], expected: list[int]
) -> None:
    assert select(out, where=conditions) == expected


def test_select_by_tags_and_time(out: Path) -> None:
    assert select(out, tags=["a", "t2"]) == [2]
    assert select(out, since="2000-01-01") == [4, 3, 2, 1]
    days = int((time.time() - TIME - 2.5) / 86_400)
    assert select(out, since=f"{days}d") == []
    with refused("option-invalid/time", UsageError):
        select(out, since="yesterday")


@pytest.mark.parametrize(
    ("condition", "code", "shown"),
    [
        ("lr", "option-invalid/condition", "'lr'"),
        ("=1", "option-invalid/condition", "'=1'"),
        ("lrr=1", "not-found/run-key", "did you mean lr"),
        ("lr=fast", "option-invalid/number", "'fast'"),
        ("lr=<1", "option-invalid/number", "'<1'"),
        ("elapsed>long", "option-invalid/number", "elapsed"),
        ("xyzzy>1", "not-found/run-key", "run, job,"),
    ],
)
def test_select_refuses_a_wrong_condition(out: Path, condition: str, code: str, shown: str) -> None:
    with refused(code, UsageError, shown):
        select(out, where=[condition])


def test_ordered_puts_missing_values_last_in_either_order(out: Path) -> None:
    assert jobs(ordered(rows(out), "loss")) == [2, 1, 4, 3]
    assert jobs(ordered(rows(out), "loss", reverse=True)) == [1, 2, 4, 3]
    assert jobs(ordered(rows(out), "name")) == [4, 3, 2, 1]


def sweep_of(out: Path, states: Mapping[str, float | None], **sweep: Any) -> Row:
    """A sweep with a task for each state, and its value of ``metric`` (default: eval_loss)."""
    metric = str(sweep.get("metric", "eval_loss"))
    tasks = [
        {
            "id": f"9_{number}",
            "state": state.rstrip("0123456789"),
            "config": {"a": number},
            "metrics": {metric: {"last": value, "min": value, "max": value, "count": 1}},
        }
        for number, (state, value) in enumerate(states.items())
    ]
    return Row(made_run(out, 9, tasks=tasks, sweep={"keys": ["a"], **sweep}))


def numbers(ranking: TaskRanking) -> list[str]:
    return [task.number for task in ranking.tasks]


def test_tasks_that_did_not_complete_rank_behind(out: Path) -> None:
    """Also behind a task that completed with NaN, in either order."""
    states = {
        "FAILED": 0.1,
        "COMPLETED": 0.5,
        "TIMEOUT": 0.2,
        "COMPLETED2": None,
        "COMPLETED3": 0.3,
    }
    run = sweep_of(out, states, metric="eval_loss", goal="min")
    ranking = ranked(run)
    assert (numbers(ranking), ranking.best and ranking.best.number) == (
        ["4", "1", "3", "0", "2"],
        "4",
    )
    worst_first = ranked(run, reverse=True)
    assert (numbers(worst_first)[:2], worst_first.best) == (["1", "4"], ranking.best)
    assert [row.number for row in list_runs(sweep=run)] == numbers(ranking)


def test_ranking_by_unknown_metric_needs_a_goal(out: Path) -> None:
    run = sweep_of(out, {"COMPLETED": 1.0, "COMPLETED2": 2.0}, metric="widgets")
    with refused("option-invalid/goal", UsageError, "--goal min", exit_code=2):
        ranked(run)
    assert numbers(ranked(run, goal=Goal.MAX)) == ["1", "0"]
    assert [row.number for row in list_runs(sweep=run, goal="max")] == ["1", "0"]
    with refused("option-invalid/option-missing", UsageError):
        list_runs(goal="max")


def test_goal_of_sweep_holds_for_its_metric_alone(out: Path) -> None:
    run = sweep_of(out, {"COMPLETED": 1.0, "COMPLETED2": 2.0}, metric="widgets", goal="max")
    by_lowest = ranked(run, "widgets.min", goal=Goal.MIN)
    assert (ranked(run).goal, by_lowest.goal) == (Goal.MAX, Goal.MIN)
    by_option = ranked(run, "a")
    assert (numbers(by_option), by_option.goal, by_option.best) == (["0", "1"], None, None)


@pytest.mark.parametrize("name", ["cost", "a"])
def test_metric_with_the_name_of_a_field_or_an_option_ranks(out: Path, name: str) -> None:
    """`cost` is a field of runs, and ``a`` an option of the tasks, in ascending order."""
    run = sweep_of(
        out, {"COMPLETED": 3.0, "COMPLETED2": 1.0, "COMPLETED3": 2.0}, metric=name, goal="min"
    )
    ranking = ranked(run)
    assert numbers(ranking) == ["1", "2", "0"]
    assert ranking.best is not None
    assert ranking.best.value(ranking.metric) == 1.0


def test_tasks_per_node_is_a_field(out: Path) -> None:
    made_run(out, 8, tasks_per_node=4)
    assert select(out, where=["tasks_per_node=4"]) == [8]


def test_named_run_accepts_id_and_folder_and_refuses_others(out: Path) -> None:
    for name in ("2", "demo/2", "demo-2-train", "runs/demo-2-train", str(out / "demo-2-train")):
        assert named_run(name).run.job_id == "2", name
    for name, code in (
        ("", "not-found/run"),
        ("train", "not-found/run"),
        ("latest", "not-found/run"),
        ("2_", "not-found/run"),
        ("_1", "not-found/run"),
        ("2_[1-3]", "not-found/run"),
        ("2_1", "not-found/task"),
        ("7", "not-found/collected-run"),
        ("other/2", "not-found/collected-run"),
        ("notes", "file-invalid/run"),
        ("../runs", "file-invalid/run"),
    ):
        with refused(code, UsageError):
            named_run(name)


def test_id_is_a_job_and_never_a_folder_of_this_name(out: Path) -> None:
    made_run(Path("."), 2, name="of-folder", token="f" * 8)
    Path("demo-2-of-folder").rename("3")
    assert named_run("3").folder == out / "demo-3-train"
    assert named_run("./3").run.name == "of-folder"


def test_run_is_that_of_the_last_job_with_its_id(out: Path) -> None:
    """Slurm has begun its numbers again. Without the job's entry here, the id is ambiguous."""
    made_run(out, 2, name="again", token="f" * 8)
    with refused("ambiguous/run", UsageError, str(out / "demo-2-again")):
        named_run("2")
    add_job("demo", "2", token="f" * 8)
    assert named_run("2").run.name == "again"
    Path("cluster.yaml").unlink()
    assert named_run("2").run.name == "again"


def test_similar_name_is_suggested_and_no_dangling_link(out: Path) -> None:
    with refused("not-found/run", UsageError, "demo-2-train"):
        named_run("demo-2-trian")
    (out / "demo-2-trian").symlink_to("/nonexistent")
    with refused("not-found/run", UsageError, "did you mean demo-2-train"):
        named_run("demo-2-trian")


def test_task_of_an_array_is_a_row_of_its_own(out: Path) -> None:
    task = {
        "state": "COMPLETED",
        "exit_code": 0,
        "nodes": ["demo-train-1"],
        "start_time": 1,
        "end_time": 4,
    }
    config = [{"lr": 0.1}, {"lr": 0.2}]
    tasks = [{**task, "id": f"5_{number}", "config": one} for number, one in enumerate(config)]
    made_run(out, 5, tasks=tasks)
    (_, second) = named_run("5").tasks
    assert (second.value("job"), second.value("lr"), second.value("elapsed")) == ("5_1", 0.2, 3)
    assert named_run("5_1") == second
    (out / "demo-5-train" / "task-1").mkdir()
    assert named_run("demo-5-train/task-1").shown == "demo-5-train/task-1"
    assert named_run("2").tasks == []
    with refused("not-found/task", UsageError, "use demo-2-train"):
        named_run("2_1")
    with refused("not-found/task", UsageError, "clusterctl runs show demo-5-train"):
        named_run("5_2")


def test_folders_that_were_collected_to_are_remembered(out: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    other = tmp_path / "elsewhere"
    made_run(other, 8)
    for _ in range(2):
        note_runs_folder(other)
    note_runs_folder(tmp_path / "gone")
    assert runs_folders() == (out, other)
    assert named_run("8").folder == other / "demo-8-train"


def test_name_in_several_folders_of_runs_is_refused(out: Path, tmp_path: Path) -> None:
    (tmp_path / "state").mkdir()
    other = made_run(tmp_path / "elsewhere", 1, token="f" * 8).directory
    note_runs_folder(other.parent)
    with refused("ambiguous/run", UsageError, str(other), str(out / "demo-1-train")):
        named_run("demo-1-train")
    assert named_run("runs/demo-1-train").folder == out / "demo-1-train"
    assert named_run(str(other)).folder == other
    # A copy of a run is the same run.
    made_run(tmp_path / "elsewhere", 2)
    assert named_run("demo-2-train").folder == out / "demo-2-train"


def test_unreadable_folder_hides_no_other_run(out: Path, tmp_path: Path) -> None:
    assert [*readable_runs([tmp_path / "gone", out])] == [*run_folders(out)]


def add_job(cluster: str, job_id: str, token: str = "") -> None:
    """A job that was submitted from here to a cluster that is up."""
    workspace = Workspace.of(cluster)
    workspace.create()
    workspace.inventory.write_text("{}")
    token = token or ("0" if cluster == "demo" else "f") * 7 + job_id
    entry = JobEntry(token=token, name="t", user="u", submitted_at=1.0, job_id=job_id)
    Ledger(workspace.jobs).add(entry)


def test_job_id_is_of_the_chosen_cluster_and_no_other(out: Path) -> None:
    add_job("other", "1")
    assert named_run("1").run.cluster == "demo"
    with refused("option-invalid/sweep", UsageError, "demo-1-train"):
        list_runs(sweep="1")
    other = ChosenCluster(name="other")
    for name in ("1", "2"):
        with refused("not-found/collected-run", UsageError, f"clusterctl collect other/{name}"):
            named_run(name, other)
    with refused("not-found/run-of-cluster", UsageError):
        named_run("demo/2", other)


def test_run_is_found_without_a_chosen_cluster(out: Path) -> None:
    for cluster in ("demo", "other"):
        add_job(cluster, "1")
    Path("cluster.yaml").unlink()
    for name in ("demo-2-train", "demo/2", "2"):
        assert named_run(name).run.job_id == "2"


def test_run_of_an_earlier_version_has_no_metrics(out: Path) -> None:
    path = out / "demo-1-train" / "run.json"
    text = path.read_text()
    path.write_text(text.replace('"metrics"', '"unknown"').replace('"tags"', '"labels"'))
    row = named_run("1")
    assert (row.value("loss"), row.value("tags"), row.value("lr")) == (None, "", 0.001)


def test_csv_tells_a_value_in_one_way_whichever_columns_are_chosen(out: Path) -> None:
    """A loss that ended as NaN is no missing one, and times are in UTC."""
    found = rows(out)
    keys = ["submitted", "loss", "lr"]
    chosen = [*csv.reader(as_csv(keys, cells(found, keys)).splitlines())]
    every = [*csv.DictReader(as_csv(*all_columns(found)).splitlines())]
    assert chosen == [keys, *([row[key] for key in keys] for row in every)]
    assert chosen[1:] == [
        ["2025-10-09 08:53:24+00:00", "", ""],
        ["2025-10-09 08:53:23+00:00", "nan", "0.1"],
        ["2025-10-09 08:53:22+00:00", "0.3", "0.01"],
        ["2025-10-09 08:53:21+00:00", "0.5", "0.001"],
    ]
