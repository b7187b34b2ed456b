"""bundle verify and show: their answers, and exit code 2 for whatever is wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.bundles import RELEASE, a_bundle
from tests.support.verbs import Clusterctl

SPEC = """\
version: 1
name: demo
provider: {type: onprem, controller: a, hosts: {a: 10.0.0.1}}
partitions: [{name: train, hosts: a}]
"""


@pytest.fixture
def cli(tmp_path: Path) -> Clusterctl:
    (tmp_path / "cwd").mkdir()
    return Clusterctl(tmp_path / "home", cwd=tmp_path / "cwd")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return a_bundle(tmp_path / "one.tar")


@pytest.mark.parametrize("verb", ["verify", "show"])
def test_a_whole_bundle_is_described(cli: Clusterctl, path: Path, verb: str) -> None:
    said = cli("-o", "json", "bundle", verb, path).json
    assert said["ok"]
    assert set(said) == {
        *("ok", "failures", "file", "digest", "format", "clusterctl", "cluster", "architecture"),
        *("bytes", "systems"),
    }
    assert said["systems"] == {RELEASE: {"packages": 2, "python": "3.11", "wheels": 1}}
    assert said["bytes"] == path.stat().st_size


def test_each_fault_is_a_failure(cli: Clusterctl, path: Path) -> None:
    raw = bytearray(path.read_bytes())
    for content in (b"munge", b"wheel"):
        raw[raw.rindex(content)] ^= 1
    path.write_bytes(raw)
    said = cli("-o", "json", "bundle", "verify", path, rc=2).json
    assert [failure["code"] for failure in said["failures"]] == ["bundle", "bundle"]
    assert ["munge" in f["cause"] or "numpy" in f["cause"] for f in said["failures"]] == [True, True]


def test_a_spec_here_is_what_it_must_fit(cli: Clusterctl, path: Path) -> None:
    (cli.cwd / "requirements.txt").write_text("attrs\n")
    (cli.cwd / "cluster.yaml").write_text(SPEC + "software: {python: {requirements: requirements.txt}}\n")
    ran = cli("bundle", "verify", path, rc=2)
    assert "requirements.txt asks for Python packages" in ran.stderr


def test_the_hosts_distribution_is_what_it_must_have(cli: Clusterctl, path: Path) -> None:
    assert "rocky-9" in cli("bundle", "verify", path, "--os", "rocky-9.6", rc=2).stderr
    cli("bundle", "verify", path, "--os", RELEASE)


def test_create_wants_to_know_for_which_distributions(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    ran = cli("bundle", "create", rc=2)
    assert "--os debian-12" in ran.stderr


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (("--os", "suse-15"), "can't configure suse-15"),
        (("--os", "debian-12", "--from", "debian-12"), "NAME=FILE"),
        (("--os", "debian-12", "--from", "rocky-9=x"), "no host has"),
        (("--os", "debian-12", "--from", "debian-12=none"), "can't be read"),
    ],
)
def test_create_refuses_what_makes_no_sense(cli: Clusterctl, argv: tuple[str, ...], said: str) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    assert said in cli("bundle", "create", *argv, rc=2).stderr
    assert not list(cli.cwd.glob("*.tar"))
