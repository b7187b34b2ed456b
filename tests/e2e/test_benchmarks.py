"""The benchmarks run: both sides do the same work, which they check themselves."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.sweep
BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "orchestration.py"


def test_the_quick_ones_print_medians_and_ratios() -> None:
    argv = [sys.executable, BENCHMARK, "--rounds", "1", "start", "again", "submit", "collect"]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("clusterctl --help", "up again", "submit / by hand = ", "rsync / collect = "):
        assert words in done.stdout
