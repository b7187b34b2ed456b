"""A Terraform working folder for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.providers.gcp.terraform_program import TerraformProgram
from tests.support.terraform import Work, program


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> TerraformProgram:
    """Terraform, with a cache and a home of the test's own."""
    found = program()  # before the cache is another
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return found


@pytest.fixture
def work(chosen: TerraformProgram, tmp_path: Path) -> Work:
    """A folder after `terraform init`."""
    made = Work(tmp_path / "terraform", chosen)
    made.hosts(one="small", two="small", three="small")
    made.terraform.init()
    return made
