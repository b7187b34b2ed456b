"""Packages of Debian and Ubuntu, with all that they need, by apt with folders of its own.

The dpkg status is empty, so that nothing counts as installed. apt checks the archive's signature with the
archive's keyring, and every package with the signed index; its entries there become those of our index.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote

from clusterctl.errors import MachineError
from clusterctl.packages import repository
from clusterctl.packages.os_packages import Upstream
from clusterctl.packages.repository import Repository, RepositoryRequest
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.assets import file_sha256
from clusterctl.util.progress import LineReporter

ARCHITECTURES: Final = {"x86_64": "amd64"}
_FIELDS: Final = ("Types", "URIs", "Suites")  # what apt wants of a .sources file
_LINE: Final = re.compile(r"deb(-src)?\s+(\[[^\]]*\]\s*)?\S+\s+\S+")  # of a .list file
_FILE: Final = re.compile(r"^'([^']+)' (\S+\.deb) \d+ ", re.MULTILINE)
_FIELD: Final = re.compile(r"^(Package|Version|Architecture|Filename|Size|SHA256): (.*)$", re.MULTILINE)


def pack(packer: RepositoryRequest, names: Sequence[str], *, report: LineReporter) -> Repository:
    """The packages of these names with all that they need, as a repository for apt.

    Raises:
        MachineError: apt or the archive's keyring is missing, or the archive can't be reached.
        UsageError: no archive of this distribution is known.
    """
    title, folder = packer.title, packer.folder
    repository.need("apt-get", of=title, fix="make this bundle on a machine with Debian or Ubuntu")
    apt = partial(_apt, _prepare(packer))
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
    return _repository(title, records, paths)


def _prepare(packer: RepositoryRequest) -> Mapping[str, object]:
    """apt's settings for one distribution, with all of its state in one folder."""
    folder, architecture = packer.folder, ARCHITECTURES[ARCHITECTURE]
    for name in ("state/lists/partial", "cache/archives/partial", "none/partial"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    (folder / "status").write_text("")
    sources = folder / f"archive{packer.archive.suffix if packer.archive else '.list'}"
    sources.write_text(own_sources(packer.archive) if packer.archive else _sources(packer))
    return {
        "Dir::State": folder / "state",
        "Dir::State::status": folder / "status",
        "Dir::Cache": folder / "cache",
        "Dir::Etc::SourceList": sources,
        "Dir::Etc::SourceParts": "/dev/null",
        "Dir::Etc::Preferences": "/dev/null",
        "Dir::Etc::PreferencesParts": "/dev/null",
        "APT::Default-Release": "",
        "APT::Architecture": architecture,
        "APT::Architectures": architecture,
        "APT::Install-Recommends": "false",
        "APT::Keep-Downloaded-Packages": "true",
        "APT::Get::AllowUnauthenticated": "false",
        "Acquire::AllowInsecureRepositories": "false",
        "Acquire::Languages": "none",
        "Acquire::Retries": "3",
    }


def _apt(settings: Mapping[str, object], tool: str, *words: str, what: str) -> str:
    yes = ["--assume-yes"] if tool == "apt-get" else []
    options = [word for key, value in settings.items() for word in ("-o", f"{key}={value}")]
    return repository.run(
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
        path.write_bytes(repository.download(one.url, what=f"the package {path.name}"))
    if file_sha256(path) != one.sha256:
        path.unlink()
        raise MachineError(f"the package {path.name} is another", where=one.url, why="its SHA-256 is another")
    return path


def own_sources(path: Path) -> str:
    """A list of archives of the user's, in one of apt's two forms.

    Raises:
        UsageError: it is none.
    """
    text = repository.read_own(path)
    lines = [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    if path.suffix == ".sources":
        given = {line.partition(":")[0].lower() for line in lines if ":" in line}
        wrong = next((f"it has no {field}:" for field in _FIELDS if field.lower() not in given), None)
    else:
        wrong = next((f"apt reads no line like {line!r}" for line in lines if not _LINE.match(line)), None)
    if wrong or not lines:
        fix = "write it as in /etc/apt/sources.list.d; what is named .sources, in that form"
        raise repository.not_repositories(path, "is not a list of apt sources", wrong or "it names none", fix)
    return text


def _sources(packer: RepositoryRequest) -> str:
    """The archives of the distribution, as apt reads them."""
    return "".join(line for one in packer.sources for line in _lines(one, packer.title))


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
