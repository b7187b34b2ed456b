"""What differs between two runs, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import CollectError
from clusterctl.runs.compare import Losses, compare, compare_losses, hardware_of
from clusterctl.runs.find import Row
from tests.support.messages import refused
from tests.unit.runs.made import made_run

HOST = {
    "kind": "host",
    "host": "demo-train-1",
    "versions": {"python": "3.11.2", "numpy": "2.0"},
    "cpu_model": "EPYC",
    "cpus": [0, 1],
    "memory_total_mib": 4000,
    "gpus": [{"name": "L4", "uuid": "GPU-1"}],
    "boot_id": "x",
}

IMAGE = f"registry/{'x' * 200}@sha256:"
READ = {
    "kind": "run",
    "data": {"name": "text:/x/a", "bytes": 5, "sha256": {"a.b.c.d.txt": "c" * 64}},
}


def differences(
    out: Path, a: dict[str, Any], b: dict[str, Any]
) -> dict[tuple[str, str], tuple[Any, Any]]:
    both = {
        "args": ["--lr", "0.1", "--out", "x"],
        "files": {"train.py": "a" * 64},
        "job": {
            "script": "/home/ada/train.py",
            "nodes": 2,
            "env": {"SEED": "1"},
            "container": f"{IMAGE}a",
        },
        "client": {"requirements": "numpy==2.0 --hash=x\nrich==1.0\n", "git": {"commit": "1" * 40}},
        "hosts": {"demo-train-1": HOST},
        "metrics": [{"loss": 1.5}],
    }
    runs = [Row(made_run(out, number, **(both | more))) for number, more in ((1, a), (2, b))]
    return {(one.section, one.key): (one.a, one.b) for one in compare(*runs)}


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({}, {}),
        ({"args": ["--lr", "0.2", "--out", "x"]}, {("configuration", "lr"): (0.1, 0.2)}),
        (
            {"args": ["b.csv", "--lr", "0.3", "--out", "x"]},
            {("configuration", "arguments"), ("configuration", "lr")},
        ),
        ({"files": {"train.py": "b" * 64}}, {("code", "train.py"): ("a" * 12, "b" * 12)}),
        ({"files": {}}, {("code", "train.py"): ("a" * 12, None)}),
        (
            {"client": {"requirements": "numpy==2.1\nrich==1.0"}},
            {("environment", "numpy"): ("2.0", "2.1")},
        ),
        ({"hosts": {"demo-train-9": {**HOST, "host": "demo-train-9", "boot_id": "y"}}}, {}),
        ({"hosts": {"demo-train-1": {**HOST, "cpu_model": "Xeon"}}}, {("hardware", "nodes")}),
        ({"hosts": {"demo-train-1": [1]}}, {("hardware", "nodes"), ("environment", "python")}),
        ({"metrics": [READ, {"loss": 1.5}]}, {("data", "bytes"), ("data", "sha256.a.b.c.d.txt")}),
        ({"metrics": [{**READ, "data": [1]}, {"loss": 1.5}]}, {}),
        ({"metrics": [{"loss": 1.25}]}, {("result", "loss"): (1.5, 1.25)}),
        (
            {"state": "FAILED", "elapsed_s": 9},
            {("result", "state"): ("COMPLETED", "FAILED"), ("result", "elapsed"): (60, 9)},
        ),
        ({"cluster": "other"}, {("job", "cluster"): ("demo", "other")}),
        (
            {
                "job": {
                    "script": "/elsewhere/train.py",
                    "nodes": 4,
                    "env": {"SEED": "2"},
                    "mem": None,
                }
            },
            {("job", "nodes"), ("job", "env.SEED"), ("job", "container")},
        ),
        (
            {
                "job": {
                    "script": "train.py",
                    "nodes": 4,
                    "env": {"SEED": "1"},
                    "container": f"{IMAGE}b",
                }
            },
            {("job", "nodes"): (2, 4), ("job", "container"): (f"{IMAGE}a", f"{IMAGE}b")},
        ),
        (
            {
                "client": {"requirements": "numpy==2.0\nrich==1.0\n", "git": {"commit": "2" * 40}},
                "files": {},
            },
            {("code", "train.py"): ("a" * 12, None), ("code", "commit"): ("1" * 40, "2" * 40)},
        ),
    ],
)
def test_differences_name_only_changed_values(
    tmp_path: Path, changed: dict[str, Any], expected: Any
) -> None:
    found = differences(tmp_path, {}, changed)
    assert found == expected if isinstance(expected, dict) else set(found) == expected


def test_run_without_its_files_is_compared_by_its_record(tmp_path: Path) -> None:
    a = made_run(tmp_path, 1)
    b = made_run(tmp_path, 2, args=["--lr", "1"])
    for path in (a.directory / "environment.json", b.directory / "source.json"):
        path.unlink()
    assert {one.section for one in compare(Row(a), Row(b))} == {
        "code",
        "configuration",
        "environment",
    }
    (a.directory / "source.json").write_text("[" * 100_000)
    with refused("file-unreadable/run", CollectError):
        compare(Row(a), Row(b))


def test_data_differs_by_content_and_not_by_path(tmp_path: Path) -> None:
    def reading(name: str, sha256: str) -> dict[str, Any]:
        data = {"name": name, "bytes": 5, "sampled_sha256": {"a.txt": sha256}}
        return {"metrics": [{"kind": "run", "data": data}, {"kind": "iteration", "loss": 1.5}]}

    a = reading("text:/home/a.txt", "a" * 64)
    assert differences(tmp_path / "1", a, reading("text:/shared/a.txt", "a" * 64)) == {}
    found = differences(tmp_path / "2", a, reading("text:/home/a.txt", "b" * 64))
    assert found == {("data", "sampled_sha256.a.txt"): ("a" * 12, "b" * 12)}


def test_arrays_differ_in_their_tasks(tmp_path: Path) -> None:
    def array(job_id: int, lr: float, loss: float) -> Row:
        metrics = {"loss": {"last": loss}}
        tasks = [
            {"id": f"{job_id}_{n}", "state": "COMPLETED", "config": {"lr": lr * n}} for n in (0, 1)
        ]
        return Row(made_run(tmp_path, job_id, tasks=[tasks[0], {**tasks[1], "metrics": metrics}]))

    found = {
        (one.section, one.key): (one.a, one.b)
        for one in compare(array(1, 0.1, 2.0), array(2, 0.2, 1.0))
    }
    assert found == {
        ("configuration", "task 1: lr"): (0.1, 0.2),
        ("result", "task 1: loss"): (2.0, 1.0),
    }


def test_array_has_the_options_of_all_its_tasks_once(tmp_path: Path) -> None:
    """Only the options that differ between its tasks are listed for each task, and come first."""
    defaults = {f"default{n}": n for n in range(40)}
    metrics = {name: {"last": 1.0 if name == "lr" else 2.0} for name in ("loss", "lr", "norm")}
    tasks = [
        {"id": f"1_{n}", "state": "COMPLETED", "config": {**defaults, "lr": n}, "metrics": metrics}
        for n in range(3)
    ]
    swept = made_run(tmp_path, 1, tasks=tasks)
    single = made_run(tmp_path, 2, config={**defaults, "lr": 9})
    found = [(one.section, one.key) for one in compare(Row(swept), Row(single))]
    keys = ["task 0: lr", "task 1: lr", "task 2: lr", "lr"]
    assert found == [
        *(("configuration", key) for key in keys),
        ("result", "exit"),
        ("result", "loss"),
    ]


def losses(*values: float, name: str = "loss", start: int = 1) -> list[dict[str, Any]]:
    return [
        {"step": step, name: value, "loss_scale": 8.0 * step}
        for step, value in enumerate(values, start)
    ]


NAN = float("nan")


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        (losses(3, 2, 1), losses(3, 2, 1), Losses(True, 3, 3, 3)),
        (losses(3, 2, 1), losses(3, 2), Losses(True, 2, 3, 2)),
        (losses(3, 2, 1), losses(3, 2.5, 2), Losses(False, 3, 3, 3, first=2, largest=1.0)),
        (losses(3, NAN), losses(3, NAN), Losses(True, 2, 2, 2)),
        (losses(3, NAN), losses(3, 2), Losses(False, 2, 2, 2, first=2, largest=None)),
        (losses(0.1 + 0.2), losses(0.3), Losses(False, 1, 1, 1, first=1, largest=0.1 + 0.2 - 0.3)),
        (
            [{"loss": 3}, {"loss": 2}],
            [{"loss": 3}, {"loss": 1}],
            Losses(False, 2, 2, 2, first=2, largest=1.0, axis="row"),
        ),
        ([*losses(9), *losses(3, 2)], losses(3, 2), Losses(True, 2, 2, 2)),  # it began again
        (losses(3, name="val_loss"), losses(3, name="Train/Loss"), None),
        (losses(3), [], None),
        ([{"loss_scale": 1}], [{"loss_scale": 1}], None),
    ],
)
def test_losses_are_compared_step_by_step(
    tmp_path: Path, a: Any, b: Any, expected: Losses | None
) -> None:
    runs = [Row(made_run(tmp_path, number, metrics=lines)) for number, lines in ((1, a), (2, b))]
    assert compare_losses(*runs) == expected


def test_losses_text_names_the_first_difference() -> None:
    assert "identical over 40" in str(Losses(True, 40, 40, 40))
    assert str(Losses(True, 1, 1, 2)).endswith("1 and 2")
    sentence = "different from step 7 on, of 40 steps: the largest difference is "
    assert str(Losses(False, 40, 40, 40, 7, 0.012345)) == f"{sentence}0.012345"
    assert str(Losses(False, 40, 40, 40, 7)).endswith("not finite")


def test_losses_of_arrays_are_those_of_each_task(tmp_path: Path) -> None:
    def array(job_id: int, *last: float, first: int = 0) -> Row:
        tasks = [{"id": f"{job_id}_{first + n}", "state": "COMPLETED"} for n in range(len(last))]
        run = made_run(tmp_path, job_id, tasks=tasks)
        for number, value in enumerate(last, first):
            folder = run.directory / f"task-{number}"
            folder.mkdir()
            (folder / "metrics.jsonl").write_text(
                "".join(json.dumps(one) + "\n" for one in losses(5, value))
            )
        return Row(run)

    a = array(1, 1.0, 2.0)
    b = array(2, 1.0, 3.0)
    assert compare_losses(a, b) == Losses(False, 4, 4, 4, first=2, largest=1.0)
    single = Row(made_run(tmp_path, 3, metrics=losses(5, 2.0)))
    for one in (single, array(4, 2.0, first=1)):
        assert compare_losses(a.tasks[1], one) == Losses(True, 2, 2, 2)


def test_task_of_a_sweep_and_its_replay_have_no_differences(tmp_path: Path) -> None:
    job = {"nodes": 1, "array": "0-1", "sweep": {"grid": {"lr": ["1", "2"]}}}
    task = {"id": "1_1", "state": "COMPLETED", "exit_code": 0, "config": {"lr": 2, "base": 7}}
    swept = made_run(tmp_path, 1, args=["--base", "7"], job=job, tasks=[task], cost_usd=None)
    alone = {"nodes": 1, "array": None, "sweep": None, "env": {"SWEEP_LR": "2"}}
    again = made_run(tmp_path, 2, args=["--base", "7", "--lr", "2"], job=alone, elapsed_s=None)
    assert compare(Row(swept).tasks[0], Row(again)) == ()


def test_memory_that_no_node_has_is_left_out() -> None:
    host = {"cpu_model": "EPYC", "memory_total_mib": 4000}
    assert hardware_of({"hosts": {"a": host}}) == {"nodes": "EPYC, 3.9 GiB"}
    assert hardware_of({"hosts": {"a": {**host, "memory_total_mib": 10**400}}}) == {"nodes": "EPYC"}
