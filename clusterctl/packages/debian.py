"""Packages of Debian and Ubuntu, with all that they need, by apt with folders of its own.

The dpkg status is empty, so that nothing counts as installed. apt checks the archive's signature with the
archive's keyring, and every package with the signed index; its entries there become those of our index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages.os_packages import Upstream
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

ARCHITECTURES: Final = {"x86_64": "amd64"}
_FIELDS: Final = ("Types", "URIs", "Suites")  # what apt wants of a .sources file
_LINE: Final = re.compile(r"deb(-src)?\s+(\[[^\]]*\]\s*)?\S+\s+\S+")  # of a .list file
_FILE: Final = re.compile(r"^'([^']+)' (\S+\.deb) \d+ ", re.MULTILINE)
_FIELD: Final = re.compile(r"^(Package|Version|Architecture|Filename|Size|SHA256): (.*)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class _Apt:
    """apt with all of its state in one folder, for one distribution."""

    distribution: str
    architecture: str
    folder: Path
    sources: str
    form: str = ".list"  # or ".sources"

    def prepare(self) -> None:
        """Write its configuration and fetch the signed indexes."""
        for name in ("state/lists/partial", "cache/archives/partial", "none/partial"):
            (self.folder / name).mkdir(parents=True, exist_ok=True)
        (self.folder / "status").write_text("")
        (self.folder / f"archive{self.form}").write_text(self.sources)
        self._run("apt-get", "update", what=f"reading the package lists of {self.distribution}")

    def resolve(self, names: Sequence[str]) -> Mapping[str, str]:
        """The files of these packages and of all that they need, as apt calls them, and where they are."""
        what = f"finding what the packages of {self.distribution} need"
        nothing = f"Dir::Cache::archives={self.folder / 'none'}"  # else it names only what is yet to come
        said = self._run("apt-get", "install", "--print-uris", "--quiet=2", "-o", nothing, *names, what=what)
        return {name: uri for uri, name in sorted(_FILE.findall(said), key=itemgetter(1))}

    def download(self, names: Sequence[str], files: Mapping[str, str]) -> Mapping[str, Path]:
        """File name -> file; what is there from before is kept, what was cut is gone on with."""
        what = f"downloading the packages of {self.distribution}"
        self._run("apt-get", "install", "--download-only", "--quiet=2", *names, what=what)
        return {file: self._place(file, uri) for file, uri in files.items()}

    def _place(self, file: str, uri: str) -> Path:
        """What lies on this machine, apt takes where it is."""
        here = uri.startswith("file:")
        return Path(unquote(uri.removeprefix("file:"))) if here else self.folder / "cache/archives" / file

    def records(self, packages: Sequence[str]) -> tuple[str, ...]:
        """What the signed index says of each package, given as `name:arch=version`."""
        said = self._run("apt-cache", "show", "--quiet=2", *packages, what="reading the package lists")
        return tuple(record.strip() + "\n" for record in said.split("\n\n") if record.strip())

    def _run(self, tool: str, *words: str, what: str) -> str:
        yes = ["--assume-yes"] if tool == "apt-get" else []
        return run(
            [tool, *yes, *self._options(), *words],
            what=what,
            fix="check that this machine reaches the archive (apt's own settings for a proxy apply; --from "
            "names another), then run it again: what was downloaded is kept",
        )

    def _options(self) -> list[str]:
        settings = {
            "Dir::State": self.folder / "state",
            "Dir::State::status": self.folder / "status",
            "Dir::Cache": self.folder / "cache",
            "Dir::Etc::SourceList": self.folder / f"archive{self.form}",
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::Etc::Preferences": "/dev/null",
            "Dir::Etc::PreferencesParts": "/dev/null",
            "APT::Default-Release": "",
            "APT::Architecture": self.architecture,
            "APT::Architectures": self.architecture,
            "APT::Install-Recommends": "false",
            "APT::Keep-Downloaded-Packages": "true",
            "APT::Get::AllowUnauthenticated": "false",
            "Acquire::AllowInsecureRepositories": "false",
            "Acquire::Languages": "none",
            "Acquire::Retries": "3",
        }
        return [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]


def pack(packer: RepositoryRequest, names: Sequence[str], *, report: LineReporter) -> Repository:
    """The packages of these names with all that they need, as a repository for apt.

    Raises:
        MachineError: apt or the archive's keyring is missing, or the archive can't be reached.
        UsageError: no archive of this distribution is known.
    """
    need("apt-get", of=packer.distribution, fix="make this bundle on a machine with Debian or Ubuntu")
    sources = _sources(packer) if packer.archive is None else own_sources(packer.archive)
    form = packer.archive.suffix if packer.archive else ".list"
    apt = _Apt(packer.distribution, ARCHITECTURES[packer.architecture], packer.folder, sources, form)
    report(f"{packer.distribution}: reading the package lists")
    apt.prepare()
    upstream = {path.name: path for path in (_fetched(one, packer.folder) for one in packer.upstream)}
    names = (*names, *map(str, upstream.values()))
    files = apt.resolve(names)
    report(f"{packer.distribution}: downloading {len(files)} packages")
    paths = apt.download(names, files)
    records = apt.records([_asked(file) for file in files if file not in upstream])
    if upstream:
        found = apt.records([str(path) for path in upstream.values()])
        records += tuple(f"{record}SHA256: {file_sha256(_named_in(record))}\n" for record in found)
    return _repository(packer.distribution, records, paths)


def _fetched(one: Upstream, folder: Path) -> Path:
    """A package of its makers', from the cache if it is there."""
    path = folder / one.file
    if not path.is_file() or file_sha256(path) != one.sha256:
        path.write_bytes(download(one.url, what=f"the package {path.name}"))
    if file_sha256(path) != one.sha256:
        path.unlink()
        raise MachineError(f"the package {path.name} is another", where=one.url, why="its SHA-256 is another")
    return path


