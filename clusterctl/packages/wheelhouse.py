"""Wheels for the nodes, downloaded by pip on the user's machine: locks, and the wheelhouse of a lock.

So nodes need no internet. The wheels fit the nodes' Python, architecture and glibc, not this machine's.
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name, parse_wheel_filename

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages.accelerators import Builds, CudaBuildError, cpu_index
from clusterctl.spec.distributions import DEFAULT, Distribution, distribution_of
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.workspace import cache_home, write_atomic
from clusterctl.util.assets import digest, file_sha256
from clusterctl.util.disk import reason
from clusterctl.util.process import Result, run_heard, temporary_folder
from clusterctl.util.progress import SILENT, LineReporter

_PIP: Final = Path(__file__).with_name("pip_for_node.py")


@dataclass(frozen=True, slots=True)
class NodePlatform:
    """What wheels must fit: the Python of the job environment (``3.11``), and glibc 2.``glibc_minor``."""

    python: str
    glibc_minor: int

    @classmethod
    def of(cls, distribution: Distribution) -> NodePlatform:
        return cls(distribution.python_version, distribution.glibc_minor)

    def __str__(self) -> str:
        return f"Python {self.python} on {ARCHITECTURE} with glibc 2.{self.glibc_minor}"


DEFAULT_PLATFORM: Final = NodePlatform.of(distribution_of(DEFAULT))


@dataclass
class Pip:
    """`pip download` for the nodes: wheels only, with pip's own settings.

    report: called with lines for the user. heard: called with each line of pip's own.
    """

    node: NodePlatform
    report: LineReporter = SILENT.note
    heard: LineReporter = SILENT.note

    def download(
        self, arguments: Sequence[str], *, cwd: Path | None = None, builds: Builds | None = None
    ) -> Result:
        """Run it. ``builds`` may end it, because pip has chosen a build that the nodes have no use for."""
        node = self.node
        platforms = [f"manylinux_2_{minor}_{ARCHITECTURE}" for minor in range(node.glibc_minor, 4, -1)]
        platforms += [f"manylinux{name}_{ARCHITECTURE}" for name in ("2014", "2010", "1")]
        # -P: a file of the caller's folder that is called like a module of pip's is not one.
        argv = [sys.executable, "-P", str(_PIP), node.python, ARCHITECTURE]
        argv += ["download", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
        argv += ["--only-binary=:all:", "--implementation", "cp", "--python-version", node.python]
        argv += [word for platform in platforms for word in ("--platform", platform)]
        env = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"}

        def hear(line: str) -> None:
            self.heard(line)
            if builds is not None:
                builds.hear(line)

        return run_heard([*argv, *arguments], hear, env=env, cwd=cwd)


_CACHE: Final = "python"  # the folder of locks and their wheels
_LAYOUT: Final = "environment v1"  # of the folder on the cluster; part of every key
_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
_LINE: Final = re.compile(r"(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})  # ([^\s/]+\.whl)")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel: the package's normalized name, its version, the file's name and hash."""

    name: str
    version: str
    sha256: str
    file: str

    @classmethod
    def of(cls, file: str, sha256: str) -> Wheel:
        name, version, _, _ = parse_wheel_filename(file)
        return cls(name, str(version), sha256, file)

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}  # {self.file}"


@dataclass(frozen=True, slots=True)
class Lock:
    """``base`` holds the versions of the job environment, which stay visible below; normalized names."""

    wheels: tuple[Wheel, ...]
    base: Mapping[str, str]
    node: NodePlatform = DEFAULT_PLATFORM

    @property
    def text(self) -> str:
        """A requirements file with hashes, the same for the same wheels."""
        lines = sorted(map(str, self.wheels))
        return "".join(f"{line}\n" for line in (f"# Python {self.node.python}, {ARCHITECTURE}", *lines))

    @property
    def key(self) -> str:
        """Names the environment on a cluster: a hash of all that is in it."""
        return digest(_LAYOUT, self.text, *(f"{name}=={version}" for name, version in self.base.items()))

    @classmethod
    def read(cls, text: str, base: Mapping[str, str], node: NodePlatform = DEFAULT_PLATFORM) -> Lock:
        """The lock of a text. Lines that are none of ours are passed over."""
        return cls(tuple(Wheel(*found.groups()) for found in _LINE.finditer(text)), base, node)


def pins(lock: Path) -> dict[str, str]:
    """Normalized name -> version, of a requirements file that pins each."""
    return {canonicalize_name(name): version for name, version in _PIN.findall(lock.read_text())}


