"""The phases of `up` and `down` on a terminal."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pyte

from tests.support.terminal import on_terminal
from tests.unit.cli.test_cli_phases import LONG

PROGRAM = f"""
import time
from pathlib import Path
from clusterctl.cli.phases import Phases
from clusterctl.cli.output import Screen
from clusterctl.util.progress import HostStep

phases = Phases(Screen(json=False, color=True))
with phases.shown():
    phases.step("image")
    phases.step("configure")
    for i in range(1, 64):
        phases.progress(HostStep(f"demo-train-{{i}}", {LONG!r}, 64))
    while not Path("go-on").exists():
        time.sleep(0.05)
    phases.progress(HostStep("demo-train-64", {LONG!r}, 64, "failed", True))
print("the end")
"""


def run(tmp_path: Path, term: str) -> tuple[str, list[str]]:
    """All that the program wrote, and what stands on the screen at last."""
    env = {**os.environ, "TERM": term, "PYTHONPATH": os.pathsep.join(sys.path)}
    with on_terminal([sys.executable, "-c", PROGRAM], env, tmp_path) as window:
        window.read_until("63/64" if term != "dumb" else "configure")
        (tmp_path / "go-on").touch()
        assert window.end() == 0
    screen = pyte.Screen(80, 24)
    pyte.Stream(screen).feed(window.shown)
    return window.shown, [line.rstrip() for line in screen.display if line.strip()]


def test_phases_on_terminal_cut_lines_and_name_failed_host(
    tmp_path: Path,
) -> None:
    shown, lines = run(tmp_path, "xterm")
    drawn = [line for line in re.split(r"\s*[\r\n]+", shown) if "63/64 hosts" in line]
    assert drawn
    assert all(len(re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", line)) == 80 for line in drawn)
    assert all(line.endswith("…") for line in drawn)
    assert lines[-1] == "the end"
    assert any(line.startswith("failed on demo-train-64: ") and LONG[:16] in line for line in lines)
    # A phase that is over keeps its seconds.
    assert re.search(r" image  +[0-9.]+ s\s*[\r\n]", shown)
    assert not any("63/64" in line or line.split()[0] == "image" for line in lines)


def test_terminal_that_can_not_move_gets_lines(tmp_path: Path) -> None:
    shown, lines = run(tmp_path, "dumb")
    assert "\x1b" not in shown
    assert [line.split("] ")[1] for line in lines if line.startswith("[")] == ["image", "configure"]
    assert any(line.startswith("failed on demo-train-64") for line in lines)
