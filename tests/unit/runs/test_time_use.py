"""How runs used their time, from what `collect` leaves in their folders."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.runs import time_use
from clusterctl.runs.find import Row
from clusterctl.runs.time_use import total_time_use
from clusterctl.state.run_record import RunRecord, TaskRecord
from tests.unit.runs.made import TIME, made_run, time_use_in

NODE = "demo-train-1"
Span = tuple[int, int]


def made(
    out: Path,
    spans: Sequence[Span],
    *,
    events: Iterable[tuple[float, str, Mapping[str, Any]]] = (),
    records: Iterable[tuple[float, Mapping[str, Any]]] = (),
    samples: Iterable[tuple[float, Mapping[str, Any]]] = (),
    tres: str = "cpu=2,node=1",
    suspended_s: int = 0,
) -> RunRecord:
    """A run that was submitted at 0, with these attempts. All times are seconds since then.

    events: time, name and fields; records, samples: time and fields.
    """
    attempts = [
        {
            "start_time": TIME + start,
            "end_time": TIME + end,
            "nodes": [NODE],
            "suspended_s": suspended_s,
        }
        for start, end in spans
    ]
    times = {"start_time": TIME + spans[0][0], "end_time": TIME + spans[-1][1]}
    task = {
        "id": "1",
        "state": "COMPLETED",
        "nodes": [NODE],
        "attempts": attempts,
        "tres": tres,
        **times,
    }
    lines = [{"time": TIME + at, **record} for at, record in records]
    run = made_run(out, 1, metrics=lines, tasks=[task], submit_time=TIME, **times)
    listed = [{"time": TIME + at, "event": name, **fields} for at, name, fields in events]
    (run.directory / "job.events").write_text("".join(f"{json.dumps(each)}\n" for each in listed))
    if written := [{"kind": "sample", "time": TIME + at, **each} for at, each in samples]:
        (run.directory / "telemetry").mkdir()
        host = {"kind": "host", "time": written[0]["time"] - 1, "cpus": [0, 1]}
        text = "".join(f"{json.dumps(each)}\n" for each in (host, *written))
        (run.directory / "telemetry" / f"{NODE}.jsonl").write_text(text)
    return run


def uses(run: RunRecord) -> dict[str, float]:
    """The seconds by use, which sum to the time of the run."""
    (task,) = run.tasks
    found = time_use_in(run, task)
    assert run.submit_time is not None
    assert task.end_time is not None
    assert sum(found.values()) == pytest.approx(task.end_time - run.submit_time, abs=1e-3)
    return {use: round(seconds, 3) for use, seconds in found.items()}


def started(at: float, **fields: Any) -> tuple[float, str, Mapping[str, Any]]:
    return at, "start", {"nodes": [NODE], "restarts": 0, **fields}


def ended(at: float, status: int = 0) -> tuple[float, str, Mapping[str, Any]]:
    return at, "end", {"status": status}


def measured(at: float, step: int, seconds: float = 1.0, data: float = 0.0) -> tuple[float, Any]:
    """An iteration whose program tells its time."""
    iteration = {"kind": "iteration", "step": step, "seconds": seconds, "data_ms": 1e3 * data}
    return at, iteration


def test_time_use_divides_what_a_program_measured(tmp_path: Path) -> None:
    """Two steps, a checkpoint and an evaluation; 3 seconds between them are not measured."""
    run = made(
        tmp_path,
        [(10, 60)],
        events=[started(11), ended(55)],
        records=[
            measured(30, 1, 4.0, 1.0),
            measured(34, 2, 4.0, 1.5),
            (39, {"kind": "checkpoint", "step": 2, "stall_s": 2.0}),
            (45, {"kind": "evaluation", "step": 2, "seconds": 6.0, "save_s": 0.5, "loss": 1.0}),
            (50, {"kind": "result", "loss": 1.0}),
        ],
    )
    assert uses(run) == {
        "queue": 10,
        "start-up": 16,
        "useful": 5.5,
        "checkpoint": 2.5,
        "data": 2.5,
        "evaluation": 6,
        "running": 7.5,
        "exit": 10,
    }


def test_time_use_of_packed_tasks_is_of_their_own_programs(tmp_path: Path) -> None:
    """The job has run from second 10 to 60, its first task to 25, and its last has not run."""
    run = made(tmp_path, [(10, 60)], events=[started(11), ended(55)])
    times = {"start_time": TIME + 12, "end_time": TIME + 25}
    attempt = {**times, "nodes": [NODE]}
    packed = [
        TaskRecord(id="1_0", state="COMPLETED", nodes=(NODE,), attempts=(attempt,), **times),
        TaskRecord(id="1_1", state="CANCELLED"),
    ]
    run = run.model_copy(update={"packed": tuple(packed)})
    first, last = run.packed
    assert time_use_in(run, first) == {"queue": 12, "running": 13}
    assert time_use_in(run, last) == {}
    assert time_use_in(run, run.tasks[0])["queue"] == 10


def test_first_epoch_with_the_number_0_is_not_redone(tmp_path: Path) -> None:
    records = [(10 + 5 * epoch, {"epoch": epoch, "loss": 4 - epoch}) for epoch in range(4)]
    run = made(tmp_path, [(0, 25)], events=[started(0), ended(25)], records=records)
    assert "redone" not in uses(run)


def test_suspended_time_is_no_step_and_costs_nothing(tmp_path: Path) -> None:
    """30 steps of a second; after the 8th, Slurm stopped the job for 70 s."""
    records = [(at + (70 if at > 8 else 0), {"step": at, "loss": 1.0}) for at in range(1, 31)]
    run = made(tmp_path, [(0, 100)], records=records, suspended_s=70)
    assert uses(run) == {"useful": 30, "suspended": 70}
    (task,) = run.tasks
    assert task.elapsed_s == 30
    assert task.node_hours == pytest.approx(30 / 3600)


def test_time_use_counts_repeated_steps_as_redone(tmp_path: Path) -> None:
    """The first attempt reached step 4, and the second began with step 3."""
    run = made(
        tmp_path,
        [(0, 20), (50, 70)],
        events=[started(1), ended(18, 1), started(50, restarts=1), ended(68)],
        records=[
            *(measured(at, step) for at, step in ((4, 1), (5, 2), (6, 3), (7, 4))),
            *(measured(at, step) for at, step in ((55, 3), (56, 4), (57, 5))),
        ],
    )
    assert uses(run) == {
        "queue": 30,
        "start-up": 3 + 4,
        "useful": 5,
        "redone": 2,
        "running": 11 + 11,
        "exit": 2 + 2,
    }


def test_time_use_without_measured_times_takes_steps_as_useful(tmp_path: Path) -> None:
    """A record each ten steps: an interval in which steps were repeated is split by their
    number.
    """
    run = made(
        tmp_path,
        [(0, 100), (110, 200)],
        events=[started(0), ended(95, 1), started(110, restarts=1), ended(200)],
        records=[
            *((at, {"step": step, "loss": 1.0}) for at, step in ((30, 10), (40, 20), (50, 25))),
            *((at, {"step": step, "loss": 1.0}) for at, step in ((150, 20), (160, 30), (170, 40))),
        ],
    )
    assert uses(run) == {
        "queue": 10,
        "start-up": 20 + 30,
        "useful": 30 + 5 + 10,
        "redone": 10 + 5,
        "running": 45 + 30,
        "exit": 5,
    }


def test_time_use_reads_the_records_that_a_resumed_run_removed(tmp_path: Path) -> None:
    lost = {
        "step": 5,
        "begin": TIME + 12.0,
        "end": TIME + 18.0,
        "seconds": 4.0,
        "data_s": 1.0,
        "stall_s": 0.5,
        "evaluation_s": 1.0,
    }
    run = made(
        tmp_path,
        [(0, 20), (20, 40)],
        events=[
            started(0),
            ended(20, 1),
            started(20, restarts=1),
            ended(40),
        ],
        records=[
            measured(11, 1),
            measured(12, 2),
            (25, {"kind": "run", "done": 2, "lost": lost}),
            *(measured(29 + step, step) for step in (3, 4, 5, 6)),
            (36, {"kind": "result", "loss": 1.0}),
        ],
    )
    assert uses(run) == {
        "start-up": 10 + 11,
        "useful": 2 + 3 + 1,
        "redone": 3,
        "checkpoint": 0.5,
        "data": 1,
        "evaluation": 1,
        "running": 0.5 + 2 + 1,
        "exit": 4,
    }


def test_time_use_takes_the_rounding_of_slurm_from_the_start_up(tmp_path: Path) -> None:
    """Slurm has cut 0.8 s from the start, and 0.75 s from the end."""
    run = made(
        tmp_path,
        [(10, 30)],
        events=[started(10.8), ended(30.75)],
        records=[measured(21.0, 1, 4.0, 1.0), measured(30.5, 2, 9.5)],
    )
    assert uses(run) == {
        "queue": 10,
        "start-up": 17 - 10.75,
        "useful": 12.5,
        "data": 1,
        "running": 0.25,
    }


def test_time_use_without_metrics_is_running(tmp_path: Path) -> None:
    run = made(tmp_path, [(3, 33)], events=[started(4), ended(30)])
    assert uses(run) == {"queue": 3, "start-up": 1, "running": 26, "exit": 3}


def test_time_use_after_the_last_trace_is_unknown(tmp_path: Path) -> None:
    """Without an end, the job is known to have run until its last sample of telemetry."""
    busy = {"cpu_percent": 90.0}
    run = made(
        tmp_path, [(0, 600)], events=[started(2)], samples=[(at, busy) for at in range(10, 200, 10)]
    )
    assert uses(run) == {"start-up": 2, "running": 188, "unknown": 410}
    (tmp_path / "none").mkdir()
    assert uses(made(tmp_path / "none", [(0, 600)])) == {"unknown": 600}


def test_time_use_counts_staging_apart_from_the_start_up(tmp_path: Path) -> None:
    run = made(
        tmp_path,
        [(10, 100)],
        events=[started(11), (41, "staged", {"since": TIME + 12}), ended(99)],
        records=[(60, {"step": 1, "step_s": 10}), (70, {"step": 2, "step_s": 10})],
    )
    found = uses(run)
    assert (found["queue"], found["staging"]) == (10, 29)
    assert found["start-up"] == pytest.approx(50 - 10 - 29, abs=1)


def test_time_use_counts_a_hang_once(tmp_path: Path) -> None:
    """The hang lies within a step that the program measured."""
    run = made(
        tmp_path,
        [(0, 200)],
        events=[
            started(0),
            (90, "hang", {"seconds": 70, "summary": "rank 0", "action": "warn"}),
            (120, "progress", {}),
            ended(150),
        ],
        records=[measured(20, 1, 10.0), measured(130, 2, 110.0, 2.0)],
    )
    assert uses(run) == {
        "start-up": 10,
        "useful": 10 + 10,
        "hung": 100,
        "running": 20,
        "exit": 50,
    }


def test_time_use_ends_a_hang_with_the_first_metric_after_it(tmp_path: Path) -> None:
    """The progress was noticed a moment later."""
    run = made(
        tmp_path,
        [(0, 200)],
        events=[
            started(0),
            (90, "hang", {"seconds": 70, "summary": "rank 0", "action": "warn"}),
            (121, "progress", {}),
            ended(150),
        ],
        records=[measured(20, 1, 10.0), measured(120, 2), measured(121.5, 3)],
    )
    assert uses(run) == {"start-up": 10, "useful": 11, "hung": 100, "running": 29, "exit": 50}


QUIET = {
    "cpu_percent": 0.3,
    "net_rx_bytes_per_s": {"eth0": 80.0},
    "net_tx_bytes_per_s": {"eth0": 50.0},
    "gpus": [{"index": 0, "util": 0}],
}


@pytest.mark.parametrize(
    ("samples", "idle"),
    [
        pytest.param([QUIET] * 15, 150, id="nothing"),
        pytest.param([QUIET] * 5, 0, id="shorter than a minute"),
        pytest.param([{**QUIET, "cpu_percent": 6.0}] * 15, 0, id="a processor"),
        pytest.param([{**QUIET, "gpus": [{"util": 1}]}] * 15, 0, id="a GPU"),
        pytest.param([{**QUIET, "gpus": [{"util": None}]}] * 15, 0, id="a GPU that does not tell"),
        pytest.param(
            [{**QUIET, "gpus": [{"util": 0, "active_percent": 5.0}]}] * 15, 0, id="between looks"
        ),
        pytest.param(
            [{**QUIET, "gpus": [{"util": 0, "active_percent": 0.02}]}] * 15, 150, id="its counters"
        ),
        pytest.param([{**QUIET, "gpus": None}] * 15, 0, id="GPUs unknown"),
        pytest.param([{**QUIET, "net_rx_bytes_per_s": {"a": 1e6}}] * 15, 0, id="a download"),
        pytest.param([{**QUIET, "net_rx_bytes_per_s": {"a": "0"}}] * 15, 0, id="damaged"),
        pytest.param([{"cpu_percent": 0.0}] * 15, 0, id="network unknown"),
    ],
)
def test_time_use_is_idle_only_if_everything_was_seen_to_be(
    tmp_path: Path, samples: Sequence[Mapping[str, Any]], idle: float
) -> None:
    run = made(
        tmp_path,
        [(0, 200)],
        events=[started(0), ended(200)],
        samples=[(11 + 10 * (number + 1), each) for number, each in enumerate(samples)],
    )
    host, *rest = (run.directory / "telemetry" / f"{NODE}.jsonl").read_text().splitlines()
    early = {**json.loads(host), "time": TIME + 11}
    (run.directory / "telemetry" / f"{NODE}.jsonl").write_text(
        "\n".join([json.dumps(early), *rest])
    )
    parts = {"idle": idle, "running": 200 - idle}
    assert uses(run) == {use: seconds for use, seconds in parts.items() if seconds}


def test_time_of_gpus_that_telemetry_does_not_see_is_not_idle(tmp_path: Path) -> None:
    """Without pynvml, telemetry has no GPUs, and a program may wait for them."""
    samples = [(10 * number, {**QUIET, "gpus": []}) for number in range(1, 20)]
    events = [started(0), ended(200)]
    run = made(tmp_path, [(0, 200)], events=events, samples=samples, tres="node=1,gres/gpu=2")
    assert uses(run) == {"running": 200}


def test_time_use_does_not_join_the_telemetry_of_two_attempts(tmp_path: Path) -> None:
    """After a start, the first sample tells nothing about the time before it."""
    run = made(
        tmp_path,
        [(0, 40), (80, 110)],
        events=[started(0), ended(40, 75), started(80, restarts=1), ended(110)],
        samples=[(at, QUIET) for at in (10, 20, 30, 40)],
    )
    again = [{"kind": "host", "time": TIME + 80, "cpus": [0, 1]}]
    again += [{"kind": "sample", "time": TIME + at, **QUIET} for at in (90, 100, 110)]
    with (run.directory / "telemetry" / f"{NODE}.jsonl").open("a") as file:
        file.writelines(f"{json.dumps(line)}\n" for line in again)
    assert uses(run) == {"queue": 40, "running": 70}


def test_time_use_of_a_job_that_never_ran_is_its_queue(tmp_path: Path) -> None:
    run = made_run(
        tmp_path,
        1,
        state="CANCELLED",
        tasks=[{"id": "1", "state": "CANCELLED", "end_time": TIME + 40}],
        submit_time=TIME,
        start_time=None,
        end_time=TIME + 40,
    )
    assert time_use_in(run, run.tasks[0]) == {"queue": 40}
    unknown = run.model_copy(update={"submit_time": None})
    assert time_use_in(unknown, run.tasks[0]) == {}


@pytest.mark.parametrize(
    "text",
    [
        '{"kind": "iteration", "step": 1, "time": 1e300, "seconds": 1e308, "data_ms": -5}',
        '{"kind": "iteration", "step": 1, "time": TIME, "seconds": 1e308, "data_ms": 1e308}',
        '{"kind": "iteration", "step": [], "time": TIME, "seconds": "x", "data_ms": {}}',
        '{"kind": "checkpoint", "step": 1, "time": TIME, "stall_s": 1e308}',
        '{"kind": "run", "time": TIME, "lost": {"begin": -1e308, "end": TIME, "seconds": 1e308}}',
        '{"kind": "run", "time": TIME, "lost": {"begin": NaN, "end": []}}',
        '{"kind": "run", "time": TIME, "lost": [1]}',
        '{"step": 1, "time": TIME, "x": 1}\n{"step": 1, "time": TIME, "x": 1}',
        '{"step": -1e308, "time": TIME, "x": 1}\n{"step": 1e308, "time": TIME, "x": 1}',
        '{"step": 1, "time": TIME, "x": 1}\n{"time": TIME, "x": 1}\n{"step": null, "time": TIME}',
        "\0\n[[[",
    ],
)
def test_time_use_of_damaged_metrics_has_all_of_the_time(tmp_path: Path, text: str) -> None:
    run = made(tmp_path, [(5, 100)], events=[started(5), ended(90)])
    (run.directory / "metrics.jsonl").write_text(text.replace("TIME", str(TIME + 50)))
    found = uses(run)
    assert found["queue"] == 5
    assert all(seconds > 0 for seconds in found.values())


def test_time_use_of_very_many_records_is_not_divided(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = made(
        tmp_path,
        [(0, 50)],
        events=[started(0), ended(50)],
        records=[measured(at, at) for at in range(1, 40)],
    )
    monkeypatch.setattr(time_use, "_MOST_RECORDS", 38)
    assert uses(run) == {"running": 50}


def test_time_use_in_the_record_counts_and_tasks_are_summed(tmp_path: Path) -> None:
    tasks = [
        {"id": f"7_{n}", "state": "COMPLETED", "time_use": {"queue": n, "useful": 10.0}}
        for n in range(3)
    ]
    run = made_run(tmp_path, 7, tasks=tasks)
    assert total_time_use([Row(run)]) == {"queue": 3, "useful": 30}
    assert total_time_use(Row(run).tasks[2:]) == {"queue": 2, "useful": 10}
