"""The wheel in an empty environment, used from an empty folder. What it raises: test_manual.py."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.support.install import PLAIN_PATH, ROOT, Installed
from tests.support.verbs import Clusterctl

# Where an installed clusterctl finds itself and its data, and what else can be imported beside it.
SURROUNDINGS = """
import importlib.util, json, sys
import clusterctl
from clusterctl.util.assets import asset
folders = {name: str(asset(name)) for name in ("ansible", "examples", "payload", "templates", "terraform")}
also = [name for name in ("payload", "tests", "mpi4py") if importlib.util.find_spec(name)]
print(json.dumps({"package": clusterctl.__path__[0], "folders": folders, "path": sys.path, "also": also}))
"""


@pytest.fixture(scope="module")
def wheel(installed: Installed, tmp_path_factory: pytest.TempPathFactory) -> Clusterctl:
    """The installed clusterctl, with the PATH of a login and an empty folder to stand in."""
    environ = {"PATH": PLAIN_PATH, "PYTHONPATH": "", "VIRTUAL_ENV": "", "NO_COLOR": "1"}
    home, empty = tmp_path_factory.mktemp("wheel home"), tmp_path_factory.mktemp("empty")
    return Clusterctl(home, empty, environ, installed.script)


def test_the_environment_holds_the_wheel_and_no_checkout(installed: Installed, tmp_path: Path) -> None:
    found = json.loads(installed.says(SURROUNDINGS, cwd=tmp_path))
    assert Path(found["package"]).is_relative_to(installed.venv)
    for name, folder in found["folders"].items():
        assert Path(folder) == Path(found["package"]) / "_assets" / name
        assert any(path.is_file() for path in Path(folder).rglob("*")) or name == "terraform"
    assert not [path for path in found["path"] if Path(path).is_relative_to(ROOT) and path]
    assert found["also"] == []


def test_without_a_spec_it_is_the_built_in_cluster(wheel: Clusterctl) -> None:
    plan = wheel("-o", "json", "plan")
    assert "built-in local cluster" in plan.stderr
    hosts = [one["name"] for one in plan.json["changes"] if one["kind"] == "host"]
    assert hosts == ["local-ctl", "local-train-1", "local-train-2"]
    assert list(wheel.cwd.iterdir()) == []
    clusters = wheel("-o", "json", "list").json["clusters"]
    assert not [one for one in clusters if Path(one["workspace"]).is_relative_to(wheel.home)]


def test_the_examples_come_along(wheel: Clusterctl) -> None:
    wheel("init", "--examples")
    examples = wheel.cwd / "examples"
    wanted = {path.name for path in (ROOT / "examples").iterdir()} - {"__pycache__"}
    assert {path.name for path in examples.iterdir()} == wanted
    assert (examples / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    shutil.rmtree(examples)  # the folder is the module's


def test_a_link_to_the_script_is_enough(wheel: Clusterctl, tmp_path: Path) -> None:
    """As pipx and `uv tool` install it: a link in a folder of the PATH."""
    link = tmp_path / "clusterctl"
    link.symlink_to(wheel.script)
    linked = Clusterctl(wheel.home, wheel.cwd, wheel.environ, link)
    assert linked("--version").stdout == wheel("--version").stdout
