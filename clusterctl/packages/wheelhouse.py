"""Wheels for the nodes, downloaded by pip on the user's machine, so nodes need no internet access.

A lock lists wheels with their hashes; the wheelhouse of a lock is the folder with these wheels.
"""

from __future__ import annotations

import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from packaging.markers import Marker
from packaging.utils import canonicalize_name, parse_wheel_filename
from packaging.version import Version

from clusterctl.errors import ClusterctlError, MachineError, Notice, UsageError
from clusterctl.packages.accelerators import Builds, CudaBuildError, cpu_index
from clusterctl.packages.index_failures import index_error, refusal
from clusterctl.packages.node_platform import DEFAULT_PLATFORM, NodePlatform
from clusterctl.packages.project_files import PackageList
from clusterctl.packages.requirement_files import contents_of
from clusterctl.packages.source_archives import SourceArchives, passed_over
from clusterctl.packages.source_builds import ClusterBuilder
from clusterctl.packages.sources import SourceLine
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.assets import digest, file_sha256
from clusterctl.util.disk import write_error_reason
from clusterctl.util.numbers import counted
from clusterctl.util.process import Result, run_with_lines, temporary_folder
from clusterctl.util.progress import SILENT, LineReporter

_PIP: Final = Path(__file__).with_name("pip_for_node.py")


