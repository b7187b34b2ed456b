"""Download of a distribution's OS packages, with all dependencies, as a repository for its hosts.

For Debian and Ubuntu, apt resolves and downloads the packages, and checks signatures and hashes;
apt-ftparchive writes the index. For Red Hat's family, dnf and createrepo_c do this, and rpmkeys
checks the signatures with the keys of the repositories, as the hosts do again. apt and dnf use an
empty root, so that they treat no package as installed, and download all dependencies.
"""

from __future__ import annotations

import configparser
import os
import re
import shutil
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

import requests

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages.os_packages import (
    INDEXES,
    PLAIN,
    Upstream,
    nvidia_preference,
    nvidia_stream,
)
from clusterctl.spec.distributions import Distribution
from clusterctl.spec.software import Software
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.workspace import write_atomic
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
_DEBS: Final = {"x86_64": "amd64"}  # by ARCHITECTURE
_FILE: Final = re.compile(r"^'([^']+)' (\S+\.deb) \d+ (?:SHA256:(\w+))?", re.MULTILINE)
# Keys of the repositories, beside their packages.
KEYS: Final = "keys.asc"
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
_AGAIN: Final = "then run the command again; downloaded packages are kept"


@dataclass(frozen=True, slots=True)
class RepositoryRequest:
    """The input for the creation of a repository. ``report`` is called with a line about each step.

    folder: the repository, as an absolute path. upstream: packages that are in no repository.
    archive: absolute path of a file with the repositories to use. None: the distribution's public
        repositories.
    software: adds the repositories of Slurm, OpenHPC and NVIDIA, if the spec needs them.
    """

    distribution: Distribution
    folder: Path
    report: LineReporter
    archive: Path | None = None
    software: Software = PLAIN
    upstream: tuple[Upstream, ...] = ()

    @property
    def release(self) -> str:
        return self.distribution.release

    def read_sources(self) -> tuple[Mapping[str, Any], ...]:
        """Return the repositories of archives.toml, and that of Slurm that the spec names.

        Raise a UsageError if archives.toml lacks the distribution.
        """
        archives = read_table(_DATA / "archives.toml", dict[str, dict[str, Any]])
        if (archive := archives.get(self.release)) is None:
            raise UsageError(
                f"bundles can't be created for {self.release}",
                code="internal",
                about="bundle",
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


def check(request: RepositoryRequest) -> None:
    """Check that this machine has the tools for a distribution, and that its repositories are known.

    Raise a MachineError if a tool is missing, or a UsageError if the repositories are unknown or the
    file of the user's can't be used.
    """
    family = request.distribution.family
    if request.archive is None:
        request.read_sources()
    elif family == "Debian":
        _read_user_file(request.archive)
    else:
        _user_repositories(request.archive)
    for tool, fix in _TOOLS[family].items():
        if shutil.which(tool) is None:
            message = f"packages of {request.release} can't be downloaded, because {tool} is not installed"
            raise MachineError(message, code="tool-missing", fix=fix)


def pack(request: RepositoryRequest, names: Sequence[str], scratch: Path) -> int:
    """Download these packages with all dependencies to the repository. Return their number.

    Call ``check`` first. Packages that are there are kept if they are still needed; others are removed
    once the new index is there, so that hosts can use the old one until then. scratch: a folder for
    lists and settings. Raise a MachineError if a download fails or a signature is invalid.
    """
    request.report(f"{request.release}: reading the repositories")
    return {"Debian": _pack_apt, "RedHat": _pack_dnf}[request.distribution.family](
        request, names, scratch
    )


def keep_only(folder: Path, names: Collection[str]) -> None:
    """Remove everything else from a folder."""
    for path in folder.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name not in names:
            path.unlink()


def _pack_apt(request: RepositoryRequest, names: Sequence[str], scratch: Path) -> int:
    release = request.release
    pool = request.folder / "pool"
    apt = partial(_apt, _apt_options(request, scratch, pool))
    apt("update", task=f"reading the package lists of {release}")
    upstream = [_upstream(package, scratch) for package in request.upstream]
    install = ("install", "--quiet=2", *names, *upstream)
    # With its cache, apt would list only the packages that are not downloaded yet.
    no_cache = f"Dir::Cache::archives={scratch / 'none'}"
    uris = apt(
        *install, "--print-uris", "-o", no_cache, task=f"resolving the packages of {release}"
    )
    packages = {file: (uri, sha256) for uri, file, sha256 in _FILE.findall(uris)}
    # Of a package that it has downloaded before, apt checks only the size.
    for file, (_, sha256) in packages.items():
        if (path := pool / file).is_file() and file_sha256(path) != sha256:
            path.unlink()
    request.report(f"{release}: downloading {counted(len(packages), 'package')}")
    apt(*install, "--download-only", task=f"downloading the packages of {release}")
    for file, (uri, _) in packages.items():
        if uri.startswith("file:"):
            shutil.copy(unquote(uri.removeprefix("file:")), pool / file)
    needed = scratch / "needed" / pool.name
    needed.mkdir(parents=True)
    for file in packages:
        (needed / file).symlink_to(pool / file)
    argv = ["apt-ftparchive", "packages", needed.name]
    index = _run(argv, task="creating the repository's index", cwd=needed.parent)
    write_atomic(request.folder / INDEXES["Debian"], index, mode=0o644)
    keep_only(pool, packages)
    return len(packages)


def _apt_options(request: RepositoryRequest, scratch: Path, pool: Path) -> list[str]:
    architecture = _DEBS[ARCHITECTURE]
    for folder in (scratch / "state/lists", scratch / "none", pool):
        (folder / "partial").mkdir(parents=True, exist_ok=True)
    (scratch / "state/status").write_text("")
    if (sources := request.archive) is None:
        sources = scratch / "archive.list"
        sources.write_text("".join(_apt_lines(request)))
    preferences = scratch / "preferences"
    preferences.write_text(nvidia_preference(request.distribution, request.software))
    options = {
        "Dir::State": scratch / "state",
        "Dir::Etc::Preferences": preferences,
        "Dir::Cache": scratch,
        "Dir::Cache::archives": pool,
        "Dir::Etc::SourceList": sources,
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
        f"selects another) and has the keyring of its signatures, {_AGAIN}",
    )


def _upstream(package: Upstream, folder: Path) -> str:
    path = folder / package.file
    path.write_bytes(_download(package.url, item=f"the package {path.name}"))
    if file_sha256(path) != package.sha256:
        message = f"the downloaded package {path.name} does not have the expected SHA-256"
        fix = "check that no proxy changes downloads, then run the command again"
        raise MachineError(
            message, code="transfer-failed", about="package", where=package.url, fix=fix
        )
    return str(path)


def _apt_lines(request: RepositoryRequest) -> Iterator[str]:
    for archive in request.read_sources():
        for source in archive["sources"]:
            keyring = source.get("keyring", archive["keyring"])
            for suite in source["suites"]:
                words = [f"[signed-by={keyring}]", source["uri"], suite, *source["components"]]
                yield f"deb {' '.join(words)}\n"


def _pack_dnf(request: RepositoryRequest, names: Sequence[str], scratch: Path) -> int:
    release = request.release
    repositories, urls = _repositories(request)
    packages = request.folder / "Packages"
    for folder in (*(scratch / name for name in ("root", "repos", "log")), packages):
        folder.mkdir(parents=True, exist_ok=True)
    (scratch / "repos" / "bundle.repo").write_text(repositories)
    dnf = partial(_dnf, request, scratch)
    if stream := nvidia_stream(request.distribution, request.software):
        task = f"choosing the stream of NVIDIA's driver for {release}"
        dnf("module", "enable", f"nvidia-driver:{stream}", task=task)
    keys = scratch / KEYS
    keys.write_bytes(b"\n".join(_download(url, item="a repository's key") for url in urls))
    download = ("download", "--resolve", "--alldeps", f"--arch={ARCHITECTURE}", "--arch=noarch")
    listed = dnf(*download, "--url", *names, task=f"resolving the packages of {release}")
    files = {line.rpartition("/")[2] for line in listed.split() if line.endswith(".rpm")}
    request.report(f"{release}: downloading {counted(len(files), 'package')}")
    task = f"downloading the packages of {release}"
    dnf(*download, f"--downloaddir={packages}", *names, task=task)
    _check_signatures(keys, [packages / file for file in sorted(files)], scratch)
    write_atomic(request.folder / KEYS, keys.read_bytes(), mode=0o644)
    indexed = scratch / "indexed"
    indexed.write_text("".join(f"{packages.name}/{file}\n" for file in sorted(files)))
    argv = ["createrepo_c", "--quiet", f"--pkglist={indexed}", str(request.folder)]
    _run(argv, task="creating the repository's index")
    keep_only(packages, files)
    return len(files)


def _dnf(request: RepositoryRequest, scratch: Path, *words: str, task: str) -> str:
    argv = ["dnf", "--quiet", "--assumeyes", f"--config={_DATA / 'dnf.conf'}"]
    argv += [f"--installroot={scratch / 'root'}"]
    argv += [f"--releasever={request.release.rpartition('-')[2]}"]
    argv += [f"--setopt={name}dir={scratch / name}" for name in ("repos", "cache", "log")]
    return _run(
        [*argv, *words],
        task=task,
        fix="check that this machine reaches the repositories (--from selects others) and has "
        f"dnf-plugins-core, {_AGAIN}",
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


def _check_signatures(keys: Path, packages: Sequence[Path], scratch: Path) -> None:
    """Check packages with the keys, because `dnf download` does not."""
    database = scratch / "rpmdb"
    database.mkdir()
    rpmkeys = ["rpmkeys", f"--dbpath={database}"]
    rpmkeys += ["--define=_pkgverify_level signature"]
    task = "reading the keys of repositories"
    _run([*rpmkeys, "--import", str(keys)], task=task, fix="correct gpgkey=")
    result = _run_process([*rpmkeys, "--checksig", *map(str, packages)])
    if result.rc != 0:
        rejected = "; ".join(line for line in result.stdout.splitlines() if line.endswith("NOT OK"))
        fix = f"check where the package comes from, delete it, {_AGAIN}"
        message = "checking the signatures of packages failed"
        reason = rejected or result.reason
        raise MachineError(
            message,
            code="host-unfit",
            about="package-signature",
            where="rpmkeys",
            why=reason,
            fix=fix,
        )


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
    return UsageError(message, about="repository-list", where=str(path), why=cause, fix=fix)


def _run(
    argv: Sequence[str], *, task: str, fix: str = "run the command again", cwd: Path | None = None
) -> str:
    result = _run_process(argv, cwd)
    if result.rc != 0:
        message = f"{task} failed"
        raise MachineError(
            message,
            about="package-manager",
            where=argv[0],
            why=result.reason,
            fix=fix,
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
            message, code="transfer-failed", about="download", where=url, why=str(exc), fix=fix
        ) from exc
    return answer.content
