"""The packages of a lock (PEP 751) for the nodes, as lines for pip: ``NAME @ URL#HASH``."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit

from packaging.pylock import (
    Package,
    PackageArchive,
    PackageSdist,
    PackageVcs,
    PackageWheel,
    Pylock,
    PylockSelectError,
    PylockValidationError,
)

from clusterctl.errors import UsageError
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.package_files import malformed


def unknown_extra(file: Path, name: str, known: Collection[str]) -> UsageError:
    listed = ", ".join(sorted(known))
    return UsageError(
        f"{file.name} has no extra or group with the name {name}",
        code="not-found",
        about="extra",
        where=str(file),
        why=f"it has {listed}" if listed else "it has no extras and no groups",
        fix=f"use --requirements '{file.name}[NAME,...]' with these names",
    )


def lines_of(
    content: Mapping[str, Any],
    file: Path,
    node: NodePlatform,
    names: Sequence[str] = (),
    *,
    project: Path | None = None,
) -> list[str]:
    """Return the lines of a lock's packages, chosen for the nodes.

    file: the lock. Relative paths in it start from its folder. names: extras and groups. project:
        the project's folder; packages in it are sent with the job. Default: the folder of ``file``.

    Raises:
        UsageError: the lock is malformed, has nothing for the nodes, or lacks a name.
    """
    project = project or file.parent
    try:
        lock = Pylock.from_dict(content)
        extras = [name for name in names if name in (lock.extras or ())]
        groups = [name for name in names if name in (lock.dependency_groups or ())]
        if unknown := [name for name in names if name not in {*extras, *groups}]:
            known = {*(lock.extras or ()), *(lock.dependency_groups or ())}
            raise unknown_extra(file, unknown[0], known)
        selected = lock.select(
            environment=node.markers,  # type: ignore[arg-type]
            tags=tuple(node.tags),
            extras=extras,
            dependency_groups=[*groups, *(lock.default_groups or ())],
        )
        lines = [_line_of(package, chosen, file.parent, project) for package, chosen in selected]
    except PylockValidationError as exc:
        raise malformed(file, str(exc)) from exc
    except PylockSelectError as exc:
        raise UsageError(
            f"{file.name} has no packages for the nodes",
            code="packages-unmet",
            about="lock",
            where=str(file),
            why=f"{exc}; the nodes have {node}",
            fix="lock also for these nodes: see `requires-python` and the wheels of the package",
        ) from exc
    return sorted(filter(None, lines))


def path_in(line: str) -> str:
    """Return the path in the URL of a line ``NAME @ URL#HASH``. Its end is the name of a file."""
    return unquote(urlsplit(line.partition(" @ ")[2]).path)


def _line_of(package: Package, chosen: object, folder: Path, project: Path) -> str:
    """Return the line for a package of a lock. "": the package is sent with the job."""
    match chosen:
        case PackageWheel() | PackageArchive() | PackageSdist():
            url = chosen.url or _path(folder, chosen.path or "").as_uri()
            kind = "sha256" if "sha256" in chosen.hashes else next(iter(chosen.hashes), "")
            return f"{package.name} @ {url}" + (f"#{kind}={chosen.hashes[kind]}" if kind else "")
        case PackageVcs(type=kind, commit_id=commit):
            url = chosen.url or _path(folder, chosen.path or "").as_uri()
            inner = f"#subdirectory={chosen.subdirectory}" if chosen.subdirectory else ""
            return f"{package.name} @ {kind}+{url}@{commit}{inner}"
        case _ if package.directory is not None:
            place = _path(folder, package.directory.path)
            if place.is_relative_to(project.resolve()):
                return ""
            raise UsageError(
                f"{package.name} is a folder that is not sent with the job",
                code="packages-unmet",
                about="wheel",
                where=str(project),
                why=f"nodes install only wheels, and {place} is outside of the project",
                fix=f"build a wheel (`pip wheel --no-deps {place}`) and write the wheel's path in "
                "place of the folder's",
            )
        case _:
            return f"{package.name}=={package.version}"


def _path(folder: Path, name: str) -> Path:
    return Path(os.path.normpath(folder.resolve() / name))
