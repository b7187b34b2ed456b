"""--env-path: an environment that exists on the cluster is found, proven to run, and activated."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clusterctl.errors import UsageError
from clusterctl.jobs.environment import existing_environment
from clusterctl.jobs.prepare import Preparer, Submission
from clusterctl.spec.job import JobSpec
from clusterctl.util.assets import render
from clusterctl.util.progress import SILENT
from tests.integration.jobs.test_environment import a_spec
from tests.support.local_transport import LocalTransport
from tests.support.messages import refused


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "a home"
    folder.mkdir()
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.delenv("MAMBA_ROOT_PREFIX", raising=False)
    return folder


class NodeTransport(LocalTransport):
    """A node on which a folder of the controller does not exist."""

    host = "train-1"

    def run(self, argv: Any, **options: Any) -> Any:
        return super().run([*argv[:-1], f"{argv[-1]}-not-here"], **options)


def session(node: LocalTransport | None = None) -> Any:
    """The controller is this machine, and so is the first node unless another is given."""
    partitions = (SimpleNamespace(name="train", nodes=("train-1", "train-2")),)
    nodes = {"train-1": node or LocalTransport()}
    inventory = SimpleNamespace(partitions=partitions)
    return SimpleNamespace(inventory=inventory, transport=LocalTransport(), nodes=nodes)


def find(wanted: str, *, needs_python: bool = True, node: LocalTransport | None = None) -> str:
    return existing_environment(session(node), wanted, "train", needs_python=needs_python)


def a_prefix(folder: Path) -> Path:
    """A folder as conda lays it out, with this Python."""
    (folder / "bin").mkdir(parents=True)
    (folder / "conda-meta").mkdir()
    (folder / "bin/python").symlink_to(sys.executable)
    return folder


def test_environment_is_found_by_its_folder_or_by_its_name_in_conda(home: Path) -> None:
    prefix = str(a_prefix(home / "micromamba/envs/torch"))
    assert find(prefix) == find("~/micromamba/envs/torch") == find("torch") == prefix
    elsewhere = a_prefix(home / "project space" / "geo")
    (home / ".conda").mkdir()
    (home / ".conda/environments.txt").write_text(f"/gone/geo\n{elsewhere}\n{prefix}\n")
    assert find("geo") == str(elsewhere)
    assert find("torch") == prefix
    assert find("./project space/geo") == f"{home}/./project space/geo"


def test_environment_that_can_not_run_is_refused_before_the_submission(home: Path) -> None:
    prefix = a_prefix(home / "micromamba/envs/torch")
    a_prefix(home / ".conda/envs/torch")
    with refused("packages-unmet/environment", UsageError) as caught:
        find("torch")
    assert str(prefix) in caught.value.why
    for wanted in ("tensorflow", str(home / "nowhere"), str(home)):
        with refused("packages-unmet/environment", UsageError):
            find(wanted)
    with refused("packages-unmet/environment", UsageError, where="train-1"):
        find(str(prefix), node=NodeTransport())
    (prefix / "bin/python").unlink()
    with refused("packages-unmet/environment", UsageError):
        find(str(prefix))
    # R and Perl need no Python.
    assert find(str(prefix), needs_python=False) == str(prefix)
    (prefix / "bin/python").write_text("#!/bin/sh\necho it is broken >&2; exit 1\n")
    (prefix / "bin/python").chmod(0o755)
    with refused("packages-unmet/environment", UsageError) as caught:
        find(str(prefix))
    assert "it is broken" in caught.value.why


def activated(prefix: Path) -> dict[str, str]:
    """The variables after a job's script has activated an environment."""
    text = f"set -u\n{render('activate.j2', prefix=repr(str(prefix)))}\nenv"
    environ = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run(
        ["bash", "-ec", text], env=environ, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines() if "=" in line)


def test_environment_is_activated_as_conda_and_virtual_environments_are(home: Path) -> None:
    prefix = a_prefix(home / "envs/geo")
    scripts = prefix / "etc/conda/activate.d"
    scripts.mkdir(parents=True)
    (scripts / "gdal.sh").write_text("export GDAL_DATA=$CONDA_PREFIX/share/gdal\n")
    variables = activated(prefix)
    assert variables["CONDA_PREFIX"] == variables["CONDA_DEFAULT_ENV"] == str(prefix)
    assert variables["GDAL_DATA"] == f"{prefix}/share/gdal"
    virtual = home / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", virtual], check=True)
    variables = activated(virtual)
    assert variables["VIRTUAL_ENV"] == str(virtual)
    assert "CONDA_PREFIX" not in variables
    assert "VIRTUAL_ENV" not in activated(home)


def a_job(folder: Path, **options: Any) -> JobSpec:
    (folder / "a.py").touch()
    return JobSpec(name="a", script=folder / "a.py", **options)


def test_job_runs_with_the_python_of_its_environment(tmp_path: Path) -> None:
    # The packages of this file are not installed into an environment that is not clusterctl's.
    (tmp_path / "requirements.txt").write_text("missing\n")
    job = a_job(tmp_path, env_path="/shared/my envs/geo")
    (done,) = Preparer(SILENT.note).plan(Submission.of((job,)), a_spec()).jobs
    assert "'/shared/my envs/geo'/bin/python \"$files\"/a.py" in done.script
    assert "CLUSTERCTL_PATH='/shared/my envs/geo'/bin:" in done.script
    assert "CONDA_PREFIX='/shared/my envs/geo'" in done.script


def test_environment_excludes_packages_and_needs_a_program_of_the_user(tmp_path: Path) -> None:
    for job, code in (
        (a_job(tmp_path, env_path="/e", requirements=tmp_path / "r.txt"), "options-exclusive"),
        (a_job(tmp_path, env_path="name"), "unsupported/env-path"),
        (JobSpec(name="train", bundled="train", env_path="/e"), "option-invalid/requirements"),
    ):
        with refused(code, UsageError):
            Preparer(SILENT.note).plan(Submission.of((job,)), a_spec())
