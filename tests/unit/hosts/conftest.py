"""Fixtures of the tests of probes."""

from __future__ import annotations

import pytest

from clusterctl.hosts import probe


@pytest.fixture
def no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repeat a refused connection at once."""
    monkeypatch.setattr(probe, "_REFUSED_PAUSE_S", 0.0)
