"""Hanging programs: their stacks, as py-spy and debuggers tell them, and the nodes that answer."""

from __future__ import annotations

import json
import linecache
import os
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from payload.node import hang, stacks
from payload.node.processes import WATCHER
from tests.support.played.batch import play
from tests.support.processes import eventually
from tests.unit.payload.test_payload_hang import rank

NODE = Path(__file__).parents[3] / "payload" / "node"
READY = "open(__file__ + '.ready', 'w').close()\n"
WAITER = f"import time\ndef wait():\n    time.sleep(1000)\n{READY}wait()\n"


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder with py-spy, gdb and eu-stack, beside this Python. It has none."""
    folder = tmp_path / "tools"
    folder.mkdir()
    monkeypatch.setattr(sys, "executable", str(folder / "python"))
    monkeypatch.setenv("PATH", str(folder))
    return folder


def plays(tool: Path, output: str = "", said: str = "", rc: int = 0, only: str = "") -> None:
    """Let a program print this. only: an argument without which it fails."""
    body = f"printf %s {shlex.quote(output)}; printf %s {shlex.quote(said)} >&2; exit {rc}"
    fails = f'[[ " $* " == *" {only} "* ]] || exit 1\n' if only else ""
    play(tool, fails + body)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Start Python programs as ranks of a job of their own."""
    job = f"test-{os.getpid()}"
    monkeypatch.setenv("SLURM_JOB_ID", job)
    python = sys.executable
    started: list[subprocess.Popen[bytes]] = []

    def run(number: int, text: str = WAITER, encoding: str = "utf-8") -> subprocess.Popen[bytes]:
        program = tmp_path / f"rank{number}.py"
        program.write_text(text, encoding=encoding)
        command = [python, NODE / "rank.py", program]
        process = subprocess.Popen(
            command, env={**os.environ, "SLURM_JOB_ID": job, "RANK": str(number)}
        )
        started.append(process)
        eventually(Path(f"{program}.ready").exists)
        return process

    yield run
    for process in started:
        process.kill()
        process.wait()


def frame(name: str, file: str, line: int) -> dict[str, Any]:
    return {"name": name, "filename": file, "line": line}


def thread(number: int, *frames: dict[str, Any]) -> dict[str, Any]:
    return {"os_thread_id": number, "thread_name": "MainThread", "frames": frames}


def found(number: int = 0) -> stacks.RankStacks:
    return {each.rank: each for each in stacks.read_ranks("n1")}[number]


def test_ranks_are_found_with_their_states_and_places(
    start: Any, tools: Path, tmp_path: Path
) -> None:
    waiting, stopped = start(0), start(12)
    stopped.send_signal(signal.SIGSTOP)
    eventually(lambda: found(12).state == stacks.STOPPED)
    program = str(tmp_path / "rank0.py")
    frames = (
        frame("clock_nanosleep", "/lib/libc.so.6", 0),
        frame("Queue.get", "/usr/lib/python3.13/queue.py", 171),
        frame("wait", program, 3),
    )
    plays(tools / "py-spy", json.dumps([thread(5), thread(waiting.pid, *frames)]), only="--native")
    assert found().pid == waiting.pid
    assert found().place.endswith("/rank0.py:3")
    assert (found().source, found().unread) == ("time.sleep(1000)", "")
    assert any("clock_nanosleep (/lib/libc.so.6)" in line for line in found().stack)
    assert found(12).pid == stopped.pid


def test_python_program_that_can_not_be_stopped_is_read_without_stopping(
    start: Any, tools: Path, tmp_path: Path
) -> None:
    """So it is with a program that a signal has stopped."""
    pid = start(0).pid
    threads = [thread(pid, frame("wait", str(tmp_path / "rank0.py"), 3))]
    plays(tools / "py-spy", json.dumps(threads), only="--nonblocking")
    assert found().source == "time.sleep(1000)"


def test_source_in_any_encoding_is_quoted(start: Any, tools: Path, tmp_path: Path) -> None:
    text = f"# coding: latin-1\n# \f\xe9\n{WAITER}".replace("1000)", "1000)  # \xe9")
    pid = start(0, text, encoding="latin-1").pid
    program = tmp_path / "rank0.py"
    plays(tools / "py-spy", json.dumps([thread(pid, frame("wait", str(program), 5))]))
    assert found().source == "time.sleep(1000)  # \xe9"
    program.write_bytes(b"\xff\n" * 50)
    linecache.clearcache()
    assert found().source == ""