@dataclass
class Pip:
    """Runs `pip download` for the nodes, for wheels only.

    report: called with each message for the user. heard: called with each line of pip's output.
    """

    node: NodePlatform
    report: LineReporter = SILENT.note
    heard: LineReporter = SILENT.note

    def download(
        self, arguments: Sequence[str], *, cwd: Path | None = None, builds: Builds | None = None
    ) -> Result:
        """Run `pip download`. With ``builds``, stop pip if it chooses a CUDA build for nodes
        without GPUs.
        """
        node = self.node
        # -P keeps files in the caller's folder from shadowing modules of pip.
        argv = [sys.executable, "-P", str(_PIP), json.dumps(node.markers)]
        argv += ["download", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
        argv += ["--only-binary=:all:", "--implementation", "cp", "--python-version", node.python]
        argv += [word for platform in node.platforms for word in ("--platform", platform)]

        def hear(line: str) -> None:
            # pip tells them for our own use; see pip_for_node.py.
            if not line.lstrip().startswith("Skipping link: No sources"):
                self.heard(line)
            if builds is not None:
                builds.read_line(line)

        # A stopped pip leaves its temporary files.
        with temporary_folder() as folder:
            env = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
            return run_with_lines([*argv, *arguments], hear, env=env, cwd=cwd)


_CACHE: Final = "python"
# Version of the environment's layout on the cluster. It is part of every key.
_LAYOUT: Final = "environment v1"
_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
_LINE: Final = re.compile(
    r"(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})  # ([^\s/]+\.whl)(?: from (\S+))?"
)


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel: the package's normalized name and version, and its file with SHA-256.

    origin: the sources of which the cluster has built it: a URL, of a repository with its commit.
    "": an index had the wheel.
    """

    name: str
    version: str
    sha256: str
    file: str
    origin: str = ""

    @classmethod
    def of(cls, file: str, sha256: str, origin: str = "") -> Wheel:
        name, version, _, _ = parse_wheel_filename(file)
        return cls(name, str(version), sha256, file, origin)

    def __str__(self) -> str:
        origin = f" from {self.origin}" if self.origin else ""
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}  # {self.file}{origin}"


@dataclass(frozen=True, slots=True)
class Lock:
    """The wheels that requirements need besides the packages of all jobs, ``base`` (name ->
    version).

    python: path of the Python on the cluster that an environment without a base uses. "": the
        environment has a base.
    """

    wheels: tuple[Wheel, ...]
    base: Mapping[str, str]
    node: NodePlatform = DEFAULT_PLATFORM
    python: str = ""

    @property
    def text(self) -> str:
        """The lock as a requirements file with hashes. The same wheels give the same text."""
        lines = sorted(map(str, self.wheels))
        return "".join(
            f"{line}\n" for line in (f"# Python {self.node.python}, {ARCHITECTURE}", *lines)
        )

    @property
    def key(self) -> str:
        """The name of the Python environment's folder on a cluster: a hash of the wheels, ``base``
        and ``python``.
        """
        base = [f"{name}=={version}" for name, version in self.base.items()]
        return digest(_LAYOUT, self.text, *base, *([self.python] if self.python else []))

    @classmethod
    def read(
        cls, text: str, base: Mapping[str, str], node: NodePlatform = DEFAULT_PLATFORM
    ) -> Lock:
        """Parse a text from ``Lock.text``. Lines that do not list a wheel are ignored."""
        return cls(tuple(Wheel(*match.groups("")) for match in _LINE.finditer(text)), base, node)


def pins(lock: Path) -> dict[str, str]:
    """Return the pinned versions in a requirements file: normalized name -> version."""
    return {canonicalize_name(name): version for name, version in _PIN.findall(lock.read_text())}


@contextmanager
def cache_of_downloads(name: str = "") -> Iterator[Path]:
    """Yield the cache folder or its subfolder ``name``. OSError in the `with` block becomes
    MachineError.
    """
    folder = cache_home() / name
    try:
        yield folder
    except OSError as exc:
        message = "the cache of downloads can't be written"
        cause = write_error_reason(exc, folder)
        fix = "make the folder writable, or set XDG_CACHE_HOME to a writable folder"
        raise MachineError(
            message, code="cache-unwritable", where=str(folder), why=cause, fix=fix
        ) from exc


def wheelhouse(lock: Path, node: NodePlatform = DEFAULT_PLATFORM) -> Path:
    """Return the folder with all wheels of a lock file. The wheels are downloaded only once.

    Raise a MachineError if a wheel for the nodes can't be downloaded, or the cache can't be
    written.
    """
    if not has_wheelhouse(lock, node):
        with new_wheelhouse(lock, node) as folder:
            _download_locked(lock, node, folder)
    return _folder(lock, node)


@contextmanager
def new_wheelhouse(lock: Path, node: NodePlatform) -> Iterator[Path]:
    """Yield a folder for a lock's wheels. If the `with` block succeeds, the folder becomes the
    wheelhouse.
    """
    with cache_of_downloads() as home:
        home.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as unfinished:
            wheels = unfinished / "wheels"
            wheels.mkdir()
            yield wheels
            try:
                wheels.rename(_folder(lock, node))
            except OSError:
                # Another clusterctl process may have created the same wheelhouse first.
                if not has_wheelhouse(lock, node):
                    raise


def has_wheelhouse(lock: Path, node: NodePlatform) -> bool:
    return _folder(lock, node).is_dir()


def _folder(lock: Path, node: NodePlatform) -> Path:
    return cache_home() / f"wheels-{digest(lock.read_bytes(), str(node))}"


def _download_locked(lock: Path, node: NodePlatform, folder: Path) -> None:
    arguments = ["--quiet", "--require-hashes", "--no-deps"]
    result = Pip(node).download([*arguments, "--requirement", str(lock), "--dest", str(folder)])
    if result.rc != 0:
        message = "the Python packages of the job environment could not be downloaded"
        output = result.stdout.strip()[-1500:]
        fix = (
            "check that the package index can be reached (pip's settings apply), then run the "
            "command again"
        )
        raise MachineError(
            message, code="wheels-not-downloaded", where=str(lock), why=output, fix=fix
        )


def wheel_path(wheel: Wheel) -> Path:
    return cache_home() / _CACHE / "wheels" / wheel.sha256 / wheel.file


_REASON_BEGINS: Final = re.compile(r"^(ERROR:|error:|The conflict is caused by:)", re.MULTILINE)
_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*")
_DOWNLOADED: Final = re.compile(r"^Successfully downloaded (.*)$", re.MULTILINE)
_CONFLICT: Final = "The conflict is caused by:"
_PARTY: Final = re.compile(
    r"^ +(?:The user requested \(constraint\) ([\w.-]+)|([\w.-]+)(?:\[\S*\])? \S+ depends on )",
    re.MULTILINE,
)
_LONGEST_REASON: Final = 2000
# The cause is at the end of a traceback of pip, and at the start of its other messages.
_EXCEPTION: Final = "Traceback (most recent call last)"


@dataclass(frozen=True, slots=True)
class Requirements:
    """The input for resolving requirements ``files`` with pip. ``base`` is the job environment's
    lock file.

    held: normalized name -> version to keep if possible, such as versions in the cluster's
        environment.
    gpus: whether the nodes have GPUs. None: pip chooses between CUDA and CPU builds.
    names: the files as the user knows them, for messages.
    is_locked: the files list all wheels with their hashes, so that pip has nothing to choose.
    sources: packages that must be built on the cluster.
    """

    files: tuple[Path, ...]
    base: Path
    held: Mapping[str, str] = field(default_factory=dict)
    node: NodePlatform = DEFAULT_PLATFORM
    gpus: bool | None = None
    names: str = ""
    is_locked: bool = False
    sources: tuple[SourceLine, ...] = ()

    @classmethod
    def of(
        cls,
        lists: Sequence[PackageList],
        base: Path,
        held: Mapping[str, str] | None = None,
        node: NodePlatform = DEFAULT_PLATFORM,
        gpus: bool | None = None,
    ) -> Requirements:
        """Return the input for resolving files of any format that lists packages."""
        files = tuple(one.file for one in lists)
        names = ", ".join(one.summary for one in lists)
        is_locked = all(one.is_locked for one in lists)
        sources = [line for one in lists for line in one.sources]
        environment = node.markers
        applicable = tuple(
            line for line in sources if not line.marker or Marker(line.marker).evaluate(environment)
        )
        return cls(files, base, held or {}, node, gpus, names, is_locked, applicable)

    @property
    def where(self) -> str:
        return self.names or ", ".join(map(str, self.files))

    @property
    def kept(self) -> Mapping[str, str]:
        return {} if self.is_locked else {**pins(self.base), **self.held}

    def answer(self, builder: ClusterBuilder | None = None) -> Path:
        """Return the path of the resulting lock in the cache. Its name is a hash of all inputs of
        pip.

        builder: for a lock with wheels that the cluster has built.
        """
        pips = (
            key for key in sorted(os.environ) if key.startswith("PIP_") and key != "PIP_NO_BINARY"
        )
        settings = [f"{key}={os.environ[key]}" for key in pips]
        if self.gpus is not None:
            settings += [f"gpus={self.gpus}", cpu_index()]
        if builder is not None:
            settings += [builder.key, *(source.key for source in self.sources)]
        contents = [part for file in self.files for pair in contents_of(file) for part in pair]
        key = digest(str(self.node), _constraints(self.kept), digest(*settings, "", *contents))
        return cache_home() / _CACHE / "locks" / f"{key}.txt"


def resolve(requirements: Requirements, pip: Pip, builder: ClusterBuilder | None = None) -> Lock:
    """Resolve requirements files for the nodes. The wheels are stored in the cache (see
    ``wheel_path``).

    Packages of the job environment keep their versions, unless the requirements exclude them. Then
    the lock contains another version, which jobs import instead.

    pip: for the platform of ``requirements``. builder: builds packages that have only sources.
    None: such packages are refused.

    Raises:
        UsageError: pip can't meet the requirements, or a package can't be built.
        MachineError: an index or a repository can't be read, or the cache can't be written.
        TransportError, TransferError: the connection to the cluster was lost.
    """
    with cache_of_downloads(_CACHE) as home:
        places = [requirements.answer(one) for one in (None, builder)]
        for place in places:
            if (cached := _load_lock(place, requirements)) is not None:
                return cached
        base = pins(requirements.base)
        pip.report(f"resolving {requirements.where}")
        places[0].parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as folder:
            found = _download(requirements, folder, pip, builder)
            wheels = [_move_to_cache(path, origin) for path, origin in found.items()]
            additions = tuple(wheel for wheel in wheels if base.get(wheel.name) != wheel.version)
            lock = Lock(additions, base, requirements.node)
        write_atomic(places[any(found.values())], lock.text)
    return lock


def fetch_locked(text: str, base: Path, pip: Pip) -> Lock | None:
    """Parse a lock and download its exact wheels, unless cached. Return None if it is for another
    platform.

    Raise a UsageError if an index lacks a wheel, or a MachineError if the cache can't be written.
    """
    lock = Lock.read(text, pins(base), pip.node)
    if lock.text != text:
        return None
    with cache_of_downloads(_CACHE) as home:
        missing = [wheel for wheel in lock.wheels if not wheel_path(wheel).is_file()]
        if not missing:
            return lock
        pip.report(f"downloading {counted(len(missing), 'wheel')}")
        home.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as folder:
            requirements = folder / "wanted.txt"
            target = folder / "wheels"
            requirements.write_text("".join(f"{wheel}\n" for wheel in missing))
            argv = ["--require-hashes", "--no-deps", "--requirement", str(requirements)]
            argv += ["--dest", str(target)]
            if any("+cpu" in wheel.version for wheel in missing):
                argv += ["--extra-index-url", cpu_index()]
            result = pip.download(argv, cwd=folder)
            if result.rc != 0:
                built = [wheel.name for wheel in missing if wheel.origin]
                again = "; the cluster built " + ", ".join(built) if built else ""
                again += ", so submit with --requirements to build it again" if built else ""
                raise UsageError(
                    "wheels that an earlier run used can't be downloaded",
                    code="wheels-gone",
                    why=result.stdout.strip()[-_LONGEST_REASON:],
                    fix=f"check that the package index can be reached (pip's settings apply){again}",
                )
            for path in target.glob("*.whl"):
                _move_to_cache(path)
    return lock


def cached_lock(requirements: Requirements) -> Lock | None:
    with cache_of_downloads(_CACHE):
        return _load_lock(requirements.answer(), requirements)


def store_lock(requirements: Requirements, text: str, wheels: Path) -> None:
    """Move ``wheels`` to the cache, and store a lock's text: ``resolve`` then returns this lock."""
    with cache_of_downloads(_CACHE):
        for path in wheels.glob("*.whl"):
            _move_to_cache(path)
        answer = requirements.answer()
        answer.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(answer, text)


def _load_lock(answer: Path, requirements: Requirements) -> Lock | None:
    if not answer.is_file():
        return None
    lock = Lock.read(answer.read_text(), pins(requirements.base), requirements.node)
    return lock if all(wheel_path(wheel).is_file() for wheel in lock.wheels) else None


def _download(
    requirements: Requirements, folder: Path, pip: Pip, builder: ClusterBuilder | None
) -> dict[Path, str]:
    """Download wheels. Return their paths, each with the sources of which the cluster has built it;
    "": an index has it. Keep versions of ``requirements.kept`` unless they conflict.
    """
    files = requirements.files
    kept = requirements.kept
    limits = folder / "constraints.txt"
    builds = Builds(requirements.gpus, pip.report, folder)
    contents = b"\n".join(
        text for file in files for _, text in contents_of(file, constraints=False)
    )
    text = contents.decode(errors="replace")
    builds.request_cuda(text)
    arguments = [word for file in builds.files(files) for word in ("--requirement", str(file))]
    arguments += ["--constraint", str(limits)]
    if requirements.is_locked:
        arguments.append("--no-deps")
    archives = SourceArchives.of(folder / "built", files, pip, builder)
    if requirements.sources:
        built = folder / "built.txt"
        built.write_text("".join(f"{archives.line_of(one)}\n" for one in requirements.sources))
        arguments += ["--requirement", str(built)]
    while True:
        limits.write_text(_constraints(kept))
        # Each attempt gets a new folder, because a stopped pip may leave files.
        target = Path(tempfile.mkdtemp(prefix="wheels-", dir=folder))
        argv = [*arguments, *builds.arguments, *archives.arguments, "--dest", str(target)]
        try:
            result = pip.download(argv, cwd=archives.cwd, builds=builds)
        except CudaBuildError:
            builds.use_cpu_index()
            continue
        if result.rc == 0:
            break
        if notices := archives.build_missing(result.stdout):
            pip.report("\n".join(notices))
            continue
        if not kept or _CONFLICT not in result.stdout:
            raise _unresolvable(requirements, result, archives)
        kept = _without_conflict(kept, result)
    if (refused := refusal(result.stdout, requirements.where)) is not None:
        raise refused
    chosen = sorted(target.glob("*.whl"))
    versions = {wheel.name: wheel.version for wheel in (Wheel.of(path.name, "") for path in chosen)}
    _reject_sources(requirements, result, set(versions))
    for notice in _older_versions(text, result, versions):
        pip.report(notice)
    return {path: archives.origins.get(path.name, "") for path in chosen}


def _older_versions(text: str, result: Result, chosen: Mapping[str, str]) -> Iterator[Notice]:
    """Yield a message for each package in requirements, ``text``, that pip tried in a newer
    version.
    """
    names = [canonicalize_name(match[0]) for match in map(_NAME.match, text.splitlines()) if match]
    for name, version in passed_over(result.stdout, names, chosen).items():
        kind = "the pre-release " if Version(chosen[name]).is_prerelease else ""
        reason = "which does not fit the other requirements or needs packages without wheels"
        message = f"pip chose {kind}{name} {chosen[name]} instead of {version}, {reason}"
        yield Notice("other-version-chosen", message)


def _constraints(kept: Mapping[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in sorted(kept.items()))


def _without_conflict(kept: Mapping[str, str], result: Result) -> dict[str, str]:
    """Return ``kept`` without packages that pip names in a conflict; {} if pip names no such
    package.
    """
    text = result.stdout.partition(_CONFLICT)[2]
    parties = {canonicalize_name(name or other) for name, other in _PARTY.findall(text)}
    return (
        {name: kept[name] for name in kept if name not in parties} if parties & kept.keys() else {}
    )


def _reject_sources(requirements: Requirements, result: Result, wheels: set[str]) -> None:
    names = " ".join(_DOWNLOADED.findall(result.stdout)).split()
    if missing := [name for name in names if canonicalize_name(name) not in wheels]:
        raise UsageError(
            f"pip found sources instead of wheels of: {', '.join(missing)}",
            code="no-wheel",
            where=requirements.where,
            why="nodes install only wheels, and this requirement is a folder, an archive or a "
            "repository",
            fix="name an archive as `NAME @ file:///PATH.tar.gz`, which is built on the cluster, or "
            "build a wheel (pip wheel --no-deps ...) and require that file; your script's own "
            "folder needs no requirement, because it is sent with the job",
        )


def _move_to_cache(path: Path, origin: str = "") -> Wheel:
    wheel = Wheel.of(path.name, file_sha256(path), origin)
    place = wheel_path(wheel)
    place.parent.mkdir(parents=True, exist_ok=True)
    path.replace(place)
    return wheel


def _unresolvable(
    requirements: Requirements, result: Result, archives: SourceArchives
) -> ClusterctlError:
    if archives.failures:
        return archives.error(requirements.where, requirements.node)
    if error := index_error(result.stdout, requirements.where):
        return error
    begin = _REASON_BEGINS.search(result.stdout)
    text = result.stdout[begin.start() :] if begin else result.stdout[-_LONGEST_REASON:]
    reason = text.partition("\nTo fix this")[0].strip()
    return UsageError(
        "the requirements can't be met",
        code="requirements-unmet",
        where=requirements.where,
        why="pip says: "
        f"{reason[-_LONGEST_REASON:] if _EXCEPTION in reason else reason[:_LONGEST_REASON]}",
        fix="require versions that fit together and have wheels for "
        f"{requirements.node}{archives.advice}",
    )
