"""Packages of Rocky Linux and RHEL, with all that they need, by dnf with a root of its own.

Nothing counts as installed in that root. Each package's own signature is checked with the keys of its
repositories, which go into the bundle: the hosts check it once more when they install.
"""

from __future__ import annotations

import configparser
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Final

from clusterctl.errors import MachineError
from clusterctl.packages import repository
from clusterctl.packages.os_packages import nvidia_stream
from clusterctl.packages.repository import Repository, RepositoryRequest
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.assets import file_sha256
from clusterctl.util.progress import LineReporter

KEYS: Final = "keys"
_TOOLS: Final = {"dnf": "dnf", "createrepo_c": "createrepo_c", "rpmkeys": "rpm"}
_SIGNED: Final = "signatures OK"


def pack(packer: RepositoryRequest, names: Sequence[str], *, report: LineReporter) -> Repository:
    """The packages of these names with all that they need, as a repository for dnf.

    Raises:
        MachineError: dnf is missing, or a repository can't be reached, or a signature is not right.
        UsageError: no repository of this distribution is known, or the user's file of them is none.
    """
    title, folder = packer.title, packer.folder
    for tool, package in _TOOLS.items():
        fix = f"install {package} and dnf-plugins-core here, or make this bundle on a machine of its family"
        repository.need(tool, of=title, fix=fix)
    repositories, urls = _repositories(packer)
    report(f"{title}: reading the repositories")
    dnf = partial(_dnf, packer)
    _prepare(folder, repositories)
    if stream := nvidia_stream(packer.distribution, packer.software):
        what = f"choosing the stream of NVIDIA's driver for {title}"
        dnf("module", "enable", f"nvidia-driver:{stream}", what=what)
    keys = {
        f"{KEYS}/{number}.asc": repository.download(url, what="a repository's key")
        for number, url in enumerate(urls)
    }
    download = ("download", "--resolve", "--alldeps", f"--arch={ARCHITECTURE}", "--arch=noarch")
    said = dnf(*download, "--url", *names, what=f"finding what the packages of {title} need")
    files = sorted({line.rpartition("/")[2] for line in said.split() if line.endswith(".rpm")})
    report(f"{title}: downloading {len(files)} packages")
    packages = folder / "repository" / "Packages"  # those of earlier bundles too
    dnf(*download, f"--downloaddir={packages}", *names, what=f"downloading the packages of {title}")
    _check_signatures(folder, keys.values(), [packages / file for file in files])
    return Repository({**_index(folder, files), **keys}, tuple(_versions(packages, files)))


def _prepare(folder: Path, repositories: str) -> None:
    """Write dnf's configuration; nothing counts as installed."""
    shutil.rmtree(folder / "root", ignore_errors=True)
    for name in ("root", "repos", "log", "repository/Packages"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "dnf.conf").write_text("[main]\n")
    (folder / "repos" / "bundle.repo").write_text(repositories)


def _dnf(packer: RepositoryRequest, *words: str, what: str) -> str:
    """Run dnf with all of its state in one folder, for one distribution."""
    folder = packer.folder
    settings = {
        "reposdir": folder / "repos",
        "cachedir": folder / "cache",
        "logdir": folder / "log",
        "gpgcheck": "1",
        "install_weak_deps": "0",
        "best": "1",
        "retries": "3",
    }
    argv = ["dnf", "--quiet", "--assumeyes", f"--config={folder / 'dnf.conf'}"]
    argv += [f"--installroot={folder / 'root'}"]
    argv += [f"--releasever={packer.distribution.release.rpartition('-')[2]}"]
    argv += [f"--setopt={key}={value}" for key, value in settings.items()]
    return repository.run(
        [*argv, *words],
        what=what,
        fix="check that this machine reaches the repositories (--from names others) and has "
        "dnf-plugins-core, then run it again: what was downloaded is kept",
    )


def _repositories(packer: RepositoryRequest) -> tuple[str, tuple[str, ...]]:
    """A .repo file of the repositories, and where their keys are."""
    if packer.archive is not None:
        return own_repositories(packer.archive)
    text = "\n".join(
        f"[{name}]\nname={name}\nbaseurl={url}\ngpgcheck=1\ngpgkey={' '.join(part['keys'])}\n"
        for part in packer.sources
        for name, url in part["repositories"].items()
    )
    return text, tuple(key for part in packer.sources for key in part["keys"])


def own_repositories(path: Path) -> tuple[str, tuple[str, ...]]:
    """A .repo file of the user's, and where its keys are.

    Raises:
        UsageError: it is none, or names no key.
    """
    text = repository.read_own(path)
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        keys = {key for name in parser.sections() for key in parser[name].get("gpgkey", "").split()}
    except configparser.Error as exc:
        fix = "write it as in /etc/yum.repos.d"
        raise repository.not_repositories(path, "is no .repo file", exc.message, fix) from exc
    if not keys:
        why = "packages without a verifiable signature are not put into a bundle"
        raise repository.not_repositories(path, "names no key", why, "say gpgkey= for each repository")
    return text, tuple(sorted(keys))


def _check_signatures(folder: Path, keys: Iterable[bytes], paths: Sequence[Path]) -> None:
    """Refuse a package that no key of its repositories has signed."""
    database = folder / "rpmdb"
    shutil.rmtree(database, ignore_errors=True)
    database.mkdir()
    rpmkeys = ["rpmkeys", f"--dbpath={database}"]
    fix = "see where it comes from; what is right is kept, so run it again after it is removed"
    for key in keys:
        place = folder / "key.asc"
        place.write_bytes(key)
        repository.run(
            [*rpmkeys, "--import", str(place)], what="reading a repository's key", fix="name its true key"
        )
    said = repository.run(
        [*rpmkeys, "--checksig", *map(str, paths)], what="checking the signatures of packages", fix=fix
    )
    unsigned = [line.partition(": ")[0] for line in said.splitlines() if not line.endswith(_SIGNED)]
    if unsigned or len(said.splitlines()) != len(paths):
        raise MachineError("a package is not signed", where=", ".join(unsigned), fix=fix)


def _index(folder: Path, files: Sequence[str]) -> Mapping[str, Path | bytes]:
    """The repository: its index is made of the packages that are wanted now."""
    root, chosen = folder / "repository", folder / "chosen"
    shutil.rmtree(root / "repodata", ignore_errors=True)
    chosen.write_text("".join(f"Packages/{file}\n" for file in files))
    words = ["--quiet", "--no-database", "--revision=1", "--set-timestamp-to-revision", f"--pkglist={chosen}"]
    repository.run(
        ["createrepo_c", *words, str(root)], what="making the repository's index", fix="run it again"
    )
    index = {f"repodata/{path.name}": path for path in (root / "repodata").iterdir()}
    return {**index, **{f"Packages/{file}": root / "Packages" / file for file in files}}


def _versions(packages: Path, files: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for file in files:
        name, version, release = file.removesuffix(".rpm").rpartition(".")[0].rsplit("-", 2)
        yield name, f"{version}-{release}", file_sha256(packages / file)
