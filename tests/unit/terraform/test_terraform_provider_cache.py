"""Providers are downloaded once, and whoever has a Terraform configuration is left alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from clusterctl.providers.gcp.terraform import LOCK_FILE
from tests.support.terraform import terraform_in


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home without anything."""
    for name in ("TF_CLI_CONFIG_FILE", "TERRAFORM_CONFIG", "TF_PLUGIN_CACHE_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def module(path: Path, version: str = "8.7.0") -> Path:
    path.mkdir()
    (path / "versions.tf").write_text(version)
    return path


def test_the_second_cluster_gets_the_lock_file_of_the_first(home: Path) -> None:
    first, second, other = module(home / "1"), module(home / "2"), module(home / "3", "9.0.0")
    with terraform_in(first).shared_providers() as env:
        assert env == {"TF_PLUGIN_CACHE_DIR": str(home / "cache/clusterctl/terraform/providers")}
        (first / LOCK_FILE).write_text("checksums")
    with terraform_in(second).shared_providers():
        assert (second / LOCK_FILE).read_text() == "checksums"
    with terraform_in(other).shared_providers():
        assert not (other / LOCK_FILE).exists()


def test_a_lock_file_that_is_there_stays(home: Path) -> None:
    for name, text in (("1", "checksums"), ("2", "others")):
        (module(home / name) / LOCK_FILE).write_text(text)
        with terraform_in(home / name).shared_providers():
            assert (home / name / LOCK_FILE).read_text() == text


def test_a_failed_init_leaves_nothing_for_others(home: Path) -> None:
    (module(home / "1") / LOCK_FILE).write_text("half")
    with pytest.raises(ZeroDivisionError), terraform_in(home / "1").shared_providers():
        _ = 1 / 0
    with terraform_in(module(home / "2")).shared_providers():
        assert not (home / "2" / LOCK_FILE).exists()


@pytest.mark.parametrize("how", ["named", "in the home", "a cache of their own"])
def test_whoever_has_a_configuration_is_left_alone(
    home: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    (home / ("terraform.rc" if how == "named" else ".terraformrc")).touch()
    if how == "named":
        monkeypatch.setenv("TF_CLI_CONFIG_FILE", str(home / "terraform.rc"))
    elif how == "a cache of their own":
        monkeypatch.setenv("TF_PLUGIN_CACHE_DIR", str(home))
    with terraform_in(module(home / "1")).shared_providers() as env:
        assert env == {}
