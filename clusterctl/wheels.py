"""The wheelhouse: wheels resolved on the user's machine for the nodes' Python, so nodes need no internet."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path

from clusterctl.errors import MachineError
from clusterctl.journal import digest
from clusterctl.workspace import cache_home

NODE_PYTHON = "3.11"
NODE_GLIBC_MINOR = 36  # Debian 12; glibc 2.x
_ARCH = "x86_64"


def wheelhouse(lock: Path) -> Path:
    """A folder with every wheel of a hash-locked requirements file; downloaded once.

    Raises:
        MachineError: the package index is out of reach or has no wheel for the nodes, or there is no room
            or no home to keep them in.
    """
    folder = cache_home() / f"wheels-{digest(lock.read_bytes(), NODE_PYTHON, _ARCH)}"
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".wheels-") as partial:
            _download(lock, Path(partial) / "wheels")
            _publish(Path(partial) / "wheels", folder)
    except OSError as exc:
        raise MachineError(
            "the cache of downloads can't be written",
            where=str(folder.parent),
            why=exc.strerror or str(exc),
            fix="make it writable, or set XDG_CACHE_HOME to a folder that is",
        ) from exc
    return folder


def _download(lock: Path, folder: Path) -> None:
    platforms = [f"manylinux_2_{minor}_{_ARCH}" for minor in range(NODE_GLIBC_MINOR, 4, -1)]
    platforms += [f"manylinux{name}_{_ARCH}" for name in ("2014", "2010", "1")]
    # -P: a file of the caller's folder that is called like a module of pip's is not one.
    argv = [sys.executable, "-P", "-m", "pip", "download", "--quiet"]
    argv += ["--require-hashes", "--only-binary=:all:"]
    argv += ["--no-deps", "--implementation", "cp", "--python-version", NODE_PYTHON]
    argv += [word for platform in platforms for word in ("--platform", platform)]
    argv += ["--requirement", str(lock), "--dest", str(folder)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise MachineError(
            "the Python packages of the job environment could not be downloaded",
            where=str(lock),
            why=done.stderr.strip()[-1500:],
            fix="check that the package index can be reached (pip's own settings apply), then run it again",
        )


def _publish(complete: Path, folder: Path) -> None:
    try:
        complete.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another clusterctl was faster, with the same wheels
            raise
