"""Wheels of packages that an index offers only as source archives, built on the user's machine or on
the cluster.

A build runs code of the package. On the user's machine, PIP_NO_BINARY, pip's own variable, must name
the package; the build gets an empty home folder, few variables, no compiler and limited time, and only
a wheel of pure Python is used. Other packages are built on the cluster. Nothing is built if
requirements have hashes, because pip must check the files before their code runs.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from packaging.specifiers import InvalidSpecifier, SpecifierSet
from packaging.utils import (
    InvalidSdistFilename,
    InvalidWheelFilename,
    NormalizedName,
    canonicalize_name,
    parse_sdist_filename,
    parse_wheel_filename,
)
from packaging.version import Version

from clusterctl.errors import Notice, UsageError
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.requirement_files import COMMENT, contents_of
from clusterctl.packages.source_builds import ClusterBuilder, Downloader, Index
from clusterctl.packages.sources import SourceLine, fetch_source
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.assets import file_sha256
from clusterctl.util.process import run

_NO_WHEEL: Final = re.compile(
    r"No matching distribution found for ([\w.-]+)(?:\[[^\]]*\])?([^\s(;]*)"
)
_NO_WHEELS: Final = re.compile(
    r"matching distributions available for your environment:\n((?: +\S+\n)+)"
)
_SOURCES: Final = re.compile(
    r"^ *Skipping link: No sources permitted for [^:]+: (\S+)(?: \(from .*?\))?"
    r"(?: \(requires-python:(.*?)\))?$",
    re.MULTILINE,
)
_WANTED: Final = (
    r"(?:depends on|The user requested(?: \(constraint\))?) {}(?![\w.-])(?:\[[^\]]*\])?([^\s(;]*)"
)
_OPTION: Final = re.compile(
    r"^(-[ifc]|--(?:index-url|extra-index-url|find-links|constraint|no-index|trusted-host)\b)(.*)$",
    re.MULTILINE,
)
_WITH_PATH: Final = frozenset({"-f", "--find-links", "-c", "--constraint"})
# The build may use a proxy, the certificates and the settings of pip, but no other variable of the
# user.
_PASSED_ON: Final = re.compile(
    r"PATH|LANG|LC_ALL|PIP_\w+|\w+_(?:proxy|PROXY)|SSL_CERT_\w+|REQUESTS_CA_BUNDLE"
)
_HASHES: Final = re.compile(rb"--(require-)?hash")
_TRIED: Final = re.compile(r"(?:Downloading|Using cached|Processing) (?:.*/)?(\S+\.whl)")
_PURE: Final = "-none-any.whl"
_PATIENCE_S: Final = 300.0
_LONGEST_REASON: Final = 1000


@dataclass
class SourceArchives:
    """Builds wheels into ``folder``. options: lines of a requirements file with the user's indexes.

    cwd: the folder that relative paths in ``options`` start at. is_hashed: whether pip checks
        hashes.
    refused: names of packages without wheels that PIP_NO_BINARY does not name.
    builder: builds packages on the cluster. None: there is no cluster, or nothing is sent to it.
    origins: file of a wheel -> the sources of which the cluster has built it.
    built: the wheels. failures: name -> why the package has no wheel. tried: names of packages that
        were tried to build.
    """

    folder: Path
    cwd: Path
    options: Sequence[str]
    is_hashed: bool
    index: Index
    builder: ClusterBuilder | None = None
    origins: dict[str, str] = field(default_factory=dict)
    refused: tuple[NormalizedName, ...] = ()
    built: list[Path] = field(default_factory=list)
    failures: dict[str, str] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)

    @classmethod
    def of(
        cls,
        folder: Path,
        files: Sequence[Path],
        pip: Downloader,
        builder: ClusterBuilder | None,
    ) -> SourceArchives:
        """Return a builder in a new folder, with the options in requirements files."""
        folder.mkdir()
        contents = [content for file in files for content in contents_of(file, constraints=False)]
        options = [
            _with_absolute_path(match[1], match[2], place.decode(errors="replace"))
            for place, content in contents
            for match in _OPTION.finditer(content.decode(errors="replace"))
        ]
        is_hashed = any(
            _HASHES.search(content) for file in files for _, content in contents_of(file)
        )
        cwd = files[-1].absolute().parent
        return cls(folder, cwd, options, is_hashed, Index(pip, options, cwd), builder)

    @property
    def arguments(self) -> list[str]:
        """The arguments with which pip finds the built wheels."""
        # Only wheels that the cluster has built may need the libraries of any Linux.
        own = ["--platform", f"linux_{ARCHITECTURE}"] if self.origins else []
        return [*own, "--find-links", str(self.folder)] if self.built else []

    def build_missing(self, output: str) -> list[Notice]:
        """Build wheels that pip, according to its ``output``, did not find. Return a message about
        each.
        """
        forbidden = self.is_hashed or {"PIP_ONLY_BINARY", "PIP_REQUIRE_HASHES"} & os.environ.keys()
        missing = (
            {} if forbidden else {canonicalize_name(name): wish for name, wish in _missing(output)}
        )
        names = _allowed()
        self.refused = tuple(name for name in missing if not {name, ":all:"} & names)
        wheels = [
            self._build(name, wish) for name, wish in missing.items() if name not in self.refused
        ]
        reason = "on this machine, because the index has only its source archive"
        notices = [
            Notice("built-from-source", f"built {wheel.name} {reason}") for wheel in wheels if wheel
        ]
        for name in self.refused if self.builder is not None else ():
            line = _source_of(name, missing[name], output, self.index.pip.node)
            if line is not None and name not in self.tried:
                self.tried.add(name)
                wheel = self.wheel_of(line)
                reason = "on the cluster, because the index has only its source archive"
                notices.append(Notice("built-from-source", f"{wheel.name} was built {reason}"))
        return notices

    def line_of(self, line: SourceLine) -> str:
        """Return a line of a requirements file for the wheel of the sources that ``line`` names."""
        wheel = self.wheel_of(line)
        name = line.name or parse_wheel_filename(wheel.name)[0]
        return f"{name}{line.extras} @ {wheel.as_uri()}#sha256={file_sha256(wheel)}"

    def wheel_of(self, line: SourceLine) -> Path:
        """Fetch the sources that a line names, and return their wheel, built on the cluster; without
        a cluster, on this machine, if PIP_NO_BINARY names the package.

        Raises:
            UsageError: the package can't be built.
            MachineError: the sources can't be fetched.
            TransportError, TransferError: the connection was lost.
        """
        is_allowed = line.name and {canonicalize_name(line.name), ":all:"} & _allowed()
        if self.builder is None and not is_allowed:
            raise UsageError(
                f"{line.shown} has no wheel and must be built on the cluster",
                code="source-needs-cluster",
                where=line.shown,
                why="`submit` builds such packages, but not `up`, and not with --if-digest",
                fix="use --requirements of `clusterctl submit`; or build a wheel (`pip wheel "
                "--no-deps ...`), and write the wheel's path in its place",
            )
        source = fetch_source(line)
        if self.builder is None:
            inner = f"#subdirectory={source.subfolder}" if source.subfolder else ""
            built = self._build(line.name, f" @ {source.archive.as_uri()}{inner}")
            if built is None:
                raise self.error(line.shown, self.index.pip.node)
            return built
        wheel = self.builder.wheel_of(line.shown, source, self.index)
        self.origins[wheel.name] = source.origin
        self.built.append(Path(shutil.copy(wheel, self.folder)))
        return self.built[-1]

    @property
    def advice(self) -> str:
        """Advice on how to build the ``refused`` packages. Empty if no package was refused."""
        if not self.refused or self.builder:
            return ""
        names = ",".join(sorted(_allowed().union(self.refused)))
        packages = ", ".join(self.refused)
        return (
            f"; if there are only source archives of {packages}: `clusterctl submit` builds them on "
            "the cluster; or if you trust their code, which builds run on this machine: set "
            f"PIP_NO_BINARY={names}"
        )

    def error(self, where: str, node: object) -> UsageError:
        """Return the error for the first of ``failures``. node: the platform of the nodes."""
        name, reason = next(iter(self.failures.items()))
        return UsageError(
            f"{name} has no wheel for the nodes, and no wheel of pure Python can be built of it",
            code="source-not-built",
            where=where,
            why=reason,
            fix=f"require a version of {name} with a wheel for {node}, or build its wheel on "
            f"such a machine (pip wheel --no-deps {name}) and add a line `--find-links "
            "FOLDER`",
        )

    def _build(self, name: str, versions: str) -> Path | None:
        if canonicalize_name(name) in self.tried:
            return None
        self.tried.add(canonicalize_name(name))
        home = Path(tempfile.mkdtemp(prefix="build-", dir=self.folder))
        (home / "wanted.txt").write_text("\n".join((*self.options, f"{name}{versions}", "")))
        argv = [
            sys.executable,
            "-P",
            "-m",
            "pip",
            "wheel",
            "--no-input",
            "--disable-pip-version-check",
        ]
        argv += ["--progress-bar=off", "--no-deps", "--no-cache-dir", "--no-binary", name]
        argv += ["--wheel-dir", str(home / "wheels"), "--requirement", str(home / "wanted.txt")]
        env = {key: value for key, value in os.environ.items() if _PASSED_ON.fullmatch(key)}
        # The packages that the build itself needs may be wheels.
        env.pop("PIP_NO_BINARY", None)
        env |= {
            "HOME": str(home),
            "TMPDIR": str(home),
            "CC": "false",
            "CXX": "false",
            "NO_COLOR": "1",
        }
        # With another HOME, pip would not find the settings of the user.
        settings = Path("~/.config/pip/pip.conf").expanduser()
        if settings.is_file():
            env.setdefault("PIP_CONFIG_FILE", str(settings))
        try:
            result = run(argv, env=env, cwd=self.cwd, timeout_s=_PATIENCE_S)
        except subprocess.TimeoutExpired:
            self.failures[name] = f"its build takes longer than {_PATIENCE_S:.0f} s"
            return None
        wheel = next((home / "wheels").glob("*.whl"), None)
        if wheel is not None and wheel.name.endswith(_PURE):
            self.built.append(wheel.rename(self.folder / wheel.name))
            return self.built[-1]
        if wheel is not None:
            self.failures[name] = f"its build gives {wheel.name}, which is not pure Python"
        elif not _NO_WHEEL.search(result.stdout + result.stderr):
            self.failures[name] = (result.stderr or result.stdout).strip()[-_LONGEST_REASON:]
        return None


def _source_of(name: str, wish: str, output: str, node: NodePlatform) -> SourceLine | None:
    """Return the newest source archive that pip, by its output, may not use. None: it saw none.

    wish: version specifiers.
    """
    found = list[tuple[Version, str]]()
    for link, python in _SOURCES.findall(output):
        file = link.partition("#")[0].rpartition("/")[2]
        try:
            package, version = parse_sdist_filename(unquote(file))
            fits = SpecifierSet(wish).contains(version) and _runs_on(node, python)
        except (InvalidSdistFilename, InvalidSpecifier):
            continue
        if package == name and fits:
            found.append((version, link))
    if not found:
        return None
    url, _, fragment = max(found)[1].partition("#")
    return SourceLine(name, "", url, fragment, "")


def _runs_on(node: NodePlatform, required: str) -> bool:
    # The patch level of the nodes is unknown.
    versions = [f"{node.python}.{patch}" for patch in range(30)]
    return any(True for _ in SpecifierSet(required).filter(versions))


def _allowed() -> frozenset[str]:
    """Return the names of the packages that the user allows to be built; ``:all:`` stands for
    all.
    """
    names = os.environ.get("PIP_NO_BINARY", "").replace(",", " ").split()
    return frozenset(name if name == ":all:" else canonicalize_name(name) for name in names)


def _with_absolute_path(option: str, value: str, folder: str) -> str:
    """Return a line of a requirements file in ``folder``, as it must be in another folder."""
    # Unlike Path, this takes any name.
    path = os.path.join(folder, COMMENT.sub("", value).strip(" \t=").strip("\"'"))
    # Unlike Path, this takes any name.
    is_path = option in _WITH_PATH and os.path.exists(path)
    return f"{option} {shlex.quote(path)}" if is_path else option + value


def passed_over(output: str, names: Iterable[str], chosen: Mapping[str, str]) -> dict[str, str]:
    """Return name -> version of packages of which pip chose another version than it tried first.

    output: the lines of pip. names: the packages to look at. chosen: name -> chosen version.
    """
    first: dict[str, str] = {}
    for file in map(unquote, _TRIED.findall(output)):
        with suppress(InvalidWheelFilename):
            name, version, _, _ = parse_wheel_filename(file)
            first.setdefault(name, str(version))
    tried = ((name, first.get(name)) for name in names if name in chosen)
    return {name: version for name, version in tried if version and version != chosen[name]}


def _missing(output: str) -> Iterator[tuple[str, str]]:
    """Yield (name, version specifiers) of packages for which pip found no wheel.

    pip also lists packages here of which it needs two versions: none fits their specifiers.
    """
    yield from _NO_WHEEL.findall(output)
    for listed in _NO_WHEELS.findall(output):
        for name in listed.split():
            pattern = _WANTED.format(re.sub("[-_.]+", "[-_.]+", name))
            wishes = dict.fromkeys(re.findall(pattern, output, re.IGNORECASE))
            yield name, ",".join(filter(None, wishes))
