"""The watch for hangs: when a job is examined, which ranks wait, and what is recorded."""

from __future__ import annotations

import json
import linecache
import os
import shutil
import signal
import struct
import subprocess
import sys
import venv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from payload.node import hang, native, stacks
from tests.support.played.batch import play
from tests.support.processes import eventually

NODE = Path(__file__).parents[3] / "payload" / "node"
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
def test_a_silent_job_is_examined(ticks: Sequence[tuple[float, bool]], times: list[float]) -> None:
    assert looks(ticks) == times


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
def test_a_job_hangs_only_if_all_ranks_wait(answers: list[dict[str, Any]], hangs: bool) -> None:
    assert hang.is_hang([*answers, *NODES]) is hangs


def test_the_likely_cause_is_named_first() -> None:
    answers = [rank(number, within="MPI", source="sum()") for number in (0, 1, 2, 4, 6)]
    answers += [rank(3, stacks.STOPPED, "b.py:2", "n2"), rank(5, place="c.py:3")]
    groups = hang.groups([*answers, *NODES])
    assert [[answer["rank"] for answer in group] for group in groups] == [[3], [5], [0, 1, 2, 4, 6]]
    assert all(text in hang.words(groups[2]) for text in ("(0-2,4,6)", "MPI", "a.py:1", "sum()"))
    assert hang.suspects([*answers, *NODES]) == ["n2"]
    assert hang.suspects([rank(0, stacks.STOPPED), rank(1)]) == []


HANGING = [rank(0, within="MPI"), rank(1, stacks.STOPPED, node="n2"), *NODES]


@pytest.fixture
def reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Examine a silent job in an empty folder, where the nodes give these answers in turn."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)

    def look(mode: str, *answers: Any) -> tuple[str, str, dict[str, Any]]:
        monkeypatch.setattr(hang, "ask_nodes", Mock(side_effect=answers))
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
def test_a_change_of_these_files_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    monkeypatch.setenv("CLUSTERCTL_HEARTBEAT", str(tmp_path / "heartbeat"))
    watch = hang.Watch("warn", 60.0, (str(tmp_path), [], ""))
    before = watch.state()
    (tmp_path / name).touch()
    assert (watch.state() != before) is (name != "other")


def test_a_hang_that_ends_the_job_is_recorded(reported: Any) -> None:
    events, log, record = reported("end", HANGING, HANGING)
    event = json.loads(events)
    assert (event["event"], event["action"], event["summary"]) == (
        "hang",
        "end",
        hang.summary(HANGING),
    )
    assert event["summary"] in log
    assert (record["nodes"], [rank["rank"] for rank in record["ranks"]]) == (["n2"], [0, 1])


def test_a_warning_ends_nothing(reported: Any) -> None:
    events, log, record = reported("warn", HANGING, HANGING)
    event = json.loads(events)
    assert (event["action"], record) == ("warn", {})
    assert event["summary"] in log


def test_progress_after_a_warning_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("SLURM_ARRAY_TASK_ID", raising=False)
    monkeypatch.setattr(hang, "ask_nodes", lambda *_: HANGING)
    rounds = iter(["", "", "", "stdout.log", "heartbeat"])

    def sleep(_: float) -> None:
        name = next(rounds, None)
        if name is None:
            raise KeyboardInterrupt
        if name:
            Path(name).touch()

    monkeypatch.setattr(hang.time, "sleep", sleep)
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
def test_a_hang_must_be_the_same_twice(reported: Any, second: list[dict[str, Any]]) -> None:
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
def test_a_rank_that_works_between_two_looks_does_not_hang(
    monkeypatch: pytest.MonkeyPatch,
    reported: Any,
    used_s: float,
    rank_state: tuple[str, str],
    hangs: bool,
) -> None:
    """Such as a rank on a node that is stopped for a while, again and again."""
    times = iter(range(0, 1000, 10))
    monkeypatch.setattr(hang.time, "monotonic", lambda: float(next(times)))
    doing, within = rank_state
    looks = [[*HANGING, rank(2, doing, within=within, cpu_s=cpu_s)] for cpu_s in (1.0, used_s)]
    assert bool(reported("warn", *looks)[0]) is hangs


