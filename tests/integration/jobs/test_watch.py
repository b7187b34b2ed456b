"""Wait, follow, logs, cancel and list, with jobs that really run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from clusterctl.errors import (
    JobCancelledError,
    JobFailedError,
    JobStuckError,
    SchedulerError,
    TunnelRefusedError,
    UnreachableError,
    UsageError,
    WaitTimeoutError,
)
from clusterctl.jobs.log_text import KeptLogs
from clusterctl.jobs.remote_follow import select_logs
from clusterctl.jobs.stacks import stacks_of
from clusterctl.jobs.watch import (
    LogChunk,
    LogReader,
    follow,
    logs,
    raise_failures,
    raise_unless_completed,
    wait,
)
from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.ends import remote_logs
from clusterctl.scheduler.ends.diagnose import diagnose
from clusterctl.scheduler.ends.facts import Evidence
from clusterctl.scheduler.ends.judge import judge
from clusterctl.scheduler.history import attempts_of
from clusterctl.scheduler.session import Session
from clusterctl.scheduler.slurm.client import SlurmClient
from clusterctl.spec.job import JobSpec
from clusterctl.transport.base import remote_argv
from clusterctl.util.progress import Clock
from tests.support.inventories import with_inventory
from tests.support.local_transport import LocalTransport
from tests.support.messages import condition, refused
from tests.support.played.batch import rendered, user_script
from tests.support.played.cluster import PlayedCluster, finished, packed, submitted


class Follower:
    """Keeps the pieces of logs that `follow` reports."""

    def __init__(self) -> None:
        self.chunks: list[LogChunk] = []

    def __call__(self, chunk: LogChunk) -> None:
        self.chunks.append(chunk)

    def text(self, stream: str = "stdout") -> str:
        return b"".join(chunk.data for chunk in self.chunks if chunk.stream == stream).decode()


def log_of(session: Session, job_id: str, **more: Any) -> list[LogChunk]:
    """Return the pieces that `logs` shows."""
    follower = Follower()
    logs(session, job_id, on_output=follower, **more)
    return follower.chunks


def failed(session: Session, job_id: str, **more: Any) -> JobFailedError:
    """The error of a job that is waited for."""
    with refused("job-failed", JobFailedError) as caught:
        raise_unless_completed(session, wait(session, [job_id]), **more)
    error: JobFailedError = caught.value
    return error


def held(cluster: PlayedCluster, session: Session, folder: Path) -> tuple[str, Path]:
    """A job that stays PENDING until the test says otherwise, and its folder there."""
    with cluster.state() as state:
        state["hold"] = True
    job_id = submitted(session, folder, "true")
    return job_id, Path(cluster.job(job_id)["dir"])


def test_wait(session, cluster, tmp_path):
    job_id = submitted(session, tmp_path, "sleep 0.3")
    states: list[JobState] = []
    (job,) = wait(
        session, [job_id], on_change=lambda changed, _: states.extend(job.state for job in changed)
    )
    assert (job.state, job.exit_code) == (JobState.COMPLETED, 0)
    assert states[-1] is JobState.COMPLETED
    assert len(states) == len(set(states))
    raise_unless_completed(session, [job])
    assert [entry.state for entry in cluster.ledger.entries()] == ["COMPLETED"]


def test_logs_of_a_packed_task_are_its_own_until_its_job_has_ended(session, cluster, tmp_path):
    job_id = packed(session, tmp_path, "true", "0-3")
    folder = Path(cluster.job(job_id)["dir"])
    # The task has written nothing yet, and no such task exists.
    assert log_of(session, f"{job_id}_2") == []
    with refused("not-found/job", SchedulerError):
        log_of(session, f"{job_id}_4")
    for task in (1, 2):
        (folder / f"task-{task}").mkdir()
        (folder / f"task-{task}" / "stdout.log").write_text(f"task {task}\n")
    follower = Follower()

    def end(chunk: LogChunk) -> None:
        follower(chunk)
        cluster.change(job_id, state="COMPLETED", end=2_000_000_000)

    (job,) = follow(session, f"{job_id}_2", on_output=end, timeout_s=60)
    assert (follower.text(), follower.chunks[0].task, job.id) == ("task 2\n", 2, job_id)


def test_wait_notes_missing_nodes_only(cluster, tmp_path):
    reasons = iter(
        [
            *(
                "None",
                "Priority",
                "ReqNodeNotAvail, UnavailableNodes:n1",
                "ReqNodeNotAvail, May be reserved",
            ),
            *(
                "Resources",
                "Nodes_required_for_job_are_DOWN,_DRAINED_or_reserved_for_jobs",
                "Priority",
            ),
        ]
    )

    def sleep(_seconds: float) -> None:
        if reason := next(reasons, None):
            cluster.change(job_id, reason=reason)
        else:
            cluster.change(job_id, state="CANCELLED")

    session = cluster.session(clock=Clock(sleep=sleep))
    job_id, _ = held(cluster, session, tmp_path)
    follower: list[tuple[bool, str]] = []
    note = lambda changed, _: follower.extend((job.lacks_nodes, job.reason[:15]) for job in changed)  # noqa: E731
    wait(session, [job_id], on_change=note)
    assert [reason for lacks, reason in follower if lacks] == ["ReqNodeNotAvail", "Nodes_required_"]
    assert len(follower) == 6  # first, then whenever it begins or ends to lack them, and its end


@pytest.mark.parametrize("states", [["PENDING", "COMPLETED"], []])
def test_job_killed_with_its_node_may_start_again(cluster, tmp_path, states):
    """The controller's watcher requeues a job that was killed with its node."""
    now = [0.0]
    coming = iter(states)

    def sleep(seconds: float) -> None:
        now[0] += seconds
        if state := next(coming, None):
            cluster.change(job_id, state=state, reason="None")

    session = cluster.session(clock=Clock(lambda: now[0], sleep))
    job_id, _ = held(cluster, session, tmp_path)
    cluster.change(job_id, state="FAILED", reason="RaisedSignal:9(Killed)")
    (job,) = wait(session, [job_id])
    assert job.state.value == (states or ["FAILED"])[-1]


