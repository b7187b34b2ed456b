"""When the output of commands is written."""

from __future__ import annotations

import io
import sys

import pytest

from clusterctl.cli.output import Screen
from clusterctl.jobs.watch import LogChunk


def test_lines_and_logs_reach_a_pipe_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else `logs -f` would seem to hang in front of another program."""
    raw = io.BytesIO()
    pipe = io.TextIOWrapper(io.BufferedWriter(raw))  # type: ignore[type-var]
    monkeypatch.setattr(sys, "stdout", pipe)
    screen = Screen(json=False, color=False)
    screen.result({}, "job 7 RUNNING")
    assert raw.getvalue() == b"job 7 RUNNING\n"
    with screen.logs() as show:
        show(LogChunk("stdout", None, b"step 1\n"))
        assert raw.getvalue() == b"job 7 RUNNING\nstep 1\n"
