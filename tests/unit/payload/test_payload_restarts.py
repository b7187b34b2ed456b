"""Whether a failed job runs again: the rules as tables, and how an attempt's end and progress are
read.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from clusterctl.scheduler.base import JobInfo, JobState
from clusterctl.scheduler.ends.failed_rank import first_failed
from payload.node import history, restarts
from payload.node.history import Attempt
from payload.node.restarts import failure

HERE = (100, 170, 0)
LATER = (200, 210, 0)
AT = "ValueError at train.py:12"


def failed(
    kind: str = "SIGKILL",
    progress: tuple[int, ...] = HERE,
    *,
    nodes: str = "",
    until: float = 0,
    signal: str = "",
) -> Attempt:
    """An attempt from 100 to 200 s. nodes: on which it failed. until: its time limit."""
    sent = [{"event": "signal", "time": 150, "signal": signal}] if signal else []
    facts = {**failure(kind, suspects=nodes.split()), "progress": [*progress]}
    end = {"event": "requeue", "time": 200, **facts}
    return Attempt({"event": "start", "time": 100, "until": until}, [*sent, end])


NONE = (0, 0, 0)


@pytest.mark.parametrize(
    ("past", "reason"),
    [
        ([failed()], ""),
        ([failed()] * 2, ""),
        ([failed()] * 3, "no-progress"),
        ([failed()] * 2 + [failed(progress=LATER)] * 2, ""),
        ([failed()] * 2 + [failed(progress=LATER)] * 3, "no-progress"),
        # Less than before is no progress either.
        ([failed(progress=LATER), failed(), failed()], "no-progress"),
        # How it fails does not matter.
        ([failed(), failed("SIGSEGV"), failed("loss of n1")], "no-progress"),
        ([failed("exit code 1")] * 2, ""),
        # Attempts that Slurm ended do not count.
        ([failed(), Attempt(), failed(), Attempt()], ""),
        # An alarm ends a job for good.
        ([failed("alarm")], "alarm"),
        *(([failed(f"exit code {code}")], "usage") for code in (2, 126, 127)),
        ([failed("missing files on n1")], ""),
        # A program that saves in a place unknown to us may be requeued without end, if it was told
        # to save, or knows its time limit.
        ([failed("saved")] * 3, "no-progress"),
        ([failed("saved", NONE)] * 3, "no-progress"),
        ([failed("saved", NONE, signal="SIGUSR1")] * 9, ""),
        ([failed("saved", NONE, until=250)] * 9, ""),
        ([failed("saved", NONE, until=350)] * 3, "no-progress"),
        # A newer checkpoint without a number.
        ([failed(progress=(0, 0, 1000 + n)) for n in range(9)], ""),
    ],
)
def test_stop_reason(past: list[Attempt], reason: str) -> None:
    assert restarts.stop_reason(past) == reason


@pytest.mark.parametrize(("chain", "reason"), [(99, "chain-over"), (101, ""), (0, "")])
def test_stop_reason_of_a_chain(chain: float, reason: str) -> None:
    assert restarts.stop_reason([failed("saved")], chain) == reason


@pytest.mark.parametrize(
    ("past", "nodes"),
    [
        ([failed(nodes="n1")], []),
        ([failed(nodes="n1 n2"), failed("exit code 1", nodes="n2 n3")], ["n2"]),
        ([failed(nodes="n1"), failed(nodes="n2"), failed(nodes="n1")], []),
        # They stay excluded.
        ([failed(nodes="n1"), failed(nodes="n1"), failed("saved"), failed(nodes="n2")], ["n1"]),
    ],
)
def test_bad_nodes_are_those_of_two_failures_in_a_row(
    past: list[Attempt], nodes: list[str]
) -> None:
    assert restarts.bad_nodes(past) == nodes


def test_explain_shows_the_facts_of_the_last_attempts_side_by_side() -> None:
    past = [failed("SIGSEGV", NONE), failed(), failed("loss of n2"), failed("exit code 1")]
    _, *lines = restarts.explain("no-progress", past, 0).splitlines()
    assert [line.partition("; ")[2] for line in lines] == [
        "SIGKILL; checkpoint 100, step 170",
        "loss of n2; checkpoint 100, step 170",
        "exit code 1; checkpoint 100, step 170",
    ]


START = {"event": "start", "time": 10, "restarts": 0, "until": 50}
AGAIN = {"event": "start", "time": 70, "restarts": 1, "until": 110}
END = {"event": "end", "time": 30, "status": 137}
REQUEUE = {"event": "requeue", "time": 31, **failure("SIGKILL", suspects=["n1"])}


@pytest.mark.parametrize(
    ("events", "seconds"),
    [
        ([START, END], 20),
        ([START, END, REQUEUE, AGAIN, {**END, "time": 75}], 25),
        # The end of a lost attempt is unknown: it can't be later than its limit.
        ([START, AGAIN, {**END, "time": 75}], 45),
        ([{**START, "until": 0}, AGAIN, {**END, "time": 75}], 65),
    ],
)
def test_seconds_used(events: list[Mapping[str, Any]], seconds: float) -> None:
    assert restarts.seconds_used(history.attempts_of(events)) == seconds


@pytest.mark.parametrize(
    ("events", "starts"),
    [
        ([START, END, REQUEUE, AGAIN, END], [10, 70]),
        # The job was submitted again, or slurmctld has forgotten its start.
        ([START, END, REQUEUE, AGAIN, START], [10]),
        # A person has restarted a stopped job.
        ([START, END, {"event": "stop", "reason": "usage", "time": 32}, AGAIN], [70]),
        ([START, END, {"event": "stop", "reason": "usage", "time": 32}], []),
    ],
)
def test_attempts_of_an_earlier_submission_or_chain_do_not_count(
    events: list[Mapping[str, Any]], starts: list[float]
) -> None:
    chain = history.of_chain(history.attempts_of(events))
    assert [attempt.started for attempt in chain] == starts


def test_failures_are_those_that_job_py_requeued_or_found_later() -> None:
    lost = {**AGAIN, **failure("loss of n1", suspects=["n1"]), "progress": [*HERE]}
    found = restarts.failures(history.attempts_of([START, END, REQUEUE, AGAIN, lost, AGAIN]))
    assert [(each.kind, each.suspects, each.progress) for each in found] == [
        ("SIGKILL", ("n1",), (0, 0, 0)),
        ("loss of n1", ("n1",), HERE),
    ]


TRACEBACK = """\
Traceback (most recent call last):
  File "/jobs/train.py", line 9, in <module>
    main()
  File "/jobs/train.py", line 12, in main
    raise {}
