"""Wheels for the nodes, downloaded by pip on the user's machine, so nodes need no internet access.

A lock lists wheels with their hashes; the wheelhouse of a lock is the folder with these wheels.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name, parse_wheel_filename

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages.accelerators import cpu_index
from clusterctl.packages.locked_packages import path_in
from clusterctl.packages.node_platform import DEFAULT_PLATFORM, NodePlatform
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.workspace import cache_home
from clusterctl.util.assets import digest, file_sha256
from clusterctl.util.disk import write_error_reason
from clusterctl.util.numbers import counted
from clusterctl.util.process import Result, run_with_lines, temporary_folder
from clusterctl.util.progress import SILENT, LineReporter

_LARGE: Final = re.compile(
    r"Downloading (?:\S*/)?([\w.]+)-([^-\s]+)-\S+\.whl \(([0-9.]+ GB|[0-9]{3,}[0-9.]* MB)\)"
)


@dataclass
class Pip:
    """Runs `pip download` for the nodes, for wheels only.

    report: called with each message for the user. heard: called with each line of output.
    """

    node: NodePlatform
    report: LineReporter = SILENT.note
    heard: LineReporter = SILENT.note

    def download(self, arguments: Sequence[str]) -> Result:
        node = self.node
        # -P keeps files in the caller's folder from shadowing modules of pip.
        argv = [sys.executable, "-P", "-m", "pip", "download", "--no-input"]
        argv += ["--disable-pip-version-check", "--progress-bar=off"]
        argv += ["--only-binary=:all:", "--implementation", "cp", "--python-version", node.python]
        argv += [word for platform in node.platforms for word in ("--platform", platform)]

        def hear(line: str) -> None:
            self.heard(line)
            if large := _LARGE.search(line):
                name = large[2].replace("%2B", "+")
                self.report(f"downloading {large[1]} {name}, {large[3]}")

        # A stopped pip leaves its temporary files.
        with temporary_folder() as folder:
            env = {**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1", "TMPDIR": str(folder)}
            return run_with_lines([*argv, *arguments], hear, env=env)


CACHE: Final = "python"
_LONGEST_REASON: Final = 2000
# Version of the environment's layout on the cluster. It is part of every key.
_LAYOUT: Final = "environment v1"
_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
_LINE: Final = re.compile(r"(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})  # ([^\s/]+\.whl)")


@dataclass(frozen=True, slots=True)
class Wheel:
    """A wheel: the package's normalized name and version, and its file with SHA-256."""

    name: str
    version: str
    sha256: str
    file: str

    @classmethod
    def of(cls, file: str, sha256: str) -> Wheel:
        name, version, _, _ = parse_wheel_filename(file)
        return cls(name, str(version), sha256, file)

    @classmethod
    def of_line(cls, line: str) -> Wheel:
        """Return the wheel of a line ``NAME @ URL#HASH``. Its ``sha256`` is "" if the line has another
        hash, or none.
        """
        kind, _, value = line.partition(" @ ")[2].partition("#")[2].partition("=")
        return cls.of(path_in(line).rpartition("/")[2], value if kind == "sha256" else "")

    def __str__(self) -> str:
        return f"{self.name}=={self.version} --hash=sha256:{self.sha256}  # {self.file}"


@dataclass(frozen=True, slots=True)
class WheelLock:
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
    ) -> WheelLock:
        """Parse a text from ``WheelLock.text``. Lines that do not list a wheel are ignored."""
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
            message, code="file-unwritable", about="cache", where=str(folder), why=cause, fix=fix
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
        raise not_downloaded(str(lock), result.stdout)


def not_downloaded(where: str, output: str) -> MachineError:
    """Return the error that pip could not download wheels. where: the list of packages."""
    return MachineError(
        "wheels can't be downloaded",
        code="transfer-failed",
        about="wheels",
        where=where,
        why=f"pip says: {output.strip()[-_LONGEST_REASON:]}",
        fix="check that the package index can be reached (pip's settings apply), then run the "
        "command again",
    )


def wheel_path(wheel: Wheel) -> Path:
    return cache_home() / CACHE / "wheels" / wheel.sha256 / wheel.file


def fetch_locked(text: str, base: Path, pip: Pip) -> WheelLock | None:
    """Parse a lock and download its exact wheels, unless cached. Return None if it is for another
    platform.

    Raise a UsageError if an index lacks a wheel, or a MachineError if the cache can't be written.
    """
    lock = WheelLock.read(text, pins(base), pip.node)
    if lock.text != text:
        return None
    with cache_of_downloads(CACHE) as home:
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
            result = pip.download(argv)
            if result.rc != 0:
                raise UsageError(
                    "wheels that an earlier run used can't be downloaded",
                    code="packages-unmet",
                    about="wheels-gone",
                    why=result.stdout.strip()[-_LONGEST_REASON:],
                    fix="check that the package index can be reached (pip's settings apply); wheels "
                    "that were built of sources are built again by a submission with --requirements",
                )
            for path in target.glob("*.whl"):
                move_to_cache(path)
    return lock


def move_to_cache(path: Path) -> Wheel:
    wheel = Wheel.of(path.name, file_sha256(path))
    place = wheel_path(wheel)
    place.parent.mkdir(parents=True, exist_ok=True)
    path.replace(place)
    return wheel
