"""The wheel in an empty environment, used from an empty folder: up, submit, collect, down."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import records
from tests.support.install import PLAIN_PATH, ROOT, Installed, build_wheel, install
from tests.support.residue import Machine, left_behind, look_as_root
from tests.support.verbs import Clusterctl

# Where an installed clusterctl finds itself and its data, and what else can be imported beside it.
SURROUNDINGS = """
import importlib.util, json, sys
import clusterctl
from clusterctl.util.assets import asset
folders = {name: str(asset(name)) for name in ("ansible", "payload", "templates", "terraform")}
also = [name for name in ("payload", "tests", "numpy") if importlib.util.find_spec(name)]
print(json.dumps({"package": clusterctl.__path__[0], "folders": folders, "path": sys.path, "also": also}))
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    """The wheel of this checkout, in an environment whose path has a space."""
    return install(build_wheel(tmp_path_factory.mktemp("dist")), tmp_path_factory.mktemp("an env") / "venv")


@pytest.fixture(scope="module")
def wheel(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Clusterctl]:
    """The installed clusterctl, with the PATH of a login and an empty folder to stand in.

    No spec is there, so the cluster's name is `local`: whoever else has one of that name is not to notice.
    """
    home = tmp_path_factory.mktemp("wheel home")
    machine = Machine(home)
    before = look_as_root(machine)
    environ = {"PATH": PLAIN_PATH, "PYTHONPATH": "", "VIRTUAL_ENV": "", "NO_COLOR": "1"}
    runner = Clusterctl(home, tmp_path_factory.mktemp("empty"), environ, installed.script)
    yield runner
    if (home / "local").exists():
        runner("down", "--yes", "--discard-runs", rc=None)
    left = left_behind(before, lambda: look_as_root(machine))
    assert not left, "left behind on this machine:\n" + "\n".join(left)


def of_run(run: Path, kind: str) -> dict[str, Any]:
    (record,) = (record for record in records(run / "metrics.jsonl") if record["kind"] == kind)
    return record


def test_the_environment_holds_the_wheel_and_no_checkout(installed: Installed, tmp_path: Path) -> None:
    found = json.loads(installed.says(SURROUNDINGS, cwd=tmp_path))
    assert Path(found["package"]).is_relative_to(installed.venv)
    for name, folder in found["folders"].items():
        assert Path(folder) == Path(found["package"]) / "_assets" / name
        assert any(path.is_file() for path in Path(folder).rglob("*")) or name == "terraform"
    assert not [path for path in found["path"] if Path(path).is_relative_to(ROOT) and path]
    assert found["also"] == []


def test_the_main_job_from_an_empty_folder(wheel: Clusterctl) -> None:
    up = wheel("up")
    assert "built-in local cluster" in up.stderr
    assert "MPI across 2 of 2 nodes" in up.stdout

    wheel("submit", "train", "--nodes", "2", "--wait")
    (collected,) = wheel("-o", "json", "collect").json["runs"]
    wheel("down", "--yes")

    run = wheel.cwd / "runs" / f"local-{collected['job_id']}-train"
    assert Path(collected["dir"]) == run
    assert of_run(run, "run")["world_size"] == 2
    assert of_run(run, "result")["accuracy"] >= 0.95
    assert [path.name for path in wheel.cwd.iterdir()] == ["runs"]
    assert not (wheel.home / "local").exists()
    assert str(wheel.home) not in wheel("list").stdout


def test_a_link_to_the_script_is_enough(wheel: Clusterctl, tmp_path: Path) -> None:
    """As pipx and `uv tool` install it: a link in a folder of the PATH."""
    link = tmp_path / "clusterctl"
    link.symlink_to(wheel.script)
    linked = Clusterctl(wheel.home, wheel.cwd, wheel.environ, link)
    assert linked("--version").stdout == wheel("--version").stdout
