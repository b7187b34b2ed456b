"""What runs asked for and used, and what they should ask for next time."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs.find import Row
from clusterctl.runs.resources import Resources, resources_of, used_by
from clusterctl.scheduler.slurm.accounting import StepsUse, uses_by_job
from clusterctl.state.run_record import RunRecord
from tests.unit.runs.made import TIME, made_run

NODE = "demo-train-1"
ASKED = "cpu=8,mem=64G,node=1,billing=8"


def sample(at: float, **fields: Any) -> dict[str, Any]:
    quiet = {"cpu_percent": 12.5, "job_memory_mib": 4096, "gpus": []}
    return {"kind": "sample", "time": TIME + at, **quiet, **fields}


def samples(count: int = 60, **fields: Any) -> list[dict[str, Any]]:
    """A sample each ten seconds: one of eight cores is busy, and 4 GiB are in use."""
    return [sample(10 * (number + 1), **fields) for number in range(count)]


def step(name: str, begin: int, end: int, **more: Any) -> dict[str, Any]:
    """A step in the JSON of sacct 24.11. mib: the most memory of a task. cpu_s: of all tasks."""
    tasks = more.get("tasks", 1)
    most = [{"type": "mem", "name": "", "count": more.get("mib", 0) << 20}]
    total = [{"type": "cpu", "name": "", "count": 1000 * more.get("cpu_s", 0)}]
    span = {
        "start": {"set": True, "infinite": False, "number": TIME + begin},
        "end": {"set": True, "infinite": False, "number": TIME + end},
        "total": {"seconds": 0, "microseconds": 0},
    }
    return {
        "step": {"id": f"1.{name}", "name": name},
        "time": span,
        "tasks": {"count": tasks},
        "nodes": {"count": 1},
        "tres": {"requested": {"max": most, "total": total}},
    }


def ran(
    out: Path,
    *,
    seconds: int = 600,
    telemetry: Sequence[Mapping[str, Any]] = (),
    steps: Sequence[Mapping[str, Any]] = (),
    accounting: str = "",
    task: Mapping[str, Any] = {},
    cores: int = 8,
    **fields: Any,
) -> Resources:
    whole = {
        "id": "1",
        "state": "COMPLETED",
        "nodes": [NODE],
        "start_time": TIME,
        "end_time": TIME + seconds,
        "tres": ASKED,
        "time_limit_s": 86400,
        **task,
    }
    run = made_run(out, 1, tasks=[whole], **{"tasks_per_node": 1, **fields})
    (run.directory / "telemetry").mkdir()
    host = {"kind": "host", "time": TIME, "cpus": [*range(cores)]}
    text = "".join(f"{json.dumps(line)}\n" for line in (host, *telemetry))
    (run.directory / "telemetry" / f"{NODE}.jsonl").write_text(text)
    if steps:
        job = {"job_id": 1, "array": {"job_id": 0, "task_id": {"set": False}}, "steps": steps}
        accounting = json.dumps({"jobs": [job]})
    return resources_of(Row(recorded(run, accounting)))


def recorded(run: RunRecord, accounting: str = "") -> RunRecord:
    """Return the run with what its tasks used, as `collect` records it."""
    steps = uses_by_job(accounting)
    tasks = tuple(
        task.model_copy(
            update={
                "used": used_by(task.folder_in(run.directory), task, steps.get(task.id, StepsUse()))
            }
        )
        for task in run.tasks
    )
    return run.model_copy(update={"tasks": tasks})


def shares(resources: Resources) -> dict[str, float | None]:
    return {
        each.resource: None if each.share is None else round(each.share, 1)
        for each in resources.amounts
    }


def test_resources_by_telemetry_have_shares_and_flags(tmp_path: Path) -> None:
    resources = ran(tmp_path, telemetry=samples())
    assert shares(resources) == {"memory": 6.2, "time": 0.7, "CPUs": 12.5}
    assert resources.flags == ["--mem 5GiB", "--time 15m", "--cpus 2"]
    assert len(resources.margins) == 3


def test_resources_by_accounting_alone_have_larger_margins(tmp_path: Path) -> None:
    """The program's two ranks had 2 GiB each; the script and telemetry ran beside them."""
    steps = [
        step("batch", 0, 600, mib=20, cpu_s=1),
        step("telemetry", 0, 600, mib=44, cpu_s=1),
        step("python", 1, 599, mib=2016, cpu_s=598, tasks=2),
    ]
    resources = ran(tmp_path, steps=steps)
    assert shares(resources) == {"memory": 6.2, "time": 0.7, "CPUs": 12.5, "tasks": None}
    assert resources.flags == ["--mem 6GiB", "--time 15m", "--cpus 2"]


def test_memory_of_nodes_that_a_job_has_alone_is_its_own(tmp_path: Path) -> None:
    """Without a control group of the job, as on local nodes, that of the node counts."""
    lines = samples(job_memory_mib=None, memory_used_mib=4096)
    assert shares(ran(tmp_path / "alone", telemetry=lines))["memory"] == 6.2
    shared = {"tres": "cpu=2,mem=64G,node=1"}
    assert "memory" not in shares(ran(tmp_path / "shared", telemetry=lines, task=shared))


def test_memory_of_steps_that_follow_each_other_is_not_summed(tmp_path: Path) -> None:
    steps = [step("a", 10 * number, 10 * number + 10, mib=1024) for number in range(9)]
    (memory, _) = ran(tmp_path, steps=steps).amounts[:2]
    assert round(memory.share or 0, 1) == 1.6