def test_wait_for_many_jobs_uses_one_query_at_a_time(session, cluster, tmp_path):
    ids = [finished(session, cluster, tmp_path, "true") for _ in range(3)]
    before = cluster.calls("squeue")
    assert len(wait(session, ids)) == 3
    assert cluster.calls("squeue") == before + 1


def foreign_wait(
    cluster: PlayedCluster, folder: Path, events: dict[float, tuple[str, dict[str, Any] | None]]
) -> list[float]:
    """Wait for a job on a cluster of others. Return the times of the queries, the last with its
    end.

    events: time -> the job's new state in the queue, and what the job records.
    """
    now = [0.0]
    asked = []
    job_id, job_folder = held(cluster, cluster.session(), folder)
    before = cluster.calls("squeue")

    def sleep(seconds: float) -> None:
        asked.extend([now[0]] * (cluster.calls("squeue") - before - len(asked)))
        now[0] += seconds
        for time in [time for time in events if time <= now[0]]:
            state, event = events.pop(time)
            cluster.change(job_id, state=state, start=1)
            if event:
                with (job_folder / "job.events").open("a") as file:
                    file.write(json.dumps({"time": time, **event}) + "\n")

    session = cluster.session(clock=Clock(lambda: now[0], sleep))
    session = with_inventory(session, is_foreign=True)
    (job,) = wait(session, [job_id])
    assert job.state is JobState.COMPLETED
    return [*asked, now[0]]


def test_wait_on_a_foreign_cluster_reads_the_jobs_folder(cluster, tmp_path):
    """Slurm is asked when the job's record changes, and rarely while it waits or runs."""
    events = {
        40: ("RUNNING", {"event": "start", "nodes": ["n1"]}),
        1000: ("RUNNING", {"event": "end", "status": 0}),
        1012: ("COMPLETED", None),
    }
    times = foreign_wait(cluster, tmp_path, events)
    assert len([time for time in times if time < 40]) == 2
    assert len([time for time in times if 70 < time < 1000]) == 3
    assert 1012 <= times[-1] <= 1027


def test_wait_on_a_foreign_cluster_sees_a_short_job_end(cluster, tmp_path):
    """Queries are saved up for the changes of a short job."""
    events = {
        1: ("RUNNING", {"event": "start", "nodes": ["n1"]}),
        3: ("COMPLETING", {"event": "end", "status": 0}),
        4: ("COMPLETED", None),
    }
    times = foreign_wait(cluster, tmp_path, events)
    assert times[-1] < 8
    assert len(times) <= 5


def test_wait_on_a_foreign_cluster_keeps_its_pace(cluster, tmp_path):
    """A job whose record changes all the time costs five queries more than one in 10 s."""
    progress = {float(time): ("RUNNING", {"event": "progress"}) for time in range(1, 150)}
    times = foreign_wait(cluster, tmp_path, {**progress, 150.0: ("COMPLETED", None)})
    assert all(
        len([time for time in times[:-1] if time < end]) <= 5 + end / 10 for end in range(0, 151, 5)
    )
    assert all(later - earlier >= 1 for earlier, later in pairwise(times))


