"""A lock: the wheels that an environment has beside those of the job environment, each with its hash."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from packaging.utils import canonicalize_name, parse_wheel_filename

from clusterctl.packages.wheels.node import DEFAULT_NODE, NODE_ARCH, Node
from clusterctl.state.journal import digest

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
    node: Node = DEFAULT_NODE

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
    def read(cls, text: str, base: Mapping[str, str], node: Node = DEFAULT_NODE) -> Lock:
        """The lock of a text. Lines that are none of ours are passed over."""
        return cls(tuple(Wheel(*found.groups()) for found in _LINE.finditer(text)), base, node)


def pins(lock: Path) -> dict[str, str]:
    """Normalized name -> version, of a requirements file that pins each."""
    return dict(_pins(lock.read_text()))


def _pins(text: str) -> Iterator[tuple[str, str]]:
    for found in _PIN.finditer(text):
        yield canonicalize_name(found[1]), found[2]