"""


@pytest.mark.parametrize(
    ("log", "error"),
    [
        ("", ""),
        ("step 3\n", ""),
        (TRACEBACK.format("x") + "ValueError: iteration 70\n", "ValueError at /jobs/train.py:12"),
        (TRACEBACK.format("x") + "A.B\n\n", "A.B at /jobs/train.py:12"),
        (
            TRACEBACK.format("x")
            + f"KeyError: 1\n{'-' * 70}\nMPI_ABORT was invoked on rank 1 in\n",
            "KeyError at /jobs/train.py:12",
        ),
        # The program has gone on.
        (TRACEBACK.format("x") + "ValueError: iteration 70\nretrying\n", ""),
        (TRACEBACK.format("x"), ""),
    ],
)
def test_error_at_end_is_that_of_the_last_lines(log: str, error: str) -> None:
    assert restarts.error_at_end(log) == error


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CLUSTERCTL_HEARTBEAT", raising=False)
    (tmp_path / "rank-logs").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("ends", "status", "facts"),
    [
        ({}, 75, failure("saved")),
        ({}, 14, failure("exit code 14")),
        ({}, 137, failure("SIGKILL")),
        (
            {"1": "20 -9 n2", "0": "20.1 14 n1"},
            14,
            failure("SIGKILL", "", "rank 1 on n2", ("n2",)),
        ),
        # A rank that lost its peer may be the first to end.
        ({"0": "20 14 n1", "1": "21 -11 n2"}, 14, failure("SIGSEGV", "", "rank 1 on n2", ("n2",))),
        ({"0": "20 14 n1", "1": "20 143 n2"}, 14, failure("exit code 14")),
        ({"0": "20 14 n1", "1": "20 -15 n2"}, 14, failure("exit code 14")),
        # The program's own exit code, or that of its shell.
        ({"1": "20 137 n2"}, 14, failure("SIGKILL", "", "rank 1 on n2", ("n2",), code=137)),
        # torchrun ends with 1.
        ({"0": "20 75 n1", "1": "20.1 75 n2"}, 1, failure("saved")),
        ({"1": "20 1 n2", "0": ""}, 143, failure("exit code 1", AT, "rank 1 on n2", ["n2"])),
        ({"1": "20 2 n2"}, 143, failure("exit code 2", AT, "rank 1 on n2", ["n2"])),
    ],
)
def test_failure_now(folder: Path, ends: dict[str, str], status: int, facts: Any) -> None:
    for rank, end in ends.items():
        (folder / "rank-logs" / f"{rank}.end").write_text(end)
    old = TRACEBACK.format("x") + "KeyError\n\nclusterctl: restart 1 of this job\n"
    message = TRACEBACK.format("x").replace("/jobs/", "") + "ValueError: no\n"
    (folder / "rank-logs" / "1.log").write_text(old + message)
    assert restarts.failure_now(status, old) == facts
    restarts.forget_ends()
    assert [path.name for path in Path("rank-logs").iterdir()] == ["1.log"]


EXIT_CODE = "Primary job\n\n  Process name: [[1,1],0]\n  Exit code:    137\n"


@pytest.mark.parametrize(
    ("log", "is_signal", "code"),
    [
        ("", True, 0),
        ("", False, 137),
        ("srun: error: n1: task 0: Killed\n", True, 0),
        ("srun: error: n1: task 0: Exited with exit code 137\n", True, 137),
        (EXIT_CODE, True, 137),
    ],
)
def test_exit_code_like_that_of_a_signal_is_told_from_the_signal(
    folder: Path, log: str, *, is_signal: bool, code: int
) -> None:
    """Restarts are decided as after the signal, because a shell returns it for its command."""
    facts = restarts.failure_now(137, log, is_signal=is_signal)
    assert (facts["kind"], facts["code"]) == ("SIGKILL", code)
    said = restarts.with_failure(Attempt(), facts).said
    assert said == (f"exit code {code}" if code else "SIGKILL")


@pytest.mark.parametrize(
    ("line", "status"),
    [("2: task 1: Exited with exit code 2", 2), ("[1-2]: tasks 0-1: Exited with exit code 127", 127),
     ("2: task 1: Exited with exit code 1", 0), ("2: task 1: Killed", 0)],
)  # fmt: skip
def test_ranks_that_did_not_start_are_read_from_sruns_error(line: str, status: int) -> None:
    log = f"srun: error: n{line}\nsrun: Terminating StepId=88.4\n"
    assert restarts.status_of_start(log) == status
    earlier = f"{log}\nclusterctl: restart 1 of this job\n"
    assert restarts.status_of_start(earlier) == 0


@pytest.mark.parametrize(
    ("ends", "status", "is_told", "expected"),
    [
        # srun and mpirun, after the same end of a rank.
        ({"0": "20.1 143 n1", "1": "20 3 n2"}, 143, False, 3),
        ({"0": "20.1 14 n1", "1": "20 3 n2"}, 14, False, 3),
        ({"0": "20.1 143 n1", "1": "20 -9 n2"}, 14, False, 137),
        ({"0": "20 2 n1"}, 143, False, 2),
        # mpirun, after SIGTERM.
        ({}, 1, True, 143),
        ({}, 14, True, 14),
        ({"0": "20 143 n1", "1": "20.1 143 n2"}, 1, True, 143),
        ({"0": "20 75 n1", "1": "20.1 75 n2"}, 1, True, 75),
        ({"0": "20 75 n1", "1": "20.1 4 n2"}, 1, True, 4),
        # torchrun ends with 1.
        ({"0": "20 75 n1", "1": "20.1 75 n2"}, 1, False, 75),
        # No rank has recorded its end.
        ({}, 137, False, 137),
        ({}, 1, False, 1),
    ],
)
def test_jobs_status_is_that_of_the_first_failed_rank(
    folder: Path, ends: dict[str, str], status: int, is_told: bool, expected: int
) -> None:
    for rank, end in ends.items():
        (folder / "rank-logs" / f"{rank}.end").write_text(end)
    assert restarts.status_of_ranks(status, "", is_told=is_told) == expected
    aborted = "MPI_ABORT was invoked on rank 1 in communicator MPI_COMM_WORLD\nwith errorcode 5.\n"
    assert restarts.status_of_ranks(5, aborted, is_told=is_told) == 5
    earlier = f"{aborted}\nclusterctl: restart 1 of this job\n"
    assert restarts.status_of_ranks(status, earlier, is_told=is_told) == expected


@pytest.mark.parametrize(
    ("program", "launcher"),
    [
        ("srun --mpi=pmix python task.py mpirun", "srun"),
        ("env A=1 srun python task.py", "srun"),
        ("env A=1 mpirun -np 2 env -C /files python", "mpirun"),
        ("env -C /files SLURM_SUBMIT_DIR=/files bash run.sh srun", ""),
        ("python task.py mpirun", ""),
        ("bash run.sh", ""),
    ],
)
def test_launcher_of_an_error_is_read_from_its_prefix(program: str, launcher: str) -> None:
    assert restarts.launcher_of(program.split()) == launcher


GONE = "An MPI communication peer process has unexpectedly disconnected.\n"
JOB = JobInfo(
    number=1,
    name="j",
    user="ada",
    state=JobState.FAILED,
    reason="",
    exit_code=1,
    nodes=("n1", "n2", "n3"),
)


@pytest.mark.parametrize(
    ("ends", "lost_ranks", "rank"),
    [
        ({0: "20 1 n1", 1: "21 -11 n2"}, [], 0),
        ({0: "20 14 n1", 1: "21 -11 n2"}, [], 1),
        ({0: "20 143 n1", 1: "21 195 n2", 2: "22 7 n3"}, [], 2),
        ({0: "20 75 n1", 1: "21 1 n2"}, [], 1),
        ({0: "20 1 n1", 1: "21 -9 n2"}, [0], 1),
        ({0: "x", 1: "21 1 n2"}, [], 1),
    ],
)
def test_job_and_diagnosis_name_the_same_rank(
    folder: Path, ends: dict[int, str], lost_ranks: list[int], rank: int
) -> None:
    logs = {number: GONE if number in lost_ranks else "" for number in ends}
    for number, end in ends.items():
        (folder / "rank-logs" / f"{number}.end").write_text(end)
        (folder / "rank-logs" / f"{number}.log").write_text(logs[number])
    assert restarts.first_failed()[1] == str(rank)
    aborted = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
    assert first_failed(aborted, JOB, 1, ranks=logs, ends=ends).rank == rank


def test_rank_that_called_mpi_abort_has_an_exception(folder: Path) -> None:
    (folder / "rank-logs" / "3.log").write_text(TRACEBACK.format("x") + "ValueError: no\n")
    found = restarts.failure_now(
        137, "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\n"
    )
    assert (found["error"], found["suspects"]) == ("ValueError at /jobs/train.py:12", [])
    # Another rank, which was killed after that, is no evidence of the first rank's node.
    (folder / "rank-logs" / "0.end").write_text("9 -9 n1")
    found = restarts.failure_now(
        137, "MPI_ABORT was invoked on rank 3 in communicator MPI_COMM_WORLD\n"
    )
    assert found["place"] == "rank 3"


@pytest.mark.parametrize(
    ("end", "kind"), [("9 -9 n1", "loss of slurmstepd"), ("9 -11 n1", "SIGSEGV")]
)
def test_ranks_that_job_py_killed_do_not_hide_a_lost_slurmstepd(
    folder: Path, end: str, kind: str
) -> None:
    (folder / "rank-logs" / "0.end").write_text(end)
    assert restarts.failure_now(137, "", has_lost_slurmstepd=True)["kind"] == kind


LOST_CLIENT = (
    "slurmstepd-n1: error:  mpi/pmix_v5: _errhandler: n1 [0]: pmixp_client_v2.c:211: Error "
    "handler invoked: status = -61, source = [slurm.pmix.3.0:1]\n"
)
ABORTED = "srun: Job step aborted: Waiting up to 32 seconds for job step to finish.\n"
KILLED = "srun: error: n1: tasks {}: Killed\n"
RESTARTED = "\nclusterctl: restart 1 of this job\n"


@pytest.mark.parametrize(
    ("log", "ends", "killed_at", "kind", "place"),
    [
        # Rank 1 called os._exit(0).
        (LOST_CLIENT + ABORTED + KILLED.format(0), {}, None, restarts.LEFT_MPI, "rank 1 on n1"),
        (LOST_CLIENT + ABORTED, {"0": "9 -9 n1"}, 8.0, restarts.LEFT_MPI, "rank 1 on n1"),
        # Rank 1 has failed, and is reported by srun, or has recorded its end.
        (LOST_CLIENT + ABORTED + KILLED.format("0-1"), {}, None, "SIGKILL", ""),
        (LOST_CLIENT + ABORTED, {"1": "7 -9 n1", "0": "9 -9 n1"}, 8.0, "SIGKILL", "rank 1 on n1"),
        (LOST_CLIENT + ABORTED, {"0": "7 -11 n1"}, None, "SIGSEGV", "rank 0 on n1"),
        # A program may write a line like those of srun.
        (LOST_CLIENT + KILLED.format("1-3-5"), {}, None, restarts.LEFT_MPI, "rank 1 on n1"),
        # In an earlier attempt.
        (LOST_CLIENT + RESTARTED, {"0": "9 -9 n1"}, None, "SIGKILL", "rank 0 on n1"),
        # No rank failed before job.py killed all.
        (ABORTED, {"0": "9 -9 n1"}, 8.0, restarts.ABORT, ""),
        (ABORTED, {"1": "7 -9 n1", "0": "9 -9 n1"}, 8.0, "SIGKILL", "rank 1 on n1"),
    ],
)  # fmt: skip
def test_failure_now_of_an_aborted_step(
    folder: Path, log: str, ends: dict[str, str], *, killed_at: float | None, kind: str, place: str
) -> None:
    for rank, end in ends.items():
        (folder / "rank-logs" / f"{rank}.end").write_text(end)
    found = restarts.failure_now(137, log, *([] if killed_at is None else [killed_at]))
    assert (found["kind"], found["place"]) == (kind, place)


def test_hang_is_diagnosed_by_its_file(folder: Path) -> None:
    (folder / "hang.json").write_text('{"seconds": 60, "nodes": ["n2"]}')
    assert restarts.failure_now(137, "") == failure("hang", suspects=("n2",))
    (folder / "hang.json").write_text("{")
    assert restarts.failure_now(137, "")["kind"] == "hang"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ([], (0, 0, 0)),
        (
            [
                "checkpoints/iteration-00000050/rank0.npz",
                "checkpoints/iteration-00000100.incomplete/x.npz",
            ],
            50,
        ),
        (["out/checkpoint-500/optimizer.pt", "out/checkpoint-1000/optimizer.pt"], 1000),
        (["logs/a/epoch=3-step=1200.ckpt", "model_0007.pth"], 1200),
        (["step_9/a.safetensors", "rank-logs/step_10/b.pt"], 9),
        # These numbers are parts of the names.
        (["resnet50.pt"], (0, 0, 1000)),
        (["last.ckpt"], (0, 0, 1000)),
        (["notes.txt", "data.csv"], (0, 0, 0)),
    ],
)
def test_progress_of_checkpoints(folder: Path, files: list[str], expected: Any) -> None:
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        os.utime(path, (1000, 1000))
    assert restarts.progress(["."], 900) == (
        expected if isinstance(expected, tuple) else (expected, 0, 0)
    )


def test_progress_of_steps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "old.pt").touch()
    os.utime("old.pt", (1000, 1000))
    (folder / "metrics.jsonl").write_text('{"step": 3}\n{"step": 4}\n{"kind": "result"}\n{"ste')
    assert restarts.progress(["."], 2000) == (0, 4, 0)
    (folder / "beat").write_text("7 of 9\n")
    monkeypatch.setenv("CLUSTERCTL_HEARTBEAT", "beat")
    assert restarts.progress(["."], 2000) == (0, 7, 0)


def test_trainings_other_folders_are_read_too() -> None:
    program = [
        "srun",
        "python -m payload train",
        "--out=/a",
        "--save-interval",
        "5",
        "--checkpoints",
        "/b",
    ]
    assert restarts.folders_of(program) == ["/a", "/b"]


@pytest.mark.parametrize(
    ("after", "lost"), [("", True), ("\nclusterctl: restart 1 of this job\n", False)]
)
def test_lost_node_of_mpirun_is_read_from_its_message(after: str, lost: bool) -> None:
    """It ends with 0 then."""
    log = "PRTE has lost communication with a remote daemon.\n" + after
    assert restarts.has_lost_daemon(log) is lost
