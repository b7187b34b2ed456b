"""bundle verify and show: their answers, and exit code 2 for whatever is wrong."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.verbs import Clusterctl
from tests.unit.packages.bundles import RELEASE, a_bundle

SPEC = """\
version: 1
name: demo
provider: {type: onprem, controller: a, hosts: {a: 10.0.0.1}}
partitions: [{name: train, hosts: a}]
"""
ASKING = "software: {python: {requirements: asked.txt}}\n"


@pytest.fixture
def cli(tmp_path: Path) -> Clusterctl:
    (tmp_path / "cwd").mkdir()
    return Clusterctl(tmp_path / "home", cwd=tmp_path / "cwd", forked=True)


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
    assert [failure["code"] for failure in said["failures"]] == ["bundle-corrupted", "bundle-corrupted"]
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
        (("--os", "rocky-9", "--from", "rocky-9=none"), "can't be read"),
        (("--os", "debian-12", "--from", "debian-12=cluster.yaml"), "apt reads no line like 'version: 1'"),
        (("--os", "debian-12", "--from", "debian-12=one.sources"), "it has no URIs:"),
        (("--os", "rocky-9", "--os", "rhel-9.6"), "say --from rhel-9.6=FILE"),
        (("--os", "debian-12", "--out", "none/b.tar"), "the bundle can't be written"),
        (("--os", "debian-12", "--out", "."), "the bundle can't be written"),
        (("--os", "debian-12", "-f", "local.yaml"), "the provider is local"),
        (("--os", "debian-12", "-f", "asking.yaml"), "asked.txt can't be read"),
    ],
)
def test_create_refuses_what_makes_no_sense(cli: Clusterctl, argv: tuple[str, ...], said: str) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    (cli.cwd / "local.yaml").write_text("version: 1\nname: demo\npartitions: [{name: train, nodes: 2}]\n")
    (cli.cwd / "asking.yaml").write_text(SPEC + ASKING)
    (cli.cwd / "one.sources").write_text("Types: deb\n")
    ran = cli("bundle", "create", *argv, rc=2)
    assert said in ran.stderr
    assert "reading" not in ran.stderr
    assert not list(cli.cwd.glob("*.tar"))


def test_validate_tells_of_requirements_that_are_missing(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC + ASKING)
    assert "asked.txt can't be read: No such file" in cli("validate").stderr
    (cli.cwd / "asked.txt").touch()
    assert cli("validate").stderr == ""


def test_a_cache_that_cant_be_written_is_said(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    homeless = replace(cli, environ={"XDG_CACHE_HOME": "/proc/nope"})
    said = homeless("bundle", "create", "--os", "debian-12", rc=1).stderr
    assert "the cache of downloads can't be written" in said
    assert "/proc/nope/clusterctl/bundle" in said


def test_an_up_that_is_refused_at_its_plan_leaves_no_cluster(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC.replace("10.0.0.1", "{address: 10.0.0.1, key: ./none}"))
    assert "none is not here" in cli("up", "--yes", rc=2).stderr
    assert not (cli.home / "demo").exists()


def test_a_refused_bundle_leaves_no_cluster(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC.replace("demo", "refused"))
    assert "can't be read" in cli("up", "--bundle", "none.tar", "--yes", rc=2).stderr
    assert not (cli.home / "refused").exists()
    assert "on machines of your own" in cli("down", "--yes", rc=2).stderr
