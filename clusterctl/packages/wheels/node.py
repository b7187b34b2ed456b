"""What the nodes are to pip: their Python, architecture and glibc."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from clusterctl.spec.distributions import DEFAULT, Distribution, distribution_of
from clusterctl.state.inventory import ARCHITECTURE
from clusterctl.util.lifetime import under_subreaper

NODE_ARCH: Final = ARCHITECTURE
_PIP: Final = Path(__file__).with_name("pip_for_node.py")


@dataclass(frozen=True, slots=True)
class Said:
    """How pip ended, and all its lines."""

    rc: int
    text: str


@dataclass(frozen=True, slots=True)
class Node:
    """What wheels must fit: the Python of the job environment (``3.11``), and glibc 2.``glibc_minor``."""

    python: str
    glibc_minor: int

    @classmethod
    def of(cls, distribution: Distribution) -> Node:
        """The nodes of a cluster with that distribution."""
        return cls(distribution.python_version, distribution.glibc_minor)

    def __str__(self) -> str:
        return f"Python {self.python} on {NODE_ARCH} with glibc 2.{self.glibc_minor}"


DEFAULT_NODE: Final = Node.of(distribution_of(DEFAULT))


def pip_download(
    arguments: Sequence[str],
    node: Node,
    *,
    cwd: Path | None = None,
    heard: Callable[[str], None] = lambda _line: None,
) -> Said:
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
    return Said(pip.returncode, "".join(said))
