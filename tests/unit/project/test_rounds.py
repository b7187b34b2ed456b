"""The ratio that a benchmark prints has the direction of its aim."""

from __future__ import annotations

import pytest

from benchmarks.support.rounds import Measured


@pytest.mark.parametrize(
    ("ours", "words"),
    [(1.2, "clusterctl / ssh = 1.20, aim met"), (3.7, "clusterctl / ssh = 3.70, aim missed")],
)
def test_ratio_of_times_has_the_direction_of_the_aim(
    ours: float, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Measured("status", {"clusterctl": [ours], "ssh": [1.0]}, times=1.3).show()
    assert words in capsys.readouterr().out
