"""`bundle`: what it refuses before it downloads anything."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.messages import codes
from tests.support.verbs import Clusterctl

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
    return Clusterctl(tmp_path / "home", cwd=tmp_path / "cwd")


@pytest.mark.parametrize(
    ("code", "argv"),
    [
        ("not-found/distribution", ("--os", "suse-15")),
        ("option-invalid/value", ("--os", "debian-12", "--from", "debian-12")),
        ("not-found/distribution", ("--os", "debian-12", "--from", "rocky-9=x")),
        ("option-invalid/repository-list", ("--os", "debian-12", "--from", "debian-12=none")),
        ("option-invalid/repository-list", ("--os", "rocky-9", "--from", "rocky-9=none")),
        ("option-invalid/repositories", ("--os", "rocky-9", "--os", "rhel-9.6")),
        ("file-unreadable", ("--os", "debian-12", "-f", "asking.yaml")),
        ("option-invalid/slurm-source", ("--os", "debian-12", "-f", "mirror.yaml")),
        ("option-invalid/cuda-toolkit", ("--os", "rocky-10", "-f", "toolkit.yaml")),
        ("option-invalid/argument-missing", ()),
    ],
)
def test_bundle_refuses_invalid_options(cli: Clusterctl, code: str, argv: tuple[str, ...]) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    (cli.cwd / "asking.yaml").write_text(SPEC + ASKING)
    mirror = (
        'software: {slurm: {from: "http://m.example.org/slurm", key: "http://m.example.org/key"}}\n'
    )
    (cli.cwd / "mirror.yaml").write_text(SPEC + mirror)
    (cli.cwd / "toolkit.yaml").write_text(SPEC + 'software: {nvidia: {toolkit: "12.9"}}\n')
    ran = cli("-o", "json", "bundle", *argv, rc=2)
    assert codes(ran) == [code]
    assert "reading" not in ran.stderr
    assert not list(cli.cwd.glob("*.bundle"))


def test_validate_names_a_missing_requirements_file(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC + ASKING)
    assert "asked.txt can't be read: No such file" in cli("validate").stderr
    (cli.cwd / "asked.txt").touch()
    assert cli("validate").stderr == ""


def test_bundle_names_a_folder_that_can_not_be_written(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(SPEC)
    ran = cli("-o", "json", "bundle", "--os", "debian-12", "--out", "cluster.yaml", rc=1)
    assert codes(ran) == ["file-unwritable"]


def test_up_that_is_refused_at_its_plan_leaves_no_cluster(cli: Clusterctl) -> None:
    (cli.cwd / "cluster.yaml").write_text(
        SPEC.replace("10.0.0.1", "{address: 10.0.0.1, key: ./none}")
    )
    assert "/none does not" in cli("up", "--yes", rc=2).stderr
    assert not (cli.home / "demo").exists()