@pytest.mark.parametrize(
    ("states", "command"),
    [
        # What repairs the cause of the wait, or shows the output.
        (["PENDING"], "`clusterctl up`"),
        (["PENDING", "COMPLETED"], "`clusterctl up`"),
        (["RUNNING"], "`clusterctl logs"),
        (["PENDING", "RUNNING"], "`clusterctl logs"),
        (["COMPLETING"], "`clusterctl status`"),
    ],
)
def test_wait_that_runs_out(cluster, tmp_path, states, command):
    times = iter(range(10**6))
    session = cluster.session(clock=Clock(lambda: float(next(times)), lambda _s: None))
    ids = [held(cluster, session, tmp_path)[0] for _ in states]
    for job_id, state in zip(ids, states, strict=True):
        cluster.change(job_id, state=state, reason="NodeDown" if state == "PENDING" else "None")
    with refused("wait-timeout", WaitTimeoutError, "60") as caught:
        wait(session, ids, timeout_s=60)
    found = [part.partition(": ") for part in caught.value.why.split("; ")]
    assert all(
        head.startswith(f"job {i} ") and state in head and ("NodeDown" in head) is bool(cause)
        for i, state, (head, _, cause) in zip(ids, states, found, strict=True)
    )
    # Slurm's reason in words.
    assert [bool(cause) for _, _, cause in found] == [state == "PENDING" for state in states]
    assert [word in caught.value.fix for word in ("`clusterctl up`", "`clusterctl logs")].count(
        True
    ) == 1
    assert command in caught.value.fix
    assert cluster.job(ids[0])["state"] == states[0]


STUCK = (
    *(
        "DependencyNeverSatisfied",
        "BadConstraints",
        "PartitionConfig",
        "PartitionTimeLimit",
        "JobHeldUser",
    ),
    *(
        "PartitionNodeLimit",
        "JobHeldAdmin",
        "JobHoldMaxRequeue",
        "QOSMaxNodePerJobLimit",
        "QOSMinMemory",
    ),
    *(
        "AssocMaxCpuPerJobLimit",
        "AccountNotAllowed",
        "InvalidQOS",
        "ReservationDeleted",
        "MaxMemPerLimit",
    ),
)
FREE = (
    *(
        "",
        "Priority",
        "Resources",
        "Dependency",
        "BeginTime",
        "Licenses",
        "Reservation",
        "QOSJobLimit",
    ),
    *(
        "QOSMaxCpuPerUserLimit",
        "AssocMaxJobsLimit",
        "JobArrayTaskLimit",
        "PartitionDown",
        "NodeDown",
    ),
    *("ReqNodeNotAvail, UnavailableNodes:n1", "launch failed requeued held", "AssocGrpCpuLimit"),
)


def test_is_stuck_by_reason(session, cluster, tmp_path):
    job_id, _ = held(cluster, session, tmp_path)
    (job,) = session.scheduler.jobs([job_id])
    stuck = [reason for reason in STUCK + FREE if replace(job, reason=reason).is_stuck]
    assert stuck == [*STUCK]
    assert not replace(job, reason=STUCK[0], state=JobState.RUNNING).is_stuck


@pytest.mark.parametrize("reason", ["DependencyNeverSatisfied", "QOSMaxNodePerJobLimit"])
def test_wait_job_never_starts_ends(cluster, tmp_path, reason):
    """`--wait` ends with the reason, and not before the reason has lasted."""
    times = iter(range(10**6))
    session = cluster.session(clock=Clock(lambda: float(next(times)), lambda _s: None))
    job_id, _ = held(cluster, session, tmp_path)
    cluster.change(job_id, reason=reason)
    with refused("job-stuck", JobStuckError, job_id) as caught:
        raise_unless_completed(session, wait(session, [job_id], timeout_s=100))
    diagnosis = caught.value.answer["diagnosis"]
    assert (diagnosis["reason"], diagnosis["state"], caught.value.exit_code) == (
        reason,
        "PENDING",
        4,
    )
    assert next(times) > 10
    assert "clusterctl logs" not in caught.value.fix


def test_follow_job_never_starts_ends(cluster, tmp_path):
    """A reason that comes while the job waits ends `--follow` as well, and is reported once."""
    states: list[str] = []
    session = cluster.session(clock=Clock(iter(range(10**6)).__next__, lambda _s: None))
    job_id, _ = held(cluster, session, tmp_path)
    cluster.change(job_id, reason="Dependency")

    def changed(jobs: Any, _: object) -> None:
        states.extend(job.reason for job in jobs)
        cluster.change(job_id, reason="DependencyNeverSatisfied")

    (job,) = follow(session, job_id, on_output=Follower(), on_change=changed)
    assert (job.is_stuck, states) == (True, ["Dependency", "DependencyNeverSatisfied"])


