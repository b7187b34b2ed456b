"""A benchmark's rank that fails."""

from __future__ import annotations

import pytest

from benchmarks.support import ranks


def test_failed_rank_shows_its_exception(capfd: pytest.CaptureFixture[str]) -> None:
    """Also after PyTorch has replaced the hook by which an exception is shown."""
    with pytest.raises(SystemExit):
        ranks.run("benchmarks.support.steps", "no-such-model", 1, ranks=1)
    assert "KeyError: 'no-such-model'" in capfd.readouterr().err
