"""A cloud double for Terraform, and for its recorded plan."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.integration.gcp.terraformed import Terraformed
from tests.support.google.cloud import GoogleCloud
from tests.unit.gcp import recorded
from tests.unit.gcp.conftest import api, google, naps  # noqa: F401


@pytest.fixture
def planned_cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleCloud]:
    """A cloud for the recorded plan."""
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=False) as (made, _):
        yield made


@pytest.fixture
def cloud(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[GoogleCloud]:
    """The cloud, with the API and the provider that show it."""
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=True) as (made, _):
        yield made


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Terraformed]:
    """A cluster without any resource yet."""
    with recorded.cloud_in(tmp_path, monkeypatch, is_real=True) as (made, double):
        yield Terraformed(tmp_path, made, double)
