"""What `up` and `down` show while they are at work: a picture on a terminal, lines elsewhere."""

from __future__ import annotations

import os
import re
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pyte
import pytest
from rich.console import Console
from rich.progress import Progress, TaskID

from clusterctl.cli import pictures
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import Phases
from clusterctl.util.progress import HostStep, Waiting
from tests.support.terminal import on_terminal

LONG = "slurmd: Do what has a name that goes far beyond what a terminal of eighty columns can show"


@pytest.fixture
def phases() -> Phases:
    return Phases(Screen(json=False, color=False))


def configure(phases: Phases, task: str, hosts: range, of: int) -> list[str]:
    """Return what is said after these hosts are through with a task: how many, who is not, and the
    task.
    """
    for i in hosts:
        phases.progress(HostStep(f"demo-train-{i}", task, of))
    count, _, rest = phases.now.partition(" hosts")
    waiting, now = rest.split("  ")
    return [count, waiting.removeprefix(", waiting for "), now]


def test_a_phase_says_how_many_hosts_are_through_and_who_is_not(phases: Phases) -> None:
    assert configure(phases, "munge: Run", range(1, 3), 3) == ["2/3", "", "munge: Run"]
    assert configure(phases, "munge: Run", range(3, 4), 3) == ["3", "", "munge: Run"]
    assert configure(phases, "slurmd: Run", range(1, 3), 3) == [
        "2/3",
        "demo-train-3",
        "slurmd: Run",
    ]


def test_hosts_that_are_at_different_tasks_are_counted_for_each(phases: Phases) -> None:
    configure(phases, "munge: Run", range(1, 3), 3)
    assert configure(phases, "slurmd: Run", range(1, 2), 3)[0] == "1/3"
    assert configure(phases, "munge: Run", range(3, 4), 3) == ["3", "", "munge: Run"]
    assert configure(phases, "slurmd: Run", range(2, 3), 3) == [
        "2/3",
        "demo-train-3",
        "slurmd: Run",
    ]
    # A task of the same name comes later.
    again = configure(phases, "slurmd: Run", range(1, 2), 3)
    assert again == ["1/3", "demo-train-2, demo-train-3", "slurmd: Run"]


def test_many_hosts_are_counted(phases: Phases) -> None:
    assert configure(phases, "munge: Run", range(1, 65), 64) == ["64", "", "munge: Run"]
    assert configure(phases, LONG, range(1, 32), 64) == ["31/64", "", LONG]


def test_whose_end_is_waited_for_is_told_without_a_terminal_too(
    phases: Phases, capsys: pytest.CaptureFixture[str]
) -> None:
    phases.step("provision")
    phases.progress("starting 3 machines")
    behind = Waiting("`clusterctl up` of ada (pid 7) is at work")
    phases.progress(behind)
    said = capsys.readouterr().err
    assert "starting 3" not in said
    assert behind in said


PROGRAM = f"""
import time
from pathlib import Path
from clusterctl.cli.phases import Phases
from clusterctl.cli.output import Screen
from clusterctl.util.progress import HostStep, Waiting

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


def test_a_terminal_that_can_not_move_gets_lines(tmp_path: Path) -> None:
    shown, lines = run(tmp_path, "dumb")
    assert "\x1b" not in shown
    assert [line.split("] ")[1] for line in lines if line.startswith("[")] == ["image", "configure"]
    assert any(line.startswith("failed on demo-train-64") for line in lines)


def test_many_threads_share_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    added: list[str] = []

    def slowly(self: Progress, description: str, **more: object) -> TaskID:
        added.append(description)
        time.sleep(0.1)
        return add_task(self, description, **more)  # type: ignore[arg-type]

    add_task = Progress.add_task
    monkeypatch.setattr(Progress, "add_task", slowly)
    bar = pictures.TransferBar(Console(), silent_s=0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bar("hashing", n, 8), range(8)))
    bar.stop()
    assert added == ["hashing"]
