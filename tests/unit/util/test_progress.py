"""The lines that report the progress of a command where the terminal can't be redrawn."""

from __future__ import annotations

import pytest

from clusterctl.util.progress import HostStep, PhaseLines


@pytest.mark.parametrize("verbose", [True, False])
def test_lines_name_a_host_when_it_fails(verbose: bool) -> None:
    lines: list[str] = []
    reporter = PhaseLines(lines.append, verbose=verbose)
    for step in (HostStep("n1", "Install"), *[HostStep("n2", "Install", failed=True)] * 2):
        reporter.progress(step)
    assert [line for line in lines if line.startswith("failed")] == ["failed on n2: Install"]
