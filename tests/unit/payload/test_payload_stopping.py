"""A run that a signal stops saves, and leaves with the code that says so, whatever comes while it leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]


def test_signals_while_it_leaves_change_nothing(tmp_path: Path) -> None:
    flags = ("--epochs", "100000", "--save-interval", "1000000", "--out", str(tmp_path))
    process = subprocess.Popen(
        [sys.executable, "-u", "-m", "payload", "train", *flags],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout
    try:
        for line in process.stdout:
            if line.startswith("epoch"):
                process.send_signal(signal.SIGUSR1)
                break
        said = next(line for line in process.stdout if not line.startswith("epoch"))
        while process.poll() is None:  # as srun does to the ranks that leave after the first
            process.send_signal(signal.SIGTERM)
        assert said.startswith("stopped by a signal; saved after iteration ")
        assert process.returncode == 75
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    there = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name.split("-")[0] for path in there) == [".lock", "data.json", "iteration"]