def test_wait_other_jobs_run_goes_on(session, cluster, tmp_path):
    """A job that never starts does not hide the end of the jobs that run."""
    stuck, _ = held(cluster, session, tmp_path)
    cluster.change(stuck, reason="BadConstraints")
    with cluster.state() as state:
        state["hold"] = False
    other = submitted(session, tmp_path, "exit 3")
    times = iter(range(10**6))
    waiting = cluster.session(clock=Clock(lambda: float(next(times)), lambda _s: None))
    with refused("job-failed", JobFailedError, other) as caught:
        raise_unless_completed(waiting, wait(waiting, [stuck, other]))
    assert [condition(failure) for failure in caught.value.failures] == ["job-failed"] * 2


def test_job_that_slurm_never_heard_of(cluster):
    times = iter(range(0, 10**6, 5))
    session = cluster.session(clock=Clock(lambda: float(next(times)), lambda _s: None))
    with refused("not-found/job", SchedulerError, "77"):
        wait(session, ["77"])


def test_failed_job_shows_the_end_of_its_log(session, tmp_path):
    job_id = submitted(
        session, tmp_path, "echo out; for i in {1..30}; do echo line $i >&2; done; exit 7"
    )
    error = failed(session, job_id)
    diagnosis = error.answer["diagnosis"]
    assert (diagnosis["job_id"], diagnosis["host"], diagnosis["exit_code"]) == (job_id, "n1", 7)
    assert re.findall(r"\| line (\d+)\n", f"{error}\n") == [str(number) for number in range(21, 31)]
    (failure,) = error.failures
    assert (failure.host, "line 30" in failure.cause, error.exit_code) == ("n1", True, 4)
    assert f"clusterctl logs {job_id}" in failure.fix


def test_missing_file_that_was_not_sent_is_named_with_include(session, tmp_path):
    folder = tmp_path / "project"
    (folder / "kept").mkdir(parents=True)
    (folder / "kept" / "data.csv").touch()
    (folder / ".gitignore").write_text("kept/\n")
    subprocess.run(["git", "init", "-q", folder], check=True)
    job_id = submitted(session, folder, "cat kept/data.csv")
    error = failed(session, job_id)
    assert all(word in error.fix for word in ("--include", "kept/data.csv"))
    assert "--exclude" not in error.fix


def test_follow_does_not_quote_log_lines_twice(session, tmp_path):
    job_id = submitted(session, tmp_path, "echo it broke >&2; exit 4")
    error = failed(session, job_id, log_is_shown=True)
    assert "| it broke" not in str(error)
    diagnosis = error.answer["diagnosis"]
    assert (diagnosis["lines"], diagnosis["exit_code"]) == (["it broke"], 4)


ALONE = "srun: Job step aborted: Waiting up to 7 seconds for job step to finish."


@pytest.mark.parametrize(
    ("body", "lines"),
    [
        ("echo only this", ["only this"]),
        (f"echo '{ALONE}' >&2", [ALONE]),  # noise, where there is nothing else
        (r"printf 'a\033[31m\007b\xff\n' >&2", ["a\\x07b\N{REPLACEMENT CHARACTER}"]),
        (
            r"printf '50%%\ra\x0bb\x0cc\x1cd\xc2\x85e\xe2\x80\xa8f\r\nlast' >&2",
            [r"50%\ra\x0bb\x0cc\x1cd\x85e\u2028f", "last"],
        ),
    ],
)
def test_end_of_a_failed_jobs_log_is_shown(session, tmp_path, body, lines):
    """The end of stdout is shown if the job wrote no stderr. Control characters of a log do not
    reach the terminal, and a log can't imitate a line of clusterctl.
    """
    error = failed(session, submitted(session, tmp_path, f"{body}; exit 1"))
    assert [line[2:] for line in error.why.splitlines() if line[:2] == "| "] == lines
    assert all(c.isprintable() or c == "\n" for c in str(error))


@pytest.mark.parametrize(
    ("state", "error", "exit_code"),
    [
        ("CANCELLED", JobCancelledError, 5),
        ("NODE_FAIL", JobFailedError, 4),
    ],
)
def test_wait_raises_the_error_of_the_final_state(
    session, cluster, tmp_path, *, state, error, exit_code
):
    job_id, _ = held(cluster, session, tmp_path)
    cluster.change(job_id, state=state, reason="SomeReason")
    with pytest.raises(error) as caught:
        raise_unless_completed(session, wait(session, [job_id]))
    assert caught.value.exit_code == exit_code
    assert f"{state} (SomeReason)" in caught.value.why
    assert "wrote nothing" in caught.value.why


