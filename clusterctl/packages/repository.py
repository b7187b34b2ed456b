"""Fetch the OS packages of a distribution, with all that they need, as a repository for its hosts.

For Debian's family, apt resolves and downloads them, checks the archive's signature with its keyring and each
package with the signed index, and apt-ftparchive writes the index. For Red Hat's family, dnf and createrepo_c
do that work. Each rpm's own signature is checked with the keys of its repositories, which go into the bundle,
because hosts check it again when they install. Both work in a folder of their own, in which no package counts
as installed.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import requests

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages.os_packages import PLAIN, Upstream, nvidia_preference, nvidia_stream
from clusterctl.spec.common import Software
from clusterctl.spec.distributions import Distribution
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util import process
from clusterctl.util.assets import file_sha256, table
from clusterctl.util.progress import LineReporter

_DATA: Final = Path(__file__).with_name("data")
_ALWAYS: Final = {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


@dataclass(frozen=True, slots=True)
class RepositoryRequest:
    """What to pack for, and the folder that keeps downloads.

    report: called with a line about each step. ``archive`` names the repositories to take packages from,
    instead of the distribution's public ones, to which ``software`` may add OpenHPC's and NVIDIA's.
    ``upstream``: packages that no repository has.
    """

    distribution: Distribution
    folder: Path
    report: LineReporter
    archive: Path | None = None
    software: Software = PLAIN
    upstream: tuple[Upstream, ...] = ()

    @property
    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Where packages come from, as the table says it: the distribution's, and what the software adds."""
        known = table(_DATA / "archives.toml", dict[str, dict[str, Any]])
        if (archive := known.get(self.distribution.release)) is None:
            raise UsageError(
                f"no archive of packages is known for {self.distribution.release}",
                code="distribution-not-bundled",
                fix=f"bundles can be made for {', '.join(known)}",
            )
        added = {"openhpc": self.software.slurm == "openhpc", "nvidia": self.software.nvidia.installs}
        return (archive, *(archive[name] for name, is_asked in added.items() if is_asked and name in archive))


_DEBS: Final = {"x86_64": "amd64"}  # by ARCHITECTURE
_FILE: Final = re.compile(r"^'([^']+)' (\S+\.deb) \d+ (?:SHA256:(\w+))?", re.MULTILINE)
_TOOLS: Final = {
    "Debian": {
        "apt-get": "make this bundle on a machine with Debian or Ubuntu",
        "apt-ftparchive": "install the package apt-utils here",
    },
    "RedHat": {
        "dnf": "install the packages dnf and dnf-plugins-core here",
        "createrepo_c": "install the package createrepo_c here (Debian and Ubuntu: createrepo-c)",
        "rpmkeys": "install the package rpm here",
    },
}


def check(distribution: Distribution, archive: Path | None) -> None:
    """Check that this machine has the tools for a distribution, and that these read the user's archives.

    Raises:
        MachineError: a tool is missing.
        UsageError: the file is not a list of archives.
    """
    if archive:
        _read_own(archive)
    for tool, fix in _TOOLS[distribution.family].items():
        if shutil.which(tool) is None:
            what = f"packages of {distribution.release} can't be fetched here: there is no {tool}"
            raise MachineError(what, code="tool-missing", fix=fix)
    if archive:
        {"Debian": _check_sources, "RedHat": _own_repositories}[distribution.family](archive)


def pack(packer: RepositoryRequest, names: Sequence[str]) -> Path:
    """Fetch the packages of these names with all that they need; return the folder of the repository.

    ``check`` comes first. The folder is good until the next call for the distribution.

    Raises:
        MachineError: a keyring is missing, an archive can't be reached, or a signature is not right.
        UsageError: no archive of this distribution is known.
    """
    return {"Debian": _pack_apt, "RedHat": _pack_dnf}[packer.distribution.family](packer, names)


def _pack_apt(packer: RepositoryRequest, names: Sequence[str]) -> Path:
    release, folder = packer.distribution.release, packer.folder
    apt = partial(_apt, _apt_options(packer))
    packer.report(f"{release}: reading the package lists")
    apt("update", what=f"reading the package lists of {release}")
    install = ("install", "--quiet=2", *names, *(_fetched(one, folder) for one in packer.upstream))
    nothing = f"Dir::Cache::archives={folder / 'none'}"  # else it names only what is yet to come
    said = apt(*install, "--print-uris", "-o", nothing, what=f"finding what the packages of {release} need")
    paths = {file: _place(file, uri, folder, sha256) for uri, file, sha256 in _FILE.findall(said)}
    packer.report(f"{release}: downloading {len(paths)} packages")
    apt(*install, "--download-only", what=f"downloading the packages of {release}")
    root = _repository(folder, "pool", paths)
    index = _run(["apt-ftparchive", "packages", "pool"], what="making the repository's index", cwd=root)
    (root / "Packages").write_text(index)
    return root


