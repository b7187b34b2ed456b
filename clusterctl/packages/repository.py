"""Download of a distribution's OS packages, with all dependencies, as a repository for its hosts.

For Debian and Ubuntu, apt resolves and downloads the packages, and checks signatures and hashes;
apt-ftparchive writes the index. For Red Hat's family, dnf and createrepo_c do this, and rpmkeys
checks each signature with the keys of the repository, which go into the bundle, because hosts check
the signatures, too. apt and dnf use an empty root, so that they treat no package as installed, and
download all dependencies.
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
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.software import Software
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util import process
from clusterctl.util.assets import file_sha256, read_table
from clusterctl.util.numbers import counted
from clusterctl.util.progress import LineReporter

_DATA: Final = Path(__file__).with_name("data")
# Values of dnf's option `priority`: packages of the lower value win, even if they are older. 99:
# the default.
_FIRST: Final = 10
_LAST: Final = 99
_ALWAYS: Final = {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


@dataclass(frozen=True, slots=True)
class RepositoryRequest:
    """The input for the creation of a repository. ``report`` is called with a line about each step.

    folder: cache folder for downloads. upstream: packages that are in no repository.
    archive: file with the repositories to use. None: the distribution's public repositories.
    software: adds the repositories of Slurm, OpenHPC and NVIDIA, if the spec needs them.
    """

    distribution: Distribution
    folder: Path
    report: LineReporter
    archive: Path | None = None
    software: Software = PLAIN
    upstream: tuple[Upstream, ...] = ()

    def read_sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the repositories of archives.toml, and that of Slurm that the spec names.

        Raise a UsageError if archives.toml lacks the distribution.
        """
        archives = read_table(_DATA / "archives.toml", dict[str, dict[str, Any]])
        if (archive := archives.get(self.distribution.release)) is None:
            raise UsageError(
                f"bundles can't be created for {self.distribution.release}",
                code="distribution-not-bundled",
                fix=f"bundles can be created for {', '.join(archives)}",
            )
        slurm = self.software.slurm
        added = {"openhpc": slurm.origin == "openhpc", "nvidia": self.software.nvidia.installs}
        sources = [
            archive[name] for name, is_asked in added.items() if is_asked and name in archive
        ]
        if own := slurm.repository:
            sources.append(
                {"keys": [own.key], "repositories": {"slurm": own.url}, "priority": _FIRST}
            )
        return (archive, *sources)


_DEBS: Final = {"x86_64": "amd64"}  # by ARCHITECTURE
_FILE: Final = re.compile(r"^'([^']+)' (\S+\.deb) \d+ (?:SHA256:(\w+))?", re.MULTILINE)
_TOOLS: Final = {
    "Debian": {
        "apt-get": "create this bundle on a machine with Debian or Ubuntu",
        "apt-ftparchive": "install the package apt-utils here",
    },
    "RedHat": {
        "dnf": "install the packages dnf and dnf-plugins-core here",
        "createrepo_c": "install the package createrepo_c here (Debian and Ubuntu: createrepo-c)",
        "rpmkeys": "install the package rpm here",
    },
}


def check(distribution: Distribution, archive: Path | None) -> None:
    """Check that this machine has the tools for a distribution, and that ``archive`` (if given) is
    valid.

    Raise a MachineError if a tool is missing, or a UsageError if ``archive`` is not a list of
    repositories.
    """
    if archive:
        _read_user_file(archive)
    for tool, fix in _TOOLS[distribution.family].items():
        if shutil.which(tool) is None:
            message = (
                f"packages of {distribution.release} can't be downloaded, because {tool} is not "
                "installed"
            )
            raise MachineError(message, code="tool-missing", fix=fix)
    if archive:
        {"Debian": _check_sources, "RedHat": _user_repositories}[distribution.family](archive)


def pack(request: RepositoryRequest, names: Sequence[str]) -> Path:
    """Download these packages with all dependencies. Return the folder of the repository.

    Call ``check`` first. The next call for the same distribution replaces the folder. Raise a
    MachineError if a keyring is missing, a download fails or a signature is invalid, or a
    UsageError if the distribution's repositories are unknown.
    """
    return {"Debian": _pack_apt, "RedHat": _pack_dnf}[request.distribution.family](request, names)


def _pack_apt(request: RepositoryRequest, names: Sequence[str]) -> Path:
    release = request.distribution.release
    folder = request.folder
    apt = partial(_apt, _apt_options(request))
    request.report(f"{release}: reading the package lists")
    apt("update", task=f"reading the package lists of {release}")
    install = (
        "install",
        "--quiet=2",
        *names,
        *(_upstream(package, folder) for package in request.upstream),
    )
    # With its cache, apt would list only the packages that are not downloaded yet.
    no_cache = f"Dir::Cache::archives={folder / 'none'}"
    uris = apt(
        *install, "--print-uris", "-o", no_cache, task=f"resolving the packages of {release}"
    )
    paths = {
        file: _cached_path(file, uri, folder, sha256) for uri, file, sha256 in _FILE.findall(uris)
    }
    request.report(f"{release}: downloading {counted(len(paths), 'package')}")
    apt(*install, "--download-only", task=f"downloading the packages of {release}")
    root = _repository(folder, "pool", paths)
    index = _run(
        ["apt-ftparchive", "packages", "pool"], task="creating the repository's index", cwd=root
    )
    (root / "Packages").write_text(index)
    return root


