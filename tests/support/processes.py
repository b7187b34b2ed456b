"""Wait for conditions and processes, hold locks, and run programs as root."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TypeVar

from clusterctl.util.progress import backoff

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[2]

_HOLD = """
import sys
from pathlib import Path
from clusterctl.state.workspace import Workspace
with Workspace(Path(sys.argv[1])).lock("up", wait_s=0, waiting=print):
    print("held", flush=True)
    sys.stdin.read()
"""


def as_root() -> tuple[str, ...]:
    """How the command line of a program begins that root is to run."""
    return () if os.geteuid() == 0 else ("sudo", "-n", "--")


def run_as_root(*argv: str | Path, stdin: str = "") -> str:
    """What a program prints that root runs, in this checkout.

    Raises:
        AssertionError: it failed.
    """
    words = [*as_root(), *map(str, argv)]
    done = subprocess.run(
        words, input=stdin, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, f"$ {shlex.join(words)}\n{done.stdout}{done.stderr}"
    return done.stdout


def eventually(look: Callable[[], T], timeout_s: float = 60, *, pause_s: float | None = None) -> T:
    """Return what ``look`` returns as soon as that is true; AssertionError if it is not in time."""
    deadline = time.monotonic() + timeout_s
    # By default they grow, because a look may be a command on a cluster.
    pauses = backoff(0.05, longest_s=2.0) if pause_s is None else backoff(pause_s, factor=1)
    while not (seen := look()):
        assert time.monotonic() < deadline, f"{seen!r} after {timeout_s:g} s"
        time.sleep(next(pauses))
    return seen


def until_it_sleeps(pid: int) -> None:
    """Wait until a process sleeps, such as in a read.

    Python sees a signal that arrives just before a call that reads only after the call.
    """
    stat = Path(f"/proc/{pid}/stat")
    eventually(lambda: stat.read_text().rpartition(")")[2].split()[0] == "S")


@contextmanager
def holding_lock(workspace: Path) -> Iterator[subprocess.Popen[str]]:
    """Another `clusterctl up`, which holds the lock of a workspace until its stdin closes or it is
    killed.
    """
    argv = [sys.executable, "-c", _HOLD, str(workspace)]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def suspend(pid: int, times: int, seconds: float = 0.005) -> None:
    """Stop a child process for so many seconds, and let it continue, several times, unless it
    ends.
    """
    for _ in range(times):
        os.kill(pid, signal.SIGSTOP)
        ended = os.waitid(os.P_PID, pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if ended is None or ended.si_code != os.CLD_STOPPED:
            return
        os.waitid(os.P_PID, pid, os.WSTOPPED)
        # The process is to be stopped for longer than its own time-outs.
        time.sleep(seconds)
        os.kill(pid, signal.SIGCONT)


def ends_within_a_minute(pid: int) -> bool:
    """Return whether a process ends within a minute."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.05)
    return False


def recorded_pid(file: Path, attempt: Callable[[float], None]) -> int:
    """Return the pid that a program writes to a file.

    attempt: starts the program with a time limit in seconds. It is called again with a longer one
        if the machine was too busy for the program to write its pid.
    """
    for seconds in (0.3, 3, 30):
        attempt(seconds)
        if file.exists() and (text := file.read_text()):
            return int(text)
    raise AssertionError("the program did not begin")


def descendants(pid: int) -> list[int]:
    """All that it started and what these started, as far as they have their parents."""
    found: list[int] = []
    with suppress(FileNotFoundError, ProcessLookupError):  # it ended meanwhile
        for thread in Path(f"/proc/{pid}/task").iterdir():
            for child in map(int, (thread / "children").read_text().split()):
                found += [child, *descendants(child)]
    return found
