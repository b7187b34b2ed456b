"""Packages of Rocky Linux and RHEL, with all that they need, by dnf with a root of its own.

Nothing counts as installed in that root. Each package's own signature is checked with the keys of its
repositories, which go into the bundle: the hosts check it once more when they install.
"""

from __future__ import annotations

import configparser
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages.repository import (
    Repository,
    RepositoryRequest,
    archive_of,
    download,
    need,
    read_own,
    run,
)
from clusterctl.util.assets import file_sha256
from clusterctl.util.progress import LineReporter

KEYS: Final = "keys"
_TOOLS: Final = {"dnf": "dnf", "createrepo_c": "createrepo_c", "rpmkeys": "rpm"}
_SIGNED: Final = "signatures OK"


@dataclass(frozen=True, slots=True)
class _Dnf:
    """dnf with all of its state in one folder, for one distribution."""

    packer: RepositoryRequest

    @property
    def folder(self) -> Path:
        return self.packer.folder

    @property
    def packages(self) -> Path:
        """Where packages are kept, those of earlier bundles too."""
        return self.folder / "repository" / "Packages"

    def prepare(self, repositories: str) -> None:
        """Write its configuration; nothing counts as installed."""
        shutil.rmtree(self.folder / "root", ignore_errors=True)
        for name in ("root", "repos", "log", "repository/Packages"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "dnf.conf").write_text("[main]\n")
        (self.folder / "repos" / "bundle.repo").write_text(repositories)
        if self.packer.stream:
            what = f"choosing the stream of NVIDIA's driver for {self.packer.title}"
            self._run("module", "enable", f"nvidia-driver:{self.packer.stream}", what=what)

    def resolve(self, names: Sequence[str]) -> tuple[str, ...]:
        """The files of these packages and of all that they need."""
        what = f"finding what the packages of {self.packer.title} need"
        said = self._run("download", "--resolve", "--alldeps", "--url", *self._archs(), *names, what=what)
        files = {line.rpartition("/")[2] for line in said.split() if line.endswith(".rpm")}
        return tuple(sorted(files))

    def download(self, names: Sequence[str]) -> None:
        """What is there from before is kept."""
        what = f"downloading the packages of {self.packer.title}"
        words = ("--resolve", "--alldeps", f"--downloaddir={self.packages}", *self._archs())
        self._run("download", *words, *names, what=what)

    def _archs(self) -> tuple[str, ...]:
        return (f"--arch={self.packer.architecture}", "--arch=noarch")

    def _run(self, *words: str, what: str) -> str:
        settings = {
            "reposdir": self.folder / "repos",
            "cachedir": self.folder / "cache",
            "logdir": self.folder / "log",
            "gpgcheck": "1",
            "install_weak_deps": "0",
            "best": "1",
            "retries": "3",
        }
        argv = ["dnf", "--quiet", "--assumeyes", f"--config={self.folder / 'dnf.conf'}"]
        argv += [
            f"--installroot={self.folder / 'root'}",
            f"--releasever={self.packer.distribution.rpartition('-')[2]}",
        ]
        argv += [f"--setopt={key}={value}" for key, value in settings.items()]
        return run(
            [*argv, *words],
            what=what,
            fix="check that this machine reaches the repositories (--from names others) and has "
            "dnf-plugins-core, then run it again: what was downloaded is kept",
        )


def pack(packer: RepositoryRequest, names: Sequence[str], *, report: LineReporter) -> Repository:
    """The packages of these names with all that they need, as a repository for dnf.

    Raises:
        MachineError: dnf is missing, or a repository can't be reached, or a signature is not right.
        UsageError: no repository of this distribution is known, or the user's file of them is none.
    """
    for tool, package in _TOOLS.items():
        fix = f"install {package} and dnf-plugins-core here, or make this bundle on a machine of its family"
        need(tool, of=packer.title, fix=fix)
    repositories, urls = _repositories(packer)
    dnf = _Dnf(packer)
    report(f"{packer.title}: reading the repositories")
    dnf.prepare(repositories)
    keys = {
        f"{KEYS}/{number}.asc": download(url, what="a repository's key") for number, url in enumerate(urls)
    }
    files = dnf.resolve(names)
    report(f"{packer.title}: downloading {len(files)} packages")
    dnf.download(names)
    _check_signatures(dnf, keys.values(), files)
    return Repository({**_index(dnf, files), **keys}, tuple(_versions(dnf, files)))


