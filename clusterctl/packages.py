"""The OS packages that the roles install, read from the roles' own data: there is no second list."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from ruamel.yaml import YAML

from clusterctl.assets import asset
from clusterctl.distributions import Distribution
from clusterctl.errors import ClusterctlError

_SUFFIX: Final = "_packages"
_AT_GOOGLE: Final = frozenset({"bucket", "scratch"})  # roles for machines at Google alone
# What Ansible's modules need on a host, and would fetch themselves.
_OF_MODULES: Final[Mapping[str, tuple[str, ...]]] = {
    "Debian": ("python3-apt",),
    "RedHat": ("python3-libselinux",),
}


def package_names(distribution: Distribution) -> tuple[str, ...]:
    """What the roles ask for on a host of this distribution, whichever of its roles it has.

    Raises:
        ClusterctlError: a role's data can't be read without Ansible.
    """
    found = set(_OF_MODULES[distribution.family])
    for folder in sorted((asset("ansible") / "roles").glob("*/vars")):
        if folder.parent.name not in _AT_GOOGLE:
            found.update(_names(folder, distribution))
    return tuple(sorted(found))


def _names(folder: Path, distribution: Distribution) -> Iterator[str]:
    for name, value in _variables(folder, distribution).items():
        if not name.endswith(_SUFFIX):
            continue
        for package in value:
            if not isinstance(package, str) or "{{" in package:
                raise ClusterctlError(
                    f"{name} is no plain list of packages",
                    where=str(folder),
                    fix="write the names out: they are read without Ansible, too",
                )
            yield package


def _variables(folder: Path, distribution: Distribution) -> dict[str, Any]:
    """The variables of a role on this distribution: those of its family, then those of its release."""
    found: dict[str, Any] = {}
    for name in (distribution.family, distribution.release):
        path = folder / f"{name}.yml"
        if path.is_file():
            found |= YAML(typ="safe").load(path.read_text()) or {}
    return found
