"""The packages in the repositories of an EL-shaped node: EL's names and versions, Debian's files."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
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
    description = tomllib.loads((DATA / "transplants.toml").read_text())
    transplants = TypeAdapter(dict[str, Transplant]).validate_python(description)
    found = []
    for repo, name, epoch, version, release, arch in (
        *_base(),
        *_listed("cluster"),
        *_listed("more"),
    ):
        key = f"{repo}/{name}" if f"{repo}/{name}" in transplants else name
        holds = transplants.get(key, Transplant())
        own = holds.like or key
        if holds.like:
            like = transplants[holds.like]
            holds = replace(like, requires=holds.requires, provides=holds.provides, pre=holds.pre)
        found.append(Package(repo, name, epoch, version, release, arch, holds, FILES / own))
    known = {name for package in found for name in (package.name, f"{package.repo}/{package.name}")}
    if unknown := transplants.keys() - known:
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


_BRACES = re.compile(r"\{([^{}]*)\}")
_PROGRAMS = {"bin", "sbin", "libexec"}  # the folders of what is run
_HEAD = """\
%global debug_package %{nil}
%global __os_install_post %{nil}
%global _build_id_links none
%define _binary_payload w1.gzdio
%define _unpackaged_files_terminate_build 0
Name: el-shaped
Version: 1
Release: 1
Summary: Debian's programs under EL's names
License: various
%description
For tests.
%install
cp -al TREE/. %{buildroot}/
"""


def stage(package: Package, quarry: Path, tree: Path) -> tuple[str, ...]:
    """Put what a package holds into the tree; its lines of `%files`.

    Raises:
        FileNotFoundError: something that it should hold is not in the quarry.
    """
    lines = []
    for source, target in _moves(package, quarry):
        _link(source, tree / target.lstrip("/"))
        lines.append(target)
    for own in (package.own, quarry / "own" / package.name):
        for path in sorted(path for path in own.rglob("*") if path.is_file()):
            target = f"/{path.relative_to(own)}"
            _copy(path, tree / target.lstrip("/"))
            lines.append(target)
    for target, to in package.holds.links.items():
        place = tree / target.lstrip("/")
        place.parent.mkdir(parents=True, exist_ok=True)
        place.unlink(missing_ok=True)
        place.symlink_to(to)
        lines.append(target)
    for folder, description in package.holds.folders.items():
        (tree / folder.lstrip("/")).mkdir(parents=True, exist_ok=True)
        owner, mode = description.split()
        lines.append(f"%dir %attr({mode}, {owner}, {owner}) {folder}")
    config = package.holds.config
    return tuple(f"%config(noreplace) {x}" if x in config else x for x in dict.fromkeys(lines))


def spec(contents: Sequence[tuple[Package, Sequence[str]]], tree: str) -> str:
    """The spec of these packages, with their lines of `%files`. ``tree``: where they are staged."""
    return _HEAD.replace("TREE", tree) + "\n".join(
        _part(package, lines) for package, lines in contents
    )


def _part(package: Package, lines: Sequence[str]) -> str:
    holds = package.holds
    head = [
        f"%package -n {package.name}",
        "Summary: See https://rockylinux.org",
        f"Epoch: {package.epoch}",
    ]
    head += [f"Version: {package.version}", f"Release: {package.release}", "AutoReqProv: no"]
    head += ["BuildArch: noarch"] if package.arch == "noarch" else []
    head += [f"Requires: {name}" for name in holds.requires]
    head += [f"Provides: {name}" for name in holds.provides]
    parts = ["\n".join(head), f"%description -n {package.name}\nFor tests."]
    parts += [
        f"%{when} -n {package.name}\n{script}" for when, script in _scripts(package) if script
    ]
    return "\n".join([*parts, f"%files -n {package.name}", *lines, ""])


def _scripts(package: Package) -> Iterator[tuple[str, str]]:
    yield "pre", package.holds.pre
    yield (
        "post",
        "/sbin/ldconfig\n" + package.holds.post if package.holds.files else package.holds.post,
    )


def _moves(package: Package, quarry: Path) -> Iterator[tuple[Path, str]]:
    """Each file that a package takes from the quarry, and its place."""
    for rule in package.holds.files:
        glob, _, target = rule.partition(" -> ")
        found = sorted(
            path
            for one in _expanded(glob.lstrip("/"))
            for path in quarry.glob(f"{one}/*" if one.endswith("**") else one)
        )
        if not found:
            raise FileNotFoundError(f"{package.name}: nothing in the quarry is {glob}")
        root = quarry / glob.lstrip("/").partition("**")[0]
        for path in found:
            if path.is_dir() and not path.is_symlink():
                continue
            own = path.relative_to(root) if "**" in glob else Path(path.name)
            place = target or f"/{path.relative_to(quarry)}"
            yield path, f"{target}{own}" if target.endswith("/") else place


def _expanded(glob: str) -> Iterator[str]:
    """A glob with braces as several without."""
    parts = _BRACES.split(glob)
    choices = [[part] if index % 2 == 0 else part.split(",") for index, part in enumerate(parts)]
    return ("".join(words) for words in itertools.product(*choices))


def _link(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() and not target.is_symlink():
        os.link(source, target, follow_symlinks=False)


def _copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    target.unlink(missing_ok=True)
    shutil.copyfile(source, target)
    target.chmod(0o755 if _PROGRAMS & set(target.parts) else 0o644)
