"""Final states of jobs that neither Slurm's queue nor its accounting tells, from the jobs' own
records.
"""

from __future__ import annotations

import json
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clusterctl.jobs.queue import cancel, known_jobs, list_jobs
from clusterctl.runs.collect import collect
from clusterctl.scheduler.base import AccountingAwayError, JobInfo, JobState
from clusterctl.scheduler.ends.remote_logs import records
from clusterctl.scheduler.session import resolve_submissions
from clusterctl.scheduler.slurm.records import recorded_jobs, remember_states
from clusterctl.spec.job import JobSpec
from clusterctl.state.ledger import Ledger
from clusterctl.util.process import Result
from clusterctl.util.progress import Clock
from tests.support.inventories import with_inventory
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.played.cluster import finished, submit, submitted
from tests.support.processes import eventually


def test_list_without_accounting_has_the_jobs_own_records(session, cluster, tmp_path):
    """A job that has left the queue has the end that it recorded, with the accounting away or
    closed.
    """
    ids = [
        finished(session, cluster, tmp_path, body) for body in ("true", "exit 3", "kill -9 $PPID")
    ]
    with cluster.state() as state:
        state["hold"] = True
    never = submitted(session, tmp_path, "true")
    cancel(session, [never])
    for job_id in (*ids, never):
        cluster.change(job_id, forgotten=True)
    for fields in (
        {"accounting_away": True},
        {"accounting_away": False, "accounting_refuses": "disabled"},
    ):
        with cluster.state() as state:
            state.update(fields)
        found = {job.id: job for job in list_jobs(cluster.session(patience_s=0.0)).jobs}
        assert [(found[i].state.value, found[i].exit_code) for i in (*ids, never)] == [
            ("COMPLETED", 0),
            ("FAILED", 3),
            ("FAILED", None),
            ("CANCELLED", None),
        ]
        (job,) = known_jobs(cluster.session(patience_s=0.0), ids[:1])
        entry = session.ledger.find(job.id)
        assert (job.token, job.work_dir, job.nodes) == (entry.token, entry.remote_dir, ("n1",))
        assert None not in (job.start_time, job.end_time, job.submit_time)


@pytest.mark.parametrize(
    ("due", "state"),
    [
        ("", "CANCELLED"),
        (" DUE TO TIME LIMIT", "TIMEOUT"),
        (" DUE to SIGNAL Terminated", "CANCELLED"),
    ],
)
def test_job_records_why_slurm_ended_it(session, cluster, tmp_path, due, state):
    """slurmstepd writes its line to the log before it sends SIGTERM, which a program may ignore."""
    job_id = submitted(session, tmp_path, "trap '' TERM; touch ready; sleep 60 & wait; sleep 60")
    folder = Path(session.ledger.find(job_id).remote_dir)
    eventually((folder / "files/ready").exists)
    with (folder / "stderr.log").open("a") as log:
        log.write(
            f"slurmstepd-n1: error: *** JOB {job_id} ON n1 CANCELLED AT 2026-11-27T06:34:36{due} "
            "***\n"
        )
    cancel(session, [job_id])
    eventually(lambda: "SIGTERM" in (folder / "job.events").read_text())
    cluster.end_jobs()
    cluster.change(job_id, forgotten=True)
    with cluster.state() as cluster_state:
        cluster_state["accounting_away"] = True
    assert known_jobs(cluster.session(patience_s=0.0), [job_id])[0].state == state


