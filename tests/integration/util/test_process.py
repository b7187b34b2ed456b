"""Tests of programs and folders that must not outlive a killed clusterctl."""

from __future__ import annotations

import fcntl
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

import pytest

from clusterctl.util.process import (
    PREFIX,
    remove_stale_folders,
    run,
    run_with_lines,
    stdout_pieces,
    temporary_folder,
    under_subreaper,
)
from tests.support import processes
from tests.support.processes import eventually

IN_A_FOLDER = """
import sys
from clusterctl.util.process import temporary_folder
with temporary_folder(sys.argv[1]) as folder:
    (folder / "file").touch()
    print(folder, flush=True)
    sys.stdin.read()
"""
# A program that prints its pid and that of its child, which has its own session.
SHELL = 'setsid sleep 60 >/dev/null & echo $$ $!; exec sleep "$0"'
STARTS = f"""
import subprocess, sys
from clusterctl.util.process import under_subreaper
sys.exit(subprocess.call(under_subreaper(["sh", "-c", {SHELL!r}, sys.argv[1]])))
"""


@contextmanager
def running(
    program: str, *arguments: str | Path | float
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    argv = [sys.executable, "-c", program, *map(str, arguments)]
    with subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        yield process, process.stdout.readline().strip()
        process.kill()


def test_temporary_folder_is_private_and_removed(tmp_path: Path) -> None:
    with temporary_folder(tmp_path) as folder:
        assert folder.stat().st_mode & 0o077 == 0
        (folder / "file").touch()
    assert list(tmp_path.iterdir()) == []


def test_sweep_removes_only_folders_of_killed_processes(tmp_path: Path) -> None:
    with running(IN_A_FOLDER, tmp_path) as (process, name), temporary_folder(tmp_path):
        assert len(list(tmp_path.iterdir())) == 2
        process.kill()
        process.wait()
        assert (Path(name) / "file").exists()
        with temporary_folder(tmp_path):
            assert not Path(name).exists()
    assert list(tmp_path.iterdir()) == []


def test_remove_stale_folders_keeps_links_files_and_other_names(tmp_path: Path) -> None:
    (tmp_path / "clusterctl-examples").mkdir()
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / f"{PREFIX}link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / f"{PREFIX}file").touch()
    (tmp_path / f"{PREFIX}gone").mkdir()
    before = set(tmp_path.iterdir())
    remove_stale_folders(tmp_path)
    assert before - set(tmp_path.iterdir()) == {tmp_path / f"{PREFIX}gone"}
    remove_stale_folders(tmp_path / "not there")


def is_gone(pid: str) -> bool:
    return not Path(f"/proc/{pid}/exe").exists()  # nor has a zombie one


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_program_ends_with_the_process_that_started_it(sign: signal.Signals) -> None:
    with running(STARTS, "60") as (process, pids):
        assert not any(map(is_gone, pids.split()))
        process.send_signal(sign)
        process.wait()
        eventually(lambda: all(map(is_gone, pids.split())))


def test_child_of_a_program_ends_with_it() -> None:
    with running(STARTS, "0") as (process, pids):
        assert process.wait(30) == 0
        assert all(map(is_gone, pids.split()))


def test_program_without_reader_ends() -> None:
    argv = ["sh", "-c", "echo $$; exec sleep 60"]
    with closing(stdout_pieces(argv)) as pieces:
        pids = [int(next(pieces))]

    def stop(line: str) -> None:
        pids.append(int(line))
        raise InterruptedError

    with pytest.raises(InterruptedError):
        run_with_lines(argv, stop)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_run_after_its_timeout_ends_all_child_processes(tmp_path: Path) -> None:
    pid = tmp_path / "pid"
    end = tmp_path / "end"

    def attempt(timeout_s: float) -> None:
        with pytest.raises(subprocess.TimeoutExpired):
            run(
                ["sh", "-c", f"(sleep 40; touch {end}) & echo $! >{pid}; wait"], timeout_s=timeout_s
            )

    assert processes.ends_within_a_minute(processes.recorded_pid(pid, attempt))
    assert not end.exists()


@pytest.mark.parametrize(
    ("script", "code"), [("exit 7", 7), ("kill -KILL $$", 128 + signal.SIGKILL)]
)
def test_under_subreaper_returns_the_exit_code(script: str, code: int) -> None:
    assert subprocess.run(under_subreaper(["sh", "-c", script]), check=False).returncode == code


def test_under_subreaper_passes_arguments_and_signal_masks() -> None:
    """Also in the background of a script and under nohup, where SIGINT is ignored by default."""
    # Not a shell, because a shell clears its signal mask at its start.
    program = "import sys; print(sys.argv[1:]); print(open('/proc/self/status').read())"
    argv = [
        "env",
        "--ignore-signal=INT,QUIT,HUP",
        *under_subreaper([sys.executable, "-c", program, "a b", "", "-x"]),
    ]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    words, *lines = done.stdout.splitlines()
    assert words == str(["a b", "", "-x"])
    ours = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGCHLD)
    status = dict(line.split(":", 1) for line in lines if line)
    for masked in ("SigBlk", "SigIgn"):
        assert not int(status[masked], 16) & sum(1 << number - 1 for number in ours)


