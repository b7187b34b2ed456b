"""Doubles of Google's API and of an instance's metadata server, on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.providers.gcp.api import Api
from clusterctl.util.progress import Clock
from tests.support.google.api import PROJECT, Google
from tests.support.google.provider.store import Store


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    """The double of Google's API. Each request and answer is checked against Google's
    documentation.
    """
    with Google(Store(tmp_path / "world.json")) as double:
        for name, value in double.environment.items():
            monkeypatch.setenv(name, value)
        yield double
    assert not double.violations


@pytest.fixture
def naps() -> list[float]:
    """The pauses of ``api``, in seconds. No test waits for them."""
    return []


@pytest.fixture
def api(google: Google, naps: list[float]) -> Api:
    """A client of the double."""
    return Api(PROJECT, clock=Clock(now=lambda: sum(naps), sleep=naps.append))
