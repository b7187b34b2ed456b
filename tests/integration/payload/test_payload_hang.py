"""Hanging programs: their stacks, and whether they may still work."""

from __future__ import annotations

import json
import linecache
import os
import shutil
import signal
import subprocess
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.node import hang, native, stacks
from tests.support.played.batch import play
from tests.support.processes import eventually
from tests.unit.payload.test_payload_hang import BUSY_DISK, NODES, rank

NODE = Path(__file__).parents[3] / "payload" / "node"


READY = "open(__file__ + '.ready', 'w').close()\n"


WAITER = f"import time\ndef wait():\n    time.sleep(1000)\n{READY}wait()\n"


WORKER = f"def work():\n    while True:\n        sum(range(100000))\n{READY}work()\n"


def observed() -> dict[int, stacks.Rank]:
    return {rank.rank: rank for rank in stacks.observe("n1")}


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
        eventually(Path(f"{program}.ready").exists)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


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
def test_program_in_c_is_named_with_its_function(
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
            eventually(lambda: found() == function)
            process.send_signal(signal.SIGSTOP)
            eventually(lambda: stacks._stat(f"/proc/{process.pid}")[0] == "T")
            assert found() == function
            if function == "leaves":
                process.send_signal(signal.SIGCONT)
                eventually(lambda: tracer.library_of(process.pid, process.pid) == "main")
        finally:
            tracer.release()
            process.kill()


def test_source_in_any_encoding_is_quoted(rank_program: Any, tmp_path: Path) -> None:
    text = f"# coding: latin-1\n# \f\u2028\n{WAITER}".replace("1000)", "1000)  # \xe9")
    rank_program(0, text.replace("\u2028", "\xe9"), encoding="latin-1")
    assert observed()[0].source == "time.sleep(1000)  # \xe9"
    (tmp_path / "rank0.py").write_bytes(b"\xff\n" * 50)
    linecache.clearcache()
    assert observed()[0].source == ""


def test_running_thread_shows_its_library_and_keeps_running(rank_program: Any) -> None:
    pid = rank_program(0, WORKER).pid
    tracer = stacks.Tracer()
    libraries = set()

    def has_shown_a_library() -> bool:
        libraries.add(tracer.library_of(pid, pid))
        return any("python" in library for library in libraries)

    eventually(has_shown_a_library)
    tracer.release()
    assert not tracer.is_refused
    eventually(lambda: stacks._stat(f"/proc/{pid}")[0] == "R")


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [
        ({"own": 5, "MPI": 45}, (stacks.COMPUTING, "")),
        ({"own": 4, "MPI": 45}, (stacks.WAITING, "MPI")),
        ({"": 50, "MPI": 1}, (stacks.WAITING, "MPI")),
        ({"": 50}, (stacks.COMPUTING, "")),
    ],
)
def test_busy_rank_is_judged_by_the_code_it_runs(
    rank_program: Any, rounds: dict[str, int], expected: tuple[str, str]
) -> None:
    process = rank_program(0, WORKER)
    activity = stacks.Activity([stacks.Process(process.pid, os.getpid(), ("python",))])
    eventually(lambda: activity._counters()[0] - activity._before[0] > 50)
    activity._rounds = rounds
    assert activity.judge(can_trace=True) == expected


@pytest.mark.parametrize(
    ("rounds", "expected"),
    [({}, (stacks.COMPUTING, "")), ({"MPI": 1}, (stacks.WAITING, "MPI"))],
    ids=["unknown", "in-mpi"],
)
def test_rank_that_could_have_run_all_the_time_works(
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


def test_rank_that_sleeps_or_starts_processes_may_continue(rank_program: Any) -> None:
    sleeps, reads = (
        stacks.Process(rank_program(number, text).pid, os.getpid(), ("python",))
        for number, text in enumerate((WAITER, READER))
    )
    eventually(lambda: stacks._wait_of(sleeps.pid) == stacks.SLEEP)
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
def test_hang_counts_if_all_nodes_answered(
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


def test_new_step_gets_no_variables_of_the_own_step(
    launchers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these variables, srun would start the step on fewer nodes."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    hang.ask_nodes(str(launchers), [], "")
    assert (launchers / "srun.env").read_text() == ""
