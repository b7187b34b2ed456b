"""Where the packages of a distribution come from: `data/archives.toml`, or a file of the user's."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from clusterctl.errors import UsageError


def archive_of(distribution: str) -> Mapping[str, Any]:
    """What the table says of a distribution.

    Raises:
        UsageError: it is not in the table.
    """
    known = tomllib.loads(
        resources.files("clusterctl.packages.bundle").joinpath("data/archives.toml").read_text()
    )
    if distribution not in known:
        raise UsageError(
            f"no archive of packages is known for {distribution}",
            fix=f"bundles can be made for {', '.join(known)}",
        )
    return dict(known[distribution])


def read_own(path: Path) -> str:
    """A file of the user's that names repositories.

    Raises:
        UsageError: it can't be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        raise UsageError(
            "the file of repositories can't be read",
            where=str(path),
            why=getattr(exc, "strerror", None) or str(exc),
            fix="name a file as in /etc/apt/sources.list.d or /etc/yum.repos.d",
        ) from exc
