"""What is shipped: the wheel with its data folders, the editable install without copies, the
locks.
"""

from __future__ import annotations

import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests.support.verbs import SCRIPT

ROOT = Path(__file__).resolve().parents[3]
DATA = ("templates", "terraform", "ansible", "payload", "examples", "docs", "skills")
LOCKS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("requirements/*.lock"), *ROOT.glob("payload/*.lock")]
)


def tracked(*folders: str) -> set[str]:
    argv = [
        "git",
        "-c",
        "safe.directory=*",
        "ls-files",
        "-co",
        "--exclude-standard",
        "--",
        *folders,
    ]
    done = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True, check=True, timeout=60)
    return {name for name in done.stdout.splitlines() if (ROOT / name).is_file()}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The names in a wheel that was built from the source archive, so that both are whole."""
    out = tmp_path_factory.mktemp("dist")
    argv = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(ROOT)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    (path,) = out.glob("*.whl")
    return ZipFile(path).namelist()


@pytest.mark.parametrize("folder", DATA)
def test_wheel_contains_whole_data_folders(wheel: list[str], folder: str) -> None:
    inside = {
        name.removeprefix("clusterctl/_assets/")
        for name in wheel
        if name.startswith("clusterctl/_assets/")
    }
    assert {name for name in inside if name.startswith(f"{folder}/")} == tracked(folder)


def test_wheel_contains_only_the_package(wheel: list[str]) -> None:
    assert tracked("clusterctl") <= set(wheel)
    top_level = {name.partition("/")[0] for name in wheel}
    assert {name for name in top_level if not name.endswith(".dist-info")} == {"clusterctl"}


def test_editable_install_copies_nothing(tmp_path: Path) -> None:
    build = f"import hatchling.build; print(hatchling.build.build_editable({str(tmp_path)!r}))"
    subprocess.run(
        [sys.executable, "-c", build], cwd=ROOT, check=True, capture_output=True, timeout=60
    )
    (path,) = tmp_path.glob("*.whl")
    assert not [name for name in ZipFile(path).namelist() if name.startswith("clusterctl/")]


def entries(lock: Path) -> Iterator[tuple[Requirement, int]]:
    """Each pinned requirement, and how many hashes it has."""
    text = lock.read_text().replace("\\\n", " ")
    for line in text.splitlines():
        if line.strip() and not line.lstrip().startswith("#"):
            requirement, *hashes = line.split("--hash=sha256:")
            yield Requirement(requirement), len(hashes)


@pytest.mark.parametrize("name", LOCKS)
def test_lock_pins_by_hash_and_names_no_index(name: str) -> None:
    lock = ROOT / name
    pins = list(entries(lock))
    assert pins
    assert [
        str(pin) for pin, hashes in pins if not hashes or not str(pin.specifier).startswith("==")
    ] == []
    assert not [line for line in lock.read_text().splitlines() if "://" in line or "file:" in line]


@pytest.mark.parametrize(
    ("name", "groups"), [("runtime.lock", ["setup"]), ("dev.lock", ["setup", "dev"])]
)
def test_lock_satisfies_the_project(name: str, groups: list[str]) -> None:
    """So that a dependency can't be added, or its bound raised, without `make lock`.

    `make demo` uses a trained model with the packages of both locks.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    asked = [
        *project["project"]["dependencies"],
        *project["project"]["optional-dependencies"]["local"],
        *(line for group in groups for line in project["dependency-groups"][group]),
    ]
    pins: dict[str, list[str]] = {}
    for pin, _ in entries(ROOT / "requirements" / name):
        pins.setdefault(pin.name.lower(), []).append(str(pin.specifier).removeprefix("=="))
    for requirement in map(Requirement, asked):
        versions = pins.get(requirement.name.lower().replace("_", "-").replace(".", "-"), [])
        assert versions, f"{name} lacks {requirement}"
        assert all(map(requirement.specifier.contains, versions)), (
            f"{name}: {requirement}, not {versions}"
        )


def test_console_script_starts() -> None:
    done = subprocess.run(
        [SCRIPT, "--help"], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert "Usage: clusterctl" in done.stdout


def test_commit_hooks_are_valid_and_local() -> None:
    argv = [
        sys.executable,
        "-m",
        "pre_commit",
        "validate-config",
        str(ROOT / ".pre-commit-config.yaml"),
    ]
    subprocess.run(argv, check=True, timeout=60)
    assert "http" not in (ROOT / ".pre-commit-config.yaml").read_text()
