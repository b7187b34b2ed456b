"""The packages of an EL-shaped node's repositories: true names and versions, and what of Debian they hold."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from pydantic import TypeAdapter

DATA = Path(__file__).with_name("data")
FILES = Path(__file__).with_name("files")
_NEVRA = re.compile(r"(?P<name>.+)-(?P<version>[^-]+)-(?P<release>[^-]+)\.(?P<arch>x86_64|noarch)")


@dataclass(frozen=True)
class Transplant:
    """What a package holds; see data/transplants.toml."""

    like: str = ""
    files: tuple[str, ...] = ()
    links: Mapping[str, str] = field(default_factory=dict)
    folders: Mapping[str, str] = field(default_factory=dict)
    config: frozenset[str] = frozenset()
    requires: tuple[str, ...] = ()
    provides: tuple[str, ...] = ()
    pre: str = ""
    post: str = ""


@dataclass(frozen=True)
class Package:
    """One package; ``own`` is the folder with files of its own, whether there is one or not."""

    repo: str
    name: str
    epoch: str
    version: str
    release: str
    arch: str
    holds: Transplant
    own: Path

    @property
    def file(self) -> str:
        return f"{self.name}-{self.version}-{self.release}.{self.arch}.rpm"


def packages() -> tuple[Package, ...]:
    """Every package there is."""
    said = tomllib.loads((DATA / "transplants.toml").read_text())
    transplants = TypeAdapter(dict[str, Transplant]).validate_python(said)
    found = []
    for repo, name, epoch, version, release, arch in (*_base(), *_listed("cluster"), *_listed("more")):
        holds = transplants.get(name, Transplant())
        own = holds.like or name
        if holds.like:
            like = transplants[holds.like]
            holds = replace(like, requires=holds.requires, provides=holds.provides, pre=holds.pre)
        found.append(Package(repo, name, epoch, version, release, arch, holds, FILES / own))
    if unknown := transplants.keys() - {package.name for package in found}:
        raise ValueError(f"no package list names {', '.join(sorted(unknown))}")
    return tuple(found)


def base_names() -> frozenset[str]:
    """What is installed from the first."""
    return frozenset(name for _, name, *_ in _base())


def _base() -> Iterator[tuple[str, ...]]:
    for line in (DATA / "base.packages").read_text().splitlines():
        name, epoch, version, release, arch = line.split("|")[:5]
        if name != "gpg-pubkey":  # which is how rpm keeps a key
            yield "baseos", name, "0" if epoch == "(none)" else epoch, version, release, arch


def _listed(which: str) -> Iterator[tuple[str, ...]]:
    for line in (DATA / f"{which}.packages").read_text().splitlines():
        if line and not line.startswith("#"):
            repo, nevra = line.split()
            found = _NEVRA.fullmatch(nevra)
            if not found:
                raise ValueError(f"no name, version, release and architecture: {line}")
            yield repo, found["name"], "0", found["version"], found["release"], found["arch"]