def _repository(folder: Path, inner: str, paths: Mapping[str, Path]) -> Path:
    """Make a folder with links to these packages alone: the downloads of earlier bundles lie beside them."""
    root = folder / "repository"
    shutil.rmtree(root, ignore_errors=True)
    (root / inner).mkdir(parents=True)
    for file, path in paths.items():
        (root / inner / file).symlink_to(path)
    return root


def _apt_options(packer: RepositoryRequest) -> list[str]:
    """What makes apt work for one distribution, with all of its state in one folder."""
    folder, architecture = packer.folder, _DEBS[ARCHITECTURE]
    for name in ("state/lists/partial", "cache/archives/partial", "none/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state/status").write_text("")
    if (sources := packer.archive) is None:
        sources = folder / "archive.list"
        sources.write_text("".join(_apt_lines(packer)))
    preferences = folder / "preferences"
    preferences.write_text(nvidia_preference(packer.distribution, packer.software))
    own = {
        "Dir::State": folder / "state",
        "Dir::Etc::Preferences": preferences,
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": sources.absolute(),
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
    }
    return [f"--config-file={_DATA / 'apt.conf'}", *(f"--option={key}={value}" for key, value in own.items())]


def _apt(options: Sequence[str], *words: str, what: str) -> str:
    return _run(
        ["apt-get", "--assume-yes", *options, *words],
        what=what,
        fix="check that this machine reaches the archive (apt's own settings for a proxy apply; --from "
        "names another), then run it again: what was downloaded is kept",
    )


def _place(file: str, uri: str, folder: Path, sha256: str) -> Path:
    """Return the path of a package, and remove the package if it is damaged in apt's cache.

    apt checks what it downloads. In its cache it compares only sizes, and from `file:` it copies nothing.
    """
    if uri.startswith("file:"):
        return Path(unquote(uri.removeprefix("file:")))
    path = folder / "cache/archives" / file
    if path.is_file() and file_sha256(path) != sha256:
        path.unlink()
    return path


def _fetched(one: Upstream, folder: Path) -> str:
    """Return the path of a package that its makers release, downloaded if the cache does not have it."""
    path = folder / one.file
    if not path.is_file() or file_sha256(path) != one.sha256:
        path.write_bytes(_download(one.url, what=f"the package {path.name}"))
        if file_sha256(path) != one.sha256:
            what = f"the package {path.name} has another SHA-256 than its makers gave"
            raise MachineError(what, code="package-changed", where=one.url)
    return str(path)


def _check_sources(path: Path) -> None:
    """Check that apt can read a list of archives of the user's.

    Raises:
        UsageError: it can't.
    """
    options = (f"Dir::Etc::SourceList={path.absolute()}", "Dir::Etc::SourceParts=/dev/null")
    done = _done(["apt-get", "indextargets", *(f"--option={one}" for one in options)])
    if done.rc != 0 or not done.stdout:
        why = done.stderr.partition("\n")[0] or "it names none"
        fix = "write it as in /etc/apt/sources.list.d"
        raise _not_repositories(
            path, "is not a list of apt sources", why, f"{fix}; a .sources file in that form"
        )


def _apt_lines(packer: RepositoryRequest) -> Iterator[str]:
    """The archives of the distribution, as apt reads them."""
    for archive in packer.sources:
        if not Path(archive["keyring"]).is_file():
            what = f"the signatures of {packer.distribution.release} can't be checked here"
            why = "that keyring is missing"
            fix = f"install the package {archive['keyring_package']}"
            raise MachineError(what, code="keyring-missing", where=archive["keyring"], why=why, fix=fix)
        for source in archive["sources"]:
            keyring = source.get("keyring", archive["keyring"])
            for suite in source["suites"]:
                words = [f"[signed-by={keyring}]", source["uri"], suite, *source["components"]]
                yield f"deb {' '.join(words)}\n"


def _pack_dnf(packer: RepositoryRequest, names: Sequence[str]) -> Path:
    release, folder = packer.distribution.release, packer.folder
    repositories, urls = _repositories(packer)
    packer.report(f"{release}: reading the repositories")
    dnf = partial(_dnf, packer)
    shutil.rmtree(folder / "root", ignore_errors=True)
    for name in ("root", "repos", "log", "packages"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "repos" / "bundle.repo").write_text(repositories)
    if stream := nvidia_stream(packer.distribution, packer.software):
        what = f"choosing the stream of NVIDIA's driver for {release}"
        dnf("module", "enable", f"nvidia-driver:{stream}", what=what)
    keys = [_download(url, what="a repository's key") for url in urls]
    download = ("download", "--resolve", "--alldeps", f"--arch={ARCHITECTURE}", "--arch=noarch")
    said = dnf(*download, "--url", *names, what=f"finding what the packages of {release} need")
    files = {line.rpartition("/")[2] for line in said.split() if line.endswith(".rpm")}
    packer.report(f"{release}: downloading {len(files)} packages")
    kept = folder / "packages"
    dnf(*download, f"--downloaddir={kept}", *names, what=f"downloading the packages of {release}")
    root = _repository(folder, "Packages", {file: kept / file for file in files})
    (root / "keys").mkdir()
    for number, key in enumerate(keys):
        (root / f"keys/{number}.asc").write_bytes(key)
    _check_signatures(folder, root)
    words = ["--quiet", "--no-database", "--revision=1", "--set-timestamp-to-revision"]
    _run(["createrepo_c", *words, str(root)], what="making the repository's index")
    return root