def test_log_of_a_job_of_another_program_is_not_called_empty(session) -> None:
    other = JobInfo(number=99, name="x", user="ada", state=JobState.FAILED, reason="", exit_code=1)
    found = judge(session, [other])[other.id]
    assert found.note
    assert "wrote nothing" not in found.note


@pytest.mark.parametrize(
    ("codes", "told"),
    [
        ((1,), []),
        ((1, 1, 1), ["7_0, 7_1, 7_2"]),
        ((1, 2, 2, 1), ["7_0, 7_3", "7_1, 7_2"]),
        ((1, -53), ["7_0", "7_1"]),
    ],
)
def test_error_names_the_tasks_of_each_cause(codes: tuple[int, ...], told: list[str]) -> None:
    tasks = [
        JobInfo(
            number=7, task=at, name="x", user="ada", state=JobState.FAILED, reason="",
            exit_code=max(code, 0), signal=max(-code, 0), nodes=(f"n{at}",),
        )
        for at, code in enumerate(codes)
    ]  # fmt: skip
    with pytest.raises(JobFailedError) as caught:
        raise_failures(tasks, {task.id: diagnose(Evidence(job=task)) for task in tasks})
    lines = [line for line in caught.value.why.splitlines() if " FAILED: " in line]
    assert [line.partition(" FAILED: ")[0] for line in lines] == told


def test_file_system_without_room_is_full(tmp_path: Path) -> None:
    assert remote_logs.is_full("/proc")
    assert not remote_logs.is_full(str(tmp_path))
    assert not remote_logs.is_full(str(tmp_path / "gone"))


def test_follow_prints_each_log_byte_once(session, tmp_path):
    body = f"""for i in {{1..30}}; do
        echo out $i; echo err $i >&2
        [[ $i -ne 15 ]] || until [[ -e {tmp_path}/seen ]]; do sleep 0.03; done
    done
    printf 'no newline'"""
    job_id = submitted(session, tmp_path, body)
    follower = Follower()

    def on_output(chunk: LogChunk) -> None:
        follower(chunk)
        (tmp_path / "seen").touch()

    (job,) = follow(session, job_id, on_output=on_output)
    assert job.state is JobState.COMPLETED
    assert follower.text().split("\n") == [*(f"out {i}" for i in range(1, 31)), "no newline"]
    assert follower.text("stderr") == "".join(f"err {i}\n" for i in range(1, 31))
    assert len(follower.chunks) > 2  # it came bit by bit


def test_follow_waits_for_a_log_that_is_not_there_yet(session, cluster, tmp_path):
    job_id, folder = held(cluster, session, tmp_path)

    def later() -> None:
        (folder / "stdout.log").write_bytes(b"at last\xff\n")
        cluster.change(job_id, state="COMPLETED")

    timer = threading.Timer(0.5, later)
    timer.start()
    follower = Follower()
    follow(session, job_id, on_output=follower)
    timer.join()
    assert follower.chunks == [LogChunk("stdout", None, b"at last\xff\n")]


def test_follow_of_an_array_labels_the_tasks(session, cluster, tmp_path):
    job_id, folder = held(cluster, session, tmp_path)
    for task in (3, 13):
        (folder / f"stdout-{task}.log").write_text(f"task {task}\n")
    cluster.change(job_id, state="COMPLETED")
    follower = Follower()
    transport = Counted()
    follow(session, job_id, on_output=follower)
    assert follower.chunks == [
        LogChunk("stdout", 3, b"task 3\n"),
        LogChunk("stdout", 13, b"task 13\n"),
    ]
    counted = replace(session, scheduler=SlurmClient(transport))
    assert log_of(counted, f"{job_id}_3") == [LogChunk("stdout", 3, b"task 3\n")]
    # The other task's log did not travel.
    assert transport.streamed.count(b'"data"') == 1
    with refused("not-found/job", SchedulerError, f"{job_id}", "_9"):
        log_of(session, f"{job_id}_9")


