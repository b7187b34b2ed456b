"""Ending jobs, and listing them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import SchedulerError, UsageError
from clusterctl.jobs.queue import cancel, find_or_list, known_jobs, list_jobs, select
from clusterctl.scheduler.base import AccountingAwayError
from tests.support.messages import condition
from tests.support.messages import refused as rejected
from tests.support.played.cluster import finished, packed, submitted


def test_cancel_names_jobs_that_had_ended(session, cluster, tmp_path):
    over = finished(session, cluster, tmp_path, "true")
    running = submitted(session, tmp_path, "sleep 60")
    done = cancel(session, [over, running])
    assert ({job.id: job.ended for job in done.jobs}, done.errors) == (
        {over: True, running: False},
        {},
    )
    assert [cluster.job(job_id)["state"] for job_id in (over, running)] == [
        "COMPLETED",
        "CANCELLED",
    ]


def test_cancel_some_jobs_fail_cancels_the_rest(session, cluster, tmp_path):
    """Neither an unknown job nor a job of another user keeps a job alive."""
    ids = [submitted(session, tmp_path, "sleep 60") for _ in range(2)]
    cluster.change(ids[0], owner="ada", user="ada")
    done = cancel(session, [ids[0], "77", ids[1]])
    assert {job_id: condition(error) for job_id, error in done.errors.items()} == {
        "77": "not-found/job",
        ids[0]: "slurm-refused/job-cancel",
    }
    assert f"sudo scancel {ids[0]}" in done.errors[ids[0]].fix
    assert [cluster.job(job_id)["state"] for job_id in ids] == ["RUNNING", "CANCELLED"]
    with rejected("slurm-refused/cancel", SchedulerError) as caught:
        done.raise_errors()
    assert [condition(failure) for failure in caught.value.failures] == [
        "not-found/job",
        "slurm-refused/job-cancel",
    ]
    cluster.change(ids[0], owner="")
    assert cancel(session, [ids[0]]).errors == {}


@pytest.mark.parametrize(
    ("word", "selected"),
    [
        ("{}_[1-3]", [1, 2, 3]),
        ("{}_[0-9:4,7]", [0, 4, 7, 8]),
        ("{}_[7-99999999]", [7, 8, 9]),
        ("{}_[6-10%2]", [6, 7, 8, 9]),
    ],
)
def test_cancel_of_tasks_selects_those_that_the_array_has(
    session, cluster, tmp_path, word: str, selected: list[int]
) -> None:
    with cluster.state() as state:
        state["hold"] = True
    job_id = submitted(session, tmp_path, "true")
    cluster.change(job_id, tasks=[*range(10)])
    found = select(session, [word.format(job_id)])
    assert (found.to_cancel, found.errors) == ([f"{job_id}_{task}" for task in selected], {})


def test_cancel_of_tasks_that_the_array_lacks_is_refused(session, cluster, tmp_path) -> None:
    with cluster.state() as state:
        state["hold"] = True
    job_id = submitted(session, tmp_path, "true")
    cluster.change(job_id, tasks=[*range(10)])
    done = cancel(session, [f"{job_id}_[20-30]"])
    assert [condition(error) for error in done.errors.values()] == ["not-found/job"]
    assert cluster.job(job_id)["state"] == "PENDING"


@pytest.mark.parametrize("tasks", ["[3-1]", "[1,3-1]", "[,]", "[-]", "[:]"])
def test_cancel_of_words_that_name_no_tasks_is_a_wrong_command(session, tasks: str) -> None:
    with rejected("option-invalid/job-id", UsageError, "12_[1-3,7]"):
        cancel(session, [f"12_{tasks}"])


def test_task_of_a_packed_job_is_not_a_job_of_slurm(session, cluster, tmp_path):
    """Its job keeps running. A number that is not a task's is unknown."""
    job_id = packed(session, tmp_path, "true", "0-3")
    done = cancel(session, [f"{job_id}_2", f"{job_id}_4", f"{job_id}_[1-9]"])
    assert {task: condition(error) for task, error in done.errors.items()} == {
        f"{job_id}_2": "not-found/packed-task",
        f"{job_id}_[1-9]": "not-found/packed-task",
        f"{job_id}_4": "not-found/job",
    }
    with rejected("not-found/packed-task", SchedulerError):
        known_jobs(session, [f"{job_id}_0"])
    assert cluster.job(job_id)["state"] == "RUNNING"


def test_cancel_malformed_id_cancels_nothing(session, cluster, tmp_path):
    job_id = submitted(session, tmp_path, "sleep 60")
    with pytest.raises(UsageError):
        cancel(session, [job_id, "all"])
    assert cluster.job(job_id)["state"] == "RUNNING"
    assert cancel(session, [job_id]).errors == {}


def test_list_without_accounting_and_folder_counts_the_job(session, cluster, tmp_path):
    """Jobs that have left the queue are counted, and active jobs are shown and can be cancelled."""
    over = finished(session, cluster, tmp_path, "true")
    running = submitted(session, tmp_path, "sleep 60")
    cluster.change(over, forgotten=True)
    shutil.rmtree(session.ledger.find(over).remote_dir)
    with cluster.state() as state:
        state["accounting_away"] = True
    quick = cluster.session(patience_s=0.0)
    listing = list_jobs(quick)
    assert ([job.id for job in listing.jobs], listing.older, listing.unlisted) == ([running], 0, 1)
    with rejected("accounting-away", AccountingAwayError):
        known_jobs(quick, [over])
    done = cancel(quick, [over, running])
    assert {job_id: condition(error) for job_id, error in done.errors.items()} == {
        over: "accounting-away"
    }
    assert cluster.job(running)["state"] == "CANCELLED"


