"""The watch for hangs: when a job is examined, which ranks wait, and what is recorded."""

from __future__ import annotations

import json
import struct
import subprocess
from collections.abc import Iterable, Sequence
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from payload.node import hang, native, stacks
from tests.support.clocks import replace_clock

FLOOR = 60.0


def looks(ticks: Sequence[tuple[float, bool]]) -> list[float]:
    """Return the times at which a job with this progress, (seconds, has progress), is examined."""
    patience = hang.Patience(FLOOR)
    now = 0.0
    times = []
    for elapsed, has_progress in ticks:
        now += elapsed
        if patience.tick(elapsed, has_progress=has_progress):
            times.append(now)
    return times


def steps(every: float, count: int) -> list[tuple[float, bool]]:
    return [(every, True)] * count


def silence(seconds: int) -> list[tuple[float, bool]]:
    return [(1.0, False)] * seconds


@pytest.mark.parametrize(
    ("ticks", "times"),
    [
        pytest.param(silence(599), [], id="before-the-first-progress"),
        pytest.param(silence(601), [600], id="no-progress-ever"),
        pytest.param(steps(300, 1) + silence(599), [], id="a-first-line-says-nothing-of-the-pace"),
        pytest.param(steps(1, 10) + silence(59), [], id="below-the-floor"),
        pytest.param(steps(1, 10) + silence(61), [70], id="at-the-floor"),
        pytest.param(steps(30, 10) + silence(149), [], id="below-five-intervals"),
        pytest.param(steps(30, 10) + silence(150), [450], id="at-five-intervals"),
        pytest.param(
            [*steps(1, 5), (100, True), *steps(1, 5), *silence(499)],
            [],
            id="an-evaluation-is-learned",
        ),
        pytest.param([*steps(1, 5), (100, True), *silence(500)], [605], id="and-has-its-own-limit"),
        pytest.param(
            [(500, True), *steps(1, 9), *silence(60)], [569], id="the-start-is-not-an-interval"
        ),
        pytest.param(
            steps(1, 10) + silence(500), [70, 130, 250, 490], id="silent-work-is-examined-ever-less"
        ),
        pytest.param(
            steps(1, 10) + silence(65) + steps(1, 1) + silence(400),
            [70, 406],
            id="a-pause-is-learned",
        ),
    ],
)
def test_silent_job_is_examined(ticks: Sequence[tuple[float, bool]], times: list[float]) -> None:
    assert looks(ticks) == times


def test_silence_begins_with_the_last_progress_and_not_when_it_is_noticed() -> None:
    patience = hang.Patience(FLOOR)
    patience.tick(1.0, has_progress=True, age_s=0.75)
    patience.tick(1.0, has_progress=False)
    assert patience.silent_s == 1.75


def rank(
    number: int, doing: str = stacks.WAITING, place: str = "a.py:1", node: str = "n1", **more: Any
) -> dict[str, Any]:
    fields = {
        "within": "",
        "source": "",
        "pid": 10 + number,
        "workers": [],
        "asleep": False,
        "cpu_s": 1.0,
    }
    return {"rank": number, "doing": doing, "place": place, "node": node, **fields, **more}


NODES = [{"node": "n1", "network": 10, "disk": 10}]
BUSY_DISK = {"node": "n2", "network": 10, "disk": 5 << 20}


@pytest.mark.parametrize(
    ("answers", "hangs"),
    [
        ([rank(0), rank(1)], True),
        ([rank(0), rank(1, stacks.STOPPED)], True),
        ([rank(0), rank(1, stacks.BLOCKED)], True),
        ([rank(0), rank(1, stacks.ENDED)], True),
        ([rank(0), rank(1), BUSY_DISK], True),
        ([rank(0), rank(1, stacks.BLOCKED, node="n2"), BUSY_DISK], False),
        ([rank(0), rank(1, stacks.BLOCKED, node="n2", within="disk"), BUSY_DISK], False),
        (
            [rank(0), rank(1, stacks.BLOCKED, node="n2", within="frozen file system"), BUSY_DISK],
            True,
        ),
        ([rank(0), rank(1, stacks.BLOCKED, node="n2", within="NFS"), BUSY_DISK], True),
        ([rank(0), rank(1, stacks.TRACED)], False),
        ([rank(0), rank(1, stacks.COMPUTING)], False),
        ([rank(0), rank(1, stacks.TRANSFERRING)], False),
        ([rank(0), rank(1, stacks.RUNNING)], False),
        ([rank(0), {"node": "n2", "network": 5 << 20, "disk": 0}], False),
        ([], False),
    ],
)
def test_job_hangs_only_if_all_ranks_wait(answers: list[dict[str, Any]], hangs: bool) -> None:
    assert hang.is_hang([*answers, *NODES]) is hangs


