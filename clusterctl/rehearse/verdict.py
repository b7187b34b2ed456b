"""The verdict on a job after a fault, the missing line of the contract, the best interval of
checkpoints.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any, Final

from clusterctl.rehearse.observation import Observation


class Fault(StrEnum):
    RANK_KILLED = "rank-killed"
    RANK_FROZEN = "rank-frozen"
    TIME_LIMIT = "time-limit"
    CHECKPOINT_TORN = "checkpoint-torn"
    NODE_KILLED = "node-killed"


class Verdict(StrEnum):
    """The outcome of a job with a fault.

    SURVIVES: the job did all its work, and did not start from zero. TOO_LATE: it ended before the
        fault.
    LOST: it also may have completed without doing all its work. UNKNOWN: it completed, and shows
    neither its steps nor a result to compare.
    """

    SURVIVES = "survives"
    FROM_ZERO = "restarts-from-zero"
    HANGS = "hangs"
    DIFFERS = "differs"
    LOST = "lost"
    UNKNOWN = "unknown"
    TOO_LATE = "too-late"


# Line of the contract in docs/restarts.md -> what the program should do, and the code that it
# needs.
CONTRACT: Final = {
    "continues": (
        "continue by itself when it is started again with the same arguments in the same folder",
        "load the newest checkpoint at the start",
    ),
    "saves": (
        "write checkpoints",
        "save a checkpoint each few minutes; in a rehearsal, after a few seconds",
    ),
    "verifies": (
        "verify the newest checkpoint, and take the previous checkpoint if it is damaged",
        "keep two checkpoints, and test the newest, as `newest` in survive.py does",
    ),
    "saves-on-signal": (
        "save after SIGUSR1 or SIGTERM, on all ranks after the same step, and exit with 75",
        "handle the signal as `end_step` in survive.py does",
    ),
    "exits": (
        "exit with an error if it loses a rank",
        "set a time-out for communication, or use NCCL, Gloo or MPI, which report a lost rank",
    ),
    "repeatable": (
        "compute the same after a restart: batches and random numbers depend only on the step",
        "seed the sampler by epoch and random numbers by step, and save the state of the optimizer",
    ),
    "shows-progress": (
        (
            "show its progress: metrics.jsonl, or the number of steps in the file "
            "$CLUSTERCTL_HEARTBEAT"
        ),
        "write the step as `show_progress` in survive.py does",
    ),
}
# Fault and verdict -> the line of the contract that is missing.
_MISSING: Final = {
    Fault.CHECKPOINT_TORN: dict.fromkeys(
        (Verdict.FROM_ZERO, Verdict.HANGS, Verdict.LOST, Verdict.DIFFERS), "verifies"
    ),
    Fault.TIME_LIMIT: {Verdict.HANGS: "saves-on-signal", Verdict.LOST: "saves-on-signal"},
    Fault.RANK_KILLED: {Verdict.HANGS: "exits"},
    Fault.NODE_KILLED: {Verdict.HANGS: "exits"},
}
_OF_ANY_FAULT: Final = {
    Verdict.FROM_ZERO: "continues",
    Verdict.HANGS: "continues",
    Verdict.LOST: "continues",
    Verdict.DIFFERS: "repeatable",
}
_UNSEEN: Final = (
    "it shows neither its steps nor a checkpoint with a number, and has no file that is the "
    "same as without the fault"
)
# A repeated line of the output tells how much of the work an attempt has done.
_FEW_LINES: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class FaultResult:
    """The verdict on a job after a fault.

    identical: whether its last checkpoint has the content that it has without the fault. None:
        there is no checkpoint of the same name to compare.
    steps_lost: steps that were repeated, about. None: the job does not show its steps.
    seconds: of the job with all attempts. again_s: from the fault until the job continued.
    missing: lines of the contract that the program seems to lack, keys of ``CONTRACT``.
    is_completed: whether Slurm's state of the job is COMPLETED.
    cause: why the verdict is that of a job that did not complete or has not done all its work, or
        is unknown.
    """

    fault: Fault
    verdict: Verdict
    job_id: str
    identical: bool | None = None
    steps_lost: int | None = None
    seconds: float = 0.0
    again_s: float | None = None
    missing: tuple[str, ...] = ()
    cause: str = ""
    is_completed: bool = False

    def as_dict(self) -> dict[str, Any]:
        """Return the verdict as `-o json` shows it."""
        lines = [
            {"line": name, "contract": CONTRACT[name][0], "write": CONTRACT[name][1]}
            for name in self.missing
        ]
        return {**asdict(self), "missing": lines}

    @property
    def may_be_chance(self) -> bool:
        """Whether the job may have had this verdict without a fault: its results are compared."""
        return self.verdict is Verdict.DIFFERS or (
            self.verdict is Verdict.LOST and self.is_completed
        )


@dataclass(frozen=True, slots=True)
class RunWithoutFault:
    """The job without a fault.

    results: see ``results`` in payload/node/observe.py. repeats: whether each run has the same
        results.
    fewest_steps: the steps of the run with the fewest steps. None: those in ``observed``.
    """

    observed: Observation
    results: Mapping[str, Any]
    repeats: bool = True
    fewest_steps: int | None = None

    @property
    def last_step(self) -> int:
        """The number of steps that a job without a fault takes at least. 0: unknown."""
        return self.observed.last_step if self.fewest_steps is None else self.fewest_steps

    @property
    def newest_checkpoint(self) -> int:
        """The largest number of a checkpoint. 0: unknown."""
        return _newest(self.observed)


@dataclass(frozen=True, slots=True)
class RunWithFault:
    """The job with a fault, after its end, or after its cancellation because it made no progress.

    results: as of ``RunWithoutFault`` if it completed. cause: of its end if it did not complete.
    """

    fault: Fault
    observed: Observation
    results: Mapping[str, Any]
    cause: str = ""


def judge(undisturbed: RunWithoutFault, disturbed: RunWithFault) -> FaultResult:
    """Return the verdict on a job with a fault."""
    fault = disturbed.fault
    observed = disturbed.observed
    verdict, identical, cause = _verdict(fault, undisturbed, observed, disturbed.results)
    after = observed.first_step_after
    lost = max(0, observed.last_step_before - after[1]) if after else None
    return FaultResult(
        fault=fault,
        verdict=verdict,
        job_id=observed.job_id,
        identical=identical,
        steps_lost=lost,
        seconds=round(observed.seconds, 1),
        again_s=None if observed.again_s is None else round(observed.again_s, 1),
        missing=_missing(fault, verdict, undisturbed.observed, observed),
        cause=disturbed.cause or cause,
        is_completed=observed.state == "COMPLETED",
    )


def hangs_too_often(fault: Fault, observed: Observation) -> bool:
    """Return whether a hang ended the job after the fault. A frozen rank is itself a hang, but only
    once.
    """
    hangs = [hang for attempt in observed.history for hang in attempt.hangs]
    ended = [hang.noticed for hang in hangs if hang.ended_job]
    after = [at for at in ended if observed.fault_at and at > observed.fault_at]
    return len(after) > (fault is Fault.RANK_FROZEN)


def _verdict(
    fault: Fault, undisturbed: RunWithoutFault, observed: Observation, results: Mapping[str, Any]
) -> tuple[Verdict, bool | None, str]:
    """Return the verdict, whether the results are identical, and the cause if the job has
    completed.
    """
    if observed.fault_at is None:
        return Verdict.TOO_LATE, None, ""
    if observed.waits:
        return Verdict.LOST, None, ""
    if observed.state != "COMPLETED":
        hangs = hangs_too_often(fault, observed) or (
            observed.state == "" and not observed.history[-1].stop
        )
        return (Verdict.HANGS if hangs else Verdict.LOST), None, ""
    if left := _work_left(undisturbed, observed):
        return Verdict.LOST, None, left
    identical = is_identical(undisturbed.results, results) if undisturbed.repeats else None
    if identical is False:
        return Verdict.DIFFERS, identical, ""
    if _is_from_zero(undisturbed, observed, results):
        return Verdict.FROM_ZERO, identical, ""
    if identical is None and not (undisturbed.last_step or undisturbed.newest_checkpoint):
        return Verdict.UNKNOWN, None, _UNSEEN
    return Verdict.SURVIVES, identical, ""


def _work_left(undisturbed: RunWithoutFault, observed: Observation) -> str:
    """Return how a completed job has done less than without a fault, by its steps or checkpoints,
    or "".
    """
    steps = undisturbed.last_step
    done = observed.last_step
    if steps:
        return f"it ended with exit code 0 after step {done} of {steps}" if done < steps else ""
    number = undisturbed.newest_checkpoint
    newest = _newest(observed)
    if newest < number and undisturbed.repeats:
        return f"it ended with exit code 0, and its newest checkpoint is {newest}, not {number}"
    return ""


def _newest(observed: Observation) -> int:
    """Return the largest number of a checkpoint. 0: unknown."""
    return max((write.number or 0 for write in observed.writes), default=0)


def is_identical(expected: Mapping[str, Any], results: Mapping[str, Any]) -> bool | None:
    """Compare the last checkpoint that both jobs have, or else their other files.

    Other files may contain times, so that a difference tells nothing.
    """
    checkpoints = [name for name in expected["checkpoints"] if name in results["checkpoints"]]
    if checkpoints:
        last = checkpoints[-1]
        return bool(expected["checkpoints"][last] == results["checkpoints"][last])
    outputs = expected["outputs"]
    return True if outputs and outputs == results["outputs"] else None


def _is_from_zero(
    undisturbed: RunWithoutFault, observed: Observation, results: Mapping[str, Any]
) -> bool:
    """Return whether the last attempt has repeated the whole work, from its steps or its output."""
    if observed.restarted is None:
        return False
    if observed.first_step_after:
        saved = [
            step for at, step in observed.steps if observed.writes and at <= observed.writes[0].time
        ]
        done = saved[-1] if saved else observed.last_step_before
        return 2 * observed.first_step_after[1] < done
    expected = Counter(undisturbed.results["lines"])
    return max(expected.values(), default=0) >= _FEW_LINES and expected <= Counter(results["lines"])


def _missing(
    fault: Fault, verdict: Verdict, undisturbed: Observation, observed: Observation
) -> tuple[str, ...]:
    if observed.waits:
        return ()
    line = _MISSING.get(fault, {}).get(verdict) or _OF_ANY_FAULT.get(verdict)
    # A restart that hangs has another cause than the end of an attempt.
    if verdict is Verdict.HANGS and observed.restarted and line != "verifies":
        line = "continues"
    lines = [line] if line else []
    if line == "continues" and not undisturbed.writes:
        lines = ["saves", *lines]
    saved = any(attempt.reason == "saved" for attempt in observed.history)
    if fault is Fault.TIME_LIMIT and not saved and verdict is not Verdict.TOO_LATE:
        lines.append("saves-on-signal")
    if verdict in {Verdict.SURVIVES, Verdict.UNKNOWN} and not undisturbed.steps:
        lines.append("shows-progress")
    return tuple(dict.fromkeys(lines))


def explained(trials: Sequence[FaultResult]) -> tuple[FaultResult, ...]:
    """Correct the missing lines: a program that never continues does so from a torn checkpoint
    neither.
    """
    verdicts = [each.verdict for each in trials if "continues" in each.missing]
    return tuple(
        replace(
            each,
            missing=tuple("continues" if line == "verifies" else line for line in each.missing),
        )
        if each.verdict in verdicts
        else each
        for each in trials
    )


def best_interval_s(save_s: float, mtbf_s: float) -> float:
    """Return the interval of checkpoints by Young and Daly, from their cost and the time between
    failures.
    """
    return math.sqrt(2 * save_s * mtbf_s)


def not_survived(trials: Sequence[FaultResult]) -> list[FaultResult]:
    return [each for each in trials if each.verdict is not Verdict.SURVIVES]