def test_logs_of_ranks(session, cluster, tmp_path):
    job_id, folder = held(cluster, session, tmp_path)
    (folder / "stdout.log").write_text("all\n")
    assert log_of(session, job_id, rank="0") == [LogChunk("stdout", None, b"all\n")]
    (folder / "rank-logs").mkdir()
    (folder / "rank-logs" / "0.stack").touch()
    assert log_of(session, job_id, rank="0") == [LogChunk("stdout", None, b"all\n")]
    for number in (0, 2, 10):
        (folder / "rank-logs").mkdir(exist_ok=True)
        (folder / "rank-logs" / f"{number}.log").write_text(f"of {number}\n")
    (folder / "rank-logs" / "3.log").symlink_to("/etc/hostname")
    (folder / "rank-logs" / "x.log").write_text("none of ours\n")
    follower = Follower()
    cluster.change(job_id, state="COMPLETED")
    follow(session, job_id, on_output=follower, rank="all")
    assert follower.chunks == [
        LogChunk("stdout", None, f"of {n}\n".encode(), n) for n in (0, 2, 10)
    ]
    assert log_of(session, job_id, rank="2") == [LogChunk("stdout", None, b"of 2\n", 2)]
    with refused("not-found/rank", UsageError):
        log_of(session, job_id, rank="4")


def test_output_is_shown_before_errors(tmp_path: Path) -> None:
    for name in ("stderr.log", "stdout.log"):
        (tmp_path / name).touch()
    assert select_logs(str(tmp_path), "", "") == ["stdout.log", "stderr.log"]


def test_select_logs_has_tasks_in_numeric_order(tmp_path: Path) -> None:
    for task in (0, 1, 2, 10, 1000):
        (tmp_path / f"stdout-{task}.log").touch()
        (tmp_path / f"stderr-{task}.log").touch()
    names = [
        f"{stream}-{task}.log" for stream in ("stdout", "stderr") for task in (0, 1, 2, 10, 1000)
    ]
    assert select_logs(str(tmp_path), "", "") == names


def test_logs_of_an_arrays_ranks(session, cluster, tmp_path):
    job_id, folder = held(cluster, session, tmp_path)
    for task in (1, 2):
        (folder / f"stdout-{task}.log").write_text(f"task {task}\n")
    (folder / "task-2" / "rank-logs").mkdir(parents=True)
    (folder / "task-2" / "rank-logs" / "1.log").write_text("second\n")
    second = LogChunk("stdout", 2, b"second\n", 1)
    assert log_of(session, job_id, rank="all") == [second, LogChunk("stdout", 1, b"task 1\n")]
    assert log_of(session, f"{job_id}_2", rank="1") == [second]


class Counted(LocalTransport):
    """Keeps all bytes and answers that the host sent."""

    def __init__(self) -> None:
        self.streamed = b""
        self.answers: list[str] = []

    def run(self, argv, **options):
        done = super().run(argv, **options)
        self.answers.append(done.stdout)
        return done

    def stream(self, argv):
        for piece in super().stream(argv):
            self.streamed += piece
            yield piece


class Breaking(LocalTransport):
    """Streams break after the first pieces, three times. Then a file tells the job to continue."""

    breaks = 3

    def __init__(self, steady, error):
        self.steady = steady
        self.error = error

    def stream(self, argv):
        for count, piece in enumerate(super().stream(argv)):
            yield piece
            if self.breaks and count >= 1:
                self.breaks -= 1
                if not self.breaks:
                    self.steady.touch()
                raise self.error


def tunnel_refusal(*, has_grace: bool) -> TunnelRefusedError:
    error = TunnelRefusedError("the tunnel is refused")
    error.has_grace = has_grace
    return error


@pytest.mark.parametrize(
    "error", [UnreachableError("the connection broke"), tunnel_refusal(has_grace=True)]
)
def test_follow_mends_a_broken_connection(session, cluster, tmp_path, error):
    steady = tmp_path / "steady"
    transport = Breaking(steady, error)
    shaky = replace(session, scheduler=SlurmClient(transport, clock=Clock(sleep=lambda _s: None)))
    lines = f"while [ ! -e '{steady}' ]; do echo $((i += 1)); sleep 0.05; done; echo end"
    job_id = submitted(session, tmp_path, lines)
    follower = Follower()
    follow(shaky, job_id, on_output=follower)
    assert transport.breaks == 0
    *numbers, last = follower.text().splitlines()
    assert numbers == [str(number) for number in range(1, len(numbers) + 1)]
    assert last == "end"


class Silent(LocalTransport):
    """Reads no log."""

    def stream(self, argv):
        raise UnreachableError("no SSH connection", why=f"for {argv[0]}")


def test_follow_gives_up_if_the_cluster_stays_unreachable(session, cluster, tmp_path):
    steady = tmp_path / "steady"
    job_id = submitted(session, tmp_path, f"until [ -e '{steady}' ]; do sleep 0.05; done")
    passed = [0.0]

    def sleep(seconds: float) -> None:
        passed[0] += seconds
        assert passed[0] < 600

    clock = Clock(now=lambda: passed[0], sleep=sleep)
    with refused(condition(UnreachableError), UnreachableError):
        follow(
            replace(session, scheduler=SlurmClient(Silent(), clock=clock)),
            job_id,
            on_output=Follower(),
        )
    assert passed[0] >= 60
    steady.touch()