def test_likely_cause_is_named_first() -> None:
    answers = [rank(number, within="MPI", source="sum()") for number in (0, 1, 2, 4, 6)]
    answers += [rank(3, stacks.STOPPED, "b.py:2", "n2"), rank(5, place="c.py:3")]
    groups = hang.groups([*answers, *NODES])
    assert [[answer["rank"] for answer in group] for group in groups] == [[3], [5], [0, 1, 2, 4, 6]]
    assert all(text in hang.words(groups[2]) for text in ("(0-2,4,6)", "MPI", "a.py:1", "sum()"))
    assert hang.suspects([*answers, *NODES]) == ["n2"]
    assert hang.suspects([rank(0, stacks.STOPPED), rank(1)]) == []


def use_answers(monkeypatch: pytest.MonkeyPatch, answers: Iterable[Any]) -> None:
    """Let stacks.py, instead of running as a process, print these answers in turn.

    answers: of each look; empty if it prints nothing, an error if it can't be started.
    """
    looks = iter(answers)

    def start(*_: object, **__: object) -> Any:
        answer = next(looks)
        if isinstance(answer, OSError):
            raise answer
        ranks = [each for each in answer if "rank" in each]
        count = [{"node": "n1", "ranks": len(ranks)}] * bool(answer)
        printed = "".join(json.dumps(each) + "\n" for each in [*answer, *count])
        return Mock(communicate=lambda **_: (printed, None))

    monkeypatch.setattr(subprocess, "Popen", start)


HANGING = [rank(0, within="MPI"), rank(1, stacks.STOPPED, node="n2"), *NODES]


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Examine a silent job in an empty folder, where the nodes give these answers in turn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)

    def look(mode: str, *answers: Any) -> tuple[str, str, dict[str, Any]]:
        use_answers(monkeypatch, answers)
        watch = hang.Watch(mode, 0.0, (str(tmp_path), [], ""))
        assert bool(watch.look()) == Path("job.events").exists()
        texts = [
            Path(name).read_text() if Path(name).exists() else ""
            for name in ("job.events", "stderr.log")
        ]
        return (
            texts[0],
            texts[1],
            json.loads(Path("hang.json").read_text()) if Path("hang.json").exists() else {},
        )

    return look


@pytest.mark.parametrize(
    "name", ["stdout.log", "stderr.log", "metrics.jsonl", "heartbeat", "other"]
)
def test_change_of_these_files_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    monkeypatch.setenv("CLUSTERCTL_HEARTBEAT", str(tmp_path / "heartbeat"))
    watch = hang.Watch("warn", 60.0, (str(tmp_path), [], ""))
    before = watch.state()
    (tmp_path / name).touch()
    assert (watch.state() != before) is (name != "other")


def test_hang_that_ends_the_job_is_recorded(reported: Any) -> None:
    events, log, record = reported("end", HANGING, HANGING)
    event = json.loads(events)
    assert (event["event"], event["action"], event["summary"]) == (
        "hang",
        "end",
        hang.summary(HANGING),
    )
    assert event["summary"] in log
    assert (record["nodes"], [rank["rank"] for rank in record["ranks"]]) == (["n2"], [0, 1])


def test_hang_warning_does_not_end_the_job(reported: Any) -> None:
    events, log, record = reported("warn", HANGING, HANGING)
    event = json.loads(events)
    assert (event["action"], record) == ("warn", {})
    assert event["summary"] in log