def test_a_rank_that_worked_since_the_look_before_does_not_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as a rank that works for a second every minute."""
    monkeypatch.chdir(tmp_path)
    times = iter(range(0, 10_000, 50))
    monkeypatch.setattr(hang.time, "monotonic", lambda: float(next(times)))
    monkeypatch.setattr(hang.time, "sleep", lambda _: None)
    used = iter([1.0, 1.0, 90.0, 90.0, 91.0, 91.0])
    monkeypatch.setattr(
        hang, "ask_nodes", lambda *_: [*HANGING, rank(2, within="poll", cpu_s=next(used))]
    )
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
    monkeypatch.setattr(hang.time, "monotonic", lambda: float(next(times)))
    monkeypatch.setattr(hang.time, "sleep", lambda _: None)
    monkeypatch.setattr(hang, "ask_nodes", lambda *_: HANGING)
    assert bool(hang.Watch("end", 60.0, (str(tmp_path), [], "")).look()) is hangs


def test_a_rank_that_sleeps_has_more_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that sleeps continues by itself. It is reported at the usual time, and only once."""
    monkeypatch.chdir(tmp_path)
    sleeping = [rank(0, within="MPI"), rank(1, within="sleep", asleep=True)]
    monkeypatch.setattr(hang, "ask_nodes", lambda *_: sleeping)
    monkeypatch.setattr(hang.time, "sleep", lambda _: None)
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
def test_a_look_that_fails_is_no_hang(
    reported: Any, capfd: pytest.CaptureFixture[str], trouble: Any
) -> None:
    assert reported("end", trouble) == ("", "", {})
    assert capfd.readouterr().err


READY = "open(__file__ + '.ready', 'w').close()\n"
WAITER = f"import time\ndef wait():\n    time.sleep(1000)\n{READY}wait()\n"
WORKER = f"def work():\n    while True:\n        sum(range(100000))\n{READY}work()\n"


