"""The role apptainer keeps an installed Apptainer, and verifies the upstream package."""

from __future__ import annotations

from pathlib import Path

from clusterctl.errors import SpecError
from clusterctl.spec.load import parse_spec
from tests.support.messages import refused
from tests.support.plays import role_data, run_tasks


def test_apptainer_role_keeps_an_installed_apptainer(tmp_path: Path) -> None:
    program = tmp_path / "apptainer"
    program.touch()
    done = run_tasks(tmp_path, "apptainer", "install", apptainer_program=str(program))
    assert done.returncode == 0, done.stdout
    assert "changed=0" in done.stdout
    assert "included:" not in done.stdout.partition("PLAY RECAP")[0].replace(
        "included: apptainer", ""
    )


def test_apptainer_role_refuses_a_package_with_a_wrong_checksum(tmp_path: Path) -> None:
    data = role_data("apptainer", "vars/Debian.yml")
    assert len(data["apptainer_sha256"]) == 64
    deb = tmp_path / "upstream.deb"
    deb.write_text("not what upstream released")
    fetched = tmp_path / "fetched"
    fetched.mkdir()
    locked = {"apptainer_url": deb.as_uri(), "apptainer_sha256": data["apptainer_sha256"]}
    done = run_tasks(tmp_path, "apptainer", "upstream", **locked, apptainer_fetched=str(fetched))
    assert done.returncode != 0
    assert "checksum" in done.stdout
    assert not list(fetched.iterdir())


def test_apptainer_is_refused_on_local_nodes() -> None:
    text = (
        "version: 1\n"
        "name: demo\n"
        "partitions: [{name: train, nodes: 1}]\n"
        "software: {apptainer: true}\n"
    )
    with refused("not-here", SpecError):
        parse_spec(text, Path("cluster.yaml"))