def test_progress_after_a_warning_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    use_answers(monkeypatch, repeat(HANGING))
    rounds = iter(["", "", "", "stdout.log", "heartbeat"])

    def sleep(_: float) -> None:
        name = next(rounds, None)
        if name is None:
            raise KeyboardInterrupt
        if name:
            Path(name).touch()

    replace_clock(monkeypatch, hang, sleep=sleep)
    watch = hang.Watch("warn", 0.0, (str(tmp_path), [], ""))
    with pytest.raises(KeyboardInterrupt):
        watch.run()
    events = [json.loads(line)["event"] for line in Path("job.events").read_text().splitlines()]
    assert events[:2] == ["hang", "progress"]


@pytest.mark.parametrize(
    "second",
    [
        [],
        [rank(0, stacks.COMPUTING), *NODES],
        [rank(0, within="MPI", place="b.py:2"), *HANGING[1:]],
    ],
)
def test_hang_must_be_the_same_twice(reported: Any, second: list[dict[str, Any]]) -> None:
    assert reported("end", HANGING, second) == ("", "", {})


@pytest.mark.parametrize(
    ("used_s", "rank_state", "hangs"),
    [
        (1.0, (stacks.STOPPED, ""), True),
        (1.01, (stacks.WAITING, "poll"), True),
        (1.01, (stacks.STOPPED, ""), False),
        (1.01, (stacks.BLOCKED, "disk"), False),
        (2.0, (stacks.BLOCKED, "disk"), False),
        (2.0, (stacks.WAITING, "pipe read"), False),
        (2.0, (stacks.WAITING, "MPI"), True),
        (2.0, (stacks.WAITING, ""), True),
    ],
)
def test_rank_that_works_between_two_looks_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
    reported: Any,
    used_s: float,
    rank_state: tuple[str, str],
    hangs: bool,
) -> None:
    """Such as a rank on a node that is stopped for a while, again and again."""
    times = iter(range(0, 1000, 10))
    replace_clock(monkeypatch, hang, monotonic=lambda: float(next(times)))
    doing, within = rank_state
    looks = [[*HANGING, rank(2, doing, within=within, cpu_s=cpu_s)] for cpu_s in (1.0, used_s)]
    assert bool(reported("warn", *looks)[0]) is hangs


def test_rank_that_worked_since_the_look_before_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a rank that works for a second every minute."""
    monkeypatch.chdir(tmp_path)
    times = iter(range(0, 10_000, 50))
    replace_clock(monkeypatch, hang, monotonic=lambda: float(next(times)), sleep=lambda _: None)
    used = [1.0, 1.0, 90.0, 90.0, 91.0, 91.0]
    use_answers(monkeypatch, ([*HANGING, rank(2, within="poll", cpu_s=cpu_s)] for cpu_s in used))
    watch = hang.Watch("end", 60.0, (str(tmp_path), [], ""))
    watch._earlier = [(0.0, [rank(2, within="poll", cpu_s=1.0)])]
    assert [bool(watch.look()) for _ in range(3)] == [True, False, True]


@pytest.mark.parametrize(("seconds", "hangs"), [(10, True), (70, True), (600, False)])
def test_look_during_which_the_job_was_suspended_is_no_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: int, hangs: bool
) -> None:
    """Ranks that wait at the same place before and after may have worked most of the time that they
    ran.
    """
    monkeypatch.chdir(tmp_path)
    times = iter(range(0, 10_000, seconds))
    replace_clock(monkeypatch, hang, monotonic=lambda: float(next(times)), sleep=lambda _: None)
    use_answers(monkeypatch, repeat(HANGING))
    assert bool(hang.Watch("end", 60.0, (str(tmp_path), [], "")).look()) is hangs


def test_rank_that_sleeps_has_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sleeps continues by itself. It is reported at the usual time, and only once."""
    monkeypatch.chdir(tmp_path)
    sleeping = [rank(0, within="MPI"), rank(1, within="sleep", asleep=True)]
    use_answers(monkeypatch, repeat(sleeping))
    replace_clock(monkeypatch, hang, sleep=lambda _: None)
    watch = hang.Watch("end", 60.0, (str(tmp_path), [], ""))
    watch._patience.silent_s = 100.0
    assert watch.look() == "warn"
    assert watch.look(is_reported=True) == "warn"
    assert not Path("hang.json").exists()
    watch._patience.silent_s = 600.0
    assert watch.look(is_reported=True) == "end"
    events = [json.loads(line)["action"] for line in Path("job.events").read_text().splitlines()]
    assert (events, Path("hang.json").exists()) == (["warn", "end"], True)


