"""Wheels of packages that have only sources, built once on a cluster's controller or login host, with
the compiler there. The built wheel is brought to this machine, and is then like one of an index.
"""

from __future__ import annotations

import re
import tarfile
import textwrap
import tomllib
import zipfile
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from packaging.utils import canonicalize_name

from clusterctl.errors import ClusterctlError, TransportError, UsageError
from clusterctl.packages.index_failures import index_error
from clusterctl.packages.node_platform import NodePlatform
from clusterctl.packages.sources import Source
from clusterctl.state.workspace import cache_home
from clusterctl.transport.base import Transport, split_lines
from clusterctl.transport.get import fetch
from clusterctl.transport.put import Upload
from clusterctl.util.assets import digest
from clusterctl.util.process import Result, temporary_folder
from clusterctl.util.progress import SILENT, LineReporter

_BUILD: Final = Path(__file__).with_name("remote_wheel.sh").read_text(encoding="utf-8")
# Longest silence of a build.
_SILENCE_S: Final = 3600.0
# What pip builds with if a package names nothing (PEP 518).
_DEFAULT_NEEDS: Final = ("setuptools>=40.8.0", "wheel")
# A build tells the packages that it needs one after the other.
_MOST_ATTEMPTS: Final = 8
_LACKING: Final = re.compile(
    r"ERROR: No matching distribution found for ([\w.-]+)(?:\[[^\]]*\])?([^\s(;]*)"
)
_OUTPUT: Final = re.compile(r"\[\d+ lines? of output\]\n(.*?)\n *\[end of output\]", re.DOTALL)
_NO_PROJECT: Final = "does not appear to be a Python project"
# The calls of the program that called the compiler.
_FRAMES: Final = re.compile(r"^Traceback \(most recent call last\):\n(?:[ \t].*\n)+", re.MULTILINE)
_SHOWN_LINES: Final = 15
_LONGEST_REASON: Final = 1000
_LONGEST_LINE: Final = 200


class Downloader(Protocol):
    """pip, which downloads wheels for the nodes."""

    @property
    def node(self) -> NodePlatform: ...

    def download(self, arguments: Sequence[str], *, cwd: Path | None = None) -> Result: ...


@dataclass(frozen=True, slots=True)
class Index:
    """Where a build's own packages come from: ``pip``, lines of a requirements file with the user's
    indexes, and the folder that relative paths in them start at.
    """

    pip: Downloader
    options: Sequence[str]
    cwd: Path

    def wheels(self, name: str, wanted: Sequence[str], folder: Path) -> list[Path]:
        """Download the wheels that the build of a package needs to a new folder."""
        folder.mkdir()
        file = folder / "wanted.txt"
        file.write_text("\n".join((*self.options, *wanted, "")))
        if wanted:
            argv = ["--requirement", str(file), "--dest", str(folder)]
            result = self.pip.download(argv, cwd=self.cwd)
            if result.rc:
                raise _unmet_needs(name, wanted, result.stdout)
        return sorted(folder.glob("*.whl"))


def _unmet_needs(name: str, wanted: Sequence[str], output: str) -> ClusterctlError:
    if error := index_error(output, f"the build of {name}"):
        return error
    return UsageError(
        f"{name} can't be built on the cluster",
        code="source-not-built",
        why=f"its build needs {', '.join(wanted)}; pip says: {output.strip()[-_LONGEST_REASON:]}",
        fix=f"require a version of {name} with a wheel",
    )


