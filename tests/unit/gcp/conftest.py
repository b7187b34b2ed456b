"""What tests of Google Cloud share: Google's API and an instance's metadata, played on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.google.api import Google
from tests.support.google.cloud import GoogleCloud
from tests.support.google.world import World


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    """The double, as what clusterctl talks to; every request and answer was as Google documents it."""
    with Google(World(tmp_path / "world.json")) as double:
        for name, value in double.environment.items():
            monkeypatch.setenv(name, value)
        yield double
    assert not double.violations


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleCloud]:
    """The cloud, with the API and the provider that show it."""
    made = GoogleCloud(tmp_path)
    with Google(World(made.store.path)) as double:
        for name, value in {**made.env, **double.environment}.items():
            if name != "HOME":
                monkeypatch.setenv(name, value)
        yield made
    assert not double.violations
