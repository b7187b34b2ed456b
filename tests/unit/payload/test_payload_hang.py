"""The watch for hangs: when a job hangs, how its ranks are described, and what is recorded."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Sequence
from itertools import repeat
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from payload.node import hang, stacks
from payload.node.processes import RankProcess, main_process
from tests.support.clocks import replace_clock

GIVEN_S = 60.0


def hangs(ticks: Sequence[tuple[float, bool]], given_s: float = GIVEN_S) -> float | None:
    """Return the time at which a job with this progress, (seconds, has progress), hangs first."""
    patience = hang.Patience(given_s)
    now = 0.0
    for elapsed, has_progress in ticks:
        now += elapsed
        if patience.tick(elapsed, has_progress=has_progress):
            return now
    return None


def steps(every: float, count: int) -> list[tuple[float, bool]]:
    return [(every, True)] * count


def silence(seconds: int) -> list[tuple[float, bool]]:
    return [(1.0, False)] * seconds


@pytest.mark.parametrize(
    ("ticks", "at"),
    [
        pytest.param(silence(599), None, id="before-the-first-progress"),
        pytest.param(silence(601), 600, id="no-progress-ever"),
        pytest.param(
            steps(300, 1) + silence(599), None, id="a-first-line-says-nothing-of-the-pace"
        ),
        pytest.param(steps(1, 10) + silence(59), None, id="below-the-time-given"),
        pytest.param(steps(1, 10) + silence(61), 70, id="at-the-time-given"),
        pytest.param(steps(30, 10) + silence(149), None, id="below-five-intervals"),
        pytest.param(steps(30, 10) + silence(150), 450, id="at-five-intervals"),
        pytest.param(
            [*steps(1, 5), (50, True), *steps(1, 5), *silence(249)],
            None,
            id="an-evaluation-is-learned",
        ),
        pytest.param([*steps(1, 5), (50, True), *silence(250)], 305, id="and-has-its-own-limit"),
        pytest.param(
            [(500, True), *steps(1, 9), *silence(60)], 569, id="the-start-is-not-an-interval"
        ),
    ],
)
def test_job_without_progress_hangs(ticks: Sequence[tuple[float, bool]], at: float | None) -> None:
    assert hangs(ticks) == at


@pytest.mark.parametrize(("given_s", "start_s"), [(5, 50), (60, 600), (600, 600), (1800, 1800)])
def test_start_of_a_job_has_ten_times_as_long_up_to_ten_minutes(
    given_s: float, start_s: float
) -> None:
    assert hangs(silence(2000), given_s) == start_s


def test_silence_begins_with_the_last_progress_and_not_when_it_is_noticed() -> None:
    patience = hang.Patience(GIVEN_S)
    patience.tick(1.0, has_progress=True, age_s=0.75)
    patience.tick(1.0, has_progress=False)
    assert patience.silent_s == 1.75


def rank(
    number: int, state: str = stacks.RUNNING, place: str = "a.py:1", node: str = "n1", **more: Any
) -> dict[str, Any]:
    fields = {"source": "", "unread": "", "pid": 10 + number, "workers": []}
    return {"rank": number, "state": state, "place": place, "node": node, **fields, **more}


def test_likely_cause_is_named_first() -> None:
    ranks = [rank(number, source="sum()") for number in (0, 1, 2, 4, 6)]
    ranks += [rank(3, stacks.STOPPED, "b.py:2", "n2"), rank(5, place="c.py:3")]
    groups = hang.groups(ranks)
    assert [[each["rank"] for each in group] for group in groups] == [[3], [5], [0, 1, 2, 4, 6]]
    assert all(text in hang.words(groups[2]) for text in ("(0-2,4,6)", "a.py:1", "sum()"))
    assert stacks.STOPPED in hang.words(groups[0])
    assert hang.suspects(ranks) == ["n2"]
    assert hang.suspects([rank(0, stacks.STOPPED), rank(1)]) == []


def test_stack_that_could_not_be_read_and_silent_nodes_are_named() -> None:
    refused = "ptrace is forbidden by kernel.yama.ptrace_scope=2"
    first, second = hang.sentences(hang.RankAnswers([rank(0, place="", unread=refused)], 2))
    assert refused in first
    assert second.startswith("2 ")


def test_only_the_first_groups_are_described() -> None:
    ranks = [rank(number, place=f"a.py:{number}") for number in range(11)]
    texts = hang.sentences(hang.RankAnswers(ranks))
    assert (len(texts), texts[-1]) == (9, "3 more groups")


def printed(*ranks: dict[str, Any]) -> str:
    nodes = sorted({each["node"] for each in ranks}) or ["n1"]
    ends = [{"node": node, "ranks": sum(each["node"] == node for each in ranks)} for node in nodes]
    return "".join(json.dumps(each) + "\n" for each in (*ranks, *ends))


def use_answers(monkeypatch: pytest.MonkeyPatch, output: str | OSError) -> None:
    """Let stacks.py, instead of running as a process, print this, or fail to start."""

    def start(*_: object, **__: object) -> Any:
        if isinstance(output, OSError):
            raise output
        return Mock(communicate=lambda **_: (output, None))

    monkeypatch.setattr(subprocess, "Popen", start)


HANGING = [rank(0), rank(1, stacks.STOPPED, node="n2")]


@pytest.fixture
def watch_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Watch a silent job in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "1")
    return lambda mode: hang.HangWatch(mode, 0.0, (str(tmp_path), [], ""))


def reported() -> tuple[list[dict[str, Any]], str, dict[str, Any]]:
    """Return the events, the log, and the record for job.py, in the current folder."""
    events, log, record = (
        Path(name).read_text() if Path(name).exists() else ""
        for name in ("job.events", "stderr.log", "hang.json")
    )
    return [json.loads(line) for line in events.splitlines()], log, json.loads(record or "{}")


@pytest.mark.parametrize(
    "name", ["stdout.log", "stderr.log", "metrics.jsonl", "heartbeat", "other"]
)
def test_change_of_these_files_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, watch_of: Any, name: str
) -> None:
    monkeypatch.setenv("CLUSTERCTL_HEARTBEAT", str(tmp_path / "heartbeat"))
    watch = watch_of("warn")
    before = watch.state()
    (tmp_path / name).touch()
    assert (watch.state() != before) is (name != "other")


def test_hang_that_ends_the_job_is_recorded(monkeypatch: pytest.MonkeyPatch, watch_of: Any) -> None:
    use_answers(monkeypatch, printed(*HANGING))
    assert watch_of("end").look()
    (event,), log, record = reported()
    assert (event["event"], event["action"]) == ("hang", "end")
    assert "rank 1 on n2" in event["summary"]
    assert event["summary"] in log
    assert record["summary"] == event["summary"]
    assert (record["nodes"], [each["rank"] for each in record["ranks"]]) == (["n2"], [0, 1])


def test_hang_warning_does_not_end_the_job(monkeypatch: pytest.MonkeyPatch, watch_of: Any) -> None:
    use_answers(monkeypatch, printed(*HANGING))
    assert watch_of("warn").look()
    (event,), log, record = reported()
    assert (event["action"], record) == ("warn", {})
    assert event["summary"] in log


def test_hang_warning_leaves_no_file_open(monkeypatch: pytest.MonkeyPatch, watch_of: Any) -> None:
    """The watch may report many hangs of a job."""
    use_answers(monkeypatch, printed(*HANGING))
    watch = watch_of("warn")
    before = os.listdir("/proc/self/fd")
    assert watch.look()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.parametrize("output", [OSError("no srun"), "", json.dumps(rank(0))])
def test_hang_counts_although_a_node_does_not_answer(
    monkeypatch: pytest.MonkeyPatch, watch_of: Any, output: str | OSError
) -> None:
    use_answers(monkeypatch, output)
    assert watch_of("end").look()
    (event,), _, record = reported()
    assert event["action"] == "end"
    assert record["nodes"] == []


def test_job_without_ranks_does_not_hang(monkeypatch: pytest.MonkeyPatch, watch_of: Any) -> None:
    """Such as a job whose nodes still stage its files."""
    use_answers(monkeypatch, printed())
    watch = watch_of("end")
    watch._patience.silent_s = 100.0
    assert not watch.look()
    assert (reported(), watch._patience.silent_s) == (([], "", {}), 0.0)


def test_progress_during_the_look_is_no_hang(
    monkeypatch: pytest.MonkeyPatch, watch_of: Any
) -> None:
    use_answers(monkeypatch, printed(*HANGING))
    watch = watch_of("end")
    Path("stdout.log").touch()
    assert not watch.look()
    assert reported() == ([], "", {})


def test_progress_after_a_warning_is_recorded(
    monkeypatch: pytest.MonkeyPatch, watch_of: Any
) -> None:
    use_answers(monkeypatch, printed(*HANGING))
    rounds = iter([*repeat("", 3), "stdout.log", "heartbeat"])

    def sleep(_: float) -> None:
        name = next(rounds, None)
        if name is None:
            raise KeyboardInterrupt
        if name:
            Path(name).touch()

    replace_clock(monkeypatch, hang, sleep=sleep)
    watch = watch_of("warn")
    with pytest.raises(KeyboardInterrupt):
        watch.run()
    assert [event["event"] for event in reported()[0]][:2] == ["hang", "progress"]


def test_main_process_with_the_highest_pid_is_the_oldest() -> None:
    """The kernel's pids begin again after the highest."""
    program = RankProcess(32_760, 1, ("python",), started=10)
    younger = RankProcess(310, 1, ("python",), started=11)
    assert main_process([younger, program]) == program


