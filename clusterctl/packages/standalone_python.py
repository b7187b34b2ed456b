"""A Python for clusters whose own Pythons are too old for jobs: a build of python-build-standalone,
which needs nothing of the host but its C library.

uv downloads it on this machine, and checks its hash. uv's own settings apply, such as
UV_PYTHON_INSTALL_MIRROR.
"""

from __future__ import annotations

import os
import re
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import MachineError
from clusterctl.packages.uv_program import uv_path
from clusterctl.packages.wheelhouse import cache_of_downloads
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.assets import digest, file_sha256
from clusterctl.util.process import run, temporary_folder
from clusterctl.util.progress import LineReporter

RELEASE: Final = "3.13"
# Jobs' packages have wheels for glibc only.
_BUILD: Final = f"linux-{ARCHITECTURE}-gnu"
_LEFT_OUT: Final = frozenset({"__pycache__", "test"})
_HASH: Final = 12  # characters


@dataclass(frozen=True, slots=True)
class StandalonePython:
    """A packed Python.

    archive: a tar.gz with its files. name: of its folder on clusters, with its version and the hash
        of the archive.
    """

    archive: Path
    name: str


def version_of(name: str) -> str:
    """Return the version, such as `3.13.5`, in the name of a build, as uv or this module gives it."""
    return name.split("-")[1]


def order_of(version: str) -> list[int]:
    """Return the sort key of a version, which puts 3.13.9 before 3.13.10."""
    return [int(number) for number in re.findall(r"\d+", version)]


def fetch_standalone_python(report: LineReporter) -> StandalonePython:
    """Download the Python and pack it, unless the cache has it. Raise MachineError if that fails."""
    # Another list or mirror may have another build.
    settings = [f"{key}={os.environ[key]}" for key in sorted(os.environ) if key[:9] == "UV_PYTHON"]
    with cache_of_downloads(f"standalone-python/{digest(*settings)}") as home:
        home.mkdir(parents=True, exist_ok=True)
        builds = f"cpython-{RELEASE}.*-{_BUILD}"
        if not any(home.glob(builds)):
            report(f"downloading a standalone build of Python {RELEASE}")
        argv = [uv_path(), "python", "install", "--no-bin", "--no-progress", "--install-dir"]
        # uv would read the settings of a project in the caller's folder, and take a folder there
        # with the name of the build for a Python.
        result = run([*argv, str(home), f"cpython-{RELEASE}-{_BUILD}"], cwd=home.parent)
        if result.rc != 0:
            raise MachineError(
                "the cluster needs a Python of its own, which can't be downloaded",
                code="transfer-failed",
                about="python-download",
                why=result.stderr.strip()[-1000:],
                fix="allow this machine to reach github.com, or set UV_PYTHON_INSTALL_MIRROR to a "
                "mirror of python-build-standalone; or pass a module of the site that has a Python "
                "from 3.11 on with --module, or its path with --python",
            )
        tree = max(home.glob(builds), key=lambda path: order_of(version_of(path.name)))
        archive = home / f"{tree.name}.tar.gz"
        if not archive.is_file():
            report(f"packing {tree.name}")
            with temporary_folder(home) as folder:
                _pack(tree, folder / archive.name)
                (folder / archive.name).replace(archive)
    return StandalonePython(archive, f"{tree.name}-{file_sha256(archive)[:_HASH]}")


def _pack(tree: Path, archive: Path) -> None:
    with tarfile.open(archive, "w:gz", compresslevel=6) as packed:
        for path in sorted(tree.iterdir()):
            packed.add(path, path.name, filter=_packed)


def _packed(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if _LEFT_OUT & {*Path(member.name).parts} else member
