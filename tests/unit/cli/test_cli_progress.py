"""The bar of a transfer: one, whoever tells of it."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from rich.console import Console
from rich.progress import Progress

from clusterctl.cli import pictures, progress
from clusterctl.cli.output import Screen
from clusterctl.cli.progress import _Lines


def test_many_threads_share_one_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[Progress] = []

    def made_slowly(console: Console) -> Progress:
        bars.append(Progress(console=console))
        time.sleep(0.1)
        return bars[-1]

    monkeypatch.setattr(pictures, "_bytes_bar", made_slowly)
    bar = pictures.TransferBar(Console(), silent_s=0)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: bar("hashing", n, 8), range(8)))
    bar.stop()
    (only,) = bars
    assert [task.description for task in only.tasks] == ["hashing"]


def test_what_takes_less_than_a_second_gets_no_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress.time, "monotonic", lambda: now)
    lines = _Lines(Screen(json=False, color=False))
    lines("sending", 0, 2 << 20)
    now = 9.0
    lines("hashing", 2500, 3300)
    now = 9.5
    lines("hashing", 3300, 3300)
    now = 10.0
    lines("sending", 1 << 20, 2 << 20)
    assert capsys.readouterr().err == "sending: 1.0 MiB of 2.0 MiB, 102.4 KiB/s, 10 s left\n"
    now = 20.0
    lines("hashing", 88, 1600)  # once more, of other files
    assert capsys.readouterr().err == ""
