"""Terraform providers are downloaded once, unless the user has a Terraform configuration."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.terraform import terraform_in


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an empty home."""
    for name in ("TF_CLI_CONFIG_FILE", "TERRAFORM_CONFIG", "TF_PLUGIN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_shared_providers_have_one_cache_for_all_clusters(home: Path) -> None:
    for cluster in ("a", "b"):
        with terraform_in(home / cluster).shared_providers() as env:
            assert env["TF_PLUGIN_CACHE_DIR"] == str(home / "cache/clusterctl/terraform/providers")


@pytest.mark.parametrize("how", ["named", "in the home", "a cache of their own"])
def test_shared_providers_respects_the_users_terraform_configuration(
    home: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (home / ("terraform.rc" if how == "named" else ".terraformrc")).touch()
    if how == "named":
        monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(home / "terraform.rc"))
    elif how == "a cache of their own":
        monkeypatch.setenv("TF_PLUGIN_CACHE_DIR", str(home))
    with terraform_in(home).shared_providers() as env:
        assert env == {}
