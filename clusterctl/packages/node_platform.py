"""The platform of the nodes' Python, which wheels and the markers of requirements must match."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from packaging.markers import default_environment
from packaging.tags import Tag, compatible_tags, cpython_tags

from clusterctl.spec.distributions import DEFAULT, Distribution, distribution_of
from clusterctl.state.inventory import ARCHITECTURE

_GLIBC_OF_UV: Final = (17, 28, *range(31, 41))


@dataclass(frozen=True, slots=True)
class NodePlatform:
    """The platform that wheels must match: Python of jobs, such as ``3.11``, and glibc
    2.``glibc_minor``.
    """

    python: str
    glibc_minor: int

    @classmethod
    def of(cls, distribution: Distribution) -> NodePlatform:
        return cls(distribution.python_version, distribution.glibc_minor)

    @property
    def platforms(self) -> tuple[str, ...]:
        """The platforms in names of wheels that the nodes can use. The best is first."""
        newest = [f"manylinux_2_{m}_{ARCHITECTURE}" for m in range(self.glibc_minor, 4, -1)]
        return (*newest, *(f"manylinux{name}_{ARCHITECTURE}" for name in ("2014", "2010", "1")))

    @property
    def tags(self) -> Iterator[Tag]:
        """The tags of wheels that the nodes can use. The best is first."""
        major, _, minor = self.python.partition(".")
        release = (int(major), int(minor))
        yield from cpython_tags(release, platforms=self.platforms)
        yield from compatible_tags(release, f"cp{major}{minor}", self.platforms)

    @property
    def markers(self) -> dict[str, str]:
        """Variable of markers -> its value on the nodes, whose patch level is unknown."""
        values = {name: str(value) for name, value in default_environment().items()}
        if values["python_version"] != self.python:
            values["implementation_version"] = values["python_full_version"] = f"{self.python}.0"
        return values | {
            "python_version": self.python,
            "implementation_name": "cpython",
            "platform_python_implementation": "CPython",
            "os_name": "posix",
            "sys_platform": "linux",
            "platform_system": "Linux",
            "platform_machine": ARCHITECTURE,
        }

    @property
    def of_uv(self) -> str:
        """The platform in uv's terms, which has no older glibc than 2.17, and only some versions."""
        known = [minor for minor in _GLIBC_OF_UV if minor <= self.glibc_minor] or [17]
        return f"{ARCHITECTURE}-manylinux_2_{max(known)}"

    def __str__(self) -> str:
        return f"Python {self.python} on {ARCHITECTURE} with glibc 2.{self.glibc_minor}"


DEFAULT_PLATFORM: Final = NodePlatform.of(distribution_of(DEFAULT))