@pytest.mark.parametrize(
    ("fields", "flags"),
    [
        pytest.param({"state": "FAILED"}, [], id="failed"),
        pytest.param({"state": "TIMEOUT"}, [], id="at its limit"),
        pytest.param({"state": "OUT_OF_MEMORY"}, [], id="out of memory"),
        pytest.param(
            {
                "attempts": [
                    {"start_time": TIME, "end_time": TIME + 400, "nodes": [NODE]},
                    {"start_time": TIME + 400, "end_time": TIME + 600, "nodes": [NODE]},
                ]
            },
            ["--mem 5GiB", "--cpus 2"],
            id="restarted",
        ),
        pytest.param({"time_limit_s": None}, ["--mem 5GiB", "--cpus 2"], id="no limit"),
        pytest.param({"time_limit_s": 1300}, ["--mem 5GiB", "--cpus 2"], id="near its limit"),
        pytest.param(
            {"tres": "cpu=8,mem=6G,node=1"}, ["--time 15m", "--cpus 2"], id="little memory"
        ),
        pytest.param({"tres": "cpu=2,mem=64G,node=1"}, ["--mem 5GiB", "--time 15m"], id="shared"),
        pytest.param({"tres": ""}, [], id="resources unknown"),
    ],
)
def test_advice_is_only_what_the_same_job_survives(
    tmp_path: Path, fields: Mapping[str, Any], flags: Sequence[str]
) -> None:
    assert [*ran(tmp_path, telemetry=samples(), task=fields).flags] == flags


def test_short_run_has_no_advice(tmp_path: Path) -> None:
    """There is too little evidence of the memory, and nothing to save in time."""
    resources = ran(tmp_path, seconds=120, telemetry=samples(12))
    assert shares(resources)["memory"] == 6.2
    assert resources.flags == []
    (tmp_path / "accounted").mkdir()
    steps = [step("python", 1, 500, mib=100, cpu_s=9)]
    assert ran(tmp_path / "accounted", seconds=500, steps=steps).flags == ["--time 15m"]


def test_advice_follows_a_short_peak(tmp_path: Path) -> None:
    """One sample in sixty has six busy cores and 40 GiB."""
    lines = samples()
    lines[30] |= {"cpu_percent": 75.0, "job_memory_mib": 40960}
    assert ran(tmp_path, telemetry=lines).flags == ["--time 15m"]


def gpus(*utils: float | None) -> list[dict[str, Any]]:
    return [{"index": index, "util": util} for index, util in enumerate(utils)]


@pytest.mark.parametrize(
    ("utils", "advised"),
    [
        pytest.param((90, 0, 0, 0), ["--gpus 1"], id="one is used"),
        pytest.param((90, 0, 3, 0), ["--gpus 2"], id="one is hardly used"),
        pytest.param((0, 0, 0, 0), [], id="none is used"),
        pytest.param((90, 0, None, 0), [], id="one does not tell"),
        pytest.param((90, 0), [], id="not all are seen"),
    ],
)
def test_unused_gpus_are_left_out_next_time(
    tmp_path: Path, utils: Sequence[float | None], advised: Sequence[str]
) -> None:
    task = {"tres": "cpu=8,mem=5G,node=1,gres/gpu=4", "time_limit_s": 900}
    lines = samples(gpus=gpus(*utils), cpu_percent=90.0)
    assert ran(tmp_path, telemetry=lines, task=task).flags == advised


def test_array_is_advised_by_its_largest_task(tmp_path: Path) -> None:
    tasks = [
        {
            "id": f"1_{number}",
            "state": "COMPLETED",
            "nodes": [NODE],
            "start_time": TIME,
            "end_time": TIME + 600 * (number + 1),
            "tres": ASKED,
            "time_limit_s": 86400,
        }
        for number in range(2)
    ]
    run = made_run(tmp_path, 1, tasks=tasks, tasks_per_node=1)
    for number in range(2):
        folder = run.directory / f"task-{number}" / "telemetry"
        folder.mkdir(parents=True)
        lines = samples(job_memory_mib=4096 * (number + 1))
        (folder / f"{NODE}.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    run = recorded(run)
    assert resources_of(Row(run)).flags == ["--mem 10GiB", "--time 30m"]
    failed = run.model_copy(
        update={"tasks": (run.tasks[0], run.tasks[1].model_copy(update={"state": "FAILED"}))}
    )
    assert resources_of(Row(failed)).flags == []


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        '{"jobs": 7}',
        '{"jobs": [[], {"job_id": {}, "steps": [7, {"tasks": []}]}]}',
        "[" * 9999,
    ],
)
def test_damaged_accounting_and_telemetry_tell_nothing(tmp_path: Path, text: str) -> None:
    damaged = samples(cpu_percent=[], job_memory_mib="x", gpus=[7])
    assert shares(ran(tmp_path, telemetry=damaged, accounting=text)) == {"time": 0.7}


@pytest.mark.parametrize(
    "impossible",
    [
        {"job_memory_mib": None, "memory_used_mib": 1e305},
        {"cpu_percent": 1e308},
        {"gpus": [{"index": 0, "util": 1e308}]},
    ],
)
def test_record_of_a_job_that_wrote_impossible_telemetry_can_be_read(
    tmp_path: Path, impossible: Mapping[str, Any]
) -> None:
    task = {"tres": f"{ASKED},gres/gpu=1"}
    ran(tmp_path, telemetry=samples(**impossible), task=task)
    run = recorded(RunRecord.load(tmp_path / "demo-1-train"))
    assert RunRecord.model_validate_json(run.as_json()).tasks == run.tasks
