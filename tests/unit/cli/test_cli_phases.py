"""What `up` and `down` show while they are at work: a picture on a terminal, lines elsewhere."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console
from rich.progress import Progress, TaskID

from clusterctl.cli import pictures
from clusterctl.cli.output import Screen
from clusterctl.cli.phases import Phases
from clusterctl.util.progress import HostStep, LockMessage

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


def test_phase_line_counts_finished_hosts_and_names_the_others(phases: Phases) -> None:
    assert configure(phases, "munge: Run", range(1, 3), 3) == ["2/3", "", "munge: Run"]
    assert configure(phases, "munge: Run", range(3, 4), 3) == ["3", "", "munge: Run"]
    assert configure(phases, "slurmd: Run", range(1, 3), 3) == [
        "2/3",
        "demo-train-3",
        "slurmd: Run",
    ]


def test_phase_line_counts_the_hosts_of_each_task(phases: Phases) -> None:
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


def test_phase_line_of_many_hosts_counts_them(phases: Phases) -> None:
    assert configure(phases, "munge: Run", range(1, 65), 64) == ["64", "", "munge: Run"]
    assert configure(phases, LONG, range(1, 32), 64) == ["31/64", "", LONG]


def test_phase_waiting_for_a_process_names_it_without_a_terminal(
    phases: Phases, capsys: pytest.CaptureFixture[str]
) -> None:
    phases.step("provision")
    phases.progress("starting 3 machines")
    behind = LockMessage("`clusterctl up` of ada (pid 7) is at work")
    phases.progress(behind)
    stderr = capsys.readouterr().err
    assert "starting 3" not in stderr
    assert behind in stderr


def test_phases_of_many_threads_share_a_progress_bar(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_ctrl_d_at_the_password_prompt_is_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    def end_of_input(prompt: str) -> str:
        raise EOFError(prompt)

    monkeypatch.setattr("getpass.getpass", end_of_input)
    for stream in ("stdin", "stderr"):
        monkeypatch.setattr(f"sys.{stream}.isatty", lambda: True)
    assert Screen(json=False, color=False).sudo_password() is None