def _dnf(packer: RepositoryRequest, *words: str, what: str) -> str:
    """Run dnf with all of its state in one folder, for one distribution."""
    folder = packer.folder
    argv = ["dnf", "--quiet", "--assumeyes", f"--config={_DATA / 'dnf.conf'}"]
    argv += [f"--installroot={folder / 'root'}"]
    argv += [f"--releasever={packer.distribution.release.rpartition('-')[2]}"]
    argv += [f"--setopt={name}dir={folder / name}" for name in ("repos", "cache", "log")]
    return _run(
        [*argv, *words],
        what=what,
        fix="check that this machine reaches the repositories (--from names others) and has "
        "dnf-plugins-core, then run it again: what was downloaded is kept",
    )


def _repositories(packer: RepositoryRequest) -> tuple[str, tuple[str, ...]]:
    if packer.archive is not None:
        return _own_repositories(packer.archive)
    text = "\n".join(
        f"[{name}]\nname={name}\nbaseurl={url}\ngpgcheck=1\ngpgkey={' '.join(part['keys'])}\n"
        for part in packer.sources
        for name, url in part["repositories"].items()
    )
    return text, tuple(key for part in packer.sources for key in part["keys"])


def _own_repositories(path: Path) -> tuple[str, tuple[str, ...]]:
    """A .repo file of the user's, and where its keys are.

    Raises:
        UsageError: it is none, or names no key.
    """
    text = _read_own(path)
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        keys = {key for name in parser.sections() for key in parser[name].get("gpgkey", "").split()}
    except configparser.Error as exc:
        fix = "write it as in /etc/yum.repos.d"
        raise _not_repositories(path, "is no .repo file", exc.message, fix) from exc
    if not keys:
        why = "packages without a verifiable signature are not put into a bundle"
        raise _not_repositories(path, "names no key", why, "say gpgkey= for each repository")
    return text, tuple(sorted(keys))


def _check_signatures(folder: Path, root: Path) -> None:
    """Refuse a package of a repository that none of its keys has signed."""
    database = folder / "rpmdb"
    shutil.rmtree(database, ignore_errors=True)
    database.mkdir()
    rpmkeys = ["rpmkeys", f"--dbpath={database}", "--define=_pkgverify_level signature"]
    keys, packages = (
        sorted(str(path.resolve()) for path in (root / name).iterdir()) for name in ("keys", "Packages")
    )
    _run([*rpmkeys, "--import", *keys], what="reading the keys of repositories", fix="name the true keys")
    done = _done([*rpmkeys, "--checksig", *packages])
    if done.rc != 0:
        wrong = "; ".join(line for line in done.stdout.splitlines() if line.endswith("NOT OK"))
        fix = "see where the package comes from; what is right is kept, so run it again after it is removed"
        what = "checking the signatures of packages failed"
        why = wrong or done.reason
        raise MachineError(what, code="package-signature", where="rpmkeys", why=why, fix=fix)


def _read_own(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        fix = "name a file as in /etc/apt/sources.list.d or /etc/yum.repos.d"
        raise _not_repositories(path, "can't be read", why, fix) from exc


def _not_repositories(path: Path, what: str, why: str, fix: str) -> UsageError:
    said = f"the file of repositories {what}"
    return UsageError(said, code="bad-repositories", where=str(path), why=why, fix=fix)


def _run(argv: Sequence[str], *, what: str, fix: str = "run it again", cwd: Path | None = None) -> str:
    done = _done(argv, cwd)
    if done.rc != 0:
        said = f"{what} failed"
        raise MachineError(said, code="package-tool-failed", where=argv[0], why=done.reason, fix=fix)
    return done.stdout


def _done(argv: Sequence[str], cwd: Path | None = None) -> process.Result:
    return process.run(argv, env={**os.environ, **_ALWAYS}, cwd=cwd)


def _download(url: str, *, what: str) -> bytes:
    """The content at a URL; `file:` is of this machine."""
    try:
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).read_bytes()
        answer = requests.get(url, timeout=60)
        answer.raise_for_status()
    except OSError as exc:  # the parent of all that requests raises
        fix = "check that this machine reaches it, then run it again: what was downloaded is kept"
        said = f"{what} can't be had"
        raise MachineError(said, code="download-failed", where=url, why=str(exc), fix=fix) from exc
    return answer.content
