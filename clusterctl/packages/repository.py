"""Fetch the OS packages of a distribution, with all that they need, as a repository for its hosts.

Of Debian's family by apt, which checks the archive's signature with the archive's keyring, and every package
with the signed index; its entries there become those of our index. Of Red Hat's by dnf: each package's own
signature is checked with the keys of its repositories, which go into the bundle, since the hosts check it
once more when they install. Both have folders of their own, in which nothing counts as installed.
"""

from __future__ import annotations

import configparser
import hashlib
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages.os_packages import PLAIN, Upstream, nvidia_preference, nvidia_stream
from clusterctl.spec.common import Software
from clusterctl.spec.distributions import Distribution
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util import process
from clusterctl.util.assets import file_sha256, table
from clusterctl.util.progress import LineReporter

_DATA: Final = Path(__file__).with_name("data")
_TIMEOUT_S: Final = 60.0
_ALWAYS: Final = {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


@dataclass(frozen=True, slots=True)
class RepositoryRequest:
    """What to pack for, and the folder that keeps downloads.

    ``called``: the distribution's name in messages, where that is another.

    ``archive`` names the repositories to take packages from, instead of the distribution's public ones, to
    which ``software`` may add OpenHPC's and NVIDIA's. ``upstream``: packages that no repository has.
    """

    distribution: Distribution
    folder: Path
    archive: Path | None = None
    software: Software = PLAIN
    upstream: tuple[Upstream, ...] = ()
    called: str = ""

    @property
    def title(self) -> str:
        return self.called or self.distribution.release

    @property
    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Where packages come from, as the table says it: the distribution's, and what the software adds."""
        known = table(_DATA / "archives.toml", dict[str, dict[str, Any]])
        if (archive := known.get(self.distribution.release)) is None:
            raise UsageError(
                f"no archive of packages is known for {self.title}",
                fix=f"bundles can be made for {', '.join(known)}",
            )
        added = {"openhpc": self.software.slurm == "openhpc", "nvidia": self.software.nvidia.installs}
        return (archive, *(archive[name] for name, is_asked in added.items() if is_asked and name in archive))


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository: path in it -> file or content; and (name, version, SHA-256) of each package."""

    files: Mapping[str, Path | bytes]
    versions: tuple[tuple[str, str, str], ...]


_DEBS: Final = {"x86_64": "amd64"}  # by ARCHITECTURE
_FIELDS: Final = ("Types", "URIs", "Suites")  # what apt wants of a .sources file
_LINE: Final = re.compile(r"deb(-src)?\s+(\[[^\]]*\]\s*)?\S+\s+\S+")  # of a .list file
_FILE: Final = re.compile(r"^'([^']+)' (\S+\.deb) \d+ ", re.MULTILINE)
_PLUGIN: Final = re.compile(r"/(\w+)\.so$", re.MULTILINE)
_FIELD: Final = re.compile(r"^(Package|Version|Architecture|Filename|Size|SHA256): (.*)$", re.MULTILINE)


def pack(packer: RepositoryRequest, names: Sequence[str], *, report: LineReporter) -> Repository:
    """The packages of these names with all that they need.

    Raises:
        MachineError: a tool or keyring is missing, an archive can't be reached, or a signature is not right.
        UsageError: no archive of this distribution is known, or the user's file of them is none.
    """
    return {"Debian": _pack_apt, "RedHat": _pack_dnf}[packer.distribution.family](packer, names, report)


def _pack_apt(packer: RepositoryRequest, names: Sequence[str], report: LineReporter) -> Repository:
    title, folder = packer.title, packer.folder
    _need("apt-get", of=title, fix="make this bundle on a machine with Debian or Ubuntu")
    apt = partial(_apt, _apt_options(packer))
    report(f"{title}: reading the package lists")
    apt("apt-get", "update", what=f"reading the package lists of {title}")
    upstream = {path.name: path for path in (_fetched(one, folder) for one in packer.upstream)}
    install = ("apt-get", "install", "--quiet=2", *names, *map(str, upstream.values()))
    nothing = f"Dir::Cache::archives={folder / 'none'}"  # else it names only what is yet to come
    said = apt(*install, "--print-uris", "-o", nothing, what=f"finding what the packages of {title} need")
    paths = {name: _place(name, uri, folder) for uri, name in sorted(_FILE.findall(said), key=itemgetter(1))}
    report(f"{title}: downloading {len(paths)} packages")
    apt(*install, "--download-only", what=f"downloading the packages of {title}")
    show = partial(apt, "apt-cache", "show", "--quiet=2", what="reading the package lists")
    records = _records(show(*(_asked(file) for file in paths if file not in upstream)))
    if upstream:
        found = _records(show(*map(str, upstream.values())))
        records += [
            f"{record}SHA256: {file_sha256(Path(dict(_FIELD.findall(record))['Filename']))}\n"
            for record in found
        ]
    return _apt_repository(title, records, paths)


@dataclass(frozen=True, slots=True)
class SlurmPackages:
    """Slurm's packages for a host, of another release with all that they need, and those of its own.

    ``plugins`` are the file names of the former's plugins.
    """

    new: tuple[Path, ...]
    old: tuple[Path, ...]
    plugins: frozenset[str]


def fetch_slurm(
    distribution: Distribution,
    release: str,
    status: str,
    folder: Path,
    *,
    mirror: str | None = None,
    report: LineReporter,
) -> SlurmPackages:
    """Fetch Slurm's packages of a release that the distribution can have, for a host with this dpkg status.

    ``folder`` is there, and keeps what is downloaded.

    Raises:
        MachineError: a tool is missing, the archive can't be reached, or it has another release by now.
    """
    title, suite = f"Slurm {release}", distribution.newer_slurm[release]
    _need("apt-get", of=title, fix="run clusterctl on a machine with Debian or Ubuntu")
    archive = RepositoryRequest(distribution, folder).sources[0]
    own, uri = archive["sources"][0]["suites"][0], mirror or archive["sources"][0]["uri"]
    signed = f"signed-by={archive['keyring']}"
    sources = folder / "slurm.list"
    # A suite in the making may be signed for a time that has passed; its signature counts all the same.
    sources.write_text(
        f"deb [{signed}] {uri} {own} main\ndeb [{signed} check-valid-until=no] {uri} {suite} main\n"
    )
    (folder / "host-status").write_text(status)
    has = f"--option=Dir::State::status={folder / 'host-status'}"
    packer = RepositoryRequest(distribution, folder, sources, called=title)
    apt = partial(_apt, [*_apt_options(packer), has])
    report(f"{title}: reading the package lists")
    apt("apt-get", "update", what=f"reading the package lists of {title}")
    names = [*installed_of(status, "slurm-wlm")]

    def fetch(suite: str) -> tuple[Path, ...]:
        asked = [f"--target-release={suite}", *(f"{name}/{suite}" for name in names)]
        install = ["apt-get", "install", "--quiet=2", "--reinstall", "--allow-downgrades", *asked]
        nothing = f"Dir::Cache::archives={folder / 'none'}"
        files = _FILE.findall(
            apt(*install, "--print-uris", "-o", nothing, what=f"finding {title} in {suite}")
        )
        report(f"{title}: downloading {len(files)} packages of {suite}")
        apt(*install, "--download-only", what=f"downloading the packages of {title}")
        return tuple(_place(name, found, folder) for found, name in sorted(files))

    new, old = fetch(suite), fetch(own)
    slurms = {name: path for path in new if (name := path.name.partition("_")[0]) in names}
    version = slurms["slurm-client"].name.split("_")[1]
    if not version.startswith(f"{release}."):
        why = f"the suite {suite} has {version} by now"
        raise MachineError(f"{title} can't be had any more", where=uri, why=why, fix="remove slurm.version")
    what = f"looking into the packages of {title}"
    contents = [_run(["dpkg-deb", "--contents", str(one)], what=what, fix="") for one in slurms.values()]
    formers = tuple(path for path in old if path.name.partition("_")[0] in names)
    return SlurmPackages(new, formers, frozenset(_PLUGIN.findall("".join(contents))))


def installed_of(status: str, source: str) -> Iterator[str]:
    """The packages that are installed of a source package, as dpkg's status has them."""
    for record in status.split("\n\n"):
        fields = dict(re.findall(r"^(Package|Source|Status): (\S.*)$", record, re.MULTILINE))
        if fields.get("Source", "").partition(" ")[0] == source and fields["Status"].endswith(" installed"):
            yield fields["Package"]


def _apt_options(packer: RepositoryRequest) -> list[str]:
    """What makes apt work for one distribution, with all of its state in one folder."""
    folder, architecture = packer.folder, _DEBS[ARCHITECTURE]
    for name in ("state/lists/partial", "cache/archives/partial", "none/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "state/status").write_text("")
    sources = folder / f"archive{packer.archive.suffix if packer.archive else '.list'}"
    sources.write_text(own_sources(packer.archive) if packer.archive else "".join(_apt_lines(packer)))
    preferences = folder / "preferences"
    preferences.write_text(nvidia_preference(packer.distribution, packer.software))
    own = {
        "Dir::State": folder / "state",
        "Dir::Etc::Preferences": preferences,
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": sources,
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
    }
    return [f"--config-file={_DATA / 'apt.conf'}", *(f"--option={key}={value}" for key, value in own.items())]


def _apt(options: Sequence[str], tool: str, *words: str, what: str) -> str:
    yes = ["--assume-yes"] if tool == "apt-get" else []
    return _run(
        [tool, *yes, *options, *words],
        what=what,
        fix="check that this machine reaches the archive (apt's own settings for a proxy apply; --from "
        "names another), then run it again: what was downloaded is kept",
    )


def _place(file: str, uri: str, folder: Path) -> Path:
    """What lies on this machine, apt takes where it is; what is in the cache already is kept."""
    here = uri.startswith("file:")
    return Path(unquote(uri.removeprefix("file:"))) if here else folder / "cache/archives" / file


def _records(said: str) -> list[str]:
    """What the signed index says of each package."""
    return [record.strip() + "\n" for record in said.split("\n\n") if record.strip()]


def _fetched(one: Upstream, folder: Path) -> Path:
    """A package of its makers', from the cache if it is there."""
    path = folder / one.file
    if not path.is_file() or file_sha256(path) != one.sha256:
        path.write_bytes(_download(one.url, what=f"the package {path.name}"))
    why = "its SHA-256 is another"
    return _checked(
        path, one.sha256, MachineError(f"the package {path.name} is another", where=one.url, why=why)
    )


def own_sources(path: Path) -> str:
    """A list of archives of the user's, in one of apt's two forms.

    Raises:
        UsageError: it is none.
    """
    text = _read_own(path)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if path.suffix == ".sources":
        given = {line.partition(":")[0].lower() for line in lines if ":" in line}
        wrong = next((f"it has no {field}:" for field in _FIELDS if field.lower() not in given), None)
    else:
        wrong = next((f"apt reads no line like {line!r}" for line in lines if not _LINE.match(line)), None)
    if wrong or not lines:
        fix = "write it as in /etc/apt/sources.list.d; what is named .sources, in that form"
        raise _not_repositories(path, "is not a list of apt sources", wrong or "it names none", fix)
    return text


def _apt_lines(packer: RepositoryRequest) -> Iterator[str]:
    """The archives of the distribution, as apt reads them."""
    for archive in packer.sources:
        if not Path(archive["keyring"]).is_file():
            raise MachineError(
                f"the signatures of {packer.title} can't be checked here",
                where=archive["keyring"],
                why="that keyring is missing",
                fix=f"install the package {archive['keyring_package']}",
            )
        for source in archive["sources"]:
            keyring = source.get("keyring", archive["keyring"])
            for suite in source["suites"]:
                words = [f"[signed-by={keyring}]", source["uri"], suite, *source["components"]]
                yield f"deb {' '.join(words)}\n"


def _asked(file: str) -> str:
    """`name:arch=version` of a file's name, in which apt writes the colon of an epoch as %3a."""
    name, version, architecture = file.removesuffix(".deb").split("_")
    return f"{name}:{architecture}={version.replace('%3a', ':')}".replace(":all=", "=")


def _apt_repository(distribution: str, records: Sequence[str], paths: Mapping[str, Path]) -> Repository:
    files: dict[str, Path | bytes] = {f"pool/{name}": path for name, path in paths.items()}
    index, versions = [], []
    for record in records:
        fields = dict(_FIELD.findall(record))
        file = f"{fields['Package']}_{fields['Version'].replace(':', '%3a')}_{fields['Architecture']}.deb"
        if f"pool/{file}" not in files:
            continue
        # What apt has downloaded it has checked; what lay in the cache may have been damaged since.
        what, where = (
            f"a package of {distribution} in the cache was damaged, and is removed",
            str(paths[file]),
        )
        _checked(paths[file], fields["SHA256"], MachineError(what, where=where, fix="run it again"))
        index.append(re.sub(r"^Filename: .*$", f"Filename: pool/{file}", record, flags=re.MULTILINE))
        versions.append((fields["Package"], fields["Version"], fields["SHA256"]))
    if len(index) != len(paths):
        raise MachineError(f"the package lists of {distribution} changed meanwhile", fix="run it again")
    packages = "\n".join(sorted(index)).encode()
    files["Packages"] = packages
    digest = hashlib.sha256(packages).hexdigest()
    files["Release"] = (
        f"Origin: clusterctl\nLabel: clusterctl bundle for {distribution}\nSuite: bundle\n"
        f"SHA256:\n {digest} {len(packages)} Packages\n"
    ).encode()
    return Repository(files, tuple(sorted(versions)))


def _checked(path: Path, sha256: str, error: MachineError) -> Path:
    """The file if it has that hash; else it is removed, and the error raised."""
    if file_sha256(path) != sha256:
        path.unlink()
        raise error
    return path


_TOOLS: Final = {"dnf": "dnf", "createrepo_c": "createrepo_c", "rpmkeys": "rpm"}
_SIGNED: Final = "signatures OK"


def _pack_dnf(packer: RepositoryRequest, names: Sequence[str], report: LineReporter) -> Repository:
    title, folder = packer.title, packer.folder
    for tool, package in _TOOLS.items():
        fix = f"install {package} and dnf-plugins-core here, or make this bundle on a machine of its family"
        _need(tool, of=title, fix=fix)
    repositories, urls = _repositories(packer)
    report(f"{title}: reading the repositories")
    dnf = partial(_dnf, packer)
    _configure_dnf(folder, repositories)
    if stream := nvidia_stream(packer.distribution, packer.software):
        what = f"choosing the stream of NVIDIA's driver for {title}"
        dnf("module", "enable", f"nvidia-driver:{stream}", what=what)
    keys = {
        f"keys/{number}.asc": _download(url, what="a repository's key") for number, url in enumerate(urls)
    }
    download = ("download", "--resolve", "--alldeps", f"--arch={ARCHITECTURE}", "--arch=noarch")
    said = dnf(*download, "--url", *names, what=f"finding what the packages of {title} need")
    files = sorted({line.rpartition("/")[2] for line in said.split() if line.endswith(".rpm")})
    report(f"{title}: downloading {len(files)} packages")
    packages = folder / "repository" / "Packages"  # those of earlier bundles too
    dnf(*download, f"--downloaddir={packages}", *names, what=f"downloading the packages of {title}")
    _check_signatures(folder, keys.values(), [packages / file for file in files])
    return Repository({**_dnf_index(folder, files), **keys}, tuple(_versions(packages, files)))


def _configure_dnf(folder: Path, repositories: str) -> None:
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
    return _run(
        [*argv, *words],
        what=what,
        fix="check that this machine reaches the repositories (--from names others) and has "
        "dnf-plugins-core, then run it again: what was downloaded is kept",
    )


def _repositories(packer: RepositoryRequest) -> tuple[str, tuple[str, ...]]:
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
        _run([*rpmkeys, "--import", str(place)], what="reading a repository's key", fix="name its true key")
    said = _run(
        [*rpmkeys, "--checksig", *map(str, paths)], what="checking the signatures of packages", fix=fix
    )
    unsigned = [line.partition(": ")[0] for line in said.splitlines() if not line.endswith(_SIGNED)]
    if unsigned or len(said.splitlines()) != len(paths):
        raise MachineError("a package is not signed", where=", ".join(unsigned), fix=fix)


def _dnf_index(folder: Path, files: Sequence[str]) -> Mapping[str, Path | bytes]:
    """The repository: its index is made of the packages that are wanted now."""
    root, chosen = folder / "repository", folder / "chosen"
    shutil.rmtree(root / "repodata", ignore_errors=True)
    chosen.write_text("".join(f"Packages/{file}\n" for file in files))
    words = ["--quiet", "--no-database", "--revision=1", "--set-timestamp-to-revision", f"--pkglist={chosen}"]
    _run(["createrepo_c", *words, str(root)], what="making the repository's index", fix="run it again")
    index = {f"repodata/{path.name}": path for path in (root / "repodata").iterdir()}
    return {**index, **{f"Packages/{file}": root / "Packages" / file for file in files}}


def _versions(packages: Path, files: Sequence[str]) -> Iterator[tuple[str, str, str]]:
    for file in files:
        name, version, release = file.removesuffix(".rpm").rpartition(".")[0].rsplit("-", 2)
        yield name, f"{version}-{release}", file_sha256(packages / file)


def _read_own(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        fix = "name a file as in /etc/apt/sources.list.d or /etc/yum.repos.d"
        raise _not_repositories(path, "can't be read", why, fix) from exc


def _not_repositories(path: Path, what: str, why: str, fix: str) -> UsageError:
    return UsageError(f"the file of repositories {what}", where=str(path), why=why, fix=fix)


def _need(tool: str, *, of: str, fix: str) -> None:
    if shutil.which(tool) is None:
        raise MachineError(f"packages of {of} can't be fetched here: there is no {tool}", fix=fix)


def _run(argv: Sequence[str], *, what: str, fix: str) -> str:
    done = process.run(argv, env={**os.environ, **_ALWAYS})
    if done.rc != 0:
        raise MachineError(f"{what} failed", where=argv[0], why=done.reason, fix=fix)
    return done.stdout


def _download(url: str, *, what: str) -> bytes:
    """The content at a URL; `file:` is of this machine."""
    try:
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).read_bytes()
        import requests  # noqa: PLC0415 - slow, and `up` seldom downloads here

        answer = requests.get(url, timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except OSError as exc:  # the parent of all that requests raises
        fix = "check that this machine reaches it, then run it again: what was downloaded is kept"
        raise MachineError(f"{what} can't be had", where=url, why=str(exc), fix=fix) from exc
    return answer.content
