"""How jobs ended, in values and words."""

from __future__ import annotations

from dataclasses import replace
from itertools import starmap

from clusterctl.scheduler.base import JobInfo, JobState, StepInfo
from clusterctl.scheduler.ends.diagnosis import (
    Diagnosis,
    Note,
    by_cause,
    cause_column,
    notices_of,
    told_of_tasks,
)
from clusterctl.scheduler.ends.ending import Ending
from clusterctl.scheduler.ends.judge import canceller_of
from clusterctl.state.attempts import AttemptRecord

JOB = JobInfo(
    number=7,
    name="grid",
    user="ada",
    state=JobState.FAILED,
    reason="NonZeroExitCode",
    exit_code=3,
    nodes=("n1", "n2"),
    start_time=100,
    end_time=109,
    suspended_s=7,
)


def test_suspended_time_is_no_time_of_the_job() -> None:
    ending = Ending.of([JOB])
    assert (ending.elapsed_s, ending.suspended_s) == (2, 7)
    assert ending.node_hours == 4 / 3600
    assert "2s" in ending.outcome


def test_array_that_goes_on_is_told_by_a_task_that_goes_on() -> None:
    going_on = replace(JOB, task=2, state=JobState.RUNNING, exit_code=None, end_time=None)
    ending = Ending.of([replace(JOB, task=1), going_on])
    assert (ending.job_id, ending.state, ending.exit_code) == ("7", "RUNNING", None)
    assert (ending.end_time, dict(ending.states)) == (None, {"FAILED": 1, "RUNNING": 1})


def test_nodes_are_the_present_ones_until_the_job_ends() -> None:
    attempts = tuple(AttemptRecord(start_time=at, nodes=(f"n{at}",)) for at in (1, 2))
    job = replace(JOB, nodes=("n2",), attempts=attempts)
    assert Ending.of([job]).nodes == ("n1", "n2")
    assert Ending.of([replace(job, state=JobState.RUNNING)]).nodes == ("n2",)
    assert Ending.of([replace(job, state=JobState.PENDING, nodes=())]).nodes == ()


def test_several_tasks_take_the_time_from_start_to_end() -> None:
    attempts = tuple(AttemptRecord(start_time=at, end_time=at + 60) for at in (100, 1000))
    task = replace(JOB, task=1, start_time=100, end_time=1060, suspended_s=0, attempts=attempts)
    ending = Ending.of([task], job_id="7")
    assert (ending.elapsed_s, ending.attempts) == (120, attempts)
    ending = Ending.of([task, replace(task, task=2)], job_id="7")
    assert (ending.elapsed_s, ending.attempts) == (960, ())


def test_reason_of_waiting_is_not_that_of_the_end() -> None:
    """Slurm keeps it of a job that was requeued."""
    requeued = replace(JOB, reason="BeginTime")
    assert "(exit 3)" in Ending.of([requeued]).outcome
    assert "BeginTime" in Ending.of([replace(requeued, state=JobState.PENDING)]).outcome


def test_job_of_less_than_a_second_has_a_duration() -> None:
    short = replace(JOB, end_time=100, suspended_s=0)
    assert "after 0s" in Ending.of([short]).outcome
    assert "after" not in Ending.of([replace(short, nodes=())]).outcome


def test_user_that_cancelled_a_step_has_not_cancelled_the_job() -> None:
    job = StepInfo("9")
    telemetry = StepInfo("9.0", cancelled_by="10000")
    assert canceller_of([job, telemetry]) == ""
    assert canceller_of([replace(job, cancelled_by="1001"), telemetry]) == "1001"
    assert canceller_of([]) == ""


def test_state_of_a_snapshot_is_told_with_its_time() -> None:
    for states in ({"RUNNING": 1}, {"FAILED": 1, "RUNNING": 1}):
        ending = Ending(job_id="7", state="RUNNING", states=states, when="when it was collected")
        assert ending.outcome.endswith("RUNNING when it was collected")


def test_long_list_of_nodes_is_told_by_its_first_nodes() -> None:
    nodes = tuple(f"n{number}" for number in range(500))
    assert "n[0-499]" in Ending(job_id="7", nodes=nodes).outcome
    outcome = Ending(job_id="7", nodes=nodes[::2]).outcome
    assert "n30 and 234 more" in outcome
    assert "n32" not in outcome


def completed(job_id: str, text: str) -> Diagnosis:
    note = Note("log-ends-with-error", f"job {job_id} is COMPLETED, but {text}")
    return Diagnosis(job_id=job_id, state="COMPLETED", code="completed", notes=(note,))


def test_note_on_several_tasks_is_told_once() -> None:
    found = {
        job_id: completed(job_id, text)
        for job_id, text in {"7_1": "x: not found", "7_2": "no y", "7_3": "x: not found"}.items()
    }
    first, other = notices_of(found.values())
    assert (first.code, "7_1" in first, "7_3" in first) == ("log-ends-with-error", True, True)
    assert ("7_2" in other, "7_3" in other) == (True, False)


def test_equal_causes_of_tasks_are_told_once_on_whatever_host() -> None:
    ends = {
        "7_1": ("n1", "exit code 1 on n1"),
        "7_2": ("n2", "SIGKILL"),
        "7_3": ("n3", "exit code 1 on n3"),
    }
    found = [
        Diagnosis(job_id=job_id, state="FAILED", host=host, cause=cause)
        for job_id, (host, cause) in ends.items()
    ]
    assert cause_column(found) == {"7_1": "exit code 1 on n1", "7_2": "SIGKILL", "7_3": "as 7_1"}
    assert [*starmap(told_of_tasks, by_cause(found))] == [
        "7_1, 7_3 FAILED: exit code 1",
        "7_2 FAILED: SIGKILL",
    ]


def test_tasks_with_the_same_exit_code_and_different_last_lines_are_told_apart() -> None:
    found = [
        Diagnosis(job_id=f"7_{at}", state="FAILED", code=code, cause="exit code 1", last_line=line)
        for at, (code, line) in enumerate(
            [
                ("exit-code", "no x"),
                ("exit-code", "no y"),
                ("out-of-memory", "a"),
                ("out-of-memory", "b"),
            ]
        )
    ]
    assert [job_ids for _, job_ids in by_cause(found)] == [["7_0"], ["7_1"], ["7_2", "7_3"]]
    assert next(iter(cause_column(found).values())).endswith("| no x")


def test_command_of_the_log_names_the_job_once() -> None:
    fix = "not known; the whole log: `clusterctl logs 7`"
    diagnosis = Diagnosis(job_id="7", code="exit-code", cause="x", fix=fix, lines=("x",))
    ending = Ending(job_id="7", state="FAILED", diagnosis=diagnosis)
    assert ending.fix.count("clusterctl logs 7") == 1
    of_other = replace(ending, logs="demo/7")
    assert of_other.fix == "not known; the whole log: `clusterctl logs demo/7`"
    without_lines = replace(diagnosis, fix="rename x", lines=())
    assert Ending(job_id="7", diagnosis=without_lines).fix == "rename x"