def _repository(folder: Path, inner: str, paths: Mapping[str, Path]) -> Path:
    """Recreate the folder folder/repository/inner with links to packages. paths: link's name ->
    package.
    """
    root = folder / "repository"
    shutil.rmtree(root, ignore_errors=True)
    (root / inner).mkdir(parents=True)
    for file, path in paths.items():
        (root / inner / file).symlink_to(path)
    return root


def _apt_options(request: RepositoryRequest) -> list[str]:
    folder = request.folder
    architecture = _DEBS[ARCHITECTURE]
    for name in ("state/lists/partial", "cache/archives/partial", "none/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state/status").write_text("")
    if (sources := request.archive) is None:
        sources = folder / "archive.list"
        sources.write_text("".join(_apt_lines(request)))
    preferences = folder / "preferences"
    preferences.write_text(nvidia_preference(request.distribution, request.software))
    options = {
        "Dir::State": folder / "state",
        "Dir::Etc::Preferences": preferences,
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": sources.absolute(),
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
    }
    return [
        f"--config-file={_DATA / 'apt.conf'}",
        *(f"--option={key}={value}" for key, value in options.items()),
    ]


def _apt(options: Sequence[str], *words: str, task: str) -> str:
    return _run(
        ["apt-get", "--assume-yes", *options, *words],
        task=task,
        fix="check that this machine reaches the repository (apt's proxy settings apply; --from "
        "selects another), then run the command again; finished downloads are kept",
    )


def _cached_path(file: str, uri: str, folder: Path, sha256: str) -> Path:
    """Return a package's path in apt's cache. Delete a damaged file there, as apt checks only its
    size.
    """
    if uri.startswith("file:"):
        return Path(unquote(uri.removeprefix("file:")))
    path = folder / "cache/archives" / file
    if path.is_file() and file_sha256(path) != sha256:
        path.unlink()
    return path


def _upstream(package: Upstream, folder: Path) -> str:
    path = folder / package.file
    if not path.is_file() or file_sha256(path) != package.sha256:
        path.write_bytes(_download(package.url, item=f"the package {path.name}"))
        if file_sha256(path) != package.sha256:
            message = f"the downloaded package {path.name} does not have the expected SHA-256"
            fix = "check that no proxy changes downloads, then run the command again"
            raise MachineError(message, code="package-changed", where=package.url, fix=fix)
    return str(path)


def _check_sources(path: Path) -> None:
    options = (f"Dir::Etc::SourceList={path.absolute()}", "Dir::Etc::SourceParts=/dev/null")
    result = _run_process(
        ["apt-get", "indextargets", *(f"--option={option}" for option in options)]
    )
    if result.rc != 0 or not result.stdout:
        reason = result.stderr.partition("\n")[0] or "the file names no repository"
        fix = "use the format of /etc/apt/sources.list.d; a .sources file needs the deb822 format"
        raise _not_repositories(path, "is not a list of apt sources", reason, fix)


def _apt_lines(request: RepositoryRequest) -> Iterator[str]:
    for archive in request.read_sources():
        if not Path(archive["keyring"]).is_file():
            message = (
                f"the signatures of {request.distribution.release} can't be checked on this machine"
            )
            reason = "the keyring is missing"
            fix = f"install the package {archive['keyring_package']} on this machine"
            raise MachineError(
                message, code="keyring-missing", where=archive["keyring"], why=reason, fix=fix
            )
        for source in archive["sources"]:
            keyring = source.get("keyring", archive["keyring"])
            for suite in source["suites"]:
                words = [f"[signed-by={keyring}]", source["uri"], suite, *source["components"]]
                yield f"deb {' '.join(words)}\n"


def _pack_dnf(request: RepositoryRequest, names: Sequence[str]) -> Path:
    release = request.distribution.release
    folder = request.folder
    repositories, urls = _repositories(request)
    request.report(f"{release}: reading the repositories")
    dnf = partial(_dnf, request)
    shutil.rmtree(folder / "root", ignore_errors=True)
    for name in ("root", "repos", "log", "packages"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "repos" / "bundle.repo").write_text(repositories)
    if stream := nvidia_stream(request.distribution, request.software):
        task = f"choosing the stream of NVIDIA's driver for {release}"
        dnf("module", "enable", f"nvidia-driver:{stream}", task=task)
    keys = [_download(url, item="a repository's key") for url in urls]
    download = ("download", "--resolve", "--alldeps", f"--arch={ARCHITECTURE}", "--arch=noarch")
    urls_text = dnf(*download, "--url", *names, task=f"resolving the packages of {release}")
    files = {line.rpartition("/")[2] for line in urls_text.split() if line.endswith(".rpm")}
    request.report(f"{release}: downloading {counted(len(files), 'package')}")
    downloads = folder / "packages"
    dnf(
        *download,
        f"--downloaddir={downloads}",
        *names,
        task=f"downloading the packages of {release}",
    )
    root = _repository(folder, "Packages", {file: downloads / file for file in files})
    (root / "keys").mkdir()
    for number, key in enumerate(keys):
        (root / f"keys/{number}.asc").write_bytes(key)
    _check_signatures(folder, root)
    words = ["--quiet", "--no-database", "--revision=1", "--set-timestamp-to-revision"]
    _run(["createrepo_c", *words, str(root)], task="creating the repository's index")
    return root