@pytest.fixture
def rank_program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start Python programs as ranks of a job of their own."""
    job = f"test-{os.getpid()}"
    monkeypatch.setenv("SLURM_JOB_ID", job)
    started: list[subprocess.Popen[bytes]] = []

    def start(number: int, text: str, encoding: str = "utf-8") -> subprocess.Popen[bytes]:
        program = tmp_path / f"rank{number}.py"
        program.write_text(text, encoding=encoding)
        command = [sys.executable, NODE / "rank.py", program]
        process = subprocess.Popen(
            command, env={**os.environ, "SLURM_JOB_ID": job, "RANK": str(number)}
        )
        started.append(process)
        eventually(Path(f"{program}.ready").exists, 30)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def observed() -> dict[int, stacks.Rank]:
    return {rank.rank: rank for rank in stacks.observe("n1")}


def test_ranks_are_found_with_their_places(rank_program: Any) -> None:
    waiting, working, stopped = (
        rank_program(*words) for words in ((0, WAITER), (1, WORKER), (12, WAITER))
    )
    stopped.send_signal(signal.SIGSTOP)
    places = observed()
    assert [rank.pid for rank in places.values()] == [waiting.pid, working.pid, stopped.pid]
    assert {number: rank.doing for number, rank in places.items()} == {
        0: stacks.WAITING,
        1: stacks.COMPUTING,
        12: stacks.STOPPED,
    }
    assert places[0].place.endswith("/rank0.py:3")
    assert places[0].source == "time.sleep(1000)"
    assert any("in wait" in line for line in places[0].stack)


@pytest.mark.parametrize(
    ("use", "doing"), [(None, stacks.RUNNING), (12, stacks.COMPUTING), (0, stacks.WAITING)]
)
def test_a_rank_that_waits_for_a_gpu_at_work_does_not_wait(
    monkeypatch: pytest.MonkeyPatch, use: int | None, doing: str
) -> None:
    """A GPU that waits for another GPU uses no memory."""
    process = stacks.Process(os.getpid(), os.getppid(), ("train",))
    monkeypatch.setattr(stacks, "WINDOW_S", 0.0)
    monkeypatch.setattr(stacks, "ranks_here", lambda: {0: [process]})
    monkeypatch.setattr(stacks, "python_stacks", lambda _: {})
    monkeypatch.setattr(stacks.Activity, "judge", lambda *_, **__: (stacks.WAITING, "CUDA"))
    monkeypatch.setattr(stacks.Activity, "sample", lambda *_: None)
    monkeypatch.setattr(stacks.Gpus, "memory_use", lambda _: use)
    assert observed()[0].doing == doing


def test_stacks_of_a_program_that_prints_none_are_read_by_py_spy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    frames = [{"name": "Loader.next", "filename": "/a/loader.py", "line": 7}]
    threads = [{"os_thread_id": 5, "frames": []}, {"os_thread_id": os.getpid(), "frames": frames}]
    spy = tmp_path / "py-spy"
    spy.write_text(f"#!/bin/sh\necho '{json.dumps(threads)}'\n")
    spy.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    found = stacks.python_stacks(os.getpid())
    assert next(iter(found.items())) == (
        f"Thread {os.getpid()}",
        [stacks.Frame("next", "/a/loader.py", 7)],
    )
    spy.write_text("#!/bin/sh\nexit 1\n")
    assert stacks.python_stacks(os.getpid()) == {}


WAITS_IN_C = """\
#include <unistd.h>
#include <sched.h>
__attribute__((noinline)) void first(void) { usleep(1); }
__attribute__((noinline)) int waits(void) { return usleep(%s) + 1; }
__attribute__((noinline)) void leaves(void) { for (;;) sched_yield(); }
__attribute__((noinline)) void jumps(void) { sleep(1000); }
int main(void) { first(); %s; return 7; }
"""


@pytest.mark.skipif(not shutil.which("gcc"), reason="there is no compiler")
@pytest.mark.parametrize("options", [["-O0"], ["-O2"], ["-O2", "-no-pie"], ["-O2", "-fno-plt"]])
@pytest.mark.parametrize("function", ["waits", "leaves", "jumps"])
def test_a_program_in_c_is_named_with_its_function(
    tmp_path: Path, function: str, options: list[str]
) -> None:
    (tmp_path / "main.c").write_text(WAITS_IN_C % ("1000000000", f"{function}()"))
    subprocess.run(["gcc", *options, "-o", tmp_path / "main", tmp_path / "main.c"], check=True)
    with subprocess.Popen([tmp_path / "main"]) as process:
        tracer = stacks.Tracer()

        def found() -> str:
            tracer.library_of(process.pid, process.pid) if function == "leaves" else None
            return native.innermost_function(process.pid, tracer.stack_pointers.get(process.pid, 0))

        try:
            eventually(lambda: found() == function, 30)
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: stacks._stat(f"/proc/{process.pid}")[0] == "T", 30)
            assert found() == function
            if function == "leaves":
                process.send_signal(signal.SIGCONT)
                eventually(lambda: tracer.library_of(process.pid, process.pid) == "main", 30)
        finally:
            tracer.release()
            process.kill()


@pytest.mark.parametrize(
    "program", [b"", b"\x7fELF", b"\x7fELF" + b"\xff" * 200, b"#!/bin/sh\n" * 20]
)
def test_a_file_that_is_no_program_has_no_functions(program: bytes) -> None:
    with pytest.raises((ValueError, IndexError, OverflowError, struct.error)):
        native.Program(program)


def test_a_source_in_any_encoding_is_quoted(rank_program: Any, tmp_path: Path) -> None:
    text = f"# coding: latin-1\n# \f\u2028\n{WAITER}".replace("1000)", "1000)  # \xe9")
    rank_program(0, text.replace("\u2028", "\xe9"), encoding="latin-1")
    assert observed()[0].source == "time.sleep(1000)  # \xe9"
    (tmp_path / "rank0.py").write_bytes(b"\xff\n" * 50)
    linecache.clearcache()
    assert observed()[0].source == ""


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
def test_a_wait_in_the_kernel_has_words(function: str, words: str) -> None:
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
def test_code_is_told_from_waits_by_its_library(library: str, kind: str) -> None:
    assert stacks._kind(library) == kind


def test_a_running_thread_shows_its_library_and_keeps_running(rank_program: Any) -> None:
    pid = rank_program(0, WORKER).pid
    tracer = stacks.Tracer()
    libraries = set()

    def has_shown_a_library() -> bool:
        libraries.add(tracer.library_of(pid, pid))
        return any("python" in library for library in libraries)

    eventually(has_shown_a_library, 30)
    tracer.release()
    assert not tracer.is_refused
    eventually(lambda: stacks._stat(f"/proc/{pid}")[0] == "R", 30)


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ({"own": 5, "MPI": 45}, (stacks.COMPUTING, "")),
        ({"own": 4, "MPI": 45}, (stacks.WAITING, "MPI")),
        ({"": 50, "MPI": 1}, (stacks.WAITING, "MPI")),
        ({"": 50}, (stacks.COMPUTING, "")),
    ],
)
def test_a_busy_rank_is_judged_by_the_code_it_runs(
    rank_program: Any, rounds: dict[str, int], expected: tuple[str, str]
) -> None:
    process = rank_program(0, WORKER)
    activity = stacks.Activity([stacks.Process(process.pid, os.getpid(), ("python",))])
    eventually(lambda: activity._counters()[0] - activity._before[0] > 50, 30)
    activity._rounds = rounds
    assert activity.judge(can_trace=True) == expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [({}, (stacks.COMPUTING, "")), ({"MPI": 1}, (stacks.WAITING, "MPI"))],
    ids=["unknown", "in-mpi"],
)
def test_a_rank_that_could_have_run_all_the_time_works(
    rank_program: Any, rounds: dict[str, int], expected: tuple[str, str]
) -> None:
    """On a busy node, it got no processor time. Only a sample in a library shows that it waits."""
    process = rank_program(0, WAITER)
    activity = stacks.Activity([stacks.Process(process.pid, os.getpid(), ("python",))])
    activity._samples = 50
    activity._runnable = 26
    activity._rounds = rounds
    assert activity.judge(can_trace=True) == expected


READER = f"import os\ndef wait():\n    os.read(os.pipe()[0], 1)\n{READY}wait()\n"


def test_a_rank_that_sleeps_or_starts_processes_may_continue(rank_program: Any) -> None:
    sleeps, reads = (
        stacks.Process(rank_program(number, text).pid, os.getpid(), ("python",))
        for number, text in enumerate((WAITER, READER))
    )
    eventually(lambda: stacks._wait_of(sleeps.pid) == stacks.SLEEP, 30)
    assert stacks.Activity([sleeps]).is_asleep([sleeps])
    assert not stacks.Activity([reads]).is_asleep([reads])
    assert stacks.Activity([reads]).is_asleep([reads, reads._replace(pid=1)])


@pytest.fixture
def launchers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Programs in place of srun and ssh, which run the command on this machine."""
    bodies = {
        "srun": 'env | grep -E "^SLURM_" >"$0.env"; while [[ $1 == -* ]]; do shift; done; exec "$@"',
        "ssh": 'shift 2; [[ $1 != lost ]] && exec bash -c "$2"',
    }
    for name, body in bodies.items():
        play(tmp_path / name, body)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    return tmp_path


