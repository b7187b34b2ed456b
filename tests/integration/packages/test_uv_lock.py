"""uv reads its own lock, and pip downloads the wheels that it lists, by their hashes."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from uv import find_uv_bin

from clusterctl.errors import ClusterctlError, MachineError, UsageError
from clusterctl.packages import uv_program, wheelhouse
from clusterctl.packages.node_platform import DEFAULT_PLATFORM, NodePlatform
from clusterctl.packages.project_files import PackageList
from clusterctl.packages.resolution import Requirements, resolve
from clusterctl.packages.wheelhouse import Pip, WheelLock
from clusterctl.util.assets import file_sha256
from tests.support import forks
from tests.support.messages import refused
from tests.support.wheels import a_wheel

PROJECT = """\
[project]
name = "textnet"
version = "0.1"
requires-python = ">=3.11"
dependencies = ["first<2"]
[dependency-groups]
dev = ["missing-from-nodes"]
train = ["tool"]
[build-system]
requires = ["not-there"]
build-backend = "not.there"
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project that uv has locked, whose own package can't be built here."""
    for name in [name for name in os.environ if name.startswith(("PIP_", "UV_"))]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("UV_CACHE_DIR", str(tmp_path / "uv"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setattr(wheelhouse, "run_with_lines", forks.pip)
    index = tmp_path / "index"
    index.mkdir()
    for version in ("1.0", "1.1", "2.0"):
        a_wheel(index, "first", version, requires=("second",))
    a_wheel(index, "second")
    a_wheel(index, "tool")
    a_wheel(index, "missing_from_nodes")
    folder = tmp_path / "project"
    (folder / "src/textnet").mkdir(parents=True)
    (folder / "pyproject.toml").write_text(PROJECT)
    lock(folder)
    return folder


def lock(folder: Path, *options: str) -> None:
    argv = [find_uv_bin(), "lock", "--offline", "--no-index", "--quiet"]
    argv += ["--find-links", str(folder.parent / "index"), *options]
    subprocess.run(argv, cwd=folder, check=True)


def resolved(choice: Path) -> list[str]:
    """The packages that nodes get which have second 7.0, which no index has."""
    base = choice.parent / "base.lock"
    base.write_text("second==7.0\n")
    requirements = Requirements((PackageList.read(choice, DEFAULT_PLATFORM),), base)
    result: WheelLock = resolve(requirements, Pip(DEFAULT_PLATFORM))
    return sorted(f"{wheel.name}=={wheel.version}" for wheel in result.wheels)


def test_uv_lock_gives_its_versions_without_the_project_and_its_dev_group(project: Path) -> None:
    # A newer version, which appeared after the lock was written.
    a_wheel(project.parent / "index", "first", "1.2")
    assert resolved(project / "uv.lock") == ["first==1.1", "second==1.0"]
    assert "tool==1.0" in resolved(project / "uv.lock[train]")


def test_wheel_that_differs_from_the_lock_is_refused(project: Path) -> None:
    argv = [find_uv_bin(), "export", "--frozen", "--quiet", "--no-emit-project", "--no-dev"]
    subprocess.run([*argv, "-o", "pylock.toml"], cwd=project, check=True)
    assert "first==1.1" in resolved(project / "pylock.toml")
    shutil.rmtree(project.parent / "cache")
    a_wheel(project.parent / "index", "first", "1.1", files={"first.py": "evil = True\n"})
    with refused("transfer-failed/wheels", MachineError, "sha256"):
        resolved(project / "pylock.toml")


def test_lock_of_a_script_is_used(project: Path) -> None:
    text = '# /// script\n# requires-python = ">=3.11"\n# dependencies = ["first"]\n# ///\n'
    (project / "train.py").write_text(text)
    lock(project, "--script", "train.py")
    assert resolved(project / "train.py.lock") == ["first==2.0", "second==1.0"]


def test_lock_older_than_the_project_is_refused(project: Path) -> None:
    text = f'{PROJECT}[project.optional-dependencies]\nmore = ["tool"]\n'
    (project / "pyproject.toml").write_text(text)
    lock(project)
    for now, named in (
        ('["first<2", "third_part"]', "third_part"),
        ('["first>=2"]', "first>=2"),
        # A package that the lock has for another one, or for an extra.
        ('["first<2", "Second"]', "Second"),
        ('["first<2", "tool"]', "tool"),
    ):
        (project / "pyproject.toml").write_text(text.replace('["first<2"]', now))
        with refused("packages-unmet/lock-stale", UsageError, "uv lock") as caught:
            resolved(project / "uv.lock")
        assert named in caught.value.why


def test_lock_without_what_no_python_needs_or_with_overridden_versions_is_not_older(
    project: Path,
) -> None:
    a_folder = project / "libs" / "member"
    a_folder.mkdir(parents=True)
    a_folder.joinpath("pyproject.toml").write_text('[project]\nname = "member"\nversion = "1"\n')
    now = (
        """["First <2, >=1.0", "strenum; python_version < '3.11'", "member>=1", """
        """"second ~=1.0; sys_platform == 'linux'", "second<9; sys_platform == 'darwin'"]"""
    )
    uv = (
        '[tool.uv]\noverride-dependencies = ["first==2.0"]\n'
        '[tool.uv.sources]\nmember = {path = "libs/member", editable = true}\n'
    )
    (project / "pyproject.toml").write_text(PROJECT.replace('["first<2"]', now) + uv)
    lock(project)
    assert resolved(project / "uv.lock") == ["first==2.0", "second==1.0"]


def test_extras_that_exclude_each_other_are_refused_by_uv(project: Path) -> None:
    extras = '[project.optional-dependencies]\na = ["tool"]\nb = ["second"]\n'
    conflicts = '[tool.uv]\nconflicts = [[{extra = "a"}, {extra = "b"}]]\n'
    (project / "pyproject.toml").write_text(PROJECT + extras + conflicts)
    lock(project)
    assert "tool==1.0" in resolved(project / "uv.lock[a]")
    with refused("file-invalid/uv-lock", UsageError, "extras"):
        resolved(project / "uv.lock[a,b]")


@pytest.mark.parametrize(
    "text",
    # Formats of a newer uv and of an older one, and a lock without packages.
    ["version = 99\n", "version = 1\n[[distribution]]\nname = 'first'\n", "version = 1\n"],
)
def test_lock_that_uv_can_not_read_is_refused(project: Path, text: str) -> None:
    (project / "uv.lock").write_text(text)
    with refused("file-invalid/uv-lock", UsageError, "uv lock", "uv export"):
        resolved(project / "uv.lock")


def test_installation_without_uv_is_named(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> str:
        raise FileNotFoundError

    monkeypatch.setattr(uv_program, "find_uv_bin", missing)
    with refused("internal/installation", ClusterctlError, "uv"):
        PackageList.read(project / "uv.lock", DEFAULT_PLATFORM)
    # Within the cache of downloads, which has errors of its own.
    with refused("internal/installation", ClusterctlError, "uv"):
        resolved(project / "pyproject.toml")


def test_lock_for_another_python_is_refused(project: Path) -> None:
    (project / "pyproject.toml").write_text(PROJECT.replace('">=3.11"', '"==3.11.*"'))
    lock(project)
    with refused("packages-unmet/lock", UsageError):
        PackageList.read(project / "uv.lock", NodePlatform("3.13", 36))


def test_lock_of_an_index_takes_wheels_of_a_folder_without_an_index(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    index = project.parent / "index"
    packages = "".join(
        f'[[packages]]\nname = "{name}"\nversion = "{version}"\nwheels = [{{url = '
        f'"https://index.invalid/{file}", hashes = {{sha256 = "{file_sha256(index / file)}"}}}}]\n'
        for name, version in (("first", "1.1"), ("tool", "1.0"))
        for file in (f"{name}-{version}-py3-none-any.whl",)
    )
    locked = project / "pylock.toml"
    locked.write_text(f'lock-version = "1.0"\ncreated-by = "a"\n{packages}')
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(index))
    assert resolved(locked) == ["first==1.1", "tool==1.0"]
    shutil.rmtree(project.parent / "cache")
    a_wheel(index, "tool", files={"tool.py": "evil = True\n"})
    with refused("transfer-failed/wheels", MachineError):
        resolved(locked)