def test_records_of_an_array_have_all_its_tasks(session, cluster, tmp_path):
    """A task without logs has not started. A task with logs but no events ended before job.py
    started.
    """
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --array=0-9\n")
    with cluster.state() as state:
        state["hold"] = True
    job_id = submit(session, JobSpec(name="mine", script=script, array="0-2,5%2")).job_id
    folder = Path(session.ledger.find(job_id).remote_dir)
    for task, status in ((0, 0), (1, 3)):
        (folder / f"task-{task}").mkdir()
        (folder / f"stdout-{task}.log").touch()
        events = [
            {"event": "start", "time": 5, "since": 1, "nodes": ["n2"]},
            {"event": "end", "time": 9, "status": status},
        ]
        (folder / f"task-{task}/job.events").write_text(
            "".join(json.dumps(e) + "\n" for e in events)
        )
    (folder / "stdout-2.log").touch()
    cluster.change(job_id, forgotten=True)
    with cluster.state() as state:
        state["accounting_refuses"] = "sacct: error: Access denied"
    jobs = known_jobs(session, [job_id])
    assert [job.elapsed_s for job in jobs][:2] == [8, 8]
    assert {job.id: (job.state.value, job.exit_code, job.nodes) for job in jobs} == {
        f"{job_id}_0": ("COMPLETED", 0, ("n2",)),
        f"{job_id}_1": ("FAILED", 3, ("n2",)),
        f"{job_id}_2": ("FAILED", None, ()),
        f"{job_id}_5": ("CANCELLED", None, ()),
    }


def test_ledger_keeps_the_state_of_slurm(session, cluster, tmp_path):
    """Slurm's state of a failed job is more precise than the job's record, and outlives the job's
    folder.
    """
    job_id = finished(session, cluster, tmp_path, "exit 3")
    entry = session.ledger.find(job_id)
    session.ledger.update(entry, state="OUT_OF_MEMORY")
    cluster.change(job_id, forgotten=True)
    with cluster.state() as state:
        state["accounting_away"] = True
    assert known_jobs(cluster.session(patience_s=0.0), [job_id])[0].state == "OUT_OF_MEMORY"
    shutil.rmtree(entry.remote_dir)
    assert known_jobs(cluster.session(patience_s=0.0), [job_id])[0].state == "OUT_OF_MEMORY"


def test_state_of_a_task_read_from_slurm_is_kept(session, cluster, tmp_path):
    """Slurm killed the first task after its program had recorded a good end, and then forgot it."""
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n#SBATCH --array=0-1\n")
    with cluster.state() as state:
        state["hold"] = True
    job_id = submit(session, JobSpec(name="mine", script=script, array="0-1")).job_id
    entry = session.ledger.find(job_id)
    for task in (0, 1):
        (Path(entry.remote_dir) / f"stdout-{task}.log").touch()
        write_events(Path(entry.remote_dir) / f"task-{task}", started=1)
    expected_states = [
        JobInfo(
            number=int(job_id),
            task=task,
            name="mine",
            user="u",
            state=JobState.COMPLETED,
            reason="",
        )
        for task in (0, 1)
    ]
    expected_states[0] = replace(expected_states[0], state=JobState.FAILED)
    remember_states(session.ledger, expected_states)
    # Commands have entries in sets.
    assert {session.ledger.find(job_id)}
    cluster.change(job_id, forgotten=True)
    with cluster.state() as state:
        state["accounting_refuses"] = "sacct: error: Access denied"
    states = {job.task: (job.state.value, job.exit_code) for job in known_jobs(session, [job_id])}
    assert states == {0: ("FAILED", None), 1: ("COMPLETED", 0)}
    # Somebody has requeued it since.
    write_events(Path(entry.remote_dir) / "task-0", started=time.time() + 10)
    states = {job.task: job.state.value for job in known_jobs(session, [job_id])}
    assert states == {0: "COMPLETED", 1: "COMPLETED"}


def test_state_of_a_job_read_from_slurm_is_kept(session, cluster, tmp_path):
    job_id = finished(session, cluster, tmp_path, "true")
    (job,) = known_jobs(session, [job_id])
    remember_states(session.ledger, [replace(job, state=JobState.FAILED)])
    cluster.change(job_id, forgotten=True)
    with cluster.state() as state:
        state["accounting_refuses"] = "sacct: error: Access denied"
    (job,) = known_jobs(session, [job_id])
    assert (job.state.value, job.exit_code) == ("FAILED", None)