@contextmanager
def cache_of_downloads(name: str = "") -> Iterator[Path]:
    """The cache, or a folder of it; an OSError of what reads or writes there becomes a MachineError."""
    folder = cache_home() / name
    try:
        yield folder
    except OSError as exc:
        what = "the cache of downloads can't be written"
        why = reason(exc, folder)
        fix = "make it writable, or set XDG_CACHE_HOME to a folder that is"
        raise MachineError(what, code="cache-unwritable", where=str(folder), why=why, fix=fix) from exc


def wheelhouse(lock: Path, node: NodePlatform = DEFAULT_PLATFORM) -> Path:
    """A folder with every wheel of a hash-locked requirements file; downloaded once.

    Raises:
        MachineError: the package index is out of reach or has no wheel for the nodes, or there is no room
            or no home to keep them in.
    """
    if not has_wheelhouse(lock, node):
        with new_wheelhouse(lock, node) as folder:
            _download_locked(lock, node, folder)
    return _folder(lock, node)


@contextmanager
def new_wheelhouse(lock: Path, node: NodePlatform) -> Iterator[Path]:
    """Yield a folder for the wheels of a lock, which becomes its wheelhouse unless the body raises."""
    with cache_of_downloads() as home:
        home.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as unfinished:
            wheels = unfinished / "wheels"
            wheels.mkdir()
            yield wheels
            try:
                wheels.rename(_folder(lock, node))
            except OSError:
                # Another clusterctl may have been faster, with the same wheels.
                if not has_wheelhouse(lock, node):
                    raise


def has_wheelhouse(lock: Path, node: NodePlatform) -> bool:
    return _folder(lock, node).is_dir()


def _folder(lock: Path, node: NodePlatform) -> Path:
    return cache_home() / f"wheels-{digest(lock.read_bytes(), str(node))}"


def _download_locked(lock: Path, node: NodePlatform, folder: Path) -> None:
    arguments = ["--quiet", "--require-hashes", "--no-deps"]
    said = Pip(node).download([*arguments, "--requirement", str(lock), "--dest", str(folder)])
    if said.rc != 0:
        what = "the Python packages of the job environment could not be downloaded"
        why = said.stdout.strip()[-1500:]
        fix = "check that the package index can be reached (pip's own settings apply), then run it again"
        raise MachineError(what, code="wheels-not-downloaded", where=str(lock), why=why, fix=fix)


def wheel_path(wheel: Wheel) -> Path:
    """Where a wheel of a lock lies in the cache."""
    return cache_home() / _CACHE / "wheels" / wheel.sha256 / wheel.file


_MAX_BYTES: Final = 4 << 20
_INCLUDE: Final = re.compile(r"^(-r|--requirement|-c|--constraint)(?:\s+|\s*=\s*|(?<=-[rc]))(.+)$")
_COMMENT: Final = re.compile(r"(^|\s+)#.*$")


def content_hash(files: Sequence[Path]) -> str:
    """A hash of what these files and those that they include say, wherever they lie.

    Raises:
        UsageError: one of them can't be read.
    """
    return digest(*(said for file in files for _, said in _contents(file)))


def _contents(
    file: Path, seen: frozenset[Path] = frozenset(), named_in: str = "", *, constraints: bool = True
) -> Iterator[tuple[bytes, bytes]]:
    """What is in a file and in those that it includes, each with the folder that its relative paths mean."""
    file = file.absolute()
    if file in seen:
        return
    raw = _read(file, named_in)
    yield str(file.parent).encode(errors="surrogateescape"), raw
    for number, line in _lines(raw.decode(errors="replace")):
        if found := _INCLUDE.match(line):
            name, more = found[2].strip("\"'"), seen | {file}
            if "://" not in name and (constraints or found[1] in {"-r", "--requirement"}):
                yield from _contents(file.parent / name, more, f"{file}:{number}", constraints=constraints)
        elif (wheel := _local_wheel(line, file.parent)) is not None:
            try:
                yield b"", file_sha256(wheel).encode()
            except OSError as exc:
                raise UsageError(
                    f"the wheel {wheel} can't be read",
                    code="file-unreadable",
                    where=f"{file}:{number}",
                    why=exc.strerror or str(exc),
                    fix="make it readable, or leave the line out",
                ) from exc


