"""The wheelhouse: every wheel of a lock of ours, in a folder of the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from clusterctl.errors import MachineError
from clusterctl.packages.wheels.node import DEFAULT_NODE, Node, pip_download
from clusterctl.state.journal import digest
from clusterctl.state.workspace import cache_home
from clusterctl.util.disk import reason
from clusterctl.util.lifetime import temporary_folder


def wheelhouse(lock: Path, node: Node = DEFAULT_NODE) -> Path:
    """A folder with every wheel of a hash-locked requirements file; downloaded once.

    Raises:
        MachineError: the package index is out of reach or has no wheel for the nodes, or there is no room
            or no home to keep them in.
    """
    return filled(lock, lambda folder: _download(lock, node, folder), node)


def filled(lock: Path, fill: Callable[[Path], None], node: Node = DEFAULT_NODE) -> Path:
    """The wheelhouse of a lock; ``fill`` puts the wheels into a new folder where there is none yet.

    Raises:
        MachineError: there is no room or no home to keep them in; and what ``fill`` raises.
    """
    folder = _folder(lock, node)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent) as partial:
            (partial / "wheels").mkdir()
            fill(partial / "wheels")
            _publish(partial / "wheels", folder)
    except OSError as exc:
        raise unwritable(folder.parent, exc) from exc
    return folder


def is_there(lock: Path, node: Node) -> bool:
    """Whether there is a wheelhouse of the lock already."""
    return _folder(lock, node).is_dir()


def _folder(lock: Path, node: Node) -> Path:
    return cache_home() / f"wheels-{digest(lock.read_bytes(), str(node))}"


def unwritable(folder: Path, exc: OSError) -> MachineError:
    """The error for a cache that can't be written."""
    return MachineError(
        "the cache of downloads can't be written",
        where=str(folder),
        why=reason(exc, folder),
        fix="make it writable, or set XDG_CACHE_HOME to a folder that is",
    )


def _download(lock: Path, node: Node, folder: Path) -> None:
    arguments = ["--quiet", "--require-hashes", "--no-deps"]
    said = pip_download([*arguments, "--requirement", str(lock), "--dest", str(folder)], node)
    if said.rc != 0:
        raise MachineError(
            "the Python packages of the job environment could not be downloaded",
            where=str(lock),
            why=said.text.strip()[-1500:],
            fix="check that the package index can be reached (pip's own settings apply), then run it again",
        )


def _publish(complete: Path, folder: Path) -> None:
    try:
        complete.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another clusterctl was faster, with the same wheels
            raise
