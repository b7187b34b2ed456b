"""The verdict on a job after a fault, from its events, steps, checkpoints and files."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from clusterctl.rehearse.observation import CheckpointWrite, Observation
from clusterctl.rehearse.verdict import (
    Fault,
    FaultResult,
    RunWithFault,
    RunWithoutFault,
    Verdict,
    best_interval_s,
    explained,
    hangs_too_often,
    is_identical,
    judge,
)

FILES = {
    "checkpoints": {"step-20.pt": {"step-20.pt": "a"}, "model.pt": {"model.pt": "m"}},
    "outputs": {},
}
RESULTS = {**FILES, "lines": {"epoch N: loss N": 4, "begun": 1}}
START = {"time": 10.0, "event": "start"}
END = {"time": 20.0, "event": "end", "status": 0}
FAILED = {"time": 14.0, "event": "end", "status": 137}
REQUEUED = {"time": 14.1, "event": "requeue", "reason": "failed"}
AGAIN = {"time": 16.0, "event": "start"}
HANG = {"time": 15.0, "event": "hang", "summary": "rank 0 waits", "action": "end"}


def observed(
    *events: Mapping[str, Any], steps: Any = (), saved: Any = (12.0,), **values: Any
) -> Observation:
    job = Observation("7", "/jobs/x")
    checkpoints = {f"step-{at}.pt": (int(at), at, 100, 0.5) for at in saved}
    text = "".join(f"{json.dumps(event)}\n" for event in events)
    job.add({"time": 0.0, "events": text, "steps": steps, "checkpoints": checkpoints})
    job.fault_at = values.get("fault_at", 13.0)
    job.state = values.get("state", "COMPLETED")
    return job


SAVED_80 = (12.0, 14.0, 16.0)
UNDISTURBED = RunWithoutFault(
    observed(START, END, steps=[(11.0, 1), (19.0, 80)], saved=SAVED_80, fault_at=None), RESULTS
)
NO_STEPS = replace(UNDISTURBED.observed, steps=[])
STEPS = [(11.0, 1), (12.0, 20), (13.5, 35)]


def verdict(
    *events: Mapping[str, Any],
    fault: Fault = Fault.RANK_KILLED,
    results: Any = RESULTS,
    **values: Any,
) -> FaultResult:
    values.setdefault("steps", [*STEPS, (17.0, 20), (18.0, 80)])
    undisturbed = replace(
        values.pop("undisturbed", UNDISTURBED), repeats=values.pop("repeats", True)
    )
    return judge(undisturbed, RunWithFault(fault, observed(*events, **values), results))


RESTARTED = (START, FAILED, REQUEUED, AGAIN, END)


def test_job_that_continues_survives() -> None:
    trial = verdict(*RESTARTED)
    assert (trial.verdict, trial.identical, trial.steps_lost) == (Verdict.SURVIVES, True, 15)
    assert (trial.seconds, trial.again_s, trial.missing) == (10, 4, ())


def test_job_whose_steps_begin_again_starts_from_zero() -> None:
    trial = verdict(*RESTARTED, steps=[*STEPS, (17.0, 2), (18.0, 80)])
    assert (trial.verdict, trial.missing) == (Verdict.FROM_ZERO, ("continues",))


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ({"epoch N: loss N": 4, "begun": 1}, Verdict.FROM_ZERO),
        ({"epoch N: loss N": 3, "begun": 1}, Verdict.SURVIVES),
    ],
)
def test_output_tells_a_start_from_zero(lines: Any, expected: Verdict) -> None:
    """A program that does not show its steps."""
    silent = replace(UNDISTURBED, observed=NO_STEPS)
    results = {**RESULTS, "lines": lines}
    trial = verdict(*RESTARTED, undisturbed=silent, steps=(), saved=SAVED_80, results=results)
    assert trial.verdict is expected


def test_changed_content_of_the_last_checkpoint_differs() -> None:
    files = {**RESULTS["checkpoints"], "model.pt": {"model.pt": "other"}}
    trial = verdict(*RESTARTED, results={**RESULTS, "checkpoints": files})
    assert (trial.verdict, trial.missing) == (Verdict.DIFFERS, ("repeatable",))
    trial = verdict(*RESTARTED, results={**RESULTS, "checkpoints": files}, repeats=False)
    assert (trial.verdict, trial.identical, trial.missing) == (Verdict.SURVIVES, None, ())


@pytest.mark.parametrize(
    ("checkpoints", "outputs", "expected"),
    [
        (FILES["checkpoints"], {}, True),
        # Only the last that both have counts.
        ({**FILES["checkpoints"], "step-20.pt": {}}, {}, True),
        ({"step-20.pt": {"step-20.pt": "b"}}, {}, False),
        ({"step-21.pt": {}}, {}, None),
    ],
)
def test_checkpoints_are_compared_by_name(
    checkpoints: Any, outputs: Any, expected: bool | None
) -> None:
    assert is_identical(FILES, {"checkpoints": checkpoints, "outputs": outputs}) is expected


@pytest.mark.parametrize(("digest", "expected"), [("a", True), ("b", None)])
def test_file_outside_the_checkpoints_may_contain_times(digest: str, expected: bool | None) -> None:
    with_files = {"checkpoints": {}, "outputs": {"log.csv": "a"}}
    assert is_identical(with_files, {"checkpoints": {}, "outputs": {"log.csv": digest}}) is expected


@pytest.mark.parametrize(
    ("fault", "events", "state", "expected"),
    [
        (Fault.RANK_KILLED, (HANG,), "", Verdict.HANGS),
        (Fault.RANK_FROZEN, (HANG, {**HANG, "time": 19.0}), "", Verdict.HANGS),
        # It neither ended nor was it named a hang.
        (Fault.NODE_KILLED, (), "", Verdict.HANGS),
        (
            Fault.NODE_KILLED,
            ({"time": 19.0, "event": "stop", "reason": "no-progress"},),
            "FAILED",
            Verdict.LOST,
        ),
        (Fault.CHECKPOINT_TORN, (), "FAILED", Verdict.LOST),
    ],
)
def test_job_that_does_not_complete(
    fault: Fault, events: tuple[Any, ...], state: str, expected: Verdict
) -> None:
    trial = verdict(START, FAILED, AGAIN, *events, fault=fault, state=state, results={})
    assert trial.verdict is expected
    assert trial.missing


def test_job_that_waits_for_nodes_does_not_hang() -> None:
    job = observed(START, FAILED, REQUEUED, state="")
    job.waits = "Resources"
    trial = judge(UNDISTURBED, RunWithFault(Fault.RANK_KILLED, job, {}))
    assert (trial.verdict, trial.missing) == (Verdict.LOST, ())


def test_frozen_rank_is_itself_a_hang() -> None:
    events = (START, HANG, {**FAILED, "time": 15.1}, AGAIN, END)
    assert verdict(*events, fault=Fault.RANK_FROZEN).verdict is Verdict.SURVIVES


@pytest.mark.parametrize(
    ("fault", "hangs", "expected"),
    [
        (Fault.RANK_KILLED, (HANG,), True),
        (Fault.RANK_FROZEN, (HANG,), False),
        (Fault.RANK_FROZEN, (HANG, AGAIN, {**HANG, "time": 19.0}), True),
        (Fault.RANK_KILLED, ({**HANG, "time": 12.0},), False),
    ],
    ids=["hang", "frozen", "frozen-and-hang", "before-the-fault"],
)
def test_hangs_too_often_counts_hangs_after_the_fault(
    fault: Fault, hangs: tuple[Any, ...], expected: bool
) -> None:
    assert hangs_too_often(fault, observed(START, *hangs)) is expected


NOTHING = {"checkpoints": {}, "outputs": {}, "lines": {}}


@pytest.mark.parametrize(
    ("undisturbed", "steps", "saved", "results", "expected"),
    [
        # The handler of the signal exits with 0 at step 35 of 80.
        (UNDISTURBED, STEPS, (12.0,), NOTHING, Verdict.LOST),
        # Also if an old checkpoint is the same.
        (UNDISTURBED, STEPS, (12.0,), RESULTS, Verdict.LOST),
        (UNDISTURBED, [*STEPS, (18.0, 79)], SAVED_80, RESULTS, Verdict.LOST),
        # Without steps, the numbers of the checkpoints tell the same.
        (replace(UNDISTURBED, observed=NO_STEPS), (), (12.0, 14.0), NOTHING, Verdict.LOST),
        (replace(UNDISTURBED, observed=NO_STEPS), (), (), NOTHING, Verdict.LOST),
        # It ignores the signal, and does all its work in time.
        (UNDISTURBED, [*STEPS, (18.0, 80)], SAVED_80, RESULTS, Verdict.SURVIVES),
        (UNDISTURBED, [*STEPS, (18.0, 80)], (), NOTHING, Verdict.SURVIVES),
        (UNDISTURBED, [*STEPS, (18.0, 81)], SAVED_80, NOTHING, Verdict.SURVIVES),
        (replace(UNDISTURBED, observed=NO_STEPS), (), SAVED_80, NOTHING, Verdict.SURVIVES),
        # A training for a time has another number of steps in each run.
        (
            replace(UNDISTURBED, repeats=False, fewest_steps=70),
            [(18.0, 75)],
            (),
            NOTHING,
            Verdict.SURVIVES,
        ),
        (
            replace(UNDISTURBED, repeats=False, fewest_steps=70),
            [(18.0, 69)],
            (),
            NOTHING,
            Verdict.LOST,
        ),
        (
            replace(UNDISTURBED, observed=NO_STEPS, repeats=False),
            (),
            (12.0,),
            NOTHING,
            Verdict.SURVIVES,
        ),
        # It shows nothing.
        (
            replace(UNDISTURBED, observed=replace(NO_STEPS, writes=[])),
            (),
            (),
            NOTHING,
            Verdict.UNKNOWN,
        ),
    ],
)
def test_job_that_completed_survives_only_with_all_its_work(
    undisturbed: RunWithoutFault, steps: Any, saved: Any, *, results: Any, expected: Verdict
) -> None:
    job = observed(START, END, steps=steps, saved=saved)
    trial = judge(undisturbed, RunWithFault(Fault.TIME_LIMIT, job, results))
    assert trial.verdict is expected
    assert bool(trial.cause) == (expected is not Verdict.SURVIVES)
    assert trial.may_be_chance == (expected is Verdict.LOST)
    assert "saves-on-signal" in trial.missing


@pytest.mark.parametrize(("outputs", "expected"), [("a", Verdict.SURVIVES), ("b", Verdict.UNKNOWN)])
def test_job_without_steps_survives_by_the_files_that_it_wrote(
    outputs: str, expected: Verdict
) -> None:
    before, after = ({**NOTHING, "outputs": {"result": digest}} for digest in ("a", outputs))
    silent = RunWithoutFault(replace(NO_STEPS, writes=[]), before)
    trial = judge(silent, RunWithFault(Fault.RANK_KILLED, observed(*RESTARTED, saved=()), after))
    assert (trial.verdict, trial.missing) == (expected, ("shows-progress",))


def test_job_that_ended_before_the_fault() -> None:
    assert verdict(START, END, fault_at=None).verdict is Verdict.TOO_LATE


@pytest.mark.parametrize(("reason", "missing"), [("failed", ("saves-on-signal",)), ("saved", ())])
def test_time_limit_asks_for_a_saved_state(reason: str, missing: tuple[str, ...]) -> None:
    events = (START, FAILED, {**REQUEUED, "reason": reason}, AGAIN, END)
    trial = verdict(*events, fault=Fault.TIME_LIMIT)
    assert (trial.verdict, trial.missing) == (Verdict.SURVIVES, missing)


@pytest.mark.parametrize(("killed", "expected"), [(("continues",), "continues"), ((), "verifies")])
def test_program_that_never_continues_need_not_verify(
    killed: tuple[str, ...], expected: str
) -> None:
    torn = FaultResult(
        fault=Fault.CHECKPOINT_TORN, verdict=Verdict.FROM_ZERO, job_id="2", missing=("verifies",)
    )
    other = FaultResult(
        fault=Fault.RANK_KILLED, verdict=Verdict.FROM_ZERO, job_id="1", missing=killed
    )
    assert explained([other, torn])[1].missing == (expected,)


def test_files_that_came_with_the_job_are_no_checkpoints() -> None:
    assert [write.path for write in observed(START, saved=(9.0, 12.0)).writes] == ["step-12.0.pt"]


def test_models_for_evaluation_are_no_checkpoints() -> None:
    """The best weights so far are written before the first checkpoint."""
    job = observed(START)
    job.add({"events": "", "steps": [], "checkpoints": {"model/best.pt": (None, 11.0, 100, 0.5)}})
    job.select_checkpoints()
    assert (job.numbered, [write.number for write in job.writes]) == (True, [12])
    job.add({"events": "", "steps": [], "checkpoints": {"model/best.pt": (None, 13.0, 100, 0.5)}})
    assert len(job.writes) == 1


def test_files_without_numbers_may_be_the_only_checkpoints() -> None:
    job = observed(START, saved=())
    job.add({"events": "", "steps": [], "checkpoints": {"last.pt": (None, 11.0, 100, 0.5)}})
    job.select_checkpoints()
    assert (job.numbered, len(job.writes)) == (False, 1)


def test_interval_follows_young_and_daly() -> None:
    assert round(best_interval_s(5, 172_800)) == 1315
    job = UNDISTURBED.observed
    assert (job.save_s, job.interval_s) == (0.5, 2.0)
    # A small file that is written at its final name.
    assert Observation("7", "/x", writes=[CheckpointWrite("a.pt", 1, 1.0, 1, 0.0)]).save_s == 0.01