def test_follow_ends_if_the_login_has_expired(session, cluster, tmp_path):
    steady = tmp_path / "steady"
    transport = Breaking(steady, tunnel_refusal(has_grace=False))
    shaky = replace(session, scheduler=SlurmClient(transport, clock=Clock(sleep=lambda _s: None)))
    job_id = submitted(session, tmp_path, f"while [ ! -e '{steady}' ]; do echo x; sleep 0.05; done")
    with refused("cloud-permission/tunnel", TunnelRefusedError):
        follow(shaky, job_id, on_output=Follower())
    assert transport.breaks == 2
    steady.touch()


def test_shorter_log_of_a_requeued_job_is_printed_from_its_start(session, cluster, tmp_path):
    job_id, folder = held(cluster, session, tmp_path)
    log = folder / "stdout.log"
    log.write_text("first life, long\n")

    follower = Follower()

    def show(chunk) -> None:
        follower(chunk)
        if follower.text() == "first life, long\n":
            log.write_text("second\n")
            cluster.change(job_id, state="COMPLETED")

    follow(session, job_id, on_output=show)
    assert follower.text() == "first life, long\nsecond\n"


def test_logs_of_jobs_of_others_are_refused(session, cluster, tmp_path):
    with refused("not-found/job", SchedulerError, "77"):
        log_of(session, "77")
    job_id, _ = held(cluster, session, tmp_path)
    cluster.change(job_id, comment="")
    with cluster.state() as state:
        state["jobs"]["500"] = state["jobs"][job_id]
    with refused("not-yours/job", SchedulerError):
        log_of(session, "500")
    job_id, _ = held(cluster, session, tmp_path)
    with cluster.state() as state:
        theirs = {**state["jobs"][job_id], "user": "eve", "dir": "/shared/home/eve/closed"}
        state["jobs"]["501"] = theirs
    for ask in (log_of, stacks_of):
        with refused("not-yours/user", SchedulerError, "eve"):
            ask(session, "501")
    with refused("option-invalid/job-id", UsageError):
        log_of(session, f"{job_id}_x")


def test_tail_of_a_log_is_short_however_long_its_lines_are(session, tmp_path):
    """Of a line of 64 MiB, at most 64 KiB are sent to show its end."""
    job_id = submitted(
        session, tmp_path, "head -c 64M /dev/zero | tr '\\0' x >&2; echo end >&2; exit 1"
    )
    transport = Counted()
    counting = replace(session, scheduler=SlurmClient(transport))
    why = failed(counting, job_id).why
    assert why.endswith("xend")
    follower = next(json.loads(text) for text in transport.answers if text.startswith("{"))
    assert 0 < len(follower["tasks"][""]["stderr"]) <= 1 << 16
    assert len(why) < 2200


def test_job_that_removed_its_folder(session, cluster, tmp_path):
    job_id = submitted(session, tmp_path, 'rm -rf "${PWD%/*}"; exit 1')
    assert "no longer exists" in failed(session, job_id).why
    with refused("not-found/job-folder", SchedulerError, job_id):
        log_of(session, job_id)


def test_logs_that_can_not_be_read_are_an_error(session, cluster, tmp_path):
    job_id = submitted(session, tmp_path, "echo x")
    cluster.wait_until_ended(job_id)
    folder = Path(session.ledger.find(job_id).remote_dir)
    folder.rename(tmp_path / "away")
    folder.symlink_to(folder)
    with refused("file-unreadable/logs", SchedulerError, job_id):
        log_of(session, job_id)


class Mute(LocalTransport):
    """A cluster that goes out of reach."""

    def run(self, *_argv, **_options):
        raise UnreachableError("no connection")

    stream = run


@pytest.mark.parametrize("stderr", ["pipe", "endless", "folder", "empty"])
def test_end_of_a_log_is_read_with_care(tmp_path, stderr):
    log = tmp_path / "stderr.log"
    {
        "pipe": os.mkfifo,
        "endless": lambda p: p.symlink_to("/dev/zero"),
        "folder": Path.mkdir,
        "empty": Path.touch,
    }[stderr](log)
    with (tmp_path / "stdout.log").open("wb") as file:
        file.write(b"the beginning\n")
        file.truncate(1 << 40)
        file.seek(0, os.SEEK_END)
        file.write(b"\nlast\x1b[31m\x1b[2J\n")
    found = ends_there(tmp_path)
    assert found["stdout"].endswith("\nlast\x1b[31m\x1b[2J\n")
    assert (len(found["stdout"]), found["stderr"], found["gone"]) == (1 << 16, "", False)
    assert ends_there(tmp_path / "gone")["gone"]


