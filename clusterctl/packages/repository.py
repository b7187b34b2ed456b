"""What packing the OS packages of Debian's and Red Hat's families shares: settings, tools, downloads."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import requests

from clusterctl.errors import MachineError, UsageError
from clusterctl.packages.os_packages import PLAIN, Upstream
from clusterctl.spec.common import Software
from clusterctl.spec.distributions import Distribution
from clusterctl.util import process
from clusterctl.util.assets import table

_ARCHIVES: Final = Path(__file__).with_name("data") / "archives.toml"


def read_own(path: Path) -> str:
    """A file of the user's that names repositories.

    Raises:
        UsageError: it can't be read.
    """
    try:
        return path.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        why = getattr(exc, "strerror", None) or str(exc)
        fix = "name a file as in /etc/apt/sources.list.d or /etc/yum.repos.d"
        raise not_repositories(path, "can't be read", why, fix) from exc


def not_repositories(path: Path, what: str, why: str, fix: str) -> UsageError:
    """The error for a file of the user's that does not name repositories."""
    return UsageError(f"the file of repositories {what}", where=str(path), why=why, fix=fix)


@dataclass(frozen=True, slots=True)
class RepositoryRequest:
    """What to pack for, and the folder that keeps downloads.

    ``called``: the distribution's name in messages, where that is another.

    ``archive`` names the repositories to take packages from, instead of the distribution's public ones, to
    which ``software`` may add OpenHPC's and NVIDIA's. ``upstream``: packages that no repository has.
    """

    distribution: Distribution
    folder: Path
    archive: Path | None = None
    software: Software = PLAIN
    upstream: tuple[Upstream, ...] = ()
    called: str = ""

    @property
    def title(self) -> str:
        """What to call the distribution."""
        return self.called or self.distribution.release

    @property
    def sources(self) -> tuple[Mapping[str, Any], ...]:
        """Where packages come from, as the table says it: the distribution's, and what the software adds.

        Raises:
            UsageError: the distribution is not in the table.
        """
        known = table(_ARCHIVES, dict[str, dict[str, Any]])
        if (archive := known.get(self.distribution.release)) is None:
            raise UsageError(
                f"no archive of packages is known for {self.title}",
                fix=f"bundles can be made for {', '.join(known)}",
            )
        added = {"openhpc": self.software.slurm == "openhpc", "nvidia": self.software.nvidia.installs}
        return (archive, *(archive[name] for name, is_asked in added.items() if is_asked and name in archive))


@dataclass(frozen=True, slots=True)
class Repository:
    """A repository: path in it -> file or content; and (name, version, SHA-256) of each package."""

    files: Mapping[str, Path | bytes]
    versions: tuple[tuple[str, str, str], ...]


_TIMEOUT_S = 60.0
_ALWAYS = {"LC_ALL": "C.UTF-8", "DEBIAN_FRONTEND": "noninteractive"}


def need(tool: str, *, of: str, fix: str) -> None:
    """Require a tool that packing for ``of`` needs.

    Raises:
        MachineError: it is not on this machine.
    """
    if shutil.which(tool) is None:
        raise MachineError(f"packages of {of} can't be fetched here: there is no {tool}", fix=fix)


def run(argv: Sequence[str], *, what: str, fix: str) -> str:
    """Run a command and return its stdout.

    Raises:
        MachineError: it failed; with the end of its output.
    """
    done = process.run(argv, env={**os.environ, **_ALWAYS})
    if done.rc != 0:
        raise MachineError(f"{what} failed", where=argv[0], why=done.reason, fix=fix)
    return done.stdout


def download(url: str, *, what: str) -> bytes:
    """The content at a URL; `file:` is of this machine.

    Raises:
        MachineError: it can't be had.
    """
    try:
        if url.startswith("file://"):
            return Path(url.removeprefix("file://")).read_bytes()
        answer = requests.get(url, timeout=_TIMEOUT_S)
        answer.raise_for_status()
    except (OSError, requests.RequestException) as exc:
        fix = "check that this machine reaches it, then run it again: what was downloaded is kept"
        raise MachineError(f"{what} can't be had", where=url, why=str(exc), fix=fix) from exc
    return answer.content
