"""A Terraform working folder for each test, for each program that there is."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.providers.gcp.terraform_program import Program
from tests.support.terraform import Work, program

BOTH = ["found", pytest.param("library", marks=pytest.mark.sweep)]


@pytest.fixture(params=BOTH)
def chosen(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Program:
    """Terraform, with a cache and a home of the test's own."""
    found = program(request.param)  # before the cache is another
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return found


@pytest.fixture
def work(chosen: Program, tmp_path: Path) -> Work:
    """A folder that is set up."""
    made = Work(tmp_path / "terraform", chosen)
    made.hosts(one="small", two="small", three="small")
    made.terraform.init()
    return made
