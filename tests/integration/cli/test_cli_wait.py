"""The verb `wait`: its exit codes and its answer, which is also that of `submit --wait`.

When a wait ends, and by which error, is decided in jobs/test_watch.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clusterctl.cli.output import Terminated
from clusterctl.cli.waiting import WaitResult
from clusterctl.runs.facts import ending_of
from clusterctl.runs.find import Row
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.ends.diagnose import diagnose
from clusterctl.scheduler.ends.facts import Evidence
from clusterctl.scheduler.session import Session
from clusterctl.state.run_record import RunRecord
from clusterctl.util.progress import Clock
from tests.integration.cli.conftest import Answer
from tests.support.messages import condition
from tests.support.played.cluster import PlayedCluster
from tests.support.processes import eventually

OF_END = {"job_id", "state", "exit_code", "elapsed_s", "attempts", "states", "diagnosis"}
SetClock = Callable[[Clock], None]


@pytest.fixture
def submit(answer: Answer) -> Callable[[str], str]:
    """`submit("exit 3")`: the ID of a job that runs this line."""

    def submit(line: str) -> str:
        Path("a.sh").write_text(f"#!/bin/bash\n{line}\n")
        return str(answer("submit", "a.sh", "--folder", "none")["job_id"])

    return submit


def code(found: dict[str, Any]) -> str:
    (failure,) = found["failures"]
    return str(condition(failure))


def test_wait_returns_when_all_jobs_have_ended(
    answer: Answer, submit: Callable[[str], str], cluster: PlayedCluster
) -> None:
    Path("go").unlink(missing_ok=True)
    first = submit("true")
    second = submit(f"until [ -e {Path.cwd()}/go ]; do sleep 0.05; done")
    eventually(lambda: cluster.job(second)["state"] == "RUNNING")
    Path("go").touch()
    found = answer("wait", first, second, first)
    assert [(row["job_id"], row["state"], row["exit_code"]) for row in found["jobs"]] == [
        (first, "COMPLETED", 0),
        (second, "COMPLETED", 0),
    ]
    ended = found["jobs"][0]
    assert (ended["name"], ended["states"], ended["diagnosis"]) == ("a", {"COMPLETED": 1}, None)


def test_wait_that_times_out_tells_the_present_states(
    answer: Answer, submit: Callable[[str], str], cluster: PlayedCluster, set_clock: SetClock
) -> None:
    job_id = submit("sleep 60")
    eventually(lambda: cluster.job(job_id)["state"] == "RUNNING")
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds

    set_clock(Clock(now=lambda: now[0], sleep=sleep))
    found = answer("wait", job_id, "--timeout", "1m", rc=6)
    assert code(found) == "wait-timeout"
    assert [(row["job_id"], row["state"]) for row in found["jobs"]] == [(job_id, "RUNNING")]
    assert now[0] >= 60
    assert cluster.job(job_id)["state"] == "RUNNING"
    answer("cancel", job_id)


def test_wait_for_an_unknown_job_does_not_wait(
    answer: Answer, played_session: Session, set_clock: SetClock
) -> None:
    played_session.workspace.configured.write_text("inputs")
    set_clock(Clock(sleep=lambda _: pytest.fail("it waits")))
    assert code(answer("wait", "77", rc=1)) == "not-found/job"


def test_array_is_told_by_its_worst_task() -> None:
    known = {"number": 7, "name": "grid", "user": "ada", "reason": ""}
    states = (JobState.COMPLETED, JobState.FAILED, JobState.COMPLETED)
    tasks = tuple(
        JobInfo(**known, task=number, state=state, exit_code=number)
        for number, state in enumerate(states)
    )
    failure = diagnose(Evidence(job=tasks[1]))
    whole, task = (
        end.as_dict() for end in WaitResult(("7", "7_0"), tasks, {"7_1": failure}).ends()
    )
    assert whole["states"] == {"COMPLETED": 2, "FAILED": 1}
    assert (whole["state"], whole["exit_code"]) == ("FAILED", 1)
    assert whole["diagnosis"]["job_id"] == "7_1"
    assert (task["states"], task["diagnosis"]) == ({"COMPLETED": 1}, None)


def test_wait_tells_the_cause_of_a_failed_job_and_submit_that_waits_the_same(
    answer: Answer, submit: Callable[[str], str]
) -> None:
    good = submit("true")
    Path("a.sh").write_text("#!/bin/bash\necho no such data >&2\nexit 3\n")
    submitted = answer("submit", "a.sh", "--wait", rc=4)
    found = answer("wait", good, submitted["job_id"], rc=4)
    assert code(found) == "job-failed"
    succeeded, failed = found["jobs"]
    assert succeeded["state"] == "COMPLETED"
    assert failed["state"] == "FAILED"
    assert failed["exit_code"] == 3
    assert failed["diagnosis"]["code"] == "exit-code"
    assert failed["diagnosis"]["fix"]
    assert failed["diagnosis"]["lines"] == ["no such data"]
    assert failed["diagnosis"] == found["diagnosis"]
    assert {key: failed[key] for key in OF_END} == {key: submitted[key] for key in OF_END}


@pytest.mark.parametrize("kind", ["job", "requeued", "array", "array of one task"])
def test_collected_run_has_the_end_that_wait_told(
    answer: Answer, submit: Callable[[str], str], cluster: PlayedCluster, kind: str
) -> None:
    """A requeued job ran on another node before, and its first attempt was 40 s before the last."""
    job_id = submit("echo no such data >&2; exit 3")
    cluster.wait_until_ended(job_id)
    if "array" in kind:
        cluster.change(job_id, tasks=[0] if "one" in kind else [0, 1])
    elif kind == "requeued":
        job = cluster.job(job_id)
        start = job["start"]
        first = {**job, "state": "REQUEUED", "nodes": "n2", "start": start - 50, "end": start - 40}
        cluster.change(job_id, attempts=[first], restarts=1)
    (told,) = answer("wait", job_id, rc=4)["jobs"]
    (collected,) = answer("collect", job_id)["runs"]
    assert ending_of(Row(RunRecord.load(Path(collected["dir"])))).as_dict() == told
    assert told["nodes"] == (["n2", "n1"] if kind == "requeued" else ["n1"])


@pytest.mark.parametrize(
    ("ending", "rc"), [(KeyboardInterrupt(), 130), (Terminated(143), 143)], ids=repr
)
def test_interrupted_wait_lets_the_job_run(
    answer: Answer,
    submit: Callable[[str], str],
    set_clock: SetClock,
    ending: BaseException,
    rc: int,
) -> None:
    job_id = submit("sleep 60")

    def interrupt(_: float) -> None:
        raise ending

    set_clock(Clock(sleep=interrupt))
    answer("wait", job_id, rc=rc)
    assert answer("cancel", job_id)["cancelled"] == [job_id]
