"""`bundle verify`, `show` and `create`: their answers and exit codes."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.messages import codes, shows
from tests.support.verbs import Clusterctl
from tests.unit.packages.bundles import RELEASE, SPEC, a_bundle, damage

ASKING = "software: {python: {requirements: asked.txt}}\n"


@pytest.fixture
def cli(tmp_path: Path) -> Clusterctl:
    (tmp_path / "cwd").mkdir()
    return Clusterctl(tmp_path / "home", cwd=tmp_path / "cwd")


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return a_bundle(tmp_path / "one.tar")


@pytest.mark.parametrize("verb", ["verify", "show"])
def test_bundle_show_describes_a_bundle(cli: Clusterctl, path: Path, verb: str) -> None:
    said = cli("-o", "json", "bundle", verb, path).json
    assert said["ok"]
    assert set(said) == {
        *("ok", "failures", "file", "digest", "format", "clusterctl", "cluster", "architecture"),
        *("bytes", "systems"),
    }
    assert said["systems"] == {RELEASE: {"packages": 2, "python": "3.11", "wheels": 1}}
    assert said["bytes"] == path.stat().st_size


def test_bundle_verify_has_a_failure_for_each_fault(cli: Clusterctl, path: Path) -> None:
    damage(path, b"munge", b"wheel")
    said = cli("-o", "json", "bundle", "verify", path, rc=2).json
    assert [failure["code"] for failure in said["failures"]] == [
        "bundle-corrupted",
        "bundle-corrupted",
    ]
    assert ["munge" in f["cause"] or "numpy" in f["cause"] for f in said["failures"]] == [
        True,
        True,
    ]


def test_bundle_verify_compares_the_spec_and_the_distribution(cli: Clusterctl, path: Path) -> None:
    cli("bundle", "verify", path, "--os", RELEASE)
    other = cli("-o", "json", "bundle", "verify", path, "--os", "rocky-9.6", rc=2)
    assert codes(other) == ["bundle-mismatch"]
    (cli.cwd / "asked.txt").write_text("attrs\n")
    (cli.cwd / "cluster.yaml").write_text(SPEC + ASKING)
    (failure,) = cli("-o", "json", "bundle", "verify", path, rc=2).json["failures"]
    assert "asked.txt" in failure["cause"]


@pytest.mark.parametrize(
    ("code", "argv"),
    [
        ("unknown-distribution", ("--os", "suse-15")),
        ("bad-value", ("--os", "debian-12", "--from", "debian-12")),
        ("unknown-distribution", ("--os", "debian-12", "--from", "rocky-9=x")),
        ("bad-repositories", ("--os", "debian-12", "--from", "debian-12=none")),
        ("bad-repositories", ("--os", "rocky-9", "--from", "rocky-9=none")),
        ("bad-repositories", ("--os", "debian-12", "--from", "debian-12=cluster.yaml")),
        ("bad-repositories", ("--os", "debian-12", "--from", "debian-12=one.sources")),
        ("bad-repositories", ("--os", "debian-12", "--from", "debian-12=empty.list")),
        ("rhel-without-repositories", ("--os", "rocky-9", "--os", "rhel-9.6")),
        ("bundle-unwritable", ("--os", "debian-12", "--out", "none/b.tar")),
        ("bundle-unwritable", ("--os", "debian-12", "--out", ".")),
        ("bundle-needs-own-machines", ("--os", "debian-12", "-f", "local.yaml")),
        ("file-unreadable", ("--os", "debian-12", "-f", "asking.yaml")),
        ("slurm-source", ("--os", "debian-12", "-f", "mirror.yaml")),
        ("cuda-toolkit", ("--os", "rocky-10", "-f", "toolkit.yaml")),
        ("missing-argument", ()),
    ],
)
def test_bundle_create_refuses_invalid_options(
    cli: Clusterctl, code: str, argv: tuple[str, ...]
) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    (cli.cwd / "local.yaml").write_text(
        "version: 1\nname: demo\npartitions: [{name: train, nodes: 2}]\n"
    )
    (cli.cwd / "asking.yaml").write_text(SPEC + ASKING)
    mirror = (
        'software: {slurm: {from: "http://m.example.org/slurm", key: "http://m.example.org/key"}}\n'
    )
    (cli.cwd / "mirror.yaml").write_text(SPEC + mirror)
    (cli.cwd / "toolkit.yaml").write_text(SPEC + 'software: {nvidia: {toolkit: "12.9"}}\n')
    (cli.cwd / "one.sources").write_text("Types: deb\n")
    (cli.cwd / "empty.list").write_text("# nothing\n")
    ran = cli("-o", "json", "bundle", "create", *argv, rc=2)
    assert codes(ran) == [code]
    assert "reading" not in ran.stderr
    assert not list(cli.cwd.glob("*.tar"))


def test_validate_names_a_missing_requirements_file(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC + ASKING)
    assert "asked.txt can't be read: No such file" in cli("validate").stderr
    (cli.cwd / "asked.txt").touch()
    assert cli("validate").stderr == ""


def test_bundle_create_names_an_unwritable_cache(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    homeless = replace(cli, environ={"XDG_CACHE_HOME": "/proc/nope"})
    said = homeless("bundle", "create", "--os", "debian-12", rc=1).stderr
    assert shows(said, "cache-unwritable")
    assert "/proc/nope/clusterctl/bundle" in said
    assert "XDG_CACHE_HOME" in said


def test_up_that_is_refused_at_its_plan_leaves_no_cluster(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(
        SPEC.replace("10.0.0.1", "{address: 10.0.0.1, key: ./none}")
    )
    assert "/none does not" in cli("up", "--yes", rc=2).stderr
    assert not (cli.home / "demo").exists()


def test_refused_bundle_leaves_no_cluster(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC.replace("demo", "refused"))
    assert codes(cli("-o", "json", "up", "--bundle", "none.tar", "--yes", rc=2)) == [
        "bundle-unreadable"
    ]
    assert not (cli.home / "refused").exists()
    assert codes(cli("-o", "json", "down", "--yes", rc=2)) == ["unknown-cluster"]
