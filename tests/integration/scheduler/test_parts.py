"""Arrays above Slurm's MaxArraySize are submitted in parts."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path

import pytest

from clusterctl.errors import (
    AnswerLostError,
    KeyRefusedError,
    SlurmError,
    UnreachableError,
    UsageError,
)
from clusterctl.jobs.prepare import Preparer, Submission
from clusterctl.jobs.queue import cancel, known_jobs, list_jobs
from clusterctl.runs.collect import uncollected
from clusterctl.scheduler.parts import most_tasks, parts_of, tasks_of
from clusterctl.scheduler.request import Request
from clusterctl.scheduler.session import resolve_submissions
from clusterctl.spec.job import JobSpec
from clusterctl.util.process import Result
from tests.support.inventories import with_inventory
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused
from tests.support.played.cluster import PlayedCluster, submit


@pytest.mark.parametrize("array", ["[1-9:2]%2", "1-9:2%2", "[1,3,5-9:2]%2"])
def test_array_may_have_brackets_in_a_flag_and_in_a_script(tmp_path: Path, array: str) -> None:
    script = tmp_path / "a.sh"
    script.write_text(f"#!/bin/bash\n#SBATCH --array={array}\n")
    for job in (JobSpec(name="a", script=script), JobSpec(name="a", bundled="bench", array=array)):
        found = Request.read(job).array
        assert (tasks_of(found), found.partition("%")[2]) == ([1, 3, 5, 7, 9], "2")


@pytest.mark.parametrize(
    ("array", "limit", "parts"),
    [
        ("0-10", 11, []),
        ("0-10:2", 11, []),
        ("0-11", 11, [("0-9", "stdout-%a.log"), ("0-1", "stdout-1%1a.log")]),
        ("14", 11, [("4", "stdout-1%1a.log")]),
        (
            "5,15-40:10%3",
            11,
            [("5%3", f"stdout-{n or ''}%{'1' if n else ''}a.log") for n in range(4)],
        ),
        ("998-1001", 1001, [("998-999", "stdout-%a.log"), ("0-1", "stdout-1%3a.log")]),
        ("8-9,30", 10, [("8-9", "stdout-%a.log"), ("0", "stdout-3%1a.log")]),
    ],
)
def test_parts_have_the_tasks_below_the_limit(array, limit, parts):
    found = parts_of(array, limit)
    options = [[word.partition("=")[2] for word in part.options[:2]] for part in found]
    assert options == [list(part) for part in parts]
    assert {part.in_turn for part in found} <= {"%" in array}


@pytest.mark.parametrize("array", ["5-1", "0-9:0", "1-3,", "abc", "20-"])
def test_malformed_array_of_a_script_is_left_to_slurm(cluster, tmp_path, array):
    session = foreign(cluster)
    job = array_of(tmp_path, "0")
    job.script.write_text(f"#!/bin/bash\n#SBATCH --array={array}\n")
    job = JobSpec(name="mine", script=job.script)
    Preparer(lambda _: None).prepare(session, Submission.of([job]))
    with cluster.state() as state:
        state["refuse"] = (
            "sbatch: error: Batch job submission failed: Invalid job array specification"
        )
    with refused("slurm-refused", SlurmError, f"--array={array}"):
        submit(session, job)


def test_parts_are_limited_in_number():
    assert [most_tasks(limit) for limit in (1, 9, 10, 11, 1001)] == [1, 9, 1000, 1000, 100_000]


def foreign(cluster: PlayedCluster, **facts):
    """Return a session with a foreign cluster, on which jobs wait."""
    with cluster.state() as state:
        state["hold"] = True
    session = cluster.session()
    return with_inventory(session, is_foreign=True, max_array=11, **facts)


def array_of(folder, array: str, **more) -> JobSpec:
    (folder / "job.sh").write_text("#!/bin/bash\ntrue\n")
    return JobSpec(name="mine", script=folder / "job.sh", array=array, **more)


def tasks_in(cluster: PlayedCluster, *parts) -> None:
    for number, tasks in enumerate(parts, 1):
        cluster.change(str(number), tasks=list(tasks))


def test_array_in_parts_is_a_single_job(cluster, tmp_path):
    session = foreign(cluster)
    assert submit(session, array_of(tmp_path, "0-24")).job_id == "1"
    argv = [cluster.job(job_id)["argv"] for job_id in "123"]
    # The id of the array is known once Slurm has its first part.
    assert [words[words.index("--") + 2 :] for words in argv] == [
        [first, "0", "24", "25", *known] for first, known in (("0", ()), ("10", "1"), ("20", "1"))
    ]
    assert not any("--hold" in words for words in argv)
    tasks_in(cluster, range(10), range(10), range(5))
    jobs = known_jobs(session, ["1"])
    assert [job.id for job in jobs] == [f"1_{task}" for task in range(25)]
    assert len({job.token for job in (*jobs, *list_jobs(session).jobs)}) == 1
    assert [entry.job_id for entry in session.ledger.entries()] == ["1"]
    assert session.scheduler.slurm_ids(["1_14", "1_9", "7", "7_3"]) == ["2_4", "1_9", "7", "7_3"]
    assert [len(session.scheduler.accounted([job_id])) for job_id in ("1", "7")] == [25, 0]
    cancel(session, ["1"])
    assert {cluster.job(job_id)["state"] for job_id in "123"} == {"CANCELLED"}


def test_job_with_the_number_of_an_earlier_part_is_another_job(cluster, tmp_path):
    """Slurm may begin its numbers again."""
    session = foreign(cluster)
    submit(session, array_of(tmp_path, "0-24"))
    cluster.change("2", comment="clusterctl:feed", name="another")
    assert [
        (job.id, job.token) for job in session.scheduler.own_jobs() if job.name == "another"
    ] == [("2", "feed")]


def test_cancel_finds_the_part_whose_answer_was_lost(cluster, tmp_path):
    session = foreign(cluster)
    submit(session, array_of(tmp_path, "0-24"))
    session.ledger.update(session.ledger.entries_and_parts()[1], job_id=None)
    cancel(session, ["1"])
    assert {cluster.job(job_id)["state"] for job_id in "123"} == {"CANCELLED"}


def test_list_has_the_tasks_of_parts_that_the_queue_forgot(cluster, tmp_path):
    """Without accounting, the record of the job has them."""
    session = foreign(cluster)
    submit(session, array_of(tmp_path, "0-24"))
    tasks_in(cluster, range(10), range(10), range(5))
    cluster.change("1", forgotten=True)
    with cluster.state() as state:
        state["accounting_refuses"] = "disabled"
    assert [job.id for job in list_jobs(session).jobs] == [f"1_{task}" for task in range(25)]


@pytest.mark.parametrize(
    ("line", "more", "own"),
    [
        ("", {}, ""),
        ("#SBATCH -d afterok:7\n", {}, "afterok:7,"),
        ("#SBATCH -d afterok:7\n", {"after": ("8:any", "9")}, "afterany:8,afterok:9,"),
    ],
)
def test_array_with_a_limit_of_tasks_runs_in_turn(cluster, tmp_path, line, more, own):
    """The job's own dependencies hold for all parts. An option of sbatch replaces those in the
    script.
    """
    job = array_of(tmp_path, "0-24%2", **more)
    job.script.write_text(f"#!/bin/bash\n{line}true\n")
    submit(foreign(cluster), job)
    waits = [
        [word for word in cluster.job(job_id)["argv"] if "dependency" in word] for job_id in "123"
    ]
    assert waits == [[], [f"--dependency={own}afterany:1"], [f"--dependency={own}afterany:2"]]


@pytest.mark.parametrize(
    ("array", "dependency", "code"),
    [
        ("0-24%2", "afterok:7?afternotok:8", "dependency-refused"),
        ("0-24", "afterok:7?afternotok:8", None),
        ("0-9%2", "afterok:7?afternotok:8", None),
        ("0-24%2", "afterok:7,afternotok:8", None),
    ],
)
def test_parts_in_turn_have_no_alternative_dependencies(cluster, tmp_path, array, dependency, code):
    """Slurm 22.05 and 24.11 refuse a list with both separators: "Job dependency problem"."""
    job = array_of(tmp_path, array)
    job.script.write_text(f"#!/bin/bash\n#SBATCH -d {dependency}\ntrue\n")
    with nullcontext() if code is None else refused(code, UsageError):
        Preparer(lambda _: None).prepare(foreign(cluster), Submission.of([job]))


def test_single_task_above_the_limit_keeps_its_number(cluster, tmp_path):
    session = foreign(cluster)
    submit(session, array_of(tmp_path, "14"))
    tasks_in(cluster, [4])
    assert [job.id for job in known_jobs(session, ["1"])] == ["1_14"]
    assert session.scheduler.slurm_ids(["1_14"]) == ["1_4"]


def test_array_is_not_submitted_if_a_part_is_refused(cluster, tmp_path):
    session = foreign(cluster)
    with cluster.state() as state:
        state["most"] = 2
    with refused("slurm-refused", SlurmError, "AssocMaxSubmitJobLimit"):
        submit(session, array_of(tmp_path, "0-24"))
    assert {cluster.job(job_id)["state"] for job_id in "12"} == {"CANCELLED"}
    assert all("--hold" in cluster.job(job_id)["argv"] for job_id in "12")
    assert [(entry.job_id, entry.refused) for entry in session.ledger.entries()] == [("1", True)]
    assert (list_jobs(session).jobs, uncollected(session.workspace)) == ((), ())
    assert list((cluster.home / "clusterctl" / "jobs").iterdir()) == []


def test_array_that_cannot_be_released_keeps_its_folder(cluster, tmp_path):
    session = foreign(cluster)
    with cluster.state() as state:
        state["refuse_release"] = "slurm_update error: Access/permission denied"
    with refused("answer-lost", AnswerLostError, "permission denied"):
        submit(session, array_of(tmp_path, "0-24"))
    (entry,) = session.ledger.entries()
    assert (entry.job_id, entry.refused, entry.held) == ("1", False, "complete")
    assert {cluster.job(job_id)["state"] for job_id in "123"} == {"PENDING"}
    assert Path(entry.remote_dir).is_dir()
    with cluster.state() as state:
        state.pop("refuse_release")
    resolve_submissions(session.scheduler, session.ledger)
    assert not any("--hold" in cluster.job(job_id)["argv"] for job_id in "123")
    assert [entry.held for entry in session.ledger.entries()] == [""]


class Breaking(LocalTransport):
    """A connection that breaks at the third sbatch with ``error``. If ``away``, it stays broken."""

    def __init__(self, error: BaseException, *, away: bool) -> None:
        self._error = error
        self._away = away
        self._sent = 0

    def run(self, argv, **options) -> Result:
        self._sent += "--parsable" in argv
        if self._sent > 2 and "--parsable" in argv:
            raise self._error
        if self._away and self._sent > 2:
            raise UnreachableError("still broken")
        return super().run(argv, **options)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt(), KeyRefusedError("no"), UnreachableError("broken")], ids=repr
)
def test_interrupted_array_is_cancelled(cluster, tmp_path, error, away):
    """If Slurm does not answer either, a later command cancels the parts. None of them has
    started.
    """
    session = foreign(cluster)
    session.scheduler.transport = Breaking(error, away=away)
    session.scheduler.patience_s = 0.0
    with pytest.raises((KeyboardInterrupt, KeyRefusedError, AnswerLostError)) as caught:
        submit(session, array_of(tmp_path, "0-24"))
    assert getattr(caught.value, "had_side_effects", True)
    (entry,) = session.ledger.entries()
    assert (entry.job_id, entry.refused, entry.held) == ("1", False, "incomplete")
    assert Path(entry.remote_dir).is_dir()
    assert {cluster.job(job_id)["state"] for job_id in "12"} == {"PENDING" if away else "CANCELLED"}
    session.scheduler.transport = LocalTransport()
    resolve_submissions(session.scheduler, session.ledger)
    assert session.ledger.entries()[0].held == "incomplete"
    session.ledger.update(entry, submitted_at=1)
    resolve_submissions(session.scheduler, session.ledger)
    (entry,) = session.ledger.entries()
    assert (entry.refused, entry.held, Path(entry.remote_dir).exists()) == (True, "", False)
    assert {cluster.job(job_id)["state"] for job_id in "12"} == {"CANCELLED"}


def test_array_that_cannot_be_cancelled_is_cancelled_later(cluster, tmp_path):
    session = foreign(cluster)
    submit(session, array_of(tmp_path, "0-24"))
    session.ledger.update(session.ledger.entries()[0], held="incomplete", submitted_at=1)
    for owner, held in (("root", "incomplete"), (None, "")):
        cluster.change("2", owner=owner)
        resolve_submissions(session.scheduler, session.ledger)
        (entry,) = session.ledger.entries()
        is_there = Path(entry.remote_dir).exists()
        assert (entry.held, entry.refused, is_there) == (held, not held, bool(held))


def test_held_array_stays_held(cluster, tmp_path):
    submit(foreign(cluster), array_of(tmp_path, "0-24", slurm=("--hold",)))
    assert all("--hold" in cluster.job(job_id)["argv"] for job_id in "123")


def test_job_waits_for_all_parts_of_an_array(cluster, tmp_path):
    session = foreign(cluster)
    submit(session, array_of(tmp_path, "0-24"))
    job = JobSpec(name="next", script=tmp_path / "job.sh", after=("1:any",))
    (prepared,) = Preparer(lambda _: None).prepare(session, Submission.of([job]))
    assert "--dependency=afterany:1,afterany:2,afterany:3\n" in prepared.script


@pytest.mark.parametrize(
    ("array", "options", "code"),
    [
        ("0-24", {}, "too-many-tasks"),
        ("0-24", {"account": "mine"}, "too-many-tasks"),
        ("0-24", {"account": "other"}, None),
        ("0-24", {"qos": "long"}, None),
        ("0-24", {"slurm": ("--qos=long",)}, None),
        ("0-1000", {"account": "other"}, "array-too-large"),
    ],
)
def test_array_above_the_limits_is_refused(cluster, tmp_path, array, options, code):
    """The limits are those of the account and the QOS that jobs get if they name none."""
    session = foreign(cluster, max_submit=20, account="mine")
    submission = Submission.of([array_of(tmp_path, array, **options)])
    if code is None:
        Preparer(lambda _: None).prepare(session, submission)
        return
    with refused(code, UsageError):
        Preparer(lambda _: None).prepare(session, submission)