def _dnf(request: RepositoryRequest, *words: str, task: str) -> str:
    folder = request.folder
    argv = ["dnf", "--quiet", "--assumeyes", f"--config={_DATA / 'dnf.conf'}"]
    argv += [f"--installroot={folder / 'root'}"]
    argv += [f"--releasever={request.distribution.release.rpartition('-')[2]}"]
    argv += [f"--setopt={name}dir={folder / name}" for name in ("repos", "cache", "log")]
    return _run(
        [*argv, *words],
        task=task,
        fix="check that this machine reaches the repositories (--from selects others) and has "
        "dnf-plugins-core, then run the command again; finished downloads are kept",
    )


def _repositories(request: RepositoryRequest) -> tuple[str, tuple[str, ...]]:
    if request.archive is not None:
        return _user_repositories(request.archive)
    sources = request.read_sources()
    text = "\n".join(
        f"[{name}]\nname={name}\nbaseurl={url}\ngpgcheck=1\ngpgkey={' '.join(source['keys'])}\n"
        f"priority={source.get('priority', _LAST)}\n"
        for source in sources
        for name, url in source["repositories"].items()
    )
    return text, tuple(key for source in sources for key in source["keys"])


def _user_repositories(path: Path) -> tuple[str, tuple[str, ...]]:
    """Return a .repo file's text and its gpgkey URLs. Raise a UsageError if the file has no
    gpgkey.
    """
    text = _read_user_file(path)
    parser = configparser.ConfigParser(interpolation=None)
    try:
        parser.read_string(text)
        keys = {key for name in parser.sections() for key in parser[name].get("gpgkey", "").split()}
    except configparser.Error as exc:
        fix = "use the format of /etc/yum.repos.d"
        raise _not_repositories(path, "is not a .repo file", exc.message, fix) from exc
    if not keys:
        reason = "a bundle contains only packages with a signature that can be checked"
        raise _not_repositories(
            path, "does not set gpgkey", reason, "set gpgkey= for each repository"
        )
    return text, tuple(sorted(keys))


def _check_signatures(folder: Path, root: Path) -> None:
    database = folder / "rpmdb"
    shutil.rmtree(database, ignore_errors=True)
    database.mkdir()
    rpmkeys = ["rpmkeys", f"--dbpath={database}", "--define=_pkgverify_level signature"]
    keys, packages = (
        sorted(str(path.resolve()) for path in (root / name).iterdir())
        for name in ("keys", "Packages")
    )
    _run(
        [*rpmkeys, "--import", *keys],
        task="reading the keys of repositories",
        fix="correct gpgkey=",
    )
    result = _run_process([*rpmkeys, "--checksig", *packages])
    if result.rc != 0:
        rejected = "; ".join(line for line in result.stdout.splitlines() if line.endswith("NOT OK"))
        fix = (
            f"check where the package comes from, delete it from {folder / 'packages'}, run the "
            "command again"
        )
        message = "checking the signatures of packages failed"
        reason = rejected or result.reason
        raise MachineError(message, code="package-signature", where="rpmkeys", why=reason, fix=fix)


def _read_user_file(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        reason = getattr(exc, "strerror", None) or str(exc)
        fix = "pass a file in the format of /etc/apt/sources.list.d or /etc/yum.repos.d"
        raise _not_repositories(path, "can't be read", reason, fix) from exc


def _not_repositories(path: Path, problem: str, reason: str, fix: str) -> UsageError:
    message = "the repository list can't be used"
    cause = f"it {problem}: {reason}"
    return UsageError(message, code="bad-repositories", where=str(path), why=cause, fix=fix)


def _run(
    argv: Sequence[str], *, task: str, fix: str = "run the command again", cwd: Path | None = None
) -> str:
    result = _run_process(argv, cwd)
    if result.rc != 0:
        message = f"{task} failed"
        raise MachineError(
            message, code="package-tool-failed", where=argv[0], why=result.reason, fix=fix
        )
    return result.stdout


def _run_process(argv: Sequence[str], cwd: Path | None = None) -> process.Result:
    return process.run(argv, env={**os.environ, **_ALWAYS}, cwd=cwd)


def _download(url: str, *, item: str) -> bytes:
    try:
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).read_bytes()
        answer = requests.get(url, timeout=60)
        answer.raise_for_status()
    except OSError as exc:
        # All exceptions of requests are OSErrors.
        fix = (
            "check that this machine reaches the URL, then run the command again; downloads are "
            "kept"
        )
        message = f"{item} can't be downloaded"
        raise MachineError(
            message, code="download-failed", where=url, why=str(exc), fix=fix
        ) from exc
    return answer.content
