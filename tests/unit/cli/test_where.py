"""The cells of the table of `where`."""

from __future__ import annotations

import pytest

from clusterctl.cli.where import _off
from clusterctl.jobs.where import Accuracy


@pytest.mark.parametrize(
    ("accuracy", "cell"),
    [
        (Accuracy(5, 720.0), "12m late (5 jobs)"),
        (Accuracy(1, -720.0), "12m early (1 job)"),
        (None, "unknown"),
    ],
)
def test_start_after_slurms_estimate_is_late(accuracy: Accuracy | None, cell: str) -> None:
    assert _off(accuracy) == cell