def test_list_of_the_newest_has_all_running_jobs(session, cluster, tmp_path):
    """What is left out is counted, whether the queue still has it or not."""
    running = submitted(session, tmp_path, "sleep 60")
    ended = [finished(session, cluster, tmp_path, "true") for _ in range(4)]
    for is_forgotten in (False, True):
        for job_id in ended:
            cluster.change(job_id, forgotten=is_forgotten)
        listing = list_jobs(session, 2)
        assert ([job.id for job in listing.jobs], listing.older) == (
            [*reversed(ended[2:]), running],
            2,
        )
        assert listing.unlisted == 0


def test_jobs_omits_jobs_that_slurm_refused(session, cluster, tmp_path):
    """Slurm keeps a record of a job that it refused, as one that failed before it began."""
    kept = submitted(session, tmp_path, "true")
    with cluster.state() as state:
        state["refuse"] = "sbatch: error: Batch job submission failed: Invalid qos specification"
    with pytest.raises(SchedulerError):
        submitted(session, tmp_path, "true")
    (refused,) = (entry for entry in session.ledger.entries() if entry.refused)
    with cluster.state() as state:
        job = {"state": "FAILED", "comment": f"clusterctl:{refused.token}"}
        state["jobs"]["2"] = state["jobs"][kept] | job
    assert [job.id for job in list_jobs(session).jobs] == [kept]


def test_job_as_dict_is_plain_json(session, cluster, tmp_path):
    job_id = finished(session, cluster, tmp_path, "true")
    (job,) = known_jobs(session, [job_id])
    record = job.as_dict()
    assert (record["job_id"], record["state"], record["nodes"]) == (job_id, "COMPLETED", ["n1"])
    assert type(record["state"]) is str
    assert (record["exit"], record["time_limit_s"], record["tres"]) == (
        "0",
        86400,
        "cpu=1,mem=1G,node=1",
    )
    assert record["elapsed_s"] == record["end_time"] - record["start_time"]


class Recording:
    """Records the first word of each command that a transport runs."""

    def __init__(self, session, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands: list[str] = []
        run = session.scheduler.transport.run

        def record(argv: Sequence[str], **options: Any) -> Any:
            self.commands.append(argv[0])
            return run(argv, **options)

        monkeypatch.setattr(session.scheduler.transport, "run", record)

    def requests(self, command: str) -> int:
        count = self.commands.count(command)
        self.commands = []
        return count


def requeued(session, cluster, tmp_path: Path) -> tuple[str, int]:
    """Run a job that ended after 2 s, was requeued by a person 40 s later, and then ran for 5 s."""
    job_id = finished(session, cluster, tmp_path, "true")
    job = cluster.job(job_id)
    start = job["start"]
    first = {**job, "state": "FAILED", "submit": start - 60, "start": start - 50, "end": start - 8}
    cluster.change(job_id, attempts=[first], restarts=1, end=start + 5)
    events = [
        {"time": start - 50, "event": "start", "restarts": 0, "nodes": ["n1"]},
        {"time": start - 48, "event": "end", "status": 3},
        {"time": start, "event": "start", "restarts": 1, "nodes": ["n1"]},
    ]
    Path(job["dir"], "job.events").write_text("\n".join(map(json.dumps, events)))
    return job_id, start


@pytest.mark.parametrize("is_forgotten", [False, True])
def test_jobs_lists_all_attempts_of_a_restarted_job(session, cluster, tmp_path, is_forgotten):
    """Whether the queue still has the job or not."""
    job_id, start = requeued(session, cluster, tmp_path)
    cluster.change(job_id, forgotten=is_forgotten)
    for ids in ([job_id], []):
        (job,) = find_or_list(session, ids).jobs
        assert [(each.start_time, each.end_time) for each in job.attempts] == [
            (start - 50, start - 48),
            (start, start + 5),
        ]
        record = job.as_dict()
        assert [each["nodes"] for each in record["attempts"]] == [["n1"], ["n1"]]
        assert (record["submit_time"], record["start_time"]) == (start - 60, start - 50)
        assert (record["end_time"], record["elapsed_s"]) == (start + 5, 7)


def test_attempts_cost_no_query_but_one_for_queued_jobs(session, cluster, tmp_path, monkeypatch):
    """Accounting is asked once for all restarted jobs that the queue has, and for no other job."""
    finished(session, cluster, tmp_path, "true")
    recording = Recording(session, monkeypatch)
    (job,) = find_or_list(session, []).jobs
    assert ([each.start_time for each in job.attempts], recording.requests("sacct")) == (
        [job.start_time],
        0,
    )
    ids = [requeued(session, cluster, tmp_path)[0] for _ in range(2)]
    recording.requests("sacct")
    find_or_list(session, [])
    assert recording.requests("sacct") == 1
    for job_id in ids:
        cluster.change(job_id, forgotten=True)
    find_or_list(session, [])
    assert recording.requests("sacct") == 1
