"""Finds templates/, terraform/, ansible/ and payload/ in a checkout and in an installed wheel alike."""

from __future__ import annotations

from pathlib import Path

from clusterctl.errors import ClusterctlError

_PACKAGE = Path(__file__).resolve().parent


def asset(name: str) -> Path:
    """The path of one of the data folders.

    Raises:
        ClusterctlError: the folder is in neither place, so the installation is broken.
    """
    for candidate in (_PACKAGE / "_assets" / name, _PACKAGE.parent / name):
        if candidate.is_dir():
            return candidate
    raise ClusterctlError(
        f"the data folder {name}/ is missing",
        where=str(_PACKAGE),
        why="this installation of clusterctl is incomplete",
        fix="install clusterctl again from a wheel or a full checkout",
    )
