"""Wheels for the nodes, downloaded by pip on the user's machine: locks, and the wheelhouse of a lock.

So nodes need no internet. The wheels fit the nodes' Python, architecture and glibc, not this machine's.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name, parse_wheel_filename

from clusterctl.errors import MachineError
from clusterctl.spec.distributions import DEFAULT, Distribution, distribution_of
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.state.journal import digest
from clusterctl.state.workspace import cache_home
from clusterctl.util.disk import reason
from clusterctl.util.lifetime import temporary_folder, under_subreaper

NODE_ARCH: Final = ARCHITECTURE
_PIP: Final = Path(__file__).with_name("pip_for_node.py")


@dataclass(frozen=True, slots=True)
class PipResult:
    """How pip ended, and all its lines."""

    rc: int
    text: str


@dataclass(frozen=True, slots=True)
class NodePlatform:
    """What wheels must fit: the Python of the job environment (``3.11``), and glibc 2.``glibc_minor``."""

    python: str
    glibc_minor: int

    @classmethod
    def of(cls, distribution: Distribution) -> NodePlatform:
        """The nodes of a cluster with that distribution."""
        return cls(distribution.python_version, distribution.glibc_minor)

    def __str__(self) -> str:
        return f"Python {self.python} on {NODE_ARCH} with glibc 2.{self.glibc_minor}"


DEFAULT_PLATFORM: Final = NodePlatform.of(distribution_of(DEFAULT))


def pip_download(
    arguments: Sequence[str],
    node: NodePlatform,
    *,
    cwd: Path | None = None,
    heard: Callable[[str], None] = lambda _line: None,
) -> PipResult:
    """Run `pip download` for the nodes: wheels only, with pip's own settings. ``heard`` gets its lines."""
    platforms = [f"manylinux_2_{minor}_{NODE_ARCH}" for minor in range(node.glibc_minor, 4, -1)]
    platforms += [f"manylinux{name}_{NODE_ARCH}" for name in ("2014", "2010", "1")]
    # -P: a file of the caller's folder that is called like a module of pip's is not one.
    argv = [sys.executable, "-P", str(_PIP), node.python, NODE_ARCH]
    argv += ["download", "--no-input", "--disable-pip-version-check", "--progress-bar=off"]
    argv += ["--only-binary=:all:", "--implementation", "cp", "--python-version", node.python]
    argv += [word for platform in platforms for word in ("--platform", platform)]
    with subprocess.Popen(
        under_subreaper([*argv, *arguments]),
        cwd=cwd,
        env={**os.environ, "NO_COLOR": "1", "PYTHONUNBUFFERED": "1"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    ) as pip:
        assert pip.stdout is not None  # noqa: S101  # it is a pipe
        said = []
        try:
            for line in pip.stdout:
                said.append(line)
                heard(line.rstrip("\n"))
        except BaseException:
            pip.kill()
            raise
    return PipResult(pip.returncode, "".join(said))


_LAYOUT: Final = "environment v1"  # of the folder on the cluster; part of every key
_PIN: Final = re.compile(r"^([A-Za-z0-9][A-Za-z0-9._-]*)==([^\s;\\]+)", re.MULTILINE)
_LINE: Final = re.compile(r"(\S+)==(\S+) --hash=sha256:([0-9a-f]{64})  # (\S+\.whl)")


@dataclass(frozen=True, slots=True)
class Wheel:
    """One wheel: the package's normalized name, its version, the file's name and hash."""

    name: str
    version: str
    sha256: str
    file: str

    @classmethod
    def of(cls, file: str, sha256: str) -> Wheel:
        """The wheel of a file's name."""
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
        return "".join(f"{line}\n" for line in (f"# Python {self.node.python}, {NODE_ARCH}", *lines))

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
    return dict(_pins(lock.read_text()))


def _pins(text: str) -> Iterator[tuple[str, str]]:
    for found in _PIN.finditer(text):
        yield canonicalize_name(found[1]), found[2]


def wheelhouse(lock: Path, node: NodePlatform = DEFAULT_PLATFORM) -> Path:
    """A folder with every wheel of a hash-locked requirements file; downloaded once.

    Raises:
        MachineError: the package index is out of reach or has no wheel for the nodes, or there is no room
            or no home to keep them in.
    """
    return fill_wheelhouse(lock, lambda folder: _download(lock, node, folder), node)


def fill_wheelhouse(lock: Path, fill: Callable[[Path], None], node: NodePlatform = DEFAULT_PLATFORM) -> Path:
    """The wheelhouse of a lock; ``fill`` puts the wheels into a new folder where there is none yet.

    Raises:
        MachineError: there is no room or no home to keep them in; and what ``fill`` raises.
    """
    folder = _folder(lock, node)
    if folder.is_dir():
        return folder
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with temporary_folder(folder.parent) as partial:
            (partial / "wheels").mkdir()
            fill(partial / "wheels")
            _publish(partial / "wheels", folder)
    except OSError as exc:
        raise unwritable_cache(folder.parent, exc) from exc
    return folder


def has_wheelhouse(lock: Path, node: NodePlatform) -> bool:
    """Whether there is a wheelhouse of the lock already."""
    return _folder(lock, node).is_dir()


def _folder(lock: Path, node: NodePlatform) -> Path:
    return cache_home() / f"wheels-{digest(lock.read_bytes(), str(node))}"


def unwritable_cache(folder: Path, exc: OSError) -> MachineError:
    """The error for a cache that can't be written."""
    return MachineError(
        "the cache of downloads can't be written",
        where=str(folder),
        why=reason(exc, folder),
        fix="make it writable, or set XDG_CACHE_HOME to a folder that is",
    )


def _download(lock: Path, node: NodePlatform, folder: Path) -> None:
    arguments = ["--quiet", "--require-hashes", "--no-deps"]
    said = pip_download([*arguments, "--requirement", str(lock), "--dest", str(folder)], node)
    if said.rc != 0:
        raise MachineError(
            "the Python packages of the job environment could not be downloaded",
            where=str(lock),
            why=said.text.strip()[-1500:],
            fix="check that the package index can be reached (pip's own settings apply), then run it again",
        )


def _publish(complete: Path, folder: Path) -> None:
    try:
        complete.rename(folder)
    except OSError:
        if not folder.is_dir():  # else another clusterctl was faster, with the same wheels
            raise


def wheel_path(wheel: Wheel) -> Path:
    """Where a wheel of a lock lies in the cache."""
    return cache_home() / "python" / "wheels" / wheel.sha256 / wheel.file
