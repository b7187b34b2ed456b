"""A run that a signal stops saves, and leaves with the code that says so, whatever comes while it leaves."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

from payload.checkpoint.folder import Lock
from payload.saved_model.folder import read_record, read_weights

ROOT = Path(__file__).parents[3]


def start(out: Path, *flags: str) -> subprocess.Popen[str]:
    """A run that ends by a signal only."""
    given = ("--epochs", "100000", "--peak-tflops", "1", *(flags or ("--save-interval", "1000000")))
    return subprocess.Popen(
        [sys.executable, "-u", "-m", "payload", "train", *given, "--out", str(out)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_signal_before_the_first_iteration_stops_after_that(tmp_path: Path) -> None:
    held = Lock(tmp_path / "checkpoints", patience_s=0)
    with start(tmp_path) as process:
        try:
            assert process.stderr
            assert " used by process " in process.stderr.readline()
            process.send_signal(signal.SIGUSR1)
            time.sleep(0.1)  # while it waits
            held.close()
            output, errors = process.communicate(timeout=60)
        finally:
            process.kill()
    assert (process.returncode, errors) == (75, "")
    assert "saved after iteration 1:" in output


def test_signals_while_it_leaves_change_nothing(tmp_path: Path) -> None:
    process = start(tmp_path)
    assert process.stdout
    assert process.stderr
    try:
        for line in process.stdout:
            if line.startswith("epoch"):
                process.send_signal(signal.SIGUSR1)
                break
        said = next(line for line in process.stdout if not line.startswith("epoch"))
        while process.poll() is None:  # as srun does to the ranks that leave after the first
            process.send_signal(signal.SIGTERM)
        assert said.startswith("stopped by a signal; saved ")
        assert process.returncode == 75
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()
    there = (tmp_path / "checkpoints").iterdir()
    assert sorted(path.name.split("-")[0] for path in there) == [".lock", "iteration"]


def test_a_run_without_checkpoints_leaves_its_model(tmp_path: Path) -> None:
    """Within an epoch: the weights are as they are then, and the best as of the last evaluation."""
    with start(tmp_path, "--global-batch-size", "2", "--hidden", "8") as process:
        assert process.stdout
        try:
            next(line for line in process.stdout if line.startswith("epoch   1 "))
            process.send_signal(signal.SIGTERM)
            said = next(line for line in process.stdout if not line.startswith("epoch"))
            assert process.wait(timeout=60) == 143
        finally:
            process.kill()
    iteration = int(said.removeprefix("stopped by a signal; saved after iteration "))
    files = read_record(tmp_path / "model").files
    assert (files["final"].iteration, files["final"].metrics) == (iteration, None)
    assert files["best"].iteration in range(719, iteration, 719)  # the end of an epoch
    for which in files:
        read_weights(tmp_path / "model", which)
    names = sorted(path.name for path in (tmp_path / "model").iterdir())
    assert names == ["best.safetensors", "final.safetensors", "model.json"]
    assert not (tmp_path / "checkpoints").exists()