@pytest.mark.parametrize("no_accounting", ["", "it is disabled"])
@pytest.mark.parametrize("is_named", [True, False])
def test_states_that_are_shown_are_remembered(session, cluster, tmp_path, no_accounting, is_named):
    """The limits of agents count by them, and Slurm's queue soon forgets them."""
    job_id = finished(session, cluster, tmp_path, "exit 3")
    session = with_inventory(session, no_accounting=no_accounting)

    def show():
        return known_jobs(session, [job_id]) if is_named else list_jobs(session)

    show()
    entry = session.ledger.find(job_id)
    assert (entry.state, entry.task_states) == ("FAILED", None)
    assert entry.state_at is not None
    size = session.ledger.workspace.jobs.stat().st_size
    show()
    assert session.ledger.workspace.jobs.stat().st_size == size


def test_state_of_a_single_task_is_not_that_of_its_array(session, cluster, tmp_path, monkeypatch):
    job_id = finished(session, cluster, tmp_path, "exit 3")
    (job,) = session.scheduler.jobs([job_id])
    tasks = tuple(replace(job, task=number) for number in (0, 1))

    def told(_, ids):
        return tuple(task for task in tasks if {task.id, task.whole_id}.intersection(ids))

    monkeypatch.setattr(type(session.scheduler), "jobs", told)
    known_jobs(session, [f"{job_id}_0"])
    assert session.ledger.find(job_id).state is None
    known_jobs(session, [job_id])
    assert session.ledger.find(job_id).state == "FAILED"


def write_events(folder: Path, *, started: float) -> None:
    """Write the record of an attempt that ended with status 0."""
    folder.mkdir(exist_ok=True)
    events = [
        {"event": "start", "time": started, "nodes": ["n2"]},
        {"event": "end", "time": started + 8, "status": 0},
    ]
    (folder / "job.events").write_text("".join(json.dumps(event) + "\n" for event in events))


def test_lost_answer_is_resolved_by_the_job_that_has_run(session, cluster, tmp_path):
    """The job's record has its id. A job without a record has not started, if there is no
    accounting.
    """
    job_id = finished(session, cluster, tmp_path, "true")
    entry = session.ledger.find(job_id)
    cluster.change(job_id, forgotten=True)
    lost = replace(entry, job_id=None, submitted_at=1.0)
    ledger = Ledger(tmp_path / "jobs.jsonl")
    ledger.add(lost)
    ledger.add(replace(lost, token=f"{lost.token}0", remote_dir=str(tmp_path / "never")))
    with cluster.state() as state:
        state["accounting_refuses"] = "Slurm accounting storage is disabled"
    session.scheduler.ledger = ledger
    resolve_submissions(session.scheduler, ledger)
    assert [(entry.job_id, entry.refused) for entry in ledger.entries()] == [
        (job_id, False),
        (None, False),
    ]
    session.scheduler.no_accounting = "Slurm accounting storage is disabled"
    resolve_submissions(session.scheduler, ledger)
    assert [(entry.job_id, entry.refused) for entry in ledger.entries()] == [
        (job_id, False),
        (None, True),
    ]


def test_accounting_without_comments_has_the_jobs_of_the_ledger(session, cluster, tmp_path):
    """Without AccountingStoreFlags=job_comment, a job is known by its folder."""
    job_id = finished(session, cluster, tmp_path, "true")
    entry = session.ledger.find(job_id)
    cluster.change(job_id, forgotten=True, comment="")
    assert known_jobs(session, [job_id])[0].token == entry.token
    assert session.scheduler.by_token(entry.token, entry.submitted_at).id == job_id


def test_collect_on_a_foreign_cluster_waits_for_the_recorded_end(session, cluster, tmp_path):
    """A file system such as NFS may show the end of a job's files up to a minute late."""
    job_id = finished(session, cluster, tmp_path, "exit 3")
    events = Path(session.ledger.find(job_id).remote_dir, "job.events")
    start, end = events.read_text().splitlines(keepends=True)
    events.write_text(start)
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if now[0] > 9:
            events.write_text(start + end)

    foreign = cluster.session(clock=Clock(lambda: now[0], sleep))
    foreign = with_inventory(foreign, is_foreign=True)
    (run,) = collect(foreign, [job_id], out=tmp_path / "runs")
    assert (run.directory / "job.events").read_text() == start + end
    assert 9 < now[0] < 20
    assert run.tasks[0].exit_code == 3