def own_sources(path: Path) -> str:
    """A list of archives of the user's, in one of apt's two forms.

    Raises:
        UsageError: it is none.
    """
    text = read_own(path)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if path.suffix == ".sources":
        given = {line.partition(":")[0].lower() for line in lines if ":" in line}
        wrong = next((f"it has no {field}:" for field in _FIELDS if field.lower() not in given), None)
    else:
        wrong = next((f"apt reads no line like {line!r}" for line in lines if not _LINE.match(line)), None)
    if wrong or not lines:
        raise UsageError(
            "the file of repositories is not a list of apt sources",
            where=str(path),
            why=wrong or "it names none",
            fix="write it as in /etc/apt/sources.list.d; what is named .sources, in that form",
        )
    return text


def _sources(packer: RepositoryRequest) -> str:
    """The archives of the distribution, as apt reads them."""
    archive = archive_of(packer.distribution)
    archives = [archive, archive["nvidia"]] if packer.nvidia else [archive]
    return "".join(line for one in archives for line in _lines(one, packer.distribution))


def _lines(archive: Mapping[str, Any], distribution: str) -> Iterator[str]:
    if not Path(archive["keyring"]).is_file():
        raise MachineError(
            f"the signatures of {distribution} can't be checked here",
            where=archive["keyring"],
            why="that keyring is missing",
            fix=f"install the package {archive['keyring_package']}",
        )
    for source in archive["sources"]:
        for suite in source["suites"]:
            keyring = source.get("keyring", archive["keyring"])
            words = [f"[signed-by={keyring}]", source["uri"], suite, *source["components"]]
            yield f"deb {' '.join(words)}\n"


def _asked(file: str) -> str:
    """`name:arch=version` of a file's name, in which apt writes the colon of an epoch as %3a."""
    name, version, architecture = file.removesuffix(".deb").split("_")
    return f"{name}:{architecture}={version.replace('%3a', ':')}".replace(":all=", "=")


def _repository(distribution: str, records: Sequence[str], paths: Mapping[str, Path]) -> Repository:
    """The files of a flat repository, and the versions in it."""
    files: dict[str, Path | bytes] = {f"pool/{name}": path for name, path in paths.items()}
    index, versions = [], []
    for record in records:
        fields = dict(_FIELD.findall(record))
        file = f"{fields['Package']}_{fields['Version'].replace(':', '%3a')}_{fields['Architecture']}.deb"
        if f"pool/{file}" not in files:
            continue
        _check(paths[file], fields, distribution)
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


def _check(path: Path, fields: Mapping[str, str], distribution: str) -> None:
    """What apt has downloaded it has checked; what lay in the cache may have been damaged since."""
    if file_sha256(path) == fields["SHA256"]:
        return
    path.unlink()
    raise MachineError(
        f"a package of {distribution} in the cache was damaged, and is removed",
        where=str(path),
        fix="run it again",
    )


def _named_in(record: str) -> Path:
    """The file that apt says a record is of."""
    return Path(dict(_FIELD.findall(record))["Filename"])