def test_restarted_job_is_judged_by_its_last_attempt(tmp_path, batch):
    batch.environment |= {"SLURM_RESTART_COUNT": "1", "SLURM_PROCID": "1"}
    script = user_script(batch.folder, "end.py", "raise SystemExit('second')")
    (batch.folder / "rank-logs").mkdir()
    (batch.folder / "rank-logs" / "1.log").write_text("first 50%")
    _, out, err = batch.run(rendered(JobSpec(name="j", script=script, nodes=2)))
    (batch.folder / "stdout.log").write_text("first 50%" + out)
    (batch.folder / "stderr.log").write_text("first 50%" + err)
    found = ends_there(batch.folder)
    assert [text.split() for text in (found["stdout"], found["stderr"])] == [[], ["second"]]
    assert found["ranks"] == {"1": "\nsecond\n"}
    (batch.folder / "rank-logs" / "2.end").touch()
    assert ends_there(batch.folder)["ends"]["2"] == ""


def test_ranks_of_an_earlier_attempt_are_left_out(tmp_path):
    """Rank 1's node was lost: its log and its end are of the first attempt. Rank 0 wrote too much
    to tell.
    """
    (tmp_path / "rank-logs").mkdir()
    start = (
        '{{"time": {0}.5, "event": "start", "nodes": ["n1", "n2"], "restarts": {0}, "until": 9}}\n'
    )
    (tmp_path / "job.events").write_text("".join(map(start.format, (0, 1, 2))))
    (tmp_path / "stderr.log").write_text(
        "of the first\nclusterctl: restart 1 of this job\nof the second"
    )
    (tmp_path / "rank-logs" / "0.log").write_text("x" * (1 << 17))
    (tmp_path / "rank-logs" / "1.log").write_text("of the first")
    (tmp_path / "rank-logs" / "2.log").write_text(
        "\nclusterctl: restart 2 of this job\nof the third"
    )
    for rank in range(3):
        (tmp_path / "rank-logs" / f"{rank}.end").write_text(f"5.0 {rank + 1} n1\n")
    found = ends_there(tmp_path)
    assert found["stderr"] == ""
    assert found["ranks"] == {"0": "x" * (1 << 16), "2": "\nof the third"}
    assert found["ends"].keys() == {"0", "2"}
    assert attempts_of(found["events"])[-1].number == 2


def ends_there(folder: Path) -> Any:
    """The ends of a job's logs, read by the program that runs on the cluster."""
    program = "clusterctl.scheduler.ends.remote_logs"
    argv = remote_argv(program, "ends", str(folder), "", "logs")
    answer = LocalTransport().run(argv, stdin=b'{"": [null, false]}').stdout
    return json.loads(answer)["tasks"][""]


def test_following_ends_in_time_also_without_a_connection(cluster, tmp_path):
    job_id, _ = held(cluster, cluster.session(), tmp_path)
    now = [0.0]
    clock = Clock(lambda: now[0], lambda seconds: now.__setitem__(0, now[0] + seconds))
    slurm = SlurmClient(Mute(), clock=clock)
    lost = replace(cluster.session(), scheduler=slurm)
    with pytest.raises(WaitTimeoutError):
        follow(lost, job_id, on_output=Follower(), timeout_s=5)
    assert now[0] <= 6


def test_read_with_a_limit_begins_near_the_end_of_each_log(tmp_path: Path) -> None:
    """The log may have a gigabyte."""
    (tmp_path / "stdout.log").write_bytes(b"x" * 1000 + b"end")
    (tmp_path / "stderr.log").write_bytes(b"short")
    reader = LogReader(LocalTransport(), str(tmp_path), most=10)
    chunks = [chunk for chunk in reader.read("once") if chunk is not None]
    assert [(chunk.at, chunk.data) for chunk in chunks] == [(993, b"x" * 7 + b"end"), (0, b"short")]
    with (tmp_path / "stdout.log").open("ab") as log:
        log.write(b"y" * 20)
    assert [chunk.data for chunk in reader.read("once") if chunk is not None] == [b"y" * 20]
    kept = KeptLogs(most=100)
    for chunk in chunks:
        kept.keep(chunk)
    assert [(log.text, log.truncated) for log in kept.texts()] == [
        ("xxxxxxxend", True),
        ("short", False),
    ]