@pytest.mark.parametrize("trouble", [OSError("no srun"), [{"node": "n1", "rank": 0}]])
def test_failed_look_at_stacks_is_no_hang(
    reported: Any, capfd: pytest.CaptureFixture[str], trouble: Any
) -> None:
    assert reported("end", trouble) == ("", "", {})
    assert capfd.readouterr().err


@pytest.mark.parametrize(
    ("memory_use", "doing"), [(None, stacks.RUNNING), (12, stacks.COMPUTING), (0, stacks.WAITING)]
)
def test_rank_that_waits_for_a_busy_gpu_does_not_wait(memory_use: int | None, doing: str) -> None:
    """A GPU that waits for another GPU does not use its memory."""
    for library in ("CUDA", "NCCL"):
        assert stacks.with_gpu(stacks.WAITING, library, memory_use) == doing
    assert stacks.with_gpu(stacks.WAITING, "MPI", memory_use) == stacks.WAITING
    assert stacks.with_gpu(stacks.STOPPED, "CUDA", memory_use) == stacks.STOPPED


def test_main_process_with_the_highest_pid_is_the_oldest() -> None:
    """The kernel's pids begin again after the highest."""
    program = stacks.Process(32_760, 1, ("python",), started=10)
    younger = stacks.Process(310, 1, ("python",), started=11)
    assert stacks.main_process([younger, program]) == program


@pytest.mark.parametrize(
    "program", [b"", b"\x7fELF", b"\x7fELF" + b"\xff" * 200, b"#!/bin/sh\n" * 20]
)
def test_file_that_is_not_an_elf_program_has_no_functions(program: bytes) -> None:
    with pytest.raises((ValueError, IndexError, OverflowError, struct.error)):
        native.Program(program)


@pytest.mark.parametrize(
    ("function", "words"),
    [
        ("hrtimer_nanosleep", "sleep"),
        ("anon_pipe_read", "pipe read"),
        ("futex_wait_queue", "lock"),
        ("do_epoll_wait", "poll"),
        ("rpc_wait_bit_killable", "NFS"),
        ("locks_lock_inode_wait", "file lock"),
        ("request_wait_answer", "FUSE"),
        ("wait_for_partner", "opening of a pipe"),
        ("percpu_rwsem_wait", "frozen file system"),
        ("unix_stream_read_generic", "socket read"),
        ("folio_wait_bit", "disk"),
        ("do_signal_stop", "do_signal_stop"),
        ("", ""),
    ],
)
def test_wait_in_the_kernel_is_described(function: str, words: str) -> None:
    assert stacks.meaning(function) == words


@pytest.mark.parametrize(
    ("library", "kind"),
    [
        ("libmpi.so.40", "MPI"),
        ("libopen-pal.so.80", "MPI"),
        ("mca_btl_tcp.so", "MPI"),
        ("libucp.so.0", "MPI"),
        ("libnccl.so.2", "NCCL"),
        ("libcuda.so.1", "CUDA"),
        ("libc.so.6", ""),
        ("[vdso]", ""),
        ("", ""),
        ("python3.13", "own"),
        ("libopenblas.so.0", "own"),
        ("?", "own"),
    ],
)
def test_stack_is_a_wait_or_work_by_its_library(library: str, kind: str) -> None:
    assert stacks._kind(library) == kind


@pytest.mark.parametrize("letter", ["x", "é", "\N{BUG}"])
def test_rank_is_printed_on_a_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], letter: str
) -> None:
    """slurmstepd sends messages of 1024 bytes, and srun mixes those of several nodes."""
    long = letter * 500
    texts = ("waiting", long, f"{long}:88", long, (long,) * 9, (f"process 5: {long}",) * 99)
    found = stacks.Rank(4_194_304, "n" * 64, 4_194_304, *texts)
    assert stacks.write_ranks([found], str(tmp_path), "n1") == 1
    (printed,) = capsys.readouterr().out.splitlines()
    assert len(printed) <= 900
    answer = json.loads(printed)
    assert (answer["place"][-3:], answer.keys()) == (":88", rank(0).keys())
    assert (tmp_path / "rank-logs" / "4194304.stack").read_text().count(f"process 5: {long}") == 99