# A program that prints its pid, and exits a moment after SIGINT.
GRACEFUL = 'trap "sleep $1; echo whole > $0; exit 3" INT; echo $$; while :; do sleep 0.05; done'
STARTS_WITH_GRACE = f"""
import subprocess, sys
from clusterctl.util.process import under_subreaper
argv = ["sh", "-c", {GRACEFUL!r}, *sys.argv[1:3]]
sys.exit(subprocess.call(under_subreaper(argv, grace_s=int(sys.argv[3])), start_new_session=True))
"""


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGTERM])
def test_run_with_grace_interrupts_and_waits_for_the_end(
    sign: signal.Signals, tmp_path: Path
) -> None:
    with running(STARTS_WITH_GRACE, tmp_path / "file", 0.3, 30) as (process, pid):
        process.send_signal(sign)
        process.wait()
        eventually(lambda: is_gone(pid))
    assert (tmp_path / "file").read_text() == "whole\n"


def test_run_with_grace_kills_a_program_that_ignores_sigint(tmp_path: Path) -> None:
    with running(STARTS_WITH_GRACE, tmp_path / "file", 60, 1) as (process, pid):
        process.kill()
        process.wait()
        eventually(lambda: is_gone(pid))
    assert not (tmp_path / "file").exists()


def test_under_subreaper_with_grace_ends_at_once_on_sighup_only(tmp_path: Path) -> None:
    argv = under_subreaper(["sh", "-c", GRACEFUL, str(tmp_path / "file"), "60"], grace_s=60)
    with subprocess.Popen(
        argv, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        assert process.stdout is not None
        pid = process.stdout.readline().strip()
        for _ in range(2):  # the second time it is the kernel's word that we have ended
            process.terminate()
            time.sleep(0.5)
            assert process.poll() is None
        process.send_signal(signal.SIGHUP)
        assert process.wait(30) == 128 + signal.SIGHUP
        assert is_gone(pid)


def test_under_subreaper_holds_passed_descriptors(tmp_path: Path) -> None:
    """So a lock is held as long as the subreaper runs, even if its program leaves children
    behind.
    """
    with (tmp_path / "lock").open("w") as lock:
        argv = under_subreaper(["sh", "-c", "ls -l /proc/self/fd; exec sleep 60"])
        fcntl.flock(lock, fcntl.LOCK_EX)
        descriptor = lock.fileno()
        process = subprocess.Popen(argv, stdout=subprocess.PIPE, text=True, pass_fds=(descriptor,))
    with process, (tmp_path / "lock").open("w") as other:
        assert process.stdout is not None
        # A total, three, and that of the folder itself.
        shown = [next(process.stdout) for _ in range(5)]
        with pytest.raises(BlockingIOError):
            fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        process.kill()
        process.wait()
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
    assert str(tmp_path) not in "".join(shown)
