"""A program's output reaches the job's log whole, also if the program opens /dev/stdout anew."""

from __future__ import annotations

import os
import subprocess
from contextlib import suppress
from pathlib import Path

import pytest

from payload.node.output import start_with_output

REOPENING = (
    "echo one; echo two >/dev/stdout; echo three | tee /dev/stderr; echo four >/dev/stderr; "
    "cp /etc/hostname /dev/stdout; echo five; exit 3"
)
HOSTNAME = Path("/etc/hostname").read_text()
OUT = f"one\ntwo\nthree\n{HOSTNAME}five\n"
ERR = "three\nfour\n"


def run(script: str, out: Path, err: Path, limit_s: float = 30.0) -> int:
    with out.open("ab") as first, err.open("ab") as second:
        process, copying = start_with_output(
            lambda out, err: subprocess.Popen(["sh", "-c", script], stdout=out, stderr=err),
            (first.fileno(), second.fileno()),
        )
        status = process.wait()
        copying.end(limit_s)
    return status


def test_program_that_opens_its_output_anew_empties_no_log(tmp_path: Path) -> None:
    opened = len(os.listdir("/proc/self/fd"))
    out, err = tmp_path / "out", tmp_path / "err"
    assert run(REOPENING, out, err) == 3
    assert (out.read_text(), err.read_text()) == (OUT, ERR)
    assert len(os.listdir("/proc/self/fd")) == opened


def test_output_of_both_kinds_in_one_file_keeps_its_order(tmp_path: Path) -> None:
    both = tmp_path / "both"
    run("for i in 1 2 3 4 5; do echo out $i; echo err $i >&2; done", both, both)
    assert both.read_text() == "".join(f"out {i}\nerr {i}\n" for i in range(1, 6))


@pytest.mark.parametrize("left", ["sleep 60 & echo $! >&2", "yes & echo $! >&2"])
def test_process_that_a_program_leaves_running_delays_no_end(tmp_path: Path, left: str) -> None:
    out, err = tmp_path / "out", tmp_path / "err"
    assert run(f"seq 9999; {left}", out, err, limit_s=0.1) == 0
    # Without a reader of its pipe, `yes` may have ended.
    with suppress(ProcessLookupError):
        os.kill(int(err.read_text()), 9)
    assert out.read_text().startswith("".join(f"{i}\n" for i in range(1, 10000)))