def _read(file: Path, named_in: str) -> bytes:
    what, fix = f"the requirements file {file}", "name a file in pip's requirements format"
    try:
        with file.open("rb") as opened:
            raw = opened.read(_MAX_BYTES + 1)
    except (OSError, ValueError) as exc:  # ValueError: a null byte
        why = getattr(exc, "strerror", None) or str(exc)
        raise UsageError(
            f"{what} can't be read", code="file-unreadable", where=named_in, why=why, fix=fix
        ) from exc
    if len(raw) > _MAX_BYTES:
        raise UsageError(
            f"{what} is larger than {_MAX_BYTES >> 20} MiB", code="file-too-large", where=named_in, fix=fix
        )
    return raw


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Logical lines without comments, each with the number of its first line."""
    joined, start = "", 0
    for number, line in enumerate(text.splitlines(), start=1):
        start = start if joined else number
        joined += _COMMENT.sub("", line)
        if joined.endswith("\\"):
            joined = joined[:-1]
            continue
        if joined.strip():
            yield start, joined.strip()
        joined = ""
    if joined.strip():
        yield start, joined.strip()


def _local_wheel(line: str, folder: Path) -> Path | None:
    """The wheel on this machine that a line names, if it names one: it may change under its name."""
    name = re.split(r"\s*;|\s+--|\s+$", line.rpartition(" @ ")[2].strip())[0].removeprefix("file://")
    path = folder / name
    return path if name.endswith(".whl") and "://" not in name and os.path.isfile(path) else None  # noqa: PTH113


_REASON_BEGINS: Final = re.compile(r"^(ERROR:|error:|The conflict is caused by:)", re.MULTILINE)
_DOWNLOADED: Final = re.compile(r"^Successfully downloaded (.*)$", re.MULTILINE)
_CONFLICT: Final = "The conflict is caused by:"
_PARTY: Final = re.compile(
    r"^ +(?:The user requested \(constraint\) ([\w.-]+)|([\w.-]+)(?:\[\S*\])? \S+ depends on )", re.MULTILINE
)
_LONGEST_REASON: Final = 2000


@dataclass(frozen=True, slots=True)
class Requirements:
    """What is asked of pip.

    ``base`` is the lock of the job environment; ``held``, normalized name -> version, is to be kept if it can
    be, as the versions that the cluster's own requirements came to.
    """

    files: tuple[Path, ...]
    base: Path
    held: Mapping[str, str] = field(default_factory=dict)
    node: NodePlatform = DEFAULT_PLATFORM
    gpus: bool | None = None  # whether the nodes have GPUs: see accelerators.py

    @property
    def kept(self) -> Mapping[str, str]:
        return {**pins(self.base), **self.held}

    @property
    def answer(self) -> Path:
        """Where the answer to this question lies, once there is one."""
        # All that decides it, but for what pip's indexes hold: what is asked and included, the wheels on this
        # machine that it names, and pip's settings.
        settings = [f"{key}={value}" for key, value in sorted(os.environ.items()) if key.startswith("PIP_")]
        if self.gpus is not None:
            settings += [f"gpus={self.gpus}", cpu_index()]
        contents = [part for file in self.files for pair in _contents(file) for part in pair]
        key = digest(str(self.node), _constraints(self.kept), digest(*settings, "", *contents))
        return cache_home() / _CACHE / "locks" / f"{key}.txt"


def resolve(asked: Requirements, *, report: LineReporter, heard: LineReporter = SILENT.note) -> Lock:
    """The lock of requirements files, for the nodes; its wheels lie in the cache (see ``wheel_path``).

    The versions of the job environment are kept, unless the requirements rule them out: such a package is
    then in the lock, and comes first in the environment. ``heard`` gets pip's own lines.

    Raises:
        UsageError: a file can't be read, there is no such set of wheels, or no index answers; pip's reason.
        MachineError: the cache of downloads can't be written.
    """
    with cache_of_downloads(_CACHE) as home:
        answer, base = asked.answer, pins(asked.base)
        if (known := _load_lock(answer, asked)) is not None:
            return known
        report(f"resolving {', '.join(map(str, asked.files))}")
        answer.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as folder:
            wheels = _download(asked, folder, Pip(asked.node, report, heard))
            others = tuple(w for w in map(_kept, wheels) if base.get(w.name) != w.version)
            lock = Lock(others, base, asked.node)
        write_atomic(answer, lock.text)
    return lock


def locked(
    text: str,
    base: Path,
    node: NodePlatform,
    *,
    report: LineReporter,
    heard: LineReporter = SILENT.note,
) -> Lock | None:
    """The lock of this text, with the very wheels that it names; None if they are for another Python.

    Those that are not in the cache are downloaded.

    Raises:
        UsageError: no index has one of them.
        MachineError: the cache of downloads can't be written.
    """
    lock = Lock.read(text, pins(base), node)
    if lock.text != text:
        return None
    with cache_of_downloads(_CACHE) as home:
        missing = [wheel for wheel in lock.wheels if not wheel_path(wheel).is_file()]
        if not missing:
            return lock
        report(f"downloading {len(missing)} wheels")
        home.mkdir(parents=True, exist_ok=True)
        with temporary_folder(home) as folder:
            wanted, target = folder / "wanted.txt", folder / "wheels"
            wanted.write_text("".join(f"{wheel}\n" for wheel in missing))
            argv = ["--require-hashes", "--no-deps", "--requirement", str(wanted), "--dest", str(target)]
            if any("+cpu" in wheel.version for wheel in missing):
                argv += ["--extra-index-url", cpu_index()]
            said = Pip(node, report, heard).download(argv, cwd=folder)
            if said.rc != 0:
                raise UsageError(
                    "packages of the run are not to be had any more",
                    code="wheels-gone",
                    why=said.stdout.strip()[-_LONGEST_REASON:],
                    fix="check that the package index can be reached (pip's own settings apply)",
                )
            for path in target.glob("*.whl"):
                _kept(path)
    return lock


def cached_lock(asked: Requirements) -> Lock | None:
    """What ``resolve`` would say without asking pip, if it can."""
    with cache_of_downloads(_CACHE):
        return _load_lock(asked.answer, asked)


def store_lock(asked: Requirements, text: str, wheels: Path) -> None:
    """Have ``resolve`` say this without asking pip, with the wheels of a folder, which are moved."""
    with cache_of_downloads(_CACHE):
        for path in wheels.glob("*.whl"):
            _kept(path)
        asked.answer.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(asked.answer, text)


def _load_lock(answer: Path, asked: Requirements) -> Lock | None:
    if not answer.is_file():
        return None
    lock = Lock.read(answer.read_text(), pins(asked.base), asked.node)
    return lock if all(wheel_path(wheel).is_file() for wheel in lock.wheels) else None


def _download(asked: Requirements, folder: Path, pip: Pip) -> list[Path]:
    """The wheels that pip chose: with the versions to keep, but for those that the requirements rule out."""
    files, kept = asked.files, asked.kept
    limits = folder / "constraints.txt"
    builds = Builds(asked.gpus, pip.report, folder)
    contents = b"\n".join(text for file in files for _, text in _contents(file, constraints=False))
    builds.ask_for_cuda(contents.decode(errors="replace"))
    arguments = [word for file in builds.files(files) for word in ("--requirement", str(file))]
    arguments += ["--constraint", str(limits)]
    while True:
        limits.write_text(_constraints(kept))
        target = Path(tempfile.mkdtemp(prefix="wheels-", dir=folder))  # pip may be ended when it has written
        folder_of_last = files[-1].absolute().parent
        argv = [*arguments, *builds.arguments, "--dest", str(target)]
        try:
            said = pip.download(argv, cwd=folder_of_last, builds=builds)
        except CudaBuildError:
            builds.take_for_cpus()
            continue
        if said.rc == 0:
            break
        if not kept or _CONFLICT not in said.stdout:
            raise _unresolvable(asked, said)
        kept = _without_conflict(kept, said)
    found = sorted(target.glob("*.whl"))
    _refuse_sources(files, said, {Wheel.of(path.name, "").name for path in found})
    return found


def _constraints(kept: Mapping[str, str]) -> str:
    return "".join(f"{name}=={version}\n" for name, version in sorted(kept.items()))


def _without_conflict(kept: Mapping[str, str], said: Result) -> dict[str, str]:
    """Those that pip does not name as part of the conflict; none, if it names none of them."""
    text = said.stdout.partition(_CONFLICT)[2]
    parties = {canonicalize_name(name or other) for name, other in _PARTY.findall(text)}
    return {name: kept[name] for name in kept if name not in parties} if parties & kept.keys() else {}


def _refuse_sources(files: Sequence[Path], said: Result, wheels: set[str]) -> None:
    """pip downloads sources too, where a line names a folder, an archive or a repository."""
    names = " ".join(_DOWNLOADED.findall(said.stdout)).split()
    if missing := [name for name in names if canonicalize_name(name) not in wheels]:
        raise UsageError(
            f"no wheel: {', '.join(missing)}",
            code="no-wheel",
            where=", ".join(map(str, files)),
            why="nodes get wheels only; this comes from sources: a folder, an archive or a repository",
            fix="make a wheel of it (pip wheel --no-deps ...) and name that file in its place; the folder of "
            "your script needs no requirement, it travels with the job",
        )


def _kept(path: Path) -> Wheel:
    """Move a downloaded wheel to its place in the cache."""
    wheel = Wheel.of(path.name, file_sha256(path))
    place = wheel_path(wheel)
    place.parent.mkdir(parents=True, exist_ok=True)
    path.replace(place)
    return wheel


def _unresolvable(asked: Requirements, said: Result) -> UsageError:
    begin = _REASON_BEGINS.search(said.stdout)
    text = said.stdout[begin.start() :] if begin else said.stdout[-_LONGEST_REASON:]
    reason = text.partition("\nTo fix this")[0].strip()
    return UsageError(
        "the requirements can't be met",
        code="requirements-unmet",
        where=", ".join(map(str, asked.files)),
        why=f"pip says: {reason[:_LONGEST_REASON]}",
        fix=f"the nodes take wheels for {asked.node}: "
        "ask for versions that have such wheels and fit together",
    )