@pytest.mark.parametrize(
    ("nodes", "ssh", "count"),
    [
        ([], "", 1),
        (["n1"], "", 1),
        ([stacks.task.host_name(), "n 2"], "ssh -F x", 2),
        ([stacks.task.host_name(), "lost"], "ssh -F x", 0),
    ],
)
def test_all_nodes_are_asked_or_no_answer_counts(
    launchers: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[str], ssh: str, count: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", f"none-{os.getpid()}")
    answers = hang.ask_nodes(str(launchers / "a folder"), nodes, ssh)
    assert [answer.keys() for answer in answers] == [{"node", "ranks", "network", "disk"}] * count


def test_stacks_of_ranks_are_found_with_site_packages(tmp_path: Path) -> None:
    """NVIDIA's library is in site-packages, and tells whether a rank waits for a GPU at work."""
    venv.EnvBuilder(symlinks=True).create(tmp_path)
    (packages,) = tmp_path.glob("lib/python*/site-packages")
    (packages / "pynvml.py").write_text(
        "open(__file__ + '.imported', 'w').close()\nraise ImportError\n"
    )
    command = [tmp_path / "bin" / "python", "-IS", NODE / "hang.py", "show", tmp_path, "", ""]
    environment = {**os.environ, "SLURM_JOB_ID": f"none-{os.getpid()}", stacks.WATCHER: "1"}
    environment.pop("SLURM_JOB_NUM_NODES", None)
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    assert json.loads(done.stdout) == {"groups": [], "ranks": []}
    assert (packages / "pynvml.py.imported").exists()


def lines(*answers: dict[str, Any]) -> list[str]:
    return [json.dumps(answer) for answer in answers]


ONE_EACH = lines(rank(0), {**NODES[0], "ranks": 1}, rank(1, node="n2"), {**BUSY_DISK, "ranks": 1})
BROKEN = ['{"rank": 1, "no{"node": "n2"', "[]", '{"level": "warning"}', "7", "srun: warning", ""]


@pytest.mark.parametrize(
    ("output", "count"),
    [
        pytest.param(ONE_EACH, 4, id="all"),
        pytest.param([*BROKEN, *ONE_EACH, *BROKEN], 4, id="other-lines-are-ignored"),
        pytest.param([*ONE_EACH[:2], BROKEN[0], ONE_EACH[3]], 0, id="a-lost-rank-may-be-working"),
        pytest.param(ONE_EACH[:3], 0, id="a-lost-node"),
    ],
)
def test_answers_are_found_among_the_output_of_srun(
    launchers: Path, monkeypatch: pytest.MonkeyPatch, output: list[str], count: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (launchers / "output").write_text("\n".join([*output, ""]))
    play(launchers / "srun", f"cat {launchers}/output")
    assert len(hang.ask_nodes(str(launchers), ["n1", "n2"], "")) == count


@pytest.mark.parametrize("letter", ["x", "é", "\N{BUG}"])
def test_a_rank_is_printed_on_a_short_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], letter: str
) -> None:
    """slurmstepd sends messages of 1024 bytes, and srun mixes those of several nodes."""
    long = letter * 500
    texts = ("waiting", long, f"{long}:88", long, (long,) * 9, (f"process 5: {long}",) * 99)
    found = stacks.Rank(4_194_304, "n" * 64, 4_194_304, *texts)
    monkeypatch.setattr(stacks, "observe", lambda _: iter([found]))
    stacks.main(str(tmp_path))
    printed = capsys.readouterr().out.splitlines()
    assert all(len(line) <= 900 for line in printed)
    (answer, node) = map(json.loads, printed)
    assert (node["ranks"], answer["place"][-3:], answer.keys()) == (1, ":88", rank(0).keys())
    assert (tmp_path / "rank-logs" / "4194304.stack").read_text().count(f"process 5: {long}") == 99


def test_a_new_step_gets_no_variables_of_the_own_step(
    launchers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these variables, srun would start the step on fewer nodes."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    hang.ask_nodes(str(launchers), [], "")
    assert (launchers / "srun.env").read_text() == ""