def _repositories(packer: RepositoryRequest) -> tuple[str, tuple[str, ...]]:
    """A .repo file of the repositories, and where their keys are."""
    if packer.archive is not None:
        return own_repositories(packer.archive)
    archive = archive_of(packer.distribution)
    parts = [archive, *(archive[name] for name in packer.added)]
    text = "\n".join(
        f"[{name}]\nname={name}\nbaseurl={url}\ngpgcheck=1\ngpgkey={' '.join(part['keys'])}\n"
        for part in parts
        for name, url in part["repositories"].items()
    )
    return text, tuple(key for part in parts for key in part["keys"])


def own_repositories(path: Path) -> tuple[str, tuple[str, ...]]:
    """A .repo file of the user's, and where its keys are.

    Raises:
        UsageError: it is none, or names no key.
    """
    text = read_own(path)
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        keys = {key for name in parser.sections() for key in parser[name].get("gpgkey", "").split()}
    except configparser.Error as exc:
        raise UsageError(
            "the file of repositories is no .repo file",
            where=str(path),
            why=exc.message,
            fix="write it as in /etc/yum.repos.d",
        ) from exc
    if not keys:
        raise UsageError(
            "the file of repositories names no key",
            where=str(path),
            why="packages without a verifiable signature are not put into a bundle",
            fix="say gpgkey= for each repository",
        )
    return text, tuple(sorted(keys))


def _check_signatures(dnf: _Dnf, keys: Iterable[bytes], files: Sequence[str]) -> None:
    """Refuse a package that no key of its repositories has signed."""
    database = dnf.folder / "rpmdb"
    shutil.rmtree(database, ignore_errors=True)
    database.mkdir()
    rpmkeys = ["rpmkeys", f"--dbpath={database}"]
    fix = "see where it comes from; what is right is kept, so run it again after it is removed"
    for key in keys:
        place = dnf.folder / "key.asc"
        place.write_bytes(key)
        run([*rpmkeys, "--import", str(place)], what="reading a repository's key", fix="name its true key")
    paths = [str(dnf.packages / file) for file in files]
    said = run([*rpmkeys, "--checksig", *paths], what="checking the signatures of packages", fix=fix)
    unsigned = [line.partition(": ")[0] for line in said.splitlines() if not line.endswith(_SIGNED)]
    if unsigned or len(said.splitlines()) != len(files):
        raise MachineError("a package is not signed", where=", ".join(unsigned), fix=fix)


def _index(dnf: _Dnf, files: Sequence[str]) -> Mapping[str, Path | bytes]:
    """The repository: its index is made of the packages that are wanted now."""
    root = dnf.folder / "repository"
    shutil.rmtree(root / "repodata", ignore_errors=True)
    chosen = dnf.folder / "chosen"
    chosen.write_text("".join(f"Packages/{file}\n" for file in files))
    words = ["--quiet", "--no-database", "--revision=1", "--set-timestamp-to-revision", f"--pkglist={chosen}"]
    run(["createrepo_c", *words, str(root)], what="making the repository's index", fix="run it again")
    index = {f"repodata/{path.name}": path for path in (root / "repodata").iterdir()}
    return {**index, **{f"Packages/{file}": dnf.packages / file for file in files}}


def _versions(dnf: _Dnf, files: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for file in files:
        name, version, release = file.removesuffix(".rpm").rpartition(".")[0].rsplit("-", 2)
        yield name, f"{version}-{release}", file_sha256(dnf.packages / file)
