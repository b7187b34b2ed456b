"""What tests of Google Cloud share: Google's API and an instance's metadata, played on loopback."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from clusterctl.providers.gcp.api import Api
from clusterctl.util.progress import Clock
from tests.support.google.api import PROJECT, Google
from tests.support.google.cloud import GoogleCloud
from tests.support.google.provider.store import Store
from tests.support.sweeps import in_sweep
from tests.unit.gcp import recorded


@pytest.fixture
def google(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Google]:
    """The double, as what clusterctl talks to; every request and answer was as Google documents
    it.
    """
    with Google(Store(tmp_path / "world.json")) as double:
        for name, value in double.environment.items():
            monkeypatch.setenv(name, value)
        yield double
    assert not double.violations


@pytest.fixture
def naps() -> list[float]:
    """How long ``api`` slept, in seconds; nobody waits."""
    return []


@pytest.fixture
def api(google: Google, naps: list[float]) -> Api:
    """The client of the double."""
    return Api(PROJECT, clock=Clock(now=lambda: sum(naps), sleep=naps.append))


@pytest.fixture(params=[False, *in_sweep(True)], ids=["recorded", "real"])
def is_real(request: pytest.FixtureRequest) -> bool:
    """Whether plans are Terraform's own, as in the sweep, or the recorded one's."""
    return bool(request.param)


@pytest.fixture
def planned_cloud(
    is_real: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[GoogleCloud]:
    """The cloud, for the recorded plan; in the sweep it is Terraform's, too."""
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=is_real) as (made, _):
        yield made


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleCloud]:
    """The cloud, with the API and the provider that show it."""
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=True) as (made, _):
        yield made
