"""The jobs of a scaling: their numbers of nodes, order, names and arguments, and the refused
options.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import ClusterctlError
from clusterctl.jobs.prepare import read_jobs
from tests.support.messages import refused


def test_scaling_has_a_job_per_repeat_and_size() -> None:
    scaling = {"nodes": "2,1", "repeats": 2, "metric": "tokens_per_s"}
    jobs = read_jobs("train", {"scaling": scaling, "gpus": 4, "slurm": ["--nice=10"]})
    assert [job.nodes for job in jobs] == [1, 2, 1, 2]
    (name,) = {job.name for job in jobs}
    assert name.startswith("train-scaling-")
    # Slurm runs jobs of the same name one after the other.
    assert {job.slurm for job in jobs} == {("--nice=10", "--dependency=singleton")}
    record = {
        "nodes": (1, 2),
        "tasks": None,
        "gpus": None,
        "weak": False,
        "repeats": 2,
        "metric": "tokens_per_s",
        "goal": None,
        "time_to": None,
    }
    assert [job.record["scaling"] for job in jobs] == [record] * 4
    (other, *_) = read_jobs("train", {"scaling": scaling})
    assert other.name != name


def test_scaling_by_tasks_keeps_the_nodes(tmp_path: Path) -> None:
    jobs = read_jobs("gemm", {"scaling": {"tasks": "1,2,4"}, "nodes": 2})
    assert [(job.nodes, job.tasks_per_node) for job in jobs] == [(2, 1), (2, 2), (2, 4)]
    weak = {"tasks": "1,2", "weak": True}
    trained = read_jobs("train", {"scaling": weak, "args": ("--global-batch-size", "32")})
    assert [job.args[-1] for job in trained] == ["32", "64"]


def test_scaling_by_gpus_has_a_task_for_each_unless_told(tmp_path: Path) -> None:
    (tmp_path / "my.py").touch()
    script = str(tmp_path / "my.py")
    jobs = read_jobs(script, {"scaling": {"gpus": "1,8"}})
    assert [(job.gpus, job.tasks_per_node) for job in jobs] == [(1, 1), (8, 8)]
    single = read_jobs(script, {"scaling": {"gpus": "1,8"}, "tasks_per_node": 1})
    assert [(job.gpus, job.tasks_per_node) for job in single] == [(1, 1), (8, 1)]


def test_scaling_of_a_sweep_runs_its_tasks_in_turn() -> None:
    jobs = read_jobs("bench", {"scaling": {"nodes": [1, 4]}, "sweep": ["model=mlp,cnn"]})
    assert [(job.nodes, job.array) for job in jobs] == [(1, "0-1%1"), (4, "0-1%1")]


@pytest.mark.parametrize("words", [("--global-batch-size", "64"), ("--global-batch-size=64",)])
def test_weak_scaling_multiplies_the_batch_of_a_node(words: tuple[str, ...]) -> None:
    args = ("--model", "cnn", *words, "--lr=0.1")
    jobs = read_jobs("train", {"scaling": {"nodes": "1,2,4", "weak": True}, "args": args})
    batches = ("64", "128", "256")
    expected = [("--model", "cnn", "--global-batch-size", batch, "--lr=0.1") for batch in batches]
    assert [job.args for job in jobs] == expected
    twice = read_jobs(
        "bench", {"scaling": {"nodes": "1,2", "weak": True}, "args": (*words, *words)}
    )
    assert twice[1].args == ("--global-batch-size", "64", "--global-batch-size", "128")
    (_, two) = read_jobs("gemm", {"scaling": {"nodes": "1,2", "weak": True}})
    assert two.args == ()


def test_weak_scaling_leaves_an_own_program_its_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("my.py").touch()
    jobs = read_jobs("my.py", {"scaling": {"nodes": "1,2", "weak": True}, "args": ("--lr", "1")})
    assert [(job.nodes, job.args) for job in jobs] == [(1, ("--lr", "1")), (2, ("--lr", "1"))]


@pytest.mark.parametrize(
    ("code", "options"),
    [
        ("scaling-sizes", {"scaling": {"nodes": "2"}}),
        ("scaling-sizes", {"scaling": {"nodes": "1,01"}}),
        ("scaling-sizes", {"scaling": {"nodes": "0,1"}}),
        ("scaling-sizes", {"scaling": {"nodes": "1,two"}}),
        ("out-of-range", {"scaling": {"nodes": "1,2", "repeats": 0}}),
        ("goal-unknown", {"scaling": {"nodes": "1,2", "metric": "widgets"}}),
        ("scaling-of-one", {"scaling": {"nodes": "1,2", "tasks": "1,2"}}),
        ("scaling-of-one", {"scaling": {"weak": True}}),
        ("scaling-sizes", {"scaling": {"tasks": "4"}}),
        ("options-exclusive", {"scaling": {"tasks": "1,2"}, "tasks_per_node": 2}),
        ("options-exclusive", {"scaling": {"gpus": "1,2"}, "gpus": 2}),
        ("not-a-target", {"scaling": {"nodes": "1,2", "time_to": "accuracy"}}),
        ("not-a-target", {"scaling": {"nodes": "1,2", "time_to": "accuracy=high"}}),
        ("goal-unknown", {"scaling": {"nodes": "1,2", "time_to": "widgets=2"}}),
        ("goal-without-metric", {"scaling": {"nodes": "1,2", "goal": "max"}}),
        ("options-exclusive", {"scaling": {"nodes": "1,2"}, "nodes": 2}),
        ("weak", {"scaling": {"nodes": "1,2", "weak": True}}),
        (
            "options-exclusive",
            {"scaling": {"nodes": "1,2", "weak": True}, "sweep": ["global-batch-size=32,64"]},
        ),
    ],
)
def test_scaling_that_can_not_be_is_refused(code: str, options: dict[str, Any]) -> None:
    with refused(code, ClusterctlError, exit_code=2):
        read_jobs("train", options)