@dataclass(frozen=True, slots=True)
class ClusterBuilder:
    """Builds wheels on a host.

    transport: a connection to the host as the job user. base: an environment there that has pip.
    store: the folder of files on the host. place: tells apart the clusters of this machine, since
        a built wheel may need libraries of its cluster.
    modules: environment modules to load. report: called with each message for the user.
    """

    transport: Transport
    base: str
    store: str
    place: str
    modules: Sequence[str] = ()
    report: LineReporter = field(default=SILENT.note)

    @property
    def key(self) -> str:
        """What the wheels depend on besides their sources and the Python of the nodes."""
        return digest(self.place, *self.modules)

    def wheel_of(self, name: str, source: Source, index: Index) -> Path:
        """Return the wheel of a package's sources, from an earlier build or built now.

        name: of the package, for messages. index: has the wheels that the build needs.

        Raises:
            UsageError: the build fails, or what it needs can't be downloaded.
            MachineError: an index can't be read.
            TransportError, TransferError: the connection was lost.
        """
        sha256 = source.archive.parent.name
        key = digest(self.key, str(index.pip.node), sha256, source.subfolder, source.version)
        folder = cache_home() / "python" / "builds" / key
        if (wheel := next(folder.glob("*.whl"), None)) is not None:
            return wheel
        self.report(f"building {name} on {self.transport.host} from {source.origin}")
        wanted = list(_needs(source))
        with temporary_folder() as needed:
            for attempt in range(_MOST_ATTEMPTS):
                wheels = index.wheels(name, wanted, needed / str(attempt))
                built, output = self._build(source, wheels)
                if built is not None:
                    self._bring(*built, folder)
                    return next(folder.glob("*.whl"))
                more = _lacking(output, wanted)
                if not more:
                    break
                wanted += more
        raise self._not_built(name, output)

    def _build(self, source: Source, wheels: Sequence[Path]) -> tuple[tuple[str, str] | None, str]:
        """Return hash and name of the built wheel, or None; and the end of pip's output."""
        paths = Upload(self.transport).to_store([source.archive, *wheels], store=self.store)
        links = "".join(f"{path.name} {paths[path]}\n" for path in wheels)
        argv = ["bash", "-c", _BUILD, "wheel", self.base, self.store, source.archive.name]
        argv += [source.subfolder, source.version, *self.modules]
        with self.transport.converse(argv, silence_s=_SILENCE_S) as talk:
            talk.send(f"{paths[source.archive]}\n{links}\n".encode())
            error = TransportError("a build printed a line that is too long", code="line-too-long")
            received = split_lines(iter(talk.receive, b""), error)
            lines = [line.decode(errors="replace") for line in received]
            talk.finish()
        first, *others = lines or [""]
        kind, _, answer = first.partition(" ")
        sha256, _, name = answer.partition(" ")
        return ((sha256, name) if kind == "wheel" else None), "\n".join(others)

    def _bring(self, sha256: str, name: str, folder: Path) -> None:
        """Bring a wheel from the store of the host to the cache, under its name."""
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent) as unfinished:
            fetch(self.transport, [f"{self.store}/{sha256[:2]}/{sha256}"], unfinished)
            (unfinished / "done").mkdir()
            (unfinished / sha256).rename(unfinished / "done" / Path(name).name)
            try:
                (unfinished / "done").rename(folder)
            except OSError:
                # Another clusterctl may have built the same.
                if not folder.is_dir():
                    raise

    def _not_built(self, name: str, output: str) -> ClusterctlError:
        parts = _OUTPUT.findall(output)
        text = _FRAMES.sub("", textwrap.dedent(parts[-1] if parts else output)).strip()
        lines = [line[:_LONGEST_LINE] for line in text.splitlines()[-_SHOWN_LINES:]]
        if _NO_PROJECT in output:
            fix = (
                "if the package is in a folder of the sources, add #subdirectory=FOLDER to the URL"
            )
        else:
            fix = (
                "install the compiler or the headers that the build lacks by `software.packages` in "
                "the spec and `clusterctl up`, or load them with --module; or require a version "
                "with a wheel"
            )
        return UsageError(
            f"{name} can't be built on the cluster",
            code="source-not-built",
            where=self.transport.host,
            why="\n".join(lines),
            fix=fix,
        )


def _lacking(output: str, wanted: Sequence[str]) -> list[str]:
    """Return the packages that a build, by pip's output, lacks besides those that it was given."""
    given = {canonicalize_name(re.split(r"[^\w.-]", need)[0]) for need in wanted}
    lacking = _LACKING.findall(output)
    return [f"{name}{wish}" for name, wish in lacking if canonicalize_name(name) not in given]


def _needs(source: Source) -> Sequence[str]:
    """Return the packages that the sources name for their build (PEP 518)."""
    with suppress(OSError, ValueError, KeyError, tarfile.TarError, zipfile.BadZipFile):
        content = tomllib.loads(_project_file(source).decode())
        requires = content["build-system"]["requires"]
        if isinstance(requires, list) and all(isinstance(need, str) for need in requires):
            return requires
    return _DEFAULT_NEEDS


def _project_file(source: Source) -> bytes:
    """Return the content of pyproject.toml in an archive, which has a single folder at its top."""
    inner = [part for part in source.subfolder.split("/") if part]

    def is_wanted(path: str) -> bool:
        return path.removeprefix("./").split("/")[1:] == [*inner, "pyproject.toml"]

    if source.archive.suffix == ".zip":
        with zipfile.ZipFile(source.archive) as packed:
            return packed.read(next(filter(is_wanted, packed.namelist()), ""))
    with tarfile.open(source.archive) as content:
        for member in content:
            if is_wanted(member.name) and (file := content.extractfile(member)):
                return file.read()
    raise KeyError(source.subfolder)