@pytest.mark.parametrize("letter", ["x", "é", "\N{BUG}"])
def test_rank_is_printed_on_a_short_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], letter: str
) -> None:
    """slurmstepd sends messages of 1024 bytes, and srun mixes those of several nodes."""
    long = letter * 500
    found = stacks.RankStacks(
        4_194_304,
        "n" * 64,
        4_194_304,
        stacks.STOPPED,
        place=f"{long}:88",
        source=long,
        unread=long,
        workers=(long,) * 9,
        stack=(f"process 5: {long}",) * 99,
    )
    assert stacks.write_ranks([found], str(tmp_path), "n1") == 1
    (line,) = capsys.readouterr().out.splitlines()
    assert len(line) <= 900
    answer = json.loads(line)
    assert (answer["place"][-3:], answer.keys()) == (":88", rank(0).keys())
    assert (tmp_path / "rank-logs" / "4194304.stack").read_text().count(f"process 5: {long}") == 99


def test_processes_that_are_read_slowly_do_not_delay_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """hang.py gives up a node that does not answer, with all of its ranks."""
    now = 0.0

    def read(_: RankProcess) -> stacks.Stack:
        nonlocal now
        now += 3 * stacks.READ_S
        return stacks.Stack(unread="too slow")

    processes = [RankProcess(number, 0, ("python",)) for number in range(1, 9)]
    monkeypatch.setattr(stacks, "ranks_here", lambda: {0: processes})
    monkeypatch.setattr(stacks, "stack_of", read)
    replace_clock(monkeypatch, stacks, monotonic=lambda: now)
    assert stacks.write_ranks(stacks.read_ranks("n1"), str(tmp_path), "n1") == 1
    assert now <= stacks.LONGEST_S
    lines = (tmp_path / "rank-logs" / "0.stack").read_text().splitlines()
    assert len([line for line in lines if line.startswith("process ")]) == 8


REFUSED = "Error: Failed to suspend process\n\nCaused by:\n    0: a\n    1: EPERM: Operation not permitted\n"


@pytest.mark.parametrize(
    ("said", "scope", "reason"),
    [
        (REFUSED, "1\n", "ptrace is forbidden by kernel.yama.ptrace_scope=1"),
        (
            "ptrace: Operation not permitted.\nNo stack.\n",
            "2\n",
            "ptrace is forbidden by kernel.yama.ptrace_scope=2",
        ),
        (REFUSED, "0\n", "Failed to suspend process: EPERM: Operation not permitted"),
        (REFUSED, None, "Failed to suspend process: EPERM: Operation not permitted"),
        ("Error: no such file\n", "1\n", "no such file"),
        ("", None, "the program said nothing"),
    ],
)
def test_reason_for_a_missing_stack_names_the_kernels_setting(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, said: str, scope: str | None, reason: str
) -> None:
    monkeypatch.setattr(stacks, "YAMA", str(tmp_path / "ptrace_scope"))
    if scope is not None:
        (tmp_path / "ptrace_scope").write_text(scope)
    assert stacks._reason(said) == reason