def test_records_of_thousands_of_jobs_are_read(session, cluster, tmp_path):
    """The names of their folders are longer than an argument of a program may be."""
    entry = session.ledger.find(finished(session, cluster, tmp_path, "exit 3"))
    ledger = Ledger(tmp_path / "jobs.jsonl")
    for number in range(1000, 4000):
        ledger.add(replace(entry, token=f"{number}", job_id=f"{number}"))
    jobs = recorded_jobs(session.transport, ledger, [str(number) for number in range(1000, 4000)])
    assert {job.exit_code for job in jobs} == {3}
    assert len(jobs) == 3000


def test_record_that_cannot_be_read_is_named(session, cluster, tmp_path):
    """A job may replace its record. `collect` does not wait for it, and the job has not
    succeeded.
    """
    job_id = finished(session, cluster, tmp_path, "true")
    cluster.change(job_id, forgotten=True)
    events = Path(session.ledger.find(job_id).remote_dir, "job.events")
    events.rename(tmp_path / "elsewhere")
    events.symlink_to(tmp_path / "elsewhere")
    with cluster.state() as state:
        state["accounting_refuses"] = "disabled"
    (job,) = known_jobs(session, [job_id])
    assert (job.state.value, "symbolic" in job.reason) == ("PURGED", True)
    session.ledger.update(session.ledger.find(job_id), state="COMPLETED")
    with cluster.state() as state:
        state.pop("accounting_refuses")
    waits = []
    foreign = cluster.session(clock=Clock(sleep=waits.append))
    collect(
        with_inventory(foreign, is_foreign=True),
        [job_id],
        out=tmp_path / "runs",
    )
    assert waits == []


def test_tasks_in_a_folder_that_cannot_be_read_are_not_cancelled(session, cluster, tmp_path):
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\ntrue\n")
    with cluster.state() as state:
        state["hold"] = True
    job_id = submit(session, JobSpec(name="mine", script=script, array="0-1")).job_id
    folder = Path(session.ledger.find(job_id).remote_dir)
    folder.rename(tmp_path / "elsewhere")
    folder.touch()
    cluster.change(job_id, forgotten=True)
    with cluster.state() as state:
        state["accounting_refuses"] = "disabled"
    jobs = known_jobs(session, [job_id])
    assert [(job.id, job.state.value) for job in jobs] == [
        (f"{job_id}_{n}", "PURGED") for n in (0, 1)
    ]


def test_array_with_more_tasks_than_are_read_says_so(tmp_path):
    """Tasks beyond the limit are unknown, like tasks in a folder that can't be read."""
    for task in range(3):
        (tmp_path / f"stdout-{task}.log").touch()
    assert [sorted(records(str(tmp_path), most)) for most in (2, 3)] == [
        ["", "0", "1"],
        ["0", "1", "2"],
    ]
    assert records(str(tmp_path), 2)[""]["error"]


class WithoutPython(LocalTransport):
    """A host whose Python does not start."""

    def run(self, argv, **more):
        return (
            Result(127, "", "sh: python3: not found")
            if argv[0] == "python3"
            else super().run(argv, **more)
        )


def test_unreadable_records_change_no_state(session, cluster, tmp_path):
    """A submission without an answer stays open. The jobs in the queue are still known."""
    ended = finished(session, cluster, tmp_path, "true")
    cluster.change(ended, forgotten=True)
    with cluster.state() as state:
        state["hold"] = True
    waiting = submitted(session, tmp_path, "true")
    session.scheduler.no_accounting = "Slurm accounting storage is disabled"
    session.scheduler.transport = WithoutPython()
    with refused("accounting-away", AccountingAwayError, "python3: not found") as caught:
        session.scheduler.jobs([waiting, ended])
    assert [job.id for job in caught.value.queued] == [waiting]
    ledger = Ledger(tmp_path / "jobs.jsonl")
    ledger.add(
        replace(session.ledger.find(ended), token=f"{waiting}0", job_id=None, submitted_at=1.0)
    )
    session.scheduler.ledger = ledger
    resolve_submissions(session.scheduler, ledger)
    assert [(entry.job_id, entry.refused) for entry in ledger.entries()] == [(None, False)]
