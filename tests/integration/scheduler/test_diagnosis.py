"""The diagnosis of error messages that the Python of this environment prints."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.unit.scheduler.test_diagnosis import diagnosis_of, names


@pytest.mark.parametrize(
    ("program", "code"),
    [
        ("import nosuch", "missing-module"),
        ("bytearray(10**15)", "host-memory"),
        ("open('nosuch')", "missing-file"),
        ("import ctypes; ctypes.CDLL('libnosuch.so.3')", "missing-library"),
        ("import ctypes; ctypes.string_at(0)", "segmentation-fault"),
        ("import os; os.abort()", "abort"),
        ("assert 1 == 2", "python-exception"),
        ("import socket; socket.create_connection(('127.0.0.1', 1))", "connection-refused"),
        ("f = (", "python-exception"),
        (
            "import signal, concurrent.futures as f\n"
            "with f.ProcessPoolExecutor(1) as pool:\n"
            "  pool.submit(signal.raise_signal, 9).result()",
            "worker-killed",
        ),
        ("import subprocess as s\ns.run(['sh', '-c', 'kill -9 $$'], check=True)", "worker-killed"),
        ("import sys; sys.exit('the disk is on fire')", "exit-code"),
        (
            (
                "try:\n"
                "  {}['a']\n"
                "except KeyError as e:\n"
                "  raise OSError(28, 'No space left on device') from e"
            ),
            "disk-full",
        ),
    ],
)
def test_diagnosis_of_real_python_errors(program: str, code: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False
    )
    exit_code = max(done.returncode, 0)
    ended_by = max(-done.returncode, 0)
    assert code in names(diagnosis_of(done.stderr, exit_code=exit_code, signal=ended_by))
