"""What differs between two runs, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import CollectError
from clusterctl.runs.compare import compare
from clusterctl.runs.find import Row
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

READ = {"kind": "run", "data": {"name": "text:/x/a", "bytes": 5, "sha256": {"a.b.c.d.txt": "c" * 64}}}


def differences(out: Path, a: dict[str, Any], b: dict[str, Any]) -> dict[tuple[str, str], tuple[Any, Any]]:
    both = {
        "args": ["--lr", "0.1", "--out", "x"],
        "files": {"train.py": "a" * 64},
        "job": {"bundled": None, "script": "/home/ada/train.py", "nodes": 2, "env": {"SEED": "1"}},
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
        ({"client": {"requirements": "numpy==2.1\nrich==1.0"}}, {("environment", "numpy"): ("2.0", "2.1")}),
        ({"hosts": {"demo-train-9": {**HOST, "host": "demo-train-9", "boot_id": "y"}}}, {}),
        ({"hosts": {"demo-train-1": {**HOST, "cpu_model": "Xeon"}}}, {("hardware", "nodes")}),
        ({"hosts": {"demo-train-1": [1]}}, {("hardware", "nodes"), ("environment", "python")}),
        ({"metrics": [READ, {"loss": 1.5}]}, {("data", "bytes"), ("data", "sha256.a.b.c.d.txt")}),
        ({"metrics": [{**READ, "data": [1]}, {"loss": 1.5}]}, {}),
        ({"metrics": [{"loss": 1.25}]}, {("result", "loss"): (1.5, 1.25)}),
        ({"state": "FAILED", "elapsed_s": 9}, {("result", "state"): ("COMPLETED", "FAILED")}),
        ({"cluster": "other"}, {("job", "cluster"): ("demo", "other")}),
    ],
)
def test_just_what_was_changed(tmp_path: Path, changed: dict[str, Any], expected: Any) -> None:
    found = differences(tmp_path, {}, changed)
    assert found == expected if isinstance(expected, dict) else set(found) == expected


def test_what_was_asked_for_and_the_commit_of_changed_code(tmp_path: Path) -> None:
    job = {"bundled": None, "script": "/elsewhere/train.py", "nodes": 4, "env": {"SEED": "2"}, "mem": None}
    client = {"requirements": "numpy==2.0\nrich==1.0\n", "git": {"commit": "2" * 40}}
    found = differences(tmp_path, {}, {"job": job, "client": client, "files": {"train.py": "c" * 64}})
    assert found == {
        ("job", "nodes"): (2, 4),
        ("job", "env.SEED"): ("1", "2"),
        ("code", "train.py"): ("a" * 12, "c" * 12),
        ("code", "commit"): ("1" * 40, "2" * 40),
    }


def test_a_run_without_its_files_is_compared_by_what_is_left(tmp_path: Path) -> None:
    a, b = made_run(tmp_path, 1), made_run(tmp_path, 2, args=["--lr", "1"])
    for path in (a.directory / "environment.json", b.directory / "source.json"):
        path.unlink()
    assert {one.section for one in compare(Row(a), Row(b))} == {"code", "configuration", "environment"}
    (a.directory / "source.json").write_text("[" * 100_000)
    with pytest.raises(CollectError, match=r"source\.json of a run can't be read"):
        compare(Row(a), Row(b))


def test_data_differ_by_what_was_read_not_by_where_it_lies(tmp_path: Path) -> None:
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
        tasks = [{"id": f"{job_id}_{n}", "state": "COMPLETED", "config": {"lr": lr * n}} for n in (0, 1)]
        return Row(made_run(tmp_path, job_id, tasks=[tasks[0], {**tasks[1], "metrics": metrics}]))

    found = {
        (one.section, one.key): (one.a, one.b) for one in compare(array(1, 0.1, 2.0), array(2, 0.2, 1.0))
    }
    assert found == {("configuration", "task 1: lr"): (0.1, 0.2), ("result", "task 1: loss"): (2.0, 1.0)}