NOT_PYTHON = (
    "Error: Failed to find python version from target process\n\nStack backtrace:\n   0: a\n"
)
# As gdb 13 and elfutils 0.188 print them for a program whose function `message` calls MPI_Recv.
GDB = """\
[New LWP 20087]
0x00007faa5c75c8b5 in ?? () from /lib/x86_64-linux-gnu/libopen-pal.so.40

Thread 2 (Thread 0x7faa5c4bd6c0 (LWP 20087) "mp"):
#0  0x00007faa5c94426f in poll () from /lib/x86_64-linux-gnu/libc.so.6
#1  0x000055bf373501aa in other ()

Thread 1 (Thread 0x7faa5c509740 (LWP {pid}) "mp"):
#0  0x00007faa5c75c8b5 in ?? () from /lib/x86_64-linux-gnu/libopen-pal.so.40
#1  0x00007faa5cab4135 in PMPI_Recv () from /lib/x86_64-linux-gnu/libmpi.so.40
#2  message (count=1) at mp.c:2
#3  0x000055bf3735008e in main ()
[Inferior 1 (process {pid}) detached]
"""
EU_STACK = """\
PID {pid} - process
TID 20087:
#0  0x00007faa5c94426f __poll - /usr/lib/x86_64-linux-gnu/libc.so.6
#1  0x000055bf373501aa other - {program}
TID {pid}:
#0  0x00007faa5c704cf8 - /usr/lib/x86_64-linux-gnu/libopen-pal.so.40.30.2
#1  0x00007faa5cab4135 PMPI_Recv - /usr/lib/x86_64-linux-gnu/libmpi.so.40.30.4
#2  0x000055bf373501bf message - {program}
#3  0x000055bf3735008e main - {program}
"""


@pytest.mark.parametrize(("name", "output"), [("gdb", GDB), ("eu-stack", EU_STACK)])
def test_program_without_python_is_read_by_a_debugger(
    start: Any, tools: Path, name: str, output: str
) -> None:
    pid = start(0).pid
    program = os.readlink(f"/proc/{pid}/exe")
    plays(tools / "py-spy", said=NOT_PYTHON, rc=1)
    plays(tools / name, output.format(pid=pid, program=program))
    assert found().place == f"{Path(program).name}:message"
    assert sum("PMPI_Recv" in line for line in found().stack) == 1
    assert not any("Inferior" in line or "New LWP" in line for line in found().stack)


def test_stack_that_can_not_be_read_has_a_reason(start: Any, tools: Path) -> None:
    start(0)
    assert f"{tools}/py-spy" in found().unread
    plays(tools / "py-spy", said="Error: Failed\n\nCaused by:\n    0: EPERM: no\n", rc=1)
    assert found().unread == "Failed: EPERM: no"
    plays(tools / "py-spy", said=NOT_PYTHON, rc=1)
    assert "gdb" in found().unread
    plays(tools / "gdb", said="ptrace: No such process.\nNo stack.\n")
    assert found().unread == "ptrace: No such process.: No stack."
    assert found().unread in found().stack[-1]


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
    ("nodes", "ssh", "missing"),
    [
        ([], "", 0),
        (["n1"], "", 0),
        ([stacks.task.host_name(), "n 2"], "ssh -F x", 0),
        ([stacks.task.host_name(), "lost"], "ssh -F x", 1),
    ],
)
def test_nodes_that_do_not_answer_are_counted(
    launchers: Path, monkeypatch: pytest.MonkeyPatch, nodes: list[str], ssh: str, missing: int
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", f"none-{os.getpid()}")
    assert hang.ask_nodes(str(launchers / "a folder"), nodes, ssh) == hang.RankAnswers([], missing)


def test_job_without_ranks_has_no_stacks(tmp_path: Path) -> None:
    command = [sys.executable, "-IS", NODE / "hang.py", "show", tmp_path, "", ""]
    environment = {**os.environ, "SLURM_JOB_ID": f"none-{os.getpid()}", WATCHER: "1"}
    environment.pop("SLURM_JOB_NUM_NODES", None)
    done = subprocess.run(command, env=environment, check=True, capture_output=True)
    assert json.loads(done.stdout) == {"groups": [], "ranks": []}


def lines(*answers: dict[str, Any]) -> list[str]:
    return [json.dumps(answer) for answer in answers]


ONE_EACH = lines(
    rank(0), {"node": "n1", "ranks": 1}, rank(1, node="n2"), {"node": "n2", "ranks": 1}
)


BROKEN = ['{"rank": 1, "no{"node": "n2"', "[]", '{"level": "warning"}', "7", "srun: warning", ""]


@pytest.mark.parametrize(
    ("output", "ranks", "missing"),
    [
        pytest.param(ONE_EACH, [0, 1], 0, id="all"),
        pytest.param([*BROKEN, *ONE_EACH, *BROKEN], [0, 1], 0, id="other-lines-are-ignored"),
        pytest.param([*ONE_EACH[:2], BROKEN[0], ONE_EACH[3]], [0], 1, id="a-lost-rank"),
        pytest.param(ONE_EACH[:3], [0, 1], 1, id="a-node-that-did-not-end"),
        pytest.param(ONE_EACH[:2], [0], 1, id="a-lost-node"),
    ],
)
def test_answers_are_found_among_the_output_of_srun(
    launchers: Path,
    monkeypatch: pytest.MonkeyPatch,
    output: list[str],
    ranks: list[int],
    missing: int,
) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    (launchers / "output").write_text("\n".join([*output, ""]))
    play(launchers / "srun", f"cat {launchers}/output")
    look = hang.ask_nodes(str(launchers), ["n1", "n2"], "")
    assert ([each["rank"] for each in look.ranks], look.missing) == (ranks, missing)


def test_new_step_gets_no_variables_of_the_own_step(
    launchers: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With these variables, srun would start the step on fewer nodes."""
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NUM_NODES", "2")
    hang.ask_nodes(str(launchers), [], "")
    assert (launchers / "srun.env").read_text() == ""
